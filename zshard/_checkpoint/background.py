"""Saving while training goes on: a copy of what is to be saved, and a thread that writes it.

The one idea: what a step may change is copied before save() returns, which takes as long as a copy
of memory does; all else is the work of a thread, which has a transport of its own and needs nothing
of the model. One save is under way at a time. What goes wrong in it is raised by the next call that
has to do with checkpoints, and if there is none, the process ends with status 1: no failure is
lost. A process that ends waits for the thread, as it does for any that is no daemon.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zshard._checkpoint.layout import Piece
from zshard._checkpoint.write import is_plain, runs
from zshard._stream import CHUNK

__all__ = ["Task", "finish", "snapshot", "start"]

_ALIGN = 64  # bytes; parameters lie at multiples of it in their flat, with gaps smaller than that


class Task:
    """What a thread does; `name` is for messages."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self._action = action
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"zshard save {name}")

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Returns when it is done; raises what it has failed with, each time it is asked."""
        self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def done(self) -> bool:
        """Has it ended, well or not?"""
        return not self._thread.is_alive()

    @property
    def lost(self) -> BaseException | None:
        """An error that nobody has been told of."""
        return None if self._told else self._error

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error
        finally:
            del self._action  # and what it holds


_last: Task | None = None


def start(name: str, action: Callable[[], None]) -> Task:
    """Has a thread do `action`. The one before has to be finished()."""
    global _last
    assert _last is None or _last.done(), "one save at a time"
    _last = Task(name, action)
    _last.start()
    return _last


def finish() -> None:
    """Waits for what is under way. Raises its error, if nobody has been told of it."""
    global _last
    task, _last = _last, None
    if task is None:
        return
    task._thread.join()
    if task.lost is not None:
        task.wait()


def _at_exit() -> None:
    """The exit status is all that is left to tell of a save that failed."""
    if _last is None or _last.lost is None:
        return
    print(f"zshard: the checkpoint '{_last.name}' was not saved:", file=sys.stderr)
    traceback.print_exception(_last.lost)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


atexit.register(_at_exit)  # early, so it runs late: what others do at the end is done by then


# --- the copy -------------------------------------------------------------------------------------

_buffers: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


def snapshot(model: nn.Module, pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces of a copy of their values, already cast. The memory for it is kept until the
    model is gone, as memory that is new costs more than the copy."""
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


class _Span:
    """Pieces that are copied at once: one, or several of one storage that lie side by side."""

    def __init__(self, number: int, piece: Piece) -> None:
        self._pieces = [(number, piece, 0)]  # and where each begins
        self.size = piece.size

    def take(self, number: int, piece: Piece) -> bool:
        """Adds a piece, if it lies behind the others with no more than padding in between."""
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
        """The pieces by their numbers, of the copy."""
        found = {}
        for number, piece, begin in self._pieces:
            values = room[begin : begin + piece.size].view(piece.dtype)
            found[number] = piece._replace(values=values, begin=0, end=values.numel())
        return found


def _spans(pieces: Sequence[Piece]) -> list[_Span]:
    ordered = sorted(range(len(pieces)), key=lambda i: _address(pieces[i]))
    spans: list[_Span] = []
    for number in ordered:
        if not (spans and spans[-1].take(number, pieces[number])):
            spans.append(_Span(number, pieces[number]))
    return spans


def _address(piece: Piece) -> int:
    return piece.values.data_ptr() + piece.begin * piece.values.element_size()


def _storage(piece: Piece) -> int:
    return int(piece.values.untyped_storage()._cdata)
