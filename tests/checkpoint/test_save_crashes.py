"""Saves that a crash ends: of one rank, of all, or of the machine's power; also in the background.

All of a save's file operations go through one table of calls (csrc/checkpoint/fs.h). Ranks are
killed at some of them or at any time, one process at each of them, and the log of all calls
determines what a power cut may leave. Afterwards the newest checkpoint is complete, bit for bit;
the next save works, and leaves nothing of the broken one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import finished, inside, manifest_in, states_in, tensors_in, whole
from compare import differences
from file_faults import file_faults, file_log
from nursery import fork_ranks
from optim_states import rank
from power_cut import Disk, read_log
from torch import nn

import zshard
from zshard import FSDP

MEMORY = "/dev/shm"  # syncs take no time there: these tests do not depend on the disk


@pytest.fixture
def folder(tmp_path):
    """An empty folder."""
    if not os.access(MEMORY, os.W_OK):
        yield str(folder)
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


def save(model, optimizer, folder, step, **options):
    """Save values that identify the step."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            optimizer.state[param]["exp_avg"].fill_(-step)
    kept = {"keep_last": 2, "max_shard_size": 20_000}
    return zshard.save(folder, model, optimizer, step=step, **kept, **options)


def step_in(path):
    """Return the step of a complete checkpoint."""
    assert path is not None, "no checkpoint is left"
    step = manifest_in(path).step
    tensors = whole(path)
    assert len(tensors) == 4
    assert differences(tensors, {n: torch.full_like(v, step) for n, v in tensors.items()}) == []
    assert path.endswith(f"step-{step:08}")
    return step


def check_after(folder, model, optimizer):
    """Check the leftovers of a broken save: the newest step is complete, as are the others. The
    next save leaves nothing else."""
    found = step_in(zshard.latest_checkpoint(folder))
    for path in finished(folder):
        step_in(path)
    save(model, optimizer, folder, found + 1)
    assert step_in(zshard.latest_checkpoint(folder)) == found + 1
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
        found = step_in(zshard.latest_checkpoint(folder))
        assert found == step
        if file_faults(0) < step:
            return raised
    raise AssertionError("a save without end")


def test_short_counts_and_interrupts_at_each_call(folder):
    """Saves continue after these, except where a sync or a stat is interrupted."""
    short, stopped = (
        fork_ranks(interrupted_at_each_call, 1, f"{folder}/{what}", what, check=True)[0].value
        for what in ("short", "EINTR")
    )
    assert short == 0 and 0 < stopped < 20


def saves_first(folder):
    save(*make(), folder, 1)


def saves_with_a_log(folder, log):
    """Save steps 2, 3 and 4; return the number of calls when each of them had returned."""
    model, optimizer = make()
    file_log(log)
    returned = {}
    for step in (2, 3, 4):
        handle = save(model, optimizer, folder, step, asynchronous=step == 3)
        if step == 3:
            handle.wait()
        returned[step] = len(read_log(Path(log)))
    file_log(None)
    return returned


@pytest.mark.thorough
def test_power_cut_at_each_call(folder, tmp_path):
    """Whatever the disk has then, each checkpoint is complete or does not count, and everything
    that save() returned for exists."""
    log, root, cut = tmp_path / "log", Path(folder, "x"), Path(folder, "cut")
    root.mkdir()
    fork_ranks(saves_first, 2, str(root), check=True, timeout=60)
    disk = Disk(root)
    rows = fork_ranks(saves_with_a_log, 2, str(root), str(log), check=True, timeout=60)
    returned = rows[0].value
    found = Counter()
    for state in disk.states(log, cut):
        for path in finished(cut):
            step_in(path)
        newest = step_in(zshard.latest_checkpoint(cut))
        found[newest] += 1
        told = [step for step, calls in returned.items() if state.calls >= calls]
        assert newest >= max(told, default=0)
    assert set(found) == {1, 2, 3, 4} and sum(found.values()) > 500


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
    """Kill a rank at a call and check what is left; return whether there was such a call."""
    results = fork_ranks(
        saves_until_killed, 2, str(folder), victim, call, kind, asynchronous, timeout=60
    )
    was = results[victim].returncode == -signal.SIGKILL
    other = results[1 - victim]
    assert other.returncode is not None, "the other rank hangs"
    assert other.returncode == 0 or "PeerError" in other.stderr
    for found in pool.run(after_a_restart, str(folder)):
        assert found in (1, 2)
    return was


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("victim", "call", "kind"),
    [
        (0, 3, "kill"),
        (0, 9, "killshort"),
        (0, 30, "killafter"),
        (1, 1, "kill"),
        (1, 3, "killafter"),
    ],
)
def test_rank_killed_during_a_save(pool2, victim, call, kind, asynchronous, folder):
    assert killed_rank(pool2, folder, victim, call, kind, asynchronous)


def saves_for_ever(folder):
    model, optimizer = make()
    for step in range(1, 10_000):
        save(model, optimizer, folder, step, asynchronous=step % 2 == 0)


