"""The numbers of training are those of DDP, bit for bit, under every strategy and transport; and
for every way to wrap a model and set its values."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from models import (
    CASES,
    COMBINATIONS,
    TRANSPORTS,
    Block,
    Case,
    Net,
    ddp,
    make,
    wrapped,
)
from nursery import fork_ranks
from rows import all_rows
from scenario import Scenario, Training
from scenarios import WIDTH, Stack, floats, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.wrap import CustomPolicy, always_wrap_policy, enable_wrap, wrap

# With zshard's optimizers the plain side has them too; test_optim.py holds them against torch's.
OPTIMIZERS = ("torch.SGD", "zshard.SGD", "torch.AdamW", "zshard.AdamW")
# A few models are trained by all, each other one by one of each rule. zshard.AdamW leaves
# parameters that are not contiguous to torch's rule, which rounds otherwise; no shard is one.
PAIRS = [
    (name, optimizer)
    for name in CASES
    for optimizer in OPTIMIZERS
    if name in ("mlp", "net", "odds") or optimizer in ("torch.SGD", "zshard.AdamW")
    if (name, optimizer) != ("odds", "zshard.AdamW")
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
@on_ranks(2)
def test_two_ranks_are_bit_identical_to_ddp(name, optimizer):
    """Each rank starts from other values: DDP takes rank 0's, and so has FSDP to."""
    scenario = Scenario(name, optimizer=optimizer, steps=4)
    scenario.same_under(COMBINATIONS, seed=1 + dist.get_rank())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("mlp", "torch.SGD"),
        ("net", "zshard.SGD"),
        ("tied", "torch.SGD"),
        ("odds", "zshard.SGD"),
        ("conv", "torch.SGD"),
        ("mlp", "zshard.AdamW"),
        ("frozen", "torch.AdamW"),
    ],
)
@on_ranks(3, 4)
def test_more_ranks_agree_and_are_close_to_ddp(name, optimizer):
    """The mean of three numbers depends on who adds in which order: DDP's ring is another."""
    scenario = Scenario(name, optimizer=optimizer, steps=4)
    states = [scenario.but(way=way).sharded(None).state() for way in COMBINATIONS]
    for way, state in zip(COMBINATIONS, states, strict=True):
        assert_same(state, states[0], f"{name} under {way}")
    torch.testing.assert_close(states[0], scenario.ddp(None).state(), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_world_size_one_is_bit_identical_to_the_plain_module(name, optimizer):
    alone = Scenario(name, ("full_shard", None), optimizer, steps=4)
    assert_same(alone.sharded(None).state(), alone.plain(None).state(), name)


@on_ranks(4)
def test_two_process_groups():
    """Two pairs of four ranks each train their own model, as DDP over the same pair."""
    rank = dist.get_rank()
    options = {"process_group": [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]}
    scenario = Scenario("mlp", ("full_shard", None), "torch.SGD", options=options)
    plain = make(scenario.case.make, seed=1 + rank)
    theirs = Training(scenario, ddp(plain, **options), plain, rank).go(4)
    ours = scenario.sharded(4, 1 + rank)
    assert_same(ours.state(), theirs.state(), "a pair of four ranks")


# --- how it is wrapped ----------------------------------------------------------------------------


class WrapsItself(nn.Module):
    """Nested FSDP(...) in __init__, as in scripts for FSDP1; there None is the default."""

    def __init__(self):
        super().__init__()
        blocks = [FSDP(Block(WIDTH), auto_wrap_policy=None) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 2)

    forward = Stack.forward


class WrapsInContext(nn.Module):
    """enable_wrap and wrap."""

    def __init__(self):
        super().__init__()
        with enable_wrap(wrapper_cls=FSDP, auto_wrap_policy=None):
            self.blocks = nn.ModuleList(wrap(Block(WIDTH)) for _ in range(3))
            self.head = wrap(nn.Linear(WIDTH, 2))

    forward = Stack.forward


def shard_grad_op_for_blocks(module):
    return isinstance(module, Block) and {"sharding_strategy": "shard_grad_op"}


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]
# Of each: the class, the policy, the names of the units (other policies: test_wrap.py).
WRAPPED = {
    "auto": (Stack, "auto", [*BLOCKS, "head"]),
    "override": (Stack, CustomPolicy(shard_grad_op_for_blocks), BLOCKS),
    "always": (Stack, always_wrap_policy, None),
    "itself": (WrapsItself, None, BLOCKS),
    "itself, and auto": (WrapsItself, "auto", None),
    "in a context": (WrapsInContext, None, [*BLOCKS, "head"]),
    "in a context, and auto": (WrapsInContext, "auto", None),
}


