"""Whole optimizer state on one rank, which asks the others for their slices.

The one idea: nobody meets. The rank that wants whole state opens a reader session, so that nobody
steps, and asks each peer's thread (_answers.py) for what that rank has of the same optimizer: the
first of its class that has stepped the same parameters, or the second, if so here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zshard import _core
from zshard._agree import Fact, first_difference
from zshard._answers import Answer, Peers, answer_with, ask
from zshard._guard import plain
from zshard._optim_guard import seen_optimizers
from zshard._optim_held import Held, fact_of, held_by

__all__ = ["Whole", "ask_for_whole", "install"]

Whole = list[tuple[Tensor, dict[Any, Tensor]]]


def install() -> None:
    """Answer other ranks' questions from now on. Idempotent."""
    answer_with(_answer)


def ask_for_whole(optimizer: Optimizer, peers: Peers, held: Sequence[Held]) -> Whole:
    """Return the parameters of one model with the full tensors of their sharded state.

    Raises DivergenceError if another rank's state differs in parameters, names, shapes or dtypes;
    RuntimeError for shards within a list or dict; PeerError if a rank has ended.
    """
    question = [type(optimizer).__name__, _place_of(optimizer, peers)]
    comm = held[0].part.comm
    wholes = _Wholes(held)
    with _nobody_steps(held):
        for rank in range(comm.world):
            if rank == comm.rank:
                wholes.take_own()
                continue
            with ask(peers, rank, question, comm.timeout) as reply:
                wholes.check(reply.facts, rank)
                for index, key, begin, numel in reply.facts["slices"]:
                    reply.read_into(wholes.place(index, key, begin, numel))
    return wholes.result()


@contextlib.contextmanager
def _nobody_steps(held: Sequence[Held]) -> Iterator[None]:
    engines = {unit.engine_id: unit.engine for each in held if (unit := each.part.unit)}
    with contextlib.ExitStack() as opened:
        for engine in engines.values():
            engine.open()
            opened.callback(engine.close)
        yield


class _Wholes:
    """Full tensors that are being put together."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._made: list[dict[Any, Tensor]] = [{} for _ in held]
        self._found: list[dict[Any, dict[int, int]]] = [{} for _ in held]
        self._keys = [{str(key): key for key, _, cut in each.entries if cut} for each in held]

    def check(self, told: dict[str, Any], rank: int) -> None:
        ours = list(map(fact_of, self._held))
        theirs = [(about, said) for about, said in told["facts"]]
        if told["unknown"]:  # there, it has neither stepped nor loaded
            theirs = [(about, "none") for about, _ in ours]
        both = sorted(((self._held[0].part.comm.rank, ours), (rank, theirs)))
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

    def result(self) -> Whole:
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


def _candidates(peers: Peers, name: str) -> list[Optimizer]:
    """The optimizers of that class that have stepped parameters of the model, in the order of their
    first step."""
    params = {id(param) for param in peers.params}
    return [
        optimizer
        for optimizer in seen_optimizers()
        if type(optimizer).__name__ == name
        and any(id(p) in params for group in optimizer.param_groups for p in group["params"])
    ]


def _place_of(optimizer: Optimizer, peers: Peers) -> int:
    """Which of them it is. One that has not stepped is behind all that have."""
    known = _candidates(peers, type(optimizer).__name__)
    return next((i for i, each in enumerate(known) if each is optimizer), len(known))


@plain()
def _answer(peers: Peers, question: Any) -> Answer:
    name, place = question
    known = _candidates(peers, name)
    held: list[Held] = []
    if place < len(known):
        held = [each for each in held_by(known[place]) if each.part.peers is peers]
    slices: list[tuple[int, str, int, int]] = []
    tensors: list[Tensor] = []
    for index, each in enumerate(held):
        for key, value, is_cut in each.entries:
            if is_cut:
                slices.append((index, str(key), each.part.begin, each.part.numel))
                tensors.append(value.detach().cpu().contiguous())
    facts: list[Fact] = [fact_of(each) for each in held]
    nested = [each.nested is not None for each in held]
    told = {"facts": facts, "nested": nested, "slices": slices, "unknown": place >= len(known)}
    return told, tensors
