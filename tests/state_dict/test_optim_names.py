"""An optimizer's state by parameter name: zshard.optim_state_dict, and FSDP1's functions.

The state by name equals that of torch.distributed.checkpoint for the plain model. With rank0_only
and from_rank0 only one rank has the state, and the others hold one tensor at a time.
"""

from __future__ import annotations

import copy
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, make, make_optimizer, train, wrapped
from optim_states import FULL, differ, go_on, rank, reference, trained
from scenario import sharded
from spawn import on_ranks
from torch import nn
from torch.autograd.profiler import profile
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.utils._pytree import tree_leaves

import zshard
from zshard import FSDP, load_optim_state_dict, optim_state_dict

COMBINATIONS = [FULL, ("shard_grad_op", "c10d"), ("no_shard", "shm"), ("zero1", "c10d")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize(
    ("name", "kind"), [("tied", "zshard.AdamW"), ("odds", "torch.SGD"), ("frozen", "torch.AdamW")]
)
@on_ranks(2)
def test_dict_equals_torchs_for_the_plain_model(name, kind, combination):
    plain = get_optimizer_state_dict(*reference(name, kind))
    model, optimizer = trained(name, combination, kind)
    state = optim_state_dict(model, optimizer)
    assert differ(state, plain) == []
    live = {id(value) for entries in optimizer.state.values() for value in entries.values()}
    assert not any(id(value) in live for value in tree_leaves(state)), "the optimizer's own tensors"


ZERO2, ZERO1 = ("shard_grad_op", "c10d"), ("zero1", "c10d")
WAYS = [
    (name, "zshard.AdamW", *way)
    for name in ("mlp", "tied", "odds", "dtypes", "frozen", "unused")
    for way in ((FULL, ZERO2), (ZERO1, FULL))
]
WAYS += [
    ("odds", "tests.Counting", FULL, ZERO2),
    ("odds", "tests.Counting", ("no_shard", "c10d"), FULL),
]


@pytest.mark.parametrize(("name", "kind", "source", "target"), WAYS)
@on_ranks(2, 3, 4)
def test_through_rank_0(name, kind, source, target):
    """Save on rank 0 alone, load from it into another model, and continue training both."""
    target = ("hybrid_full", 2, 2) if dist.get_world_size() == 4 else target
    model, optimizer = trained(name, source, kind)
    expected = optim_state_dict(model, optimizer)
    state = optim_state_dict(model, optimizer, rank0_only=True)
    assert differ(state, expected if rank() == 0 else {}) == []
    other = sharded(name, target, seed=3)
    other.load_state_dict(model.state_dict())
    again, theirs = make_optimizer(kind, other), make_optimizer(kind, other)
    load_optim_state_dict(other, again, expected)
    assert differ(optim_state_dict(other, again), expected) == []
    load_optim_state_dict(other, theirs, state if rank() == 0 else None, from_rank0=True)
    assert differ(optim_state_dict(other, theirs), expected) == []
    assert differ(go_on(name, other, theirs), go_on(name, model, optimizer)) == []


def peak_of(function):
    """Return the most bytes of tensors that a call holds at a time, beyond existing ones; and its
    result."""
    with profile(profile_memory=True) as seen:
        result = function()
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0), result


@on_ranks(2)
def test_other_ranks_hold_one_full_tensor():
    """Without this rank's share of the state, whose memory the profiler does not see."""
    layers = (nn.Linear(128, 128) for _ in range(12))
    model = FSDP(nn.Sequential(*layers), transport="shm")  # there the share is in shared memory
    optimizer = zshard.AdamW(model.parameters())
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    saving, state = peak_of(lambda: optim_state_dict(model, optimizer, rank0_only=True))
    loading, _ = peak_of(lambda: load_optim_state_dict(model, optimizer, state, from_rank0=True))
    sizes = [4 * math.prod(zshard.shard_info(p)["shape"]) for p in model.parameters()]
    largest, full = max(sizes), sum(sizes)
    slack = largest // 4  # scalars, messages between ranks
    assert full > 8 * largest  # otherwise the test would show nothing
    if rank() == 0:  # it has the full tensors already
        assert 2 * full <= saving <= 2 * full + slack and loading <= slack
    else:
        assert saving <= largest + slack and largest <= loading <= largest + slack


def entry(name, key, value):
    return lambda state: state["state"][name].update({key: value})


def first_group(state):
    return state["param_groups"][0]


def renamed(state):
    state["state"]["embed.wait"] = state["state"].pop("embed.weight")


def numbered(state):
    first_group(state)["params"] = list(range(10))
    state["state"] = dict(enumerate(state["state"].values()))


TWIN, EMBED = "twins.0.one.bias", "embed.weight"
SPOILS = {
    "no parameter 'embed.wait'": renamed,
    f"its param group 0 lacks parameter '{TWIN}'": lambda s: first_group(s)["params"].remove(TWIN),
    f"its param group 0 lacks parameter '{EMBED}'": lambda s: first_group(s).pop("params") and None,
    f"'exp_avg' of parameter '{TWIN}' has shape (8,), expected (9,)": entry(
        TWIN, "exp_avg", torch.zeros(8)
    ),
    f"'exp_avg_sq' of parameter '{TWIN}' has dtype torch.float64": entry(
        TWIN, "exp_avg_sq", torch.zeros(9).double()
    ),
    "twice, under two of its names": lambda s: s["state"].update(
        {"head.weight": s["state"][EMBED]}
    ),
    "use optimizer.load_state_dict()": numbered,
    "it has 2 param groups, but the optimizer has 1": lambda s: s["param_groups"].append({}),
    "it lacks 'state' or 'param_groups'": lambda state: {"model": 3},
    f"the state of '{EMBED}' is not a dict": lambda s: s["state"].update({EMBED: 1}),
}


