"""engine.save_checkpoint() and load_checkpoint(): runs resume, also on other ranks and stages.

A resumed run has the losses of an uninterrupted one.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import LR, config, engine_of, train
from groups import on_hosts
from spawn import RankPool, on_ranks, ranks
from test_misuse import raised

import zshard
from zshard.__main__ import main

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "c10d"])
HALF = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 6}}


def full(stage: int = 3, **changes: Any) -> dict[str, Any]:
    return config(
        zero_optimization={"stage": stage},
        fp16=HALF,
        scheduler=WARMUP,
        gradient_accumulation_steps=2,
        **changes,
    )


def resume(folder: str, stage: int, transport: str) -> Any:
    first = engine_of(full(stage), transport)
    train(first, 6)
    assert first.save_checkpoint(folder, client_state={"epoch": 3, "rank": first.global_rank})
    expected = train(first, 4, start=6)
    second = engine_of(full(stage), transport)
    train(second, 3, start=50)  # in the middle of a round
    path, client = second.load_checkpoint(folder)
    assert path == os.path.join(folder, "global_step3")
    assert client == {"epoch": 3, "rank": second.global_rank}
    assert (second.global_steps, second.micro_steps, second.global_samples) == (3, 6, 48)
    assert train(second, 4, start=6) == expected
    return second.cur_scale == first.cur_scale, second.get_lr() == first.get_lr()


@pytest.mark.parametrize("stage", range(4))
@TRANSPORTS
@ranks(2)
def test_resumed_run_has_the_same_losses(
    pool: RankPool, stage: int, transport: str, tmp_path: Path
) -> None:
    assert pool.run(resume, str(tmp_path / "new" / "runs"), stage, transport) == [(True, True)] * 2
    folder = tmp_path / "new" / "runs"
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
    found = engine.module.state_dict()
    train(engine, 2)
    return found, client, engine.global_steps


@pytest.mark.parametrize("stage", [1, 3])
@ranks(3)
def test_another_number_of_ranks_and_stage_loads(
    pool: RankPool, pool2: RankPool, stage: int, tmp_path: Path
) -> None:
    saved = pool2.run(save, str(tmp_path))[0]
    for rank, (found, client, steps) in enumerate(pool.run(load, str(tmp_path), stage)):
        assert all(torch.equal(found[name], value) for name, value in saved.items())
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
    error = raised(lambda: engine.save_checkpoint(folder))
    torch.save(engine.module.state_dict(), f"{folder}.pt")
    return {each.name for each in folder.glob("*/*.part")}, error


def load_on_own_disks(root: str) -> tuple[str, bool]:
    """Return the path that was loaded, or the error, and whether it is what was saved."""
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
        assert error.startswith("FileExistsError") and "save to another path" in error
    done = pool2.run(on_own_disks, load_on_own_disks, root)
    assert done == [(f"{rank}/global_step3", True) for rank in range(2)]
    for error, same in pool3.run(on_own_disks, load_on_own_disks, root):  # rank 2 on a new host
        assert "the host 'host2' has none" in error and not same


def parts(folder: str) -> Any:
    """State that the arguments exclude stays unchanged."""
    engine = engine_of(full())
    train(engine, 12)
    engine.save_checkpoint(folder)
    found = []
    for options in (
        {"load_module_only": True},
        {"load_optimizer_states": False},
        {"load_lr_scheduler_states": False},
    ):
        other = engine_of(full())
        other.load_checkpoint(folder, **options)
        schedule = other.lr_scheduler.last_batch_iteration
        found.append((other.global_steps, len(other.optimizer.state) > 0, schedule))
    step = engine.lr_scheduler.last_batch_iteration
    assert step >= 0 and found == [(0, False, -1), (6, False, step), (6, True, -1)]
    return True


@ranks(2)
def test_parts_of_a_checkpoint_load(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(parts, str(tmp_path)) == [True, True]


def misused(folder: str) -> dict[str, str]:
    engine = engine_of()
    assert engine.load_checkpoint(folder) == (None, None)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="second")
    engine.save_checkpoint(folder, tag="good")
    if dist.get_rank() == 0:
        os.makedirs(f"{folder}/theirs")
        Path(folder, "theirs", "mp_rank_00_model_states.pt").write_bytes(b"")
        os.makedirs(f"{folder}/empty")
    dist.barrier()
    before = engine.module.state_dict()
    found = {
        "FileNotFoundError: there is no checkpoint": raised(lambda: engine.load_checkpoint(folder, "bad")),
        "pass one of [": raised(lambda: engine.load_checkpoint(folder, "bad")),
        "zero_to_fp32.py": raised(lambda: engine.load_checkpoint(folder, "theirs")),
        "no finished checkpoint in": raised(lambda: engine.load_checkpoint(folder, "empty")),
        "tag='../up' is not the name": raised(lambda: engine.save_checkpoint(folder, "../up")),
        "tag='latest' is not": raised(lambda: engine.save_checkpoint(folder, "latest")),
        "extra['client_state']['object']": raised(lambda: engine.save_checkpoint(folder, client_state={"object": object()})),
        "client_state must be a dict": raised(lambda: engine.save_checkpoint(folder, client_state=[1])),
        "exclude_frozen_parameters": raised(lambda: engine.save_checkpoint(folder, exclude_frozen_parameters=True)),
        "custom_load_fn": raised(lambda: engine.load_checkpoint(folder, custom_load_fn=print)),
        "path must be a string": raised(lambda: engine.save_checkpoint(None)),
        "differ": raised(lambda: engine.save_checkpoint(folder, tag=f"rank{dist.get_rank()}")),
        "the checkpoints differ": raised(lambda: engine.load_checkpoint(folder, ("good", "second")[dist.get_rank()])),
        "rank 1": raised(lambda: engine.save_checkpoint(folder, tag="../one" if dist.get_rank() else "two")) if dist.get_rank() == 0 else "rank 1",
        "would be a pickle": raised(lambda: engine.save_16bit_model(folder, "model.safetensors")),
    }  # fmt: skip
    if dist.get_rank() == 1:
        raised(lambda: engine.save_checkpoint(folder, tag="../one"))
    after = engine.module.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    train(engine, 1)
    assert engine.load_checkpoint(folder)[0] == f"{folder}/good"
    return found


@ranks(2)
def test_unsupported_saves_and_loads_are_named(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(misused, str(tmp_path)):
        assert {part: message for part, message in found.items() if part not in message} == {}
    assert (tmp_path / "latest").read_text() == "good"


def sixteen_bits(folder: str) -> Any:
    engine = engine_of(config(bf16={"enabled": True}))
    train(engine, 2)
    assert engine.save_16bit_model(folder)
    return {name: value.bfloat16() for name, value in engine.module.state_dict().items()}


@TRANSPORTS
@ranks(2)
def test_weights_are_saved_in_16_bits(pool: RankPool, transport: str, tmp_path: Path) -> None:
    expected = pool.run(sixteen_bits, str(tmp_path))[0]
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


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


def loads_nothing(folder: str) -> str:
    engine = engine_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            engine.load_checkpoint(folder)
        except (UserWarning, RuntimeError) as error:
            return str(error)
    return ""


@ranks(2)
def test_warning_that_is_an_error_is_raised_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(loads_nothing, str(tmp_path)):
        assert "nothing was loaded" in text


@on_ranks(2)
def test_zshard_save_and_load_are_compatible(tmp_path):
    """The folders are zshard's: its load() reads them, and the engine loads the folders of its
    save()."""
    folder = str(tmp_path)
    engine = engine_of()
    train(engine, 2)
    engine.save_checkpoint(folder, tag="one")
    loaded = zshard.load(f"{folder}/one", engine.module, engine.optimizer)
    zshard.save(f"{folder}/two", engine.module, engine.optimizer)
    path, client = engine.load_checkpoint(folder, tag="two")
    assert loaded["engine"]["global_steps"] == 2
    assert os.path.basename(path) == "two"
    assert client == {}
    assert engine.global_steps == 2


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
