"""A rank of recovery_time.py: trains, and writes when it does what, for a driver that kills it.

Each line of FOLDER/RANK.log is a list: seconds of CLOCK_MONOTONIC, which all processes share; what
ended then; a number. Imports are timed, so they are not at the top.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = {"demo": (6, 256, 128, 4), "gpt85m": (12, 768, 64, 2), "tiny": (8, 64, 16, 2)}
"""Layers, width, sequence and rows of each; "tiny" has next to no arithmetic."""

TURN = 5  # steps of one job before the other's, with --lock
SEED = 1234


def main() -> None:
    parser = argparse.ArgumentParser(description="Run by benchmarks.recovery_time.")
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="save every N steps; 0: never")
    parser.add_argument("--lock", help="a file: train only while rank 0 has locked it")
    parser.add_argument("folder", type=Path)
    train(parser.parse_args())


def train(args: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    with contextlib.suppress(OSError):  # torchrun gives ranks sessions, between which nice is void
        Path("/proc/self/autogroup").write_text(str(os.nice(0)))
    say = log_of(args.folder / f"{rank}.log")
    import torch
    import torch._dynamo  # which the first optimizer imports

    if args.side == "fsdp2":
        import torch.distributed.checkpoint.state_dict
        import torch.distributed.fsdp
    say("torch")
    from torch import distributed as dist

    from benchmarks.models import NoisyGPT, gpt

    if args.side != "fsdp2":
        import zshard  # noqa: F401
    say("imports")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say("group")
    torch.manual_seed(SEED)
    layers, width, seq, rows = MODELS[args.model]
    workload, module = gpt("", layers, width, seq, rows), NoisyGPT(layers, width, width // 64, seq)
    say("model")
    side = SIDES[args.side](module, workload, args)
    torch.manual_seed(rank)
    say("wrapped")
    start = side.recover()
    say("recovered", start)
    for step in range(start, args.steps):
        take_turns(args.lock, step)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        batch = workload.batch(generator)
        say("begin", step)
        loss: Any = workload.loss(side.model, batch)
        loss.backward()
        say("backward", step)
        side.step(step + 1)
        side.optimizer.zero_grad()
        say("end", [step, loss.item().hex()])
    dist.destroy_process_group()


def log_of(path: Path) -> Callable[..., None]:
    """Return a function that writes a line at once, so that it outlives kill -9."""
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def say(what: str, number: Any = 0) -> None:
        os.write(file, f"{json.dumps([time.monotonic(), what, number])}\n".encode())

    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    started = ticks / os.sysconf("SC_CLK_TCK") - boot
    os.write(file, f"{json.dumps([started, 'start', os.getpid()])}\n".encode())
    say("python")
    return say


def take_turns(lock: str | None, step: int) -> None:
    """On rank 0, wait for the lock; the other ranks wait for rank 0 in the forward."""
    if lock is None or os.environ["RANK"] != "0" or step % TURN:
        return
    file = opened(lock)
    fcntl.flock(file, fcntl.LOCK_UN)
    time.sleep(0.02)
    fcntl.flock(file, fcntl.LOCK_EX)


@functools.cache
def opened(path: str) -> int:
    return os.open(path, os.O_RDWR)


class Saved:
    """zshard's FSDP, saved every few steps."""

    def __init__(self, module: Any, workload: Any, args: argparse.Namespace) -> None:
        from torch.optim.lr_scheduler import StepLR

        self.folder, self.every = args.folder / "saved", args.every
        self.model, self.optimizer = self.wrapped(module, workload)
        self.scheduler = StepLR(self.optimizer, 3, 0.99)

    def wrapped(self, module: Any, workload: Any) -> tuple[Any, Any]:
        from zshard import FSDP, AdamW

        model = FSDP(module, auto_wrap_policy=set(workload.units))
        return model, AdamW(model.parameters(), lr=workload.lr)

    def recover(self) -> int:
        import zshard

        if zshard.latest_checkpoint(self.folder) is None:
            return 0
        found: Any = zshard.load(self.folder, self.model, self.optimizer)
        self.scheduler.load_state_dict(found["scheduler"])
        zshard.set_rng_state(found["rng"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(found["buffers"][name])
        return int(found.step)

    def step(self, number: int) -> None:
        self.optimizer.step()
        self.scheduler.step()
        if self.every and number % self.every == 0:
            self.save(number)

    def save(self, number: int) -> None:
        import zshard

        extra = {"scheduler": self.scheduler.state_dict(), "rng": zshard.rng_state()}
        extra["buffers"] = dict(self.model.named_buffers())
        zshard.save(self.folder, self.model, self.optimizer, step=number, extra=extra, keep_last=2)


class Kept(Saved):
    """zshard's FSDP in a kept run."""

    def recover(self) -> int:
        import zshard

        self.kept = zshard.Keep(self.model, self.optimizer, self.scheduler)
        return int(self.kept.recover({"step": 0})["step"])

    def step(self, number: int) -> None:
        with self.kept.commit({"step": number}):
            self.optimizer.step()
            self.scheduler.step()


class FSDP2(Saved):
    """torch's fully_shard, saved by torch.distributed.checkpoint."""

    def wrapped(self, module: Any, workload: Any) -> tuple[Any, Any]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for child in list(module.modules()):
            if type(child) in workload.units:
                fully_shard(child, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module, torch.optim.AdamW(module.parameters(), lr=workload.lr, fused=True)

    def state(self) -> dict[str, Any]:
        import torch
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"rng": torch.get_rng_state(), "scheduler": self.scheduler.state_dict()}
        own["buffers"] = dict(self.model.named_buffers())
        return {"model": model, "optimizer": optimizer, f"own{os.environ['RANK']}": own}

    def recover(self) -> int:
        import torch
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        numbers = [int(path.parent.name) for path in self.folder.glob("*/.metadata")]
        if not numbers:
            return 0
        state = self.state()
        load(state, checkpoint_id=self.folder / str(max(numbers)))
        own = state.pop(f"own{os.environ['RANK']}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(own["scheduler"])
        torch.set_rng_state(own["rng"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(own["buffers"][name])
        return max(numbers)

    def save(self, number: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state(), checkpoint_id=self.folder / str(number))
        if os.environ["RANK"] == "0":
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder / str(number - 2 * self.every))


SIDES = {"kept": Kept, "zshard": Saved, "fsdp2": FSDP2}

if __name__ == "__main__":
    main()
