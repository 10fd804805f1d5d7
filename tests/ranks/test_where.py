"""An error of ranks that wait or diverged ends with a line for each rank: where its script is.

A rank that hangs is also named, at any place; and nothing is looked up while nothing fails.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import TRANSPORTS
from nursery import fork_ranks
from scenarios import WIDTH, floats, loss_of
from spawn import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

import zshard
from zshard import FSDP, _core
from zshard.ranks import agreement, stalls, where
from zshard.units.units import state_of

TIMEOUT = 2.0
FILE = Path(__file__)


def line_of(mark: str) -> str:
    """Return the place of the one line of this file that ends with the comment `mark`."""
    numbers = [i for i, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith(mark)]
    assert len(numbers) == 1, mark
    return f"ranks/{FILE.name}:{numbers[0]} "


def lines_in(text: str) -> dict[str, str]:
    """Return the lines of an error, by rank."""
    return dict(re.findall(r"^  (ranks? [-\d, ]+): (.*)$", text, re.MULTILINE))


def wrap(transport: str, timeout: float) -> Any:
    """Return a model with two units, whose forwards are torch's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3))
    return FSDP(model, transport=transport, timeout=timeout, auto_wrap_policy={nn.Linear})


def wrapped(transport: str) -> Any:
    """Return a model and its optimizer after two steps."""
    stalls._EVERY = 0.1  # answers sooner
    if transport == "hosts":
        os.environ["ZSHARD_HOST"] = f"host {int(os.environ['RANK']) // 2}"
    model = wrap(transport, TIMEOUT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        loss_of(model(floats(dist.get_rank(), step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def text_of(action: Any) -> str:
    with pytest.raises((zshard.DivergenceError, zshard.PeerTimeoutError)) as caught:
        action()
    return f"{caught.type.__name__}: {caught.value}"


# --- ranks that diverged --------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "world"), [("shm", 3), ("c10d", 3), ("hosts", 4)])
def test_ranks_that_diverged_are_on_different_lines(transport: str, world: int) -> None:
    for result in fork_ranks(diverges, world, transport, check=True):
        assert result.value.startswith("DivergenceError: ")
        lines = lines_in(result.value)
        first, others = lines.pop("rank 0"), lines.pop(f"ranks 1-{world - 1}")
        assert not lines
        assert first.startswith(line_of("# clips")) and ", in clip_grad_norm_(), step 2" in first
        assert others.startswith(line_of("# trains")) and "ward, step 2" in others


def diverges(transport: str) -> str:
    model, _ = wrapped(transport)
    loss_of(model(floats(dist.get_rank()))).backward()
    if dist.get_rank() == 0:
        return text_of(lambda: model.clip_grad_norm_(1.0))  # clips
    return text_of(lambda: loss_of(model(floats(1))).backward())  # trains


def steps_alone(transport: str) -> str:
    model, optimizer = wrapped(transport)
    loss_of(model(floats(dist.get_rank()))).backward()
    if dist.get_rank() == 1:
        optimizer.step()
    return text_of(lambda: loss_of(model(floats(0))).backward())  # out of step


@pytest.mark.parametrize(("transport", "world"), [("shm", 2), ("c10d", 2), ("hosts", 4)])
def test_ranks_out_of_step(transport: str, world: int) -> None:
    for result in fork_ranks(steps_alone, world, transport, check=True):
        assert "out of step" in result.value
        lines = lines_in(result.value)
        assert all(line.startswith(line_of("# out of step")) for line in lines.values())
        alike = lines.pop("rank 0" if world == 2 else "ranks 0, 2-3")
        assert ", step 2" in alike and ", step 3" in lines.pop("rank 1") and not lines


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, fresh=True)
def test_failure_within_backward(transport):
    model, optimizer = wrapped(transport)
    loss_of(model(floats(dist.get_rank()))).backward()
    if dist.get_rank() == 0:
        optimizer.zero_grad()
    text = text_of(lambda: loss_of(model(floats(0))).backward())  # a second backward
    assert "zero_grad() was called on one of them only" in text
    for line in lines_in(text).values():
        assert line.startswith(line_of("# a second backward")) and ", in backward" in line


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, fresh=True)
def test_errors_that_python_raises_have_the_lines_too(transport):
    comm = state_of(wrap(transport, 60.0)).comms.all
    text = text_of(lambda: agreement.check_agreement(comm, [("it", str(comm.rank))]))  # agrees
    lines = lines_in(text)
    assert len(lines) in (1, 2)
    assert all(line.startswith(line_of("# agrees")) for line in lines.values())


# --- ranks that hang ------------------------------------------------------------------------------

SECONDS = 60.0  # longer than any wait here: ranks that hang are killed


class SlowData(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        time.sleep(SECONDS)
        return index


def loops(loss: torch.Tensor) -> None:
    while True:
        pass


HANGS: list[Any] = [
    lambda loss: time.sleep(SECONDS),  # rank 1 hangs
    lambda loss: threading.Event().wait(SECONDS),  # rank 2 hangs
    lambda loss: next(iter(DataLoader(SlowData(), num_workers=1))),  # rank 3 hangs
    lambda loss: dist.barrier(),  # rank 4 hangs
    lambda loss: [loss.register_hook(lambda _: time.sleep(9)), loss.backward()],  # rank 5 hangs
    loops,
    # These cannot answer.
    lambda loss: ctypes.PyDLL(None).sleep(int(SECONDS)),
    lambda loss: os.kill(os.getpid(), signal.SIGSTOP),
]


def hang(transport: str) -> str:
    """Each rank but the first hangs in its own way; return the first one's error."""
    model, _ = wrapped(transport)
    loss = loss_of(model(floats(0)))
    if rank := dist.get_rank():
        HANGS[rank - 1](loss)
    return text_of(lambda: loss.backward())  # waits for the others


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_hang_are_named_with_their_lines(transport: str) -> None:
    result = fork_ranks(hang, 1 + len(HANGS), transport, until=0)[0]
    assert result.value is not None, result.stderr
    assert result.value.startswith("PeerTimeoutError: ")
    lines = lines_in(result.value)
    assert lines.pop("rank 0").startswith(line_of("# waits for the others"))
    assert lines.pop("ranks 7-8").startswith("no answer (its Python interpreter is busy")
    assert " in loops(), step 2" in lines.pop("rank 6")
    for rank in range(1, 6):
        line = lines.pop(f"rank {rank}")
        assert line.startswith(line_of(f"# rank {rank} hangs")) and ", step 2" in line
    assert not lines


def waits_long(transport: str) -> None:
    """Rank 0 waits beyond the time after which it writes a line; that is 10 s, and here 1."""
    wrapped(transport)
    assert _core.report_after(1.0) == 10.0
    model = wrap(transport, 60.0)
    if dist.get_rank() == 1:
        time.sleep(1.9)  # is late
    loss_of(model(floats(0))).backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_line_on_stderr_after_a_long_wait(transport: str) -> None:
    first, second = fork_ranks(waits_long, 2, transport, check=True)
    words = "zshard: rank 0 has been waiting 1 s"
    assert first.stderr.count("has been waiting") == 1
    text = first.stderr[first.stderr.index(words) :]
    assert lines_in(text)["rank 1"].startswith(line_of("# is late"))
    assert "zshard:" not in second.stderr


# --- which line it is -----------------------------------------------------------------------------


def in_a_thread(transport: str) -> str:
    texts: list[str] = []

    def trains() -> None:
        model, _ = wrapped(transport)
        if dist.get_rank() == 1:
            time.sleep(SECONDS)  # in a thread
        texts.append(text_of(lambda: loss_of(model(floats(0))).backward()))  # waits in a thread

    thread = threading.Thread(target=trains, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return texts[0] if texts else ""


def test_script_that_trains_in_a_thread() -> None:
    lines = lines_in(fork_ranks(in_a_thread, 2, "shm", until=0)[0].value)
    assert lines["rank 0"].startswith(line_of("# waits in a thread"))
    assert lines["rank 1"].startswith(line_of("# in a thread"))


# --- the text -------------------------------------------------------------------------------------


def line_in(file: str) -> str:
    """Return the line of a script that has this name."""
    lines: list[str] = []
    code = compile("\nhere()", file, "exec")
    exec(code, {"here": lambda: lines.append(where._line_of(sys._getframe(1)))})
    return lines[0].partition(", ")[0]  # without this process's earlier training


def test_any_file_name_is_shown() -> None:
    assert line_in("train.py") == "train.py:2" and line_in("a/b/läuft.py") == "b/läuft.py:2"
    assert re.fullmatch(r"\.\.\.[lang]{90}\.py:2", line_in("lang" * 50 + ".py"))
    assert line_in(os.fsdecode(b"\xff\xfe.py")) == r"\udcff\udcfe.py:2"
    assert len(line_in("/" + "ü" * 300 + "/" + "é" * 300 + ".py").encode()) < 320


class Looks(nn.Module):
    def forward(self, x: torch.Tensor) -> str:
        return where.here()  # looks


def test_this_line_is_found_and_libraries_are_not() -> None:
    assert where.here().startswith(line_of("# found"))  # found
    found = torch.nn.Sequential(Looks())(torch.ones(1))  # through a module of torch
    assert found.startswith(line_of("# looks"))
    reached = functools.reduce(lambda a, b: where.here(), [1, 2])  # through a callback
    assert reached.startswith(line_of("# through a callback"))


def test_nothing_keeps_the_frames() -> None:
    import gc
    import weakref

    class Held:
        pass

    def look() -> weakref.ref[Held]:
        held = Held()
        where.here()
        where.script()
        return weakref.ref(held)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, fresh=True)
def test_nothing_is_looked_up_while_nothing_fails(transport):
    model = wrap(transport, 600.0)  # ranks ask after a quarter of the timeout
    looked: list[Any] = []
    where.here = where.script = looked.append
    _core.report_after(600.0)
    for step in range(3):
        if dist.get_rank() == step:
            time.sleep(0.7)
        loss_of(model(floats(0, step))).backward()
    assert looked == []


def test_position_without_a_model() -> None:
    call, run, steps, unit = _core.position()
    assert call == run == "" and isinstance(steps, int) and isinstance(unit, str)
    with agreement.PublicCall("save()"):
        assert _core.position()[0] == "save()"
