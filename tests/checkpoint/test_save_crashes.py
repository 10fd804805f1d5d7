"""Saves that a crash ends: of one rank, of all, or of the machine's power; also in the background.

All of a save's file operations go through one table of calls (csrc/checkpoint/fs.h). Ranks are
killed at some of them, one process at each of them, and the log of all calls determines the
possible states after a power cut. Afterwards the newest checkpoint is complete, bit for bit; the
next save works, and leaves nothing of the broken one.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import finished, inside, tensors_in, whole
from file_faults import file_faults, file_log, forked
from nursery import fork_ranks
from optim_states import rank
from power_cut import Disk, logged, read_log, tree_of
from safetensors import SafetensorError
from torch import nn

import zshard
from zshard import FSDP

MEMORY = "/dev/shm"  # syncs take no time there: these tests do not depend on the disk


@pytest.fixture
def folder(tmp_path):
    """An empty folder."""
    if not os.access(MEMORY, os.W_OK):
        yield str(tmp_path)
        return
    with tempfile.TemporaryDirectory(prefix="zshard-test-", dir=MEMORY) as path:
        yield path


def make():
    """Create two files of a model with shards on both ranks, with an optimizer that has state."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    optimizer = zshard.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(model, optimizer, folder, step, is_numbered=True, **options):
    """Save values that identify the step, as one of the last two or in place of the last."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            optimizer.state[param]["exp_avg"].fill_(-step)
    kind = {"step": step, "keep_last": 2} if is_numbered else {"overwrite": True}
    options = {"max_shard_size": 20_000, **kind, **options}
    path = folder if is_numbered else f"{folder}/x"
    return zshard.save(path, model, optimizer, **options)


def step_in(path):
    """Return the step of a complete checkpoint."""
    assert path is not None, "no checkpoint is left"
    tensors = whole(path)
    (step,) = {number for value in tensors.values() for number in value.unique().tolist()}
    moments = {n: v for n, v in tensors_in(path, "optimizer").items() if n.endswith("exp_avg")}
    assert len(tensors) == len(moments) == 4
    assert all(value.eq(-step).all() for value in moments.values())
    assert path.endswith((f"step-{int(step):08}", "/x"))
    return int(step)


def newest(folder):
    """Return the step that a script would resume from, after checking all."""
    steps = [step_in(path) for path in finished(folder)]
    one = f"{folder}/x" if os.path.exists(f"{folder}/x") else zshard.latest_checkpoint(folder)
    found = step_in(one)
    assert found == max(steps, default=found)
    return found


def check_after(folder, model, optimizer, **options):
    """Check the leftovers of a broken save: the newest step is complete, as are the others. The
    next save leaves nothing else."""
    found = newest(folder)
    save(model, optimizer, folder, found + 1, **options)
    assert newest(folder) == found + 1
    if dist.is_initialized():
        dist.barrier()  # other ranks may return while rank 0 still deletes old checkpoints
    assert not [name for name in inside(folder) if name.startswith(".")]
    return found


# --- one process ----------------------------------------------------------------------------------


def interrupted_at_each_call(folder, what):
    """Return how many saves have raised."""
    model, optimizer = make()
    raised = 0
    for step in range(1, 1000):
        file_faults(step, what)
        try:
            save(model, optimizer, folder, step)
        except InterruptedError:
            raised += 1
            file_faults(0)
            save(model, optimizer, folder, step)
        assert newest(folder) == step
        if file_faults(0) < step:
            return raised
    raise AssertionError("a save without end")


def test_short_counts_and_interrupts_at_each_call(folder):
    """Saves continue after these, except where a sync or a stat is interrupted."""
    for what, counts in (("short", [0]), ("EINTR", range(1, 20))):
        (result,) = fork_ranks(interrupted_at_each_call, 1, f"{folder}/{what}", what, check=True)
        assert result.value in counts


def killed_at_each_call(folder, is_numbered, what):
    """Return how often each checkpoint was found."""
    both, seen = make(), Counter()
    for nth in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        for step in (1, 2):
            save(*both, folder, step, is_numbered)
        calls = forked(nth, what, lambda: save(*both, folder, 3, is_numbered))
        if calls is not None and calls < nth:
            return seen, nth - 1
        seen[check_after(folder, *both, is_numbered=is_numbered)] += 1


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "killshort", "killafter"])
@pytest.mark.parametrize("is_numbered", [True, False], ids=["numbered", "overwritten"])
def test_process_killed_during_a_save(is_numbered, what, folder):
    args = f"{folder}/y", is_numbered, what
    seen, calls = fork_ranks(killed_at_each_call, 1, *args, check=True)[0].value
    assert calls > 40 and set(seen) == {2, 3}  # the old one until the last steps, then the new
    assert seen[2] > seen[3]


# --- power ----------------------------------------------------------------------------------------


def saves_with_a_log(folder, log, steps):
    """Save these steps; return the number of calls when each of them had returned."""
    model, optimizer = make()
    file_log(log)
    returned = {}
    for step in steps:
        save(model, optimizer, folder, step, asynchronous=step == 3).wait()
        returned[step] = len(read_log(Path(log))) if log else 0
    file_log(None)
    return returned


@pytest.mark.thorough
def test_power_cut_at_each_call(folder, tmp_path):
    """In every state of the disk, each checkpoint is complete or does not count, and every
    checkpoint for which save() returned exists."""
    log, root, cut = tmp_path / "log", Path(folder, "x"), Path(folder, "cut")
    root.mkdir()
    fork_ranks(saves_with_a_log, 2, str(root), None, (1,), check=True, timeout=60)
    disk = Disk(root)
    rows = fork_ranks(saves_with_a_log, 2, str(root), str(log), (2, 3, 4), check=True)
    returned = rows[0].value
    found = Counter()
    for state in disk.states(read_log(log), cut):
        step = newest(cut)
        found[step] += 1
        told = [step for step, calls in returned.items() if state.calls >= calls]
        assert step >= max(told, default=0)
    assert set(found) == {1, 2, 3, 4} and sum(found.values()) > 500


def is_faulty(state, calls):
    """Return whether a save of step 2 with these calls cannot leave this state."""
    try:
        return newest(state.folder) < 2 and state.calls >= len(calls)
    except (AssertionError, OSError, ValueError, zshard.CheckpointError, SafetensorError):
        return True


@pytest.mark.thorough
def test_each_sync_of_a_save_is_needed(folder, tmp_path):
    """The model of a power cut finds each one that is left out of the log."""
    disk_root, log, cut = Path(folder, "x"), tmp_path / "log", Path(folder, "cut")
    disk_root.mkdir()
    both = make()
    save(*both, disk_root, 1)
    disk = Disk(disk_root)
    with logged(log):
        save(*both, disk_root, 2, max_shard_size="1 MB")
    assert disk.replayed(log) == tree_of(disk_root), "the log does not explain the folder"
    calls = read_log(log)
    assert not any(is_faulty(each, calls) for each in disk.states(calls, cut, 0))
    syncs = [nth for nth, call in enumerate(calls) if call.name == "sync"]
    assert len(syncs) == 7  # of five files, the hidden folder and the one around it
    for nth in syncs:
        others = calls[:nth] + calls[nth + 1 :]
        assert any(is_faulty(each, others) for each in disk.states(others, cut, 0)), nth


# --- ranks -----------------------------------------------------------------------------------------


def saves_until_killed(folder, victim, call, kind, asynchronous):
    """Save step 1, then step 2, in which a rank is killed at one of its calls."""
    model, optimizer = make()
    save(model, optimizer, folder, 1)
    if rank() == victim:
        file_faults(call, kind)
    save(model, optimizer, folder, 2, asynchronous=asynchronous)


def after_a_restart(folder):
    return check_after(folder, *make())


def killed_rank(pool, folder, victim, call, kind, asynchronous):
    """Kill a rank at a call and check the folder; return the step that is found, or None if there
    was no such call."""
    args = str(folder), victim, call, kind, asynchronous
    results = fork_ranks(saves_until_killed, 2, *args, timeout=60)
    other = results[1 - victim]
    assert other.returncode is not None, "the other rank hangs"
    assert other.returncode == 0 or "PeerError" in other.stderr
    steps = pool.run(after_a_restart, str(folder))
    assert steps[0] == steps[1] and steps[0] in (1, 2)
    return steps[0] if results[victim].returncode == -signal.SIGKILL else None


KILLS = [(0, 3, "kill"), (0, 9, "killshort"), (0, 30, "killafter"), (1, 1, "kill")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("victim", "call", "kind"), [*KILLS, (1, 3, "killafter")])
def test_rank_killed_during_a_save(pool2, victim, call, kind, asynchronous, folder):
    assert killed_rank(pool2, folder, victim, call, kind, asynchronous)


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["kill", "killafter"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_at_each_call(pool2, victim, kind, asynchronous, folder):
    seen = Counter()
    for call in itertools.count(1):
        path = Path(folder, str(call))
        path.mkdir()
        step = killed_rank(pool2, path, victim, call, kind, asynchronous)
        if step is None:
            break
        seen[step] += 1
    assert call > (30 if victim == 0 else 6) and seen[1] > 5
    assert victim == 1 or seen[2] > 0
