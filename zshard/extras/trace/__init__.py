"""Traces: `with zshard.profile()`, ZSHARD_TRACE=file, and `python -m zshard trace`.

The C core records ranges of what a rank does while a trace runs (csrc/base/profile.h). Here they
are merged over the ranks; records.py makes them a file that Perfetto and chrome://tracing open,
times.py a report.

Ranks of one host share a clock. The clocks of other hosts are compared in barriers: a rank leaves
none before another has entered it, which bounds their difference on both sides.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard import api
from zshard.api import host_id, warn
from zshard.extras.trace.records import RankTrace, apart, read_ranks, write_ranks
from zshard.extras.trace.times import parts_of, summaries_of, text_of

__all__ = ["RankTrace", "Trace", "parts_of", "profile", "read"]

_ROUNDS = 20  # barriers in which hosts compare their clocks


class Trace:
    """The ranges that ranks recorded: `report()`, `to_json()`, `export(file)`."""

    def __init__(self, ranks: Iterable[RankTrace] = ()) -> None:
        self.ranks = sorted(ranks)

    def to_json(self) -> str:
        """Return the report as JSON: for each rank its seconds, steps, units and waits."""
        return json.dumps(summaries_of(self.ranks), indent=1)

    def report(self) -> str:
        """Return a text: the time of each unit, and the longest waits, for each rank."""
        return "\n\n".join(map(text_of, summaries_of(self.ranks)))

    def export(self, file: str | os.PathLike[str]) -> None:
        """Write a Chrome trace, which ui.perfetto.dev opens; compressed if the name ends in .gz.

        Raises OSError if the file cannot be written.
        """
        write_ranks(file, self.ranks)


def read(files: Iterable[str | os.PathLike[str]]) -> Trace:
    """Read traces of ranks and put them on the clock of the first, by the hosts' times of day.

    Raises OSError, or ValueError if a file is no trace of zshard's.
    """
    return Trace(read_ranks(files))


class profile(Trace):
    """Context manager that records what zshard does on this rank, and merges it over the ranks.

    Use it on all ranks; at its end they wait for each other, and rank 0 receives what all have
    recorded. Then `report()` is a text of each unit's time and of the longest waits, `to_json()`
    the same as JSON, and `export(file)` writes a trace for ui.perfetto.dev: on rank 0 of all ranks,
    on others of their own. If a rank leaves by an exception, each has only its own.

    Example::

        with zshard.profile("trace.json.gz") as trace:
            train(steps=3)
        print(trace.report())

    Args:
        file: where rank 0 writes the trace at the end; compressed if the name ends in .gz. Ranks
            that are not merged write FILE.rank1.json. Default: None, nowhere.
        merge: False: this rank alone, which waits for no other. Default: True.

    Raises RuntimeError if a trace runs already; PeerTimeoutError at the end if not all ranks have
    come to theirs within the timeout of torch.distributed's store; OSError if the file cannot be
    written. This rank's trace is there in all cases.
    """

    def __init__(self, file: str | os.PathLike[str] | None = None, *, merge: bool = True) -> None:
        super().__init__()
        self._file, self._merge = file, merge

    def __enter__(self) -> Self:
        self._begun = _start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        trace = _stop(self._begun)
        self.ranks = [trace]
        merged = _merged(trace, kind) if self._merge else None
        self.ranks = merged or [trace]
        if self._file is not None and (merged is None or trace.rank == 0):
            self.export(self._file if merged else _own_name(self._file, trace.rank))


# --- one rank -------------------------------------------------------------------------------------


def _start() -> int:
    if not api.trace_start():
        raise RuntimeError("a trace runs already: leave that profile(), or unset ZSHARD_TRACE")
    return time.monotonic_ns()


def _stop(begun: int) -> RankTrace:
    recorded, lost = api.trace_stop()
    now = time.monotonic_ns()
    wall = time.time_ns() - now
    if lost:
        warn(f"zshard.profile(): the trace is full and lacks {lost} ranges: trace fewer steps")
    ranges, memory = apart(reversed(recorded))
    rank = dist.get_rank() if _has_group() else int(os.environ.get("RANK", 0))
    return RankTrace(rank, host_id(), os.getpid(), begun, now, wall, lost, ranges, memory)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_name(file: str | os.PathLike[str], rank: int) -> Path:
    path = Path(file)
    stem, dot, ending = path.name.partition(".")
    return path.with_name(f"{stem}.rank{rank}{dot}{ending}")


def trace_to(file: str) -> None:
    """Trace the rest of the process into `file`, with the rank in its name."""
    begun = _start()

    def write() -> None:
        trace = _stop(begun)
        Trace([trace]).export(_own_name(file, trace.rank))

    atexit.register(write)


# --- all ranks ------------------------------------------------------------------------------------

_merges = itertools.count(1)


def _merged(trace: RankTrace, kind: type[BaseException] | None) -> list[RankTrace] | None:
    """Return what all ranks have recorded on rank 0, [] on others; None if one has left by an
    exception. That one must not wait for ranks that may be waiting for it, so the store is asked
    first."""
    merge = next(_merges)
    if not _has_group() or dist.get_world_size() == 1:
        return [trace]
    world = dist.get_world_size()
    store, prefix = distributed_c10d._get_default_store(), f"zshard/profile/{merge}/"
    store.set(prefix + str(trace.rank), f"left {kind.__name__}" if kind else f"here {trace.host}")
    if kind is not None:
        return None
    hosts = set()
    for rank in range(world):
        try:
            word, _, text = store.get(prefix + str(rank)).decode().partition(" ")
        except dist.DistStoreError:
            text = f"rank {rank} has not come to the end of its profile(): enter it on all ranks"
            raise api.PeerTimeoutError(f"{text}, or pass merge=False") from None
        if word == "left":
            warn(f"rank {rank} left its profile() by {text}: this trace is of rank {trace.rank}")
            return None
        hosts.add(text)
    barriers: list[_Barrier] = []
    for _ in range(_ROUNDS if len(hosts) > 1 else 0):
        entered = time.monotonic_ns()
        dist.barrier()
        barriers.append((entered, time.monotonic_ns()))
    gathered: list[Any] | None = [None] * world if trace.rank == 0 else None
    dist.gather_object((tuple(trace), barriers), gathered)
    clocks = {trace.host: (0, 0)}  # of each host, which all its ranks have: shift and error
    traces = []
    for fields, other in gathered or ():
        peer = RankTrace(*fields)
        if peer.host not in clocks:
            clocks[peer.host] = bounds(barriers, other)
        shift, error = clocks[peer.host]
        traces.append(peer._replace(shift=shift, error=error))
    return traces


_Barrier = tuple[int, int]  # when this rank entered it, and left it


def bounds(first: Sequence[_Barrier], other: Sequence[_Barrier]) -> tuple[int, int]:
    """Return how far the clock of the first rank is ahead of the other's, and the error of that at
    most, in nanoseconds. Both have been in the same barriers."""
    pairs = list(zip(first, other, strict=True))
    most = min(left - entered for (_, left), (entered, _) in pairs)
    least = max(entered - left for (entered, _), (_, left) in pairs)
    return (most + least) // 2, (most - least + 1) // 2


# --- the command ---------------------------------------------------------------------------------


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the subparsers of `python -m zshard`."""
    trace = commands.add_parser("trace", help="merge traces of ranks into one, and report on them")
    trace.add_argument("files", nargs="+", help="what ZSHARD_TRACE=file has written, of each rank")
    trace.add_argument("-o", "--out", help="the merged trace to write; .gz compresses it")
    trace.add_argument("--json", action="store_true", help="print the report as JSON")
    trace.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    trace = read(args.files)
    if args.out:
        trace.export(args.out)
    print(trace.to_json() if args.json else trace.report())
    return 0
