"""An optimizer's state by parameter name: zshard.optim_state_dict, and FSDP1's functions.

The state by name equals that of torch.distributed.checkpoint for the plain model. With rank0_only
and from_rank0 only one rank has it, and the others hold one tensor at a time.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from compare import assert_same
from models import CASES, make, make_optimizer, train, wrapped
from optim_states import FULL, differ, go_on, rank, reference, trained, wrap
from spawn import on_ranks, ranks
from torch import nn
from torch.autograd.profiler import profile
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.utils._pytree import tree_leaves

import zshard
from zshard import FSDP, load_optim_state_dict, optim_state_dict

COMBINATIONS = [FULL, ("shard_grad_op", "c10d"), ("no_shard", "shm"), ("zero1", "c10d")]


@pytest.mark.parametrize(
    ("name", "kind"), [("tied", "zshard.AdamW"), ("odds", "torch.SGD"), ("frozen", "torch.AdamW")]
)
@on_ranks(2)
def test_dict_equals_torchs_for_the_plain_model(name, kind):
    """Return what differs from torch's dict of a DDP model, by strategy."""
    plain = get_optimizer_state_dict(*reference(name, kind))
    found = {}
    for combination in COMBINATIONS:
        model, optimizer = trained(name, combination, kind)
        state = optim_state_dict(model, optimizer)
        found[combination] = differ(state, plain)
        live = {id(v) for entries in optimizer.state.values() for v in entries.values()}
        if any(id(value) in live for value in tree_leaves(state)):
            found[combination].append("the optimizer's own tensors")
    assert not any(found.values()), found


def through_rank_0(name, source, target, kind="zshard.AdamW"):
    """Save on rank 0 alone, load from it into another model, and continue training both."""
    model, optimizer = trained(name, source, kind)
    expected = optim_state_dict(model, optimizer)
    state = optim_state_dict(model, optimizer, rank0_only=True)
    found = differ(state, expected if rank() == 0 else {})
    other = wrap(name, target, seed=3)
    theirs = make_optimizer(kind, other)
    other.load_state_dict(model.state_dict())
    load_optim_state_dict(other, theirs, state if rank() == 0 else None, from_rank0=True)
    found += differ(optim_state_dict(other, theirs), expected)
    again = make_optimizer(kind, other)
    load_optim_state_dict(other, again, expected)
    found += differ(optim_state_dict(other, again), expected)
    return found + differ(go_on(name, other, theirs), go_on(name, model, optimizer))


@pytest.mark.parametrize("name", ["mlp", "tied", "odds", "dtypes", "frozen", "unused"])
@pytest.mark.parametrize(
    ("source", "target"), [(FULL, ("shard_grad_op", "c10d")), (("zero1", "c10d"), FULL)]
)
def test_through_rank_0(pool2, name, source, target):
    assert pool2.run(through_rank_0, name, source, target) == [[], []]


@pytest.mark.parametrize(
    ("source", "target"), [(FULL, ("shard_grad_op", "c10d")), (("no_shard", "c10d"), FULL)]
)
def test_state_under_other_keys_through_rank_0(pool2, source, target):
    assert pool2.run(through_rank_0, "odds", source, target, "tests.Counting") == [[], []]


@ranks(3, 4)
def test_more_ranks(pool):
    target = ("hybrid_full", 2, 2) if pool.world == 4 else ("no_shard", "c10d")
    assert pool.run(through_rank_0, "odds", FULL, target) == [[]] * pool.world


def peak_of(function):
    """Return the most bytes of tensors that a call holds at a time, beyond existing ones; and its
    result."""
    with profile(profile_memory=True) as seen:
        result = function()
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0), result


