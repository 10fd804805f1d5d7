"""State dicts that do not match a sharded model's optimizer, and states that cannot be gathered.

Each is an exception that names the parameter and both sides, on all ranks, and leaves the optimizer
unchanged.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from groups import mesh_of
from models import CASES, Mlp, make, make_optimizer, train
from nursery import fork_ranks
from optim_states import FULL, differ, rank, trained
from spawn import on_ranks
from torch.distributed.tensor import Replicate, distribute_tensor

import zshard
from zshard import FSDP


def entry(number, key, value):
    return lambda state: state["state"][number].update({key: value(state["state"][number][key])})


def replicated(value):
    return distribute_tensor(value, mesh_of(1, 2), [Replicate()] * 2)


OF_FIRST = "of parameter 'first.weight'"
DAMAGES = {
    f"'exp_avg' {OF_FIRST} has shape (7, 13), expected (13, 7)": entry(
        0, "exp_avg", lambda _: torch.zeros(7, 13)
    ),
    f"'exp_avg_sq' {OF_FIRST} has shape (45, 1)": entry(
        0, "exp_avg_sq", lambda _: torch.zeros(45, 1)
    ),
    "'exp_avg' of parameter 'first.bias' has shape (12,), expected": entry(
        1, "exp_avg", lambda _: torch.zeros(12)
    ),
    f"'exp_avg' {OF_FIRST} is a DTensor": entry(0, "exp_avg", replicated),
    "doesn't match the size of optimizer's group": lambda s: s["param_groups"][0]["params"].pop(),
    "different number of parameter groups": lambda s: s["param_groups"].append(
        {**s["param_groups"][0], "params": []}
    ),
}


def check_mismatches(optimizer, damages):
    """Fail unless each damage is an error with its words, and leaves everything unchanged."""
    good, groups = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups
    for words, damage in damages.items():
        bad = copy.deepcopy(good)
        damage(bad)
        with pytest.raises(ValueError, match=re.escape(words)):
            optimizer.load_state_dict(bad)
        assert optimizer.param_groups is groups and differ(optimizer.state_dict(), good) == []
    optimizer.load_state_dict(good)
    assert differ(optimizer.state_dict(), good) == []


@on_ranks(2)
def test_mismatches_are_named_and_change_nothing():
    check_mismatches(trained("mlp", FULL, "zshard.AdamW")[1], DAMAGES)


def test_mismatches_without_peers():
    _, optimizer = trained("mlp", FULL, "zshard.AdamW")
    check_mismatches(optimizer, {k: v for k, v in DAMAGES.items() if "DTensor" not in k})


OF_NONE = "a key of no parameter"  # over shm, rank 0 reads the state
DIVERGES = {  # rank 1's change to its state of a parameter
    "missing": lambda optimizer, param: optimizer.state.pop(param),
    "another key": lambda optimizer, param: optimizer.state[param].update(more=3),
    "dtype": lambda optimizer, param: optimizer.state[param].update(
        exp_avg=optimizer.state[param]["exp_avg"].double()
    ),
    "fewer parameters": lambda optimizer, param: (
        optimizer.param_groups[0]["params"].pop(),
        optimizer.state.pop(param),
    ),
    OF_NONE: lambda optimizer, param: optimizer.state.update(more=3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("what", "transport"),
    [(what, t) for what in DIVERGES for t in ("shm", "c10d") if (what, t) != (OF_NONE, "shm")],
)
@on_ranks(2)
def test_ranks_with_different_state_are_named(what, transport):
    model, optimizer = trained("mlp", ("full_shard", transport), "zshard.AdamW")
    if rank() == 1:
        DIVERGES[what](optimizer, model.third.bias)
    dist.barrier()  # over shm, rank 0 would read the current state
    where = "under 'more'" if what == OF_NONE else "of 'third.bias'"
    words = f"the optimizers differ between ranks.*the state {where}"
    with pytest.raises(zshard.DivergenceError, match=words):
        optimizer.state_dict()
    model.state_dict()


def on_one_rank(transport):
    """A script that saves on rank 0 alone, as with DDP."""
    model, optimizer = trained("mlp", ("full_shard", transport), "zshard.AdamW")
    if rank() == 0:
        optimizer.state_dict()
    train(model, CASES["mlp"], optimizer, rank(), 1)


def test_saving_on_one_rank_is_an_error_at_once():
    for result in fork_ranks(on_one_rank, 2, "c10d"):
        assert result.returncode == 1
        assert "DivergenceError" in result.stderr and "ranks diverged" in result.stderr


@on_ranks(2)
def test_shards_within_lists_are_refused():
    """A custom optimizer that keeps tensors in a list."""
    model = FSDP(make(Mlp))
    optimizer = torch.optim.SGD(model.parameters())
    for param in model.parameters():
        optimizer.state[param]["history"] = [torch.zeros_like(param)]
    with pytest.raises(RuntimeError, match=r"'history' \(a list\) .* of 'first.weight' contains"):
        optimizer.state_dict()


BY_NAME = [
    lambda model, optimizer, path: zshard.optim_state_dict(model, optimizer),
    lambda model, optimizer, path: zshard.save(path, model, optimizer),
]
READERS = [
    *BY_NAME,
    lambda model, optimizer, path: zshard.optim_state_dict(model, optimizer, rank0_only=True),
    lambda model, optimizer, path: optimizer.state_dict(),
]


@pytest.mark.parametrize("combination", [FULL, ("shard_grad_op", "c10d")], ids="-".join)
@pytest.mark.parametrize(("key", "words"), [("m", "under 'm'"), (None, "in the place of a dict")])
@on_ranks(2)
def test_shards_in_the_dict_of_no_parameter_are_refused(key, words, combination, tmp_path):
    """And every reader reads the same optimizer without them."""
    model, optimizer = trained("mlp", combination, "tests.Counting")
    where = model.first.weight if key is None else key
    before = optimizer.state.get(where)
    optimizer.state[where] = torch.zeros_like(model.first.weight)
    for reader in READERS:
        with pytest.raises(RuntimeError, match=f"{words}.*store each in the dict of its parameter"):
            reader(model, optimizer, tmp_path / "x")
    optimizer.state[where] = before
    train(model, CASES["mlp"], optimizer, rank(), 1)
    for reader in READERS:
        reader(model, optimizer, tmp_path / "x")


@on_ranks(2)
def test_key_that_is_a_parameters_name(tmp_path):
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    optimizer.state["first.weight"] = 1
    assert optimizer.state_dict()["state"]["first.weight"] == 1
    for reader in BY_NAME:
        with pytest.raises(ValueError, match=r"under 'first.weight', which is also a parameter"):
            reader(model, optimizer, tmp_path)


def test_optimizers_of_plain_models_use_torch():
    """Torch's behavior: nothing is copied, checked or named."""
    model = make(Mlp)
    optimizer = make_optimizer("torch.AdamW", model)
    train(model, CASES["mlp"], optimizer, 0, 1)
    state = optimizer.state_dict()
    param = model.first.weight
    assert state["state"][0]["exp_avg"] is optimizer.state[param]["exp_avg"]
    assert "param_names" not in state["param_groups"][0]
    optimizer.load_state_dict(state)
    assert optimizer.state[param]["exp_avg"] is state["state"][0]["exp_avg"]
