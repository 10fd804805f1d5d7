"""fully_shard(), FSDP2's spelling: the same units, the same bits, and its methods."""

from __future__ import annotations

import contextlib
import os
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from models import CASES, COMBINATIONS, Block, Mlp, Nested, Tied, ddp, differences, make, train
from scenarios import Stack, floats, forward_backward, loss_of, message_of, whole_grads, wrong_in
from spawn import ranks, run_ranks
from torch import nn

import zshard
from zshard import FSDP, _core, fully_shard

TRANSPORTS = ("shm", "c10d")
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


@contextlib.contextmanager
def over(transport):
    """fully_shard has no argument for the transport: the environment says it."""
    before = os.environ.get("ZSHARD_TRANSPORT")
    os.environ["ZSHARD_TRANSPORT"] = transport
    try:
        yield
    finally:
        del os.environ["ZSHARD_TRANSPORT"]
        if before is not None:
            os.environ["ZSHARD_TRANSPORT"] = before


def unit_of(module):
    return module._zshard_state.unit


def units_of(model):
    return [unit_of(module) for module in FSDP.fsdp_modules(model)]


def stack(**options):
    model = make(Stack)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# --- parity ----------------------------------------------------------------------------------------

INNER = {
    "mlp": (lambda model: [model.first, model.second], {nn.Linear}),
    "net": (lambda model: [*model.blocks[0].inner, *model.blocks], {Nested}),
    "tied": (lambda model: model.twins, {Tied.Twin}),
    "odds": (lambda model: [], None),
    "frozen": (lambda model: model.blocks, {Block}),
}


def trained(parallel, model, case):
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    losses = train(parallel, case, optimizer, dist.get_rank())
    return {**model.state_dict(), "losses": losses}


def compare(name, transport, options):
    """What differs from DDP, and what from FSDP(...)."""
    case, (inner, policy) = CASES[name], INNER[name]
    plain = make(case.make)
    expected = trained(ddp(plain, find_unused_parameters=case.unused), plain, case)
    strategy = "shard_grad_op" if options.get("reshard_after_forward") is False else "full_shard"
    with over(transport):
        other = FSDP(make(case.make), strategy=strategy, auto_wrap_policy=policy)
        model = make(case.make)
        for module in inner(model):
            fully_shard(module, **options)
        assert fully_shard(model, **options) is model
    assert {unit.strategy for unit in units_of(model)} == {strategy}
    assert f", {strategy}, {transport}" in repr(model)
    ours = trained(model, model, case)
    return differences(ours, expected), differences(ours, trained(other, other, case))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", INNER)
def test_training_has_the_bits_of_ddp_and_fsdp(pool2, name, transport, options):
    for found in pool2.run(compare, name, transport, options):
        assert found == ([], []), found


def on_a_mesh(shape, reshard, transport):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain = make(Stack)
    expected = trained(ddp(plain), plain, CASES["frozen"])
    with over(transport):
        model = stack(mesh=mesh, reshard_after_forward=reshard)
    ours = trained(model, model, CASES["frozen"])
    gaps = [
        (ours[key] - value).abs().max().item() for key, value in expected.items() if key != "losses"
    ]
    return max(gaps), model.summary().splitlines()[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_a_mesh_of_two_dimensions_is_hybrid(pool4, reshard, transport):
    for gap, head in pool4.run(on_a_mesh, (2, 2), reshard, transport):
        assert gap < 1e-6 and "2 copies, each over 2 ranks" in head


def test_a_mesh_of_one_dimension_is_sharded_over(pool2):
    for gap, head in pool2.run(on_a_mesh, (2,), None, "shm"):
        assert gap == 0.0 and "copies" not in head


SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

if sys.argv[1] == "torch":
    from torch.distributed.fsdp import (
        CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    )
else:
    from zshard import FSDP as FSDPModule
    from zshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=OffloadPolicy())
for layer in model.layers:
    fully_shard(layer, **options)