def memory():
    """Return the peak bytes of a save and of a load on a rank, without this rank's share of the
    state, whose memory the profiler does not see; of the largest parameter, and of all of them."""
    layers = (nn.Linear(128, 128) for _ in range(12))
    model = FSDP(nn.Sequential(*layers), transport="shm")  # there the share is in shared memory
    optimizer = zshard.AdamW(model.parameters())
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    saving, state = peak_of(lambda: optim_state_dict(model, optimizer, rank0_only=True))
    loading, _ = peak_of(lambda: load_optim_state_dict(model, optimizer, state, from_rank0=True))
    sizes = [4 * math.prod(zshard.shard_info(p)["shape"]) for p in model.parameters()]
    return saving, loading, max(sizes), sum(sizes)


def test_other_ranks_hold_one_full_tensor(pool2):
    of_rank_0, of_rank_1 = pool2.run(memory)
    saving, loading, largest, whole = of_rank_1
    slack = largest // 4  # scalars, messages between ranks
    assert whole > 8 * largest  # otherwise the test would show nothing
    assert saving <= largest + slack
    assert largest <= loading <= largest + slack
    saving, loading, *_ = of_rank_0
    assert 2 * whole <= saving <= 2 * whole + slack
    assert loading <= slack  # it has the full tensors already


def spoil_rename(state):
    state["state"]["embed.wait"] = state["state"].pop("embed.weight")


def spoil_missing(state):
    state["param_groups"][0]["params"].remove("twins.0.one.bias")


def spoil_group(state):
    del state["param_groups"][0]["params"]


def spoil_shape(state):
    state["state"]["twins.0.one.bias"]["exp_avg"] = torch.zeros(8)


def spoil_dtype(state):
    entries = state["state"]["twins.1.one.weight"]
    entries["exp_avg_sq"] = entries["exp_avg_sq"].double()


def spoil_twice(state):
    state["state"]["head.weight"] = state["state"]["embed.weight"]


def spoil_numbers(state):
    state["param_groups"][0]["params"] = list(range(10))
    state["state"] = dict(enumerate(state["state"].values()))


SPOILS = {
    "no parameter 'embed.wait'": spoil_rename,
    "its param group 0 lacks parameter 'twins.0.one.bias'": spoil_missing,
    "its param group 0 lacks parameter 'embed.weight'": spoil_group,
    "'exp_avg' of parameter 'twins.0.one.bias' has shape (8,), expected (9,)": spoil_shape,
    "'exp_avg_sq' of parameter 'twins.1.one.weight' has dtype torch.float64": spoil_dtype,
    "twice, under two of its names": spoil_twice,
    "use optimizer.load_state_dict()": spoil_numbers,
    "it has 2 param groups, but the optimizer has 1": lambda state: state["param_groups"].append(
        {}
    ),
    "it lacks 'state' or 'param_groups'": lambda state: {"model": 3},
    "the state of 'embed.weight' is not a dict": lambda s: s["state"].update({"embed.weight": 1}),
}


@on_ranks(2)
def test_mismatches_are_named_on_all_ranks_and_change_nothing():
    """Return the errors of a load of by-name dicts with one problem each; and what has changed."""
    model, optimizer = trained("tied", FULL, "zshard.AdamW")
    good = optim_state_dict(model, optimizer)
    found = {}
    for what, spoil in SPOILS.items():
        for from_rank0 in (False, True):
            bad = copy.deepcopy(good)
            bad = spoil(bad) or bad
            given = bad if rank() == 0 or not from_rank0 else {}
            try:
                load_optim_state_dict(model, optimizer, given, from_rank0=from_rank0)
            except ValueError as error:
                found[what, from_rank0] = str(error)
    changed = differ(optim_state_dict(model, optimizer), good)
    assert len(found) == 2 * len(SPOILS) and changed == []
    for (what, _), text in found.items():
        assert what in text, text


