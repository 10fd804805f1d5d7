"""Loss scaling over shards: zshard.GradScaler, and the same for torch.amp.GradScaler.

A scaler skips a step when it finds inf or NaN in the gradients, but a rank sees only its shards. If
one rank skipped a step that the others take, models and scales would diverge. So ranks exchange
their findings before they act on them. All of torch's checks for inf call one method, which this
file replaces; an optimizer without sharded gradients still gets torch's own.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zshard import _core
from zshard._errors import check_choice
from zshard.guard.slices import grads_of, plain
from zshard.optim.in_backward import refuse_scaler, watch_scaled
from zshard.optim.sharded_state import params_of
from zshard.ranks.agreement import PublicCall

_torchs_unscale: Callable[..., dict[torch.device, torch.Tensor]] = getattr(
    torch.amp.GradScaler, "_unscale_grads_", None
)  # type: ignore[assignment]

_torchs_update = torch.amp.GradScaler.update

_unscaled: weakref.WeakKeyDictionary[torch.amp.GradScaler, set[_core.Engine]] = (
    weakref.WeakKeyDictionary()
)
"""Models whose gradients a scaler has unscaled since its last update(); of those with wire=..."""


@functools.wraps(_torchs_unscale)
@plain()
def _unscale_grads_(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    engines = _owners(optimizer)  # first, because it refuses gradients that are not reduced
    refuse_scaler(optimizer)
    coded = [engine for engine in engines if engine.codes_gradients()]
    if coded:  # update() then reads the scale, for which the host waits for a GPU
        _unscaled.setdefault(self, set()).update(coded)
    return _unscale_on_all(self, optimizer, engines, inv_scale, found_inf, allow_fp16)


@functools.wraps(_torchs_update)
def _update(self: torch.amp.GradScaler, new_scale: float | torch.Tensor | None = None) -> None:
    engines = _unscaled.pop(self, ())
    before = self.get_scale() if engines else 0.0
    _torchs_update(self, new_scale)
    after = self.get_scale() if engines else 0.0
    factor = after / before if before else 0.0
    for engine in (
        engines if after != before else ()
    ):  # the residuals of wire=... are scaled as well
        engine.rescale(factor)


@PublicCall("scaler.unscale_()")
def _unscale_on_all(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    engines: list[_core.Engine],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    flags = _unscale_here(self, optimizer, inv_scale, found_inf, allow_fp16)
    if engines and len(flags) == 1 and all(map(_core.gpu_ranks, engines)):
        _share_on_gpu(engines, *flags.values())
    elif engines:
        largest = max((float(flag) for flag in flags.values()), default=0.0)
        for engine in engines:
            largest = engine.max_over_ranks([largest])[0]
        for flag in flags.values():
            flag.fill_(largest)
    return flags


def _unscale_here(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Unscale this rank's gradients and look for inf; for sharded float32 ones on CPUs, without a
    pass over them (docs/design/clipping.md)."""
    grads = [grad for grad in grads_of(params_of(optimizer)) if grad is not None]
    sharded: list[torch.Tensor] = []
    unsharded: list[torch.Tensor] = []
    for grad in grads:
        (unsharded if _core.grad_owner(grad) is None else sharded).append(grad)
    if not sharded or not all(map(_is_simple, [*grads, found_inf, inv_scale])):
        _apply_pending(grads)
        return _torchs_unscale(self, optimizer, inv_scale, found_inf, allow_fp16)
    if not math.isfinite(_core.squares_value(_core.squares(sharded))):
        found_inf.fill_(1)
    factor = float(inv_scale)
    left = [*unsharded, *(_core.scale_later(sharded, factor) if factor != 1 else [])]
    _apply_pending(left)
    torch._amp_foreach_non_finite_check_and_unscale_(left, found_inf, inv_scale)
    return {found_inf.device: found_inf}


def _is_simple(tensor: torch.Tensor) -> bool:
    simple = tensor.layout == torch.strided and tensor.is_contiguous()
    return simple and tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _apply_pending(grads: Iterable[torch.Tensor]) -> None:
    """Torch's kernel is about to read them, and to write without a new version."""
    for grad in grads:
        if grad.layout == torch.strided:
            _core.apply_pending(grad, True)


def _share_on_gpu(engines: list[_core.Engine], flag: torch.Tensor) -> None:
    """Set `flag` to the maximum over all ranks, without synchronizing with the GPU."""
    numbers = flag.new_zeros(1 + max(map(_core.gpu_ranks, engines)), dtype=torch.float64)
    numbers[0] = flag
    for engine in engines:
        _core.queue_over_ranks(engine, math.inf, numbers)
    flag.copy_(numbers[0])


def _owners(optimizer: torch.optim.Optimizer) -> list[_core.Engine]:
    """Return the engines of the optimizer's gradients, which are about to be unscaled, in parameter
    order, the same on all ranks. Raises RuntimeError for an unreduced gradient (no_sync())."""
    owners: dict[_core.Engine, None] = {}
    for grad in grads_of(params_of(optimizer)):
        if grad is not None and grad.layout == torch.strided:
            owner = _core.grad_owner(grad)
            if owner is not None:
                owners[owner] = None
    return list(owners)


def install() -> None:
    """Make torch's scaler check all ranks. Idempotent."""
    if torch.amp.GradScaler._unscale_grads_ is _torchs_unscale:
        torch.amp.GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]
        torch.amp.GradScaler.update = _update  # type: ignore[method-assign]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for sharded models: either all ranks skip a step, or none.

    Arguments, methods and state_dict are torch's. `unscale_` and `step` are collective.

    The first FSDP(...) makes torch.amp.GradScaler do the same; this class also works if another
    library replaces torch's methods.

    Args:
        device: "cpu" (default) or "cuda".
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in
            torch.amp.GradScaler.

    Raises ValueError for another device. `unscale_` and `step` raise RuntimeError for gradients
    that are not reduced (no_sync()), and backward raises RuntimeError if the loss is scaled and the
    model is stepped in backward (optimizer_in_backward).
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_choice("GradScaler: device", device, ("cpu", "cuda"))
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    _unscale_grads_ = _unscale_grads_  # type: ignore[assignment]
    update: Any = _update

    def scale(self, outputs: Any) -> Any:
        """As torch's, but a backward from the result that steps a model is an error."""
        scaled = super().scale(outputs)
        return watch_scaled(scaled) if self.is_enabled() else scaled
