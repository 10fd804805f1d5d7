"""Write pieces of tensors to a file, directly or a chunk at a time; or in a thread, from a copy.

Values that are in CPU memory as the file needs them are written directly. Values that
must be cast, that are on a GPU, or that are so small that system calls would cost more than copies
go through one chunk of memory, which collects as many pieces as fit. On the way, parameters are
checked for NaN and infinite values, as they will be in the file: by the core if it writes them
directly, otherwise in the chunk.

An asynchronous save copies whatever a step may change and returns. A thread does the rest; it has
its own transport and does not touch the model. One save runs at a time. The next checkpoint call
raises the error of a failed save; if there is no next call, the process exits with status 1, so no
failure is lost. A process that exits waits for the thread, as for any non-daemon thread.
"""

from __future__ import annotations

import atexit
import math
import threading
import traceback
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard.checkpoint.manifest import BLOCK
from zshard.checkpoint.safetensors import CODES, rows_of
from zshard.checkpoint.save_plan import Piece
from zshard.ranks.agreement import bytes_of
from zshard.ranks.ends import fail
from zshard.state.source import CHUNK

_DIRECT = 2**16  # bytes; smaller pieces are collected in the chunk
_ALIGN = 64  # bytes; the copies of an asynchronous save begin at multiples of it
_AT_ONCE = 2**28  # bytes per call: Python handles signals between calls

_NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Written = tuple[int, int, int]  # offset, length, CRC-32C


