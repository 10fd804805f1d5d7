"""bitsandbytes: models whose frozen weights are quantized to 4 bits, as for QLoRA.

The elements of such parameters are packed bits, so their dtype does not describe them: two 4-bit
values share a byte, and a float32 may hold four bytes. zshard therefore sends and stores them as
they are, and never casts or trains them. The quantization state that decodes them (a scale per
block) is an attribute of the parameter and is not sharded: all ranks take rank 0's, as they take
its bits. This file does not import bitsandbytes; it recognizes the classes by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zshard.api import EXTENSIONS, Extension, Fact, tensor_facts

# A flag of bitsandbytes' modules: on CPUs with AVX-512 BF16, their first evaluation repacks
# weights.
_REPACKS = "support_avx512bf16_for_cpu"
_WOULD = "_zshard_repacks"  # attribute of a module: the value of _REPACKS before FSDP()


class _Quantized(Extension):
    """Quantized parameters, and the biases of their layers."""

    def check(self, name: str, ref: Any) -> None:
        _check_weight(name, ref.param)
        dtype = _bias_dtype(ref)
        if dtype is not None and ref.param.requires_grad and ref.param.dtype != dtype:
            raise ValueError(
                f"parameter '{name}' is {ref.param.dtype}, but its layer computes in {dtype}: "
                "freeze it, or convert it before FSDP(...)"
            )

    def facts(self, name: str, param: Tensor, values: bool) -> Iterator[Fact]:
        if not _is_quantized(param):
            return
        state = getattr(param, "quant_state", None)
        words = ("quant_type", "blocksize", "dtype", "shape")
        values_of = ", ".join(f"{word} {getattr(state, word, None)}" for word in words)
        yield f"the quantization of '{name}'", f"of class {type(param).__name__}, {values_of}"
        for part, tensor in _tensors_of(state):
            yield from tensor_facts("the quantization state of", f"{name}.{part}", tensor, values)

    def prepare(self, ref: Any) -> None:
        """Convert a frozen bias to the dtype that its layer computes in, keep layers from repacking
        weights in an evaluation (no gradients would flow afterwards), and refuse to load bits."""
        dtype = _bias_dtype(ref)
        if dtype is not None and ref.param.dtype != dtype:
            ref.param.data = ref.param.data.to(dtype)
        for owner, _ in ref.owners if _is_quantized(ref.param) else ():
            if _REPACKS in owner.__dict__ and _WOULD not in owner.__dict__:
                owner.__dict__[_WOULD] = owner.__dict__[_REPACKS]
                owner.__dict__[_REPACKS] = False
            hooks = owner._load_state_dict_pre_hooks.values()
            if not any(getattr(hook, "hook", None) is _refuse_bits for hook in hooks):
                owner.register_load_state_dict_pre_hook(_refuse_bits)

    def restore(self, model: nn.Module) -> None:
        for module in model.modules():
            if _WOULD in module.__dict__:
                module.__dict__[_REPACKS] = module.__dict__.pop(_WOULD)

    def keeps_dtype(self, ref: Any) -> bool:
        """Return whether the parameter holds bits, or is the bias of a layer that would replace a
        bias of another dtype."""
        return _is_quantized(ref.param) or _bias_dtype(ref) is not None

    def tensors(self, param: Tensor) -> list[Tensor]:
        if not _is_quantized(param):
            return []
        return [tensor for _, tensor in _tensors_of(getattr(param, "quant_state", None))]

    def move(self, param: Tensor) -> None:
        state = getattr(param, "quant_state", None)
        if state is not None and _is_quantized(param):
            state.to(param.device)


EXTENSIONS.append(_Quantized())


def _is_quantized(param: Tensor) -> bool:
    """Return whether a parameter holds bitsandbytes' packed bits, in any dtype."""
    kind = _kind_of(param)
    return kind == "Params4bit" or (kind == "Int8Params" and param.dtype == torch.int8)


def _kind_of(param: Tensor) -> str | None:
    """Return the bitsandbytes class that a parameter's class is or derives from, by name."""
    packages = {cls: cls.__module__.partition(".")[0] for cls in type(param).__mro__}
    return next((cls.__name__ for cls, name in packages.items() if name == "bitsandbytes"), None)


def _check_weight(name: str, param: Tensor) -> None:
    kind = _kind_of(param)
    if kind == "Int8Params" and (param.dtype == torch.int8 or not param.requires_grad):
        raise TypeError(
            f"parameter '{name}' is of class {type(param).__name__}, which sharding cannot make "
            "smaller: pass all such parameters in ignored_states=, or load the model in 4 bits"
        )
    state = getattr(param, "quant_state", None)
    faults = {
        "is on the meta device: load the quantized model on every rank": param.is_meta,
        "is not quantized yet: move the model to its device before FSDP(...)": state is None,
        "was repacked by an evaluation: load the model again, and call FSDP(...) before any": (
            getattr(state, "packing_format_for_cpu", False)
        ),
        "is trainable: freeze it with requires_grad_(False), and train adapters (LoRA)": (
            param.requires_grad
        ),
    }
    for fault, is_there in faults.items() if kind == "Params4bit" else ():
        if is_there:
            raise ValueError(f"parameter '{name}' of class {type(param).__name__} {fault}")


def _bias_dtype(ref: Any) -> torch.dtype | None:
    """Return the dtype to which a 4-bit layer converts its bias, if this parameter is one; else
    None."""
    for owner, attribute in ref.owners:
        weight = owner._parameters.get("weight")
        if attribute == "bias" and weight is not None and _kind_of(weight) == "Params4bit":
            dtype: torch.dtype | None = getattr(owner, "compute_dtype", None)
            return dtype
    return None


def _tensors_of(state: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a QuantState and of its nested state (doubly quantized scales)."""
    for name, value in sorted(vars(state).items()) if state is not None else ():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif name == "state2":
            yield from _tensors_of(value, f"{prefix}{name}.")


def _refuse_bits(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """A load hook of nn.Module: bits without the scales that decode them are other numbers, and
    bitsandbytes saves scales next to the bits, but does not load them."""
    name = f"{prefix}weight"
    if name in state_dict and hasattr(module._parameters.get("weight"), "quant_state"):
        args[-1].append(
            f"'{name}' is quantized, and loading does not load its scales: load the model before "
            "FSDP(...), then the adapter alone"
        )
