"""A save that is ended anywhere leaves a finished checkpoint: the one before it, or its own.

The one idea: everything that a save does to files goes through one table of calls (csrc/fs.h), and a
process can be killed at each of them. Afterwards the newest checkpoint is read by its manifest, bit
by bit; a save after that works, and leaves nothing of the broken one behind.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time

import pytest
import torch
from checkpoints import inside, manifest_in, whole
from nursery import fork_ranks
from optim_states import rank
from torch import nn

import zshard
from zshard import FSDP, _core

MEMORY = "/dev/shm"  # where a sync takes no time: what is asked here does not depend on the disk
KILLS = ["kill", "killshort"]  # before a call, and where that writes, after half of it
FAULTS = ["EIO", "ENOSPC", "EINTR", "short", "EACCES", "EMFILE", "EROFS"]


@pytest.fixture
def folder(tmp_path):
    """An empty folder."""
    if not os.access(MEMORY, os.W_OK):
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="zshard-test-", dir=MEMORY) as path:
        yield path


def make(kind):
    """Two files of a model that both of two ranks have some of, with an optimizer that has state."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), strategy=kind)
    optimizer = zshard.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(model, optimizer, folder, step, **options):
    """Values that tell the step."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            optimizer.state[param]["exp_avg"].fill_(-step)
    zshard.save(folder, model, optimizer, step=step, keep_last=2, max_shard_size=20_000, **options)


def step_in(path):
    """The step that a whole checkpoint is of."""
    assert path is not None, "no checkpoint is left"
    step = manifest_in(path).step
    tensors = whole(path)
    assert len(tensors) == 4
    assert all(torch.equal(v, torch.full_like(v, step)) for v in tensors.values())
    assert path.endswith(f"step-{step:08}")
    return step


def check_after(folder, model, optimizer, before, now):
    """What a broken save of step `now` has left, where `before` was the newest. The step found."""
    found = step_in(zshard.latest(folder))
    assert found in (before, now)
    for name in inside(folder):
        if not name.startswith("."):
            step_in(f"{folder}/{name}")
    save(model, optimizer, folder, now + 1)
    assert step_in(zshard.latest(folder)) == now + 1
    left = [name for name in inside(folder) if name.startswith(".")]
    assert left in ([], [".zshard.lock"])
    return found


# --- one process, at each call ---------------------------------------------------------------------


def forked(action):
    """How a child that does `action` ends: an exit status, or minus a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_each_call(folder, kind):
    """Kills a child of this process at each of its calls; {the newest step afterwards is new: how
    often}."""
    model, optimizer = make("full_shard")
    step, found = 1, {False: 0, True: 0}
    save(model, optimizer, folder, step)
    for call in range(1, 1000):

        def broken(step=step, call=call):
            _core.file_faults(call, kind)
            save(model, optimizer, folder, step + 1)

        status = forked(broken)
        newest = check_after(folder, model, optimizer, step, step + 1)
        found[newest == step + 1] += 1
        step += 2
        if status == 0:  # it had fewer calls than that
            return found
        assert status == -signal.SIGKILL
    raise AssertionError("a save without end")


@pytest.mark.parametrize("kind", KILLS)
def test_killed_at_each_call(kind, folder):
    (result,) = fork_ranks(killed_at_each_call, 1, folder, kind, timeout=120, check=True)
    assert result.value[False] > 30 and result.value[True] > 1


def failing_at_each_call(folder, what):
    """The same with calls that fail; a save that raises leaves nothing behind at once."""
    model, optimizer = make("full_shard")
    step, raised = 1, 0
    save(model, optimizer, folder, step)
    for call in range(1, 1000):
        _core.file_faults(call, what)
        try:
            save(model, optimizer, folder, step + 1)
            failed = False
        except OSError as error:
            failed = True
            assert folder in str(error), error
        calls = _core.file_faults(0)
        raised += failed
        newest = step_in(zshard.latest(folder))
        assert newest == (step if failed else step + 1), f"{what} at call {call}"
        check_after(folder, model, optimizer, step, step + 1)
        step += 2
        if calls < call:
            return raised
    raise AssertionError("a save without end")