class CastBuffer:
    """Memory for casting tensors and copying them from a GPU; allocated on first use."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: Tensor | None = None

    @property
    def memory(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory


class Writer:
    """Writes pieces to one file, without copying what can be written directly.

    strange: the names of `watched` tensors that had NaN or infinite values.
    """

    def __init__(self, file: _core.File, chunk: CastBuffer, watched: Container[str] = ()) -> None:
        self._file, self._chunk, self._watched = file, chunk, watched
        self.strange: list[str] = []
        self._waiting = 0  # bytes in `_ranges`
        self._ranges: list[Any] = []  # the argument of _core.File.write()
        self._names: dict[int, str] = {}  # index of a watched range: its tensor
        self._copied: list[tuple[int, int, int]] = []  # offset in the file; begin, end in the chunk
        self._watched_copies: list[tuple[str, Tensor]] = []  # of watched tensors, in the chunk
        self._written: list[Written] = []

    def add_bytes(
        self, offset: int, data: bytes | memoryview, numbers: tuple[str, str] | None = None
    ) -> None:
        """numbers: the name of the watched tensor and the code of its dtype."""
        for first in range(0, len(data), _AT_ONCE):
            part = data[first : first + _AT_ONCE]
            if numbers is not None:
                self._names[len(self._ranges)] = numbers[0]
                self._ranges.append((offset + first, part, numbers[1]))
            else:
                self._ranges.append((offset + first, part))
            self._waiting += len(part)
            if self._waiting >= _AT_ONCE:
                self._flush()

    def add(self, piece: Piece) -> None:
        values, begin, end, dtype = piece[2:6]
        size = dtype.itemsize
        watched = piece.name in self._watched and values.dtype in _NUMBERS
        if is_plain(piece) and piece.size >= _DIRECT:
            numbers = (piece.name, CODES[dtype]) if watched else None
            self.add_bytes(piece.offset, bytes_of(values.view(-1)[begin:end]), numbers)
            return
        offset = piece.offset
        for run in runs(values, begin, end, CHUNK // max(size, values.element_size())):
            copy = self._copy(offset, run, dtype)
            if watched:
                self._watched_copies.append((piece.name, copy))
            offset += run.numel() * size

    def end(self) -> list[Written]:
        """Write the rest. Return everything that was written."""
        self._flush()
        return self._written

    def _copy(self, offset: int, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy values to the chunk. Return the copy, which is valid until the next _flush()."""
        length = values.numel() * dtype.itemsize
        first, low, high = self._copied[-1] if self._copied else (-1, 0, 0)
        follows = first + high - low == offset  # in the file, so in the chunk as well
        begin = high if follows else -(-high // 16) * 16
        if begin % dtype.itemsize != 0 or begin + length > CHUNK:
            self._flush()
            follows, begin = False, 0
        copy = self._chunk.memory[begin : begin + length].view(dtype)
        copy.copy_(values, non_blocking=True)
        if follows:
            self._copied[-1] = (first, low, begin + length)
        else:
            self._copied.append((offset, begin, begin + length))
        return copy

    def _flush(self) -> None:
        if self._copied:
            if self._chunk.memory.is_pinned():
                torch.cuda.synchronize()
            self.strange += _not_finite(self._watched_copies)
            self._watched_copies.clear()
            memory = bytes_of(self._chunk.memory)
            self._ranges += [(offset, memory[low:high]) for offset, low, high in self._copied]
            self._copied.clear()
        if self._ranges:
            places: list[int] = []
            self._written += rows_of(self._file.write(self._ranges, BLOCK, places))
            self.strange += [self._names[place] for place in places]
            self._names.clear()
            self._ranges.clear()
            self._waiting = 0


def _not_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of tensors with NaN or infinite values."""
    # The core cannot sum float8.
    known = [(name, v if v.dtype in _NUMBERS else v.float()) for name, v in named]
    if _are_finite([values for _, values in known]):  # one call for all
        return []
    return [name for name, values in known if not _are_finite([values])]


def _are_finite(tensors: list[Tensor]) -> bool:
    return math.isfinite(_core.power_sum(tensors, 1.0))


def is_plain(piece: Piece) -> bool:
    """Return whether the values are in CPU memory as the file needs them."""
    values = piece.values
    as_it_is = values.device.type == "cpu" and values.dtype == piece.dtype
    return as_it_is and values.is_contiguous() and not (values.is_conj() or values.is_neg())


def runs(values: Tensor, begin: int, end: int, limit: int) -> Iterator[Tensor]:
    """Yield the row-major elements from `begin` to `end` as 1-dimensional tensors of at most
    `limit` elements."""
    flat = values.reshape(-1)  # a copy if it is not contiguous, as few tensors are
    for first in range(begin, end, limit):
        yield flat[first : min(first + limit, end)]


# --- a copy, and a thread that writes it ----------------------------------------------------------

_buffers: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


def snapshot(model: nn.Module, pieces: Sequence[Piece]) -> list[Piece]:
    """Copy the values of the pieces, cast to their dtypes, and return the pieces of the copy. The
    memory is kept as long as the model lives: new memory costs more than the copy."""
    sizes = [-(-piece.size // _ALIGN) * _ALIGN for piece in pieces]
    buffer = _buffers.get(model)
    if buffer is None or buffer.numel() < sum(sizes):
        del buffer
        _buffers.pop(model, None)  # free the old copy first: never hold both
        pinned = any(piece.values.is_cuda for piece in pieces)
        buffer = _buffers[model] = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    made, at = [], 0
    for piece, size in zip(pieces, sizes, strict=True):
        copy = buffer[at : at + piece.size].view(piece.dtype)
        done = 0
        limit = CHUNK // max(piece.dtype.itemsize, piece.values.element_size())
        for run in runs(piece.values, piece.begin, piece.end, limit):
            copy[done : done + run.numel()].copy_(run, non_blocking=True)
            done += run.numel()
        made.append(piece._replace(values=copy, begin=0, end=copy.numel()))
        at += size
    if buffer.is_pinned():
        torch.cuda.synchronize()
    return made


class SaveHandle:
    """A checkpoint that zshard.save() is writing or has written."""

    def __init__(self, path: str, action: Callable[[], None] | None = None) -> None:
        """action: what a thread does; None: it is done already."""
        self.path = path
        """The absolute path of its folder."""
        self._error: BaseException | None = None
        self._told = False  # whether a call has raised the error
        self._thread: threading.Thread | None = None
        if action is not None:
            name = f"zshard save {path}"
            self._thread = threading.Thread(target=self._run, args=(action,), name=name)

    def wait(self) -> None:
        """Wait until the save has finished. Raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
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


_last: SaveHandle | None = None


def start(handle: SaveHandle) -> SaveHandle:
    """Start the thread. Call finish() first."""
    global _last
    assert _last is None or _last.done(), "only one save may run at a time"
    assert handle._thread is not None, "it has an action"
    _last = handle
    handle._thread.start()
    return handle


def finish() -> None:
    """Wait for the running save. Raise its error, unless a call has raised it already."""
    global _last
    handle, _last = _last, None
    if handle is not None and handle._thread is not None:
        handle._thread.join()
        if not handle._told:
            handle.wait()


def _at_exit() -> None:
    """Report a failed save that no call has raised."""
    if _last is not None and _last._error is not None and not _last._told:
        lines = "".join(traceback.format_exception(_last._error))
        fail(f"zshard: failed to save the checkpoint '{_last.path}':\n{lines}")


atexit.register(_at_exit)
