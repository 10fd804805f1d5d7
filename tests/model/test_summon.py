"""summon_full_params and apply: full parameters to read and to write."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from models import CASES, COMBINATIONS, TRANSPORTS, make, wrapped
from scenarios import WIDTH, Stack, all_grads, forward_backward, units_of, whole_grads
from spawn import on_ranks
from torch import nn

from zshard import FSDP, MixedPrecision


def whole(model):
    """Return copies of the parameters as they are now, by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen"])
@on_ranks(2)
def test_parameters_are_full_inside(name, combination):
    case = CASES[name]
    plain = make(case.make)
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy)
    with FSDP.summon_full_params(model):
        inside = whole(model)
    with model.summon_full_params(writeback=False, rank0_only=True):
        on_rank_0 = whole(model)
    assert_same(inside, whole(plain), "the parameters")
    if dist.get_rank() == 0 or combination[0] == "no_shard":
        assert_same(on_rank_0, whole(plain), "the parameters on rank 0")
    assert_same(model.state_dict(), plain.state_dict(), "the state")


def scale(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).add_(1)
            param.data.add_(param.detach())  # no version counter sees this


@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_writes_are_kept_or_discarded(combination, writeback, precision):
    plain = make(Stack)
    model = wrapped(Stack, combination, mixed_precision=precision)
    forward_backward(model, dist.get_rank())
    before = {name: grad.clone() for name, grad in whole_grads(model).items()}
    with FSDP.summon_full_params(model, writeback=writeback):
        scale(model)
    if writeback:
        scale(plain)
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    model.zero_grad()
    forward_backward(model, dist.get_rank())
    assert bool(differences(all_grads(model), before)) == writeback


# --- contexts within each other -------------------------------------------------------------------


@contextlib.contextmanager
def summoned(module, levels):
    """Contexts within each other; on entry to each, all parameters of the module are written."""
    with contextlib.ExitStack() as stack:
        for writeback in levels:
            stack.enter_context(FSDP.summon_full_params(module, writeback=writeback))
            scale(module)
        yield


def nested(combination, mixed=False):
    """Return a model; mixed: one of its blocks is not sharded."""
    (strategy, transport), model = combination, make(Stack)
    if mixed:
        FSDP(model.blocks[1], strategy="no_shard", transport=transport)
    return FSDP(model, strategy=strategy, transport=transport)


LEVELS = [
    (first, *rest)
    for first in (True, False)
    for n in (1, 2)
    for rest in itertools.product([True, False], repeat=n)
]


@pytest.mark.parametrize(
    ("combination", "mixed"),
    [*((each, False) for each in COMBINATIONS), *((each, True) for each in COMBINATIONS[:-1])],
)
@pytest.mark.sampled(2)
@on_ranks(2)
def test_an_enclosing_context_decides_what_is_kept(combination, mixed):
    for levels, fails in itertools.product(LEVELS, [False, True]):
        model, plain = nested(combination, mixed), make(Stack)
        with contextlib.suppress(ValueError), summoned(model, levels):
            if fails:
                raise ValueError("stumbled")
        for _ in itertools.takewhile(bool, levels):
            scale(plain)
        assert differences(model.state_dict(), plain.state_dict()) == [], (levels, fails)
        forward_backward(model, dist.get_rank())


@contextlib.contextmanager
def first_on_rank_0():
    """The other ranks run the body after rank 0 has."""
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_a_rank_that_is_ahead_reads_what_was_not_kept(strategy, mixed):
    model, plain = nested((strategy, "shm"), mixed), make(Stack)
    for levels in LEVELS[len(LEVELS) // 2 :]:
        with first_on_rank_0():
            with summoned(model, levels):
                pass
            assert differences(model.state_dict(), plain.state_dict()) == [], levels
        dist.barrier()


@pytest.mark.parametrize("mixed", [False, True])
@on_ranks(2)
def test_a_rank_that_is_ahead_reads_within_the_context_of_a_part(mixed):
    model, plain = nested(("full_shard", "shm"), mixed), make(Stack)
    scale(plain.blocks[1])
    with FSDP.summon_full_params(model.blocks[1]):
        with first_on_rank_0():
            with summoned(model.blocks[1], [True]):
                pass
            assert_same(model.state_dict(), plain.state_dict(), "the state")
        dist.barrier()
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_writes_after_unshard_are_kept_or_discarded(combination, writeback):
    model, plain = nested(combination), make(Stack)
    units = FSDP.fsdp_modules(model)
    for unit in units:
        unit.unshard()
    with summoned(model, [writeback]):
        pass
    if writeback:
        scale(plain)
    assert differences(whole(model), whole(plain)) == []  # still unsharded
    for unit in units:
        unit.reshard()
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    forward_backward(model, dist.get_rank())


# --- parts, forwards, errors ----------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_recurse_false_unshards_one_unit(transport):
    model = wrapped(Stack, ("full_shard", transport))
    with FSDP.summon_full_params(model.blocks[0], recurse=False):
        assert [unit.name for unit in units_of(model) if unit.is_full] == ["blocks.0"]


@on_ranks(2)
def test_forward_inside():
    """A forward inside uses the written values; in another dtype it is an error."""
    model, plain = wrapped(Stack, ("full_shard", "shm")), make(Stack)
    x = torch.ones(2, WIDTH)
    scale(plain)
    with torch.no_grad(), FSDP.summon_full_params(model):
        scale(model)
        assert_same(model(x), plain(x), "the output")
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    low = wrapped(Stack, ("full_shard", "shm"), mixed_precision=precision)
    with FSDP.summon_full_params(low), pytest.raises(RuntimeError, match="original dtype"):
        low(x)
    low(x)
    with pytest.raises(ValueError, match="writeback=False"):
        FSDP.summon_full_params(model, rank0_only=True).__enter__()


# --- apply ----------------------------------------------------------------------------------------


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.constant_(module.bias, 0.5)
    elif isinstance(module, nn.LayerNorm):
        module.weight.data.fill_(2.0)


@pytest.mark.parametrize("seed_of_rank", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(1, 2)
def test_apply_initializes_as_in_a_plain_model(combination, seed_of_rank):
    plain, model = make(Stack), wrapped(Stack, combination)
    torch.manual_seed(3)
    plain.apply(initialise)
    torch.manual_seed(3 + seed_of_rank * dist.get_rank())
    assert model.apply(initialise) is model
    assert_same(model.state_dict(), plain.state_dict(), "the state")
