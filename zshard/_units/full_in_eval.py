"""What FSDP1's FSDP_USE_FULL_PREC_IN_EVAL=1 means for inputs, outputs and buffers.

The one idea: a unit in eval mode computes with parameters of their own dtype (see
csrc/engine/pass_dtype.h), as all of an evaluated model does. Where a part of a model is in eval
mode while the rest trains, such as a frozen encoder, the border between the two has casts. FSDP1
has none there, and torch refuses to mix the dtypes.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._units.units import is_unit, state_of, units_of
from zshard.precision import Precision, map_tensors


def cast_at_border(
    module: nn.Module, unit: _core.Unit, precision: Precision
) -> list[torch.utils.hooks.RemovableHandle]:
    """Cast what enters and leaves a unit in eval mode within a model that trains; return the hooks.
    Call it before the unit's own hooks are there."""
    own = next((p.dtype for p in unit.params if p.is_floating_point()), None)
    if not precision.full_in_eval or precision.compute is None or own is None:
        return []
    border = _Border(precision.compute, own, not precision.cast_inputs)
    return [
        module.register_forward_pre_hook(border.enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(border.leave),
    ]


def buffers_in_eval(
    module: nn.Module, precision: Precision, before: dict[str, torch.dtype]
) -> None:
    """Give buffers the dtypes that they had `before`, by name, in forwards in eval mode."""
    for name, each in module.named_modules():  # units that were outermost so far
        earlier = vars(each).get(_BUFFERS) if each is not module else None
        if earlier is not None:
            before |= {f"{name}.{inner}": dtype for inner, dtype in earlier.before.items()}
            earlier.before.clear()
    if precision.full_in_eval and precision.buffers is not None and before:
        hook = _BuffersInEval(before, precision.buffers)
        vars(module)[_BUFFERS] = hook
        module.register_forward_pre_hook(hook, prepend=True)


_BUFFERS = "_zshard_buffers_in_eval"  # attribute of an outermost unit


@dataclass(frozen=True)
class _Border:
    low: torch.dtype
    own: torch.dtype
    casts_outputs: bool  # nobody else does: the units behind it take their arguments as they come

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not _is_within_training(module):
            return None
        return _cast((args, kwargs), self.low, self.own)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.casts_outputs or not _is_within_training(module):
            return None
        return _cast(output, self.own, self.low)


def _is_within_training(module: nn.Module) -> bool:
    """Is the unit in eval mode, within a forward of a model in training mode?"""
    if module.training:
        return False
    state = state_of(module)
    root = state.root() if state.root is not None else None
    if root is None or not root.training:
        return False
    recomputed = torch._C._current_graph_task_id() != -1  # in backward, of such a forward
    return recomputed or state_of(root).unit.n_open > 0


def set_root(root: nn.Module) -> None:
    """Tell the units below `root` which is the outermost one."""
    for module, state in units_of(root):
        state.root = weakref.ref(root) if module is not root else None


@dataclass
class _BuffersInEval:
    before: dict[str, torch.dtype]
    low: torch.dtype
    full: bool = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        full = _evaluates(module)
        if full == self.full or not self.before:
            return
        buffers = dict(module.named_buffers())
        for name, dtype in self.before.items():
            if name in buffers:  # the same object: others hold it
                buffers[name].data = buffers[name].to(dtype if full else self.low)
        self.full = full


def _evaluates(module: nn.Module) -> bool:
    """FSDP1's rule: the outermost unit's mode decides for all; or any unit's, if it has no
    parameters."""
    if is_unit(module) and state_of(module).unit.n_params > 0:
        return not module.training
    return any(not each.training for each, state in units_of(module) if state.unit.n_params > 0)


def _cast(tree: Any, source: torch.dtype, target: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.to(target) if tensor.dtype == source else tensor

    return map_tensors(one, tree)
