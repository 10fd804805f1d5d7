"""engine.save_checkpoint() and load_checkpoint(): runs resume, also on other ranks and stages.

A resumed run has the losses of an uninterrupted one.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from engines import LR, config, engine_of, train
from groups import on_hosts
from rows import all_rows
from scenarios import message_of
from spawn import RankPool, on_ranks, ranks

import zshard
from zshard.__main__ import main

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "c10d"])
HALF = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 6}}


def full(stage: int = 3, **changes: Any) -> dict[str, Any]:
    parts = {"fp16": HALF, "scheduler": WARMUP, "gradient_accumulation_steps": 2}
    return config(zero_optimization={"stage": stage}, **parts, **changes)


@pytest.mark.parametrize("stage", range(4))
@TRANSPORTS
@on_ranks(2)
def test_resumed_run_has_the_same_losses(stage, transport, tmp_path):
    folder = tmp_path / "new" / "runs"
    first = engine_of(full(stage), transport)
    train(first, 6)
    assert first.save_checkpoint(folder, client_state={"epoch": 3, "rank": first.global_rank})
    expected = train(first, 4, start=6)
    second = engine_of(full(stage), transport)
    train(second, 3, start=50)  # in the middle of a round
    path, client = second.load_checkpoint(folder)
    assert path == str(folder / "global_step3")
    assert client == {"epoch": 3, "rank": second.global_rank}
    assert (second.global_steps, second.micro_steps, second.global_samples) == (3, 6, 48)
    assert train(second, 4, start=6) == expected
    assert (second.cur_scale, second.get_lr()) == (first.cur_scale, first.get_lr())
    assert (folder / "latest").read_text() == "global_step3"
    assert sorted(each.name for each in folder.iterdir()) == ["global_step3", "latest"]


def save(folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(full())
    train(engine, 4)
    engine.save_checkpoint(folder, tag=7, client_state={"rank": engine.global_rank})
    return engine.module.state_dict()


def load(folder: str, stage: int) -> Any:
    engine = engine_of(full(stage))
    _, client = engine.load_checkpoint(folder, tag="7")
    state = engine.module.state_dict()
    train(engine, 2)
    return state, client, engine.global_steps


@pytest.mark.parametrize("stage", [1, 3])
@ranks(3)
def test_another_number_of_ranks_and_stage_loads(
    pool: RankPool, pool2: RankPool, stage: int, tmp_path: Path
) -> None:
    saved = pool2.run(save, str(tmp_path))[0]
    for rank, (state, client, steps) in enumerate(pool.run(load, str(tmp_path), stage)):
        assert_same(state, saved, "the state")
        assert client == {"rank": rank if rank < 2 else 0} and steps == 3


def on_own_disks(function: Any, root: str) -> Any:
    """Call a function on a rank that is alone on its host."""
    with on_hosts(1), mock.patch.dict(os.environ, LOCAL_RANK="0"):
        return function(root)


def engine_on_own_disk() -> Any:
    return engine_of(full(checkpoint={"use_node_local_storage": True}), "hosts")


def save_on_own_disks(root: str) -> tuple[set[str], str]:
    """Return this host's files, and the error of a second save."""
    engine = engine_on_own_disk()
    folder = Path(root, os.environ["RANK"])
    train(engine, 6)
    engine.save_checkpoint(folder)
    error = message_of(lambda: engine.save_checkpoint(folder), FileExistsError)
    torch.save(engine.module.state_dict(), f"{folder}.pt")
    return {each.name for each in folder.glob("*/*.part")}, error


def load_on_own_disks(root: str) -> tuple[str, bool]:
    """Return the path that was loaded, or the error, and whether it is the saved one."""
    engine = engine_on_own_disk()
    try:
        path, _ = engine.load_checkpoint(Path(root, os.environ["RANK"]))
    except zshard.CheckpointError as error:
        return str(error), False
    expected, state = torch.load(f"{root}/0.pt"), engine.module.state_dict()
    same = all(torch.equal(expected[name], state[name]) for name in expected)
    return os.path.relpath(path, root), same and engine.global_steps == 3


def test_hosts_without_a_shared_disk(pool2: RankPool, pool3: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path)
    saved = pool2.run(on_own_disks, save_on_own_disks, root)
    for rank, (files, error) in enumerate(saved):
        assert files == {"all-hosts.part", f"rank-{rank:05}-of-00002.part"}
        assert "save to another path" in error
    done = pool2.run(on_own_disks, load_on_own_disks, root)
    assert done == [(f"{rank}/global_step3", True) for rank in range(2)]
    for error, same in pool3.run(on_own_disks, load_on_own_disks, root):  # rank 2 on a new host
        assert "the host 'host2' has none" in error and not same


@on_ranks(2)
def test_parts_of_a_checkpoint_load(tmp_path):
    """State that the arguments exclude stays unchanged."""
    engine = engine_of(full())
    train(engine, 12)
    engine.save_checkpoint(tmp_path)
    step = engine.lr_scheduler.last_batch_iteration
    assert step >= 0
    for option, expected in {
        "load_module_only": (0, False, -1),
        "load_optimizer_states": (6, False, step),
        "load_lr_scheduler_states": (6, True, -1),
    }.items():
        other = engine_of(full())
        other.load_checkpoint(tmp_path, **{option: option == "load_module_only"})
        schedule = other.lr_scheduler.last_batch_iteration
        assert (other.global_steps, len(other.optimizer.state) > 0, schedule) == expected


