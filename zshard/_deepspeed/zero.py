"""`deepspeed.zero`: Init and GatheredParameters, over zshard's meta device and full parameters.

The one idea: a script that uses them keeps its lines. Init builds on the meta device, and
initialize() then creates the values one unit at a time; GatheredParameters finds the units of the
parameters among the models that initialize() has sharded.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zshard._errors import stacklevel
from zshard._model.summon import full_params
from zshard._units.units import State, units_of

__all__ = ["GatheredParameters", "Init"]

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember(module: nn.Module) -> None:
    """Let GatheredParameters find the parameters of this sharded model."""
    _models.add(module)


class ZeroInit(contextlib.AbstractContextManager[None]):
    """Context manager in which modules are built on the meta device, without memory.

    zshard.initialize() creates their values one unit at a time, by each module's
    reset_parameters(), so the full model never has to fit in memory. Values that constructors set
    otherwise are lost: load a checkpoint after initialize(), or set them with model.apply().

    Args:
        module, arguments: DeepSpeed's; module must be None, the others have no effect.
        enabled: False: do nothing.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **arguments: Any):
        if module is not None:
            raise NotImplementedError(
                "zero.Init(module=...) is not supported: build the module within `with "
                "zero.Init():`"
            )
        self._enabled, self._device = enabled, torch.device("meta")

    def __enter__(self) -> None:
        if not self._enabled:
            return
        warnings.warn(
            "zero.Init() builds the model on the meta device: zshard.initialize() calls each "
            "module's reset_parameters(), and values that constructors set otherwise are lost",
            stacklevel=stacklevel(),
        )
        self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)


Init = ZeroInit  # DeepSpeed's name; zshard has another type of that name


@contextlib.contextmanager
def GatheredParameters(
    params: Tensor | Iterable[Tensor] | None,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Context manager in which these parameters are full, on all ranks.

    Collective: call it on all ranks, outside forward and backward. The units that have the
    parameters are unsharded.

    Args:
        params: a parameter, or several. Those that are not sharded stay as they are.
        modifier_rank: the rank whose changes count. Default: None, changes are discarded.
        fwd_module: no effect.
        enabled: False: do nothing.
    """
    wanted = [params] if isinstance(params, Tensor) else list(params or ())
    states = _states_of(wanted) if enabled else []
    with full_params(states, writeback=modifier_rank is not None):
        yield
        if modifier_rank is not None:
            for state in states:
                _take_from(state, modifier_rank)


def _states_of(params: list[Tensor]) -> list[State]:
    """The states of the units that have one of the parameters, in the models' order."""
    wanted = {id(param) for param in params}
    return [
        state
        for model in list(_models)
        for _, state in units_of(model)
        if any(id(param) in wanted for param in state.unit.params)
    ]


def _take_from(state: State, rank: int) -> None:
    """Give all ranks the values that the unit's full parameters have on a rank. Collective."""
    comm = state.comms.all
    if not 0 <= rank < comm.world:
        raise ValueError(f"modifier_rank={rank} is out of range for world size {comm.world}")
    with torch.no_grad():
        for param in state.unit.params if comm.world > 1 else ():
            values = param.detach().contiguous().cpu()
            if values.numel():
                comm.broadcast(values, rank)
                param.copy_(values)
