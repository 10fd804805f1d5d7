"""Full optimizer state on one rank alone: it asks the others for their shards, over shm.

The rank that wants full state opens a reader session, so that no rank steps, and asks each peer's
thread (ranks/responder.py) for its share of the same optimizer. Optimizers are numbered: the first
of its class, with the same parameters, that steps a model on one rank is the first on all ranks.

A rank may ask late, so a rank's share outlives its optimizer, model and script, until every other
rank has dropped its own optimizer or exited. Ranks send each other what they drop from a separate
thread, so that `del optimizer` never waits. A script that ends waits for the others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard.guard.slices import plain
from zshard.optim.sharded_state import HeldState, fact_of, held_in, params_of
from zshard.ranks import ends, responder
from zshard.ranks.agreement import Fact, first_difference
from zshard.ranks.groups import collectives_begun
from zshard.units.units import State, session, units_of

__all__ = ["FullState", "ModelRecord", "ask_for_full", "finish", "meet"]

_HANDSHAKE = 64  # bytes that ranks exchange to connect
_TOKEN = 8  # of them, the token that identifies the model
_LATE = 5.0  # seconds that a rank may lag behind one that already has the optimizer's state
_AGAIN = 0.05  # seconds between two requests for it
_LOOK = 0.5  # seconds between two checks of ranks that this one waits for
_SOON = 5.0  # seconds that a living rank takes at most to process a message
_STUCK = 5.0  # seconds in collectives after which an awaited rank counts as waiting for this one
_TELL_AFTER = 10.0  # seconds of waiting at the end, after which a message informs the user

FullState = list[tuple[Tensor, dict[Any, Tensor]]]
"""Parameters, each with the full tensors of its sharded state."""

_lock = threading.RLock()
_changed = threading.Condition(_lock)
_records: weakref.WeakValueDictionary[str, ModelRecord] = weakref.WeakValueDictionary()
"""By token. A model keeps its own."""
_kept: set[ModelRecord] = set()
"""Those with optimizers that others may ask for, also where the model is gone."""


@dataclass(eq=False)
class OptimizerRecord:
    """This rank's share of one optimizer and one model. It keeps alive what the optimizer refers
    to, but not the optimizer."""

    state: MutableMapping[Any, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    released: set[int] = field(default_factory=set)
    """Ranks that have dropped theirs."""
    reference: weakref.ref[Optimizer] | None = None

    @property
    def has_state(self) -> bool:
        states = (s.values() if isinstance(s, dict) else [s] for s in list(self.state.values()))
        return any(isinstance(value, Tensor) for values in states for value in list(values))


class ModelRecord:
    """One model on this rank with its optimizers, for requests of the ranks that hold its
    shards."""

    def __init__(self, token: str, addresses: list[str], rank: int, params: list[Tensor]) -> None:
        self.token = token
        self.addresses = addresses
        self.rank = rank
        self.done: set[int] = set()  # ranks that will not ask again
        self._optimizers: dict[str, OptimizerRecord] = {}
        self._keys: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()
        self._params = [weakref.ref(param) for param in params]

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.addresses)) if rank != self.rank]

    def note(self, optimizer: Optimizer) -> str:
        """Note an optimizer that steps parameters of the model, has loaded state, or will be saved.
        Returns its name, the same on all ranks."""
        key = self._keys.get(optimizer)
        if key is None:
            key = self._number(optimizer)
        record = self._optimizers.get(key)
        if record is not None and optimizer.state:  # otherwise there is nothing to keep
            record.state, record.groups = optimizer.state, optimizer.param_groups
        return key

    def _number(self, optimizer: Optimizer) -> str:
        """Return its class, which of the model's parameters it has, and a number."""
        places = {id(ref()): i for i, ref in enumerate(self._params)}
        numbers = [places[id(p)] for p in params_of(optimizer) if id(p) in places]
        kind = f"{type(optimizer).__name__}:{zlib.crc32(repr(numbers).encode()):x}"
        with _lock:
            key = f"{kind} {self._counts[kind]}"
            self._counts[kind] += 1
            record = self._optimizers.setdefault(key, OptimizerRecord())
            jobs = _jobs  # at the exit of the interpreter this module's names may be None
            record.reference = weakref.ref(optimizer, lambda _: jobs.put((self, key)))
            self._keys[optimizer] = key
            _kept.add(self)
        return key

    def find(self, key: str) -> tuple[list[Tensor], MutableMapping[Any, Any]] | None:
        """Return an optimizer's parameters of the model and its state; None if it has none, or has
        not stepped, loaded or been saved on this rank."""
        with _lock:
            record = self._optimizers.get(key)
            if record is None or record.reference is None:
                return None
            optimizer = record.reference()
            groups = record.groups if optimizer is None else optimizer.param_groups
            state = record.state if optimizer is None else optimizer.state
            if not groups:  # it was freed without state
                return None
            ids = {id(ref()) for ref in self._params}
            params = [p for group in groups for p in group["params"] if id(p) in ids]
            return params, state

    def release(self, key: str | None, rank: int) -> None:
        """Note that a rank has dropped an optimizer; None: it will not ask for anything again."""
        with _lock:
            if key is None:
                self.done.add(rank)
            else:  # this rank may have no record of it yet
                self._optimizers.setdefault(key, OptimizerRecord()).released.add(rank)
            for each in [k for k, r in self._optimizers.items() if not self._awaited(r)]:
                del self._optimizers[each]
            if not self._optimizers:
                _kept.discard(self)
            _changed.notify_all()

    def _awaited(self, record: OptimizerRecord) -> set[int]:
        return set(range(len(self.addresses))) - self.done - record.released

    def awaited(self) -> set[int]:
        """Return the ranks that may still ask for state of this rank."""
        with _lock:
            found = (self._awaited(each) for each in self._optimizers.values() if each.has_state)
            return set().union(*found) - {self.rank}


