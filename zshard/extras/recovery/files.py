"""The memory files that a rank of a kept run writes at each step."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from zshard import api
from zshard.extras.recovery.layout import Counters
from zshard.extras.recovery.recover import Mark


class Files:
    """The files of this rank that have a step in hand: what the script needs, twice, and the record
    of the optimizer's step."""

    def __init__(self, runs: int, changes: int, before: Files | None) -> None:
        self.runs, self.changes = runs, changes
        self.counters: Counters = []
        self.held: Sequence[int] = ()  # the keeper has these descriptors, too
        self._area: int
        self.area: mmap.mmap
        if before is None:
            self._head, head = _file("zshard-kept-head", mmap.PAGESIZE)
            self._slots = [os.memfd_create(f"zshard-kept-slot-{i}") for i in range(2)]
            self.header = head
        else:
            self._head, self.header, self._slots = before._head, before.header, before._slots
        threads = torch.get_num_threads()
        self._area, self.area = _file("zshard-kept-step", api.kept_bytes(runs, threads))
        api.kept_format(self.area, runs, threads)

    @property
    def fds(self) -> list[int]:
        return [self._head, *self._slots, self._area]

    def close(self) -> None:
        """Close this rank's descriptors and mappings; the keeper has descriptors of its own."""
        self.close_area()
        self.header.close()
        for fd in [self._head, *self._slots]:
            os.close(fd)

    def close_area(self) -> None:
        self.area.close()
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

    def mark(self, what: Mark, number: int) -> None:
        api.kept_mark(self.header, int(what), number)


def _file(name: str, size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)