@on_ranks(2)
def test_unsupported_saves_and_loads_are_named(tmp_path):
    engine, rank = engine_of(), dist.get_rank()
    assert engine.load_checkpoint(tmp_path) == (None, None)
    train(engine, 2)
    for tag in ("second", "good"):
        engine.save_checkpoint(tmp_path, tag=tag)
    if rank == 0:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "mp_rank_00_model_states.pt").write_bytes(b"")
        (tmp_path / "empty").mkdir()
    dist.barrier()
    before = engine.module.state_dict()
    one = {"tag": "../one" if rank else "two"}
    pickled = {"client_state": {"object": object()}}
    loads: dict[str, Any] = {
        "there is no checkpoint": {"tag": "bad"},
        "pass one of [": {"tag": "bad"},
        "zero_to_fp32.py": {"tag": "theirs"},
        "no finished checkpoint in": {"tag": "empty"},
        "custom_load_fn": {"custom_load_fn": print},
        "the checkpoints differ": {"tag": ("good", "second")[rank]},
    }
    saves: dict[str, Any] = {
        "tag='../up' is not the name": {"tag": "../up"},
        "tag='latest' is not": {"tag": "latest"},
        "extra['client_state']['object']": pickled,
        "client_state must be a dict": {"client_state": [1]},
        "exclude_frozen_parameters": {"exclude_frozen_parameters": True},
        "path must be a string": {"save_dir": None},
        "differ": {"tag": f"rank{rank}"},
        "../one" if rank else "rank 1": one,
    }
    calls = [(engine.load_checkpoint, "load_dir", *row) for row in loads.items()]
    calls += [(engine.save_checkpoint, "save_dir", *row) for row in saves.items()]
    with all_rows() as row:
        for call, name, text, arguments in calls:
            arguments = {name: tmp_path, **arguments}
            with row(text):
                assert text in message_of(functools.partial(call, **arguments))
        with row("a pickle"), pytest.raises(ValueError, match="would be a pickle"):
            engine.save_16bit_model(tmp_path, "model.safetensors")
    assert_same(engine.module.state_dict(), before, "the state")
    train(engine, 1)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "good")
    assert (tmp_path / "latest").read_text() == "good"


@TRANSPORTS
@on_ranks(2)
def test_weights_are_saved_in_16_bits(transport, tmp_path):
    engine = engine_of(config(bf16={"enabled": True}), transport)
    train(engine, 2)
    assert engine.save_16bit_model(tmp_path)
    dist.barrier()
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    full = engine.module.state_dict()
    assert_same(weights, {name: value.bfloat16() for name, value in full.items()}, "the file")


@pytest.mark.usefixtures("group_ends")
@pytest.mark.parametrize("without_frozen", [False, True])
def test_tied_weights_stay_tied_in_16_bits(tmp_path: Path, without_frozen: bool) -> None:
    tied = torch.nn.Sequential(*(torch.nn.Linear(7, 7, bias=False) for _ in range(3)))
    tied[2].weight = tied[0].weight.requires_grad_(not without_frozen)
    engine = engine_of(config(bf16={"enabled": True}), model=tied)
    engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=without_frozen)
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert "1.weight" in found and ("0.weight" in found) is not without_frozen
    if without_frozen:
        assert "2.weight" not in found
    else:
        assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()


@on_ranks(2)
def test_warning_that_is_an_error_is_raised_on_all_ranks(tmp_path):
    engine = engine_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserWarning, RuntimeError), match="nothing was loaded"):
            engine.load_checkpoint(tmp_path)


@on_ranks(2)
def test_zshard_save_and_load_are_compatible(tmp_path):
    """The folders are zshard's: its load() reads them, and the engine loads the folders of its
    save()."""
    engine = engine_of()
    train(engine, 2)
    engine.save_checkpoint(tmp_path, tag="one")
    loaded = zshard.load(tmp_path / "one", engine.module, engine.optimizer)
    zshard.save(tmp_path / "two", engine.module, engine.optimizer)
    path, client = engine.load_checkpoint(tmp_path, tag="two")
    assert loaded["engine"]["global_steps"] == engine.global_steps == 2
    assert (os.path.basename(path), client) == ("two", {})


@pytest.mark.usefixtures("group_ends")
def test_engine_folder_loads_its_latest_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(config(), "shm")
    train(engine, 1)
    folders = tmp_path / "runs", tmp_path / "out"
    for tag in ("first", "second", "third"):
        engine.save_checkpoint(str(tmp_path / "runs"), tag=tag, save_latest=tag != "third")
        with torch.no_grad():
            next(engine.module.parameters()).add_(1.0)
    monkeypatch.setattr(sys, "argv", ["zshard", "ckpt", "export", *map(str, folders)])
    assert main() == 0
    other = engine_of(config(), "shm").module
    zshard.load(tmp_path / "out", other)
    named = engine_of(config(), "shm").module
    zshard.load(tmp_path / "runs" / "second", named)
    assert all(map(torch.equal, other.parameters(), named.parameters()))
    (tmp_path / "runs" / "latest").write_text("../out")
    with pytest.raises(FileNotFoundError, match="contains 'first', 'second', 'third'"):
        zshard.load(tmp_path / "runs", other)
