"""Where loaded values come from: a dict, rank 0, or files.

A plan represents each value as a tensor, so planning does not depend on where values are. A tensor
of a dict is its own source. Others are Pending: they refer to an origin, from which a Source reads
the range that this rank needs. There are two sources, FromRank0 here and Reader in
checkpoint/load.py; with them, no rank holds more than its shards and one chunk.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zshard import _core
from zshard.guard.slices import to_local
from zshard.ranks.agreement import gather_bytes, on_all_ranks
from zshard.state.stand_ins import Pending
from zshard.units.shards import Part

__all__ = [
    *("CHUNK", "ChunkMemory", "Copy", "FromRank0", "Source", "chunks"),
    *("filled", "flat_of", "pending", "shard_of", "told_by_rank_0"),
]

CHUNK = 2**24  # bytes


class Source(Protocol):
    """Reads the values of Pending tensors."""

    def read(self, origin: Any, begin: int, target: Tensor) -> None:
        """Fill `target` with row-major elements of the tensor `origin` from `begin` on, cast to its
        dtype. All ranks call it for the same tensors in the same order."""


class Copy(NamedTuple):
    """Memory of this rank, and the value to load into it."""

    target: Tensor
    value: Tensor

    def carry_out(self, source: Source | None) -> None:
        """Load the value. source: for Pending values; a dict needs none."""
        if isinstance(self.value, Pending):
            assert source is not None, "only a source makes them"
            source.read(self.value.origin, self.value.begin, self.target)
        else:
            self.target.copy_(self.value)


def filled(value: object, source: Source | None) -> Any:
    """Return a value of a state dict in new memory, for a Pending one on the CPU; anything but a
    tensor unchanged."""
    if isinstance(value, Pending):
        made = torch.empty(tuple(value.shape), dtype=value.dtype)
        Copy(made, value).carry_out(source)
        return made
    return value.detach().clone() if isinstance(value, Tensor) else value


def shard_of(part: Part, value: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, whose values may be pending."""
    if isinstance(value, Pending) and part.is_cut:
        return value.part(part.begin, part.local_shape)
    return part.of(value)


# --- rank 0 ---------------------------------------------------------------------------------------


class FromRank0:
    """The source for the result of told_by_rank_0(): rank 0 has all values and sends them in
    chunks; each rank keeps its elements."""

    def __init__(self, comm: _core.Comm) -> None:
        self._comm = comm
        self._memory = ChunkMemory()

    def read(self, origin: Tensor, begin: int, target: Tensor) -> None:
        whole = origin.detach().resolve_conj().resolve_neg().reshape(-1)
        with flat_of(target) as flat:
            end = begin + flat.numel()
            for first, last in chunks(whole.numel(), whole.dtype):
                if self._comm.rank == 0:
                    chunk = whole[first:last].cpu().contiguous()
                else:
                    chunk = self._memory.of(last - first, whole.dtype)
                self._comm.broadcast(chunk.view(torch.uint8), 0)
                low, high = max(first, begin), min(last, end)
                if low < high:
                    flat[low - begin : high - begin].copy_(chunk[low - first : high - first])


def pending(state: Mapping[Any, Any], dims: int = 0) -> dict[Any, Any]:
    """Return `state` with Pending tensors for those that have at least so many dimensions."""
    return {
        key: Pending.of(str(key), v) if isinstance(v, Tensor) and v.dim() >= dims else v
        for key, v in state.items()
    }


def told_by_rank_0(comm: _core.Comm, state: object) -> Any:
    """Return rank 0's `state` on all ranks; on others, its Pending tensors have origins on the meta
    device. Collective. Ranks trust one another, as in torch.distributed's object collectives.
    """
    written = io.BytesIO()
    with on_all_ranks(comm):
        if comm.rank == 0:
            _WithoutValues(written).dump(state)
    told = gather_bytes(comm, written.getvalue())[0]
    return state if comm.rank == 0 else pickle.loads(told)


class _WithoutValues(pickle.Pickler):
    """Pickles everything except the values of Pending tensors."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Pending):
            return NotImplemented
        return _likeness, (value.label, tuple(value.shape), value.dtype)


def _likeness(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Pending:
    return Pending.of(name, torch.empty(shape, dtype=dtype, device="meta"))


# --- memory ---------------------------------------------------------------------------------------


class ChunkMemory:
    """CPU memory for one chunk at a time, as large as the largest one so far."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        size = numel * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype)


@contextlib.contextmanager
def flat_of(target: Tensor) -> Iterator[Tensor]:
    """Yield a 1-dimensional view of a tensor to write to; if there is no such view, a temporary
    tensor that is copied to `target` at the end."""
    target = to_local(target)
    if target.is_contiguous():
        yield target.view(-1)
        return
    flat = torch.empty(target.numel(), dtype=target.dtype, device=target.device)
    yield flat
    target.copy_(flat.view(target.shape))


def chunks(numel: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of all elements, in pieces of at most CHUNK bytes."""
    step = CHUNK // dtype.itemsize
    for begin in range(0, numel, step):
        yield begin, min(begin + step, numel)
