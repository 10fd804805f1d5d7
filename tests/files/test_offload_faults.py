"""What fails while a model on a disk trains: memory for buffers, writes, reads.

Each case is a process of its own, as limits and losses are a process's.
"""

from __future__ import annotations

import contextlib
import os
import resource

import pytest
import torch
from nursery import fork_ranks
from scenarios import message_of
from torch import nn

import zshard
from zshard import Offload

MANY = 1 << 20  # bytes


def written():
    with open("/proc/self/io") as file:
        return int(file.read().split()[3])  # wchar


def wrap(folder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 1))
    where = Offload(directory=folder, cache=1 << 20) if folder else None
    model = zshard.FSDP(model, offload=where)
    return model, zshard.AdamW(model.parameters(), 1e-2)


def grads(model):
    model(torch.ones(1, 2048)).sum().backward()


def begun(folder):
    """Return a model on the disk, after two steps and a backward, and its optimizer."""
    torch.set_num_threads(1)
    model, optimizer = wrap(folder)
    for _ in range(2):
        grads(model)
        optimizer.step()
        optimizer.zero_grad()
    assert written() > MANY
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


def alone(function, folder, *args):
    """Call it in a new process with a folder; return what it returned."""
    (rank,) = fork_ranks(function, 1, str(folder), *args, check=True)
    return rank.value


def without_memory(folder):
    model, optimizer = begun(folder)
    before = written()
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()
    with limited(resource.RLIMIT_DATA, data + (4 << 20)):
        optimizer.step()
    count = written() - before
    plain, plain_optimizer = wrap()
    for _ in range(3):
        plain_optimizer.zero_grad()
        grads(plain)
        plain_optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    return count


@pytest.mark.thorough
def test_no_memory_for_a_buffer(tmp_path):
    """The step then works on the mapping."""
    assert alone(without_memory, tmp_path) < MANY  # the second unit's buffers are small


def unwritable(folder, in_backward):
    model, optimizer = begun(folder)
    optimizer.step()
    optimizer.zero_grad()
    if in_backward:
        model.optimizer_in_backward(optimizer)
    else:
        grads(model)
    step = (lambda: grads(model)) if in_backward else optimizer.step
    with limited(resource.RLIMIT_FSIZE, 4096):
        return [message_of(step, OSError) for _ in range(2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_backward", [False, True])
def test_unwritable_disk(tmp_path, in_backward):
    """A file that rejects further writes acts like an I/O error: the step reports it, and so does
    every later call."""
    for text in alone(unwritable, tmp_path, in_backward):
        assert "restart from a checkpoint" in text


def unwritable_for_a_time(folder):
    model, optimizer = begun(folder)
    text = ""
    with limited(resource.RLIMIT_FSIZE, 4096):
        try:
            optimizer.step()
        except OSError as error:  # not by pytest.raises, which would keep the model
            text = str(error)
    del model, optimizer
    model, optimizer = wrap(folder)
    grads(model)
    optimizer.step()
    return text


def test_another_model_after_an_unwritable_disk(tmp_path):
    """What was lost ended with its model: the next one, in a better place, is as new."""
    assert "restart from a checkpoint" in alone(unwritable_for_a_time, tmp_path)


def unreadable(folder):
    model, _ = begun(folder)
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "/zshard-" in os.readlink("/proc/self/fd/" + fd):
                os.ftruncate(int(fd), 4096)
    return [message_of(lambda: model(torch.ones(1, 2048)), OSError) for _ in range(3)]


def test_unreadable_disk(tmp_path):
    """Every read of what the disk has lost is an error, not the first one alone: to touch it would
    end the process."""
    for text in alone(unreadable, tmp_path):
        assert "cannot read back" in text
