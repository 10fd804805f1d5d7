"""State dicts that do not match a sharded model's optimizer, and states that cannot be gathered.

Each is an exception that names the parameter and both sides, on all ranks, and leaves the optimizer
unchanged.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from groups import mesh_of
from models import CASES, Mlp, make, make_optimizer, train
from nursery import fork_ranks
from optim_states import FULL, differ, rank, trained, wrap
from spawn import on_ranks
from torch.distributed.tensor import Replicate, distribute_tensor

import zshard
from zshard import FSDP


def loads(optimizer, state):
    """Return the error of load_state_dict, and whether it has left everything unchanged."""
    before = copy.deepcopy([dict(e) for e in optimizer.state.values()])
    groups = optimizer.param_groups
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        assert optimizer.param_groups is groups
        assert differ([dict(e) for e in optimizer.state.values()], before) == []
        return str(error)
    return "loaded"


DAMAGES = {
    "shape": ["'exp_avg' of parameter 'first.weight' has shape (7, 13), expected (13, 7)"],
    "shard": ["'exp_avg_sq' of parameter 'first.weight' has shape (45, 1)"],
    "short vector": ["'exp_avg' of parameter 'first.bias' has shape (12,), expected"],
    "DTensor": ["'exp_avg' of parameter 'first.weight' is a DTensor", "full_tensor()"],
    "fewer parameters": ["doesn't match the size of optimizer's group"],
    "more groups": ["different number of parameter groups"],
}


@pytest.mark.parametrize("what", DAMAGES)
@on_ranks(2)
def test_mismatches_are_named_and_change_nothing(what):
    """Return the error of a load of a state dict with one problem."""
    _, optimizer = trained("mlp", FULL, "zshard.AdamW")
    state = copy.deepcopy(optimizer.state_dict())
    first = state["state"][0]
    if what == "shape":
        first["exp_avg"] = torch.zeros(7, 13)
    elif what == "shard":
        first["exp_avg_sq"] = torch.zeros(45, 1)
    elif what == "short vector":
        state["state"][1]["exp_avg"] = torch.zeros(12)
    elif what == "DTensor":
        first["exp_avg"] = distribute_tensor(first["exp_avg"], mesh_of(1, 2), [Replicate()] * 2)
    elif what == "fewer parameters":
        state["param_groups"][0]["params"].pop()
    elif what == "more groups":
        state["param_groups"].append({**state["param_groups"][0], "params": []})
    text = loads(optimizer, state)
    for part in DAMAGES[what]:
        assert part in text


def diverged(what, transport):
    """Return the error of state_dict() where ranks have different state, and whether they can
    continue."""
    model, optimizer = trained("mlp", ("full_shard", transport), "zshard.AdamW")
    param = model.third.bias
    if rank() == 1:
        if what == "missing":
            del optimizer.state[param]
        elif what == "another key":
            optimizer.state[param]["more"] = 3
        elif what == "a key of no parameter":
            optimizer.state["more"] = 3
        elif what == "dtype":
            optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].double()
        else:
            del optimizer.param_groups[0]["params"][-1], optimizer.state[param]
    dist.barrier()  # over shm, rank 0 would read the current state
    try:
        optimizer.state_dict()
    except zshard.DivergenceError as error:
        text = str(error)
    model.state_dict()
    return text


def test_keys_of_no_parameter_are_compared(pool2):
    texts = pool2.run(diverged, "a key of no parameter", "c10d")
    assert len(set(texts)) == 1
    assert "the optimizers differ between ranks" in texts[0]
    assert "the state under 'more'" in texts[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("what", ["missing", "another key", "dtype", "fewer parameters"])
def test_ranks_with_different_state_are_named(pool2, what, transport):
    texts = pool2.run(diverged, what, transport)
    assert len(set(texts)) == 1
    assert "the optimizers differ between ranks" in texts[0]
    assert "the state of 'third.bias'" in texts[0] and "rank 0" in texts[0]


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


READERS = {
    "state_dict": lambda model, optimizer, path: optimizer.state_dict(),
    "by name": lambda model, optimizer, path: zshard.optim_state_dict(model, optimizer),
    "on rank 0": lambda model, optimizer, path: zshard.optim_state_dict(
        model, optimizer, rank0_only=True
    ),
    "save": lambda model, optimizer, path: zshard.save(path, model, optimizer),
}


def shards_under(key, combination, path):
    """Return what each reader says of shards that are under no key of a parameter's dict, and of
    the same optimizer without them."""
    model, optimizer = trained("mlp", combination, "tests.Counting")
    where = model.first.weight if key is None else key
    before = optimizer.state.get(where)
    optimizer.state[where] = torch.zeros_like(model.first.weight)
    found = []
    for reader in READERS.values():
        with pytest.raises(RuntimeError) as error:
            reader(model, optimizer, path)
        found.append(str(error.value))
    optimizer.state[where] = before
    train(model, CASES["mlp"], optimizer, rank(), 1)
    for reader in READERS.values():
        reader(model, optimizer, path)
    return found


@pytest.mark.parametrize("combination", [FULL, ("shard_grad_op", "c10d")], ids="-".join)
@pytest.mark.parametrize(("key", "said"), [("m", "under 'm'"), (None, "in the place of a dict")])
def test_shards_in_the_dict_of_no_parameter_are_refused(pool2, key, said, combination, tmp_path):
    for found in pool2.run(shards_under, key, combination, str(tmp_path / "x")):
        assert len(found) == len(READERS)
        for text in found:
            assert said in text and "store each in the dict of its parameter" in text


@on_ranks(2)
def test_key_that_is_a_parameters_name(tmp_path):
    path = str(tmp_path / "x")
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    optimizer.state["first.weight"] = 1
    assert optimizer.state_dict()["state"]["first.weight"] == 1
    for reader in ("by name", "save"):
        with pytest.raises(ValueError, match=r"under 'first.weight', which is also a parameter"):
            READERS[reader](model, optimizer, path)


def held():
    """Parameters that unshard() has gathered: state cannot be sharded like them."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    state = optimizer.state_dict()
    model.first.unshard()
    with pytest.raises(RuntimeError, match=r"of unit 'first' unsharded: call reshard\(\)"):
        optimizer.load_state_dict(state)
    found = differ(optimizer.state_dict(), state)
    model.first.reshard()
    optimizer.load_state_dict(state)
    return found


def test_load_while_a_unit_is_unsharded_is_refused(pool2):
    assert pool2.run(held) == [[], []]


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


def test_single_rank():
    """A wrapped model without peers: checks, and no copies on saving."""
    model = wrap("mlp", FULL)
    optimizer = zshard.AdamW(model.parameters())
    train(model, CASES["mlp"], optimizer, 0, 1)
    state = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(state)
    bad["state"][0]["exp_avg"] = torch.zeros(91, 1)
    assert "expected (13, 7)" in loads(optimizer, bad)
    assert loads(optimizer, state) == "loaded" and differ(optimizer.state_dict(), state) == []
