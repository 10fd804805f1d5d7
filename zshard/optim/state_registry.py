"""Which optimizer state the ranks of a model may yet ask each other for, and how long it is kept.

One rank alone may want the whole state of an optimizer (rank 0 saves), so what a
rank has of it outlives the rank's optimizer, its model and its script: until each other rank of the
model has dropped its own optimizer, or has ended. Ranks tell each other what they drop, on a thread
of their own, so that no `del optimizer` waits. A script that ends waits for the others, which may
ask.

Optimizers have numbers: the first of its class, with the same parameters, that steps a model on one
rank is the first on all.
"""

from __future__ import annotations

import os
import queue
import secrets
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard.ranks import ends, responder
from zshard.units.units import State, units_of

__all__ = [
    "ModelRecord",
    "OptimizerRecord",
    "Peers",
    "finish",
    "meet",
    "record_of_model",
    "tell_of",
]

_HANDSHAKE = 64  # bytes: what ranks exchange to meet
_TOKEN = 8  # of them, what tells models apart
_LOOK = 0.5  # seconds between two looks whether ranks that are waited for still live
_SOON = 5.0  # seconds that a living rank takes at most to note what it is told
_STUCK = 5.0  # seconds in collectives after which a rank that is waited for waits for this one
_TELL_AFTER = 10.0  # seconds of waiting at the end, after which the user is told

_lock = threading.RLock()
_changed = threading.Condition(_lock)
_books: dict[str, ModelRecord] = {}  # by token


@dataclass(eq=False)
class OptimizerRecord:
    """What this rank has of one optimizer and one model. It does not keep the optimizer alive, but
    what that refers to."""

    key: str
    state: MutableMapping[Any, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    is_dropped: bool = False
    released: set[int] = field(default_factory=set)
    """Ranks that have dropped theirs."""
    reference: weakref.ref[Optimizer] | None = None

    @property
    def params(self) -> Iterator[Tensor]:
        return (param for group in self.groups for param in group["params"])

    @property
    def has_state(self) -> bool:
        entries = (value for state in self.state.values() for value in _values_of(state))
        return any(isinstance(value, Tensor) for value in entries)


def _values_of(entries: Any) -> Sequence[Any]:
    return list(entries.values()) if isinstance(entries, dict) else [entries]


class ModelRecord:
    """One model on this rank, seen by the ranks that hold its shards."""

    def __init__(self, token: str, addresses: list[str], rank: int, params: list[Tensor]) -> None:
        self.token = token
        self.addresses = addresses
        self.rank = rank
        self.is_alive = True  # the model is
        self.records: dict[str, OptimizerRecord] = {}
        self.numbered: weakref.WeakKeyDictionary[Optimizer, OptimizerRecord] = (
            weakref.WeakKeyDictionary()
        )
        self.silent: set[int] = set()  # ranks that will not ask any more
        self.ended: set[int] = set()  # and those that need not be told any more, either
        self._counts: dict[str, int] = {}
        self._early: dict[str, set[int]] = {}  # who has dropped what has no record here yet
        self._params = [weakref.ref(param) for param in params]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.addresses)) if rank != self.rank]

    @property
    def ids(self) -> set[int]:
        """id() of the model's parameters that are alive."""
        return {id(param) for ref in self._params if (param := ref()) is not None}

    def note(self, optimizer: Optimizer) -> OptimizerRecord:
        """An optimizer steps parameters of the model, has loaded state, or is to be saved. Returns
        what others may ask for."""
        record = self.numbered.get(optimizer)
        if record is None:
            record = self._number(optimizer)
        if optimizer.state:  # else nothing need be kept
            record.state, record.groups = optimizer.state, optimizer.param_groups
        return record

    def kind_of(self, optimizer: Optimizer) -> str:
        """What tells optimizers apart on all ranks alike: their class, and which of the model's
        parameters they have."""
        places = {
            id(param): i for i, ref in enumerate(self._params) if (param := ref()) is not None
        }
        params = (param for group in optimizer.param_groups for param in group["params"])
        numbers = [places[id(param)] for param in params if id(param) in places]
        return f"{type(optimizer).__name__}:{zlib.crc32(repr(numbers).encode()):x}"

    def _number(self, optimizer: Optimizer) -> OptimizerRecord:
        with _lock:
            kind = self.kind_of(optimizer)
            number = self._counts.get(kind, 0)
            self._counts[kind], key = number + 1, f"{kind} {number}"
            record = OptimizerRecord(key)
            record.released = self._early.pop(key, set())
            record.reference = weakref.ref(optimizer, lambda _: _jobs.put((self, record)))
            self.records[key] = self.numbered[optimizer] = record
        return record

    def find(self, key: str) -> tuple[list[Tensor], MutableMapping[Any, Any]] | None:
        """The parameters of the model that an optimizer has, and its state; None: it has neither
        stepped nor loaded nor been saved."""
        with _lock:
            record = self.records.get(key)
            optimizer = None if record is None or record.reference is None else record.reference()
            if optimizer is not None:
                record = OptimizerRecord(key, optimizer.state, optimizer.param_groups)
            if record is None or not record.groups:  # it is gone, and had no state
                return None
            ids = self.ids
            params = [param for param in record.params if id(param) in ids]
            return params, record.state

    def release(self, key: str, rank: int) -> None:
        """Another rank has dropped its part of an optimizer. With the lock."""
        record = self.records.get(key)
        (self._early.setdefault(key, set()) if record is None else record.released).add(rank)

    @property
    def needs_others(self) -> bool:
        """May this rank ask yet?"""
        return self.is_alive or not all(each.is_dropped for each in self.records.values())

    def waits_for(self, record: OptimizerRecord) -> set[int]:
        """The ranks that may yet ask for what has been dropped here."""
        return set(self.others) - self.silent - self.ended - record.released

    def clear(self) -> None:
        """Free what nobody may ask for any more. With the lock."""
        for key, record in list(self.records.items()):
            if record.is_dropped and not self.waits_for(record):
                del self.records[key]
        if not self.is_alive and not self.records:
            _books.pop(self.token, None)
        _changed.notify_all()


