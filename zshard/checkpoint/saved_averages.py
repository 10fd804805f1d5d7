"""The averages of a zshard.EMA in a checkpoint: `average-<decay>.safetensors` for each decay.

Such a file has the averaged parameters under the model's names, with full shapes and the averages'
own dtype, so it loads into a plain model by itself. The manifest's entry (`averages`):

    {"decays": [0.999, ...], "calls": 1200, "updates": 1200}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zshard._errors import CheckpointError
from zshard.averages import EMA
from zshard.checkpoint.checkpoint import Checkpoint, Readable
from zshard.checkpoint.contents import Contents, Item, Replicas
from zshard.state.source import Copy, Source, shard_of
from zshard.state.stand_ins import Pending
from zshard.units.shards import part_of
from zshard.units.units import bare, plain_name

AVERAGE = "average-"


def stem_of(decay: float) -> str:
    """Return the prefix of the names of a decay's files."""
    return f"{AVERAGE}{decay!r}"


def check_ema(model: nn.Module, ema: object) -> None:
    """Raise TypeError for what is not an EMA, ValueError for one of another model."""
    if not isinstance(ema, EMA):
        raise TypeError(f"ema must be a zshard.EMA, got {type(ema).__name__}")
    if ema.model is not bare(model):
        raise ValueError("ema averages another model: pass the EMA of the model that you pass")


def of_averages(ema: EMA, copies: Replicas) -> dict[str, Contents]:
    """Return what to save, by the stem of the files. Raises what EMA.prepare() does."""
    ema.prepare("save")
    found = {}
    for decay, averages in zip(ema.decays, ema.averages, strict=True):
        items = []
        for (name, param), value in zip(ema.params.items(), averages, strict=True):
            part = part_of(param)
            shape = tuple(value.shape) if part is None else part.shape
            held = copies.from_rank_0(value) if part is None else copies.held(part, value)
            items.append(Item(plain_name(name), shape, value.dtype, held))
        found[stem_of(decay)] = Contents(items, {}, {}, [])
    return found


def entry_of(ema: EMA) -> dict[str, Any]:
    """Return the manifest's entry."""
    return {"decays": list(ema.decays), "calls": ema.calls, "updates": ema.updates}


def parse_entry(entry: Mapping[str, Any], where: str) -> tuple[list[float], tuple[int, int]]:
    """Return the decays, and the calls and updates, of a manifest's entry. Raise CheckpointError if
    it is invalid."""
    decays, counts = entry.get("decays"), (entry.get("calls"), entry.get("updates"))
    if not isinstance(decays, list) or not all(type(each) is float for each in decays):
        raise CheckpointError(f"'{where}' has invalid decays of averages: {decays!r:.80}")
    calls, updates = counts
    if type(calls) is not int or type(updates) is not int or not 0 <= updates <= calls:
        raise CheckpointError(f"'{where}' has invalid counts of averages: {counts!r:.80}")
    return decays, (calls, updates)


class AveragesLoad:
    """Loads an EMA. Creating it changes nothing; it raises RuntimeError, which lists what does not
    fit."""

    def __init__(self, ema: EMA, found: Checkpoint) -> None:
        if found.averages is None:
            raise RuntimeError(
                f"'{found.path}' has no averages: omit ema to load the rest; the EMA then begins "
                "with its next update()"
            )
        self._ema, self._counts = ema, found.average_counts
        self._copies: list[Copy] = []
        problems = []
        ours, theirs = sorted(ema.decays), sorted(found.averages)
        if ours != theirs:
            problems.append(f"its decays are {theirs}, but the EMA's are {ours}")
        for decay, averages in zip(ema.decays, ema.averages, strict=True):
            if decay in found.averages:
                problems += self._plan(found.averages[decay], averages, stem_of(decay))
        if problems:
            head = f"Error(s) in loading the averages of '{found.path}':"
            raise RuntimeError("\n\t".join([head, *problems]))

    def _plan(
        self, entries: Mapping[str, Readable], averages: list[Tensor], stem: str
    ) -> list[str]:
        """Plan the copies of one decay; return what does not fit."""
        left, problems = dict(entries), []
        for (name, param), average in zip(self._ema.params.items(), averages, strict=True):
            part, entry = part_of(param), left.pop(plain_name(name), None)
            shape = tuple(average.shape) if part is None else part.shape
            if entry is None:
                problems.append(f"{stem} lacks '{plain_name(name)}'")
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
