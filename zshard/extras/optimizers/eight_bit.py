"""AdamW8bit, Adam8bit and SGD8bit: the moments in 8 bits, the same bits under every sharding.

32 consecutive elements of a parameter share an exponent, a byte; each has a code, a byte, for each
moment (csrc/update/codes.h). Groups are counted in the parameter's own elements, and shards begin
at multiples of 32 elements (csrc/base/layout.h), so a group never spans two ranks and its codes do
not depend on the number of ranks or the strategy. Values between two codes are rounded so that the
result is right on average; how depends on the element and the step (the group's `rounding_step`).

With `master="int8"`, a bfloat16 parameter has 8 more bits in its state, instead of a float32 copy.

The state dict has plain tensors, for a parameter of n elements:

    exp_avg, exp_avg_sq               uint8, the parameter's shape
    exp_avg_scale, exp_avg_sq_scale   uint8, (ceil(n / 32),)
    low_bits                          int8, the parameter's shape, with master="int8"
    step                              float32, ()

SGD8bit has momentum_buffer and momentum_buffer_scale. Moments without a scale are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from zshard.api import InOneCall, SizeOf, bytes_declared, full_numel, plain
from zshard.extras.optimizers import codes

__all__ = ["Adam8bit", "AdamW8bit", "EightBit", "SGD8bit"]


class EightBit(InOneCall):
    """The base of the three: their options, their state, and its conversions."""

    scale_group = codes.GROUP
    _forms: dict[object, tuple[object, ...]]  # by the keys of _plans: _FORM's options in its state

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        master: str | None = None,
        min_8bit_size: int = codes.MIN_8BIT_SIZE,
        **options: Any,
    ) -> None:
        super().__init__(params, *args, **options)
        self._forms = {}
        self.defaults.update(master=master, min_8bit_size=min_8bit_size, bits=8)
        for group in self.param_groups:
            self._take_group(group)
        self._set_scaler_flag()

    def _take_group(self, group: dict[str, Any]) -> None:
        if "bits" not in self.defaults:
            return  # torch's constructor is calling; the one above comes back with the groups
        for option in _FORM:
            group.setdefault(option, self.defaults[option])
        _check_options(type(self).__name__, group)
        group.setdefault("rounding_step", 0)
        super()._take_group(group)

    # --- state ------------------------------------------------------------------------------------

    def state_layout(
        self, group: Mapping[str, Any], param: Tensor
    ) -> Mapping[str, torch.dtype | None]:
        layout = dict(super().state_layout(group, param))
        for name in self._state_names(group):
            layout[name] = torch.uint8 if _is_coded(group, param) else torch.float32
            if _is_coded(group, param):
                layout[codes.scale_of(name)] = torch.uint8
        if param.dtype == torch.bfloat16 and group["master"] is not None:
            layout["low_bits"] = torch.int8
        return layout

    def _step_params(self, key: object, group: dict[str, Any], state: dict[Any, Any]) -> None:
        if any(group.get(option) for option in _REFUSED):  # a script has set it since
            _check_options(type(self).__name__, group)
        form = tuple(group[option] for option in _FORM)
        if self._forms.setdefault(key, form) != form:  # set since, or another group's
            if not all(self._has_form(group, p, state.get(p, {})) for p in group["params"]):
                raise ValueError(
                    f"the param group's options {', '.join(_FORM)} were set to {form} after the "
                    "first step: pass them to another optimizer, and load the state into it"
                )
            self._plans.pop(key, None)
            self._forms[key] = form
        super()._step_params(key, group, state)

    def _has_form(self, group: Mapping[str, Any], param: Tensor, state: Mapping[str, Any]) -> bool:
        """Return whether the state of a parameter, if it has any, follows the group's options."""
        layout, low = self.state_layout(group, param), "low_bits" in state
        names = [name for name in self._state_names(group) if state.get(name) is not None]
        if any(
            (codes.scale_of(name) in state) != (codes.scale_of(name) in layout) for name in names
        ):
            return False
        return low == ("low_bits" in layout) if names or low else True

    # --- state dicts ------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = vars(self).get("param_groups", ())  # of a copy: none
        for saved, group in zip(state["param_groups"], groups, strict=False):
            saved["master"] = saved.get("master") or group["master"]  # the saved run may lack it
        super().__setstate__(state)
        self._forms = {}  # no plan is left
        for group in self.param_groups:
            for param in group["params"]:
                self._convert(group, param)

    @torch.no_grad()
    @plain()
    def _convert(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Give a parameter's loaded state the form that the step expects."""
        state = self.state.get(param, {})
        for name in self._state_names(group):
            if state.get(name) is None or codes.scale_of(name) in state:
                continue
            state[name] = state[name].to(torch.float32)
            if _is_coded(group, param):
                state[name], state[codes.scale_of(name)] = codes.encode(name, state[name])

    @staticmethod
    def to_fp32(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict with the moments in float32, for the 32-bit optimizer of the name.

        Args:
            state_dict: what state_dict() of an 8-bit optimizer returned.

        The result shares other tensors with the argument, and has no low_bits.
        """
        state = {number: codes.decoded(of) for number, of in state_dict["state"].items()}
        groups = [
            {key: value for key, value in group.items() if key not in _OPTIONS}
            for group in state_dict["param_groups"]
        ]
        return {**state_dict, "state": state, "param_groups": groups}


_FORM = ("master", "min_8bit_size", "bits")
"""The options of a group that the form of its state follows."""
_OPTIONS = frozenset((*_FORM, "rounding_step"))
_REFUSED = ("amsgrad", "capturable", "differentiable", "stochastic_rounding")


def _is_coded(group: Mapping[str, Any], param: Tensor) -> bool:
    return bool(group["bits"] == 8 and full_numel(param) >= group["min_8bit_size"])


def bytes_by_name(name: str, model: nn.Module) -> SizeOf:
    """Return the function for the bytes of an optimizer's state, by its name in lower case."""
    groups: list[Any] = [{"params": []}]
    optimizer = SGD8bit(groups, momentum=0.9) if name == "sgd8bit" else AdamW8bit(groups)
    group = optimizer.param_groups[0]
    return lambda param, numel: bytes_declared(optimizer.state_layout(group, param), param, numel)


def _check_options(name: str, group: Mapping[str, Any]) -> None:
    size = group["min_8bit_size"]
    for option, kind, is_valid in (
        ("master", "None or 'int8'", group["master"] in (None, "int8")),
        ("bits", "8 or 32", group["bits"] in (8, 32)),
        ("min_8bit_size", "an int of at least 0", isinstance(size, int) and size >= 0),
    ):
        if not is_valid:
            raise ValueError(f"{option} must be {kind}, got {group[option]!r}")
    for option in filter(group.get, _REFUSED):
        wide = name.removesuffix("8bit")
        raise NotImplementedError(f"zshard.{name} lacks {option}=True: use zshard.{wide}")
    for param in group["params"]:
        if param.dtype not in (torch.float32, torch.bfloat16):
            raise NotImplementedError(
                f"zshard.{name} steps float32 and bfloat16 parameters, but one of shape "
                f"{tuple(param.shape)} is {param.dtype}: convert the model"
            )


# --- the optimizers -------------------------------------------------------------------------------


class _TwoMoments(EightBit):
    _rule = "adam8bit"
    _state: ClassVar = {"exp_avg": None, "exp_avg_sq": None}
    _counts_steps = True


class AdamW8bit(_TwoMoments, torch.optim.AdamW):
    """AdamW with both moments in 8 bits: 2.06 bytes of state per element instead of 8.

    Equal gradients give equal bits for every strategy, number of ranks, transport and processor,
    and on GPUs.

    Args:
        params: parameters or param groups, sharded or not, of float32 or bfloat16.
        args, options: as in torch.optim.AdamW. foreach and fused have no effect; amsgrad,
            capturable and differentiable must be False.
        master: "int8" keeps 8 more bits of each bfloat16 parameter, so that small updates are not
            lost: 5.06 bytes per element with parameter and state. None: bfloat16 parameters are
            rounded stochastically. No effect on float32 parameters.
        min_8bit_size: parameters with fewer elements (of the full parameter) have float32 moments.

    A param group may set each of these, and `bits=32` for float32 moments.

    Raises ValueError for hyperparameters out of range, NotImplementedError for unsupported options
    and dtypes. An element that is NaN, infinite or at least 2**124 makes the moments of its group
    of 32 elements NaN.
    """


class Adam8bit(_TwoMoments, torch.optim.Adam):
    """Adam with both moments in 8 bits. Everything else is as in zshard.AdamW8bit."""


class SGD8bit(EightBit, torch.optim.SGD):
    """SGD with its momentum in 8 bits: 1.03 bytes of state per element instead of 4. Arguments are
    torch.optim.SGD's; everything else is as in zshard.AdamW8bit."""

    _rule = "sgd8bit"
    _state: ClassVar = {"momentum_buffer": "momentum"}
    _begins_as_grad = "momentum_buffer"