fully_shard(model, reshard_after_forward=False, **options)
assert isinstance(model, FSDPModule) and isinstance(model, Model)
layers = list(model.layers)
for this, following in zip(layers, layers[1:]):
    this.set_modules_to_forward_prefetch([following])
    following.set_modules_to_backward_prefetch([this])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
generator = torch.Generator().manual_seed(1 + dist.get_rank())
model.set_reshard_after_forward(True, recurse=False)
for step in range(6):
    model.unshard(async_op=True)
    for micro in range(2):
        model.set_is_last_backward(micro == 1)
        model.set_requires_gradient_sync(micro == 1)
        ids = torch.randint(0, 32, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.6f}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_script_of_fsdp2_trains_as_with_torch(tmp_path, transport):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    theirs = run_ranks(path, 2, "torch")
    ours = run_ranks(path, 2, "zshard", env={"ZSHARD_TRANSPORT": transport})
    for rank in range(2):
        losses = [float(line) for line in theirs[rank].stdout.split()]
        assert len(losses) == 6 and losses[5] < losses[0]
        assert [float(line) for line in ours[rank].stdout.split()] == pytest.approx(
            losses, abs=2e-6
        )


@contextlib.contextmanager
def in_backward(model, action):
    """Has the forwards within run `action(grad)` in the midst of their backwards."""
    first = model.blocks[0]
    handle = first.norm.register_forward_hook(
        lambda m, args, out: (out.register_hook(action), out)[1]
    )
    yield
    handle.remove()


# --- unshard and reshard ---------------------------------------------------------------------------


def hold(*modules):
    """unshard() of sharded modules; a plain one is whole anyway."""
    for module in modules:
        getattr(module, "unshard", lambda: None)()


def let_go(*modules):
    for module in modules:
        getattr(module, "reshard", lambda: None)()


def held_through_a_step(model, rank):
    hold(model, *model.blocks)
    forward_backward(model, rank)


def penalty_of_a_held_weight(model, rank):
    hold(model.head, model.blocks[1])
    loss = loss_of(model(floats(rank)))
    (loss + model.head.weight.square().sum() + model.blocks[1].up.weight.abs().sum()).backward()


def held_between_forward_and_backward(model, rank):
    out = model(floats(rank))
    hold(model.head, model.blocks[2])
    (loss_of(out) + model.head.weight.square().sum()).backward()


def only_outside_of_forward(model, rank):
    hold(model.blocks[0])
    sum(p.square().sum() for p in model.blocks[0].parameters()).backward()


def held_for_the_second_of_two(model, rank):
    forward_backward(model, rank)
    hold(model, model.blocks[0])
    forward_backward(model, rank)


def held_and_let_go_again(model, rank):
    hold(model, *model.blocks)
    with torch.no_grad():
        model(floats(rank))
        model(floats(rank, 1))
    let_go(model, model.blocks[1])
    forward_backward(model, rank)


def resharded_before_the_backward(model, rank):
    out = model(floats(rank))
    let_go(model, *model.blocks)
    loss_of(out).backward()


def held_in_no_sync(model, rank):
    hold(model, model.blocks[1])
    with getattr(model, "no_sync", contextlib.nullcontext)():
        forward_backward(model, rank)
    hold(model.blocks[0])
    loss_of(model(floats(rank, 1))).backward()


def held_in_a_forward(model, rank):
    """A block holds another for the time of its forward, and reads its weights."""

    def hook(module, args, output):
        hold(model.blocks[2])
        return output + model.blocks[2].down.bias

    handle = model.blocks[0].register_forward_hook(hook)
    forward_backward(model, rank)
    handle.remove()


@pytest.mark.parametrize(
    ("run", "exact"),
    [
        (held_through_a_step, True),
        (penalty_of_a_held_weight, True),
        (held_between_forward_and_backward, True),
        (only_outside_of_forward, True),
        (held_for_the_second_of_two, False),
        (held_and_let_go_again, True),
        (resharded_before_the_backward, True),
        (held_in_no_sync, True),
        (held_in_a_forward, True),
    ],
)
def test_gradients_are_right_around_unshard(pool2, run, exact):
    assert pool2.run(wrong_in, Stack, run, exact) == [{}, {}]


