"""Ranks that die, raise, leave, stop or go astray: the others hear of it, by rank; nobody hangs.

The one idea: one training loop (`train`) in which the last rank does something bad at one place, on
fresh processes, over both transports. What the others then raise, and how many seconds after the
deed, comes back as an `End`. The clock is CLOCK_MONOTONIC, which all processes of a host share.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

TRANSPORTS = ("shm", "c10d")
STEPS = 4
BAD_STEP = 2
PLANTED = "planted at step 2"


@dataclass(frozen=True)
class End:
    """How a rank's loop ended: the exception's type, or "" if none, and seconds since the deed."""

    kind: str
    message: str
    seconds: float


class Misdeed:
    """What the last rank does, and when; the other ranks have one that is never due."""

    def __init__(self, deed, place, folder):
        self.deed, self.place, self.folder = deed, place, Path(folder)
        self.due = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.step = -1

    def at(self, place):
        if not self.due or place != self.place or self.step != BAD_STEP:
            return
        self.due = False
        (self.folder / "pid").write_text(str(os.getpid()))
        (self.folder / "time").write_text(str(time.monotonic()))
        if self.deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.deed == "exit":
            sys.exit(0)
        elif self.deed == "raise":
            raise ValueError(PLANTED)
        elif self.deed == "sleep":
            time.sleep(2.5)

    def end(self, error):
        """The `End` of a loop that `error` (None: nothing) ended."""
        stamp = self.folder / "time"
        since = time.monotonic() - float(stamp.read_text()) if stamp.exists() else 0.0
        return End(type(error).__name__ if error else "", str(error or ""), since)


class Spot(nn.Module):
    """The identity; misbehaves in forward or in backward if that is the place."""

    def __init__(self, misdeed):
        super().__init__()
        self.misdeed = misdeed

    def forward(self, x):
        self.misdeed.at("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: self.misdeed.at("backward"))
        return x


def make_model(misdeed):
    torch.manual_seed(0)
    parts = [nn.Linear(8, 16), nn.Linear(16, 16), Spot(misdeed), nn.Linear(16, 8)]
    return nn.Sequential(*parts)


def batch(step):
    """The same on all ranks, so that the mean of their gradients is each one's own."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def step_once(model, optimizer, misdeed, step):
    misdeed.step = step
    loss = model(batch(step)).square().sum()
    loss.backward()
    misdeed.at("step")
    optimizer.step()
    optimizer.zero_grad()


def wrap(model, transport, timeout=None, strategy="full_shard"):
    policy = {nn.Linear}
    return FSDP(
        model, strategy=strategy, auto_wrap_policy=policy, transport=transport, timeout=timeout
    )


def train(deed, place, folder, transport, timeout=60.0, strategy="full_shard"):
    """The loop with the misdeed; an `End`, whatever happens."""
    misdeed = Misdeed(deed, place, folder)
    error = None
    try:
        model = wrap(make_model(misdeed), transport, timeout, strategy)
        optimizer = zshard.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            step_once(model, optimizer, misdeed, step)
    except Exception as caught:
        error = caught
    return misdeed.end(error)


