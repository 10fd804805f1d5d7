"""Checkpoints that an earlier version wrote on two ranks (fixtures/) load on two ranks, on three and
into plain models, with the values of formulas (fixed_values.py), bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fixed_values as fixed
import pytest
import torch
from compare import assert_same
from fixed_values import FOLDER, STATES, Saved, check, check_model, rank, world
from nursery import fork_ranks
from safetensors.torch import load_file

import zshard
from zshard import EMA, FSDP, AdamW8bit
from zshard.extras.keeping.client import VARIABLE, Keeper, start

WAYS = {2: ("full_shard", "shm"), 3: ("shard_grad_op", "c10d")}  # number of ranks -> how to shard
SAVED = {
    "plain": Saved(),
    "ema/saved": Saved(shift=1.0),
    "eight_bit/saved": Saved("AdamW8bit"),
    "muon/saved": Saved("Muon"),
    "kept": Saved(),
    "deepspeed/global_step2": Saved(lr=1 / 8, dtype=torch.float32),
    "dcp_fsdp2": Saved(lr=0.0),
    "dcp_zshard": Saved(),
    "accelerate/zshard_model": Saved(lr=fixed.LR / 2**4),
    "lightning/sharded.ckpt": Saved(lr=fixed.LR / 2**2),
}

sampled = pytest.mark.sampled(len(WAYS))
on_all = pytest.mark.parametrize("world", WAYS)


def sharded(saved: Saved = Saved()) -> tuple[Any, Any]:  # noqa: B008 - a constant
    """Return a sharded model and an optimizer, whose values are all others than those saved."""
    strategy, transport = WAYS[world()]
    model = FSDP(fixed.net().to(saved.dtype), strategy=strategy, transport=transport, timeout=60)
    return model, with_other_lr(fixed.new_optimizer(saved.kind, model))


def with_other_lr(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    return optimizer


def check_script(found: Any) -> None:
    """A rank beyond those that saved gets rank 0's values."""
    expected = fixed.script_state(saver())
    assert_same({name: found[name] for name in expected}, expected, "the script's state")


def saver() -> int:
    return rank() if rank() < 2 else 0


def on_ranks(function: Any, world: int, *args: Any, **env: str) -> None:
    fork_ranks(function, world, *args, env=env, timeout=200, check=True)


# --- zshard.load() --------------------------------------------------------------------------------


def load_folders() -> None:
    for folder, saved in SAVED.items():
        print(folder)
        model, optimizer = sharded(saved)
        loaded = zshard.load(FOLDER / folder, model, optimizer)
        assert loaded.verified is not folder.startswith("dcp")
        assert folder != "dcp_fsdp2" or dict(loaded) == {"epoch": 7, "names": (1, "a")}
        check(model, optimizer, saved)


def test_folders_load_into_a_plain_model() -> None:
    for folder, saved in SAVED.items():
        print(folder)
        model = fixed.net().to(saved.dtype)
        if saved.kind == "AdamW":
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            optimizer = fixed.new_optimizer(saved.kind, model)
        zshard.load(FOLDER / folder, model, with_other_lr(optimizer))
        check(model, optimizer, saved)


def test_every_folder_passes_verification(command: Any) -> None:
    folders = sorted(path.parent for path in FOLDER.rglob("zshard.json"))
    assert len(folders) == 10
    for folder in folders:
        assert command("verify", folder)[0] == 0, folder


def load_script_state() -> None:
    model, optimizer = sharded()
    loaded = zshard.load(FOLDER / "plain", model, optimizer)
    assert loaded.step == 3
    check_script(loaded)
    zshard.set_rng_state(loaded["rng"])
    assert fixed.is_seeded(saver())
    position, loader = fixed.data_position()
    position.load_state_dict(loaded["data"])
    assert (position.epoch, position.samples) == (0, 16)
    assert len([*position.batches(loader)]) == (64 - 16 + 4 * world() - 1) // (4 * world())


def load_averages() -> None:
    model, optimizer = sharded()
    ema = EMA(model, (0.5, 0.75))
    zshard.load(FOLDER / "ema" / "saved", model, optimizer, ema=ema)
    assert (ema.calls, ema.updates) == (2, 2)
    for decay, shift in ((0.5, 0.5), (0.75, 0.25)):
        expected = fixed.weights(1.0)
        expected |= {name: fixed.weights(shift)[name] for name in fixed.TRAINED}
        expected["unembed.weight"] = expected["embed.weight"]
        assert_same(ema.state_dict(decay), expected, f"the average of {decay}")


def test_codes_of_8_bits_mean_the_same_numbers() -> None:
    model = fixed.net()
    optimizer = fixed.new_optimizer("AdamW8bit", model)
    zshard.load(FOLDER / "eight_bit" / "saved", model, optimizer)
    state = AdamW8bit.to_fp32(zshard.optim_state_dict(model, optimizer))["state"]
    for name, value in load_file(FOLDER / "eight_bit" / "moments.safetensors").items():
        param, _, moment = name.rpartition(".")
        assert_same(state[param][moment], value, name)


