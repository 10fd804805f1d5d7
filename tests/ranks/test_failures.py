"""Ranks that die, raise, leave, stop, diverge or fork: the others get an error that names the rank;
none hangs.

A training loop in which the last rank fails in a chosen way at one place, over both transports. How
another rank's loop ends, and how many seconds after the failure, comes back as an `End`: by
CLOCK_MONOTONIC, which all processes of a host share. tests/c/test_comm_*.c has each wait and each
failure; here are the errors that a script sees.
"""

from __future__ import annotations

import copy
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
from compare import differences
from groups import hosts_of
from models import TRANSPORTS
from nursery import fork_ranks
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

STEPS = 4
BAD_STEP = 2
PLANTED = "planted at step 2"


@dataclass(frozen=True)
class End:
    """The end of a rank's loop: the exception's type, or "" if none, and seconds since the
    failure."""

    kind: str
    message: str
    seconds: float


class Misdeed:
    """The last rank's failure, and its time; on the other ranks it never happens."""

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

    def end(self, error):
        """Return the `End` of a loop that `error` (None: nothing) ended."""
        stamp = self.folder / "time"
        since = time.monotonic() - float(stamp.read_text()) if stamp.exists() else 0.0
        return End(type(error).__name__ if error else "", str(error or ""), since)

    def end_of(self, loop):
        """Run `loop()` and return its `End`, unless it raises the planted error."""
        try:
            loop()
        except Exception as error:
            if str(error) == PLANTED:
                raise
            return self.end(error)
        return self.end(None)


class Spot(nn.Module):
    """The identity; fails in forward or in backward if that is the place."""

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
    """The same on all ranks, so that the mean of the gradients equals each rank's own."""
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
    """Run the loop with the failure; return its `End`."""
    misdeed = Misdeed(deed, place, folder)

    def loop():
        model = wrap(make_model(misdeed), transport, timeout, strategy)
        optimizer = zshard.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            step_once(model, optimizer, misdeed, step)

    return misdeed.end_of(loop)


def check_survivors(results, kinds, *words, within=5.0):
    """Check that all ranks but the last ended on their own with an error of `kinds` that contains
    `words`, or that names another of them, which had already ended with such an error."""
    survivors = {f"see the output of rank {result.rank} for the cause" for result in results[:-1]}
    for result in results[:-1]:
        assert result.returncode == 0, f"rank {result.rank}: {result.returncode}\n{result.stderr}"
        end = result.value
        assert end.kind in kinds, f"rank {result.rank} ended with {end}"
        if any(other in end.message for other in survivors):
            continue
        missing = [word for word in words if word not in end.message]
        assert not missing, f"{missing} not in: {end.message}"
        assert end.seconds < within, f"rank {result.rank} took {end.seconds:.1f} s"


ENDS = [
    ("kill", "forward", 2, "full_shard"),
    ("kill", "backward", 3, "shard_grad_op"),
    ("kill", "step", 4, "no_shard"),
    ("exit", "step", 2, "full_shard"),
    ("raise", "forward", 2, "full_shard"),
]
CODES = {"kill": -signal.SIGKILL, "exit": 0, "raise": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("deed", "place", "world", "strategy"), ENDS)
def test_rank_that_ends_is_named_within_seconds(deed, place, world, strategy, transport, tmp_path):
    results = fork_ranks(train, world, deed, place, tmp_path, transport, 60.0, strategy)
    assert results[-1].returncode == CODES[deed]
    quoted = [f"failed: ValueError: {PLANTED}"] if deed == "raise" else []
    check_survivors(results, ("PeerError",), f"rank {world - 1}", *quoted)


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


def harmless():
    """Return the model on a rank that does nothing wrong."""
    return make_model(Misdeed("", "", ""))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return batch(index)[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_forked_dataloader_workers_are_harmless(transport):
    """Two epochs with two forked workers each are those of a plain model without any."""
    model, plain = wrap(harmless(), transport), harmless()
    for net, workers in ((model, 2), (plain, 0)):
        optimizer = zshard.SGD(net.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=workers)
        for _ in range(2):
            for x in loader:
                net(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert differences(model.state_dict(), plain.state_dict()) == []


def kill_beside_workers(folder):
    """As `train`, but the last rank has forked workers, which outlive it for a while."""
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, persistent_workers=True)
    workers = iter(loader)
    next(workers)
    return train("kill", "forward", folder, "shm")


def test_rank_killed_with_workers_is_named(tmp_path):
    results = fork_ranks(kill_beside_workers, 2, tmp_path)
    assert results[-1].returncode == -signal.SIGKILL
    check_survivors(results, ("PeerError",), "rank 1")


def in_child(function):
    """Return the result of `function` in a forked child that exits without cleaning up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, function().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


def free(model):
    """Free all that a child has inherited."""
    for module in list(model.modules()):
        module.__dict__.clear()
    zshard.ranks.transports._connections.clear()
    gc.collect()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_forked_child_is_refused_and_frees_nothing(transport):
    """It tries to use the model, frees all it inherited, and exits; then training continues."""
    model, plain = wrap(harmless(), transport), harmless()
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]

    def use_and_free():
        text = message_of(lambda: model(batch(0)), RuntimeError)
        free(model)
        return text

    for step in range(STEPS):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            step_once(net, optimizer, plain[2].misdeed, step)
        if step == 1:
            text = in_child(use_and_free)
    assert f"forked from rank {dist.get_rank()} cannot use its process group" in text
    assert differences(model.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_dying_child_does_not_report_for_its_parent(transport):
    """A child dies between forward and backward; then the ranks wait for each other so long that
    they check the store for messages."""
    model = wrap(harmless(), transport, 30.0)
    loss = model(batch(0)).square().sum()

    def die():
        """Exit as after an uncaught exception: an exit hook runs, and objects are freed."""
        text = message_of(loss.backward, RuntimeError)
        sys.excepthook(ValueError, ValueError("the child dies"), None)
        zshard.ranks.transports._leave()
        free(model)
        return text

    text = in_child(die)
    for rank in (0, 1):
        if dist.get_rank() == rank:
            time.sleep(2.5)
        loss.backward()
        loss = model(batch(0)).square().sum()
    assert f"forked from rank {dist.get_rank()} cannot use its process group" in text


@on_ranks(4)
def test_fork_while_a_parents_thread_works():
    """Each layer's backward forks a child that frees the model, while a thread of the parent sums
    the earlier layers' gradients."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    plain, ends = torch.nn.Sequential(*copy.deepcopy(layers)), []

    def free_soon():
        signal.alarm(20)
        free(model)
        return "freed"

    with hosts_of(2, 2) as group:
        options = {"auto_wrap_policy": {torch.nn.Linear}, "process_group": group}
        model = FSDP(torch.nn.Sequential(*layers), transport="hosts", **options)
        optimizers = [zshard.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for _ in range(3):
            x = torch.ones(2, 1024)
            plain(x).sum().backward()
            for layer in model:
                x = layer(x)
                x.register_hook(lambda _: ends.append(in_child(free_soon)))
            x.sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        assert ends == ["freed"] * 12
        assert differences(model.state_dict(), plain.state_dict()) == []
