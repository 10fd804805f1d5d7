"""The error text for a model that does not fit in memory: what it needs, and which settings need
less.

Each alternative is listed with the bytes that it would take, from the same estimates as the check
itself, so users need not try them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zshard.memory.dry_run import DryRun, Planned, World, dry_comms
from zshard.offload import Offload
from zshard.precision import in_dtype
from zshard.strategy import ShardingStrategy
from zshard.units.units import Keep

_MIB = 1 << 20


class Model(NamedTuple):
    """The model that does not fit. partly: earlier calls have already made some of its units."""

    module: nn.Module
    planned: Sequence[Planned]
    world: World
    dry_run: DryRun
    partly: bool


class Shortage(NamedTuple):
    """A rank that lacks memory.

    missing: bytes short, that is, `needed` - `limit`. source: which limit, for the message.
    optimizer: bytes of Adam's state on that rank. is_with_optimizer: `needed` includes them.
    """

    missing: int
    rank: int
    needed: int
    limit: int
    source: str
    optimizer: int
    is_with_optimizer: bool


def explain(model: Model, short: Shortage, what: str) -> str:
    """Return the message. what: what the memory is needed for."""
    parts = model.dry_run.predict()
    by_part = ", ".join(
        f"{part} {_mib(size)}" for part, size in parts.items() if size and part != "total"
    )
    net = " beyond what its parameters already occupy" if short.needed < parts["total"] else ""
    lines = [
        f"this {type(model.module).__name__} does not fit in memory: rank {short.rank} of "
        f"{model.world.size} needs {_mib(short.needed)} MiB for {what}{net}, but only "
        f"{_mib(short.limit)} MiB are available ({short.source}).",
        f"By part, in MiB: {by_part}; Adam's state adds {_mib(short.optimizer)}.",
    ]
    ways = [] if model.partly else list(_ways_out(model, parts["total"], short))
    if ways:
        lines.append(f"Alternatives to these {_mib(parts['total'])} MiB:")
        lines += [f"  {way}" for way in ways]
    lines.append(f"  {_smaller_units(model)}")
    lines.append("Pass memory_limit=None to wrap the model anyway.")
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"


def _ways_out(model: Model, total: int, short: Shortage) -> Iterator[str]:
    """Yield a line for each alternative that takes less memory, with its size and that of Adam's
    state there."""
    with_adam = total + short.optimizer - short.missing if short.is_with_optimizer else None
    room = total - short.missing if with_adam is None else with_adam
    for words, (size, adam) in _alternatives(model):
        if size >= total:
            continue
        fits = ""
        if size + adam <= room:
            fits = " (fits, with Adam's state)"
        elif size <= room:
            fits = f" (fits, but not with Adam's state, {_mib(adam)} MiB more)"
        yield f"{words}: {_mib(size)} MiB{fits}"


def _alternatives(model: Model) -> Iterator[tuple[str, tuple[int, int]]]:
    usual = model.planned[-1][1]
    if usual.offload is None:
        words = (
            "offload=zshard.Offload(directory=..., grads=True), which also puts Adam's state on "
            "disk"
        )
        on_disk = Offload(directory=".", grads=True)
        yield words, _total(model, _changed(model, offload=on_disk))
    if usual.keep.most > 0:
        yield "keep_gathered=False", _total(model, _changed(model, keep=Keep()))
    if model.world.size > 1:
        if usual.strategy is not ShardingStrategy.FULL_SHARD:
            yield 'strategy="full_shard"', _total(model, _sharded(model))
        words = "memory_limit=None and model.optimizer_in_backward(...), which keeps no gradients"
        yield words, _total(model, model.planned, stepped=True)
    more = 2 * model.world.size
    words = f"full_shard on {more} ranks, each with as much memory"
    yield words, _total(model, _sharded(model), ranks=more)
    if usual.precision.compute is None:
        changed = _changed(model, precision=in_dtype(torch.bfloat16))
        yield "mixed_precision=MixedPrecision(torch.bfloat16)", _total(model, changed)
        words = "model.bfloat16() and AdamW(..., stochastic_rounding=True)"
        yield words, _total(model, model.planned, dtype=torch.bfloat16)


def _changed(model: Model, **fields: Any) -> list[Planned]:
    return [(spec, options._replace(**fields)) for spec, options in model.planned]


def _sharded(model: Model) -> list[Planned]:
    return _changed(model, strategy=ShardingStrategy.FULL_SHARD)


def _total(
    model: Model,
    planned: Sequence[Planned],
    *,
    ranks: int | None = None,
    stepped: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[int, int]:
    """Return the bytes per rank under other settings, and the bytes of Adam's state."""
    world = model.world if ranks is None else model.world._replace(size=ranks, shard_group=ranks)
    comms = dry_comms(world, planned[-1][1].strategy)
    made = DryRun(model.module, planned, comms, dtype=dtype)
    state = 2 * made.trained_bytes()
    if dtype is not None:
        state = sum(2 * unit.bytes["shard"] for unit in [*made.units, *made.inner])
    return made.predict(stepped)["total"], state


def _smaller_units(model: Model) -> str:
    """Return the line about the largest unit."""
    largest = max(model.dry_run.units, key=lambda unit: unit.bytes["full"])
    name, size = largest.name or "(root)", largest.bytes
    return (
        f"smaller units (auto_wrap_policy): the largest, '{name}', takes {_mib(size['full'])} MiB "
        f"unsharded, in each slot and again in each bucket ({_mib(size['bucket'])} MiB)"
    )
