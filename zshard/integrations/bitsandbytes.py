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
                f"parameter '{name}' is {ref.param.dtype}, but its layer computes in {dtype}, and "
                "bitsandbytes would replace it in forward: freeze it, or convert the bias or the "
                "layer's compute_dtype before FSDP(...)"
            )

    def facts(self, name: str, param: Tensor, values: bool) -> Iterator[Fact]:
        if not _is_quantized(param):
            return
        state = getattr(param, "quant_state", None)
        words = ("quant_type", "blocksize", "dtype", "shape")
        said = ", ".join(f"{word} {getattr(state, word, None)}" for word in words)
        yield f"the quantization of '{name}'", f"of class {type(param).__name__}, {said}"
        for part, tensor in _tensors_of(state):
            yield from tensor_facts("the quantization state of", f"{name}.{part}", tensor, values)

    def settle(self, ref: Any) -> None:
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
    for cls in type(param).__mro__:
        if cls.__module__.partition(".")[0] == "bitsandbytes":
            return cls.__name__
    return None


def _check_weight(name: str, param: Tensor) -> None:
    kind = _kind_of(param)
    if kind == "Int8Params" and (param.dtype == torch.int8 or not param.requires_grad):
        raise TypeError(
            f"parameter '{name}' is of class {type(param).__name__}, which bitsandbytes replaces "
            "in each forward and keeps in full elsewhere, so sharding it would save no memory: "
            "pass all such parameters in ignored_states=, so that each rank keeps them, or load "
            "the model in 4 bits"
        )
    if kind != "Params4bit":
        return
    what = f"parameter '{name}' of class {type(param).__name__}"
    if param.is_meta:
        raise ValueError(
            f"{what} is on the meta device, and no initialization quantizes it: load the "
            "quantized model on every rank, or pass the parameter in ignored_states="
        )
    state = getattr(param, "quant_state", None)
    if state is None:
        raise ValueError(
            f"{what} is not quantized yet: move the model to its device (model.to('cpu'), "
            "model.cuda()), which quantizes it, before FSDP(...)"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"{what} was repacked by an evaluation on this CPU, after which bitsandbytes computes "
            "no gradients through it: load the model again, and call FSDP(...) before the first "
            "evaluation"
        )
    if param.requires_grad:
        raise ValueError(
            f"{what} is trainable, but an optimizer would change bits as if they were numbers: "
            "freeze it with requires_grad_(False), and train adapters (LoRA) instead"
        )


def _bias_dtype(ref: Any) -> torch.dtype | None:
    """Return the dtype to which a 4-bit layer converts its bias, if this parameter is one; else
    None."""
    for owner, attribute in ref.owners:
        weight = owner._parameters.get("weight")
        if attribute == "bias" and weight is not None and _kind_of(weight) == "Params4bit":
            found: torch.dtype | None = getattr(owner, "compute_dtype", None)
            return found
    return None


def _tensors_of(state: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a QuantState and of its nested state (doubly quantized scales)."""
    for name, value in sorted(vars(state).items()) if state is not None else ():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif name == "state2":
            yield from _tensors_of(value, f"{prefix}{name}.")


def _refuse_bits(module: nn.Module, state_dict: dict[str, Any], prefix: str, *found: Any) -> None:
    """A load hook of nn.Module: bits without the scales that decode them are other numbers, and
    bitsandbytes saves scales beside the bits, but does not load them."""
    name = f"{prefix}weight"
    if name in state_dict and hasattr(module._parameters.get("weight"), "quant_state"):
        found[-1].append(
            f"'{name}' is quantized, and loading does not load its scales: load the model before "
            "FSDP(...), and leave the frozen weights out of the state dict (save_pretrained saves "
            "the adapter alone)"
        )
