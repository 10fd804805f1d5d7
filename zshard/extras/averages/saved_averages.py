"""The averages of a zshard.EMA in a checkpoint: `average-<decay>.safetensors` for each decay.

Such a file has the averaged parameters under the model's names, with full shapes and the averages'
own dtype, so it loads into a plain model by itself. The manifest's entry (`averages`):

    {"decays": [0.999, ...], "calls": 1200, "updates": 1200}
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
    Pending,
    Readable,
    Source,
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
    found = {}
    for decay, averages in zip(ema.decays, ema.averages, strict=True):
        found[stem_of(decay)] = Contents(_entries_of(ema, averages), {}, {}, [])
    entry = {"decays": list(ema.decays), "calls": ema.calls, "updates": ema.updates}
    return Beside(_ENTRY, entry, found)


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
    def of(found: Checkpoint) -> SavedAverages | None:
        """Open their files; None if it has none. Raise CheckpointError if its entry is invalid."""
        entry = None if found.manifest is None else found.manifest.more.get(_ENTRY)
        if found.manifest is None or entry is None:
            return None
        where = os.path.join(found.path, NAME)
        told = entry if isinstance(entry, dict) else {}
        decays, calls, updates = (told.get(name) for name in ("decays", "calls", "updates"))
        if not isinstance(decays, list) or not all(type(each) is float for each in decays):
            raise CheckpointError(f"'{where}' has invalid decays of averages: {decays!r:.80}")
        if type(calls) is not int or type(updates) is not int or not 0 <= updates <= calls:
            counts = (calls, updates)
            raise CheckpointError(f"'{where}' has invalid counts of averages: {counts!r:.80}")
        tensors = {each: found.tensors(stem_of(each)) for each in decays}
        return SavedAverages(tensors, calls, updates)


class AveragesLoad:
    """Loads an EMA, in steps. Only the last one, read(), changes it."""

    def __init__(self, ema: object, model: nn.Module) -> None:
        """Raises TypeError for what is not an EMA, ValueError for one of another model."""
        self._ema = _checked(ema, model)
        self._copies: list[Copy] = []

    def open(self, found: Checkpoint) -> None:
        """Open its files."""
        self._path, self._saved = found.path, SavedAverages.of(found)

    def plan(self) -> None:
        """Raise RuntimeError, which lists what does not fit."""
        if self._saved is None:
            raise RuntimeError(
                f"'{self._path}' has no averages: omit ema to load the rest; the EMA then begins "
                "with its next update()"
            )
        problems = []
        ema, by_decay, *self._counts = self._ema, *self._saved
        ours, theirs = sorted(ema.decays), sorted(by_decay)
        if ours != theirs:
            problems.append(f"its decays are {theirs}, but the EMA's are {ours}")
        for decay, averages in zip(ema.decays, ema.averages, strict=True):
            if decay in by_decay:
                entries = _entries_of(ema, averages)
                problems += self._plan(by_decay[decay], entries, stem_of(decay))
        if problems:
            head = f"Error(s) in loading the averages of '{self._path}':"
            raise RuntimeError("\n\t".join([head, *problems]))

    def _plan(self, saved: Mapping[str, Readable], entries: list[Entry], stem: str) -> list[str]:
        """Plan the copies of one decay; return what does not fit."""
        left, problems = dict(saved), []
        for name, shape, _, average, part, _ in entries:
            entry = left.pop(name, None)
            if entry is None:
                problems.append(f"{stem} lacks '{name}'")
            elif entry.shape != shape:
                problems.append(f"'{name}' has shape {entry.shape} in {stem}, but {shape} here")
            else:
                value = Pending.of(f"{stem} {name}", entry)
                self._copies.append(Copy(average, value if part is None else shard_of(part, value)))
        return problems + [f"{stem} has '{name}', which the EMA does not average" for name in left]

    def pending(self) -> list[Pending]:
        """Return the tensors that this rank will read."""
        return [each.value for each in self._copies if isinstance(each.value, Pending)]

    def read(self, source: Source) -> None:
        """Read the values into the averages."""
        for each in self._copies:
            each.carry_out(source)
        self._ema.calls, self._ema.updates = self._counts
