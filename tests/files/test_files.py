"""_core.File: what its calls do and refuse.

Several ranks write a checkpoint's file, and untrusted or truncated files are read, so each call is
also tested on invalid input. test_file_threads.py has threads and signals.
"""

from __future__ import annotations

import errno
import gc
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_faults import file_faults
from heap import heap_bytes
from rows import all_rows
from scenarios import message_of

from zshard import _core
from zshard._core import File, crc32c

BLOCK = 64 << 10


def sums(triples: bytes) -> list[tuple[int, int, int]]:
    return [(a, b, c) for a, b, c in struct.iter_unpack("=QQQ", triples)]


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- write, read, check --------------------------------------------------------------------------


def test_create_makes_zeros_and_room(tmp_path: Path) -> None:
    with File.create(tmp_path / "a", 5 << 20) as file:
        assert file.size == 5 << 20
        assert file.path == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == bytes(5 << 20)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 5 << 20


def test_create_of_nothing(tmp_path: Path) -> None:
    with File.create(tmp_path / "a", 0) as file:
        assert file.size == 0 and file.check(0, 0, BLOCK) == b"" and file.write([], 1) == b""
        file.read([])
        file.read([(0, bytearray())])
        assert file.write([(7, b"")], 1) == b""
        assert file.size == 0


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 << 20])
@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1, 3 * BLOCK])
def test_checksums_per_block_of_written_bytes(tmp_path: Path, size: int, offset: int) -> None:
    data, end = noise(size), offset + size
    with File.create(tmp_path / "a", end) as file:
        triples = file.write([(offset, data)], BLOCK)
        assert file.check(offset, end, BLOCK) == triples
    assert (tmp_path / "a").read_bytes() == bytes(offset) + data
    cuts = sorted({offset, *range(-(-offset // BLOCK) * BLOCK, end, BLOCK), end})
    whole = bytes(offset) + data
    assert sums(triples) == [(a, b - a, crc32c(whole[a:b])) for a, b in pairwise(cuts)]


def test_many_ranges_in_any_order(tmp_path: Path) -> None:
    whole = noise(1 << 20)
    cuts = [0, 10, 10, 70_000, 500_000, 500_001, 1 << 20]
    pairs = list(pairwise(cuts))[::-1]
    with File.create(tmp_path / "a", len(whole)) as file:
        triples = file.write([(a, whole[a:b]) for a, b in pairs], BLOCK)
        assert triples == b"".join(file.check(a, b, BLOCK) for a, b in pairs)
        rooms = [bytearray(b - a) for a, b in pairs]
        file.read([(a, room) for (a, _), room in zip(pairs, rooms, strict=True)])
    assert (tmp_path / "a").read_bytes() == whole
    assert rooms == [whole[a:b] for a, b in pairs]


@pytest.mark.parametrize("offset", [(2 << 30) - 3, (5 << 30) + 1, 1 << 40])
def test_offsets_beyond_32_bits(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "sparse"
    path.touch()
    with File.open_to_write(path) as file:
        triples = file.write([(offset, b"far away")], 1 << 30)
        assert sum(length for _, length, _ in sums(triples)) == 8
        assert sums(triples)[0][0] == offset and file.size == offset + 8
        assert file.check(offset, offset + 8, 1 << 30) == triples
        room = bytearray(8)
        file.read([(offset, room)])
    assert room == b"far away"
    assert path.stat().st_blocks * 512 < 1 << 20


def test_reads_into_arrays_and_views(tmp_path: Path) -> None:
    data = noise(4000)
    path = write(tmp_path / "a", data)
    array, room = np.zeros((10, 100), np.float32), bytearray(100)
    with File.open(path) as file:
        file.read([(0, array), (40, memoryview(room)[10:50])])
    assert array.tobytes() == data
    assert room == bytes(10) + data[40:80] + bytes(50)


def test_writes_read_only_memory_and_arrays(tmp_path: Path) -> None:
    array = np.arange(100, dtype=np.int64)
    array.setflags(write=False)
    with File.create(tmp_path / "a", 0) as file:
        triples = file.write([(0, array), (800, b"end")], 1 << 20)
    assert sums(triples) == [(0, 800, crc32c(array.tobytes())), (800, 3, crc32c(b"end"))]
    assert (tmp_path / "a").read_bytes() == array.tobytes() + b"end"


def test_long_write_is_flushed_in_the_background(tmp_path: Path) -> None:
    """Flushed after each 32 MiB, in any order of writes. Only fsync reports a failure."""
    room = bytearray(4 << 20)
    ranges = [((k * 7 % 20) << 22, room) for k in range(20)]
    with File.create(tmp_path / "a", 80 << 20) as file:
        file_faults(0)
        triples = file.write(ranges, 4 << 20)
        calls = file_faults(0)
        assert calls == (80 << 20) // (256 << 10) + 2
        file_faults((32 << 20) // (256 << 10) + 1, "EIO")  # the first of the two
        assert file.write(ranges, 4 << 20) == triples
        assert file_faults(0) == calls
        file.sync()


# --- refusals ------------------------------------------------------------------------------------


OUT = bytearray(1)
READS: list[tuple[Any, type[Exception], str]] = [
    ([(0, b"read-only")], TypeError, "contiguous and writable buffer, got bytes"),
    ([(0, np.zeros((4, 4))[:, 0])], TypeError, "contiguous and writable buffer"),
    ([(0, np.zeros((4, 4)).T)], TypeError, "contiguous and writable buffer"),
    ([(0, 5)], TypeError, "buffer, got int"),
    ([(0, None)], TypeError, "buffer, got NoneType"),
    ([(0, OUT), (0,)], TypeError, r"a tuple (offset, memory)"),
    ([[0, OUT]], TypeError, r"a tuple (offset, memory), got list"),
    ([(1.0, OUT)], TypeError, "float"),
    ([(2**63, OUT)], OverflowError, "int"),
    ([(-1, OUT)], ValueError, "1 bytes at offset -1 are out of range"),
    ([(2**63 - 2, OUT)], ValueError, "ends at byte 100, before byte 9223372036854775807"),
    ([(2**63 - 1, bytearray(2))], ValueError, "2 bytes at offset 9223372036854775807"),
    ([(0, bytearray(100)), (99, bytearray(2))], ValueError, "ends at byte 100, before byte 101"),
    ([(101, OUT)], ValueError, "ends at byte 100, before byte 102"),
    ({}, TypeError, "a list of ranges, got dict"),
    (None, TypeError, "a list of ranges, got NoneType"),
]
WRITES: list[tuple[Any, Any, type[Exception], str]] = [
    ([(0, "text")], BLOCK, TypeError, "contiguous buffer, got str"),
    ([(-5, b"a")], BLOCK, ValueError, "1 bytes at offset -5 are out of range"),
    ([(2**63 - 1, b"ab")], BLOCK, ValueError, "2 bytes at offset"),
    ([(0, b"a")], 0, ValueError, "must be positive, got 0 bytes"),
    ([(0, b"a")], -1, ValueError, "must be positive, got -1 bytes"),
    ([(0, b"a")], 1.5, TypeError, "float"),
    ((0, b"a"), BLOCK, TypeError, "a tuple"),
]
CHECKS: list[tuple[tuple[int, ...], type[Exception], str]] = [
    ((0, 101, BLOCK), ValueError, "ends at byte 100, before byte 101"),
    ((0, 2**63 - 1, 1), ValueError, "ends at byte 100, before byte 9223372036854775807"),
    ((5, 4, BLOCK), ValueError, "invalid byte range [5, 4)"),
    ((-1, 4, BLOCK), ValueError, "invalid byte range [-1, 4)"),
    ((0, 4, 0), ValueError, "must be positive, got 0 bytes"),
    ((0, 4), TypeError, "3 arguments"),
]


def after(first: tuple[int, object], ranges: Any) -> Any:
    """Put a good range before those of a list."""
    return [first, *ranges] if isinstance(ranges, list) else ranges


def test_misuse_is_refused_before_anything_is_read_or_written(tmp_path: Path) -> None:
    room, data = bytearray(3), b"x" * 100
    path = write(tmp_path / "a", data)
    with all_rows() as row, File.open_to_write(path) as file:
        for ranges, error, says in READS:
            with row("read", says):
                text = message_of(partial(file.read, after((0, room), ranges)), error)
                assert says in text and (error is not ValueError or f"'{path}'" in text)
        for ranges, block, error, says in WRITES:
            with row("write", says):
                assert says in message_of(
                    partial(file.write, after((0, b"good"), ranges), block), error
                )
        for arguments, error, says in CHECKS:
            with row("check", says):
                assert says in message_of(partial(file.check, *arguments), error)
    assert room == bytes(3) and path.read_bytes() == data
    room.clear()  # BufferError if it were still held


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in (
        (tmp_path, "a directory"),
        (tmp_path / "fifo", "a FIFO"),
        ("/dev/null", "a device"),
    ):
        with pytest.raises(ValueError, match=f"'{path}' is not a regular file: it is {kind}"):
            File.open(path)
    with pytest.raises(ValueError, match="not a regular file: it is a FIFO"):
        File.open_to_write(tmp_path / "fifo")
    with pytest.raises(IsADirectoryError):
        File.open_to_write(tmp_path)


def test_links_are_followed_only_for_reading_on_request(tmp_path: Path) -> None:
    target, link = write(tmp_path / "target", b"data"), tmp_path / "link"
    link.symlink_to(target)
    with File.open(link) as file:
        assert file.size == 4
    with File.open(target, False) as file:
        assert file.size == 4
    for refused in (lambda: File.open(link, False), lambda: File.open_to_write(link)):
        with pytest.raises(OSError) as caught:
            refused()
        assert caught.value.errno == errno.ELOOP and caught.value.filename == str(link)
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    for taken in (target, link, tmp_path / "dangling"):
        with pytest.raises(FileExistsError) as exists:
            File.create(taken, 10)
        assert exists.value.filename == str(taken)
    assert not (tmp_path / "made").exists() and target.read_bytes() == b"data"


@pytest.mark.parametrize("size", [-1, 2**63 - 1])
def test_create_of_an_impossible_size_leaves_nothing(tmp_path: Path, size: int) -> None:
    with pytest.raises((ValueError, OSError)):
        File.create(tmp_path / "a", size)
    assert os.listdir(tmp_path) == []


def test_reading_handle_does_not_write(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"mine")
    with File.open(path) as file, pytest.raises(OSError) as caught:
        file.write([(0, b"x")], BLOCK)
    assert caught.value.errno == errno.EBADF and caught.value.filename == str(path)


@pytest.mark.parametrize("path", ["a\0b", "", None, 3, ["a"]])
def test_bad_paths(path: object) -> None:
    for call in (File.open, File.open_to_write, _core.make_folder, _core.lock_file):
        with pytest.raises((TypeError, ValueError, FileNotFoundError)):
            call(path)


def test_paths_of_any_bytes(tmp_path: Path) -> None:
    """A name that is not UTF-8, also in a message."""
    raw = os.fsencode(tmp_path) + b"/\xff\xe9" + b"n" * 200
    File.create(raw, 3).close()
    with File.open(raw) as file:
        assert os.fsencode(file.path) == raw
        with pytest.raises(ValueError) as caught:
            file.check(0, 4, 1)
        assert file.path in str(caught.value)
    with pytest.raises(FileExistsError) as exists:
        File.create(os.fsdecode(raw), 3)
    assert exists.value.filename == os.fsdecode(raw)


def test_closed(tmp_path: Path) -> None:
    with File.create(tmp_path / "a", 4) as file:
        pass
    file.close()  # closing again has no effect
    calls: list[Callable[[], object]] = [
        lambda: file.size,
        lambda: file.read([(0, bytearray(1))]),
        lambda: file.write([(0, b"x")], 1),
        lambda: file.check(0, 1, 1),
        file.sync,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"'{tmp_path / 'a'}' is closed"):
            call()
    assert file.path == str(tmp_path / "a")


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_unreferenced_file_is_closed(tmp_path: Path) -> None:
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
    """Every call once, and each kind of failure."""
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
    """Objects and heap bytes do not grow over 100 calls and failures of each kind."""
    for _ in range(10):
        each_call(tmp_path)
    gc.collect()  # earlier tests' garbage may hold files
    open_before, blocks, heap = descriptors(), sys.getallocatedblocks(), heap_bytes()
    for _ in range(100):
        each_call(tmp_path)
    gc.collect()
    assert descriptors() <= open_before
    assert sys.getallocatedblocks() - blocks < 50  # one lost by each call would be 100
    assert heap_bytes() - heap < 100 * 8
