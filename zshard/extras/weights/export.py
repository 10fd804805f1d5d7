"""zshard.export(): the full tensors of a model by name, in buckets, while it trains.

An export holds a session from its first bucket to its last (units.session): no rank writes to the
model meanwhile, so all buckets are of one step. Within it, units are unsharded one by one, and each
tensor is copied, and cast, once: from the full buffer, which over shm is the mapped memory of all
ranks' shards, to the place where it is wanted. A bucket has memory of its own, so a script
that keeps its tensors keeps right values.

A sink (hf_folder.py, send.py) is a loop over the same rounds with another place to copy to.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zshard import api
from zshard.api import (
    Entry,
    PublicCall,
    bare,
    check_agreement,
    comm_of,
    inventory,
    may_stay_open,
    on_all_ranks,
    parse_size,
    read_full,
    removal,
    reshard_all,
    session,
    units_of,
)
from zshard.extras.weights.delta import Exported

if TYPE_CHECKING:
    import os

ALIGN = 64  # bytes, of each tensor in a bucket

Bucket = dict[str, Tensor]
Rename = Callable[[str], str | None]


def version_of(tensor: Tensor) -> int:
    """Return autograd's counter of in-place writes."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class Rounds:
    """An export under way on one rank: fill() each of the batches, in order, on all ranks."""

    model: nn.Module
    comm: api.Comm | None  # its ranks; None: this one, which needs no other
    takes: bool  # this rank wants the tensors
    # All entries, also those that have not changed; and the batches to send.
    entries: list[Entry] = field(default_factory=list)
    batches: list[list[Entry]] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)  # of what is in no unit, at the start
    tied: Mapping[str, str] = field(default_factory=dict)  # alias: name

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context manager that raises on all ranks if its body raises on any, where all ranks take
        part in each round."""
        with PublicCall("export()"):
            if self.comm is None:
                yield
            else:
                with on_all_ranks(self.comm):
                    yield

    @PublicCall("export()")
    def fill(self, batch: Sequence[Entry], targets: Sequence[Tensor]) -> None:
        """Copy the tensors of a batch to contiguous targets of their shapes and dtypes; on a rank
        that takes nothing, only take part."""
        for entry in batch:
            if version_of(entry.value) != self.versions.get(entry.name, version_of(entry.value)):
                text = f"'{entry.name}' was written to during an export"
                raise RuntimeError(f"{text}: leave the loop of zshard.export() first")
        read_full(batch, targets if self.takes else [None for _ in batch])


class Export:
    """The result of zshard.export(): iterate over it, or call one of its methods. Each use exports
    the values of that time."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        bucket: int | str,
        rename: Rename | None,
        ranks: int | Iterable[int] | None,
        since: Exported | None,
    ) -> None:
        for name, value, is_right, kind in (
            ("model", model, isinstance(model, nn.Module), "an nn.Module"),
            ("dtype", dtype, isinstance(dtype, torch.dtype | None), "a torch.dtype"),
            ("rename", rename, rename is None or callable(rename), "a function of a name"),
            ("since", since, isinstance(since, Exported | None), "a zshard.Exported"),
        ):
            if not is_right:
                raise TypeError(f"export(): {name} must be {kind}, got {value!r:.80}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        self._model, self._dtype, self._rename = bare(model), dtype, rename
        self._limit = parse_size("bucket", bucket)
        self._ranks = _checked_ranks(ranks)
        self.since = since

    @may_stay_open
    def __iter__(self) -> Iterator[Bucket]:
        with self.rounds(self._ranks) as rounds:
            for batch in rounds.batches:
                shapes = ((entry.dtype, entry.shape) for entry in batch)
                tensors = views_of(flat_for(batch), shapes) if rounds.takes else []
                rounds.fill(batch, tensors)
                if rounds.takes:
                    yield dict(zip((entry.name for entry in batch), tensors, strict=True))
                del tensors  # before the next bucket takes memory

    def save(self, path: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
        """Write a Hugging Face folder: safetensors files, their index, and config.json if the
        module has one.

        One rank writes: the lowest of `ranks`, by default rank 0. A rename completes the folder.

        Args:
            path: the folder to create; its parent must exist.
            max_shard_size: the maximum bytes of tensors per file, as a number or as "5GB".

        Raises what iterating does; ValueError with `since`, as a folder must have all tensors;
        FileExistsError if the path exists; OSError if the system refuses.
        """
        from zshard.extras.weights.hf_folder import save

        save(self, path, parse_size("max_shard_size", max_shard_size, base=1000))

    def broadcast(self, group: dist.ProcessGroup | None = None) -> None:
        """Send all buckets to the other ranks of a process group, which call receive_export().

        One rank of the model sends: the lowest of `ranks`, by default rank 0. It must be in the
        group, and the other ranks of the model must not.

        Raises what iterating does; ValueError if the sender is not in the group. If it raises, so
        does receive_export() on the ranks that receive.
        """
        from zshard.extras.weights.send import broadcast

        broadcast(self, group)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to use instead of a method that was removed."""
            unknown = f"'Export' object has no attribute '{name}'"
            raise AttributeError(removal(f"Export.{name}") or unknown)

    @property
    def sender(self) -> frozenset[int]:
        """The rank that sends or writes for all."""
        return frozenset({0 if self._ranks is None else min(self._ranks)})

    def sends(self) -> bool:
        """Return whether this is that rank."""
        units = next(units_of(self._model), None)
        return _rank_in(None if units is None else comm_of(self._model), None) in self.sender

    @contextlib.contextmanager
    def rounds(
        self, ranks: frozenset[int] | None, prepare: Callable[[Rounds], object] | None = None
    ) -> Iterator[Rounds]:
        """Context manager in which the model cannot change, with the rounds of an export.

        ranks: those that take the tensors; None: all. prepare: called on these, with all entries,
        before the model is held; if it raises, all ranks raise.
        """
        model = self._model
        states = [state for _, state in units_of(model)]
        comm = comm_of(model) if states else None
        by_all = any(s.comms.all.transport not in ("shm", "self") for s in states)
        rank = _rank_in(comm, ranks)
        rounds = Rounds(model, comm if by_all else None, ranks is None or rank in ranks)
        with rounds.together():
            self._plan(rounds)
            if rounds.takes and prepare is not None:
                prepare(rounds)
        if by_all and comm is not None:
            entries = rounds.entries
            facts = [(f"tensor '{e.name}'", f"shape {e.shape}, {e.dtype}") for e in entries]
            facts += [("bucket", str(self._limit)), ("since", str(self.since is not None))]
            with PublicCall("export()"):
                check_agreement(comm, facts, "tensors to export")
        with contextlib.ExitStack() as stack:
            # A rank that takes nothing also opens one: it must have read as often as the others,
            # or it writes before they have read (csrc/comm/shm/shm_word.c).
            stack.enter_context(session(state.unit for state in states))
            wanted = rounds.entries
            if self.since is not None:
                wanted = stack.enter_context(self.since.news(rounds.entries, comm))
            if by_all or rounds.takes:
                rounds.batches = _batches(wanted, self._limit)
            yield rounds

    def _plan(self, rounds: Rounds) -> None:
        """Find the entries. Communicates nothing."""
        reshard_all(self._model, "export")
        all_tensors = inventory(self._model)
        names: dict[str, str] = {}
        for entry in all_tensors.entries:
            old = entry.name
            new = old if self._rename is None else self._rename(old)
            if new is None:
                continue
            if not isinstance(new, str):
                raise TypeError(f"rename('{old}') must return a string or None, got {new!r}")
            if new in names:
                text = f"rename() gives '{names[new]}' and '{old}' the same name, '{new}'"
                raise ValueError(f"{text}: give each tensor another one")
            names[new] = old
            is_float = entry.dtype.is_floating_point
            dtype = self._dtype if self._dtype is not None and is_float else entry.dtype
            rounds.entries.append(entry._replace(name=new, dtype=dtype))
            if entry.unit is None:
                rounds.versions[new] = version_of(entry.value)
        order = {id(entry.unit): i for i, entry in reversed([*enumerate(rounds.entries)])}
        rounds.entries.sort(key=lambda entry: order[id(entry.unit)])  # a unit is gathered once
        rounds.tied = all_tensors.tied if self._rename is None else {}


def export(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket: int | str = "256MiB",
    rename: Rename | None = None,
    ranks: int | Iterable[int] | None = None,
    since: Exported | None = None,
) -> Export:
    """Give the full tensors of a model by name, in buckets: `for bucket in zshard.export(model):`.

    A bucket is a dict of new contiguous tensors on the device of the model, for example for vLLM's
    `load_weights(bucket.items())`. Its memory is its own: keep or change it as you like. The loop
    variable still holds the last bucket while the next one is made; `del bucket` at the end of the
    loop's body keeps the peak at one.

    Call it between steps. All buckets are of one step: until the loop ends, or is left by break or
    an exception, the model cannot be stepped, loaded or written to, and other ranks wait before
    they do so. (Writes to `.data` of what is not sharded, as with no_shard, are not noticed.) Over
    shm (one host) any rank may export alone, and ranks that are not in `ranks` return at once.
    Otherwise, and with `since`, it is collective: run the loop on all ranks, to its end or to the
    same bucket; on ranks that are not in `ranks` its body never runs.

    Args:
        model: a sharded model, or a plain one, whose tensors are this rank's. Names and tensors are
            those of the plain model's state_dict(): parameters and persistent buffers, without the
            prefixes of torch.compile(), activation checkpointing and DDP. Tied weights come once,
            under the name that Hugging Face saves them under, else the first. Buffers are this
            rank's.
        dtype: the dtype of floating-point tensors, such as torch.bfloat16; None keeps each dtype.
            Integers and booleans keep theirs.
        bucket: the maximum bytes of a bucket, as a number or as "256MiB". A larger tensor comes
            alone. Over c10d, a bucket should hold a unit's tensors, as a unit is gathered once for
            each bucket that it is in.
        rename: a function from a name to the one that is wanted, or to None, which leaves the
            tensor out.
        ranks: the rank, or ranks, of the model's process group that get the tensors; None: all.
        since: a zshard.Exported: only tensors that have changed since its last complete export.

    Returns an Export, an iterable with the methods save() and broadcast().

    Raises TypeError or ValueError, which name the argument, or the tensor, for what cannot be
    exported; RuntimeError during a forward or backward, while unshard() keeps parameters unsharded,
    and if a buffer changed during the export; DivergenceError if the ranks' models or arguments
    differ, or one rank alone has stepped; PeerError if a rank exited.
    """
    return Export(model, dtype, bucket, rename, ranks, since)


def _checked_ranks(ranks: Any) -> frozenset[int] | None:
    if ranks is None:
        return None
    try:
        numbers = frozenset(map(operator.index, ranks if isinstance(ranks, Iterable) else [ranks]))
    except TypeError:
        raise TypeError(f"ranks must be a rank, several ranks or None, got {ranks!r}") from None
    if not numbers:
        raise ValueError("ranks must not be empty: name the ranks that get the tensors")
    return numbers


def _rank_in(comm: api.Comm | None, ranks: frozenset[int] | None) -> int:
    """Return this process's rank. Raises ValueError for ranks that do not exist."""
    rank, world = (0, 1) if comm is None else (comm.rank, comm.world)
    if comm is None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    for number in ranks or ():
        if not 0 <= number < world:
            raise ValueError(f"ranks: {number} is out of range for world size {world}")
    return rank


def _batches(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Divide entries into batches of at most `limit` bytes, each on one device."""
    batches: list[list[Entry]] = []
    filled, device = 0, None
    for entry in entries:
        size = aligned(entry.size)
        if filled + size > limit or entry.value.device != device:
            batches.append([])
            filled, device = 0, entry.value.device
        batches[-1].append(entry)
        filled += size
    return batches


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def views_of(flat: Tensor, shapes: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Return tensors of these dtypes and shapes, one after another in a uint8 tensor."""
    views, at = [], 0
    for dtype, shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        views.append(flat[at : at + size].view(dtype).view(shape))
        at += aligned(size)
    return views


def flat_for(batch: Sequence[Entry]) -> Tensor:
    """Return new memory for a batch, as a uint8 tensor."""
    with torch.inference_mode(False):  # callers may write to it
        size = sum(aligned(entry.size) for entry in batch)
        return torch.empty(size, dtype=torch.uint8, device=batch[0].value.device)
