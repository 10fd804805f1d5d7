"""_core.File, closed and forgotten, used by several threads at once, interrupted, cut off.

A call lets other threads and signals in, so whatever these do to the file meanwhile
has to be an error or come out right, and nothing may stay behind.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_faults import file_faults
from heap import heap_bytes
from test_files import noise, write

from zshard import _core
from zshard._core import File

CALLS: dict[str, Callable[[File], object]] = {
    "size": lambda file: file.size,
    "read": lambda file: file.read([(0, bytearray(1))]),
    "write": lambda file: file.write([(0, b"x")], 1),
    "check": lambda file: file.check(0, 1, 1),
    "sync": lambda file: file.sync(),
}


@pytest.mark.parametrize("call", CALLS)
def test_closed(tmp_path: Path, call: str) -> None:
    file = File.create(tmp_path / "a", 4)
    with file as same:
        assert same is file
    file.close()  # once more is nothing
    with pytest.raises(ValueError, match=f"'{tmp_path / 'a'}' is closed"):
        CALLS[call](file)
    assert file.path == str(tmp_path / "a")


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_forgotten_file_is_closed(tmp_path: Path) -> None:
    before = descriptors()
    File.create(tmp_path / "a", 4)
    for _ in range(3):
        with pytest.raises((OSError, ValueError)):
            File.open(tmp_path)
    assert descriptors() == before


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    lock = _core.lock_file(tmp_path / "lock")
    with File.create(tmp_path / "a", 4):
        listing = "import os; print(*(os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')))"
        done = subprocess.run(
            [sys.executable, "-c", listing], close_fds=False, capture_output=True, text=True
        )
    _core.unlock(lock)
    assert done.returncode == 0 and str(tmp_path) not in done.stdout


def each_call(root: Path) -> None:
    """Everything once, and each kind of failure."""
    path, room = root / "a", bytearray(100)
    with File.create(path, 10) as file:
        file.write([(0, b"0123456789"), (5, room)], 7)
        file.check(0, 10, 3)
        file.read([(0, room)])
        for call in (
            lambda: file.read([(0, room), (1 << 40, room)]),
            lambda: file.read([(0, room), (0, b"read-only")]),
            lambda: file.write([(0, room), (0, None)], 7),
            lambda: file.write([(0, room)], 0),
            lambda: file.check(0, 1 << 40, 1),
            lambda: File.create(path, 3),
            lambda: File.open(root),
            lambda: File.open(root / "none"),
            lambda: _core.rename(path, path),
            lambda: _core.lock_file(root),
            lambda: _core.crc32c(room, -1),
        ):
            with pytest.raises((OSError, ValueError, TypeError)):
                call()
    with pytest.raises(ValueError):
        file.read([(0, room)])
    _core.unlock(_core.lock_file(path))
    _core.remove_file(path)


def test_nothing_grows(tmp_path: Path) -> None:
    """Objects and bytes of the heap after hundreds of calls and failures of each kind."""
    for _ in range(20):
        each_call(tmp_path)
    gc.collect()  # earlier tests' garbage, which may hold files
    open_before, blocks, heap = descriptors(), sys.getallocatedblocks(), heap_bytes()
    for _ in range(300):
        each_call(tmp_path)
    gc.collect()
    assert descriptors() <= open_before
    assert sys.getallocatedblocks() - blocks < 100
    assert heap_bytes() - heap < 300 * 16


def long_read(file: File) -> None:
    """2 GiB, by way of 4 MiB."""
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
    while file_faults(0) == 0:  # not begun
        pass
    with pytest.raises(RuntimeError, match=r"cannot close .* another thread is using it"):
        large.close()
    thread.join()
    large.close()


def test_two_threads_read_one_handle(tmp_path: Path) -> None:
    data = noise(8 << 20)
    rooms = [bytearray(4 << 20), bytearray(4 << 20)]
    with File.open(write(tmp_path / "a", data)) as file:
        threads = [
            threading.Thread(target=file.read, args=[[(k << 22, room)]])
            for k, room in enumerate(rooms)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert b"".join(rooms) == data


def test_other_threads_run_meanwhile(large: File) -> None:
    """While one reads, this one counts: the GIL is not held."""
    thread = threading.Thread(target=long_read, args=[large])
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 10


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Has a function called in this thread in 10 ms, wherever it is then."""
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
    room.clear()  # not held any more
    large.close()


def test_a_file_that_gets_shorter_is_an_error(
    large: File, alarm: Callable[[Callable[[], None]], None]
) -> None:
    """Cut while it is read, behind the look at its size: no signal, no bytes made up."""
    alarm(lambda: os.truncate(large.path, 1000))
    with pytest.raises(ValueError, match=f"'{large.path}' ends at or before byte 1000"):
        large.read([(0, bytearray(4 << 20))] * ENDLESS)
