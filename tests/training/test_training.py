"""Training as scripts set it up: policies, swapped weights, casts, initial values."""

from __future__ import annotations

import functools
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
    Net,
    ddp,
    differences,
    loss_of,
    make,
    wrapped,
)
from nursery import fork_ranks
from scenarios import FULL, WIDTH, Stack, floats, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

# --- how it is wrapped -----------------------------------------------------------------------------


class WrapsItself(nn.Module):
    """Nested FSDP(...) in __init__, as scripts for FSDP1 have it; there None is the default."""

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


def trained_state(build, **options):
    """(names of the units, state dict after some steps)."""
    rank = dist.get_rank()
    model = build()
    model.load_state_dict(make(Stack).state_dict())  # whole values, also where slices are already
    model = FSDP(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(floats(rank, step))).backward()
        optimizer.step()
    named = {module: name for name, module in model.named_modules()}
    return [named[unit] for unit in FSDP.fsdp_modules(model)], model.state_dict()


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]
POLICIES = {
    "auto": ("auto", [*BLOCKS, "head"]),
    "none": (None, [""]),
    "classes": ({Block, nn.LayerNorm}, None),
    "module policy": (ModuleWrapPolicy({Block}), BLOCKS),
    "custom": (CustomPolicy(lambda m: isinstance(m, Block)), BLOCKS),
    "override": (
        CustomPolicy(lambda m: isinstance(m, Block) and {"sharding_strategy": "shard_grad_op"}),
        BLOCKS,
    ),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=300), BLOCKS),
    "transformer": (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        BLOCKS,
    ),
    "lambda policy": (
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
        BLOCKS,
    ),
    "lambda": (lambda m: isinstance(m, Block), BLOCKS),
    "always": (always_wrap_policy, None),
}


def train_with_each_policy():
    """{policy: (units, what differs from DDP)}."""
    rank = dist.get_rank()
    plain = make(Stack)
    parallel = ddp(plain)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parallel(floats(rank, step))).backward()
        optimizer.step()
    found = {}
    for name, (policy, _) in POLICIES.items():
        units, state = trained_state(Stack, auto_wrap_policy=policy)
        found[name] = units, differences(state, plain.state_dict())
    for build in (WrapsItself, WrapsInContext):
        for policy in (None, "auto"):
            units, state = trained_state(build, auto_wrap_policy=policy)
            found[f"{build.__name__}, {policy}"] = units, differences(state, plain.state_dict())
    return found


def test_all_policies_match_ddp(pool2):
    for found in pool2.run(train_with_each_policy):
        assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
        for name, (_, units) in POLICIES.items():
            if units is not None:
                assert found[name][0] == units, name
        assert len(found["always"][0]) == 1 + 3 * 3 + 1  # and no unit for a Block: nothing is left
        assert found["WrapsItself, None"][0] == BLOCKS
        assert found["WrapsInContext, None"][0] == [*BLOCKS, "head"]


# --- ranks that differ in what they do, or when ------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_averaged_weights_can_be_swapped_in(combination):
    """Training with an average of the weights that is swapped in for evaluation; what differs from
    DDP in it: the evaluations' losses, or the state in the end."""
    rank, case = dist.get_rank(), CASES["net"]

    def trained(model, forward):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        averages = [p.detach().clone() for p in model.parameters()]
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(forward(case.batch(step, rank))).backward()
            optimizer.step()
            with torch.no_grad():
                for average, param in zip(averages, model.parameters(), strict=True):
                    average.lerp_(param, 0.1)
                kept = [p.detach().clone() for p in model.parameters()]
                for average, param in zip(averages, model.parameters(), strict=True):
                    param.data.copy_(average)
                losses.append(float(loss_of(forward(case.batch(50, rank)))))
                for value, param in zip(kept, model.parameters(), strict=True):
                    param.data.copy_(value)
        return losses

    plain, model = make(case.make), wrapped(case.make, combination)
    assert trained(model, model) == trained(plain, ddp(plain))
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_replaced_data_is_written_back(transport, whole):
    """p.data = tensor between steps, of the whole shape or of the slice's; what differs then."""
    model, plain = wrapped(Stack, ("full_shard", transport)), make(Stack)
    param, other = model.head.weight, plain.head.weight
    value = torch.randn(other.shape, generator=torch.Generator().manual_seed(5))
    other.data = value.clone()
    if whole:
        param.data = value.clone()
    else:
        info = zshard.shard_info(param)
        part = value.flatten()[info["begin"] : info["begin"] + info["numel"]]
        param.data = part.reshape(zshard.to_local(param).shape).clone()
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


# --- initial values -----------------------------------------------------------------------------------


def start_of(combination, sync):
    """This rank's values before and after wrapping, whole."""
    model = make(Net, seed=1 + dist.get_rank())
    model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strategy, transport = combination
    model = FSDP(model, strategy=strategy, transport=transport, sync_module_states=sync)
    return before, model.state_dict()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_initial_values_come_from_rank_0(pool2, combination):
    (first, start), (second, other) = pool2.run(start_of, combination, True)
    assert differences(first, second), "the ranks have to start from different values"
    assert differences(start, first) == differences(other, first) == []


@on_ranks(2)
def test_unequal_initial_values_raise_without_sync_module_states():
    message = message_of(lambda: start_of(FULL, False), zshard.DivergenceError)
    assert "'embed.weight'" in message and "rank 1" in message


# --- a script that imports torch's functions before its first model ------------------------------------------

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
