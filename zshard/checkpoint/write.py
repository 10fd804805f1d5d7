"""Write pieces of tensors to a file, directly or a chunk at a time; or in a thread, from a copy.

Values that are in CPU memory as the file needs them are written directly. Values that must be cast
or that are on a GPU go through one chunk of memory, which collects as many pieces as fit. On the
way, the core checks parameters for NaN and infinite values, as they will be in the file.

An asynchronous save copies everything that a step may change, and returns. A thread does the rest;
it has its own transport and does not touch the model. One save runs at a time. The next checkpoint
call raises the error of a failed save; if there is no next call, the process exits with status 1,
so no failure is lost. A process that exits waits for the thread, as for any non-daemon thread.
"""

from __future__ import annotations

import atexit
import functools
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zshard import _core
from zshard.checkpoint.manifest import BLOCK, FileRecord, Written
from zshard.checkpoint.progress import advance
from zshard.checkpoint.safetensors import CODES, rows_of
from zshard.checkpoint.save_plan import Piece, SavePlan, WrittenRun
from zshard.ranks.agreement import bytes_of, gather
from zshard.ranks.ends import fail
from zshard.state.source import CHUNK
from zshard.units.units import ModelContext

_MOST = 2**26  # bytes of a write, apart from large tensors: a progress bar moves after each
_ALIGN = 64  # bytes; the copies of an asynchronous save begin at multiples of it

_NUMBERS = ("BF16", "F16", "F32", "F64")  # codes of dtypes whose values the core checks
_OTHERS = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "C64")
"""Those of other dtypes that have NaN."""