def meet(module: nn.Module, shards: _core.Comm) -> None:
    """Let the ranks that hold a new model's shards ask each other. Collective over shm; elsewhere a
    no-op."""
    if shards.transport != "shm":
        return
    ends.add_exit_callback(finish)
    responder.answer_with(_answer)
    padded = responder.address().encode().ljust(_HANDSHAKE - _TOKEN)
    cards = shards.exchange(secrets.token_bytes(_TOKEN) + padded)
    addresses = [card[_TOKEN:].decode().strip() for card in cards]
    if not all(addresses):
        return
    states: list[State] = [state for _, state in units_of(module)]
    params: list[Tensor] = [param for state in states for param in state.unit.params]
    record = ModelRecord(cards[0][:_TOKEN].hex(), addresses, shards.rank, params)
    with _lock:
        _records[record.token] = record
    _start_sender()
    for state in states:
        state.meet(record)


# --- requests -------------------------------------------------------------------------------------


def ask_for_full(optimizer: Optimizer, model: ModelRecord, held: Sequence[HeldState]) -> FullState:
    """Return the parameters of one model with the full tensors of their sharded state.

    Raises DivergenceError if another rank's state differs in parameters, names, shapes or dtypes;
    RuntimeError for shards within a list or dict, and if a rank cannot answer; PeerError if a rank
    has exited, PeerTimeoutError if it does not answer in time.
    """
    question = {"ask": [model.token, model.note(optimizer)]}
    timeout = held[0].part.comm.timeout
    late = min(_LATE, timeout) if any(each.entries for each in held) else 0.0
    full = _FullTensors(held)
    with session(unit for each in held if (unit := each.part.unit)):
        for rank, address in enumerate(model.addresses):
            if rank == model.rank:
                full.take_own()
                continue
            with _answer_of(rank, address, question, late, timeout) as reply:
                full.check(reply.facts, model.rank, rank)
                for index, key, begin, numel in reply.facts["shards"]:
                    reply.read_into(full.place(index, key, begin, numel))
    return full.result()


