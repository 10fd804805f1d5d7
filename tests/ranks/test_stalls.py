"""A rank that waits alone over c10d learns that the others are elsewhere, and what to write.

The others are in a collective of the script's own, which zshard does not see; each script must end,
with an error that names the call.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import make
from nursery import fork_ranks
from scenarios import Wide, floats, loss_of
from spawn import ranks

import zshard
from zshard import FSDP, _core
from zshard.ranks import stalls


def evaluates(model, optimizer, folder):
    with torch.no_grad():
        model(floats(0))


def sums_up(model, optimizer, folder):
    model.state_dict()


def looks_at_the_optimizer(model, optimizer, folder):
    optimizer.state_dict()


def saves(model, optimizer, folder):
    zshard.save(folder, model)


CALLS = {evaluates: "all-gathering parameters", sums_up: "state_dict()", saves: "save()"}
CALLS[looks_at_the_optimizer] = "state_dict()"


def lone(call, folder, timeout, report_after):
    """Return (the kind and text of the error, seconds until it) of the last rank, which is alone."""
    stalls._EVERY = 0.1  # answers sooner
    assert _core.report_after(report_after) == 10.0
    model = FSDP(make(Wide), transport="c10d", timeout=timeout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss_of(model(floats(dist.get_rank()))).backward()
    optimizer.step()
    start = time.monotonic()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            call(model, optimizer, folder)
        dist.barrier()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_error_reports_that_other_ranks_are_elsewhere(tmp_path, call, world):
    result = fork_ranks(lone, world, call, str(tmp_path / "saved"), 2.0, 10.0)[-1]
    assert result.value is not None, result.stderr
    kind, text, seconds = result.value
    assert kind == "PeerTimeoutError" and 1.9 < seconds < 20
    assert CALLS[call] in text
    for rank in range(world - 1):
        assert f"rank {rank} is not in a zshard collective" in text
    assert "call it on all of them" in text and "transport='shm'" in text
    assert "has been waiting" not in result.stderr  # the error replaced it


def test_one_line_is_printed_after_a_long_wait(tmp_path):
    first, last = fork_ranks(lone, 2, sums_up, str(tmp_path), 2.5, 1.0)
    lines = [line for line in last.stderr.splitlines() if "has been waiting" in line]
    assert len(lines) == 1 and "has been waiting" not in first.stderr
    assert "rank 0 is not in a zshard collective" in lines[0] and "state_dict()" in lines[0]


@passing_groups()
def elsewhere():
    """Return the error, and seconds until it, where the ranks make different calls to zshard."""
    model = FSDP(make(Wide), transport="c10d", timeout=60, process_group=own_group())
    start = time.monotonic()
    try:
        if dist.get_rank() == 0:
            model.state_dict()
        else:
            zshard.save("never", model)
    except zshard.DivergenceError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@ranks(2, 3)
def test_another_collective_of_zshards_is_an_error_at_once(pool):
    for text, seconds in pool.run(elsewhere):
        assert "rank 0 was all-gathering parameters" in text and seconds < 10


def late():
    """A rank that is only late, and has been asked why: no line, no error."""
    stalls._EVERY = 0.1
    model = FSDP(make(Wide), transport="c10d", timeout=4)
    if os.environ["RANK"] == "1":
        time.sleep(1.5)
    loss_of(model(floats(0))).backward()
    return True


def test_late_rank_is_waited_for():
    for result in fork_ranks(late, 2):
        assert result.value is True, result.stderr
        assert "zshard:" not in result.stderr
