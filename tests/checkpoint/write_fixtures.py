"""Write tests/checkpoint/fixtures: a checkpoint of each kind, for test_fixtures.py.

    cd tests/checkpoint
    PYTHONPATH=../lib python -c 'from write_fixtures import main; main("ema", "muon")'  # or all: main()

The files in the repository are old on purpose: later versions must load what an earlier one wrote.
So leave them as they are, and write a kind that is new. fixtures/README.md names their commit.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixed_values as fixed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fixed_values import rank
from nursery import fork_ranks
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import zshard
from zshard import FSDP
from zshard.extras.keeping.client import VARIABLE, Keeper, start


def trained(kind: str = "AdamW") -> tuple[Any, Any]:
    """Return a sharded model and an optimizer, which have the values of the formulas."""
    model = FSDP(fixed.net())
    optimizer = fixed.new_optimizer(kind, model)
    if kind == "AdamW8bit":
        named = zshard.optim_state_dict(model, optimizer)
        zshard.load_optim_state_dict(model, optimizer, {**named, "state": fixed.coded_state()})
    else:
        for _ in range(fixed.STEPS):
            model(torch.ones(2, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.load_state_dict(fixed.weights())
    fixed.seed_all(rank())
    return model, optimizer


# --- checkpoints of zshard.save() -----------------------------------------------------------------


def save_plain(folder: Path) -> None:
    """After two batches of four samples on each rank."""
    model, optimizer = trained()
    position, loader = fixed.data_position()
    for _, _ in zip(range(2), position.batches(loader), strict=False):
        pass
    fixed.seed_all(rank())
    extra = {**fixed.script_state(rank()), "rng": zshard.rng_state(), "data": position.state_dict()}
    zshard.save(folder, model, optimizer, step=3, extra=extra)


def save_per_host(folder: Path) -> None:
    """Two hosts of one rank each."""
    os.environ["ZSHARD_HOST"] = f"node{rank()}"
    model, optimizer = trained()
    disk = folder / f"disk{rank()}"
    disk.mkdir(parents=True)
    extra = fixed.script_state(rank())
    zshard.save(disk, model, optimizer, step=3, extra=extra, per_host=True)


def save_ema(folder: Path) -> None:
    """The averages begin with the weights, and move by half and a quarter of 1."""
    model, optimizer = trained()
    averages = zshard.EMA(model, (0.5, 0.75))
    averages.update()
    model.load_state_dict(fixed.weights(1.0))
    averages.update()
    zshard.save(folder / "saved", model, optimizer, ema=averages)


def save_eight_bit(folder: Path) -> None:
    """With the moments that the codes stand for."""
    model, optimizer = trained("AdamW8bit")
    zshard.save(folder / "saved", model, optimizer)
    state = zshard.AdamW8bit.to_fp32(zshard.optim_state_dict(model, optimizer))["state"]
    moments = {f"{n}.{m}": state[n][m] for n in state for m in ("exp_avg", "exp_avg_sq")}
    if rank() == 0:
        save_file(moments, folder / "moments.safetensors")


def save_muon(folder: Path) -> None:
    zshard.save(folder / "saved", *trained("Muon"))


def save_kept(folder: Path) -> None:
    """A kept run: its memory is not on a disk, but its checkpoints are."""
    model = FSDP(fixed.net())
    optimizer = fixed.new_optimizer("AdamW", model)
    keep = zshard.Keep(model, optimizer)
    begun = keep.recover({"step": 0})["step"]
    for step in range(begun, fixed.STEPS):
        model(torch.ones(2, 3)).backward()
        with keep.commit({"step": step + 1}):
            optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(fixed.weights())
    zshard.save(folder, model, optimizer, step=fixed.STEPS, extra={"step": fixed.STEPS})


# --- what torch writes ----------------------------------------------------------------------------


def save_dcp_fsdp2(folder: Path) -> None:
    """torch.distributed.checkpoint of torch's own fully_shard(): two units, of two dtypes."""
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    model = fixed.net()
    model.load_state_dict(fixed.weights())
    fully_shard(model.low, mesh=mesh)
    module = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), **{**fixed.ADAMW, "lr": 0.0})
    for name, param in module.named_parameters():
        grad = fixed.slope(name, param.shape).to(param.dtype)
        param.grad = distribute_tensor(grad, mesh, param.placements)
    for _ in range(fixed.STEPS):
        optimizer.step()
    states = get_state_dict(module, optimizer)
    beside = {"epoch": 7, "names": (1, "a")}
    dcp.save({"model": states[0], "optimizer": states[1], **beside}, checkpoint_id=folder)


def save_dcp_zshard(folder: Path) -> None:
    model, optimizer = trained()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def save_state_dicts(folder: Path) -> None:
    """torch.save() of full state dicts."""
    for kind in ("AdamW", "AdamW8bit", "Muon"):
        model, optimizer = trained(kind)
        named = zshard.optim_state_dict(model, optimizer)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "named": named}
        if rank() == 0:
            torch.save(states, folder / f"{kind}.pt")


def save_deepspeed(folder: Path) -> None:
    engine = zshard.initialize(model=fixed.net().float(), config=fixed.DEEPSPEED)[0]
    for _ in range(fixed.STEPS):
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
    engine.module.load_state_dict(fixed.weights())
    engine.save_checkpoint(folder, client_state=fixed.script_state(rank()))


# --- all of them ----------------------------------------------------------------------------------


def writer_of(kind: str) -> Callable[[Path], None]:
    """Return the function that writes a kind, on two ranks."""
    if kind in ("accelerate", "accelerate_ddp", "transformers", "lightning"):
        import fixture_trainers

        return vars(fixture_trainers)[f"save_{kind}"]
    return globals()[f"save_{kind}"]


def main(*kinds: str) -> None:
    """Write these kinds; none: all."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    print(f"commit {commit}, zshard {zshard.__version__}, torch {torch.__version__}")
    keeper = Keeper(start())  # for the kept run
    for kind in kinds or fixed.KINDS:
        folder = fixed.FOLDER / kind
        folder.mkdir(parents=True)
        env = {"TORCHELASTIC_RUN_ID": "fixtures", "GROUP_RANK": "0"}  # Lightning looks for them
        if kind == "kept":
            env[VARIABLE] = keeper.token
        fork_ranks(writer_of(kind), 2, folder, env=env, check=True)
        print(kind, sum(path.stat().st_size for path in folder.rglob("*")), "bytes")
    keeper.end()
