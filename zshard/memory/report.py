"""A model in numbers: its memory (now, peak, predicted), its parameters, and the tables of both.

predict_memory() translates arguments as FSDP does, then runs the model dry, without peers.
The C core counts and predicts memory (csrc/engine/reserve.c); this file adds the state of the
optimizers that have stepped the model's parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard._errors import check_choice
from zshard.memory.dry_run import DryRun, World, dry_comms, trained_bytes
from zshard.optim.hooks import seen_optimizers
from zshard.optim.sharded_state import entries_of
from zshard.options import OffloadLike, PrecisionLike, StrategyLike, WrapPolicyLike, parse_options
from zshard.ranks.wire import Wire, wire_words
from zshard.units.units import State, is_unit, state_of, units_of, without_memory
from zshard.wrap import plan_units


def memory_of(module: nn.Module, what: str) -> dict[str, int]:
    """See FSDP.memory."""
    check_choice("memory(): what", what, ("now", "peak", "predicted"))
    state = state_of(module)
    states = [each for _, each in units_of(module)]
    of_optimizers = _optimizer_bytes(states)
    state.optimizer_peak = max(state.optimizer_peak, of_optimizers)
    if what == "now":
        return with_optimizer(_of_engines(states, _core.Engine.memory), of_optimizers)
    if what == "peak":
        return with_optimizer(_of_engines(states, _core.Engine.peak), state.optimizer_peak)
    units = [(each.unit, each.unit.params) for each in states]
    in_memory, elsewhere = (2 * trained_bytes(units, where) for where in (False, True))
    predicted = _of_engines(states, lambda engine: engine.predict(False))
    return with_optimizer(predicted, of_optimizers or in_memory, elsewhere)


def _of_engines(
    states: Iterable[State], count: Callable[[_core.Engine], dict[str, int]]
) -> dict[str, int]:
    """Return the sums over the models of these units: several models if some units have a process
    group of other ranks. Each transport counts once."""
    models = {state.unit.engine_id: state for state in states}
    parts: Counter[str] = Counter()
    transports: Counter[int] = Counter()
    for state in models.values():
        of_model, group = count(state.unit.engine), id(state.comms.all)
        transport = of_model.pop("transport")
        transports[group] = max(transports[group], transport)
        of_model["total"] -= transport
        parts.update(of_model)
    total, offloaded, transport = parts.pop("total"), parts.pop("offloaded"), transports.total()
    return {**parts, "transport": transport, "offloaded": offloaded, "total": total + transport}


def with_optimizer(parts: dict[str, int], optimizer: int, elsewhere: int = 0) -> dict[str, int]:
    """Return the parts with the optimizer's bytes added, and their total last.

    elsewhere: bytes of optimizer state that is offloaded, to be added to that part.
    """
    total = parts.pop("total") + optimizer
    offloaded = parts["offloaded"] + elsewhere
    return {**parts, "offloaded": offloaded, "optimizer": optimizer, "total": total}


def without_new_state(states: Sequence[State]) -> int:
    """Return the bytes that a step with these units takes, but for the state of an optimizer that
    makes its first."""
    parts = _of_engines(states, lambda engine: engine.predict(False))
    return parts["total"] + _optimizer_bytes(states)


def _optimizer_bytes(states: Iterable[State]) -> int:
    """Return the bytes of state that known optimizers keep for these units."""
    params = [
        param for state in states for param in state.unit.params if not _core.offloads_state(param)
    ]
    return sum(
        value.numel() * value.itemsize
        for optimizer in seen_optimizers()
        for param in params
        for value in entries_of(optimizer.state, param).values()
        if isinstance(value, torch.Tensor)
    )


# --- prediction -----------------------------------------------------------------------------------


def predict_memory(
    module: nn.Module,
    world_size: int,
    *,
    strategy: StrategyLike = "full_shard",
    auto_wrap_policy: WrapPolicyLike | None = "auto",
    mixed_precision: PrecisionLike | None = None,
    transport: str = "auto",
    optimizer: str | int | None = "adamw",
    local_world_size: int | None = None,
    offload: OffloadLike | None = None,
    keep_gathered: bool | int | str = "auto",
    wire: str | Wire | None = None,
    no_sync: bool = False,
) -> dict[str, int]:
    """Predict the memory that FSDP with these arguments takes on rank 0, in bytes by part.

    Other ranks take about the same. The module is not changed and may be on the meta device; no
    process group is needed.

    Args:
        module: the model, not yet wrapped.
        world_size: number of ranks.
        strategy, auto_wrap_policy, mixed_precision: as for FSDP.
        transport: "shm", "hosts", "c10d" or "auto" ("shm" if all ranks are on one host, else
            "hosts").
        optimizer: the class of torch.optim, such as "adamw" or "sgd", or of zshard, such as
            "adamw8bit" (SGD8bit with momentum, all without master) or "muon" (as Muon(model)); or
            the number of parameter-sized state tensors that it keeps per parameter; None for no
            optimizer.
        local_world_size: ranks per host, over which a hybrid strategy shards. None: all.
        offload: as for FSDP. Bytes on disk are reported as "offloaded" and not included in
            "total". The directory need not exist.
        keep_gathered: as for FSDP. "auto" counts as False: what it keeps depends on what the first
            steps leave, and takes no more than that.
        wire: as for FSDP.
        no_sync: True: steps accumulate micro-batches within no_sync(), so each rank has full
            gradients, in the parameters' dtype, until the last backward. Default: False.

    Returns a dict like that of `model.memory("predicted")`, which ends with "total". Activations
    and torch's own memory are not included; with world size 1, gradients are torch's own as well.

    Raises ValueError or TypeError for arguments that FSDP would reject, for unknown names, and if
    the module contains sharded modules.
    """
    arguments: dict[str, Any] = {
        "strategy": strategy,
        "mixed_precision": mixed_precision,
        "offload": offload,
    }
    arguments |= {"keep_gathered": keep_gathered, "wire": wire}
    world = _world(world_size, local_world_size, transport)
    run = dry_run_of(module, auto_wrap_policy, arguments, world)
    for unit in run.units if no_sync else ():
        unit.sync = False
    in_memory, elsewhere = run.state_bytes(optimizer)
    return with_optimizer(run.engine.predict(False), in_memory, elsewhere)


def dry_run_of(
    module: nn.Module,
    policy: WrapPolicyLike | None,
    arguments: Mapping[str, Any],
    world: tuple[int, int, str, str, int],
) -> DryRun:
    """Return a dry run of a module that is not wrapped, with arguments of FSDP(). world: as World.
    Raises what predict_memory() raises."""
    options = parse_options(arguments)
    specs = plan_units(module, policy, options=options)
    for name, each in module.named_modules():
        if each is not module and is_unit(each):
            raise ValueError(
                f"predict_memory(): '{name}' is sharded already: call it before the first "
                'FSDP(...) of the model, or use model.memory("predicted")'
            )
    return DryRun(module, specs, dry_comms(World(*world), options.strategy))


def _world(size: int, local: int | None, transport: str) -> World:
    local = size if local is None else local
    for name, value in (("world_size", size), ("local_world_size", local)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if local < size and size % local != 0:
        raise ValueError(f"world_size={size} is not a multiple of local_world_size={local}")
    check_choice("transport", transport, ("auto", "shm", "hosts", "c10d"))
    on_one_host = local >= size
    if transport == ("hosts" if on_one_host else "shm"):
        raise ValueError(
            f"transport={transport!r} does not fit world_size={size} and local_world_size={local}: "
            "'shm' requires all ranks on one host, 'hosts' several hosts"
        )
    inside, between = ("c10d", "c10d") if transport == "c10d" else ("shm", "hosts")
    if on_one_host:
        return World(size, size, inside, inside)
    return World(size, local, between, inside, local)


# --- parameters -----------------------------------------------------------------------------------


def num_parameters(model: nn.Module, trainable_only: bool = False) -> int:
    """Return the number of elements of a model's full parameters, the same on all ranks. Does not
    communicate.

    Args:
        model: a model, or a part of one, sharded or not. Tied parameters count once.
        trainable_only: count parameters that require a gradient only. Default: False.
    """
    params = (param for _, param in full_named_parameters(model))
    return sum(p.numel() for p in params if p.requires_grad or not trainable_only)


def full_named_parameters(
    module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    """As named_parameters(), with full shapes and without memory."""
    for name, param in type(module).named_parameters(module, *args, **kwargs):
        info = _core.shard_info(param)
        yield name, param if info is None else without_memory(param, info["shape"], param.device)


# --- tables ---------------------------------------------------------------------------------------


def summary_of(module: nn.Module) -> str:
    """See FSDP.summary(): a line per unit, totals, and the table of memory."""
    root, states = state_of(module), [state for _, state in units_of(module)]
    rows = [("unit", "parameters", "unsharded", "per rank", "strategy")]
    totals: Counter[str] = Counter()
    for state in states:
        unit = state.unit
        numel = sum(math.prod(unit.param(i)["shape"]) for i in range(unit.n_params))
        sizes = {**unit.bytes, "numel": numel}
        totals.update(sizes)
        ranks = f" over {state.comms.all.world} rank(s)" if state.is_apart(root.comms) else ""
        stays = ", stays gathered" if unit.is_kept else ""
        read = "" if unit.read_by is None else f", read by {unit.read_by or '(root)'}"
        notes = unit.strategy + ranks + stays + read
        rows.append((unit.name or "(root)", *_cells_of(sizes), notes))
    rows.append((f"{len(states)} units", *_cells_of(totals), ""))
    head = _head_of(root, [state.unit for state in states])
    return f"{head}\n{_table(rows, left=(0, 4))}\n\n{_memory_table(module)}"


def _cells_of(sizes: Mapping[str, int]) -> tuple[str, str, str]:
    return f"{sizes['numel']:,}", _words_of(sizes["full"]), _words_of(sizes["shard"])


def _head_of(root: State, units: list[_core.Unit]) -> str:
    comm, shards, shard_group, replica_group = root.comms
    parts = [f"zshard: rank {comm.rank} of {comm.world}, transport {comm.transport}"]
    if shards.world < comm.world:
        replicas = f"{comm.world // shards.world} replicas of {shards.world} rank(s) each"
        parts.append(f"{replicas}, transport {shards.transport}")
    if replica_group is not None:
        ranks = f"secondary shards over {shard_group.world} rank(s)"
        parts.append(f"{ranks}, transport {shard_group.transport}")
    kept, _, costs = root.unit.engine.gathered()
    if costs and root.model.spare is not None and root.model.spare.is_open:
        parts.append('keep_gathered="auto" decides after the second step')
    elif kept:
        parts.append(f"{_words_of(kept)} stay gathered from forward to backward")
    return "; ".join(filter(None, [*parts, wire_words(comm, root.options.wire, units)]))


def _memory_table(module: nn.Module) -> str:
    """Return the table of memory in MiB, one line per part that is not 0 in all columns."""
    kinds = {kind: memory_of(module, kind) for kind in ("predicted", "now", "peak")}
    rows = [("memory, MiB", *kinds)]
    for part in kinds["now"]:
        numbers = [bytes_by_part[part] for bytes_by_part in kinds.values()]
        if any(numbers) or part == "total":
            rows.append((part, *(f"{number / (1 << 20):.1f}" for number in numbers)))
    return _table(rows, left=(0,))


def _table(rows: Sequence[tuple[str, ...]], left: Collection[int]) -> str:
    """Return rows as text, the head and the last one between rules. left: the columns that are
    aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _words_of(count: float) -> str:
    """Return a size for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
