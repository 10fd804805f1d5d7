"""Write tests/checkpoint/fixtures: a checkpoint of a kind, for test_fixtures.py.

    cd tests/checkpoint
    PYTHONPATH=../lib python -c 'from write_fixtures import main; main("plain")'

The files in the repository are old on purpose: later versions must load what an earlier one wrote.
So leave them as they are, and add a function for a kind that is new, as save_plain(). fixtures/README.md
names the commit that has the functions of the others.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import fixed_values as fixed
import torch
from fixed_values import rank
from nursery import fork_ranks

import zshard
from zshard import FSDP


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


def save_plain(folder: Path) -> None:
    """After two batches of four samples on each rank."""
    model, optimizer = trained()
    position, loader = fixed.data_position()
    for _, _ in zip(range(2), position.batches(loader), strict=False):
        pass
    fixed.seed_all(rank())
    extra = {**fixed.script_state(rank()), "rng": zshard.rng_state(), "data": position.state_dict()}
    zshard.save(folder, model, optimizer, step=3, extra=extra)


def main(*kinds: str) -> None:
    """Write these kinds, each by its function, on two ranks."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    print(f"commit {commit}, zshard {zshard.__version__}, torch {torch.__version__}")
    for kind in kinds:
        folder = fixed.FOLDER / kind
        folder.mkdir(parents=True)
        fork_ranks(globals()[f"save_{kind}"], 2, folder, check=True)
        print(kind, sum(path.stat().st_size for path in folder.rglob("*")), "bytes")
