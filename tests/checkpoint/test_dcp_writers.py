"""zshard.load of checkpoints that FSDP1 and torch's Hugging Face writer save through
torch.distributed.checkpoint.

Parts of tensors, of every kind that torch has, are assembled as torch does it, or refused.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_same
from groups import kept_groups
from optim_states import differ
from rows import all_rows
from spawn import RankPool, on_ranks
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import zshard
from zshard import FSDP, CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch emits many, mostly about FSDP1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))

    def forward(self, x):
        return self.inner(self.first(x))


def made(seed):
    torch.manual_seed(seed)
    return Net()


def train(model, optimizer):
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()


def fresh(seed=7):
    model = FSDP(made(seed), auto_wrap_policy={nn.Linear})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def state_of(model):
    return dict(model.state_dict())


# --- FSDP1 ----------------------------------------------------------------------------------------


def sharded_states(model, optimizer):
    """Save as FSDP1 scripts do."""
    with Fsdp1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict(), Fsdp1.optim_state_dict(model, optimizer)


def check_near(ours, theirs):
    """Ignore buffers, since torch saves those of any rank; FSDP1 sums in another order."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        close = torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
        assert close or "running" in name, name


@pytest.mark.parametrize("original", [True, False], ids=["parameters", "flat"])
@on_ranks(2)
def test_fsdp1_folders(tmp_path, original):
    """A load of FSDP1's checkpoint equals the same steps of zshard."""
    policy = ModuleWrapPolicy({nn.Linear})
    options = {"use_orig_params": original, "device_id": torch.device("cpu")}
    model = Fsdp1(made(1), auto_wrap_policy=policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    expected = fresh(1)
    train(*expected)
    for get in (get_state_dict, sharded_states):
        states = get(model, optimizer)
        path = f"{tmp_path}/{get.__name__}"
        dcp.save({"model": states[0], "optim": states[1], "epoch": 3}, checkpoint_id=path)
        loaded = fresh()
        assert dict(zshard.load(path, *loaded)) == {"epoch": 3}
        check_near(expected[0].state_dict(), loaded[0].state_dict())
        pair = (zshard.optim_state_dict(*each)["state"] for each in (expected, loaded))
        for one, two in zip(*(each.values() for each in pair), strict=True):
            check_near(one, two)


# --- torch's Hugging Face writer ------------------------------------------------------------------


@functools.cache
def mesh():
    with kept_groups():
        return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def by_the_writer(folder):
    """Check a load of the writer's files, consolidated or not."""
    module = fully_shard(made(1), mesh=mesh())
    state = {n: v for n, v in get_model_state_dict(module).items() if isinstance(v, DTensor)}
    homes = {name: 1 + i % 2 for i, name in enumerate(state)}
    wanted = {name: value.full_tensor() for name, value in state.items()}
    for name, options in {
        "parts": {},
        "files": {"fqn_to_index_mapping": homes},
        "whole": {"enable_consolidation": True},
    }.items():
        path = f"{folder}/{name}"
        writer = HuggingFaceStorageWriter(path=path, save_distributed=True, **options)
        dcp.save(state, storage_writer=writer)
        for where in (path, f"{path}/sharded") if name == "whole" else (path,):
            model, _ = fresh()
            loaded = zshard.load(where, model, strict=False)
            assert not loaded.verified and not loaded.unexpected_keys
            loaded = {n: v for n, v in model.state_dict().items() if n in wanted}
            assert_same(loaded, wanted, f"the model from {where}")


@pytest.fixture(scope="module")
def parts(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    pools.setdefault(2, RankPool(2)).run(by_the_writer, folder)
    return folder


def test_hugging_face_writer_folders(parts, tmp_path, command):
    status, said, _ = command("inspect", parts / "files")
    assert status == 0 and "first.weight" in said and "5x3" in said
    assert command("export", parts / "files", tmp_path / "out")[0] == 0
    one, two = Net(), Net()
    zshard.load(tmp_path / "out", one, strict=False)
    zshard.load(parts / "whole", two, strict=False)
    params = dict(two.named_parameters())
    assert_same(dict(one.named_parameters()), params, "the parameters")


def lost(folder):
    next(folder.glob("shard-00001-*")).unlink()


def lost_at_the_end(folder):
    next(folder.glob("shard-00002-*")).unlink()


def of_another_save(folder):
    source = next(folder.glob("shard-00002-*"))
    shutil.copy(source, folder / source.name.replace("shard-00002", "shard-00003"))


def changed(**facts):
    """Change the metadata of one tensor."""

    def change(folder):
        path = next(folder.glob("shard-00001-*"))
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        notes = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        notes["first.weight"] = facts
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(notes)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change


NO_OFFSETS = "has no valid saved_offsets for 'first.weight'"
WRONG = {
    "the chunks of 'first": lost,
    "size mismatch for first.weight": lost_at_the_end,
    "overlap, leave a gap or exceed its shape (5,): copy all files": of_another_save,
    NO_OFFSETS: changed(),
    NO_OFFSETS[:-1]: changed(saved_offsets=[-1, 0]),
    NO_OFFSETS[:-2]: changed(saved_offsets=[0]),
    "the chunks of 'first.weight' in": changed(saved_offsets=[2**62, 0]),
}


def test_incomplete_or_overlapping_parts(parts, tmp_path):
    with all_rows() as row:
        for number, (text, change) in enumerate(WRONG.items()):
            with row(text):
                folder = Path(shutil.copytree(parts / "parts", tmp_path / str(number)))
                change(folder)
                model = made(1)
                kind = RuntimeError if change is lost_at_the_end else CheckpointError
                with pytest.raises(kind) as caught:
                    zshard.load(folder, model, strict=False)
                assert text in str(caught.value)
                assert_same(state_of(model), state_of(made(1)), "the model")


# --- names, and other entries ---------------------------------------------------------------------


class App(dcp.stateful.Stateful):
    """Checkpoints of torch.distributed.checkpoint's tutorials."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        states = get_state_dict(self.model, self.optimizer)
        return {"model": states[0], "optim": states[1]}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_locations_of_model_and_optimizer(tmp_path):
    """Also in their own folders, as Accelerate does; the folder around them cannot be loaded."""
    model = made(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    own, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    forms = {
        "app": {"app": App(model, optimizer)},
        "lightning": {"state_dict": own, "optimizer_0": state},
        "dict": {"model_state_dict": own, "optimizer_state_dict": state},
        "plain": own,  # without a key
        "parts/pytorch_model_fsdp_0": {"model": own},
        "parts/optimizer_0": {"optimizer": state},
    }
    for name, form in forms.items():
        dcp.save(form, checkpoint_id=tmp_path / name, no_dist=True)
    torch.save({}, tmp_path / "parts" / "scheduler.bin")
    other = made(2)
    words = r"not a checkpoint, but contains 'optimizer_0', 'pytorch_model_fsdp_0'"
    with pytest.raises(FileNotFoundError, match=words):
        zshard.load(tmp_path / "parts", other)
    for name in ("app", "lightning", "dict", "plain", "parts"):
        other = made(2)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.2)
        if name == "parts":
            zshard.load(tmp_path / name / "pytorch_model_fsdp_0", other)
            zshard.load(tmp_path / name / "optimizer_0", other, theirs, strict=False)
        else:
            zshard.load(tmp_path / name, other, None if name == "plain" else theirs)
        assert_same(state_of(other), dict(own), name)
        if name != "plain":
            assert differ(get_optimizer_state_dict(other, theirs), state) == []


ORDERED = collections.OrderedDict(z=1, a=2)
ORDERED._metadata = {"": {"version": 1}}  # as in a module's state dict
BESIDE = {
    "best": numpy.float64(0.25),
    "seen": numpy.int32(-7),
    "ok": numpy.bool_(True),
    "name": b"run\xff",
    "grid": {(0, (1.5, "a")): {2**62: -1}},
    "last": (torch.Size((2, 3)), ORDERED, [None, {"z": []}]),
}


def test_plain_data_beside_the_model(tmp_path):
    dcp.save({"model": made(1).state_dict(), **BESIDE}, checkpoint_id=tmp_path, no_dist=True)
    found = dict(zshard.load(tmp_path, made(2)))
    wanted = {"best": 0.25, "seen": -7, "ok": True, "name": b"run\xff", "last": BESIDE["last"]}
    assert {name: found[name] for name in wanted} == wanted
    assert type(found["seen"]) is int and type(found["ok"]) is bool


def test_non_plain_entries_beside_the_model(tmp_path):
    args = argparse.Namespace(lr=0.5, seen=collections.deque([print]))
    state = {"model": made(1).state_dict(), "args": args, "best": numpy.float32(0.5)}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    model = made(2)
    words = r"cannot read 'args'.*Namespace.*pass strict=False to skip it"
    with pytest.raises(CheckpointError, match=words):
        zshard.load(tmp_path / "x", model)
    assert_same(state_of(model), state_of(made(2)), "the model")
    with pytest.warns(UserWarning, match=r"cannot read 'args'.*; skipped"):
        loaded = zshard.load(tmp_path / "x", model, strict=False)
    assert dict(loaded) == {"best": 0.5}
    assert_same(state_of(model), state_of(made(1)), "the model")
