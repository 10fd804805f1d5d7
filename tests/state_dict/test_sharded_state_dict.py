"""State dicts of shards: SHARDED_STATE_DICT and LOCAL_STATE_DICT.

A rank's state dict loads on the rank that has the same shards; anywhere else it is an error that
changes nothing.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from collectives import Collectives
from compare import assert_same
from groups import mesh_of
from models import CASES, COMBINATIONS, differences, make, train, wrapped
from scenarios import Stack, forward_backward, message_of
from spawn import ranks
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import LocalStateDictConfig, ShardedStateDictConfig, StateDictType

import zshard
from zshard import FSDP, MixedPrecision

TYPES = [
    (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)),
    ("LOCAL_STATE_DICT", LocalStateDictConfig()),
]
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


def local_state(model, kind="SHARDED_STATE_DICT", config=None):
    """Return this rank's state dict, and how many collectives that took."""
    with FSDP.state_dict_type(model, kind, config), Collectives() as seen:
        state = model.state_dict()
    return state, seen.gathers


def load_shards(model, state):
    with FSDP.state_dict_type(model, "SHARDED_STATE_DICT"):
        return model.load_state_dict(state)


def saved_and_loaded(name, combination, folder):
    """torch.save on each rank; return what differs after loading into a model with other values."""
    case, rank = CASES[name], dist.get_rank()
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy)
    expected = model.state_dict()
    for kind, config in TYPES:
        state, gathers = local_state(model, kind, config)
        assert gathers == 0
        for key, param in model.named_parameters():
            info = zshard.shard_info(param)
            if info is None:  # no_shard: this rank has it in full
                assert_same(state[key], expected[key], key)
                continue
            begin, end = info["begin"], info["begin"] + info["numel"]
            assert state[key].shape == (info["numel"],), key
            assert_same(state[key], expected[key].reshape(-1)[begin:end], f"the shard of {key}")
            assert state[key].data_ptr() != param.data_ptr() or info["numel"] == 0
        assert set(state) == set(expected)
        torch.save(state, f"{folder}/{name}-{rank}.pt")
        train(model, case, torch.optim.SGD(model.parameters(), 0.1), rank)
        loaded = torch.load(f"{folder}/{name}-{rank}.pt", weights_only=True)
        keys = load_shards(model, loaded)
        assert not keys.missing_keys and not keys.unexpected_keys
        assert differences(model.state_dict(), expected) == []
    other = wrapped(case.make, combination, seed=9, auto_wrap_policy=case.policy)
    load_shards(other, torch.load(f"{folder}/{name}-{rank}.pt", weights_only=True))
    return differences(other.state_dict(), expected)


@pytest.mark.sampled(7)
@ranks(2, 3)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen", "dtypes"])
def test_each_rank_loads_its_own_shards(pool, name, combination, tmp_path):
    for differing in pool.run(saved_and_loaded, name, combination, str(tmp_path)):
        assert differing == []


def on_a_mesh(strategy, shape):
    model = FSDP(make(Stack), strategy=strategy, transport="c10d", device_mesh=mesh_of(*shape))
    expected = copy.deepcopy(model.state_dict())
    state, _ = local_state(model)
    forward_backward(model, dist.get_rank())
    zshard.SGD(model.parameters(), 0.1).step()
    load_shards(model, state)
    return differences(model.state_dict(), expected), sum(v.numel() for v in state.values())


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
def test_shard_groups(pool4, strategy):
    whole = sum(p.numel() for p in Stack().parameters())
    parts = 2 if strategy == "hybrid_shard" else 4
    found = pool4.run(on_a_mesh, strategy, (2, 2))
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert sum(numel for _, numel in found) == whole * 4 / parts


