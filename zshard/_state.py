"""state_dict() and load_state_dict() of sharded modules: plain tensors under plain names.

The one idea: nn.Module's own code does the walking. On the way out, the entries of a unit's
parameters are replaced by whole copies, one unit gathered at a time; on the way in, each whole
tensor is replaced by this rank's slice before nn.Module copies it, so loading needs no gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard._plan import UnitSpec


def whole_params(unit: _core.Unit, spec: UnitSpec) -> list[torch.Tensor]:
    """Whole copies of a unit's parameters, in the unit's order; inside an engine's session."""
    unit.unshard()
    try:
        copies = []
        for i, ref in enumerate(spec.params):
            shape = unit.param(i)["shape"]
            copy = torch.empty(shape, dtype=ref.param.dtype)
            unit.read_param(i, copy)
            copies.append(copy)
        return copies
    finally:
        unit.reshard()


def fill_state_dict(
    unit: _core.Unit, spec: UnitSpec, state: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """Puts whole tensors into `state` where nn.Module put the unit's sharded parameters."""
    engine = unit.engine
    engine.open()
    try:
        for ref, copy in zip(spec.params, whole_params(unit, spec), strict=True):
            if keep_vars:
                copy.requires_grad_(ref.param.requires_grad)
            for name in ref.names:
                if prefix + name in state:
                    state[prefix + name] = copy
    finally:
        engine.close()


class SliceOnLoad:
    """A load_state_dict pre-hook that cuts this rank's slices out of whole tensors."""

    def __init__(self, unit: _core.Unit, spec: UnitSpec) -> None:
        self._unit = unit
        self._spec = spec

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict(assign=True) would replace sharded parameters; "
                "leave assign out: values are copied into the shards"
            )
        for i, ref in enumerate(self._spec.params):
            for name in ref.names:
                if prefix + name in state:
                    value = state[prefix + name]
                    state[prefix + name] = self._slice(i, prefix + name, value, error_msgs)

    def _slice(self, i: int, key: str, value: Any, error_msgs: list[str]) -> torch.Tensor:
        local = self._spec.params[i].param.detach()
        if not torch.is_tensor(value):
            error_msgs.append(f"{key} is a {type(value).__name__}, not a tensor")
            return local
        fact = self._unit.param(i)
        if tuple(value.shape) != fact["shape"]:
            error_msgs.append(
                f"size mismatch for {key}: {tuple(value.shape)} in the state dict, "
                f"{fact['shape']} in the model (whole)"
            )
            return local
        part = value.detach().reshape(-1)[fact["begin"] : fact["begin"] + fact["numel"]]
        return part.reshape(local.shape)
