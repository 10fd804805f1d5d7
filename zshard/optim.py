"""AdamW, Adam and SGD with torch.optim's face and the whole step of a param group in one C call.

The one idea: the subclasses keep everything of torch.optim (arguments, param groups, schedulers,
state_dict) and replace step(). A plan in C (`_core.OptimPlan`) walks the group's parameters,
reads their `.grad`, and updates all of them at once on torch's threads; no Python runs per
parameter and step. Python works only when a parameter gets its state, or for one that the C loop
does not take (not contiguous, sparse gradient, not on the CPU, complex): that one is updated by
torch's own function, on the same state.

State tensors lie side by side in one block for each name, spaced as the parameters are, so that
neighbouring slices of a shard are updated as one run.

Numbers: SGD has the bits of torch.optim.SGD; Adam and AdamW those of torch.optim.AdamW(fused=True).
torch's unfused Adam differs from both in the last bit of some elements, because its square root
(MKL's) is not correctly rounded. Half-precision parameters are updated in float, as by `fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zshard import _core

__all__ = ["SGD", "Adam", "AdamW"]

ALIGN = 64
"""Bytes: a cache line, and the longest gap that padding leaves between slices of one shard."""


class _InOneCall(torch.optim.Optimizer):
    """The step() that the three share."""

    _rule: str  # which rule the plan applies: "adam" or "sgd"
    _plans: dict[int, _core.OptimPlan]  # by index of the param group

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned, or None.

        closure: reevaluates the model and returns the loss, with gradients on. Raises TypeError
        for a parameter that wraps other tensors (DTensor), RuntimeError for one whose memory is
        not there (a shard between unshard and reshard).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            plan = self._plans.get(index)
            foreign = None if plan is None else plan.step(group, self.state)
            if foreign is None:
                foreign = self._step_with_new_plan(index, group)
            if foreign:
                self._step_by_torch(group, [group["params"][i] for i in foreign])
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim. NotImplementedError for the options `_check_options` names."""
        super().add_param_group(param_group)
        _check_options(self, self.param_groups[-1])
        self._plans = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _check_options(self, group)
        self._plans = {}

    def _step_with_new_plan(self, index: int, group: dict[str, Any]) -> tuple[int, ...]:
        """Give state to the parameters that lack it, and step; the indices not taken by C."""
        params: list[Tensor] = group["params"]
        fresh = self._make_state(group, [p for p in params if p.grad is not None])
        plan = _core.OptimPlan(self._rule, params, self.state, fresh)
        self._plans[index] = plan
        foreign: tuple[int, ...] | None = plan.step(group, self.state)
        if foreign is None:
            raise RuntimeError("the optimizer's state was changed while it was being made")
        for i in foreign:
            if params[i] in fresh:
                self.state[params[i]]["momentum_buffer"] = None  # torch makes its own
        return foreign

    def _make_state(self, group: dict[str, Any], params: Sequence[Tensor]) -> set[Tensor]:
        """Add the missing state of `params`; returns those whose momentum_buffer is new."""
        for param in params:
            if is_traceable_wrapper_subclass(param):
                raise TypeError(
                    f"zshard.{type(self).__name__} updates plain tensors, not "
                    f"{type(param).__name__}; use torch.optim.{type(self).__name__} for those"
                )
        names = self._state_names(group)
        if "exp_avg" in names:
            for param in params:
                self.state[param].setdefault("step", torch.zeros((), dtype=torch.float32))
        fresh: set[Tensor] = set()
        for name in names:
            missing = [p for p in params if self.state[p].get(name) is None]
            for param, zeros in zip(missing, _zeros_side_by_side(missing), strict=True):
                self.state[param][name] = zeros
            if name == "momentum_buffer":
                fresh.update(missing)
        return fresh

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The tensors that the group's rule keeps for each parameter, each of its shape."""
        raise NotImplementedError

    def _step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update parameters that the C loop does not take, with torch's own function."""
        raise NotImplementedError