@contextlib.contextmanager
def _answer_of(
    rank: int, address: str, question: object, late: float, timeout: float
) -> Iterator[responder.Reply]:
    """Yield a rank's answer, once it has the optimizer; it may be `late` by so many seconds."""
    end = time.monotonic() + late
    try:
        while True:
            with responder.ask(address, question, timeout) as reply:
                if "unanswered" in reply.facts:
                    why = reply.facts["unanswered"]
                    raise RuntimeError(f"rank {rank} cannot send its part: {why}")
                if reply.facts["facts"] is not None or time.monotonic() > end:
                    yield reply
                    return
            time.sleep(_AGAIN)
    except TimeoutError:
        raise _core.PeerTimeoutError(
            f"rank {rank} did not send its optimizer state within {timeout:.0f} s: is it in a long "
            "call that keeps Python's lock? Raise timeout if it is only slow"
        ) from None
    except OSError as error:
        raise _core.PeerError(
            f"rank {rank} has ended, and its part of the optimizer state with it ({error}). If "
            f"it failed, its output says why; else call optimizer.state_dict() before the other "
            "ranks' scripts end"
        ) from None


class _FullTensors:
    """Full tensors while they are being assembled."""

    def __init__(self, held: Sequence[HeldState]) -> None:
        self._held = held
        self._cut = [{str(key): (key, v, own) for key, v, own in h.entries if own} for h in held]
        self._made: dict[tuple[int, str], Tensor] = {}
        self._filled: Counter[tuple[int, str]] = Counter()

    def check(self, told: dict[str, Any], own_rank: int, rank: int) -> None:
        """Raise if another rank's state does not match this rank's."""
        ours = list(map(fact_of, self._held))
        theirs = told["facts"]
        if theirs is None:  # that rank's optimizer has neither stepped nor loaded
            theirs = [(about, "none") for about, _ in ours]
        facts = {own_rank: ours, rank: [(about, said) for about, said in theirs]}
        low, high = sorted(facts)
        difference = first_difference(facts[low], facts[high], (low, high))
        if difference is not None:
            raise _core.DivergenceError(
                f"the optimizers differ between ranks: {difference}; use the same on all ranks"
            )
        for each, is_nested in zip(self._held, told["nested"], strict=False):
            if is_nested:
                each.refuse_nested()

    def place(self, index: int, key: str, begin: int, numel: int) -> Tensor:
        """Return the memory for elements of the full tensor."""
        if (index, key) not in self._made:
            _, value, part = self._cut[index][key]
            self._made[index, key] = torch.empty(part.whole_numel, dtype=value.dtype)
        self._filled[index, key] += numel
        return self._made[index, key][begin : begin + numel]

    @plain()
    def take_own(self) -> None:
        for index, cut in enumerate(self._cut):
            for name, (_, value, part) in cut.items():
                place = self.place(index, name, part.begin, part.numel)
                place.copy_(value.detach().reshape(-1))

    def result(self) -> FullState:
        full: FullState = []
        for index, (each, cut) in enumerate(zip(self._held, self._cut, strict=True)):
            for name, (_, _, part) in cut.items():
                if self._filled[index, name] != part.whole_numel:
                    raise RuntimeError(
                        f"the ranks' shards of '{each.part.name}' do not add up to the full "
                        "parameter; please report this"
                    )
            own = {
                key: self._made[index, name].view(part.shape)
                for name, (key, _, part) in cut.items()
            }
            full.append((each.param, own))
        return full


# --- answers --------------------------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> responder.Answer:
    if "where" in question:
        return {"collectives": collectives_begun()}, []
    token, key = question["ask" if "ask" in question else "tell"]
    with _lock:
        model = _records.get(token)
    if "tell" in question:
        if model is not None:
            model.release(key, question["rank"])
        return {}, []
    if model is None:
        return {"unanswered": "it has deleted the model"}, []
    found = model.find(key)
    return _shards(held_in(*found)) if found else ({"facts": None, "nested": [], "shards": []}, [])