class Writer:
    """Writes what a plan has for this rank, without copying what can be written directly.

    strange: the names of parameters that had NaN or infinite values.
    """

    def __init__(self, plan: SavePlan) -> None:
        self._watched = plan.parameters
        self._pinned = any(piece.values.is_cuda for piece in plan.pieces)
        self.strange: list[str] = []
        self._file: _core.File  # that is being written
        self._ranges: list[Any] = []  # the argument of _core.File.write()
        self._names: list[str] = []  # of their tensors
        self._used = 0  # bytes of the chunk
        self._size = 0  # of the ranges
        self._written: list[Written] = []

    @functools.cached_property
    def _chunk(self) -> Tensor:
        """Memory for tensors that are cast or on a GPU."""
        return torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._pinned)

    def write(self, file: _core.File, runs: Iterable[WrittenRun]) -> list[Written]:
        """Write runs to a file. Return what was written; adjacent bytes of a block are one."""
        self._file, self._written = file, []
        for offset, _, what in runs:
            if isinstance(what, Piece):
                self._add_piece(offset, what)
            else:
                self._add(offset, what, "", "")
        self._flush()
        return joined(self._written)

    def strange_on_any(self, comm: _core.Comm) -> set[str]:
        """Return the first of the names of each rank that has some. Collective."""
        return {name for firsts in gather(comm, self.strange[:1]) for name in firsts}

    def _add_piece(self, offset: int, piece: Piece) -> None:
        values, begin, end, dtype = piece[2:6]
        size = dtype.itemsize
        watched = piece.name in self._watched
        code = CODES[dtype] if watched else ""
        limit = CHUNK // max(size, values.element_size())
        if watched and code in _OTHERS and _is_strange(values, begin, end, limit, dtype):
            self.strange.append(piece.name)
        if is_plain(piece):
            self._add(offset, bytes_of(values.view(-1)[begin:end]), code, piece.name)
            return
        for run in runs(values, begin, end, limit):
            self._add(offset, bytes_of(self._copy(run, dtype)), code, piece.name)
            offset += run.numel() * size

    def _add(self, offset: int, data: bytes | memoryview, code: str, name: str) -> None:
        self._ranges.append((offset, data, code) if code in _NUMBERS else (offset, data))
        self._names.append(name)
        self._size += len(data)
        if self._size >= _MOST:
            self._flush()

    def _copy(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy values to the chunk. Return the copy, which is valid until the next _flush()."""
        begin, length = -(-self._used // 16) * 16, values.numel() * dtype.itemsize
        if begin + length > CHUNK:
            self._flush()
            begin = 0
        self._used = begin + length
        copy = self._chunk[begin : self._used].view(dtype)
        return copy.copy_(values, non_blocking=True)

    def _flush(self) -> None:
        if self._used and self._pinned:
            torch.cuda.synchronize()
        places: list[int] = []
        self._written += rows_of(self._file.write(self._ranges, BLOCK, places))
        self.strange += [self._names[place] for place in places]
        self._ranges.clear()
        self._names.clear()
        advance(self._size)
        self._used = self._size = 0


def write_text(path: str, text: bytes) -> FileRecord:
    """Write a small file and sync it."""
    with _core.File.create(path, len(text)) as file:
        written = rows_of(file.write([(0, text)], BLOCK))
        file.sync()
    return FileRecord.of(path, len(text), written)


def joined(written: Iterable[Written]) -> list[Written]:
    """Merge the checksums of adjacent bytes of one block."""
    rows: list[Written] = []
    for offset, length, crc in sorted(written):
        if rows and offset % BLOCK != 0 and sum(rows[-1][:2]) == offset:
            first, before, other = rows.pop()
            rows.append((first, before + length, _core.crc32c_join(other, crc, length)))
        else:
            rows.append((offset, length, crc))
    return rows


def is_plain(piece: Piece) -> bool:
    """Return whether the values are in CPU memory as the file needs them."""
    values = piece.values
    as_it_is = values.device.type == "cpu" and values.dtype == piece.dtype
    return as_it_is and values.is_contiguous() and not (values.is_conj() or values.is_neg())


def _is_strange(values: Tensor, begin: int, end: int, limit: int, dtype: torch.dtype) -> bool:
    """Return whether some of these values are NaN or infinite in a dtype."""
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_complex else torch.float32
    finite = (run.to(dtype).to(wide).isfinite().all() for run in runs(values, begin, end, limit))
    return not all(map(bool, finite))


def runs(values: Tensor, begin: int, end: int, limit: int) -> Iterator[Tensor]:
    """Yield the row-major elements from `begin` to `end` as 1-dimensional tensors of at most
    `limit` elements."""
    flat = values.reshape(-1)  # a copy if it is not contiguous, as few tensors are
    for first in range(begin, end, limit):
        yield flat[first : min(first + limit, end)]


# --- a copy, and a thread that writes it ----------------------------------------------------------


def snapshot(model: ModelContext, pieces: Sequence[Piece]) -> list[Piece]:
    """Copy the values of the pieces, cast to their dtypes, and return the pieces of the copy. The
    memory is kept as long as the model lives: new memory costs more than the copy."""
    sizes = [-(-piece.size // _ALIGN) * _ALIGN for piece in pieces]
    if model.buffer is None or model.buffer.numel() < sum(sizes):
        model.buffer = None  # free the old copy first: never hold both
        pinned = any(piece.values.is_cuda for piece in pieces)
        model.buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    buffer = model.buffer
    copies, at = [], 0
    for piece, size in zip(pieces, sizes, strict=True):
        copy = buffer[at : at + piece.size].view(piece.dtype)
        done = 0
        limit = CHUNK // max(piece.dtype.itemsize, piece.values.element_size())
        for run in runs(piece.values, piece.begin, piece.end, limit):
            copy[done : done + run.numel()].copy_(run, non_blocking=True)
            done += run.numel()
        copies.append(piece._replace(values=copy, begin=0, end=copy.numel()))
        at += size
    if buffer.is_pinned():
        torch.cuda.synchronize()
    return copies


class SaveHandle:
    """A checkpoint that zshard.save() is writing or has written."""

    _last: ClassVar[SaveHandle | None] = None  # the one that runs

    def __init__(self, path: str, action: Callable[[], None] | None = None) -> None:
        """action: what a thread does; None: it is done already."""
        self.path = path
        """The absolute path of its folder."""
        self._error: BaseException | None = None
        self._is_raised = False  # whether a call has raised the error
        self._thread: threading.Thread | None = None
        if action is not None:
            name = f"zshard save {path}"
            self._thread = threading.Thread(target=self._run, args=(action,), name=name)

    def wait(self) -> None:
        """Wait until the save has finished. Raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_raised = True
            raise self._error

    def done(self) -> bool:
        """Return whether the save has finished or failed."""
        return self._thread is None or not self._thread.is_alive()

    def __repr__(self) -> str:
        return f"SaveHandle({self.path!r})"

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._error = error


def start(handle: SaveHandle) -> SaveHandle:
    """Start the thread. Call finish() first."""
    last = SaveHandle._last
    assert last is None or last.done(), "only one save may run at a time"
    assert handle._thread is not None, "it has an action"
    handle._thread.start()
    SaveHandle._last = handle  # a thread that could not be started would never end
    return handle


def finish() -> None:
    """Wait for the running save. Raise its error, unless a call has raised it already."""
    handle = SaveHandle._last
    if handle is not None and handle._thread is not None:
        handle._thread.join()  # if a signal ends this, the save still runs: it stays the last one
        SaveHandle._last = None
        if not handle._is_raised:
            handle.wait()


@atexit.register
def _at_exit() -> None:
    """Report a failed save that no call has raised."""
    last = SaveHandle._last
    if last is not None and last._error is not None and not last._is_raised:
        lines = "".join(traceback.format_exception(last._error))
        fail(f"zshard: failed to save the checkpoint '{last.path}':\n{lines}")