class Peers:
    """A living model's book: it is closed when the model dies."""

    def __init__(self, book: ModelRecord) -> None:
        self.book = book
        weakref.finalize(self, _jobs.put, (book, None)).atexit = False


def meet(module: nn.Module, shards: _core.Comm) -> None:
    """Let the ranks that hold a new model's shards ask each other. Collective over shm; elsewhere a
    no-op."""
    if shards.transport != "shm":
        return
    ends.add_exit_callback(finish)
    address = responder.address()
    padded = address.encode().ljust(_HANDSHAKE - _TOKEN)
    cards = shards.exchange(secrets.token_bytes(_TOKEN) + padded)
    addresses = [card[_TOKEN:].decode().strip() for card in cards]
    if not all(addresses):
        return
    states: list[State] = [state for _, state in units_of(module)]
    params: list[Tensor] = [param for state in states for param in state.unit.params]
    book = ModelRecord(cards[0][:_TOKEN].hex(), addresses, shards.rank, params)
    with _lock:
        _books[book.token] = book
    _Teller.start()
    peers = Peers(book)
    for state in states:
        state.meet(peers)


def record_of_model(token: str) -> ModelRecord | None:
    """The book that another rank asks about."""
    with _lock:
        return _books.get(token)


# --- what is dropped ------------------------------------------------------------------------------


def tell_of(told: dict[str, Any]) -> None:
    """Note what another rank has told: that it has dropped an optimizer, or will not ask."""
    with _lock:
        book = _books.get(told["token"])
        if book is None:
            return
        if told["key"] is None:
            book.silent.add(told["rank"])
        else:
            book.release(told["key"], told["rank"])
        book.clear()


@dataclass(frozen=True)
class _News:
    """What to tell a rank: that an optimizer has been dropped here; None: that nothing will be
    asked."""

    book: ModelRecord
    rank: int
    key: str | None


_Dropped = tuple[ModelRecord, OptimizerRecord | None]
_jobs: queue.SimpleQueue[_Dropped | _News | None] = queue.SimpleQueue()
"""Models and optimizers that have died, as finalizers put them here: in the midst of anything."""


def _drop(book: ModelRecord, record: OptimizerRecord | None) -> list[_News]:
    """A model (None) or an optimizer of this rank is gone. Returns what to tell the others."""
    with _lock:
        if record is None:
            book.is_alive = False
        else:
            record.is_dropped = True
        book.clear()
        if book.needs_others and record is None:
            return []
        key = record.key if record is not None and book.needs_others else None
        return [_News(book, rank, key) for rank in sorted(set(book.others) - book.ended)]