def one_rank_is_wrong():
    """Only rank 1's dict or optimizer has a problem: all ranks raise."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    state = optim_state_dict(model, optimizer)
    bad = copy.deepcopy(state)
    if rank() == 1:
        spoil = bad["state"]["first.bias"]
        spoil["exp_avg"] = torch.zeros(2)
    texts = []
    for given, other in ((bad, optimizer), (state, split_optimizer(model))):
        try:
            from_rank0 = given is state
            load_optim_state_dict(model, other, given, from_rank0=from_rank0)
        except ValueError as error:
            texts.append(str(error))
    return texts


def split_optimizer(model):
    """On rank 1, only one of two groups."""
    params = list(model.parameters())
    groups = [params] if rank() == 0 else [params[:2], params[2:]]
    return zshard.AdamW([{"params": group} for group in groups])


def test_problem_on_one_rank_is_an_error_on_all(pool2):
    first, second = pool2.run(one_rank_is_wrong)
    assert first == second and len(first) == 2
    assert "on rank 1" in first[0] and "(2,)" in first[0]
    assert "on rank 1" in first[1] and "its param groups have [5] parameters" in first[1]


def nothing_to_send():
    """Return the ranks' errors where rank 0 has no dict, or one that cannot be sent; and what has
    changed."""
    model, optimizer = trained("tied", FULL, "zshard.AdamW")
    good = optim_state_dict(model, optimizer)
    odd = copy.deepcopy(good)
    odd["param_groups"][0]["schedule"] = lambda step: step
    said = []
    for given in (None, odd):
        try:
            load_optim_state_dict(model, optimizer, given if rank() == 0 else None, from_rank0=True)
        except Exception as error:
            said.append(str(error))
    return said, differ(optim_state_dict(model, optimizer), good)


def test_unsendable_state_is_an_error_on_all_ranks(pool2):
    (first, changed), (second, changed_too) = pool2.run(nothing_to_send)
    assert changed == changed_too == []
    assert first[0] == second[0]
    assert "rank 0" in first[0]
    assert "lacks 'state' or 'param_groups'" in first[0]
    assert "lambda" in first[1]
    assert second[1] == f"rank 0: {first[1]}"


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
    found = differ(optim_state_dict(model, optimizer), good)
    del state["state"]["head.weight"]
    load_optim_state_dict(model, optimizer, state)
    assert found == []
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
    found = differ(FSDP.optim_state_dict(model, optimizer), expected)
    found += differ(FSDP.optim_state_dict(model, optimizer, optimizer.state_dict()), expected)
    other = wrap("mlp", ("full_shard", "c10d"), seed=2)
    theirs = torch.optim.AdamW(other.parameters())
    theirs.load_state_dict(FSDP.optim_state_dict_to_load(other, theirs, expected))
    found += differ(optim_state_dict(other, theirs), expected)
    full = StateDictType.FULL_STATE_DICT
    with FSDP.state_dict_type(other, full, None, FullOptimStateDictConfig(rank0_only=True)):
        again = torch.optim.AdamW(other.parameters())
        state = FSDP.optim_state_dict(other, theirs)
        found += differ(state, expected if rank() == 0 else {})
        again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, state))
        found += differ(again.state_dict(), theirs.state_dict())
        again = torch.optim.AdamW(other.parameters())
        FSDP.optim_state_dict_to_load(other, again, state, load_directly=True)
    with pytest.raises(NotImplementedError, match="is_named_optimizer=True"):
        FSDP.optim_state_dict_to_load(other, again, expected, is_named_optimizer=True)
    assert found + differ(again.state_dict(), theirs.state_dict()) == []


def test_single_rank():
    model = wrap("tied", FULL)
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


@on_ranks(2)
def test_a_malformed_state_of_rank_0_is_an_error_on_all_ranks():
    model = FSDP(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"state": [], "param_groups": [{"params": ["weight", "bias"]}]}
    with pytest.raises((AttributeError, RuntimeError), match="no attribute 'items'"):
        load_optim_state_dict(model, optimizer, state if rank() == 0 else None, from_rank0=True)
