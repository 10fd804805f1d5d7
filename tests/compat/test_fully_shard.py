"""fully_shard(), FSDP2's entry point: the same units, bit-identical results, and its switches.

unshard() and reshard() are in test_unshard.py, arguments and mistakes in test_fsdp2_names.py.
"""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
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


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", INNER)
@on_ranks(2)
def test_training_is_bit_identical_to_ddp_and_fsdp(name, transport, options):
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
    assert_same(trained(model, model, case), expected, "the training, from DDP's,")
    assert_same(trained(other, other, case), expected, "FSDP's training")


@on_ranks(2)
def test_list_of_modules():
    one, other = make(Stack), stack()
    blocks = list(one.blocks)
    assert fully_shard(blocks) is blocks
    fully_shard(one)
    assert [unit.name for unit in units_of(one)] == [unit.name for unit in units_of(other)]
    case = CASES["frozen"]
    assert_same(trained(one, one, case), trained(other, other, case), "the training")


@on_ranks(2)
def test_list_of_modules_with_ignored_parameters():
    """Each module of the list leaves the parameters that a generator yields alone."""
    blocks = list(make(Stack).blocks)
    ignored = [list(block.parameters())[-1] for block in blocks]
    fully_shard(blocks, ignored_params=(param for param in ignored))
    assert all(_core.shard_info(param) is None for param in ignored)


def check_on_a_mesh(shape, transport, text, atol, **options):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain = make(Stack)
    expected = trained(ddp(plain), plain, CASES["frozen"])
    with over(transport):
        model = stack(mesh=mesh, **options)
    ours = trained(model, model, CASES["frozen"])
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
    assert text in model.summary().splitlines()[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(4)
def test_two_dimensional_mesh_is_hybrid(reshard, transport):
    text = "2 replicas of 2 rank(s) each"
    check_on_a_mesh((2, 2), transport, text, 1e-6, reshard_after_forward=reshard)


@on_ranks(2)
def test_one_dimensional_mesh_is_sharded_over():
    check_on_a_mesh((2,), "shm", "of 2, transport shm", 0)


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


BLOCKS = {f"blocks.{i}" for i in range(3)}
KEPT = {  # the units that stay unsharded after a forward: after each change of the switch
    "shm": [set(), {"", *BLOCKS}, BLOCKS, set(), {"blocks.1"}],
    "c10d": [{""}, {"", *BLOCKS}, {"", *BLOCKS}, {""}, {"", "blocks.1"}],  # the root, always
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_reshard_after_forward_can_be_switched(transport):
    with over(transport):
        model = stack()
    changes = [(model, on, rec) for on, rec in ((1, 1), (0, 1), (1, 0), (1, 1))]
    for (module, on, recurse), kept in zip(
        [*changes, (model.blocks[1], 0, 1)], KEPT[transport], strict=True
    ):
        module.set_reshard_after_forward(bool(on), recurse=bool(recurse))
        loss = loss_of(model(floats(0)))
        assert {unit.name for unit in units_of(model) if unit.is_full} == kept
        loss.backward()


def check_divided(combination, factor, backwards, exact=True):
    """Fail unless gradients are the mean of the ranks times W / factor; exact: bit for bit."""
    strategy, transport = combination
    with over(transport):
        model = stack(reshard_after_forward=strategy == "full_shard")
    usual = FSDP(make(Stack), strategy=strategy, transport=transport)
    for module in FSDP.fsdp_modules(model):
        module.set_gradient_divide_factor(factor)
    for number in range(backwards):
        for net in (model, usual):
            loss_of(net(floats(dist.get_rank(), number))).backward()
    times = dist.get_world_size() / factor
    ours, expected = all_grads(model), {n: g * times for n, g in all_grads(usual).items()}
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    if exact:
        assert_same(ours, expected, "the gradients")


@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_gradients_are_divided_by_the_factor(combination):
    for factor, backwards in ((1.0, 1), (8, 1), (2.0, 2), (1.0, 3)):  # 2.0 is the default
        check_divided(combination, factor, backwards)
    check_divided(combination, 3.0, 3, exact=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(3)
def test_factor_on_three_ranks(transport):
    check_divided(("full_shard", transport), 2.0, 3, exact=False)


@on_ranks(2)
def test_divide_factor_applies_to_one_unit():
    model, usual = stack(), stack()
    model.blocks[0].set_gradient_divide_factor(1.0)
    for net in (model, usual):
        forward_backward(net, dist.get_rank())
    ours, mean = all_grads(model), all_grads(usual)
    ratios = {name: (2.0 if name.startswith("blocks.0.") else 1.0) for name in ours}
    assert_same(ours, {name: grad * ratios[name] for name, grad in mean.items()}, "the gradients")


@on_ranks(2)
def test_unit_names_start_at_the_root():
    """Of units and parameters that were wrapped from the leaves up."""
    model = stack()
    block, held = model.blocks[2], []
    block.up.register_forward_hook(lambda *_: held.append(block.up.weight.view(-1)))
    model(floats(0))
    facts = zshard.shard_info(block.norm.weight)
    assert [unit.name for unit in units_of(model)] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert (facts["name"], facts["unit"]) == ("blocks.2.norm.weight", "blocks.2")
    with pytest.raises(RuntimeError, match=r"unit 'blocks\.2' are sharded: "):
        held[0] + 1