@pytest.mark.parametrize("what", FAULTS)
def test_failing_at_each_call(what, folder):
    (result,) = fork_ranks(failing_at_each_call, 1, folder, what, timeout=120, check=True)
    if what in ("EINTR", "short"):
        assert result.value <= 8  # of names: these are not tried again
    else:
        assert result.value > 20


def replaced(folder, kind):
    """A checkpoint that is overwritten is the old or the new one."""
    model, _ = make("full_shard")
    path = f"{folder}/x"

    def put(value):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        zshard.save(path, model, extra={"value": value}, overwrite=True)

    put(1.0)
    for call in range(1, 1000):

        def broken(call=call):
            _core.file_faults(call, kind)
            put(2.0)

        status = forked(broken)
        (value,) = {float(v) for t in whole(path).values() for v in t.unique()}
        assert manifest_in(path).extra[0] == {"value": value} and value in (1.0, 2.0)
        put(1.0)
        assert set(inside(folder)) <= {"x", ".x.zshard.lock"}
        if status == 0:
            return call
    raise AssertionError("a save without end")


@pytest.mark.parametrize("kind", KILLS)
def test_killed_while_a_checkpoint_is_replaced(kind, folder):
    (result,) = fork_ranks(replaced, 1, folder, kind, timeout=120, check=True)
    assert result.value > 20


# --- ranks -----------------------------------------------------------------------------------------


def saves_until_killed(folder, victim, call, kind, asynchronous):
    """Step 1 is saved whole; in step 2 a rank is killed at one of its calls."""
    model, optimizer = make("full_shard")
    save(model, optimizer, folder, 1)
    if rank() == victim:
        _core.file_faults(call, kind)
    save(model, optimizer, folder, 2, asynchronous=asynchronous)
    print("saved")


def after_a_restart(folder):
    model, optimizer = make("full_shard")
    return check_after(folder, model, optimizer, 1, 2)


def killed_rank(folder, victim, call, kind, asynchronous):
    """Kills a rank at a call and looks at what is left; whether there was such a call."""
    results = fork_ranks(
        saves_until_killed, 2, str(folder), victim, call, kind, asynchronous, timeout=60
    )
    was = results[victim].returncode == -signal.SIGKILL
    other = results[1 - victim]
    assert other.returncode is not None, "the other rank hangs"
    if not was:
        assert [r.returncode for r in results] == [0, 0], other.stderr
    elif other.returncode != 0:
        assert "PeerError" in other.stderr
    for result in fork_ranks(after_a_restart, 2, str(folder), timeout=60, check=True):
        assert result.value in (1, 2) and (was or result.value == 2)
    return was


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
def test_a_rank_killed_while_it_saves(victim, call, kind, asynchronous, folder):
    assert killed_rank(folder, victim, call, kind, asynchronous)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KILLS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_each_call(victim, kind, folder):
    for call in range(1, 1000):
        os.mkdir(path := f"{folder}/{call}")
        if not killed_rank(path, victim, call, kind, call % 2 == 1):
            return
    raise AssertionError("a save without end")


def saves_for_ever(folder):
    model, optimizer = make("full_shard")
    for step in range(1, 10_000):
        save(model, optimizer, folder, step, asynchronous=step % 2 == 0)


def first_of(folder):
    """Waits until there is a checkpoint, then somewhat longer, and ends all ranks."""
    if os.environ["RANK"] == "0" and os.fork() == 0:
        deadline = time.monotonic() + 30
        while zshard.latest(folder) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    try:
        saves_for_ever(folder)
    except zshard.PeerError:
        sys.exit(9)


def resumes(folder):
    newest = step_in(zshard.latest(folder))
    model, optimizer = make("full_shard")
    check_after(folder, model, optimizer, newest, newest)
    return newest


def kill_at_random(folder):
    codes = {r.returncode for r in fork_ranks(first_of, 2, str(folder), timeout=60)}
    assert codes == {-signal.SIGKILL, 9}
    for result in fork_ranks(resumes, 2, str(folder), timeout=60, check=True):
        assert result.value >= 1


@pytest.mark.parametrize("attempt", range(3))
def test_killed_at_random(attempt, folder):
    kill_at_random(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("attempt", range(100))
def test_killed_at_random_often(attempt, folder):
    kill_at_random(folder)