@ranks(3, 4)
def test_gradients_are_right_on_more_ranks(pool):
    assert pool.run(wrong_in, Stack, penalty_of_a_held_weight, False) == [{}] * pool.world


def shapes_over_time(transport):
    """Whose parameters are whole: before, held, over forwards, after; whether they had the values."""
    plain = dict(make(Stack).named_parameters())
    with over(transport):
        model = stack()
    inner = model.blocks[0]
    mine = [name for name in plain if name.startswith("blocks.0.")]

    def whole():
        now = dict(model.named_parameters())
        return [n for n in plain if now[n].shape == plain[n].shape and plain[n].dim() > 1]

    found = [whole()]
    handle = inner.unshard(async_op=True)
    handle.wait()
    assert inner.unshard() is None  # a second time
    right = all(torch.equal(dict(model.named_parameters())[n], plain[n]) for n in mine)
    found.append(whole())
    with torch.no_grad():
        model(floats(0))
        inner(floats(0))
    found.append(whole())
    inner.reshard()
    inner.reshard()
    found.append(whole())
    inner.unshard()
    forward_backward(model, 0)
    found.append(whole())
    matrices = [n for n in mine if plain[n].dim() > 1]
    return right, found == [[], matrices, matrices, [], []], _core.has_held_units()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_unit_is_whole_until_reshard_or_the_end_of_a_backward(pool2, transport):
    assert pool2.run(shapes_over_time, transport) == [(True, True, False)] * 2


