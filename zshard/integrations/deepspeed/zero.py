"""`deepspeed.zero`: Init and GatheredParameters, over zshard's meta device and full parameters.

Scripts keep the lines that use them. Init builds on the meta device, and initialize() then creates
the values one unit at a time; GatheredParameters unshards the units of the parameters. An engine's
parameters have DeepSpeed's attributes, so scripts that save weights see that they must gather.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zshard.api import (
    PublicCall,
    ShardParameter,
    WholeParameter,
    full_params,
    may_stay_open,
    part_of,
    take_from,
    to_local,
    warn,
)

__all__ = [
    *("GatheredParameters", "Init", "ZeroParamStatus"),
    *("register_external_parameter", "unregister_external_parameter"),
]


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's enum: whether this rank has the full parameter now. No gather is ever in
    flight."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _OfEngine:
    """An attribute that only parameters of an engine have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, param: Tensor | None, owner: type) -> Any:
        if param is None:  # torch.overrides skips attributes that are None
            return None
        if "ds_id" not in vars(param):
            raise AttributeError(f"'{owner.__name__}' object has no attribute '{self._name}'")
        is_cut = isinstance(param, ShardParameter)  # now
        if self._name == "ds_tensor":
            return to_local(param).view(-1) if is_cut else None
        return ZeroParamStatus.NOT_AVAILABLE if is_cut else ZeroParamStatus.AVAILABLE


_ids = itertools.count()


def describe(params: Iterable[nn.Parameter]) -> None:
    """Give an engine's parameters DeepSpeed's attributes: ds_id, ds_shape, ds_numel, ds_status and
    ds_tensor. As in DeepSpeed, parameters that every rank has in full get none."""
    for cls, name in itertools.product(
        (ShardParameter, WholeParameter), ("ds_status", "ds_tensor")
    ):
        if name not in vars(cls):
            setattr(cls, name, _OfEngine(name))
    for param in params:
        part = part_of(param)
        if part is not None and part.is_cut:
            shape = torch.Size(part.shape)
            vars(param).update(ds_id=next(_ids), ds_shape=shape, ds_numel=shape.numel())


class ZeroInit(contextlib.AbstractContextManager[None]):
    """Context manager in which modules are built on the meta device, without memory.

    zshard.initialize() creates their values one unit at a time, by each module's
    reset_parameters() and the model's `_init_weights(module)`, as models of transformers have it,
    so the full model never has to fit in memory. Values that constructors set otherwise are lost:
    load a checkpoint after initialize(), or set them with model.apply(). The first forward names a
    parameter that is still without values.

    Args:
        module, arguments: DeepSpeed's; module must be None, the others have no effect.
        enabled: False: do nothing.
    """

    def __init__(
        self, module: nn.Module | None = None, *, enabled: bool = True, **arguments: object
    ):
        if module is not None:
            raise NotImplementedError("zero.Init(module=): build the module within zero.Init()")
        self._enabled, self._device = enabled, torch.device("meta")

    def __enter__(self) -> None:
        if not self._enabled:
            return
        warn(
            "zero.Init() builds on the meta device: reset_parameters() and _init_weights() set the "
            "values later, so call from_pretrained() outside of it"
        )
        self._device.__enter__()

    def __exit__(self, *error: object) -> None:
        if not self._enabled:
            return
        self._device.__exit__(*error)
        if isinstance(error[1], RuntimeError) and "from_pretrained" in str(error[1]):
            raise RuntimeError(
                "from_pretrained() cannot load values within zero.Init(): call it outside, or build"
                " from the config, and call zshard.load(folder, model) later"
            ) from error[1]


Init = ZeroInit  # DeepSpeed's name; zshard has a different type of that name


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module reads in its forward is gathered anyway."""


unregister_external_parameter = register_external_parameter


@contextlib.contextmanager
@may_stay_open
def GatheredParameters(
    params: Tensor | Iterable[Tensor] | None,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Context manager that unshards these parameters on all ranks.

    Collective: call it on all ranks, outside forward and backward. The units that have the
    parameters are unsharded.

    Args:
        params: a parameter, or several. Those that are not sharded stay as they are.
        modifier_rank: the rank whose changes count. Default: None, changes are discarded.
        fwd_module: no effect.
        enabled: False: do nothing.
    """
    wanted = [params] if isinstance(params, Tensor) else list(params or ())
    parts = filter(None, map(part_of, wanted if enabled else ()))
    states = list(dict.fromkeys(state for part in parts if (state := part.state) is not None))
    with full_params(states, writeback=modifier_rank is not None):
        yield
        if modifier_rank is None:
            return
        with PublicCall("GatheredParameters()"):
            for state in states:
                comm = state.comms.all
                if not 0 <= modifier_rank < comm.world:
                    limit = f"world size {comm.world}"
                    raise ValueError(f"modifier_rank={modifier_rank} is out of range for {limit}")
                for param in state.unit.params if comm.world > 1 else ():
                    take_from(modifier_rank, comm, param.detach())
