"""Checkpoints to damage, and loads that must refuse them.

A failed load must leave everything unchanged, so each attempt returns the message, the changes and
the files that are still open, and one function checks all three on all ranks.
"""

from __future__ import annotations

import copy
import os

from models import make_optimizer, wrapped
from optim_states import FULL, differ, rank
from scenarios import Stack, forward_backward, message_of
from spawn import RankPool

import zshard
from zshard import CheckpointError


def good_one(pools, folder):
    """Return a checkpoint of two ranks in a new folder below `folder`; tests must not change it."""
    path = folder / "x"
    pools.setdefault(2, RankPool(2)).run(saved, str(path))
    return path


def model_and_optimizer(kind="zshard.AdamW", build=Stack):
    """After a step, so that there is state that must not change."""
    model = wrapped(build, FULL)
    optimizer = make_optimizer(kind, model)
    forward_backward(model, rank())
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def saved(path, size="2 KB"):
    """A checkpoint in several files."""
    model, optimizer = model_and_optimizer()
    zshard.save(path, model, optimizer, max_shard_size=size, extra={"a": 1})


def refused(path, kind, options=None, with_optimizer=True, optimizer_kind="zshard.AdamW"):
    """Return (the message, what has changed, open files of the checkpoint) of a load."""
    model, optimizer = model_and_optimizer(optimizer_kind)
    before = state_of(model, optimizer)
    given = optimizer if with_optimizer else None
    said = message_of(lambda: zshard.load(path, model, given, **(options or {})), kind)
    return said, differ(state_of(model, optimizer), before), open_files(path)


def open_files(path):
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [each for each in found if each.startswith(str(path))]


def check(pool, path, words, kind=CheckpointError, **options):
    """Check that both ranks refuse with this text, and that nothing has changed."""
    found = pool.run(refused, str(path), kind, *options.values())
    for said, changed, left_open in found:
        assert changed == [] and left_open == []
        for word in [words] if isinstance(words, str) else words:
            assert word in said, said


def files_of(path):
    return sorted(each.name for each in path.iterdir())


def flip(file, at, bit=0):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(bytes(content))