@plain()
def _shards(held: Sequence[HeldState]) -> responder.Answer:
    shards: list[tuple[int, str, int, int]] = []
    tensors: list[Tensor] = []
    for index, each in enumerate(held):
        for key, value, own in each.entries:
            if own is not None:
                shards.append((index, str(key), own.begin, own.numel))
                tensors.append(value.detach().cpu().contiguous())
    facts: list[Fact] = [fact_of(each) for each in held]
    nested = [each.nested is not None for each in held]
    return {"facts": facts, "nested": nested, "shards": shards}, tensors


# --- drops ----------------------------------------------------------------------------------------

_jobs: queue.SimpleQueue[tuple[ModelRecord, str] | None] = queue.SimpleQueue()
"""Optimizers that have died, as their finalizers put them here: in the midst of anything."""
_sender: threading.Thread | None = None


def _start_sender() -> None:
    global _sender
    if _sender is None:
        _sender = threading.Thread(target=_send_drops, name="zshard-drops", daemon=True)
        _sender.start()


def _send_drops() -> None:
    while (job := _jobs.get()) is not None:
        model, key = job
        model.release(key, model.rank)
        _send_drop(model, key)
        del model, job  # otherwise the thread keeps the model's record alive


def _send_drop(model: ModelRecord, key: str | None) -> None:
    """Send the others what this rank has dropped; None: that it will not ask again."""
    for rank in model.others:
        question = {"tell": [model.token, key], "rank": model.rank}
        for _ in range(2):  # the peer may hold Python's lock for long, or be about to exit
            try:
                with responder.ask(model.addresses[rank], question, _SOON):
                    break
            except responder.ENDED:
                model.release(None, rank)
                break
            except Exception:
                time.sleep(_LOOK)


# --- exit -----------------------------------------------------------------------------------------


def finish(timeout: float) -> None:
    """Keep this rank's state until the others are done with it, for `timeout` seconds at most."""
    global _sender
    with _lock:
        models = list(_records.values())
    for model in models:
        model.release(None, model.rank)
        _send_drop(model, None)
    _wait_for_others(timeout)
    if _sender is not None:
        # A thread that frees tensors while Python shuts down aborts the process: torch releases
        # Python's lock for that and cannot take it again.
        _jobs.put(None)
        _sender.join(_SOON)
        _sender = None
    responder.stop()


def _wait_for_others(timeout: float) -> None:
    begin = last_free = time.monotonic()
    is_told = False
    while awaited := _awaited():
        now = time.monotonic()
        last_free = last_free if all(awaited.values()) else now
        if now - begin > timeout:
            return
        if now - last_free > _STUCK:
            _print(
                f"this rank's script has ended, and rank {min(awaited)} is waiting for it in a "
                "collective of torch.distributed: exiting. Make the same calls on all ranks"
            )
            return
        if now - begin > _TELL_AFTER and not is_told:
            is_told = True
            _print(
                f"this rank's script has ended. For up to {timeout:.0f} s it keeps its part of the "
                f"optimizer state, which rank {min(awaited)} may yet ask for by "
                "optimizer.state_dict()."
            )
        with _lock:
            _changed.wait(_LOOK)


def _awaited() -> dict[int, bool]:
    """Return the ranks that may still ask, and whether each waits for this one in a process group:
    it has started more of its collectives."""
    with _lock:
        awaited = [(model, rank) for model in _kept for rank in model.awaited()]
    own, found = collectives_begun(), {}
    for model, rank in awaited:
        found[rank] = False
        try:
            with responder.ask(model.addresses[rank], {"where": None}, _SOON) as reply:
                theirs: dict[str, int] = reply.facts["collectives"]
            found[rank] = any(theirs.get(name, 0) > count for name, count in own.items())
        except responder.ENDED:
            del found[rank]
            model.release(None, rank)
        except Exception:  # it is busy, or about to exit
            continue
    return found


def _print(words: str) -> None:
    print(f"zshard: {words}", file=sys.stderr, flush=True)


def _in_child() -> None:
    """A forked child is not a rank: it has none of the threads, and the lock may never be
    released."""
    global _lock, _changed, _sender
    _lock = threading.RLock()
    _changed = threading.Condition(_lock)
    _sender = None
    _records.clear()
    _kept.clear()


os.register_at_fork(after_in_child=_in_child)
