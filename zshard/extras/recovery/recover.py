"""What a new process does with what an earlier one left: choose a step, finish it, copy it.

Each run of processes is a generation, and each rank publishes how far its memory of each generation
is. The newest generation in which all ranks have written a step is restored, at the last step that
all of them have written. A rank on which that step is not done finishes it in the old memory.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import api
from zshard.api import (
    bytes_of,
    gather,
    know,
    on_all_ranks,
    params_of,
    plain,
    set_rng_state,
    units_of,
    writing,
)
from zshard.extras.keeping.client import Keeper
from zshard.extras.recovery.files import Mark, mark, marked
from zshard.extras.recovery.layout import (
    KeptLayout,
    KeptPlace,
    model_facts,
    named_shards,
    optimizer_facts,
    state_tensors,
)

HEAD, SLOTS, AREA, REST = 0, (1, 2), 3, 4
"""The order of a rank's descriptors at the keeper; the layout's files follow."""


class KeptName(NamedTuple):
    """What a rank's memory is called at the keeper. keep: the name of its Keep(), else how many the
    process made before, so that each finds its own."""

    generation: int
    rank: int
    world: int
    keep: str

    def __str__(self) -> str:
        return " ".join(map(str, self))


def names_at(keeper: Keeper) -> list[KeptName]:
    """Return the names of what a keeper holds."""
    found = []
    for name in keeper.list():
        generation, rank, world, keep = name.split(" ", 3)
        found.append(KeptName(int(generation), int(rank), int(world), keep))
    return found


class Generations(NamedTuple):
    """newest: the last that any rank has anything of, also of another number of ranks; -1: none.
    whole: (generation, the last step that all ranks have written) of the newest one in which all
    have; None: there is none. own: this rank's name, without the generation."""

    newest: int
    whole: tuple[int, int] | None
    own: KeptName


def generations(keeper: Keeper, comm: api.Comm, own: KeptName) -> Generations:
    """Return what the ranks' keepers hold of this rank and its peers. Collective."""
    known = [name for name in names_at(keeper) if name.keep == own.keep]
    steps: dict[str, int] = {}
    for name in known:
        if name == own._replace(generation=name.generation):
            held = keeper.get(str(name))
            if held is not None:
                steps[str(name.generation)] = marked(held.fds[HEAD], Mark.READY)
                for fd in held.fds:
                    os.close(fd)
    mine = [max((name.generation for name in known), default=-1), steps]
    everyone = gather(comm, mine)
    newest = max(newest for newest, _ in everyone)
    for generation in range(newest, -1, -1):
        step = min(each.get(str(generation), 0) for _, each in everyone)
        if step > 0:
            return Generations(newest, (generation, step), own)
    return Generations(newest, None, own)


class Old:
    """The memory of earlier processes, which `keeper` holds."""

    def __init__(self, keeper: Keeper, comm: api.Comm, found: Generations) -> None:
        self.keeper, self.comm, self.found = keeper, comm, found

    @contextlib.contextmanager
    def opened(self, generation: int) -> Iterator[tuple[KeptLayout, list[int]]]:
        """Context manager: this rank's layout and descriptors of a generation."""
        held = self.keeper.get(str(self.found.own._replace(generation=generation)))
        if held is None:
            raise RuntimeError("the keeper has dropped this run's state meanwhile: start it again")
        try:
            yield KeptLayout.from_json(held.meta), held.fds
        finally:
            for fd in held.fds:
                os.close(fd)


def recovered(
    old: Old, model: nn.Module, optimizer: Optimizer, others: Sequence[Any]
) -> tuple[int, dict[str, Any]] | None:
    """Restore the newest step that all ranks have, and return its number and the script's dict;
    None if there is none. Collective."""
    if old.found.whole is None:
        return None
    began = time.monotonic()
    generation, number = old.found.whole
    with on_all_ranks(old.comm), old.opened(generation) as (layout, fds):
        _check(layout, model, optimizer, old.comm)
        state = _read_slot(fds[SLOTS[number % 2]])
        _check_rest(state, model, others)
        if marked(fds[HEAD], Mark.DONE) < number and state["stepped"]:
            _finish(layout, fds, number)
    with on_all_ranks(old.comm), old.opened(generation) as (layout, fds):
        _restore(layout, fds, state, model, optimizer)
        restore_others(others, state["others"])
        set_rng_state(state["rng"])
    say(old.comm, f"recovered step {number} from memory in {time.monotonic() - began:.2f} s")
    script: dict[str, Any] = pickle.loads(state["script"])
    return number, script


def say(comm: api.Comm, words: str) -> None:
    """Print a line, on rank 0."""
    if comm.rank == 0:
        print(f"zshard: {words}", file=sys.stderr, flush=True)


