"""Rows R, C and E: what one rank does alone, calls that do not match, and wrong environments."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.failures.job import BAD, STEPS, Job, differences, loss_of


def do(job: Job, deed: str, model: nn.Module, optimizer: Any) -> None:
    """Do something that the other ranks do not."""
    if deed == "skip":
        own = optimizer.step
        optimizer.step = lambda: setattr(optimizer, "step", own)
    elif deed == "lr":
        optimizer.param_groups[0].update(lr=0.05)
    elif deed == "load":
        job.side.inner(model).load_state_dict(job.model(seed=5).state_dict())
    elif deed == "write":
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    elif deed == "evaluate":
        with torch.no_grad():
            model(job.batch(9))
    elif deed == "state":
        job.side.full(model)
    elif deed == "backward":
        loss_of(model(job.batch(9))).backward()


def alone(job: Job, rank: str, deed: str) -> str:
    """Train while one rank does something before step BAD."""
    model = job.wrap(job.model())
    optimizer = job.sgd(model)
    for number in range(STEPS):
        if number == BAD and job.rank == int(rank):
            job.fault()
            do(job, deed, model, optimizer)
        job.step(model, optimizer, number)
    found = job.side.full(model)
    both = job.alike(torch.cat([value.flatten() for value in found.values()]))
    return both or differences(found, job.plain(job.model()))


def gathers(job: Job, *which: str) -> str:
    """Gather parameter which[rank] on each rank."""
    model = job.wrap(job.model())
    expected = list(job.model().parameters())
    params = list(job.side.inner(model).parameters())
    job.fault()
    mine = int(which[job.rank])
    return differences({"": job.side.value(params[mine])}, {"": expected[mine].detach()})


def other_calls(job: Job) -> str:
    model, _ = job.trained(1)
    job.fault()
    if job.last:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return ""
    return differences(job.side.full(model), job.plain(job.model(), 1))


def too_many(job: Job) -> str:
    os.environ["WORLD_SIZE"] = "3"
    job.fault()
    job.begin()
    return job.train()


def rank_too_large(job: Job) -> str:
    os.environ["RANK"] = str(job.rank + 2)
    job.fault()
    job.side.begin(job.timeout)
    return job.train()


def no_launcher(job: Job) -> str:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    model, _ = job.trained()
    return differences(job.side.full(model), job.plain(job.model(), world=1))


def destroyed(job: Job) -> str:
    model = job.wrap(job.model())
    optimizer = job.sgd(model)
    job.step(model, optimizer, 0)
    dist.barrier()
    job.fault()
    dist.destroy_process_group()
    job.step(model, optimizer, 1)
    return differences(job.side.full(model), job.plain(job.model(), 2))


def forks(job: Job) -> str:
    model = job.wrap(job.model())
    optimizer = job.sgd(model)
    batches = [job.batch(number) for number in range(STEPS)]
    for number, batch in enumerate(DataLoader(batches, batch_size=None, num_workers=2)):
        assert torch.equal(batch, batches[number])
        job.step(model, optimizer, number)
    return differences(job.side.full(model), job.plain(job.model()))
