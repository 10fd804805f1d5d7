"""Calls of _core.File and of its checksums, with arbitrary numbers: for the fuzzer and for
hypothesis.

A call is a few numbers, and a bytearray determines the expected result: the bytes, the sums, or a
refusal that changes nothing. Any number may occur.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

from zshard._core import File, crc32c, crc32c_join
from zshard.checkpoint.safetensors import rows_of

CALL = struct.Struct("<BqqH")
"""Which, two numbers of 64 bits, a count of bytes."""
ROOM = 1 << 10
"""Bytes: offsets and lengths that are meant are below, and few enough to be held against a bytearray."""
CALLS_AT_MOST = 64


def near(number: int) -> int:
    """Map offsets that a file could grow to into it; keep impossible ones."""
    return number % ROOM if 0 <= number < 2**62 else number


def pattern(count: int, seed: int) -> bytes:
    """Return bytes to write."""
    return bytes((seed + i * 7) % 251 for i in range(count))


class Played:
    """A file and its expected content."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.file = File.create(path, 100)
        self.bytes = bytearray(100)

    def act(self, which: int, a: int, b: int, count: int) -> None:
        acts: list[Callable[[int, int, int], None]] = [
            self.read,
            self.write,
            self.check,
            self.join,
        ]
        acts[which % len(acts)](a, b, count)

    def read(self, a: int, b: int, count: int) -> None:
        """Two ranges: if one is refused, neither is read."""
        places = [(near(a), count % ROOM), (near(b), a % 64)]
        rooms = [(at, bytearray(b"-" * length)) for at, length in places]
        right = all(self.is_there(at, length) for at, length in places)
        with contextlib.suppress(ValueError):
            self.file.read(rooms)
            assert right, f"{places} were read of {len(self.bytes)} bytes"
            assert [room for _, room in rooms] == [self.bytes[at : at + n] for at, n in places]
            return
        assert not right, f"{places} were refused of {len(self.bytes)} bytes"
        assert all(room == b"-" * len(room) for _, room in rooms)

    def write(self, a: int, block: int, count: int) -> None:
        at, data = near(a), pattern(count % ROOM, count)
        right = block > 0 and at >= 0 and at + len(data) < 2**63
        at = at % ROOM if right else at  # some file systems would have a file of 2**62 bytes
        with contextlib.suppress(ValueError):
            told = self.file.write([(at, data)], block)
            assert right, f"{len(data)} bytes were written at {at} in blocks of {block}"
            if data:
                self.bytes.extend(bytes(max(0, at - len(self.bytes))))
                self.bytes[at : at + len(data)] = data
            assert rows_of(told) == self.rows(at, at + len(data), block)
            return
        assert not right, f"{len(data)} bytes at {at} in blocks of {block} were refused"

    def check(self, a: int, block: int, count: int) -> None:
        begin = near(a)
        end = begin + count % ROOM - 1  # also before its begin
        if not -(2**63) <= end < 2**63:
            return
        there = begin == end or end <= len(self.bytes)
        right = 0 <= begin <= end and there and block > 0
        with contextlib.suppress(ValueError):
            told = self.file.check(begin, end, block)
            assert right, f"bytes {begin} to {end} were checked in blocks of {block}"
            assert rows_of(told) == self.rows(begin, end, block)
            return
        assert not right, f"bytes {begin} to {end} in blocks of {block} were refused"

    def join(self, a: int, b: int, count: int) -> None:
        """Join sums of existing blocks, of any length."""
        cut = count % (len(self.bytes) + 1)
        parts = self.bytes[:cut], self.bytes[cut:]
        joined = crc32c_join(crc32c(parts[0]), crc32c(parts[1]), len(parts[1]))
        assert joined == crc32c(self.bytes)
        right = 0 <= a < 2**32 and b >= 0
        with contextlib.suppress(ValueError):
            assert 0 <= crc32c_join(a, count, b) < 2**32 and right
            return
        assert not right

    def is_there(self, at: int, length: int) -> bool:
        return at >= 0 and (length == 0 or at + length <= len(self.bytes)) and at + length < 2**63

    def rows(self, begin: int, end: int, block: int) -> list[tuple[int, int, int]]:
        """Return the expected sums."""
        found = []
        while begin < end:
            cut = min(end, begin - begin % block + block)
            found.append((begin, cut - begin, crc32c(self.bytes[begin:cut])))
            begin = cut
        return found


def play(data: bytes, path: Path) -> None:
    """Make all calls in `data` on a new file at `path`; AssertionError if a result is wrong."""
    played = Played(path)
    whole = len(data) // CALL.size * CALL.size
    with played.file as file:
        for call in list(CALL.iter_unpack(data[:whole]))[:CALLS_AT_MOST]:
            played.act(*call)
            assert file.size == len(played.bytes)
    assert path.read_bytes() == played.bytes


def some_calls() -> list[bytes]:
    """Return initial calls: usual ones, and those around the limits of a 64-bit number."""
    usual = [(1, 90, 64, 300), (0, 0, 80, 390), (2, 0, 64, 391), (3, 5, 6, 50), (2, 100, 7, 40)]
    edges = [-1, 0, 1, 2**63 - 1, -(2**63), 2**62]
    wild = [
        (which, a, b, 2) for which in range(4) for a in edges for b in (1, edges[-1], edges[-2])
    ]
    return [
        b"".join(CALL.pack(*call) for call in calls) for calls in (usual, usual[:1] + wild[:63])
    ]
