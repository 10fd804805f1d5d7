"""The averages of a zshard.EMA in a checkpoint: `average-<decay>.safetensors` for each decay.

Such a file has the averaged parameters under the model's names, with full shapes and the averages'
own dtype, so it loads into a plain model by itself. The manifest's entry (`averages`):

    {"decays": [0.999, ...], "calls": 1200, "updates": 1200}
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from zshard.api import (
    NAME,
    Beside,
    Checkpoint,
    CheckpointError,
    Contents,
    Copy,
    Entry,
    LoadPlan,
    Readable,
    bare,
    part_of,
    plain_name,
    shard_of,
    to_local,
)
from zshard.extras.averages.ema import EMA

AVERAGE = "average-"
_ENTRY = "averages"


def stem_of(decay: float) -> str:
    """Return the prefix of the names of a decay's files."""
    return f"{AVERAGE}{decay!r}"


def to_save(ema: object, model: nn.Module) -> Beside:
    """Return what to save. Raises TypeError for what is not an EMA, ValueError for one of another
    model, and what EMA.prepare() does."""
    ema = _checked(ema, model)
    ema.prepare("save")
    pairs = zip(ema.decays, ema.averages, strict=True)
    contents = {stem_of(decay): Contents(_entries_of(ema, values)) for decay, values in pairs}
    entry = {"decays": list(ema.decays), "calls": ema.calls, "updates": ema.updates}
    return Beside(_ENTRY, entry, contents)


def _entries_of(ema: EMA, averages: Sequence[Tensor]) -> list[Entry]:
    entries = []
    for (name, param), value in zip(ema.params.items(), averages, strict=True):
        part = part_of(param)
        shape = tuple(value.shape) if part is None else part.shape
        entries.append(Entry(plain_name(name), shape, value.dtype, to_local(value), part))
    return entries


def _checked(ema: object, model: nn.Module) -> EMA:
    if not isinstance(ema, EMA):
        raise TypeError(f"ema must be a zshard.EMA, got {type(ema).__name__}")
    if ema.model is not bare(model):
        raise ValueError("ema averages another model: pass the EMA of the model that you pass")
    return ema


class SavedAverages(NamedTuple):
    """The averages of an open checkpoint."""

    by_decay: dict[float, dict[str, Readable]]
    calls: int
    updates: int

    @staticmethod
    def of(checkpoint: Checkpoint) -> SavedAverages | None:
        """Open their files; None if it has none. Raise CheckpointError if its entry is invalid."""
        entry = None if checkpoint.manifest is None else checkpoint.manifest.more.get(_ENTRY)
        if entry is None:
            return None
        match entry:
            case {"decays": [*decays], "calls": int(calls), "updates": int(updates)} if (
                all(type(decay) is float for decay in decays)
                and type(calls) is type(updates) is int  # and no bool
                and 0 <= updates <= calls
            ):
                tensors = {decay: checkpoint.tensors(stem_of(decay)) for decay in decays}
                return SavedAverages(tensors, calls, updates)
        where = os.path.join(checkpoint.path, NAME)
        raise CheckpointError(f"'{where}' has an invalid entry of averages: {entry!r:.80}")


def to_load(ema: object, model: nn.Module) -> Callable[[Checkpoint], Callable[[], LoadPlan]]:
    """Return a function that opens the averages' files. It returns one that plans the load, and
    raises RuntimeError, which lists what does not fit. Raises TypeError for what is not an EMA,
    ValueError for one of another model."""
    checked = _checked(ema, model)
    return lambda opened: functools.partial(_plan, checked, opened, SavedAverages.of(opened))


def _plan(ema: EMA, checkpoint: Checkpoint, saved: SavedAverages | None) -> LoadPlan:
    if saved is None:
        raise RuntimeError(f"'{checkpoint.path}' has no averages: omit ema to load the rest")
    todo, problems = LoadPlan(), []
    if sorted(ema.decays) != sorted(saved.by_decay):
        pair = f"{sorted(saved.by_decay)}, but the EMA's are {sorted(ema.decays)}"
        problems.append(f"its decays are {pair}")
    for decay, averages in zip(ema.decays, ema.averages, strict=True):
        left, stem = dict(saved.by_decay.get(decay, {})), stem_of(decay)
        entries = _entries_of(ema, averages) if decay in saved.by_decay else ()
        for name, shape, _, average, part, _ in entries:
            entry = left.pop(name, None)
            if entry is None:
                problems.append(f"{stem} lacks '{name}'")
            elif entry.shape != shape:
                problems.append(f"'{name}' has shape {entry.shape} in {stem}, but {shape} here")
            else:
                value = checkpoint.pending(f"{stem} {name}", entry)
                todo.copies.append(Copy(average, value if part is None else shard_of(part, value)))
        problems += [f"{stem} has '{name}', which the EMA does not average" for name in left]
    if problems:
        head = f"Error(s) in loading the averages of '{checkpoint.path}':"
        raise RuntimeError("\n\t".join([head, *problems]))
    todo.calls.append(functools.partial(vars(ema).update, calls=saved.calls, updates=saved.updates))
    return todo
