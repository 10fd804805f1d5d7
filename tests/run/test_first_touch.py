"""Shared memory is on its owner's NUMA node: the owner is the first to touch its pages.

Linux allocates a page of a shared file when it is first read or written, on the node of the process
that does it (or by its policy, which `python -m zshard run` sets). Allocated pages are visible even
on a machine with one node: all others are holes of the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scenarios import units_made_by
from spawn import on_ranks
from torch import nn

from zshard import FSDP

PAGE = 4096
HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def pages_of(name: str) -> set[int]:
    """Return the pages that have memory in this process's memory files of that name."""
    pages: set[int] = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(each).startswith(f"/memfd:{name}"):
                continue
            file = os.open(each, os.O_RDONLY)
        except FileNotFoundError:  # the listing's own
            continue
        at = 0
        while at < os.fstat(file).st_size:
            try:
                begin = os.lseek(file, at, os.SEEK_DATA)
            except OSError:  # ENXIO: none beyond
                break
            at = os.lseek(file, begin, os.SEEK_HOLE)
            pages |= set(range(begin // PAGE, at // PAGE))
        os.close(file)
    return pages


@pytest.mark.skipif(
    HUGE.exists() and any(word in HUGE.read_text() for word in ("[always]", "[force]")),
    reason="all shared memory is in huge pages here, which two shards may share",
)
@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_each_rank_is_the_first_to_touch_its_shard(first):
    """Rank `first` creates its unit's memory while the other waits, then that one does."""
    added: list[set[int]] = []

    def in_turn(make, *args):
        unit, before = None, pages_of("zshard-flats")
        for rank in (first, 1 - first):
            dist.barrier()
            unit = make(*args) if dist.get_rank() == rank else unit
            dist.barrier()
            added.append(pages_of("zshard-flats") - before)
            before |= added[-1]
        dist.barrier()
        return unit

    torch.manual_seed(0)
    with units_made_by(in_turn):
        model = FSDP(nn.Linear(256, 256, bias=False), auto_wrap_policy=None, transport="shm")
    model(torch.randn(2, 256)).sum().backward()
    early, late = map(sorted, added)
    pages = 256 * 256 * 4 // 2 // PAGE  # of a shard
    assert len(late) == pages
    assert early == list(range(early[0], early[0] + pages)), "not one shard"
    assert (early[0] < late[0]) is (first == 0), "not the own shard"
