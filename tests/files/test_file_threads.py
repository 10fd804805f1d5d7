"""_core.File under threads and signals, which its calls let run: what these do to the file is an error
or harmless, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_faults import file_faults

from zshard._core import File


def long_read(file: File) -> None:
    """Read 2 GiB through a buffer of 4 MiB."""
    room = bytearray(4 << 20)
    file.read([(0, room)] * 512)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[File]:
    """A file of 4 MiB."""
    with File.create(tmp_path / "large", 4 << 20) as file:
        yield file


def test_close_while_another_thread_reads(large: File) -> None:
    file_faults(0)
    thread = threading.Thread(target=long_read, args=[large])
    thread.start()
    while file_faults(0) == 0:  # not started
        pass
    with pytest.raises(RuntimeError, match=r"cannot close .* another thread is using it"):
        large.close()
    thread.join()
    large.close()


def test_other_threads_run_during_a_read(large: File) -> None:
    """This thread counts while another one reads: the GIL is released."""
    thread = threading.Thread(target=long_read, args=[large])
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 10


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function in this thread in 10 ms, at any point of its work."""
    before = signal.getsignal(signal.SIGALRM)

    def arm(act: Callable[[], None]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: act())
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


ENDLESS = 1_000_000  # times 4 MiB: many minutes


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["read", "write", "check"])
def test_ctrl_c_ends_a_long_call(
    large: File, alarm: Callable[[Callable[[], None]], None], call: str
) -> None:
    room = bytearray(4 << 20)
    os.truncate(large.path, 1 << 40 if call == "check" else 4 << 20)
    alarm(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        if call == "read":
            large.read([(0, room)] * ENDLESS)
        elif call == "write":
            large.write([(0, room)] * ENDLESS, 4 << 20)
        else:
            large.check(0, 1 << 40, 4 << 20)
    room.clear()  # no longer held
    large.close()


def test_file_truncated_during_a_read_is_an_error(
    large: File, alarm: Callable[[Callable[[], None]], None]
) -> None:
    """Truncated during a read, after its size was checked: no signal, no invented bytes."""
    alarm(lambda: os.truncate(large.path, 1000))
    with pytest.raises(ValueError, match=f"'{large.path}' ends at (or before )?byte 1000"):
        large.read([(0, bytearray(4 << 20))] * ENDLESS)