def left_whole():
    """After a forward that leaves units unsharded, in another dtype; and where a script has called
    unshard()."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = wrapped(Stack, ("shard_grad_op", "c10d"), mixed_precision=precision)
    expected = model.state_dict()
    loss = model(torch.ones(2, model.head.in_features)).sum()
    state, _ = local_state(model)
    loss.backward()
    wrong = [k for k, v in state.items() if v.dtype != expected[k].dtype or v.dim() != 1]
    with FSDP.summon_full_params(model):
        said = message_of(lambda: local_state(model), RuntimeError)
    load_shards(model, state)
    return wrong, differences(model.state_dict(), expected), said


def test_unsharded_units(pool2):
    for wrong, after, said in pool2.run(left_whole):
        assert wrong == after == []
        assert "is unsharded: call state_dict() after reshard()" in said


class Buffered(nn.Sequential):
    """Buffers, and a layer that is ignored."""

    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def ignoring():
    model = make(Buffered)
    model = FSDP(model, ignored_modules=[model[2]])
    state, _ = local_state(model)
    whole = {k: v for k, v in model.state_dict().items() if "running" in k or k.startswith("2.")}
    with FSDP.state_dict_type(model, "LOCAL_STATE_DICT"):
        below = model[0].state_dict()
    return differences({k: state[k] for k in whole}, whole), len(whole), below["weight"]


def test_buffers_and_ignored_parameters_are_full(pool2):
    found = pool2.run(ignoring)
    for wrong, count, weight in found:
        assert wrong == [] and count == 4 and weight.dim() == 1
    assert sum(weight.numel() for *_, weight in found) == 35


# --- shards of other ranks ------------------------------------------------------------------------


class Even(nn.Module):
    """Both ranks get shards of one size; each unit has several pages."""

    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.second(self.first(x))


def refused(what):
    """Return (message, has anything changed) of loading shards of another rank."""
    rank, model = dist.get_rank(), wrapped(Even, ("full_shard", "shm"), auto_wrap_policy=None)
    state, _ = local_state(model)
    before = copy.deepcopy(model.state_dict())
    if what == "of the other rank":
        states = [None, None]
        dist.all_gather_object(states, state)
        state = states[1 - rank]
    elif what == "of other units":
        other = wrapped(Even, ("full_shard", "shm"), auto_wrap_policy={nn.Linear})
        state, _ = local_state(other)
    elif what == "without a record":
        state = dict(state)
    elif what == "with a broken record":
        state._metadata["first"]["zshard_slices"]["weight"] = {"begin": 0}
    elif what == "of another size":
        for name in state:
            state[name] = torch.cat([state[name], torch.zeros(1)])
    elif what == "of a sharded model":
        plain = FSDP(make(Even), strategy="no_shard")
        said = message_of(lambda: load_shards(plain, state), RuntimeError)
        return said, differences(plain.state_dict(), make(Even).state_dict())
    if what == "outside":
        said = message_of(lambda: model.load_state_dict(state), RuntimeError)
    else:
        said = message_of(lambda: load_shards(model, state), RuntimeError)
    return said, differences(model.state_dict(), before)


EXPECTED = {
    "outside": ("first.weight: got shard ", "load it within FSDP.state_dict_type(model, 'SHARDED"),
    "of the other rank": ("first.weight: got shard ", " of 2 (", ", but this rank has shard "),
    "of other units": ("first.weight: got shard ", ", but this rank has shard "),
    "without a record": ("size mismatch for", "the shape in current model is torch.Size([64, 64])"),
    "with a broken record": ("first.weight: got a shard with an invalid record",),
    "of another size": (".weight: got shape (", "the shard has shape ("),
    "of a sharded model": ("first.weight: got shard", "is not sharded here: save and load full"),
}


@pytest.mark.parametrize("what", EXPECTED)
def test_shards_of_other_ranks_are_refused(pool2, what):
    found = pool2.run(refused, what)
    assert [changed for _, changed in found] == [[], []]
    for said, _ in found:
        for words in EXPECTED[what]:
            assert words in said


def from_below():
    """A load that starts at a plain module only calls the owners below it."""
    model = wrapped(Even, ("full_shard", "shm"), auto_wrap_policy=None)
    with FSDP.state_dict_type(model, "LOCAL_STATE_DICT"):
        state = model.first.state_dict()
        model.first.load_state_dict(state)
    return message_of(lambda: model.first.load_state_dict(state), RuntimeError)


def test_submodules_refuse_foreign_shards(pool2):
    for said in pool2.run(from_below):
        assert "weight: got shard" in said and "load it within" in said


def without_metadata():
    model = wrapped(Even, ("full_shard", "shm"))
    with FSDP.state_dict_type(model, "LOCAL_STATE_DICT"):
        return message_of(lambda: model.state_dict(destination={}), TypeError)


def test_destination_must_accept_the_records(pool2):
    for said in pool2.run(without_metadata):
        assert "needs a destination with a `_metadata` dict" in said


def whole_within():
    """Full tensors are accepted in the context as well."""
    model, other = wrapped(Stack, ("full_shard", "shm")), make(Stack, seed=3)
    load_shards(model, other.state_dict())
    return differences(model.state_dict(), other.state_dict())


def test_full_tensors_load_inside_the_context(pool2):
    assert pool2.run(whole_within) == [[], []]


def test_single_rank_saves_full_tensors():
    model = FSDP(make(Stack))
    state, _ = local_state(model)
    assert differences(state, model.state_dict()) == []
    load_shards(model, state)


def saved_by_dcp(folder):
    """Each rank's shards are plain tensors under the same names; dcp would keep one rank's."""
    model = wrapped(Stack, ("full_shard", "shm"))
    state, _ = local_state(model)
    with pytest.raises(CheckpointException, match=r"given this rank's shard of 'model\."):
        dcp.save({"model": state}, checkpoint_id=folder / "shards")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "full")


@ranks(2)
def test_dcp_refuses_shards(pool, tmp_path):
    pool.run(saved_by_dcp, tmp_path)
