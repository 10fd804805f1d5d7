"""zshard.load of checkpoints that FSDP1 and torch's Hugging Face writer save through
torch.distributed.checkpoint.

Parts of tensors, of every kind that torch has, are assembled as torch does it, or refused.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from groups import kept_groups
from models import differences
from optim_states import differ
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
from zshard.__main__ import main

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


# --- FSDP1 ----------------------------------------------------------------------------------------


def sharded_states(model, optimizer):
    """Save as FSDP1 scripts do."""
    with Fsdp1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict(), Fsdp1.optim_state_dict(model, optimizer)


def near(ours, theirs):
    """Ignore buffers, since torch saves those of any rank; FSDP1 sums in another order."""
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if "running" not in name]
    return [n for n in names if not torch.allclose(ours[n], theirs[n], rtol=1e-4, atol=1e-6)]


@pytest.mark.parametrize("original", [True, False], ids=["parameters", "flat"])
@on_ranks(2)
def test_fsdp1_folders(tmp_path, original):
    """Return what differs after a load of FSDP1's checkpoint from the same steps of zshard."""
    policy = ModuleWrapPolicy({nn.Linear})
    options = {"use_orig_params": original, "device_id": torch.device("cpu")}
    model = Fsdp1(made(1), auto_wrap_policy=policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    ours, theirs = fresh(1)
    train(ours, theirs)
    found = []
    for get in (get_state_dict, sharded_states):
        states = get(model, optimizer)
        path = f"{tmp_path}/{get.__name__}"
        dcp.save({"model": states[0], "optim": states[1], "epoch": 3}, checkpoint_id=path)
        other, own = fresh()
        assert dict(zshard.load(path, other, own)) == {"epoch": 3}
        found += near(ours.state_dict(), other.state_dict())
        pair = (zshard.optim_state_dict(*each)["state"] for each in ((ours, theirs), (other, own)))
        for one, two in zip(*(each.values() for each in pair), strict=True):
            found += near(one, two)
    assert found == []


# --- torch's Hugging Face writer ------------------------------------------------------------------


@functools.cache
def mesh():
    with kept_groups():
        return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


def by_the_writer(folder):
    """Return what differs after a load of the writer's files, consolidated or not."""
    module = fully_shard(made(1), mesh=mesh())
    state = {n: v for n, v in get_model_state_dict(module).items() if isinstance(v, DTensor)}
    homes = {name: 1 + i % 2 for i, name in enumerate(state)}
    wanted = {name: value.full_tensor() for name, value in state.items()}
    found = []
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
            got = {n: v for n, v in model.state_dict().items() if n in wanted}
            found += differences(got, wanted)
    return found


@pytest.fixture(scope="module")
def parts(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    assert pools.setdefault(2, RankPool(2)).run(by_the_writer, folder) == [[], []]
    return folder


def test_hugging_face_writer_folders(parts, tmp_path, monkeypatch, capsys):
    for words in (["inspect", parts / "files"], ["export", parts / "files", tmp_path / "out"]):
        monkeypatch.setattr("sys.argv", ["zshard", "ckpt", *map(str, words)])
        assert main() == 0
    said = capsys.readouterr().out
    assert "first.weight" in said and "5x3" in said
    one, two = Net(), Net()
    zshard.load(tmp_path / "out", one, strict=False)
    zshard.load(parts / "whole", two, strict=False)
    assert differences(dict(one.named_parameters()), dict(two.named_parameters())) == []


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
        told = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        told["first.weight"] = facts
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(told)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change


WRONG = {
    "lost": (lost, CheckpointError, "the chunks of 'first"),
    "lost at the end": (lost_at_the_end, RuntimeError, "size mismatch for first.weight"),
    "of another save": (
        of_another_save,
        CheckpointError,
        "overlap, leave a gap or exceed its shape (5,): copy all files",
    ),
    "no note": (changed(), CheckpointError, "has no valid saved_offsets for 'first.weight'"),
    "below 0": (changed(saved_offsets=[-1, 0]), CheckpointError, "has no valid saved_offsets"),
    "other dimensions": (changed(saved_offsets=[0]), CheckpointError, "has no valid saved_offsets"),
    "far away": (
        changed(saved_offsets=[2**62, 0]),
        CheckpointError,
        "the chunks of 'first.weight' in",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_incomplete_or_overlapping_parts(parts, case, tmp_path):
    change, kind, text = WRONG[case]
    folder = Path(shutil.copytree(parts / "parts", tmp_path / "x"))
    change(folder)
    model = made(1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind) as caught:
        zshard.load(folder, model, strict=False)
    assert text in str(caught.value)
    assert differences(dict(model.state_dict()), dict(before)) == []


# --- names, and other entries ---------------------------------------------------------------------


class App(dcp.stateful.Stateful):
    """What the tutorials of torch.distributed.checkpoint save."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        states = get_state_dict(self.model, self.optimizer)
        return {"model": states[0], "optim": states[1]}

    def load_state_dict(self, state):
        raise NotImplementedError


def stepped():
    """A model and its optimizer after a step."""
    model = made(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_locations_of_model_and_optimizer(tmp_path):
    model, optimizer = stepped()
    own, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    forms = (
        {"app": App(model, optimizer)},
        {"state_dict": own, "optimizer_0": state},  # as Lightning does
        {"model_state_dict": own, "optimizer_state_dict": state},
    )
    for i, form in enumerate(forms):
        dcp.save(form, checkpoint_id=tmp_path / str(i), no_dist=True)
        other = made(2)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.2)
        zshard.load(tmp_path / str(i), other, theirs)
        assert differences(dict(other.state_dict()), dict(own)) == []
        assert differ(get_optimizer_state_dict(other, theirs), state) == []


def test_model_and_optimizer_in_folders_of_their_own(tmp_path):
    """As Accelerate does; the folder around them cannot be loaded."""
    model, optimizer = stepped()
    own, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    torch.save({}, tmp_path / "scheduler.bin")
    dcp.save({"model": own}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    other = made(2)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.2)
    words = r"not a checkpoint, but contains 'optimizer_0', 'pytorch_model_fsdp_0'"
    with pytest.raises(FileNotFoundError, match=words):
        zshard.load(tmp_path, other)
    zshard.load(tmp_path / "pytorch_model_fsdp_0", other)
    zshard.load(tmp_path / "optimizer_0", other, theirs, strict=False)
    assert differences(dict(other.state_dict()), dict(own)) == []
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
    with pytest.raises(
        CheckpointError, match=r"cannot read 'args'.*Namespace.*pass strict=False to skip it"
    ):
        zshard.load(tmp_path / "x", model)
    assert differences(dict(model.state_dict()), dict(made(2).state_dict())) == []
    with pytest.warns(UserWarning, match=r"cannot read 'args'.*; skipped"):
        loaded = zshard.load(tmp_path / "x", model, strict=False)
    assert dict(loaded) == {"best": 0.5}
    assert differences(dict(model.state_dict()), dict(made(1).state_dict())) == []
