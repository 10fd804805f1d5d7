"""A model is sharded: ranks agree on it, see whether it fits, and build its units.

Nothing changes before every rank has found that it can go on, so an error leaves the
module as it was. What follows is in order: units take their values, one at a time (`build.py`), and
then the model's buffers do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zshard.guard.draws import keep_generator
from zshard.memory.dry_run import Planned
from zshard.memory.fits import MemoryLimit, check_fits
from zshard.memory.spare import Spare, keep_between, words_of
from zshard.memory.step_fits import watch_first_steps
from zshard.model.build import (
    build,
    class_for,
    inner_comms,
    last_writes,
    modules_apart,
    sync_buffers,
)
from zshard.model.whole_counts import count_in_parts
from zshard.precision import cast_buffers
from zshard.ranks.agreement import check_agreement, on_all_ranks, told_to_all_ranks
from zshard.ranks.devices import CPU
from zshard.ranks.groups import resolve_groups
from zshard.ranks.nccl import NcclOptions
from zshard.ranks.script_position import PublicCall
from zshard.ranks.transports import Comms, check_settings, comm_for, comms_for
from zshard.ranks.wire import check_wire_over
from zshard.run.idle_cores import warn_of_idle_cores
from zshard.units.units import BufferSync, Options, state_of
from zshard.wrap.initial_values import InitialValues, check_unit, facts_of
from zshard.wrap.late_parameters import watch
from zshard.wrap.left_out import check_in_forward
from zshard.wrap.meta import Init, Materializer
from zshard.wrap.quantized import settle


class Ranks(NamedTuple):
    """The ranks to shard over, what they train on, and how they communicate."""

    device: str
    process_group: Any  # or a pair, for a hybrid strategy
    device_mesh: DeviceMesh | None
    transport: str | NcclOptions | None
    timeout: float | None


class Initialization(NamedTuple):
    """Where the values of parameters and buffers come from.

    init: initializes a module on the meta device; None: its reset_parameters(). from_rank_0: take
    those of rank 0. buffers_in_forward: and its buffers in forwards again. ignored: modules whose
    values are left alone.
    """

    init: Init | None
    from_rank_0: bool
    buffers_in_forward: BufferSync
    ignored: set[nn.Module]


@PublicCall("FSDP()")
def shard_model(
    module: nn.Module,
    planned: list[Planned],
    options: Options,
    ranks: Ranks,
    values: Initialization,
    memory_limit: MemoryLimit,
) -> None:
    """Shard a model in place. Collective.

    planned: its units with their options, children first, the root last. options: those of the
    model, which apply where a unit has none of its own.
    """
    comms = _meet(module, planned, options, ranks, values, memory_limit)
    options = options._replace(keep=keep_between(options.keep, comms.shard_group))
    planned = [(spec, each._replace(keep=options.keep)) for spec, each in planned]
    settle(spec for spec, _ in planned)
    keep_generator(comms.all)
    sharing = check_fits(module, planned, comms, memory_limit, ranks.device)
    if ranks.device == CPU and comms.all.world > 1:
        warn_of_idle_cores()
    source = comms.all if values.from_rank_0 and comms.all.world > 1 else None
    materializer = Materializer(module, values.init, values.ignored)
    initial = InitialValues(module, materializer, source, ranks.device)
    build(module, planned, comms, initial)
    with told_to_all_ranks(comms.all):
        initial.give_buffers(values.ignored | modules_apart(module, comms))
    if comms.all.world > 1:
        watch(module, values.ignored)
    cast_buffers(module, options.precision, values.ignored)
    if values.buffers_in_forward:
        sync_buffers(module, values.buffers_in_forward)
    count_in_parts(module)
    watch_first_steps(module, memory_limit, sharing, ranks.device)
    if options.keep.measured:
        state_of(module).spare = Spare(module, memory_limit, sharing)
    by_default = ranks.process_group is None and ranks.device_mesh is None
    state_of(module).is_alone = by_default and not dist.is_initialized()
    given = _shard_group_given(ranks)
    for spec, _ in planned:
        state_of(spec.module).group_given = given
    check_in_forward(module, materializer.left_out)
    with last_writes(module):
        pass


def _shard_group_given(ranks: Ranks) -> Any:
    """The process group to shard over, as the script passed it; None: the default."""
    if ranks.device_mesh is not None:
        return ranks.device_mesh.get_group(-1 if ranks.device_mesh.ndim > 1 else None)
    pair = ranks.process_group
    return pair[0] if isinstance(pair, tuple) else pair


def _meet(
    module: nn.Module,
    planned: list[Planned],
    options: Options,
    ranks: Ranks,
    values: Initialization,
    memory_limit: MemoryLimit,
) -> Comms:
    """Return how the ranks communicate, once all of them agree on the model and can shard it."""
    settings = ranks.transport, ranks.timeout, ranks.device
    check_settings(*settings)
    groups = resolve_groups(ranks.process_group, ranks.device_mesh, options.strategy)
    comm = comm_for(groups.world, *settings)
    specs = [spec for spec, _ in planned]
    facts = facts_of(module, specs, options, not values.from_rank_0)
    facts.append(("memory_limit", "None" if memory_limit is None else "given"))
    facts.append(("keep_gathered", words_of(options.keep)))
    check_agreement(comm, facts)
    check_wire_over(comm, options.wire)
    comms = inner_comms(module, comms_for(groups, options.strategy, comm, settings))
    with on_all_ranks(comm):
        for spec in specs:  # what cannot be sharded at all has its own words
            check_unit(spec)
            class_for(type(spec.module))
    return comms
