"""Full optimizer state on one rank alone: over shm it reads the other ranks' shards in place.

Sharded state lies in memory that the peers can read (csrc/comm/shm/shm_state.c): zshard's
optimizers create it there, and other optimizers' state is moved there after the step that creates
it. Each rank posts what it has and where, as one text for all its models. A rank that wants full
state opens a reader session, so that no rank steps, and copies.

A script may also put tensors into an optimizer's state by hand. They are posted at the optimizer's
next step, or when the script comes to a barrier.

Optimizers are numbered: the first of its class, with the same parameters, that steps a model on one
rank is the first on all ranks. Another rank may read late, so a rank keeps the state of an
optimizer that it has dropped until it sees that all ranks have dropped theirs: it looks when it
drops one, and when it shards a model. When a rank exits, its memory stays as long as a peer
runs.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard.guard.slices import plain
from zshard.guard.whole_values import new_full, read_full
from zshard.optim.sharded_state import HeldState, held_by, move_together, params_of
from zshard.ranks.agreement import first_difference
from zshard.units.shards import context_of, ids_of, known_parts
from zshard.units.units import State, session, units_of

_TOKEN = 8  # bytes that identify a model
_LATE = 5.0  # seconds that a rank may take to post what this one has posted
_AGAIN = 0.05  # seconds between two looks

FullState = list[tuple[Tensor, dict[Any, Tensor]]]
"""Parameters, each with the full tensors of its sharded state."""


@dataclass(eq=False)
class OptimizerRecord:
    """This rank's share of one optimizer and one model.

    posted: "facts": what must agree between ranks; "nested": per parameter, whether shards lie in a
    list or dict; "rows": per tensor the index of its parameter, its name, its first element in the
    full tensor, its number of elements, and where it lies; "by_hand": whether a script or a load
    has replaced some since the last step.
    """

    posted: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[weakref.ref[Tensor], Any, Tensor]] = field(default_factory=list)
    """Parameter, name and value of each row. Values stay alive as long as they are posted."""
    entries: int = -1  # in the optimizer's state when it was posted
    stamp: int | None = None  # the optimizer's state_changes then
    ids: list[list[int]] | None = None  # of its parameters then
    # The values after the last step.
    after_step: list[weakref.ref[Tensor]] = field(default_factory=list)
    reference: weakref.ref[Optimizer] | None = None

    @property
    def is_dropped(self) -> bool:
        return self.reference is not None and self.reference() is None

    def is_current(self, optimizer: Optimizer, in_step: bool) -> bool:
        """Return whether what is posted is the optimizer's state. in_step: nothing but its steps
        has changed it since, and zshard's optimizers count the changes."""
        stamp = getattr(optimizer, "state_changes", None)
        if in_step and stamp is not None:
            return bool(stamp == self.stamp)
        state: Mapping[Any, Any] = optimizer.state
        if _entries_in(state) != self.entries or ids_of(optimizer) != self.ids:
            return False
        return all(state.get(ref(), {}).get(key) is value for ref, key, value in self.tensors)


def _entries_in(state: Mapping[Any, Any]) -> int:
    own = list(state.items())
    return sum(len(each) for key, each in own if isinstance(key, Tensor) and hasattr(each, "keys"))


class ModelRecord:
    """One model on this rank with its optimizers, for the ranks that hold its shards."""

    def __init__(self, token: str, board: Board, states: list[State]) -> None:
        self.token = token
        self.board = board
        self.optimizers: dict[str, OptimizerRecord] = {}
        self._counts: Counter[str] = Counter()
        self._states = [weakref.ref(state) for state in states]
        self._params = [weakref.ref(param) for state in states for param in state.unit.params]

    @property
    def has_units(self) -> bool:
        """Return whether a unit of the model is left, which keeps peers from stepping."""
        return any(ref() is not None for ref in self._states)

    def note(self, optimizer: Optimizer, in_step: bool = False, is_new: bool = False) -> str:
        """Post the state of an optimizer that steps parameters of the model, has loaded state, or
        will be saved. Returns its name, the same on all ranks. is_new: even if the tensors that
        were posted are still there."""
        key = context_of(optimizer).keys.get(self.token)
        if key is None:
            key = self._number(optimizer)
        record = self.optimizers.get(key)
        if record is None:
            return key
        is_of_step = in_step or is_new or not record.posted
        is_changed = not record.is_current(optimizer, in_step)
        if is_new or is_changed or (in_step and record.posted["by_hand"]):
            self._record(optimizer, record, is_of_step)
            self.board.show(self)
        return key

    def _number(self, optimizer: Optimizer) -> str:
        """Return its class, which of the model's parameters it has, and a number."""
        places = {id(ref()): i for i, ref in enumerate(self._params)}
        numbers = [places[id(p)] for p in params_of(optimizer) if id(p) in places]
        kind = f"{type(optimizer).__name__}:{zlib.crc32(repr(numbers).encode()):x}"
        key = f"{kind} {self._counts[kind]}"
        self._counts[kind] += 1
        drop = self.board.drop
        record = OptimizerRecord(reference=weakref.ref(optimizer, lambda _: drop()))
        self.optimizers[key] = record
        context_of(optimizer).keys[self.token] = key
        return key

    def note_all(self) -> None:
        """Post what scripts have put into the state of known optimizers."""
        for record in list(self.optimizers.values()):
            optimizer = None if record.reference is None else record.reference()
            if optimizer is not None:
                self.note(optimizer)

    @plain()
    def _record(self, optimizer: Optimizer, record: OptimizerRecord, is_of_step: bool) -> None:
        ids = {id(ref()) for ref in self._params}
        params = [param for param in params_of(optimizer) if id(param) in ids]
        held = held_by(optimizer, params)
        cut = [(i, key, entry) for i, each in enumerate(held) for key, entry in each.shards.items()]
        places = self.board.places([entry.value for _, _, entry in cut])
        rows = [
            (index, str(key), entry.part.begin, entry.part.numel, place)
            for (index, key, entry), place in zip(cut, places, strict=True)
            if entry.part is not None
        ]
        record.tensors = [(weakref.ref(held[i].param), key, e.value) for i, key, e in cut]
        values = [value for *_, value in record.tensors]
        if is_of_step:
            record.after_step = [weakref.ref(value) for value in values]
        by_hand = len(values) != len(record.after_step) or any(
            ref() is not value for ref, value in zip(record.after_step, values, strict=True)
        )
        facts, nested = [each.fact for each in held], [each.nested is not None for each in held]
        record.posted = {"facts": facts, "nested": nested, "rows": rows, "by_hand": by_hand}
        record.ids = ids_of(optimizer)
        record.entries = _entries_in(optimizer.state)
        record.stamp = getattr(optimizer, "state_changes", None)


class Board:
    """This rank's board on one transport: facts about all its models and their optimizers."""

    def __init__(self, comm: _core.Comm) -> None:
        self.comm = comm
        self.models: dict[str, ModelRecord] = {}
        """By token; those with optimizers that others may read, also of freed models."""
        self._dropped: set[str] = set()  # "token key" of optimizers that this rank has dropped
        self._lock = threading.Lock()
        self._is_stale = False

    def places(self, values: Sequence[Tensor]) -> list[int]:
        """Return where tensors lie, for peers, after moving those that peers cannot read."""
        found = [_core.state_place(self.comm, value) for value in values]
        moving = [value for value, at in zip(values, found, strict=True) if at is None]
        if moving:
            move_together(moving, self.comm)
            found = [_core.state_place(self.comm, value) for value in values]
        return [0 if at is None else at for at in found]  # None: an empty shard has no place

    def show(self, model: ModelRecord) -> None:
        """Post a model's optimizers, from now on."""
        self.models[model.token] = model
        _kept.add(self)
        self.publish()

    def publish(self) -> None:
        """Post what there is now. On any thread, and within the finalizer of an optimizer, which
        may run in the midst of this: then the call around it posts once more."""
        self._is_stale = True
        while self._is_stale and self._lock.acquire(blocking=False):
            try:
                self._is_stale = False
                _core.post(self.comm, json.dumps(self._text()).encode())
            finally:
                self._lock.release()

    def _text(self) -> dict[str, Any]:
        states = {
            f"{token} {key}": record.posted
            for token, model in list(self.models.items())
            for key, record in list(model.optimizers.items())
        }
        return {"states": states, "dropped": sorted(self._dropped)}

    def read(self, rank: int) -> dict[str, Any]:
        """Return what another rank has posted."""
        text = _core.posted(self.comm, rank)
        found: dict[str, Any] = json.loads(text) if text else {"states": {}, "dropped": []}
        return found

    def drop(self) -> None:
        """Post which optimizers have died, and free the state of those that all ranks dropped."""
        try:
            dead = {
                f"{token} {key}"
                for token, model in list(self.models.items())
                for key, record in list(model.optimizers.items())
                if record.is_dropped
            }
            if dead - self._dropped:
                self._dropped |= dead
                self.publish()
            for rank in range(self.comm.world) if dead else ():
                if rank != self.comm.rank and not _core.has_left(self.comm, rank):
                    dead &= set(self.read(rank)["dropped"])
            for name in dead:
                token, _, key = name.partition(" ")
                self.models[token].optimizers.pop(key, None)
                if not self.models[token].optimizers:
                    del self.models[token]
            if dead:
                self.publish()
            if not self.models:
                _kept.discard(self)
        except Exception:  # the process exits: the transport is closed, or modules are empty
            return


