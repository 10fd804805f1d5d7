"""zshard.save(asynchronous=True): the state of the moment, one at a time, no failure lost.

A save that is slow on purpose (its writing waits for an event) is under way while the
model is trained on; what is in the files afterwards is what there was before.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from checkpoints import inside, unlike, whole
from compare import differences
from file_faults import file_faults
from models import CASES, train
from nursery import fork_ranks
from optim_states import FULL, HYBRID, rank, trained
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.checkpoint import save, write


class Held:
    """Context in which saves do not begin to write until `go` is set."""

    def __enter__(self):
        self.go, self._write = threading.Event(), save._write

        def write(*args):
            assert self.go.wait(60)
            self._write(*args)

        save._write = write
        return self

    def __exit__(self, *_):
        self.go.set()
        save._write = self._write


def state_of(model, optimizer):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, zshard.optim_state_dict(model, optimizer)


def while_training(name, combination, kind, folder, **options):
    """What differs between the files and the state at the call."""
    model, optimizer = trained(name, combination, kind)
    before = state_of(model, optimizer)
    extra = {"list": [1]}
    with Held() as held:
        saving = zshard.save(
            f"{folder}/x", model, optimizer, extra=extra, asynchronous=True, **options
        )
        assert not saving.done() and not os.path.exists(saving.path)
        extra["list"].append(2)
        train(model, CASES[name], optimizer, rank(), steps=1)
        held.go.set()
        saving.wait()
    assert saving.done()
    dtype = options.get("dtype")
    state = {n: v.to(dtype) if dtype and v.is_floating_point() else v for n, v in before[0].items()}
    return unlike(saving.path, state, before[1]) if rank() == 0 else []


@ranks(1, 2)
@pytest.mark.parametrize("name", ["odds", "net", "tied", "mlp"])
def test_the_files_have_the_state_of_the_call(pool, name, tmp_path):
    for found in pool.run(while_training, name, FULL, "zshard.AdamW", tmp_path):
        assert not found


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op"])
def test_strategies(pool, strategy, tmp_path):
    for found in pool.run(while_training, "net", (strategy, "shm"), "torch.SGD", tmp_path):
        assert not found


def test_copies_of_a_model(pool4, tmp_path):
    for found in pool4.run(while_training, "net", HYBRID[0], "zshard.AdamW", tmp_path):
        assert not found


def in_bf16(folder):
    return while_training("mlp", FULL, "zshard.AdamW", folder, dtype=torch.bfloat16)


@ranks(2)
def test_casts_at_the_call(pool, tmp_path):
    assert pool.run(in_bf16, tmp_path) == [[], []]


def two_after_another(folder):
    """A second save waits for the first; the memory is that of the first."""
    model, optimizer = trained("net", FULL, "zshard.AdamW")
    first = zshard.save(folder, model, optimizer, step=1, asynchronous=True)
    memory = write._buffers[model].data_ptr()
    train(model, CASES["net"], optimizer, rank(), steps=1)
    second = zshard.save(folder, model, optimizer, step=2, asynchronous=True)
    assert first.done() and write._buffers[model].data_ptr() == memory
    zshard.save(folder, model, optimizer, step=3)
    assert second.done()
    return zshard.latest_checkpoint(folder)


@ranks(2)
def test_one_at_a_time(pool, tmp_path):
    assert pool.run(two_after_another, tmp_path) == [str(tmp_path / "step-00000003")] * 2
    first, third = (whole(tmp_path / f"step-0000000{i}") for i in (1, 3))
    assert first.keys() == third.keys() and differences(first, third) != []


def failing(folder, how):
    """A save that fails on rank 1 in the background, told in the way `how`."""
    model = FSDP(nn.Linear(64, 64))  # large enough for both ranks to have some of it
    optimizer = zshard.AdamW(model.parameters())
    with Held() as held:
        saving = zshard.save(f"{folder}/x", model, optimizer, asynchronous=True)
        if rank() == 1:
            file_faults(2, "EIO")
        held.go.set()
        while not saving.done():
            time.sleep(0.01)
    told = []
    for _ in range(2):
        try:
            if how == "wait":
                saving.wait()
            else:
                zshard.save(f"{folder}/y", model, optimizer)
        except OSError as error:
            told.append(str(error))
    left = inside(folder)
    zshard.save(f"{folder}/z", model, optimizer)  # training can go on, and so can saving
    return told, left


@ranks(2)
@pytest.mark.parametrize(("how", "times"), [("wait", 2), ("next", 1)])
def test_a_failure_is_told_on_all_ranks(pool, how, times, tmp_path):
    for told, left in pool.run(failing, tmp_path, how):
        assert len(told) == times and all("rror" in text for text in told), told
        assert "x" not in left
    assert "z" in inside(tmp_path)


# --- the end of a process --------------------------------------------------------------------------


def ends_at_once(folder, fault):
    """A script that is over when its save has just begun."""
    model = FSDP(nn.Linear(64, 64))
    write = save._write

    def slow(*args):
        time.sleep(1)
        if fault:
            file_faults(1, fault)
        write(*args)

    save._write = slow
    zshard.save(f"{folder}/x", model, asynchronous=True)


@pytest.mark.parametrize("world", [1, 2])
def test_a_process_that_ends_waits(world, tmp_path):
    for result in fork_ranks(ends_at_once, world, str(tmp_path), "", timeout=60):
        assert result.returncode == 0, result.stderr
    assert set(whole(tmp_path / "x")) == {"weight", "bias"}


def fails_at_once(folder, transport):
    """One whose training fails then on one rank, and on the other for that."""
    model = FSDP(nn.Linear(64, 64), transport=transport)
    write = save._write

    def slow(*args):
        time.sleep(1)
        write(*args)

    save._write = slow
    zshard.save(f"{folder}/x", model, asynchronous=True)
    if rank() == 1:
        raise ValueError("the training fails")
    model(torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_process_that_fails_waits(transport, tmp_path):
    results = fork_ranks(fails_at_once, 2, str(tmp_path), transport, timeout=60)
    assert [result.returncode for result in results] == [1, 1]
    for result in results:
        assert "failed to save" not in result.stderr
        assert "the training fails" in result.stderr
    assert set(whole(tmp_path / "x")) == {"weight", "bias"}


@pytest.mark.parametrize("world", [1, 2])
def test_a_failure_that_nobody_was_told_of_is_the_exit_status(world, tmp_path):
    for result in fork_ranks(ends_at_once, world, str(tmp_path), "ENOSPC", timeout=60):
        assert result.returncode == 1
        assert "failed to save the checkpoint" in result.stderr and "No space left" in result.stderr
    assert inside(tmp_path) == []


def test_memory_goes_with_the_model(tmp_path):
    model = FSDP(nn.Linear(64, 64))
    zshard.save(tmp_path / "x", model, asynchronous=True).wait()
    assert len(write._buffers) == 1
    del model
    assert len(write._buffers) == 0
