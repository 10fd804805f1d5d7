"""AdamW, Adam and SGD with torch.optim's interface, stepping a param group in one C call.

Arguments, numerics and state are torch's, so a script only changes an import. optim/step.py has the
step; this file has the differences between the three.

Numerics, of equal gradients in float32 and float64 (tests/optim/test_optim.py): SGD is
bit-identical to torch.optim.SGD. Adam and AdamW are bit-identical to the vectors of torch's
fused=True on CPUs of the same instruction set. torch steps what is left at the end of a tensor,
fewer elements than a vector has (numel % 16 in float32 with AVX-512), by other code, which rounds a
few of them otherwise; in zshard an element's result does not depend on where it lies. With
foreach=True and in torch's default loop, the moments are bit-identical to ours, and parameters
differ in the last bit of some elements, because their square root (MKL's) is not correctly rounded.
Half-precision parameters are updated in float32, as by `fused`.

Stochastic rounding, which torch does not have, trains bfloat16 parameters without a float32 copy:
what a step stores in bfloat16, the parameter and its state, is rounded up or down at random so that
it is unbiased, where rounding to nearest would lose each small update. The random bits depend on
the seed, the step number and the element's position in the model (base/dither.h), not on the rank
that owns the element: all strategies and world sizes give bit-identical results. Seed and step
number are options of the param group, so they are in the state dict, and a resumed run continues
with the bits that an uninterrupted one would use.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zshard.optim.step import InOneCall

__all__ = ["SGD", "Adam", "AdamW"]


class _AdamInOneCall(InOneCall):
    """Adam and AdamW, which differ in one option of the group, decoupled_weight_decay."""

    _rule = "adam"
    _state: ClassVar = {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}
    _counts_steps = True


class Adam(_AdamInOneCall, torch.optim.Adam):
    """torch.optim.Adam with its step in C: same arguments, defaults and state.

    Args:
        decoupled_weight_decay: as in torch.optim.Adam.

    Everything else is as in zshard.AdamW.
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
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(
            *(params, lr, betas, eps, weight_decay, amsgrad),
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._set_rounding(stochastic_rounding, rounding_seed)


class AdamW(_AdamInOneCall, torch.optim.AdamW):
    """torch.optim.AdamW with its step in C: same arguments, defaults and state.

    Bit-identical to torch.optim.AdamW(fused=True), but for a tensor's last few elements, which
    torch steps by other code.

    Args:
        params: parameters or param groups, sharded or not.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        foreach, fused: accepted for compatibility; no effect, the step is always fused.
        differentiable: must be False.
        capturable: as in torch.optim, for parameters on a GPU and without stochastic_rounding. The
            step count stays on the GPU, and the step reads `lr` (if it is a tensor on that GPU) and
            a GradScaler's `found_inf` there, without synchronizing, so a CUDA graph can replay it.
        stochastic_rounding: round bfloat16 parameters and their state stochastically (unbiased), to
            train without a float32 copy. Other dtypes are not affected, except that float16 is not
            supported.
        rounding_seed: seed of the random bits, an int; pass the same on all ranks.

    Raises ValueError for hyperparameters out of range, NotImplementedError for unsupported options.
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
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(
            *(params, lr, betas, eps, weight_decay, amsgrad),
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._set_rounding(stochastic_rounding, rounding_seed)


class SGD(InOneCall, torch.optim.SGD):
    """torch.optim.SGD with its step in C: same arguments, defaults and state, bit-identical.

    Args:
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Everything else is as in zshard.AdamW.
    """

    _rule = "sgd"
    _state: ClassVar = {"momentum_buffer": "momentum"}
    _begins_as_grad = "momentum_buffer"

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
        capturable: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(
            *(params, lr, momentum, dampening, weight_decay, nesterov),
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        if capturable:  # torch's SGD lacks it, so by default the state dict stays torch's
            self.defaults.update(capturable=True)
            for group in self.param_groups:
                self._take_group(group)
        self._set_rounding(stochastic_rounding, rounding_seed)