# --- hosts with their own disks -------------------------------------------------------------------


def load_part_files(root: str, is_on_hosts: bool) -> None:
    host = rank() if is_on_hosts else 0
    os.environ["ZSHARD_HOST"] = f"host {host}"
    strategy = WAYS[world()][0]
    model = FSDP(fixed.net(), strategy=strategy, timeout=60)
    optimizer = with_other_lr(fixed.new_optimizer("AdamW", model))
    loaded = zshard.load(f"{root}/disk{host}", model, optimizer)
    assert loaded.step == 3 and loaded.verified
    check_script(loaded)
    check(model, optimizer, Saved())


@pytest.mark.parametrize("is_on_hosts", [True, False])
@pytest.mark.sampled(2)
def test_part_files_load_on_hosts_and_of_all_hosts_on_one(
    tmp_path: Path, is_on_hosts: bool
) -> None:
    if is_on_hosts:
        shutil.copytree(FOLDER / "per_host", tmp_path, dirs_exist_ok=True)
    else:
        shutil.copytree(FOLDER / "per_host" / "disk1", tmp_path / "disk0")
    on_ranks(load_part_files, 2, str(tmp_path), is_on_hosts)


# --- state dicts ----------------------------------------------------------------------------------


def read(name: str) -> Any:
    return torch.load(FOLDER / name, weights_only=True)


def load_state_dicts() -> None:
    for kind, state in STATES.items():
        saved = read(f"state_dicts/{kind}.pt")
        for by_name in (True, False):
            print(kind, by_name)
            model, optimizer = sharded(Saved(kind))
            model.load_state_dict(saved["model"])
            if by_name:
                zshard.load_optim_state_dict(model, optimizer, saved["named"])
            else:
                optimizer.load_state_dict(saved["optimizer"])
            check(model, optimizer, Saved(kind))
            assert_same(saved["named"]["state"], state, "the file")


def test_torch_loads_full_state_dicts() -> None:
    ours, lightnings = read("state_dicts/AdamW.pt"), read("lightning/full.ckpt")
    accelerates = read("accelerate_ddp/pytorch_model.bin"), read("accelerate_ddp/optimizer.bin")
    for states, optimizers, lr in (
        (ours["model"], ours["optimizer"], fixed.LR),
        (lightnings["state_dict"], lightnings["optimizer_states"][0], fixed.LR / 2**2),
        (*accelerates, fixed.LR / 2**4),
    ):
        model = fixed.net()
        optimizer = with_other_lr(torch.optim.AdamW(model.parameters()))
        model.load_state_dict(states)
        optimizer.load_state_dict(optimizers)
        check(model, optimizer, Saved(lr=lr))


# --- runs that continue ------------------------------------------------------------------------------


def recover() -> None:
    model, optimizer = sharded()
    kept = zshard.Keep(model, optimizer, checkpoints=FOLDER / "kept")
    assert kept.recover({"step": 0}) == {"step": fixed.STEPS}
    check(model, optimizer, Saved())


@sampled
@on_all
def test_kept_run_begins_with_its_checkpoint(world: int) -> None:
    keeper = Keeper(start())
    try:
        on_ranks(recover, world, **{VARIABLE: keeper.token})
    finally:
        keeper.end()


def resume_engine() -> None:
    engine = zshard.initialize(model=fixed.net().float(), config=fixed.DEEPSPEED)[0]
    path, client = engine.load_checkpoint(FOLDER / "deepspeed")
    assert path == str(FOLDER / "deepspeed" / "global_step2")
    check_script(client)
    assert (engine.global_steps, engine.micro_steps, engine.cur_scale) == (2, 2, 16.0)
    assert engine.lr_scheduler.last_batch_iteration == 1 and engine.get_lr() == [1 / 8]
    check(engine.module, engine.optimizer, SAVED["deepspeed/global_step2"])


def test_weights_of_a_trainer_load() -> None:
    model = fixed.Untied()
    zshard.load(FOLDER / "transformers" / "out" / "checkpoint-2", model)
    check_model(model)


def test_fixtures_are_small_and_listed() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == sorted(fixed.KINDS)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 10**6


LOADS = (load_folders, load_script_state, load_averages, load_state_dicts, resume_engine)


@pytest.mark.sampled(2 * len(LOADS))
@on_all
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_fixtures_load_on_ranks(load: Any, world: int) -> None:
    on_ranks(load, world)


# --- trainers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainers() -> Any:
    """The runs of fixture_trainers.py."""
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name, reason="needs zshard[trainers]: make test-trainers")
    import fixture_trainers

    return fixture_trainers


@sampled
@on_all
def test_trainers_resume(trainers: Any, world: int, tmp_path: Path) -> None:
    for folder in ("accelerate", "accelerate_ddp"):
        on_ranks(trainers.resume_accelerate, world, folder)
    on_ranks(trainers.resume_transformers, world, str(tmp_path))
    on_ranks(trainers.resume_lightning, world, TORCHELASTIC_RUN_ID="fixtures", GROUP_RANK="0")
