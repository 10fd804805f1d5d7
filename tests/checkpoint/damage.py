"""Checkpoints to damage, and loads that must refuse them.

A failed load must leave everything unchanged, so each attempt returns the message, the changes and
the files that are still open, and one function checks all three on all ranks.
"""

from __future__ import annotations

import copy
import os

import torch
from models import make_optimizer, wrapped
from optim_states import FULL, differ, rank
from scenarios import Stack, forward_backward, message_of

import zshard
from zshard import CheckpointError


def model_and_optimizer():
    """After a step, so that there is state that must not change."""
    model = wrapped(Stack, FULL)
    optimizer = make_optimizer("zshard.AdamW", model)
    forward_backward(model, rank())
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer):
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def saved(path, scale=1):
    """A checkpoint in several files."""
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    zshard.save(path, model, optimizer, max_shard_size="2 KB", extra={"a": 1})


def refused(path, kind, options, with_optimizer):
    """Return (the message, the changes, open files of the checkpoint) of a load."""
    model, optimizer = model_and_optimizer()
    before = state_of(model, optimizer)
    state = optimizer if with_optimizer else None
    said = message_of(lambda: zshard.load(path, model, state, **options), kind)
    return said, differ(state_of(model, optimizer), before), open_files(path)


def open_files(path):
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [each for each in links if each.startswith(str(path))]


def check(pool, path, words, kind=CheckpointError, with_optimizer=True, **options):
    """Check that both ranks refuse with these words, and that nothing has changed."""
    for said, changed, left in pool.run(refused, str(path), kind, options, with_optimizer):
        assert changed == [] and left == []
        for word in [words] if isinstance(words, str) else words:
            assert word in said, said


def flip(file, at, bit=0):
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(bytes(content))
