"""Ranks that die, raise, leave, stop or diverge: the others get an error that names the rank; none
hangs.

The training loop of misdeeds.py, on fresh processes, over both transports. For ranks that fork, see
test_forks.py.
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
    BAD_STEP,
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


def processes_of(session):
    """Return the pids of the living processes of a session (each rank leads its own)."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    pids.append(int(folder.name))
    return pids


# --- a dead rank ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("place", "world"), [("forward", 2), ("backward", 3), ("step", 4)])
def test_killed_rank_is_named_within_seconds(place, world, transport, tmp_path):
    results = fork_ranks(train, world, "kill", place, tmp_path, transport)
    assert results[-1].returncode == -signal.SIGKILL
    check_survivors(results, ("PeerError",), f"rank {world - 1}")
    assert processes_of(int((tmp_path / "pid").read_text())) == []


@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_killed_rank_is_named_with_other_strategies(strategy, tmp_path):
    arguments = ("kill", "forward", tmp_path, "shm", 60.0, strategy)
    results = fork_ranks(train, 2, *arguments)
    check_survivors(results, ("PeerError",), "rank 1")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_leaves_early_is_named(transport, tmp_path):
    results = fork_ranks(train, 2, "exit", "step", tmp_path, transport)
    assert results[-1].returncode == 0
    check_survivors(results, ("PeerError",), "rank 1")


def train_uncaught(deed, place, folder, transport):
    """As `train`, but an exception ends the program."""
    misdeed = Misdeed(deed, place, folder)
    model = wrap(make_model(misdeed), transport, 60.0)
    optimizer = zshard.SGD(model.parameters(), lr=0.01)
    try:
        for step in range(STEPS):
            step_once(model, optimizer, misdeed, step)
    finally:
        print(f"ended {misdeed.end(None).seconds:.1f} s after the deed", flush=True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_raises_ends_the_others(transport, tmp_path):
    arguments = ("raise", "forward", tmp_path, transport)
    results = fork_ranks(train_uncaught, 2, *arguments)
    assert results[1].returncode == 1 and f"ValueError: {PLANTED}" in results[1].stderr
    assert results[0].returncode == 1 and "PeerError" in results[0].stderr
    assert "rank 1" in results[0].stderr
    assert f"failed: ValueError: {PLANTED}" in results[0].stderr
    assert float(results[0].stdout.split()[1]) < 5.0


def raise_before_wrapping(folder):
    misdeed = Misdeed("raise", "start", folder)
    misdeed.step = BAD_STEP
    dist.init_process_group("gloo")

    def loop():
        if misdeed.due:
            sys.exit("no model here")
        FSDP(make_model(misdeed))

    return misdeed.end_of(loop)


def test_rank_that_never_wraps_ends_the_others(tmp_path):
    results = fork_ranks(raise_before_wrapping, 2, tmp_path)
    assert results[1].returncode == 1
    assert results[0].returncode == 0 and results[0].value.kind == "PeerError", results[0].value


def wrap_again_and_die(folder, transport):
    """The transport exists when rank 1 dies; rank 0 waits for it in FSDP(...)."""
    misdeed = Misdeed("kill", "wrap", folder)
    wrap(make_model(misdeed), transport, 60.0)
    misdeed.step = BAD_STEP

    def loop():
        misdeed.at("wrap")
        wrap(make_model(misdeed), transport)

    return misdeed.end_of(loop)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_killed_before_wrapping_is_named(transport, tmp_path):
    results = fork_ranks(wrap_again_and_die, 2, tmp_path, transport)
    check_survivors(results, ("PeerError",), "rank 1")


def just_train(transport):
    """A script without any use of process groups."""
    model = wrap(make_model(Misdeed("", "", ".")), transport)
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("attempt", range(3))
def test_script_without_cleanup_exits_normally(transport, attempt):
    for result in fork_ranks(just_train, 2, transport):
        said = result.stderr  # Triton's nanobind prints leaks at exit: not zshard's lines
        assert result.returncode == 0 and (not said or said.startswith("nanobind:")), result


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@on_ranks(2)
def test_slow_rank_is_waited_for(transport, place, tmp_path):
    misdeed = Misdeed("sleep", place, tmp_path)
    plain = make_model(Misdeed("", "", tmp_path))
    model = wrap(make_model(misdeed), transport)
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(STEPS):
        step_once(model, optimizers[0], misdeed, step)
        step_once(plain, optimizers[1], plain[2].misdeed, step)
    assert differences(model.state_dict(), plain.state_dict()) == []


# --- a diverging rank -----------------------------------------------------------------------------


def catch_and_continue(transport, place, folder):
    """Every rank catches the error of its step and continues. Return the errors, and how the model
    then differs from one without that step."""
    misdeed = Misdeed("raise", place, folder)
    plain = make_model(Misdeed("", "", folder))
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
    return ends, differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_caught_backward_failure_on_one_rank_diverges(pool2, transport, tmp_path):
    (others, own), wrong = zip(
        *pool2.run(catch_and_continue, transport, "backward", tmp_path), strict=True
    )
    assert [end.kind for end in own] == ["ValueError"] and own[0].message == PLANTED
    assert [end.kind for end in others] == ["DivergenceError"]
    assert "rank 1" in others[0].message and "its backward" in others[0].message
    assert others[0].seconds < 5
    assert wrong == ([], []), "the steps after it are wrong"


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


def diverge(folder, transport):
    """Rank 1 wraps another model while rank 0 runs a backward."""
    (Path(folder) / "time").write_text(str(time.monotonic()))
    misdeed = Misdeed("", "", folder)
    model = wrap(make_model(misdeed), transport, 60.0)
    loss = model(batch(0)).sum()

    def loop():
        if os.environ["RANK"] == "0":
            loss.backward()
        else:
            wrap(make_model(misdeed), transport)

    return misdeed.end_of(loop)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_deadlock_is_reported_at_once(transport, tmp_path):
    for result in fork_ranks(diverge, 2, tmp_path, transport):
        assert result.returncode == 0, result.stderr
        assert result.value.kind == "DivergenceError", result.value
        assert "rank 0" in result.value.message and "rank 1" in result.value.message
        assert result.value.seconds < 5.0


def interrupt(folder, transport):
    """Rank 0 waits for rank 1, which sleeps; a signal handler raises KeyboardInterrupt there, as
    Ctrl-C does."""
    model = wrap(make_model(Misdeed("", "", folder)), transport, 60.0)
    interrupted = Path(folder) / "interrupted"
    if os.environ["RANK"] == "1":
        deadline = time.monotonic() + 5.0
        while not interrupted.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return End("", "", 0.0)

    def on_alarm(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    due = time.monotonic() + 0.5
    try:
        model(batch(0)).sum().backward()
    except KeyboardInterrupt:
        seconds = time.monotonic() - due
        interrupted.touch()
        return End("KeyboardInterrupt", "", seconds)
    except Exception as error:
        return End(type(error).__name__, str(error), time.monotonic() - due)
    return End("", "", 0.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interrupt_ends_a_wait(transport, tmp_path):
    end = fork_ranks(interrupt, 2, tmp_path, transport, timeout=30)[0].value
    assert end is not None and end.kind == "KeyboardInterrupt", end
    assert end.seconds < 2.0, "only after the wait"