def step_while_held(transport):
    """(messages of steps that would be lost, what differs from a model that was not held)."""
    with over(transport):
        model, other = stack(), stack()
    rank, messages = dist.get_rank(), []
    for cls in (zshard.AdamW, torch.optim.SGD):
        optimizers = [cls(net.parameters(), lr=0.1) for net in (model, other)]
        for net in (model, other):
            forward_backward(net, rank)
        model.blocks[1].unshard()
        messages.append(message_of(optimizers[0].step, RuntimeError))
        model.blocks[1].reshard()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return messages, differences(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_of_held_parameters_is_refused(pool2, transport):
    for messages, wrong in pool2.run(step_while_held, transport):
        assert wrong == []
        for message in messages:
            assert "'blocks.1'" in message and "reshard()" in message


def change_while_held(transport):
    with over(transport):
        model, other = stack(), stack()
    block, rank = model.blocks[0], dist.get_rank()
    block.unshard()
    with torch.no_grad():
        block.up.weight.add_(1)
    messages = [message_of(block.reshard, RuntimeError)]
    block.unshard()
    block.up.weight.data = torch.zeros_like(block.up.weight)
    messages.append(message_of(lambda: model(floats(rank)), RuntimeError))
    messages.append(message_of(block.reshard, RuntimeError))
    for net in (model, other):
        forward_backward(net, rank)
    ours, expected = whole_grads(model), whole_grads(other)
    return messages, [name for name in ours if not torch.equal(ours[name], expected[name])]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_changes_while_held_are_errors(pool2, transport):
    for messages, wrong in pool2.run(change_while_held, transport):
        assert wrong == []
        assert all("blocks.0.up.weight" in m or "up.weight" in m for m in messages), messages
        assert all("unshard()" in m or "while it was whole" in m for m in messages), messages


def wrong_moments(transport):
    """reshard() in the unit's own forward, both in a backward, and a state_dict there: errors, after
    which everything goes on."""
    with over(transport):
        model, other = stack(), stack()
    rank, messages = dist.get_rank(), []
    block = model.blocks[1]

    def note(*actions):
        for action in actions:
            messages.append(message_of(action, RuntimeError))

    inside = block.norm.register_forward_hook(lambda *_: note(block.reshard))
    with in_backward(model, lambda grad: note(block.unshard, block.reshard, model.state_dict)):
        out = model(floats(rank))
    inside.remove()
    loss_of(out).backward()
    forward_backward(other, rank)
    for number in range(3):  # what the others write has to be seen: sessions are opened as before
        for net in (model, other):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
            loss_of(net(floats(rank, number))).backward()
    return messages, differences(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_unshard_and_reshard_at_the_wrong_moment(pool2, transport):
    for (forward, unshard, reshard, save), wrong in pool2.run(wrong_moments, transport):
        assert wrong == []
        assert "'blocks.1' in its own forward" in forward
        assert "during a backward" in unshard and "during a backward" in save
        assert "'blocks.1' in a backward" in reshard


def bytes_while_held(transport):
    with over(transport):
        model = stack()
    forward_backward(model, 0)
    before = model.memory()["slots"]
    model.blocks[0].unshard()
    during = model.memory()["slots"]
    model.blocks[0].reshard()
    return before, during, model.memory()["slots"], unit_of(model.blocks[0]).bytes["full"]


def test_a_held_unit_takes_its_whole_size(pool2):
    for before, during, after, full in pool2.run(bytes_while_held, "shm"):
        assert before == after == 0 and during == full
    for before, during, after, full in pool2.run(bytes_while_held, "c10d"):
        assert before == during == after >= full  # a slot that forwards had made


def load_and_drop_while_held(transport):
    with over(transport):
        model = stack()
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.blocks[0].unshard()
    saved = differences({k: v + 1 for k, v in model.state_dict().items()}, state)
    model.load_state_dict(state)
    wrong = differences(model.state_dict(), state)
    model.blocks[0].unshard()
    held = _core.has_held_units()
    del model
    return saved, wrong, held, _core.has_held_units()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_state_dicts_and_death_of_a_held_unit(pool2, transport):
    assert pool2.run(load_and_drop_while_held, transport) == [([], [], True, False)] * 2


def raise_while_held(transport):
    """A backward that raises on all ranks lets go as well."""
    with over(transport):
        model, other = stack(), stack()
    rank = dist.get_rank()
    model.blocks[0].unshard()
    with in_backward(model, lambda grad: 1 // 0):
        out = model(floats(rank))
    with contextlib.suppress(ZeroDivisionError):
        loss_of(out).backward()
    held = _core.has_held_units()
    model.zero_grad()
    for net in (model, other):
        forward_backward(net, rank)
    ours, expected = whole_grads(model), whole_grads(other)
    return held, [name for name in ours if not torch.equal(ours[name], expected[name])]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_backward_lets_go(pool2, transport):
    assert pool2.run(raise_while_held, transport) == [(False, [])] * 2


# --- the switches ----------------------------------------------------------------------------------


def kept_after_forward(transport):
    """Which units a forward keeps whole, by name, with the switch in its positions."""
    with over(transport):
        model = stack()
    found = []
    for on, recurse in ((True, True), (False, True), (True, False), (True, True)):
        model.set_reshard_after_forward(on, recurse=recurse)
        out = model(floats(0))
        found.append({unit.name for unit in units_of(model) if unit.is_full})
        loss_of(out).backward()
    model.blocks[1].set_reshard_after_forward(False)
    out = model(floats(0))
    found.append({unit.name for unit in units_of(model) if unit.is_full})
    loss_of(out).backward()
    return found


def test_reshard_after_forward_can_be_switched(pool2):
    blocks = {f"blocks.{i}" for i in range(3)}
    for found in pool2.run(kept_after_forward, "shm"):
        assert found == [set(), {"", *blocks}, blocks, set(), {"blocks.1"}]
    for found in pool2.run(kept_after_forward, "c10d"):  # the outermost one is always kept there
        assert found == [{""}, {"", *blocks}, {"", *blocks}, {""}, {"", "blocks.1"}]


def divided(combination, factor, backwards):
    """What differs from the mean of the ranks times W / factor, beyond rounding."""
    strategy, transport = combination
    with over(transport):
        model = stack(reshard_after_forward=strategy == "full_shard")
    usual = FSDP(make(Stack), strategy=strategy, transport=transport)
    world = dist.get_world_size()
    for module in FSDP.fsdp_modules(model):
        module.set_gradient_divide_factor(factor)
    for number in range(backwards):
        for net in (model, usual):
            loss_of(net(floats(dist.get_rank(), number))).backward()
    ours, mean = whole_grads(model), whole_grads(usual)
    expected = {name: grad * (world / factor) for name, grad in mean.items()}
    exact = all(torch.equal(ours[name], expected[name]) for name in ours)
    close = all(torch.allclose(ours[n], expected[n], rtol=1e-5, atol=1e-7) for n in ours)
    return exact, close


@pytest.mark.parametrize("combination", SHARDED)
def test_gradients_are_divided_by_the_factor(pool2, combination):
    assert pool2.run(divided, combination, 1.0, 1) == [(True, True)] * 2
    assert pool2.run(divided, combination, 8, 1) == [(True, True)] * 2
    assert pool2.run(divided, combination, 2.0, 2) == [(True, True)] * 2  # the default
    assert pool2.run(divided, combination, 1.0, 3) == [(True, True)] * 2  # accumulated
    for _, close in pool2.run(divided, combination, 3.0, 3):
        assert close


def test_the_factor_on_three_ranks(pool3):
    for transport in TRANSPORTS:
        for _, close in pool3.run(divided, ("full_shard", transport), 2.0, 3):
            assert close


def divided_in_part():
    model, usual = stack(), stack()
    model.blocks[0].set_gradient_divide_factor(1.0)
    for net in (model, usual):
        forward_backward(net, dist.get_rank())
    ours, mean = whole_grads(model), whole_grads(usual)
    ratios = {name: (2.0 if name.startswith("blocks.0.") else 1.0) for name in ours}
    return [name for name in ours if not torch.equal(ours[name], mean[name] * ratios[name])]


def test_the_factor_is_of_one_unit(pool2):
    assert pool2.run(divided_in_part) == [[], []]


def names():
    """What units and parameters that were wrapped from the leaves up are called from the root."""
    model = stack()
    block, held = model.blocks[2], []
    block.up.register_forward_hook(lambda *_: held.append(block.up.weight.view(-1)))
    model(floats(0))
    facts = zshard.shard_info(block.norm.weight)
    message = message_of(lambda: held[0] + 1, RuntimeError)
    return [unit.name for unit in units_of(model)], facts["name"], facts["unit"], message


def test_units_are_named_from_the_root(pool2):
    for units, param, unit, message in pool2.run(names):
        assert units == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert (param, unit) == ("blocks.2.norm.weight", "blocks.2")
        assert "unit 'blocks.2' are sharded now" in message


# --- arguments and mistakes ------------------------------------------------------------------------


def test_a_world_of_one():
    model = stack()
    expected, ours = make(Stack), model
    assert ours.unshard() is None and model.blocks[0].unshard(async_op=True).wait() is None
    for net in (expected, ours):
        forward_backward(net, 0)
        torch.optim.SGD(net.parameters(), lr=0.1).step()  # held or not: it is whole anyway
    ours.reshard()
    assert differences(ours.state_dict(), expected.state_dict()) == []
    ours.set_gradient_divide_factor(1.0)
    with pytest.raises(NotImplementedError, match="scale the loss"):
        ours.set_gradient_divide_factor(2.0)


def ignoring():
    model = make(Mlp)
    alone = model.first.weight
    fully_shard(model, ignored_params={alone})
    return alone.shape == (13, 7) and model.third.weight.shape != (3, 29)


def test_ignored_params_are_left_alone(pool2):
    assert pool2.run(ignoring) == [True, True]


def test_policies_that_ask_for_nothing_pass():
    for casts in (None, zshard.MixedPrecisionPolicy(), torchs.MixedPrecisionPolicy()):
        for offload in (None, zshard.OffloadPolicy(), torchs.OffloadPolicy()):
            fully_shard(make(Mlp), mp_policy=casts, offload_policy=offload)


LATER = [
    ({"offload_policy": zshard.CPUOffloadPolicy()}, "offload_policy"),
    ({"offload_policy": torchs.CPUOffloadPolicy()}, "offload_policy"),
    ({"shard_placement_fn": lambda param: None}, "shard_placement_fn"),
]


@pytest.mark.parametrize(("options", "match"), LATER, ids=[match for _, match in LATER])
def test_what_is_still_to_come_is_named(options, match):
    model = make(Mlp)
    with pytest.raises(NotImplementedError, match=match):
        fully_shard(model, **options)
    assert type(model) is Mlp


class Mesh3:
    ndim, device_type = 3, "cpu"

    def get_group(self):
        raise AssertionError("its dimensions come first")


class MeshOnDevice(Mesh3):
    ndim, device_type = 1, "cuda"


MISTAKES = [
    (lambda: fully_shard(3), TypeError, "nn.Module, not int"),
    (lambda: fully_shard([make(Mlp)]), NotImplementedError, "several modules"),
    (lambda: fully_shard(nn.ModuleList([make(Mlp)])), ValueError, "ModuleList has no forward"),
    (lambda: fully_shard(fully_shard(make(Mlp))), ValueError, "already"),
    (lambda: fully_shard(make(Mlp), reshard_after_forward="yes"), TypeError, "not 'yes'"),
    (lambda: fully_shard(make(Mlp), mesh=3), TypeError, "DeviceMesh, not int"),
    (lambda: fully_shard(make(Mlp), mesh=Mesh3()), ValueError, "3 dimensions"),
    (lambda: fully_shard(make(Mlp), mesh=MeshOnDevice()), NotImplementedError, "'cuda'"),
    (lambda: fully_shard(make(Mlp), mp_policy=3), TypeError, "mixed_precision"),
    (lambda: fully_shard(make(Mlp), offload_policy=3), TypeError, "offload_policy"),
    (lambda: fully_shard(make(Mlp), ignored_params=[3]), TypeError, "ignored_params.*int"),
    (lambda: stack().set_reshard_after_forward(1), TypeError, "bool, not 1"),
    (lambda: FSDP(make(Mlp), strategy="no_shard").set_reshard_after_forward(False), ValueError, "no_shard"),
    (lambda: stack().set_gradient_divide_factor(0), ValueError, "positive"),
    (lambda: stack().set_gradient_divide_factor(float("inf")), ValueError, "positive"),
    (lambda: stack().set_gradient_divide_factor("2"), TypeError, "real number"),
    (lambda: stack().set_is_last_backward(None), TypeError, "bool"),
    (lambda: stack().set_modules_to_forward_prefetch([nn.Linear(1, 1)]), TypeError, "Linear is not"),
    (lambda: stack().set_modules_to_backward_prefetch(stack()), TypeError, "not one module"),
    (lambda: setattr(units_of(stack())[0], "strategy", "no_shard"), ValueError, "cannot become"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "kind", "match"), MISTAKES, ids=[m for *_, m in MISTAKES])
def test_mistakes_are_named(action, kind, match):
    with pytest.raises(kind, match=match):
        action()


def factor_of_replicated_units():
    model = FSDP(make(Mlp), strategy="no_shard")
    model.set_gradient_divide_factor(2.0)
    return message_of(lambda: model.set_gradient_divide_factor(1.0), NotImplementedError)


def test_the_factor_of_a_replicated_unit_is_refused(pool2):
    for message in pool2.run(factor_of_replicated_units):
        assert "not sharded" in message


def test_torchs_methods_are_there_with_their_arguments():
    """Those that this version has take what torch's take."""
    import inspect

    for name in (
        *("unshard", "reshard", "set_requires_gradient_sync", "set_reshard_after_forward"),
        *("set_is_last_backward", "set_gradient_divide_factor"),
        *("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
    ):
        ours = list(inspect.signature(getattr(FSDP, name)).parameters)[:2]
        theirs = list(inspect.signature(getattr(torchs.FSDPModule, name)).parameters)[:2]
        assert ours[:1] == theirs[:1] == ["self"] and len(ours) == len(theirs), name
