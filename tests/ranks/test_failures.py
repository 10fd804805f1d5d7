"""Ranks that die, raise, leave, stop or diverge: the others get an error that names the rank; none
hangs.

The training loop of misdeeds.py, over both transports. tests/c/test_comm_*.c has each wait and each
failure; here are the errors that a script sees. For ranks that fork, see test_forks.py.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from compare import differences
from misdeeds import (
    PLANTED,
    STEPS,
    End,
    Misdeed,
    batch,
    check_survivors,
    make_model,
    step_once,
    train,
    wrap,
)
from models import TRANSPORTS
from nursery import fork_ranks
from spawn import on_ranks

import zshard
from zshard import FSDP

ENDS = [
    ("kill", "forward", 2, "full_shard"),
    ("kill", "backward", 3, "shard_grad_op"),
    ("kill", "step", 4, "no_shard"),
    ("exit", "step", 2, "full_shard"),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("deed", "place", "world", "strategy"), ENDS)
def test_rank_that_ends_is_named_within_seconds(deed, place, world, strategy, transport, tmp_path):
    results = fork_ranks(train, world, deed, place, tmp_path, transport, 60.0, strategy)
    assert results[-1].returncode == (0 if deed == "exit" else -signal.SIGKILL)
    check_survivors(results, ("PeerError",), f"rank {world - 1}")


def train_uncaught(folder, transport):
    """As `train`, but an exception ends the program."""
    misdeed = Misdeed("raise", "forward", folder)
    model = wrap(make_model(misdeed), transport, 60.0)
    optimizer = zshard.SGD(model.parameters(), lr=0.01)
    try:
        for step in range(STEPS):
            step_once(model, optimizer, misdeed, step)
    finally:
        print(f"ended {misdeed.end(None).seconds:.1f} s after the deed", flush=True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_raises_ends_the_others(transport, tmp_path):
    results = fork_ranks(train_uncaught, 2, tmp_path, transport)
    assert results[1].returncode == 1 and f"ValueError: {PLANTED}" in results[1].stderr
    assert results[0].returncode == 1 and "PeerError" in results[0].stderr
    assert "rank 1" in results[0].stderr
    assert f"failed: ValueError: {PLANTED}" in results[0].stderr
    assert float(results[0].stdout.split()[1]) < 5.0


def exit_before_wrapping(folder):
    misdeed = Misdeed("raise", "start", folder)
    dist.init_process_group("gloo")
    if misdeed.due:
        sys.exit("no model here")
    return misdeed.end_of(lambda: FSDP(make_model(misdeed)))


def test_rank_that_never_wraps_ends_the_others(tmp_path):
    results = fork_ranks(exit_before_wrapping, 2, tmp_path)
    assert results[1].returncode == 1
    assert results[0].returncode == 0 and results[0].value.kind == "PeerError", results[0].value


# --- a late rank ----------------------------------------------------------------------------------


def train_and_wake(folder, transport):
    """The last rank stops itself; rank 0 wakes it up once its own wait has failed."""
    end = train("stop", "forward", folder, transport, timeout=2.0)
    if os.environ["RANK"] == "0":
        time.sleep(0.5)  # for other ranks that still wait
        os.kill(int((Path(folder) / "pid").read_text()), signal.SIGCONT)
    return end


@pytest.mark.parametrize(("transport", "world"), [("shm", 3), ("c10d", 2)])
def test_stopped_rank_is_named_after_the_timeout(transport, world, tmp_path):
    results = fork_ranks(train_and_wake, world, tmp_path, transport)
    check_survivors(results, ("PeerTimeoutError",), f"rank {world - 1}")
    for result in results[:-1]:
        assert result.value.seconds >= 1.9, "it did not wait for the timeout"
        assert "timed out after 2." in result.value.message or "2000ms" in result.value.message
    woken = results[-1]
    assert woken.returncode == 0
    assert woken.value.kind in ("PeerError", "PeerTimeoutError"), "it went on alone"


# --- a diverging rank -----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_caught_backward_failure_on_one_rank_diverges(transport, tmp_path):
    """The steps after it are right: those of a model without that step."""
    misdeed = Misdeed("raise", "backward", tmp_path)
    plain = make_model(Misdeed("", "", tmp_path))
    model = wrap(make_model(misdeed), transport)
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    ends = []
    for step in range(STEPS):
        try:
            step_once(model, optimizers[0], misdeed, step)
        except Exception as error:
            ends.append(misdeed.end(error))
            optimizers[0].zero_grad()
        else:
            step_once(plain, optimizers[1], plain[2].misdeed, step)
    (end,) = ends
    if dist.get_rank() == 1:
        assert (end.kind, end.message) == ("ValueError", PLANTED)
    else:
        assert end.kind == "DivergenceError" and end.seconds < 5
        assert "rank 1" in end.message and "its backward" in end.message
    assert differences(model.state_dict(), plain.state_dict()) == []


def skip_a_backward(folder, transport):
    """Rank 1 catches an exception of its forward and so runs one backward fewer."""
    misdeed = Misdeed("raise", "forward", folder)

    def loop():
        model = wrap(make_model(misdeed), transport, 2.0)
        optimizer = zshard.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            with contextlib.suppress(ValueError):
                step_once(model, optimizer, misdeed, step)
        model.clip_grad_norm_(1.0)

    return misdeed.end_of(loop)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_skipped_backward_is_an_error_not_a_hang(transport, tmp_path):
    results = fork_ranks(skip_a_backward, 2, tmp_path, transport)
    kinds = ("DivergenceError", "PeerError", "PeerTimeoutError")
    check_survivors(results, kinds, "rank 1", within=8.0)
    # Rank 1's only mistake was to leave first: its third backward met rank 0's second.
    assert results[1].returncode == 0
    assert results[1].value.kind == ""


def interrupt(folder, transport):
    """Rank 0 waits for rank 1, which sleeps; a signal handler raises KeyboardInterrupt there, as
    Ctrl-C does."""
    model = wrap(make_model(Misdeed("", "", folder)), transport, 60.0)
    interrupted = Path(folder) / "interrupted"
    if os.environ["RANK"] == "1":
        deadline = time.monotonic() + 5.0
        while not interrupted.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return None
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    due = time.monotonic() + 0.5
    try:
        model(batch(0)).sum().backward()
    except BaseException as error:
        interrupted.touch()
        return End(type(error).__name__, str(error), time.monotonic() - due)
    return None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interrupt_ends_a_wait(transport, tmp_path):
    end = fork_ranks(interrupt, 2, tmp_path, transport, timeout=30)[0].value
    assert end is not None and end.kind == "KeyboardInterrupt", end
    assert end.seconds < 2.0, "only after the wait"
