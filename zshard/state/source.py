"""Sources of loaded values: a dict, rank 0, or files.

A plan represents each value as a tensor, so planning does not depend on where values are. A tensor
of a dict has its values. Others are Pending: each has a Source, which reads the range that this
rank needs. There are two sources, FromRank0 here and Reader in checkpoint/checkpoint.py; with
them, no rank holds more than its shards and one chunk.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zshard import _core
from zshard.guard.slices import plain, to_local
from zshard.ranks.agreement import gather_bytes, on_all_ranks
from zshard.state.stand_ins import Pending
from zshard.units.shards import Part
from zshard.units.units import writing

CHUNK = 2**24  # bytes


class Copy(NamedTuple):
    """Memory of this rank, and the value to load into it."""

    target: Tensor
    value: Tensor

    def carry_out(self) -> None:
        if isinstance(self.value, Pending):
            self.value.source.read(self.value.origin, self.value.begin, self.target)
        else:
            self.target.copy_(self.value)


def filled(value: object) -> Any:
    """Return a copy of a tensor, a Pending one on the CPU; anything else unchanged."""
    if isinstance(value, Pending):
        memory = torch.empty(tuple(value.shape), dtype=value.dtype)
        Copy(memory, value).carry_out()
        return memory
    return value.detach().clone() if isinstance(value, Tensor) else value


NotedLoad = tuple[_core.Unit, int, int]
"""A parameter that is loaded: its unit, its index, a number of the value (content_of())."""


@dataclass
class LoadPlan:
    """The plan of loading a model, an optimizer or averages: copies, then calls."""

    copies: list[Copy] = field(default_factory=list)
    calls: list[Callable[[], Any]] = field(default_factory=list)
    loads: list[NotedLoad] = field(default_factory=list)
    undo: list[tuple[Optimizer, Callable[[], None]]] = field(default_factory=list)
    """Optimizers that have loaded, with what gives them back their state."""

    def pending(self) -> list[Pending]:
        """Return the tensors that this rank will read."""
        return [copy.value for copy in self.copies if isinstance(copy.value, Pending)]

    def fact(self) -> list[tuple[str, Any]]:
        """Return the facts that must agree between ranks."""
        return [(value.label, value.dtype) for value in self.pending()]

    def carry_out(self) -> None:
        with torch.no_grad(), plain(), writing(unit for unit, _, _ in self.loads):
            for copy in self.copies:
                copy.carry_out()
            # All ranks execute the same plan, but some of them do not know the contents. Before the
            # calls: one that raises on one rank changes nothing about what is loaded.
            for unit, index, _ in self.loads:
                unit.note_load(index, 0)
        for call in self.calls:
            call()


planned: ContextVar[LoadPlan | None] = ContextVar("planned", default=None)
"""Set while a module's load_state_dict() only plans: what it would load goes there."""
planned_state: ContextVar[LoadPlan | None] = ContextVar("planned_state", default=None)
"""The same for an optimizer's, which makes the memory to copy to."""


def shard_of(part: Part, value: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, whose values may be pending."""
    if isinstance(value, Pending) and part.is_cut:
        return value.part(part.begin, part.local_shape)
    return part.of(value)


class FromRank0:
    """A source: rank 0 has all values and sends them in chunks; each rank keeps its elements."""

    def __init__(self, comm: _core.Comm) -> None:
        self._comm = comm
        self._memory = ChunkMemory()

    def outline(self, state: object) -> Any:
        """Return rank 0's `state`, with its Pending tensors, on all ranks. Collective. Ranks trust
        one another, as in torch.distributed's object collectives."""
        written = io.BytesIO()
        with on_all_ranks(self._comm):
            try:
                _WithoutValues(written).dump(state if self._comm.rank == 0 else None)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise TypeError(f"rank 0 cannot send its state: {error}; take that out") from None
        text = gather_bytes(self._comm, written.getvalue())[0]
        with on_all_ranks(self._comm):  # a rank may lack a class
            if self._comm.rank != 0:
                unpickler = pickle.Unpickler(io.BytesIO(text))
                unpickler.persistent_load = self._unread  # type: ignore[method-assign]
                state = unpickler.load()
        return state

    def _unread(self, facts: tuple[str, tuple[int, ...], torch.dtype]) -> Pending:
        label, shape, dtype = facts
        return Pending.of(label, torch.empty(shape, dtype=dtype, device="meta"), self)

    def read(self, origin: Tensor, begin: int, target: Tensor) -> None:
        whole = origin.detach().resolve_conj().resolve_neg().reshape(-1)
        with flat_of(target) as flat:
            end = begin + flat.numel()
            for first, last in chunks(whole.numel(), whole.dtype):
                if self._comm.rank == 0:
                    chunk = whole[first:last].cpu().contiguous().as_strided((last - first,), (1,))
                else:
                    chunk = self._memory.of(last - first, whole.dtype)
                self._comm.broadcast(chunk.view(torch.uint8), 0)
                low, high = max(first, begin), min(last, end)
                if low < high:
                    flat[low - begin : high - begin].copy_(chunk[low - first : high - first])


class _WithoutValues(pickle.Pickler):
    def persistent_id(self, value: object) -> Any:
        if isinstance(value, Pending):
            return value.label, tuple(value.shape), value.dtype
        return None


def pending(state: Mapping[Any, Any], source: FromRank0, dims: int = 0) -> dict[Any, Any]:
    """Return `state` with Pending tensors for those that have at least so many dimensions."""
    return {
        key: Pending.of(str(key), v, source) if isinstance(v, Tensor) and v.dim() >= dims else v
        for key, v in state.items()
    }


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
