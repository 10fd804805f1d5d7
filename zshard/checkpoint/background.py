"""Saving while training continues: a snapshot of the values, and a thread that writes it.

save() copies whatever a step may change and returns, which takes as long as a memory
copy does. A thread does the rest; it has its own transport and does not touch the model. One save
runs at a time. The next checkpoint call raises the error of a failed save; if there is no next
call, the process exits with status 1, so no failure is lost. A process that exits waits for the
thread, as for any non-daemon thread.
"""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zshard.checkpoint.layout import Piece
from zshard.checkpoint.write import is_plain, runs
from zshard.ranks.ends import fail
from zshard.state.source import CHUNK

__all__ = ["Task", "finish", "snapshot", "start"]

_ALIGN = 64  # bytes; parameters lie at multiples of it in their flat, with gaps smaller than that


class Task:
    """An action that runs in a thread; messages refer to it by `name`."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self._action = action
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"zshard save {name}")

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Wait for the action to finish. Raise its error, on every call."""
        self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def done(self) -> bool:
        """Return whether the action has finished or failed."""
        return not self._thread.is_alive()

    @property
    def lost(self) -> BaseException | None:
        """The error, if no call has raised it yet."""
        return None if self._told else self._error

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error
        finally:
            del self._action  # and everything that it references


_last: Task | None = None


def start(name: str, action: Callable[[], None]) -> Task:
    """Run `action` in a thread. Call finish() first."""
    global _last
    assert _last is None or _last.done(), "only one save may run at a time"
    _last = Task(name, action)
    _last.start()
    return _last


def finish() -> None:
    """Wait for the running save. Raise its error, unless a call has raised it already."""
    global _last
    task, _last = _last, None
    if task is None:
        return
    task._thread.join()
    if task.lost is not None:
        task.wait()


def _at_exit() -> None:
    """Report a failed save that no call has raised."""
    if _last is not None and _last.lost is not None:
        lines = "".join(traceback.format_exception(_last.lost))
        fail(f"zshard: failed to save the checkpoint '{_last.name}':\n{lines}")


atexit.register(_at_exit)


# --- the snapshot ---------------------------------------------------------------------------------

_buffers: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


def snapshot(model: nn.Module, pieces: Sequence[Piece]) -> list[Piece]:
    """Copy the values of the pieces, cast to their dtypes, and return the pieces of the copy. The
    memory is kept as long as the model lives: new memory costs more than the copy."""
    spans = _spans(pieces)
    size = sum(-(-span.size // _ALIGN) * _ALIGN for span in spans)
    buffer = _buffer_of(model, size, any(piece.values.is_cuda for piece in pieces))
    made: dict[int, Piece] = {}
    at = 0
    for span in spans:
        room = buffer[at : at + span.size]
        span.copy(room)
        made.update(span.pieces_in(room))
        at += -(-span.size // _ALIGN) * _ALIGN
    if buffer.is_pinned():
        torch.cuda.synchronize()
    return [made[i] for i in range(len(pieces))]


def _buffer_of(model: nn.Module, size: int, pinned: bool) -> Tensor:
    buffer = _buffers.get(model)
    if buffer is None or buffer.numel() < size:
        _buffers.pop(model, None)  # not both at a time
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        _buffers[model] = buffer
    return buffer


class _CopiedRun:
    """Pieces that are copied at once: one, or several adjacent ones of one storage."""

    def __init__(self, number: int, piece: Piece) -> None:
        self._pieces = [(number, piece, 0)]  # and where each begins
        self.size = piece.size

    def take(self, number: int, piece: Piece) -> bool:
        """Add a piece if it follows the others with only padding in between."""
        _, first, _ = self._pieces[0]
        if not (is_plain(first) and is_plain(piece)) or _storage(first) != _storage(piece):
            return False
        begin = _address(piece) - _address(first)
        if not self.size <= begin < self.size + _ALIGN:
            return False
        self._pieces.append((number, piece, begin))
        self.size = begin + piece.size
        return True

    def copy(self, room: Tensor) -> None:
        _, first, _ = self._pieces[0]
        if is_plain(first):
            storage = first.values.untyped_storage()
            source = torch.empty(0, dtype=torch.uint8)
            source.set_(storage, _address(first) - storage.data_ptr(), (self.size,), (1,))
            room.copy_(source)
            return
        target = room.view(first.dtype)
        done = 0
        limit = CHUNK // max(first.dtype.itemsize, first.values.element_size())
        for run in runs(first.values, first.begin, first.end, limit):
            target[done : done + run.numel()].copy_(run, non_blocking=True)
            done += run.numel()

    def pieces_in(self, room: Tensor) -> dict[int, Piece]:
        """Return {number: piece} of the copy in `room`."""
        found = {}
        for number, piece, begin in self._pieces:
            values = room[begin : begin + piece.size].view(piece.dtype)
            found[number] = piece._replace(values=values, begin=0, end=values.numel())
        return found


def _spans(pieces: Sequence[Piece]) -> list[_CopiedRun]:
    ordered = sorted(range(len(pieces)), key=lambda i: _address(pieces[i]))
    spans: list[_CopiedRun] = []
    for number in ordered:
        if not (spans and spans[-1].take(number, pieces[number])):
            spans.append(_CopiedRun(number, pieces[number]))
    return spans


def _address(piece: Piece) -> int:
    return piece.values.data_ptr() + piece.begin * piece.values.element_size()


def _storage(piece: Piece) -> int:
    return int(piece.values.untyped_storage()._cdata)