def first_of(folder):
    """Wait until there is a checkpoint and a little longer, then kill all ranks."""
    if os.environ["RANK"] == "0" and os.fork() == 0:
        deadline = time.monotonic() + 30
        while zshard.latest_checkpoint(folder) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    try:
        saves_for_ever(folder)
    except zshard.PeerError:
        sys.exit(9)


def kill_at_random(pool, folder):
    codes = {r.returncode for r in fork_ranks(first_of, 2, str(folder), timeout=60)}
    assert codes == {-signal.SIGKILL, 9}
    for found in pool.run(after_a_restart, str(folder)):
        assert found >= 1


def test_killed_at_random(pool2, folder):
    kill_at_random(pool2, folder)


@pytest.mark.thorough
@pytest.mark.parametrize("attempt", range(100))
def test_killed_at_random_often(pool2, attempt, folder):
    kill_at_random(pool2, folder)


# --- each call of a process -----------------------------------------------------------------------


def state(value):
    """A model and its optimizer in which each number is `value`."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            optimizer.state[param]["momentum_buffer"] = torch.full_like(param, value)
    return model, optimizer


def value_in(path):
    """Return the number in a checkpoint; AssertionError if it is not complete."""
    manifest_in(path)
    found = [*tensors_in(path).values()]
    found += [own["momentum_buffer"] for own in states_in(path).values()]
    assert len(found) == 4
    (value,) = {number for tensor in found for number in tensor.flatten().tolist()}
    return value


def forked(nth, what, action):
    """Return how many calls a child made, or None if it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            file_faults(nth, what)
            action()
            os.write(writing, str(file_faults(0)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    return int(text)


def numbered(folder, value):
    """Add a checkpoint to a directory that keeps one."""
    zshard.save(folder, *state(value), step=int(value), keep_last=1)


def overwritten(folder, value):
    zshard.save(folder / "x", *state(value), overwrite=True)


def another(folder, value):
    zshard.save(folder / f"x{value:g}", *state(value))


def found_in(folder, way):
    """Return the number of the checkpoint that a script would resume from, after checking all."""
    if way is numbered:
        values = [value_in(folder / name) for name in inside(folder) if name.startswith("step")]
        newest = value_in(zshard.latest_checkpoint(folder))
        assert newest == max(values)
        return newest
    return max(value_in(folder / name) for name in inside(folder) if name.startswith("x"))


def killed_at_each_call(way, what, folder):
    """Return how often each checkpoint was found."""
    seen, nth = Counter(), 0
    while True:
        nth += 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        way(folder, 1.0)
        calls = forked(nth, what, lambda: way(folder, 2.0))
        if calls is not None and calls < nth:
            return seen, nth - 1
        seen[found_in(folder, way)] += 1
        way(folder, 3.0)
        names = {numbered: ["step-00000003"], overwritten: ["x"]}.get(way, ["x1", "x3"])
        left = [name for name in inside(folder) if name != "x2" and not _of(name, "x2")]
        assert left == names, (nth, left)
        assert found_in(folder, way) == 3.0


def _of(name, other):
    """Return whether it is a leftover of a save of `other` that the next save of that name cleans
    up."""
    return name.startswith(f".{other}.")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "killshort", "killafter"])
@pytest.mark.parametrize("way", [numbered, overwritten, another], ids=lambda way: way.__name__)
def test_process_killed_during_a_save(way, what, tmp_path):
    result = fork_ranks(killed_at_each_call, 1, way, what, tmp_path / "x", check=True)
    seen, calls = result[0].value
    assert calls > 40 and set(seen) == {1.0, 2.0}  # the old one until the last steps, then the new
    assert seen[1.0] > seen[2.0]


# --- ranks ----------------------------------------------------------------------------------------


def saved_by_ranks(folder, victim, nth, what):
    """Two numbered checkpoints; a rank is killed while it saves the second."""
    for value in (1.0, 2.0):
        plain, optimizer = state(value)
        model = FSDP(plain, transport="c10d")
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.full_like(param, value)
        file_faults(nth if value == 2.0 and dist.get_rank() == victim else 0, what)
        zshard.save(folder, model, optimizer, step=int(value))
    return file_faults(0)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["kill", "killafter"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_at_each_call(victim, what, tmp_path):
    seen, nth = Counter(), 0
    while True:
        nth += 1
        folder = tmp_path / str(nth)
        folder.mkdir()
        results = fork_ranks(saved_by_ranks, 2, folder, victim, nth, what)
        calls = results[victim].value
        if calls is not None and calls < nth:
            break
        assert results[victim].returncode == -signal.SIGKILL, results[victim].stderr
        other = results[1 - victim]
        assert other.returncode == 0 or "PeerError" in other.stderr, other.stderr
        seen[found_in(folder, numbered)] += 1
        numbered(folder, 3.0)
        assert inside(folder) == ["step-00000003"]
    assert nth > (30 if victim == 0 else 6) and seen[1.0] > 5
    assert victim == 1 or seen[2.0] > 0