ADAM_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Adam's state tensors of a parameter's shape; the last with amsgrad only."""


class _AdamInOneCall(_InOneCall):
    """Adam and AdamW: what tells them apart is an option of the group, decoupled_weight_decay."""

    _rule = "adam"

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ADAM_STATE if group["amsgrad"] else ADAM_STATE[:2]

    @torch.no_grad()
    def _step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                f"zshard.{type(self).__name__} does not take sparse gradients: make the layer "
                "with sparse=False, or give its parameters to torch.optim.SparseAdam"
            )
        states = [self.state[p] for p in params]
        adam(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            [state["step"] for state in states],
            foreach=False,
            fused=False,
            has_complex=any(torch.is_complex(p) for p in params),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class Adam(_AdamInOneCall, torch.optim.Adam):
    """torch.optim.Adam with its step in C; same arguments, defaults, state and numbers.

    Args: as torch.optim.Adam. `foreach` and `fused` are taken, and without effect: there is one
    way, and it is fused. `capturable` (CUDA graphs) and `differentiable` must stay False:
    NotImplementedError. ValueError for numbers out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._step_supports_amp_scaling = False  # with fused, torch's says it unscales by itself


class AdamW(_AdamInOneCall, torch.optim.AdamW):
    """torch.optim.AdamW with its step in C; same arguments, defaults, state and numbers.

    Args: as torch.optim.AdamW. `foreach` and `fused` are taken, and without effect: there is one
    way, and it is fused. `capturable` (CUDA graphs) and `differentiable` must stay False:
    NotImplementedError. ValueError for numbers out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._step_supports_amp_scaling = False  # with fused, torch's says it unscales by itself


class SGD(_InOneCall, torch.optim.SGD):
    """torch.optim.SGD with its step in C; same arguments, defaults, state and bits.

    Args: as torch.optim.SGD. `foreach` and `fused` are taken, and without effect: there is one
    way, and it is fused. `differentiable` must stay False: NotImplementedError. ValueError for
    numbers out of range.
    """

    _rule = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._step_supports_amp_scaling = False  # with fused, torch's says it unscales by itself

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    @torch.no_grad()
    def _step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=any(grad.is_sparse for grad in grads),
            foreach=False,
            fused=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            for param, buffer in zip(params, buffers, strict=True):
                self.state[param]["momentum_buffer"] = buffer


def _check_options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """NotImplementedError for an option of torch.optim that a step in C cannot honour."""
    for option in ("capturable", "differentiable"):
        if group.get(option):
            name = type(optimizer).__name__
            raise NotImplementedError(
                f"zshard.{name}: {option}=True is not supported; use torch.optim.{name} for it"
            )


def _zeros_side_by_side(params: Sequence[Tensor]) -> list[Tensor]:
    """A tensor of zeros for each of `params`, with its shape, dtype, device and memory format.

    Those for contiguous CPU tensors are views of one block per dtype, in the order and with the
    gaps that the parameters have where they lie within a cache line of each other.
    """
    made: dict[int, Tensor] = {}
    blocks: dict[torch.dtype, list[int]] = {}
    for i, param in enumerate(params):
        if param.device.type == "cpu" and param.is_contiguous():
            blocks.setdefault(param.dtype, []).append(i)
        else:
            made[i] = torch.zeros_like(param, memory_format=torch.preserve_format)
    for dtype, members in blocks.items():
        starts, length = _places([params[i] for i in members])
        block = torch.zeros(length, dtype=dtype)
        for i, start in zip(members, starts, strict=True):
            made[i] = block[start : start + params[i].numel()].view(params[i].shape)
    return [made[i] for i in range(len(params))]


def _places(params: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts in a block that is spaced as they are; the block's length.

    In elements. Tensors that are not neighbours in memory start at a multiple of ALIGN bytes.
    """
    starts: list[int] = []
    at, end = 0, None
    for param in params:
        item = param.element_size()
        gap = ALIGN if end is None else param.data_ptr() - end
        if 0 <= gap < ALIGN and gap % item == 0:
            at += gap // item
        else:
            at = -(-at * item // ALIGN) * ALIGN // item
        starts.append(at)
        at += param.numel()
        end = param.data_ptr() + param.numel() * item
    return starts, at
