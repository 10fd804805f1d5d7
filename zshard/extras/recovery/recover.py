"""Recovery in a new process from an earlier one's memory: choose a step, finish it, copy it.

Each run of processes is a generation, and each rank publishes how far its memory of each generation
is. The newest generation in which all ranks have written a step is restored, at the last step that
all of them have written. A rank on which that step is not done finishes it in the old memory.
"""

from __future__ import annotations

import contextlib
import io
import json
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
    """The name of a rank's memory at the keeper. keep: the name of its Keep(), else how many the
    process made before, so that each finds its own."""

    generation: int
    rank: int
    world: int
    keep: str

    def __str__(self) -> str:
        return " ".join(map(str, self))


def names_at(keeper: Keeper) -> list[KeptName]:
    """Return the names of what a keeper holds."""
    fields = (name.split(" ", 3) for name in keeper.list())
    return [KeptName(int(gen), int(rank), int(world), keep) for gen, rank, world, keep in fields]


class Old(NamedTuple):
    """The memory of earlier processes, which `keeper` holds. newest: the last generation that any
    rank has anything of, also of another number of ranks; -1: none. generation, step: the newest
    one in which all ranks have written a step, and the last that all have; step 0: there is none.
    """

    keeper: Keeper
    comm: api.Comm
    name: KeptName  # of this rank, without the generation
    newest: int
    generation: int = -1
    step: int = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[KeptLayout, list[int]]]:
        """Context manager: this rank's layout and descriptors of that generation."""
        held = self.keeper.get(str(self.name._replace(generation=self.generation)))
        if held is None:
            raise RuntimeError("the keeper has dropped this run's state meanwhile: start it again")
        try:
            yield KeptLayout(**json.loads(held.meta)), held.fds
        finally:
            for fd in held.fds:
                os.close(fd)


def old_memory(keeper: Keeper, comm: api.Comm, rank_name: KeptName) -> Old:
    """Return what the ranks' keepers hold of this rank and its peers. Collective."""
    names = [name for name in names_at(keeper) if name.keep == rank_name.keep]
    steps: dict[str, int] = {}
    for name in names:
        if name == rank_name._replace(generation=name.generation):
            held = keeper.get(str(name))
            if held is not None:
                steps[str(name.generation)] = marked(held.fds[HEAD], Mark.READY)
                for fd in held.fds:
                    os.close(fd)
    newest = max((name.generation for name in names), default=-1)
    everyone = gather(comm, [newest, steps])
    newest = max(newest for newest, _ in everyone)
    for generation in range(newest, -1, -1):
        step = min(steps.get(str(generation), 0) for _, steps in everyone)
        if step > 0:
            return Old(keeper, comm, rank_name, newest, generation, step)
    return Old(keeper, comm, rank_name, newest)


def recovered(
    old: Old, model: nn.Module, optimizer: Optimizer, others: Sequence[Any]
) -> dict[str, Any]:
    """Restore the newest step that all ranks have, and return the script's dict. Collective."""
    began = time.monotonic()
    with on_all_ranks(old.comm), old.opened() as (layout, fds):
        _check_same("parameter", layout.model, model_facts(model, old.comm))
        _check_same("optimizer", [layout.optimizer], [optimizer_facts(optimizer)])
        data = bytearray(os.fstat(fds[SLOTS[old.step % 2]]).st_size)
        _read_into(memoryview(data), fds[SLOTS[old.step % 2]], 0, "the script's data")
        file = io.BytesIO(data)
        counters, state = pickle.load(file), pickle.load(file)
        _check_kinds(others, state["others"])
        kept = (f"{n} torch.{dtype} {shape}" for n, (dtype, shape, _) in state["buffers"].items())
        buffers = (f"{name} {b.dtype} {tuple(b.shape)}" for name, b in model.named_buffers())
        _check_same("buffer", sorted(kept), sorted(buffers))
        if marked(fds[HEAD], Mark.DONE) < old.step and state["stepped"]:
            files = zip(layout.files, (mmap.mmap(fd, 0) for fd in fds[REST:]), strict=True)
            api.KeptStep(mmap.mmap(fds[AREA], 0)).finish(old.step, list(files))
            mark(fds[HEAD], Mark.DONE, old.step)
    with on_all_ranks(old.comm), old.opened() as (layout, fds):
        _restore(layout, fds, {**state, "counters": counters}, model, optimizer)
        restore_others(others, state["others"])
        set_rng_state(state["rng"])
    say(old.comm, f"recovered step {old.step} from memory in {time.monotonic() - began:.2f} s")
    script: dict[str, Any] = pickle.loads(state["script"])
    return script


def say(comm: api.Comm, words: str) -> None:
    """Print a line, on rank 0."""
    if comm.rank == 0:
        print(f"zshard: {words}", file=sys.stderr, flush=True)


def _check_same(what: str, then: Sequence[str], now: Sequence[str]) -> None:
    """Raise RuntimeError with the first line that the kept state or this script has alone."""
    if then != now:
        kept = next((line for line in then if line not in now), "nothing")
        here = next((line for line in now if line not in then), "nothing")
        text = f"the kept state has the {what} '{kept}', but this script has '{here}'"
        raise RuntimeError(f"{text}: run the script that was kept, or start a new run")


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
    _check_same("list of others", [str(then)], [str(now)])


# --- restoring ------------------------------------------------------------------------------------


@torch.no_grad()
@plain()
def _restore(
    layout: KeptLayout, fds: Sequence[int], state: dict[str, Any], model: nn.Module, optimizer: Any
) -> None:
    files = dict(zip(layout.files, fds[REST:], strict=True))
    know(optimizer)  # before it has state, which would count as older than the sharded model
    with writing(unit_state.unit for _, unit_state in units_of(model)):
        _fill(dict(named_shards(model)), layout.params, files)
        for group, options in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update(options)
        _make_state(optimizer, state["counters"])
        optimizer.state.update(state["other"])
        tensors = dict(state_tensors(optimizer))
        _fill(tensors, [place for place in layout.state if place[0] in tensors], files)
        know(optimizer)
    for name, buffer in model.named_buffers():
        dtype, shape, data = state["buffers"][name]
        if data:
            value = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
            buffer.copy_(value.view(shape))


def _make_state(optimizer: Any, counters: Sequence[dict[str, Any] | None]) -> None:
    """Create the state that the optimizer had, with its counters; its tensors are filled later."""
    of_param = dict(zip(map(id, params_of(optimizer)), counters, strict=True))
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
