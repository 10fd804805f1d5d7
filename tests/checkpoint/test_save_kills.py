"""zshard.save: a process that is killed at any call leaves the last checkpoint as it was, or the new one.

A process forks one that saves and is killed before, within or after its nth call on files,
for each n until it gets through. Whatever it leaves, what is found is whole, to the bit; and the next
save leaves nothing else. (What a power cut would leave is another question: tests/lib/power_cut.py.)
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from checkpoints import inside, manifest_in, states_in, tensors_in
from file_faults import file_faults
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP


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
    """The number of which a checkpoint is; an AssertionError if it is not whole."""
    manifest_in(path)
    found = [*tensors_in(path).values()]
    found += [own["momentum_buffer"] for own in states_in(path).values()]
    assert len(found) == 4
    (value,) = {number for tensor in found for number in tensor.flatten().tolist()}
    return value


def forked(nth, what, action):
    """How many calls a child made, or None if it was killed."""
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
    """One more checkpoint in a directory that keeps one."""
    zshard.save(folder, *state(value), step=int(value), keep_last=1)


def overwritten(folder, value):
    zshard.save(folder / "x", *state(value), overwrite=True)


def another(folder, value):
    zshard.save(folder / f"x{value:g}", *state(value))


def found_in(folder, way):
    """The number of the checkpoint that a script would go on from, after a look at all."""
    if way is numbered:
        values = [value_in(folder / name) for name in inside(folder) if name.startswith("step")]
        newest = value_in(zshard.latest_checkpoint(folder))
        assert newest == max(values)
        return newest
    return max(value_in(folder / name) for name in inside(folder) if name.startswith("x"))


def killed_at_each_call(way, what, folder):
    """How often which checkpoint was found."""
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
    """Does it lie beside, as what a save of `other` leaves, for the next one of that name?"""
    return name.startswith(f".{other}.")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "killshort", "killafter"])
@pytest.mark.parametrize("way", [numbered, overwritten, another], ids=lambda way: way.__name__)
def test_a_save_that_is_killed(way, what, tmp_path):
    result = fork_ranks(killed_at_each_call, 1, way, what, tmp_path / "x", check=True)
    seen, calls = result[0].value
    assert calls > 40 and set(seen) == {1.0, 2.0}  # the old one before the last steps, then the new
    assert seen[1.0] > seen[2.0]


# --- ranks ----------------------------------------------------------------------------------------


def saved_by_ranks(folder, victim, nth, what):
    """Two numbered checkpoints, of which the second is one rank's last deed."""
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
def test_a_rank_that_is_killed_at_each_call(victim, what, tmp_path):
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