@on_ranks(2)
def test_mismatches_are_named_on_all_ranks_and_change_nothing():
    model, optimizer = trained("tied", FULL, "zshard.AdamW")
    good = optim_state_dict(model, optimizer)
    for words, spoil in SPOILS.items():
        for from_rank0 in (False, True):
            bad = copy.deepcopy(good)
            bad = spoil(bad) or bad
            own = bad if rank() == 0 or not from_rank0 else {}
            with pytest.raises(ValueError, match=re.escape(words)):
                load_optim_state_dict(model, optimizer, own, from_rank0=from_rank0)
    assert differ(optim_state_dict(model, optimizer), good) == []


@on_ranks(2)
def test_problem_on_one_rank_is_an_error_on_all():
    """Only rank 1's dict or optimizer has a problem."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    state = optim_state_dict(model, optimizer)
    bad = copy.deepcopy(state)
    if rank() == 1:
        bad["state"]["first.bias"]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"(?s)on rank 1.*\(2,\)|\(2,\).*on rank 1"):
        load_optim_state_dict(model, optimizer, bad)
    words = r"(?s)on rank 1.*its param groups have \[5\] parameters"
    with pytest.raises(ValueError, match=words):
        load_optim_state_dict(model, split_optimizer(model), state, from_rank0=True)


def split_optimizer(model):
    """On rank 1, only one of two groups."""
    params = list(model.parameters())
    groups = [params] if rank() == 0 else [params[:2], params[2:]]
    return zshard.AdamW([{"params": group} for group in groups])


@on_ranks(2)
def test_unsendable_state_is_an_error_on_all_ranks():
    model, optimizer = trained("tied", FULL, "zshard.AdamW")
    good = optim_state_dict(model, optimizer)
    odd = copy.deepcopy(good)
    odd["param_groups"][0]["schedule"] = lambda step: step
    malformed = {**copy.deepcopy(good), "state": []}
    rows = ((None, "lacks 'state'"), (odd, "lambda"), (malformed, "no attribute 'items'"))
    for state, words in rows:
        own = state if rank() == 0 else None
        with pytest.raises(Exception, match=words) as caught:
            load_optim_state_dict(model, optimizer, own, from_rank0=True)
        assert rank() == 0 or "rank 0" in str(caught.value)
    assert differ(optim_state_dict(model, optimizer), good) == []


@on_ranks(2)
def test_any_name_of_a_tied_parameter():
    """A tied parameter by its other name; and a parameter without state."""
    model, optimizer = trained("tied", FULL, "zshard.AdamW")
    good = optim_state_dict(model, optimizer)
    state = copy.deepcopy(good)
    state["state"]["head.weight"] = state["state"].pop("embed.weight")
    names = state["param_groups"][0]["params"]
    names[names.index("embed.weight")] = "head.weight"
    load_optim_state_dict(model, optimizer, state)
    assert differ(optim_state_dict(model, optimizer), good) == []
    del state["state"]["head.weight"]
    load_optim_state_dict(model, optimizer, state)
    assert model.embed.weight not in optimizer.state


@on_ranks(2)
def test_optimizer_of_another_model_is_refused():
    model, _ = trained("mlp", FULL, "zshard.AdamW")
    other = zshard.AdamW(wrapped(CASES["mlp"].make, FULL).parameters())
    with pytest.raises(ValueError, match=r"group 0 .* parameter 'first.weight', which the model"):
        optim_state_dict(model, other)


@on_ranks(2)
def test_fsdp1_functions():
    model, optimizer = trained("mlp", FULL, "torch.AdamW")
    expected = optim_state_dict(model, optimizer)
    for more in ((), (optimizer.state_dict(),)):
        assert differ(FSDP.optim_state_dict(model, optimizer, *more), expected) == []
    other = sharded("mlp", ("full_shard", "c10d"), seed=2)
    theirs, again, direct = (torch.optim.AdamW(other.parameters()) for _ in range(3))
    theirs.load_state_dict(FSDP.optim_state_dict_to_load(other, theirs, expected))
    assert differ(optim_state_dict(other, theirs), expected) == []
    full = StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(other, full, None, FullOptimStateDictConfig(rank0_only=True)):
        state = FSDP.optim_state_dict(other, theirs)
        assert differ(state, expected if rank() == 0 else {}) == []
        again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, state))
        FSDP.optim_state_dict_to_load(other, direct, state, load_directly=True)
    for each in (again, direct):
        assert differ(each.state_dict(), theirs.state_dict()) == []
    with pytest.raises(NotImplementedError, match="is_named_optimizer=True"):
        FSDP.optim_state_dict_to_load(other, again, expected, is_named_optimizer=True)


def test_single_rank():
    model = sharded("tied", FULL)
    optimizer = zshard.AdamW(model.parameters())
    train(model, CASES["tied"], optimizer, 0, 1)
    state = optim_state_dict(model, optimizer, rank0_only=True)
    plain = make(CASES["tied"].make, seed=2)
    theirs = torch.optim.AdamW(plain.parameters())
    load_optim_state_dict(plain, theirs, state, from_rank0=True)
    assert differ(optim_state_dict(plain, theirs), state) == []
    expected = state["state"]["embed.weight"]
    loaded = {key: theirs.state[plain.embed.weight][key] for key in expected}
    assert_same(loaded, expected, "the loaded state")
