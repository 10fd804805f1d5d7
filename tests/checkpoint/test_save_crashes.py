"""Saves that a crash ends: of one rank, of all, or of the machine's power; also in the background.

All of a save's file operations go through one table of calls (csrc/checkpoint/fs.h). Ranks are
killed at some of them or at any time, one process at each of them, and the log of all calls
determines what a power cut may leave. Afterwards the newest checkpoint is complete, bit for bit;
the next save works, and leaves nothing of the broken one.
"""

from __future__ import annotations

import contextlib
import itertools
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
from power_cut import Disk, logged, read_log, tree_of
from torch import nn

import zshard
from zshard import FSDP, _core

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
    for what, counts in (("short", [0]), ("EINTR", range(1, 20))):
        (result,) = fork_ranks(interrupted_at_each_call, 1, f"{folder}/{what}", what, check=True)
        assert result.value in counts


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
    """Whatever the disk has then, each checkpoint is complete or does not count, and everything
    that save() returned for exists."""
    log, root, cut = tmp_path / "log", Path(folder, "x"), Path(folder, "cut")
    root.mkdir()
    fork_ranks(saves_with_a_log, 2, str(root), None, (1,), check=True, timeout=60)
    disk = Disk(root)
    rows = fork_ranks(saves_with_a_log, 2, str(root), str(log), (2, 3, 4), check=True)
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


def killed_rank(pool, folder, victim, call, kind, asynchronous=False):
    """Kill a rank at a call and check what is left; return the step that is found, or None if there was
    no such call."""
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
@pytest.mark.parametrize("kind", ["kill", "killafter"])
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_at_each_call(pool2, victim, kind, folder):
    seen = Counter()
    for call in itertools.count(1):
        path = Path(folder, str(call))
        path.mkdir()
        step = killed_rank(pool2, path, victim, call, kind)
        if step is None:
            break
        seen[step] += 1
    assert call > (30 if victim == 0 else 6) and seen[1] > 5
    assert victim == 1 or seen[2] > 0


def first_of(folder):
    """Wait until there is a checkpoint and a little longer, then kill all ranks."""
    if os.environ["RANK"] == "0" and os.fork() == 0:
        deadline = time.monotonic() + 30
        while zshard.latest_checkpoint(folder) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    model, optimizer = make()
    with contextlib.suppress(zshard.PeerError):
        for step in range(1, 10_000):
            save(model, optimizer, folder, step, asynchronous=step % 2 == 0)
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
    for param in model.parameters():
        nn.init.constant_(param, value)
        optimizer.state[param]["momentum_buffer"] = param.detach().clone()
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
        left = [name for name in inside(folder) if not name.startswith(("x2", ".x2."))]
        assert left == names, (nth, left)
        assert found_in(folder, way) == 3.0


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "killshort", "killafter"])
@pytest.mark.parametrize("way", [numbered, overwritten, another], ids=lambda way: way.__name__)
def test_process_killed_during_a_save(way, what, tmp_path):
    result = fork_ranks(killed_at_each_call, 1, way, what, tmp_path / "x", check=True)
    seen, calls = result[0].value
    assert calls > 40 and set(seen) == {1.0, 2.0}  # the old one until the last steps, then the new
    assert seen[1.0] > seen[2.0]


# --- the power cut model (power_cut.py) -----------------------------------------------------------
#
# A model that allows too little would pass anything. So each test omits one step of a small protocol in
# which every step is needed, and the model must find a state that reveals it; with all steps there is none.

OLD, NEW = b"the old content" * 30, b"the new content" * 40


def put(path, content, sync=True):
    """Write a file in two pieces."""
    half = len(content) // 2
    with _core.File.create(path, len(content)) as file:
        file.write([(half, content[half:])], 1 << 20)
        file.write([(0, content[:half])], 1 << 20)
        if sync:
            file.sync()


def publish(root, without):
    """Create root/new with two files, under a temporary name first."""
    staging = root / ".new.tmp"
    _core.make_folder(staging)
    for name in ("a", "b"):
        put(staging / name, NEW, sync=without != "sync file")
    if without != "sync staging":
        _core.sync_folder(staging)
    _core.rename(staging, root / "new")
    if without != "sync parent":
        _core.sync_folder(root)


def faults_of(folder, has_returned):
    """Return what is wrong with a folder that `publish` worked in."""
    contents = tree_of(folder)
    faults = set() if contents["old"] == OLD else {"old is damaged"}
    if "new" not in contents:
        return faults | ({"new is lost"} if has_returned else set())
    files = [contents.get(f"new/{name}") for name in ("a", "b")]
    faults |= {"a file is lost"} if None in files else set()
    return faults | ({"a file is damaged"} if {*files} - {None, NEW} else set())


def replace(root, without):
    """Replace root/old by another file: under a temporary name, then swapped; or in place, which is wrong."""
    if without == "swap":
        _core.remove_file(root / "old")
        put(root / "old", NEW)
    else:
        put(root / ".tmp", NEW)
        _core.swap(root / ".tmp", root / "old")
    _core.sync_folder(root)


def faults_of_old(folder, has_returned):
    content = tree_of(folder).get("old")
    if has_returned:
        return set() if content == NEW else {"not new"}
    return set() if content in (OLD, NEW) else {"neither old nor new"}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "old").write_bytes(OLD)
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("act", "without", "faults"),
    [
        (publish, "nothing", set()),
        (publish, "sync file", {"a file is damaged"}),
        (publish, "sync staging", {"a file is lost"}),
        (publish, "sync parent", {"new is lost"}),
        (replace, "nothing", set()),
        (replace, "swap", {"neither old nor new"}),
    ],
)
def test_the_model_finds_each_step_that_is_left_out(root, act, without, faults):
    disk, log = Disk(root), root.parent / "log"
    with logged(log):
        act(root, without)
    returned = len(read_log(log))
    assert disk.replayed(log) == tree_of(root), "the log does not explain the folder"
    judge = {publish: faults_of, replace: faults_of_old}[act]
    states = disk.states(log, root.parent / "cut")
    assert set().union(*(judge(each.folder, each.calls >= returned) for each in states)) == faults


def write_second_half(path):
    with _core.File.open_to_write(path) as file:
        file.write([(2, b"22")], 64)
        file.sync()


def test_ranks_share_a_log(root):
    """Another process writes a part, and its sync counts like the first one's."""
    disk, log, path = Disk(root), root.parent / "log", root / "shared"
    with logged(log), _core.File.create(path, 4) as file:
        file.write([(0, b"11")], 64)
        _core.sync_folder(root)
        assert forked(0, "kill", lambda: write_second_half(path)) is not None
    assert len({call.pid for call in read_log(log)}) == 2
    assert disk.replayed(log) == tree_of(root) == {"old": OLD, "shared": b"1122"}
    found = {tree_of(state.folder).get("shared") for state in disk.states(log, root.parent / "cut")}
    # Before the sync, anything may be missing. At the end, nothing is.
    assert {None, b"", b"\0\0\0\0", b"11\0\0", b"1122", b"\0\00022"} <= found
