"""The memory files that a rank of a kept run writes at each step."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from enum import IntEnum

import torch

from zshard import api
from zshard.extras.recovery.layout import Counters

_NUMBER = struct.Struct("Q")


class Mark(IntEnum):
    """Offsets of numbers in the header file: the last step that this rank has written, and done."""

    READY = 0
    DONE = 8


class Files:
    """The files of this rank that have a step in hand: what the script needs, twice, and the record
    of the optimizer's step."""

    def __init__(self, runs: int, changes: int, before: Files | None) -> None:
        self.runs, self.changes = runs, changes
        self.counters: Counters = []
        self.held: Sequence[int] = ()  # the keeper also has these descriptors
        if before is None:
            self.head = _file("zshard-kept-head", _NUMBER.size * len(Mark))
            self._slots = [_file(f"zshard-kept-slot-{i}", 0) for i in range(2)]
        else:
            self.head, self._slots = before.head, before._slots
        room = (runs, torch.get_num_threads())
        self._area = _file("zshard-kept-step", api.KeptStep.bytes(*room))
        self.step = api.KeptStep(mmap.mmap(self._area, 0), *room)

    @property
    def fds(self) -> list[int]:
        return [self.head, *self._slots, self._area]

    def close(self) -> None:
        """Close this rank's descriptors; the keeper has its own."""
        for fd in self.fds:
            os.close(fd)

    def close_area(self) -> None:
        os.close(self._area)

    def fit(self, runs: int, changes: int, files: Sequence[int]) -> bool:
        """Return whether a step of so many runs, with gradients in these files, can be recorded,
        and the state has not moved."""
        return runs <= self.runs and changes == self.changes and {*files} <= {*self.held}

    def write(self, number: int, data: bytes) -> None:
        """Write what the script needs after step `number`, in place of what it needed two steps
        before."""
        fd = self._slots[number % 2]
        os.ftruncate(fd, len(data))
        view = memoryview(data)
        at = 0
        while at < len(data):
            at += os.pwrite(fd, view[at:], at)


def mark(head: int, what: Mark, number: int) -> None:
    """Write a number to a header file, in one system call: a kill cannot cut it in two."""
    os.pwrite(head, _NUMBER.pack(number), what)


def marked(head: int, what: Mark) -> int:
    """Return the number that a header file has."""
    return int(_NUMBER.unpack(os.pread(head, _NUMBER.size, what))[0])


def _file(name: str, size: int) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd
