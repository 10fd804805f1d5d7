"""Whole optimizer state on one rank, which asks the others for their slices.

Nobody meets. The rank that wants whole state opens a reader session, so that nobody
steps, and asks each peer's thread (ranks/responder.py) for what that rank has of the same
optimizer, which has the same number there (optim/state_registry.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zshard import _core
from zshard.guard.slices import plain
from zshard.optim.sharded_state import HeldState, fact_of, held_in
from zshard.optim.state_registry import Peers, record_of_model, tell_of
from zshard.ranks.agreement import Fact, first_difference
from zshard.ranks.responder import Answer, Reply, answer_with, ask
from zshard.ranks.script_position import own_collective
from zshard.units.units import session

__all__ = ["WholeState", "ask_for_whole", "install"]

_LATE = 5.0  # seconds that a rank may be behind another one which already has the optimizer's state
_LOOK = 0.05  # seconds between two questions

WholeState = list[tuple[Tensor, dict[Any, Tensor]]]


def install() -> None:
    """Answer other ranks' questions from now on. Idempotent."""
    answer_with(_answer)


def ask_for_whole(optimizer: Optimizer, peers: Peers, held: Sequence[HeldState]) -> WholeState:
    """Return the parameters of one model with the full tensors of their sharded state.

    Raises DivergenceError if another rank's state differs in parameters, names, shapes or dtypes;
    RuntimeError for shards within a list or dict, and if a rank cannot tell; PeerError if a rank
    has ended, PeerTimeoutError if it does not answer in time.
    """
    book = peers.book
    question = {"ask": [book.token, book.note(optimizer).key]}
    timeout = held[0].part.comm.timeout
    late = min(_LATE, timeout) if any(each.entries for each in held) else 0.0
    wholes = _Wholes(held)
    with session(unit for each in held if (unit := each.part.unit)):
        for rank in range(len(book.addresses)):
            if rank == book.rank:
                wholes.take_own()
                continue
            with _asked_again(wholes, late, book.addresses[rank], question, rank, timeout) as reply:
                wholes.check(reply.facts, rank)
                for index, key, begin, numel in reply.facts["slices"]:
                    reply.read_into(wholes.place(index, key, begin, numel))
    return wholes.result()


@contextlib.contextmanager
def _asked_again(wholes: _Wholes, late: float, *args: Any) -> Iterator[Reply]:
    """_asked(), until the rank has made the optimizer, or a copy of it: it may be `late` by so many
    seconds."""
    end = time.monotonic() + late
    while True:
        with _asked(*args) as reply:
            made = reply.facts["known"] or wholes.agree(reply.facts)
            if made or time.monotonic() > end:
                yield reply
                return
        time.sleep(_LOOK)


@contextlib.contextmanager
def _asked(address: str, question: Any, rank: int, timeout: float) -> Iterator[Reply]:
    try:
        with ask(address, question, timeout) as reply:
            if "unanswered" in reply.facts:
                raise RuntimeError(f"rank {rank} cannot send its part: {reply.facts['unanswered']}")
            yield reply
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


class _Wholes:
    """Full tensors that are being put together."""

    def __init__(self, held: Sequence[HeldState]) -> None:
        self._held = held
        self._made: list[dict[Any, Tensor]] = [{} for _ in held]
        self._found: list[dict[Any, dict[int, int]]] = [{} for _ in held]
        self._keys = [{str(key): key for key, _, cut in each.entries if cut} for each in held]

    def _facts(self, told: dict[str, Any]) -> tuple[list[Fact], list[Fact]]:
        """This rank's, and those that another one has told."""
        ours = list(map(fact_of, self._held))
        theirs = [(about, said) for about, said in told["facts"]]
        if told["unknown"]:  # there, it has neither stepped nor loaded
            theirs = [(about, "none") for about, _ in ours]
        return ours, theirs

    def agree(self, told: dict[str, Any]) -> bool:
        ours, theirs = self._facts(told)
        return ours == theirs

    def check(self, told: dict[str, Any], rank: int) -> None:
        ours, theirs = self._facts(told)
        both = sorted(((self._held[0].part.shards.rank, ours), (rank, theirs)))
        difference = first_difference(both[0][1], both[1][1], (both[0][0], both[1][0]))
        if difference is not None:
            raise _core.DivergenceError(f"the optimizers differ between ranks: {difference}")
        for each, theirs_too in zip(self._held, told["nested"], strict=False):
            if each.nested is not None and theirs_too:
                raise RuntimeError(
                    f"{each.nested} in the optimizer's state of '{each.part.name}' contains "
                    "sharded tensors, which state_dict() cannot gather: store each tensor directly "
                    "under its own key"
                )

    def place(self, index: int, key: str, begin: int, numel: int) -> Tensor:
        """Return the memory for elements of the full tensor."""
        each, own = self._held[index], self._keys[index][key]
        if own not in self._made[index]:
            dtype = next(value.dtype for name, value, _ in each.entries if name == own)
            self._made[index][own] = torch.empty(each.part.whole_numel, dtype=dtype)
        if numel:
            self._found[index].setdefault(own, {})[begin] = numel
        return self._made[index][own][begin : begin + numel]

    @plain()
    def take_own(self) -> None:
        for index, each in enumerate(self._held):
            for key, value, is_cut in each.entries:
                if is_cut:
                    place = self.place(index, str(key), each.part.begin, each.part.numel)
                    place.copy_(value.detach().reshape(-1))

    def result(self) -> WholeState:
        whole = []
        for each, made, found in zip(self._held, self._made, self._found, strict=True):
            for key in made:
                if sum(found.get(key, {}).values()) != each.part.whole_numel:
                    raise RuntimeError(
                        f"the ranks' shards of '{each.part.name}' do not add up to the full "
                        "parameter; please report this"
                    )
            whole.append((each.param, {k: v.view(each.part.shape) for k, v in made.items()}))
        return whole


# --- answers --------------------------------------------------------------------------------------


def _answer(question: dict[str, Any]) -> Answer:
    if "tell" in question:
        tell_of(question["tell"])
        return {}, []
    if "where" in question:
        return {"collective": own_collective()}, []
    token, key = question["ask"]
    book = record_of_model(token)
    if book is None:
        return {"unanswered": "it has deleted the model"}, []
    found = book.find(key)
    if found is None:
        return {"facts": [], "nested": [], "slices": [], "unknown": True, "known": False}, []
    facts, tensors = _slices(held_in(*found))
    return {**facts, "known": True}, tensors


@plain()
def _slices(held: Sequence[HeldState]) -> Answer:
    slices: list[tuple[int, str, int, int]] = []
    tensors: list[Tensor] = []
    for index, each in enumerate(held):
        for key, value, is_cut in each.entries:
            if is_cut:
                slices.append((index, str(key), each.part.begin, each.part.numel))
                tensors.append(value.detach().cpu().contiguous())
    facts: list[Fact] = [fact_of(each) for each in held]
    nested = [each.nested is not None for each in held]
    return {"facts": facts, "nested": nested, "slices": slices, "unknown": False}, tensors
