"""`predict_memory(module)`: the memory that FSDP(module) with the same arguments would take.

Translates arguments as FSDP does, then dry-runs the model in a world without peers, which changes
nothing (`memory/dry_run.py`).
"""

from __future__ import annotations

from torch import nn

from zshard.memory.dry_run import World
from zshard.memory.report import predict
from zshard.memory.spare import parse_keep
from zshard.offload import offload_of, offload_on
from zshard.options import OffloadLike, PrecisionLike, StrategyLike, WrapPolicyLike, unit_options
from zshard.precision import precision_of
from zshard.ranks.devices import CPU
from zshard.ranks.wire import Wire, check_wire
from zshard.strategy import strategy_of
from zshard.units.units import Options, Prefetch, is_unit
from zshard.wrap import plan_units

STATE_TENSORS = {"adam": 2, "adamw": 2, "sgd": 0, "rmsprop": 1, "adagrad": 1}
"""Number of parameter-sized state tensors per parameter, by optimizer class."""


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
        optimizer: "adamw", "adam", "sgd", "rmsprop" or "adagrad"; or the number of parameter-sized
            state tensors that it keeps per parameter; None for no optimizer.
        local_world_size: ranks per host, over which a hybrid strategy shards. None: all.
        offload: as for FSDP. Bytes on disk are reported as "offloaded" and not included in
            "total". The directory need not exist.
        keep_gathered: as for FSDP. "auto" counts as False: what it keeps depends on what the first
            steps leave, and takes no more than that.
        wire: as for FSDP.

    Returns a dict like that of `model.memory("predicted")`, which ends with "total". Activations
    and torch's own memory are not included; with world size 1, gradients are torch's own as well.

    Raises ValueError or TypeError for arguments that FSDP would reject, for unknown names, and if
    the module contains sharded modules.
    """
    tensors = _state_tensors(optimizer)
    options = Options(
        strategy_of(strategy),
        precision_of(mixed_precision),
        Prefetch(),
        offload_on(offload_of(offload), CPU),
        parse_keep(keep_gathered, "auto", CPU),
        check_wire(wire, CPU),
    )
    world = _world(world_size, local_world_size, transport)
    specs = plan_units(module, auto_wrap_policy)
    _check_plain(module)
    planned = [(spec, unit_options(spec, options)) for spec in specs]
    return predict(module, planned, world, tensors)


def _check_plain(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if each is not module and is_unit(each):
            raise ValueError(
                f"predict_memory(): '{name}' is sharded already, so its memory would be left out: "
                "call predict_memory() before the first FSDP(...) of the model, with the process "
                "group's size for a module that has one of its own, or FSDP(...) and then "
                'model.memory("predicted")'
            )


def _state_tensors(optimizer: str | int | None) -> int:
    if optimizer is None:
        return 0
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return optimizer
    name = optimizer.lower() if isinstance(optimizer, str) else None
    if name not in STATE_TENSORS:
        known = ", ".join(repr(each) for each in STATE_TENSORS)
        raise ValueError(
            f"unknown optimizer {optimizer!r}: expected one of {known}, or the number of state "
            "tensors that it keeps per parameter"
        )
    return STATE_TENSORS[name]


def _world(size: int, local: int | None, transport: str) -> World:
    local = size if local is None else local
    for name, value in (("world_size", size), ("local_world_size", local)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if local < size and size % local != 0:
        raise ValueError(f"world_size={size} is not a multiple of local_world_size={local}")
    if transport not in ("auto", "shm", "hosts", "c10d"):
        raise ValueError(
            f"unknown transport {transport!r}: expected 'auto', 'shm', 'hosts' or 'c10d'"
        )
    on_one_host = local >= size
    if transport == "shm" and not on_one_host:
        raise ValueError(
            f"transport='shm' requires all ranks on one host, but local_world_size={local} is less "
            f"than world_size={size}"
        )
    if transport == "hosts" and on_one_host:
        raise ValueError("transport='hosts' requires several hosts: pass local_world_size")
    inside = "c10d" if transport == "c10d" else "shm"
    if on_one_host:
        return World(size, size, inside, inside)
    between = "c10d" if transport == "c10d" else "hosts"
    return World(size, local, between, inside, local)