def _check(layout: KeptLayout, model: nn.Module, optimizer: Optimizer, comm: api.Comm) -> None:
    now = model_facts(model, comm)
    if now != layout.model:
        missing = [line for line in layout.model if line not in now] + ["nothing"]
        new = [line for line in now if line not in layout.model] + ["nothing"]
        raise RuntimeError(
            f"the kept state is of another model: it has {missing[0]!r} where this script has "
            f"{new[0]!r}. Run the script that was kept, or start a run of its own"
        )
    given = optimizer_facts(optimizer)
    if given != layout.optimizer:
        raise RuntimeError(
            f"the kept state is of another optimizer: {layout.optimizer!r}, where this script has "
            f"{given!r} (class, parameters of each group, digest of their names). Run the script "
            "that was kept, or start a run of its own"
        )


def _check_rest(state: dict[str, Any], model: nn.Module, others: Sequence[Any]) -> None:
    _check_kinds(others, state["others"])
    now = {
        name: (str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape))
        for name, buffer in model.named_buffers()
    }
    then = {name: (dtype, shape) for name, (dtype, shape, _) in state["buffers"].items()}
    for name in sorted({name for name, _ in then.items() ^ now.items()}):
        raise RuntimeError(
            f"the kept state has {then.get(name, 'no buffer')} as buffer '{name}', where this "
            f"script has {now.get(name, 'none')}: register buffers, in their shape, before "
            "recover()"
        )


def states_of(others: Sequence[Any]) -> list[list[Any]]:
    """Return (class, state) of schedulers and the like."""
    return [[type(other).__name__, other.state_dict()] for other in others]


def restore_others(others: Sequence[Any], states: Sequence[Sequence[Any]]) -> None:
    """Load what states_of() returned. Raises RuntimeError if that was of others."""
    _check_kinds(others, states)
    for other, (_, state) in zip(others, states, strict=True):
        other.load_state_dict(state)


def _check_kinds(others: Sequence[Any], states: Sequence[Sequence[Any]]) -> None:
    now, then = [type(other).__name__ for other in others], [kind for kind, _ in states]
    if now != then:
        raise RuntimeError(
            f"the kept state is of {then} beside model and optimizer, where this script passes "
            f"{now}: pass the same to Keep(), in the same order, or start a run of its own"
        )


def _read_slot(fd: int) -> dict[str, Any]:
    data = bytearray(os.fstat(fd).st_size)
    _read_into(memoryview(data), fd, 0, "the script's data")
    file = io.BytesIO(data)
    counters = pickle.load(file)
    state: dict[str, Any] = pickle.load(file)
    return {**state, "counters": counters}


def _finish(layout: KeptLayout, fds: Sequence[int], number: int) -> None:
    """Finish a step in the old memory."""
    files = zip(layout.files, (mmap.mmap(fd, 0) for fd in fds[REST:]), strict=True)
    api.KeptStep(mmap.mmap(fds[AREA], 0)).finish(number, list(files))
    mark(fds[HEAD], Mark.DONE, number)


# --- restoring ------------------------------------------------------------------------------------


@torch.no_grad()
@plain()
def _restore(
    layout: KeptLayout, fds: Sequence[int], state: dict[str, Any], model: nn.Module, optimizer: Any
) -> None:
    files = dict(zip(layout.files, fds[REST:], strict=True))
    know(optimizer)  # before it has state, which would count as older than the sharded model
    with writing(each.unit for _, each in units_of(model)):
        _fill(dict(named_shards(model)), layout.params, files)
        for group, own in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update(own)
        _make_state(optimizer, state["counters"])
        optimizer.state.update(state["other"])
        tensors = dict(state_tensors(optimizer))
        _fill(tensors, [each for each in layout.state if each[0] in tensors], files)
        know(optimizer)
    for name, buffer in model.named_buffers():
        dtype, shape, data = state["buffers"][name]
        value = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else None
        if value is not None:
            buffer.copy_(value.view(shape))


def _make_state(optimizer: Any, counters: Sequence[dict[str, Any] | None]) -> None:
    """Create the state that the optimizer had, with its counters; its tensors are filled later."""
    of_param = {id(param): own for param, own in zip(params_of(optimizer), counters, strict=True)}
    for group in optimizer.param_groups:
        optimizer._make_state(group, [p for p in group["params"] if of_param[id(p)] is not None])
    for param in params_of(optimizer):
        for key, (value, dtype) in (of_param[id(param)] or {}).items():
            optimizer.state[param][key] = torch.tensor(value, dtype=getattr(torch, dtype))
    optimizer.state_changes += 1


def _fill(targets: dict[str, Tensor], places: Sequence[KeptPlace], files: dict[int, int]) -> None:
    """Read tensors from where they lie."""
    for name, file, offset in places:
        _read_into(bytes_of(targets[name].detach()), files[file], offset, f"'{name}'")


def _read_into(view: memoryview, fd: int, offset: int, what: str) -> None:
    at = 0
    while at < len(view):
        got = os.preadv(fd, [view[at:]], offset + at)
        if got == 0:
            raise RuntimeError(f"the kept memory of {what} is cut off; please report this")
        at += got