@on_ranks(2)
def test_all_ways_to_wrap_match_ddp():
    case = Case(Stack, lambda generator: torch.randn(4, WIDTH, generator=generator))
    scenario = Scenario(case, optimizer="torch.SGD")
    expected = scenario.ddp(3).state()
    with all_rows() as row:
        for name, (build, policy, units) in WRAPPED.items():
            with row(name):
                model = build()
                model.load_state_dict(make(Stack).state_dict())  # whole, also of shards
                model = FSDP(model, auto_wrap_policy=policy)
                training = Training(scenario, model, model, dist.get_rank()).go(3)
                assert_same(training.state(), expected, "three steps")
                names = {module: name for name, module in model.named_modules()}
                found = [names[unit] for unit in FSDP.fsdp_modules(model)]
                assert units is None or found == units
                # and no unit for a Block: nothing is left
                assert name != "always" or len(found) == 1 + 3 * 3 + 1


# --- changes after wrapping -----------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_replaced_data_is_written_back(transport):
    """p.data = tensor of the whole shape. (Of the shard's: guard/test_replaced_data.py.)"""
    model, plain = wrapped(Stack, ("full_shard", transport)), make(Stack)
    param, other = model.head.weight, plain.head.weight
    value = torch.randn(other.shape, generator=torch.Generator().manual_seed(5))
    other.data = value.clone()
    param.data = value.clone()
    rank = dist.get_rank()
    assert_same(model(floats(rank)), plain(floats(rank)), "the output")
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_cast_after_wrapping_is_refused(transport):
    model = wrapped(Stack, ("full_shard", transport))
    model.double()
    message = message_of(lambda: model(floats(dist.get_rank()).double()), ValueError)
    assert "'blocks.0.norm.weight'" in message and "before FSDP" in message


# --- initial values -------------------------------------------------------------------------------


def unequal_net():
    """A model whose values differ among the ranks."""
    model = make(Net, seed=1 + dist.get_rank())
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    return model


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_initial_values_come_from_rank_0(combination):
    plain = unequal_net()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, plain.state_dict())
    assert differences(*everyone), "the ranks have to start from different values"
    model = FSDP(plain, strategy=combination[0], transport=combination[1])
    assert_same(model.state_dict(), everyone[0], "the initial values")


@on_ranks(2)
def test_unequal_initial_values_raise_without_sync_module_states():
    call = lambda: FSDP(unequal_net(), sync_module_states=False)  # noqa: E731
    message = message_of(call, zshard.DivergenceError)
    assert "'embed.weight'" in message and "rank 1" in message


# --- a script that imports torch's functions before its first model -------------------------------

EARLY = """
    from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

    import torch
    from zshard import FSDP

    for transport in ("shm", "c10d"):
        torch.manual_seed(0)
        model = FSDP(torch.nn.Linear(64, 64), transport=transport)
        model(torch.ones(1, 64)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        whole = (2 * 64 * 64 + 2 * 64) ** 0.5 / 2**0.5  # of ones
        norms = [get_total_norm(grads), clip_grad_norm_(model.parameters(), 1e9)]
        clip_grads_with_norm_(model.parameters(), 1.0, norms[0])
        norms.append(1.0 + whole - get_total_norm(grads))
        assert all(abs(float(norm) - whole) < 1e-3 for norm in norms), (norms, whole)
"""


def test_clipping_functions_imported_before_the_first_model(tmp_path):
    script = tmp_path / "early.py"
    script.write_text(textwrap.dedent(EARLY))
    fork_ranks(script, 2, check=True, alone=True)
