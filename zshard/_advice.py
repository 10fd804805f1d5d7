"""What to say where a model does not fit: how much of what is missing, and what would take less.

The one idea: each way out comes with the bytes that it would take, from the same outlines as the
refusal itself, so that nobody has to try them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zshard._model_outline import Outline, Planned, World, outline_comms
from zshard.offload import Offload
from zshard.precision import MixedPrecision, parse_precision
from zshard.strategy import ShardingStrategy

_MIB = 1 << 20
_MOST_TIMES = 1024  # as many ranks are worth a thought


class Model(NamedTuple):
    """The model that does not fit. partly: some of its units are there already."""

    module: nn.Module
    planned: Sequence[Planned]
    world: World
    outline: Outline
    partly: bool


class Shortage(NamedTuple):
    """missing: bytes that are not there. rank, needed, limit, source: where, and what of what.
    optimizer: bytes of Adam's state there."""

    missing: int
    rank: int
    needed: int
    limit: int
    source: str
    optimizer: int


def explain(model: Model, short: Shortage, what: str) -> str:
    """The message. what: the words for all that is needed."""
    parts = model.outline.predict()
    by_part = ", ".join(
        f"{part} {_mib(size)}" for part, size in parts.items() if size and part != "total"
    )
    net = " more than its parameters give back" if short.needed < parts["total"] else ""
    lines = [
        f"this {type(model.module).__name__} does not fit: what {what} on rank {short.rank} of "
        f"{model.world.size} takes {_mib(short.needed)} MiB{net}, and there are "
        f"{_mib(short.limit)} MiB ({short.source}).",
        f"By part, in MiB: {by_part}; besides, the state of Adam {_mib(short.optimizer)}.",
    ]
    ways = [] if model.partly else list(_ways_out(model, parts["total"], short))
    if ways:
        lines.append(f"Instead of {_mib(parts['total'])} MiB:")
        lines += [f"  {way}" for way in ways]
    lines.append(f"  {_smaller_units(model)}")
    lines.append("memory_limit=None wraps it all the same.")
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"


def _ways_out(model: Model, total: int, short: Shortage) -> Iterator[str]:
    """A line for each way that takes less, with its bytes."""
    room = total - short.missing
    for words, size in _alternatives(model):
        if size < total:
            yield f"{words}: {_mib(size)} MiB{', which fits' if size <= room else ''}"
    count = _fewest_ranks(model, room)
    if count is not None:
        size = _total(model, _sharded(model), ranks=count)
        words = f"from {count} ranks on, each with as much memory, and full_shard"
        yield f"{words}: {_mib(size)} MiB, which fits"


def _fewest_ranks(model: Model, room: int) -> int | None:
    """With how many ranks a fully sharded model takes at most `room`; None: not with a thousand
    times as many. What a rank takes falls with their number, so half of them are left out at a
    time."""
    planned = _sharded(model)
    below, enough = model.world.size, 2 * model.world.size
    while _total(model, planned, ranks=enough) > room:
        if enough >= _MOST_TIMES * model.world.size:
            return None
        below, enough = enough, 2 * enough
    while enough - below > 1:
        middle = (below + enough) // 2
        if _total(model, planned, ranks=middle) > room:
            below = middle
        else:
            enough = middle
    return enough


def _alternatives(model: Model) -> Iterator[tuple[str, int]]:
    usual = model.planned[-1][1]
    if usual.offload is None:
        words = (
            "offload=zshard.Offload(directory=..., grads=True), with Adam's state on the disk, too"
        )
        on_disk = Offload(directory=".", grads=True)
        yield words, _total(model, _changed(model, offload=on_disk))
    if model.world.size > 1:
        if usual.strategy is not ShardingStrategy.FULL_SHARD:
            yield 'strategy="full_shard"', _total(model, _sharded(model))
        words = "memory_limit=None and model.optimizer_in_backward(...), which holds no gradients"
        yield words, _total(model, model.planned, stepped=True)
    if usual.precision.compute is None:
        half = parse_precision(MixedPrecision(torch.bfloat16))
        changed = _changed(model, precision=half)
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
) -> int:
    """Bytes that a rank takes with other settings."""
    world = model.world if ranks is None else model.world._replace(size=ranks, near=ranks)
    comms = outline_comms(world, planned[-1][1].strategy)
    return Outline(model.module, planned, comms, dtype=dtype).predict(stepped)["total"]


def _smaller_units(model: Model) -> str:
    """A line on the largest unit."""
    largest = max(model.outline.units, key=lambda unit: unit.bytes["full"])
    name, size = largest.name or "(root)", largest.bytes
    return (
        f"smaller units (auto_wrap_policy): the largest, '{name}', is {_mib(size['full'])} MiB "
        f"whole, and as much in each bucket ({_mib(size['bucket'])} MiB) and slot"
    )
