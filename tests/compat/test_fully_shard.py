"""fully_shard(), FSDP2's entry point: the same units, bit-identical results, and its switches.

unshard() and reshard() are in test_unshard.py, arguments and mistakes in test_fsdp2_names.py.
"""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import (
    CASES,
    COMBINATIONS,
    TRANSPORTS,
    Block,
    Nested,
    Tied,
    ddp,
    make,
    train,
)
from nursery import fork_ranks
from scenarios import (
    Stack,
    all_grads,
    floats,
    forward_backward,
    loss_of,
    message_of,
    over,
    stack,
    units_of,
)
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, _core, fully_shard

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


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
    """Return what differs from DDP, and what differs from FSDP(...)."""
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
def test_training_is_bit_identical_to_ddp_and_fsdp(pool2, name, transport, options):
    for found in pool2.run(compare, name, transport, options):
        assert found == ([], []), found


@on_ranks(2)
def test_list_of_modules():
    """Return what differs if the blocks are passed as a list."""
    one, other = make(Stack), stack()
    blocks = list(one.blocks)
    assert fully_shard(blocks) is blocks
    fully_shard(one)
    assert [unit.name for unit in units_of(one)] == [unit.name for unit in units_of(other)]
    case = CASES["frozen"]
    assert differences(trained(one, one, case), trained(other, other, case)) == []


@on_ranks(2)
def test_list_of_modules_with_ignored_parameters():
    """Return whether each module of a list leaves the parameters that a generator yields alone."""
    blocks = list(make(Stack).blocks)
    ignored = [list(block.parameters())[-1] for block in blocks]
    fully_shard(blocks, ignored_params=(param for param in ignored))
    alone = [_core.shard_info(param) is None for param in ignored]
    assert alone and all(alone)


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_two_dimensional_mesh_is_hybrid(pool4, reshard, transport):
    for gap, head in pool4.run(on_a_mesh, (2, 2), reshard, transport):
        assert gap < 1e-6 and "2 replicas of 2 rank(s) each" in head


def test_one_dimensional_mesh_is_sharded_over(pool2):
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
def test_fsdp2_script_trains_as_with_torch(tmp_path, transport):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    theirs = fork_ranks(path, 2, "torch", check=True)
    ours = fork_ranks(path, 2, "zshard", env={"ZSHARD_TRANSPORT": transport}, check=True)
    for rank in range(2):
        losses = [float(line) for line in theirs[rank].stdout.split()]
        assert len(losses) == 6 and losses[5] < losses[0]
        assert [float(line) for line in ours[rank].stdout.split()] == pytest.approx(
            losses, abs=2e-6
        )


# --- the switches ----------------------------------------------------------------------------------


def kept_after_forward(transport):
    """Return the names of the units that stay unsharded after a forward, for each setting of the
    switch."""
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
    """Return what differs, beyond rounding, from the mean of the ranks times W / factor."""
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
    ours, mean = all_grads(model), all_grads(usual)
    expected = {name: grad * (world / factor) for name, grad in mean.items()}
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    return differences(ours, expected)


@pytest.mark.parametrize("combination", SHARDED)
def test_gradients_are_divided_by_the_factor(pool2, combination):
    assert pool2.run(divided, combination, 1.0, 1) == [[], []]
    assert pool2.run(divided, combination, 8, 1) == [[], []]
    assert pool2.run(divided, combination, 2.0, 2) == [[], []]  # the default
    assert pool2.run(divided, combination, 1.0, 3) == [[], []]  # accumulated
    pool2.run(divided, combination, 3.0, 3)


def test_factor_on_three_ranks(pool3):
    for transport in TRANSPORTS:
        pool3.run(divided, ("full_shard", transport), 2.0, 3)


@on_ranks(2)
def test_divide_factor_applies_to_one_unit():
    model, usual = stack(), stack()
    model.blocks[0].set_gradient_divide_factor(1.0)
    for net in (model, usual):
        forward_backward(net, dist.get_rank())
    ours, mean = all_grads(model), all_grads(usual)
    ratios = {name: (2.0 if name.startswith("blocks.0.") else 1.0) for name in ours}
    assert differences(ours, {name: grad * ratios[name] for name, grad in mean.items()}) == []


def names():
    """Return the names of units and parameters that were wrapped from the leaves up."""
    model = stack()
    block, held = model.blocks[2], []
    block.up.register_forward_hook(lambda *_: held.append(block.up.weight.view(-1)))
    model(floats(0))
    facts = zshard.shard_info(block.norm.weight)
    message = message_of(lambda: held[0] + 1, RuntimeError)
    return [unit.name for unit in units_of(model)], facts["name"], facts["unit"], message


def test_unit_names_start_at_the_root(pool2):
    for units, param, unit, message in pool2.run(names):
        assert units == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert (param, unit) == ("blocks.2.norm.weight", "blocks.2")
        assert "unit 'blocks.2' are sharded: " in message
