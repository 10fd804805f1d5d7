"""Shared memory is on its owner's NUMA node: the owner is the first to touch its pages.

Linux allocates a page of a shared file when it is first read or written, on the node of the process
that does it (or by its policy, which `python -m zshard run` sets). Allocated pages are visible even
on a machine with one node: all others are holes of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scenarios import units_made_by
from spawn import ranks
from torch import nn

from zshard import FSDP

PAGE = 4096
HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def files(name: str) -> Iterator[int]:
    """Yield new descriptors of this process's memory files of that name."""
    for each in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(each).startswith(f"/memfd:{name}"):
                yield os.open(each, os.O_RDONLY)
        except FileNotFoundError:  # the listing's own
            continue


def pages_of(name: str) -> list[int]:
    """Return the pages that have memory, for each such file: one bit of a number each."""
    found = []
    for file in files(name):
        bits, at = 0, 0
        end = os.fstat(file).st_size
        while at < end:
            try:
                begin = os.lseek(file, at, os.SEEK_DATA)
            except OSError:  # ENXIO: none beyond
                break
            at = os.lseek(file, begin, os.SEEK_HOLE)
            bits |= (1 << at // PAGE) - (1 << begin // PAGE)
        os.close(file)
        found.append(bits)
    return found


def added(name: str, before: list[int]) -> list[int]:
    """Return the pages that now have memory and had none before."""
    after = pages_of(name)
    old = 0
    for bits in before:
        old |= bits
    return sorted(
        {
            page
            for bits in after
            for page in range(bits.bit_length())
            if bits >> page & 1 and not old >> page & 1
        }
    )


def first_touches(first: int) -> tuple[list[int], list[int], int]:
    """Rank `first` creates its unit's memory while the others wait, then these do: return which
    pages of the flats' file each of them adds, and how many pages a shard has."""
    seen: list[list[int]] = []

    def in_turn(make, *args):
        before = pages_of("zshard-flats")
        dist.barrier()
        unit = make(*args) if dist.get_rank() == first else None
        dist.barrier()
        seen.append(added("zshard-flats", before))
        dist.barrier()
        unit = unit or make(*args)
        dist.barrier()
        seen.append(added("zshard-flats", [sum(1 << page for page in seen[0]), *before]))
        dist.barrier()
        return unit

    torch.manual_seed(0)
    with units_made_by(in_turn):
        model = FSDP(nn.Linear(256, 256, bias=False), auto_wrap_policy=None, transport="shm")
    model(torch.randn(2, 256)).sum().backward()
    return seen[0], seen[1], 256 * 256 * 4 // dist.get_world_size() // PAGE


@pytest.mark.skipif(
    HUGE.exists() and any(word in HUGE.read_text() for word in ("[always]", "[force]")),
    reason="all shared memory is in huge pages here, which two shards may share",
)
@ranks(2)
def test_each_rank_is_the_first_to_touch_its_shard(pool):
    for first in range(pool.world):
        for early, late, pages in pool.run(first_touches, first):
            assert len(early) == len(late) == pages
            assert early == list(range(early[0], early[0] + pages)), "not one shard"
            assert (early[0] < late[0]) is (first == 0), "not the own shard"