_kept: set[Board] = set()
"""Boards whose optimizer state others may read, even after the model was freed. Others are kept by
models."""


def share_state(module: nn.Module, shards: _core.Comm) -> None:
    """Let the ranks that hold a new model's shards read each other's optimizer state. Collective
    where they share memory, unless the state is offloaded; else a no-op."""
    states: list[State] = [state for _, state in units_of(module)]
    offloads = any(each.options.offload and each.options.offload.optimizer for each in states)
    if not _core.shares_state(shards) or offloads:
        return
    for each in list(_kept):
        each.drop()
    boards = [*_kept, *(part.peers.board for _, part in known_parts() if part.peers is not None)]
    board = next((each for each in boards if each.comm is shards), None) or Board(shards)
    token = shards.exchange(secrets.token_bytes(_TOKEN))[0].hex()
    record = ModelRecord(token, board, states)
    for state in states:
        state.set_peers(record)


def read_peers(optimizer: Optimizer, model: ModelRecord, held: Sequence[HeldState]) -> FullState:
    """Return the parameters of one model with the full tensors of their sharded state.

    Raises DivergenceError if another rank's state differs in parameters, names, shapes or dtypes;
    RuntimeError for shards within a list or dict; what a forward on one rank alone raises.
    """
    name, board = model.note(optimizer), model.board
    entries = {(i, str(key)): e for i, each in enumerate(held) for key, e in each.shards.items()}
    numbers = {at: number for number, at in enumerate(entries)}
    full = {at: new_full(entry) for at, entry in entries.items()}
    late = _LATE if any(each.state for each in held) else 0.0
    by_hand = model.optimizers[name].posted["by_hand"]
    with session(unit for each in held if (unit := each.part.unit)):
        peers = {}
        for rank in range(board.comm.world):
            if rank != board.comm.rank:
                posted = _posted_by(board, rank, f"{model.token} {name}", late, by_hand)
                _check(held, posted, board.comm.rank, rank)
                if posted["by_hand"] is not by_hand:
                    one, other = (board.comm.rank, rank) if by_hand else (rank, board.comm.rank)
                    raise _core.DivergenceError(
                        f"rank {one} has replaced tensors in the optimizer's state since its last "
                        f"step, but rank {other} has not yet: call torch.distributed.barrier() on "
                        "all ranks first"
                    )
                peers[rank] = [(numbers[i, key], *where) for i, key, *where in posted["rows"]]
        read_full(list(entries.values()), list(full.values()), peers)
    return [
        (each.param, {key: full[index, str(key)] for key in each.shards})
        for index, each in enumerate(held)
    ]


def _posted_by(board: Board, rank: int, name: str, late: float, by_hand: bool) -> dict[str, Any]:
    """Return what a rank has posted of an optimizer, which may take it so many seconds if it has
    got its state without a step. by_hand: whether this rank has, since the last step."""
    end = time.monotonic() + late
    while True:
        posted: dict[str, Any] | None = board.read(rank)["states"].get(name)
        is_late = posted is None or posted["by_hand"] is not by_hand
        if not is_late or time.monotonic() > end:
            return posted or {"facts": None, "nested": [], "rows": [], "by_hand": by_hand}
        time.sleep(_AGAIN)


def _check(held: Sequence[HeldState], posted: dict[str, Any], own_rank: int, rank: int) -> None:
    """Raise if what another rank has posted does not match this rank's state."""
    ours = [each.fact for each in held]
    theirs, remedy = posted["facts"], "use the same on all ranks"
    if theirs is None:
        theirs = [(about, "none") for about, _ in ours]
        remedy = (
            f"rank {rank} has neither stepped nor loaded this optimizer, or it is a copy: call "
            "state_dict() on all ranks"
        )
    facts = {own_rank: ours, rank: [(about, value) for about, value in theirs]}
    low, high = sorted(facts)
    difference = first_difference(facts[low], facts[high], (low, high))
    if difference is not None:
        raise _core.DivergenceError(f"the optimizers differ between ranks: {difference}; {remedy}")
    for each, is_nested in zip(held, posted["nested"], strict=False):
        if is_nested:
            each.refuse_nested()


os.register_at_fork(after_in_child=_kept.clear)  # a forked child is not a rank
