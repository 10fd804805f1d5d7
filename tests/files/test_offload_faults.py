"""Failures while a model on a disk trains: memory for buffers, writes, reads.

Each case is a separate process, as limits and losses are a process's.
"""

from __future__ import annotations

import contextlib
import os
import resource

import pytest
import torch
from nursery import fork_ranks
from offloaded import io_count
from scenarios import message_of
from torch import nn

import zshard
from zshard import Offload

MANY = 1 << 20  # bytes


def wrap(folder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 1))
    where = Offload(directory=folder, cache=1 << 20) if folder else None
    model = zshard.FSDP(model, offload=where)
    return model, zshard.AdamW(model.parameters(), 1e-2)


def grads(model):
    model(torch.ones(1, 2048)).sum().backward()


def begun(folder):
    """Return a model after two steps and a backward, and its optimizer."""
    torch.set_num_threads(1)
    model, optimizer = wrap(folder)
    for _ in range(2):
        grads(model)
        optimizer.step()
        optimizer.zero_grad()
    assert folder is None or io_count("wchar") > MANY
    grads(model)
    return model, optimizer


@contextlib.contextmanager
def limited(what, soft):
    """Context manager with another limit of this process."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def without_memory(folder):
    model, optimizer = begun(folder)
    before = io_count("wchar")
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()
    with limited(resource.RLIMIT_DATA, data + (4 << 20)):
        optimizer.step()
    assert io_count("wchar") - before < MANY  # the second unit's buffers are small
    plain, optimizer = begun(None)
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.thorough
def test_no_memory_for_a_buffer(tmp_path):
    """The step then works on the mapping."""
    fork_ranks(without_memory, 1, str(tmp_path), check=True)


def unwritable(folder, in_backward):
    """The step reports it, and so does every later call; the next model is as new."""
    model, optimizer = begun(folder)
    optimizer.step()
    optimizer.zero_grad()
    if in_backward:
        model.optimizer_in_backward(optimizer)
    else:
        grads(model)
    texts = []
    with limited(resource.RLIMIT_FSIZE, 4096):
        for _ in range(2):
            try:
                grads(model) if in_backward else optimizer.step()
            except OSError as error:  # not by pytest.raises, which would keep the model
                texts.append(str(error))
    assert len(texts) == 2 and all("restart from a checkpoint" in text for text in texts)
    del model, optimizer
    model, optimizer = wrap(folder)
    grads(model)
    optimizer.step()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_backward", [False, True])
def test_unwritable_disk(tmp_path, in_backward):
    """A file that rejects further writes acts like an I/O error."""
    fork_ranks(unwritable, 1, str(tmp_path), in_backward, check=True)


def unreadable(folder):
    model, _ = begun(folder)
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "/zshard-" in os.readlink("/proc/self/fd/" + fd):
                os.ftruncate(int(fd), 4096)
    for _ in range(3):
        assert "cannot read back" in message_of(lambda: model(torch.ones(1, 2048)), OSError)


def test_unreadable_disk(tmp_path):
    """Every read of lost pages is an error, not only the first: touching them would end the
    process."""
    fork_ranks(unreadable, 1, str(tmp_path), check=True)
