"""Names of torch's wrappers that scripts use and zshard only answers: `model.rank`, no-op setters.

A model's own attributes win (`model/own_names.py`); many models have a `rank` or a `device`. Any
other name is an AttributeError, so hasattr() is False; the message names the page that lists the
alternatives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard.model.methods import GradientReductionHandle, check_bool
from zshard.model.own_names import ModelNamesFirst, YieldingName, yields_to_the_model
from zshard.ranks.transports import group_of
from zshard.strategy import ShardingStrategy
from zshard.units.units import State, state_of, units_of


def _sharding_strategy(state: State) -> ShardingStrategy:
    usual = state.options.strategy
    if state.unit.strategy == usual.in_group.value:
        return usual
    if usual.is_hybrid:  # set_reshard_after_forward() has changed it
        hybrids = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2
        return next(each for each in hybrids if each.in_group.value == state.unit.strategy)
    return ShardingStrategy(state.unit.strategy)


def _device(state: State) -> torch.device:
    return next((param.device for param in state.unit.params), torch.device("cpu"))


_OF_STATE: dict[str, Callable[[State], object]] = {
    # FSDP1
    "sharding_strategy": _sharding_strategy,
    "process_group": lambda state: (  # as in torch, None is the default group
        group_of(state.comms.shards) if state.group_given is None else state.group_given
    ),
    "rank": lambda state: state.comms.shards.rank,
    "world_size": lambda state: state.comms.shards.world,
    # DDP
    "device": _device,
    "device_ids": lambda state: [i] if (i := _device(state).index) is not None else None,
}

_PAGE = "docs/torch_names.md says what to use instead of names of torch's FSDP and DDP"


@yields_to_the_model
class TorchNames(ModelNamesFirst):
    """The names of torch's wrappers that take one line each."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # a parameter, buffer or child, or the model's own
        except AttributeError as error:
            raise AttributeError(f"{error}; {_PAGE}") from None

    # --- FSDP2 ------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward completes its reductions."""
        check_bool("is_last_backward", is_last_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward reduces over all ranks, and the
        accumulated gradient is the same. To accumulate without communication, use no_sync()."""
        check_bool("requires_all_reduce", requires_all_reduce)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward reshards parameters."""
        check_bool("reshard_after_backward", reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accepted for scripts of FSDP2; no effect: memory that a CUDA graph uses is kept from its
        capture on."""
        check_bool("keep", keep)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward completes its reductions."""
        check_bool("enabled", enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Accepted for scripts of FSDP2, which reduces gradients here if asked to: in zshard a
        backward has done so.

        Args:
            async_op: return a handle with wait().

        Returns a GradientReductionHandle if `async_op`, else None. Raises RuntimeError on a rank
        with gradients that no backward has reduced (no_sync(),
        set_requires_gradient_sync(False)).
        """
        for param in self.parameters():
            if param.grad is not None:
                _core.grad_owner(param.grad)
        return GradientReductionHandle() if async_op else None

    # --- DDP --------------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backward reduces gradients. Scripts for DDP set it instead of using no_sync():
        setting False means set_requires_gradient_sync(False)."""
        return bool(state_of(self).unit.sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for _, state in units_of(self):
            state.unit.sync = bool(value)


for _name, _value in _OF_STATE.items():
    _property = property(lambda model, value=_value: value(state_of(model)))  # type: ignore[misc]
    setattr(TorchNames, _name, YieldingName(_name, _property, is_common=True))


_PREFIX = "module."


def names_without_module(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict of DDP, whose names all begin with "module.", under the model's own
    names; any other one unchanged."""
    names = list(state) if isinstance(state, Mapping) else []
    if not names or not all(isinstance(n, str) and n.startswith(_PREFIX) for n in names):
        return state
    if "module" in model._modules:  # then the prefix must be another one than that of this child
        kinds = model.named_parameters, model.named_buffers
        own = {name for kind in kinds for name, _ in kind(remove_duplicate=False)}
        if not any(n not in own and n.removeprefix(_PREFIX) in own for n in names):
            return state
    made = OrderedDict((name.removeprefix(_PREFIX), value) for name, value in state.items())
    facts = getattr(state, "_metadata", None)
    if facts is not None:  # by module: DDP itself is ""
        made._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{name}.".removeprefix(_PREFIX)[:-1], each) for name, each in facts.items() if name
        )
    return made