def _tell(news: _News) -> None:
    book, rank = news.book, news.rank
    said = {"tell": {"token": book.token, "key": news.key, "rank": book.rank}}
    try:
        with responder.ask(book.addresses[rank], said, _SOON):
            pass
    except responder.ENDED:
        _note_end(book, rank)
    except Exception:  # it keeps Python's lock for long, or is about to end: once more
        time.sleep(_LOOK)
        _jobs.put(news)


def _note_end(book: ModelRecord, rank: int) -> None:
    with _lock:
        book.ended.add(rank)
        book.clear()


def _look_at_lives() -> None:
    """Ranks that are waited for may have ended without a word."""
    with _lock:
        waiting = [
            (book, rank)
            for book in _books.values()
            for record in book.records.values()
            if record.is_dropped
            for rank in book.waits_for(record)
        ]
    for book, rank in {(id(book), rank): (book, rank) for book, rank in waiting}.values():
        if not responder.lives(book.addresses[rank]):
            _note_end(book, rank)


class _Teller:
    """The thread that tells the others."""

    _pid = 0
    _thread: threading.Thread

    @classmethod
    def start(cls) -> None:
        if cls._pid == os.getpid():
            return
        cls._pid = os.getpid()
        cls._thread = threading.Thread(target=cls._run, name="zshard-drops", daemon=True)
        cls._thread.start()

    @classmethod
    def stop(cls) -> None:
        """Wait for it: a thread that frees tensors while Python ends aborts the process, as torch
        gives up Python's lock for that, and does not get it back."""
        if cls._pid == os.getpid():
            _jobs.put(None)
            cls._thread.join(_SOON)

    @staticmethod
    def _run() -> None:
        while True:
            with _lock:
                kept = any(r.is_dropped for b in _books.values() for r in b.records.values())
            try:
                job = _jobs.get(timeout=_LOOK) if kept else _jobs.get()
            except queue.Empty:
                _look_at_lives()
                continue
            if job is None:
                return
            if isinstance(job, _News):
                _tell(job)
                continue
            news = _drop(*job)
            del job  # else it keeps what it names
            for each in news:
                _tell(each)


# --- the end of the script ------------------------------------------------------------------------


def finish(timeout: float) -> None:
    """Keep this rank's state until the others are done with it, for `timeout` seconds at most."""
    with _lock:
        books = list(_books.values())
        for book in books:
            book.is_alive = False
            for record in list(book.records.values()):
                record.is_dropped = True
                if not record.has_state:
                    del book.records[record.key]
            book.clear()
    for book in books:
        for rank in sorted(set(book.others) - book.ended):
            _tell(_News(book, rank, None))
    _wait_until_free(timeout)
    _Teller.stop()
    responder.stop()


def _wait_until_free(timeout: float) -> None:
    begin, is_told, idle = time.monotonic(), False, 0.0
    while True:
        with _lock:
            if not _books:
                return
            _changed.wait(_LOOK)
            missing = {
                rank: b.addresses[rank]
                for b in _books.values()
                for r in b.records.values()
                for rank in sorted(b.waits_for(r))
            }
        waited = time.monotonic() - begin
        if not missing or waited > timeout:
            return
        _look_at_lives()
        places = {rank: _collective_of(address) for rank, address in missing.items()}
        idle = idle if all(places.values()) else waited
        if waited - idle > _STUCK:
            rank, place = min(places.items())
            _print(
                f"this rank's script has ended, and rank {rank} is waiting {place}, which takes "
                "all ranks: exiting. Make the same calls on all ranks"
            )
            return
        if waited > _TELL_AFTER and not is_told:
            is_told = True
            _print(
                f"this rank's script has ended. For up to {timeout:.0f} s it keeps its part of the "
                f"optimizer state, which rank {min(missing)} may yet ask for by "
                "optimizer.state_dict()."
            )


def _collective_of(address: str) -> str:
    """Where in a collective of torch's a rank is; "" if it is in none, or busy."""
    try:
        with responder.ask(address, {"where": None}, _SOON) as reply:
            return str(reply.facts["collective"])
    except Exception:  # it has ended, or is about to
        return ""


def _print(words: str) -> None:
    print(f"zshard: {words}", file=sys.stderr, flush=True)


def _in_child() -> None:
    """A forked child is no rank: it has none of the threads, and the lock may be held for ever."""
    global _lock, _changed
    _lock = threading.RLock()
    _changed = threading.Condition(_lock)
    _books.clear()


os.register_at_fork(after_in_child=_in_child)