def processes_of(session):
    """Pids of the living processes of a session (each rank is the leader of its own)."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    pids.append(int(folder.name))
    return pids


def check_survivors(results, kinds, *words, within=5.0):
    """All ranks but the last ended by themselves with an error of `kinds` that has `words`."""
    for result in results[:-1]:
        assert result.returncode == 0, f"rank {result.rank}: {result.returncode}\n{result.stderr}"
        end = result.value
        assert end.kind in kinds, f"rank {result.rank} ended with {end}"
        missing = [word for word in words if word not in end.message]
        assert not missing, f"{missing} not in: {end.message}"
        assert end.seconds < within, f"rank {result.rank} took {end.seconds:.1f} s"


# --- a rank that is gone --------------------------------------------------------------------------


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
    assert f"gave up: ValueError: {PLANTED}" in results[0].stderr
    assert float(results[0].stdout.split()[1]) < 5.0


def raise_before_wrapping(folder):
    misdeed = Misdeed("raise", "start", folder)
    misdeed.step = BAD_STEP
    dist.init_process_group("gloo")
    error = None
    try:
        if misdeed.due:
            sys.exit("no model here")
        FSDP(make_model(misdeed))
    except Exception as caught:
        error = caught
    return misdeed.end(error)


def test_rank_that_never_wraps_ends_the_others(tmp_path):
    results = fork_ranks(raise_before_wrapping, 2, tmp_path)
    assert results[1].returncode == 1
    assert results[0].returncode == 0 and results[0].value.kind, "it went on alone"


def wrap_again_and_die(folder, transport):
    """The transport exists when rank 1 dies; rank 0 waits for it in FSDP(...)."""
    misdeed = Misdeed("kill", "wrap", folder)
    wrap(make_model(misdeed), transport, 60.0)
    misdeed.step = BAD_STEP
    error = None
    try:
        misdeed.at("wrap")
        wrap(make_model(misdeed), transport)
    except Exception as caught:
        error = caught
    return misdeed.end(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_killed_before_wrapping_is_named(transport, tmp_path):
    results = fork_ranks(wrap_again_and_die, 2, tmp_path, transport)
    check_survivors(results, ("PeerError",), "rank 1")


def just_train(transport):
    """A script that knows nothing of process groups."""
    model = wrap(make_model(Misdeed("", "", ".")), transport)
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("attempt", range(3))
def test_script_that_just_ends_ends_well(transport, attempt):
    for result in fork_ranks(just_train, 2, transport):
        assert result.returncode == 0 and not result.stderr, result


# --- a rank that is late --------------------------------------------------------------------------


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
        assert "waited 2." in result.value.message or "2000ms" in result.value.message
    woken = results[-1]
    assert woken.returncode == 0
    assert woken.value.kind in ("PeerError", "PeerTimeoutError"), "it went on alone"


def train_beside_a_slow_one(transport, place, folder):
    misdeed = Misdeed("sleep", place, folder)
    plain = make_model(Misdeed("", "", folder))
    model = wrap(make_model(misdeed), transport)
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(STEPS):
        step_once(model, optimizers[0], misdeed, step)
        step_once(plain, optimizers[1], plain[2].misdeed, step)
    state = model.state_dict()
    return all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_slow_rank_is_waited_for(pool2, place, transport, tmp_path):
    assert pool2.run(train_beside_a_slow_one, transport, place, tmp_path) == [True, True]


# --- a rank that goes astray ----------------------------------------------------------------------


def catch_and_go_on(transport, place, folder):
    """Every rank catches what its step raises, and goes on. What was raised, and whether the model
    is then as if the step in which it happened had not been."""
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
    state = model.state_dict()
    equal = all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    return ends, equal


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_backward_that_fails_on_one_rank_diverges_and_can_be_survived(pool2, transport, tmp_path):
    (others, own), (equal, own_equal) = zip(
        *pool2.run(catch_and_go_on, transport, "backward", tmp_path), strict=True
    )
    assert [end.kind for end in own] == ["ValueError"] and own[0].message == PLANTED
    assert [end.kind for end in others] == ["DivergenceError"]
    assert "rank 1 gave up its backward" in others[0].message and others[0].seconds < 5
    assert equal and own_equal, "the steps after it are wrong"


def skip_a_backward(folder, transport):
    """Rank 1 catches an exception of its forward and so runs one backward less."""
    misdeed = Misdeed("raise", "forward", folder)
    error = None
    try:
        model = wrap(make_model(misdeed), transport, 3.0)
        optimizer = zshard.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            with contextlib.suppress(ValueError):
                step_once(model, optimizer, misdeed, step)
        model.clip_grad_norm_(1.0)
    except Exception as caught:
        error = caught
    return misdeed.end(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_skipped_backward_is_an_error_not_a_hang(transport, tmp_path):
    results = fork_ranks(skip_a_backward, 2, tmp_path, transport)
    kinds = ("DivergenceError", "PeerError", "PeerTimeoutError")
    check_survivors(results, kinds, "rank 1", within=8.0)
    # Over shm rank 1 did nothing wrong but to leave first: its third backward met rank 0's second.
    assert results[1].returncode == 0
    assert results[1].value.kind in (("",) if transport == "shm" else kinds)


def diverge(folder, transport):
    """Rank 1 wraps another model where rank 0 runs a backward."""
    (Path(folder) / "time").write_text(str(time.monotonic()))
    misdeed = Misdeed("", "", folder)
    model = wrap(make_model(misdeed), transport, 60.0)
    loss = model(batch(0)).sum()
    error = None
    try:
        if os.environ["RANK"] == "0":
            loss.backward()
        else:
            wrap(make_model(misdeed), transport)
    except Exception as caught:
        error = caught
    return misdeed.end(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_wait_for_each_other_are_told_at_once(transport, tmp_path):
    for result in fork_ranks(diverge, 2, tmp_path, transport):
        assert result.returncode == 0, result.stderr
        assert result.value.kind == "DivergenceError", result.value
        assert "rank 0" in result.value.message and "rank 1" in result.value.message
        assert result.value.seconds < 5.0


# --- interrupts and children ----------------------------------------------------------------------


def interrupt(folder, transport):
    """Rank 0 waits for rank 1, which sleeps; a signal's handler raises KeyboardInterrupt there, as
    Ctrl-C does."""
    model = wrap(make_model(Misdeed("", "", folder)), transport, 60.0)
    if os.environ["RANK"] == "1":
        time.sleep(5.0)
        return End("", "", 0.0)

    def on_alarm(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    due = time.monotonic() + 1.0
    try:
        model(batch(0)).sum().backward()
    except KeyboardInterrupt:
        return End("KeyboardInterrupt", "", time.monotonic() - due)
    except Exception as error:
        return End(type(error).__name__, str(error), time.monotonic() - due)
    return End("", "", 0.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interrupt_ends_a_wait(transport, tmp_path):
    end = fork_ranks(interrupt, 2, tmp_path, transport, timeout=30)[0].value
    assert end is not None and end.kind == "KeyboardInterrupt", end
    assert end.seconds < 2.0, "only after the wait"


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return batch(index)[0]


def train_from_workers(transport, folder):
    """Two epochs with two forked workers each, and the same without any, in a plain model."""
    model = wrap(make_model(Misdeed("", "", folder)), transport)
    plain = make_model(Misdeed("", "", folder))
    for net, workers in ((model, 2), (plain, 0)):
        optimizer = zshard.SGD(net.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=workers)
        for _ in range(2):
            for x in loader:
                net(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    state = model.state_dict()
    return all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_dataloader_workers_do_no_harm(pool2, transport, tmp_path):
    assert pool2.run(train_from_workers, transport, tmp_path) == [True, True]


def kill_beside_workers(folder):
    """As `train`, but the last rank has forked workers, which outlive it for a while."""
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, persistent_workers=True)
    workers = iter(loader)
    next(workers)
    return train("kill", "forward", folder, "shm")


def test_rank_killed_beside_its_workers_is_named(tmp_path):
    results = fork_ranks(kill_beside_workers, 2, tmp_path)
    assert results[-1].returncode == -signal.SIGKILL
    check_survivors(results, ("PeerError",), "rank 1")


def fork_and_free(folder):
    """A forked child tries to use the model, frees all it inherited, and ends; then training goes
    on. What the child said, and whether the model is right."""
    plain = make_model(Misdeed("", "", folder))
    model = wrap(make_model(Misdeed("", "", folder)), "shm")
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    said = ""
    for step in range(STEPS):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            step_once(net, optimizer, plain[2].misdeed, step)
        if step == 1:
            said = in_child(lambda: use_and_free(model))
    state = model.state_dict()
    equal = all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    return said, equal


def in_child(function):
    """What `function` returns in a forked child that ends without cleaning up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, function().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def use_and_free(model):
    try:
        model(batch(0))
        said = "nothing was raised"
    except RuntimeError as error:
        said = str(error)
    for module in list(model.modules()):
        module.__dict__.clear()
    zshard._group._entries.clear()
    gc.collect()
    return said


def test_forked_child_is_kept_out_and_frees_nothing_of_its_parents(pool2, tmp_path):
    for rank, (said, equal) in enumerate(pool2.run(fork_and_free, tmp_path)):
        assert f"forked from rank {rank} cannot take part" in said
        assert equal
