"""The 8-bit codes of csrc/update/codes.h in torch's operations, to convert state dicts.

Decoding has the step's bits. Encoding rounds to the nearest code; the step's rounding is right on
average over the steps, which one conversion is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["GROUP", "MIN_8BIT_SIZE", "decode", "decoded", "encode", "scale_of"]

GROUP = 32
"""Elements that share a scale."""

MIN_8BIT_SIZE = 4096
"""Elements of a full parameter, below which its moments stay in float32 by default."""

_NO_EXPONENT, _LAST_EXPONENT = 255, 250


@dataclass(frozen=True)
class _Code:
    """A moment's code: a float's upper bits, without the lower `shift`, counted from `floor`."""

    floor: float
    shift: int
    margin: float  # of 1, below which the largest code must stay
    is_signed: bool

    @property
    def fill(self) -> Tensor:
        """Return the largest scaled magnitude, halved."""
        return torch.tensor((1 - self.margin - self.floor) / 2, dtype=torch.float32)

    @property
    def floor_bits(self) -> int:
        return int(torch.tensor(self.floor).view(torch.int32))


_FIRST = _Code(2**-4, 18, 2**-6, True)
_SECOND = _Code(2**-16, 19, 2**-5, False)
_CODES = {"exp_avg": _FIRST, "exp_avg_sq": _SECOND, "momentum_buffer": _FIRST}


def scale_of(name: str) -> str:
    """Return the name of the state tensor with the exponents of a moment's groups."""
    return f"{name}_scale"


def _by_group(scale: Tensor, like: Tensor) -> Tensor:
    """Return each element's value of its group, of the shape of `like`."""
    return scale.repeat_interleave(GROUP)[: like.numel()].view(like.shape)


def _power(exponent: Tensor) -> Tensor:
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def decode(name: str, codes: Tensor, scale: Tensor) -> Tensor:
    """Return a moment in float32.

    Args:
        name: of the moment: exp_avg, exp_avg_sq or momentum_buffer.
        codes: uint8, of any shape.
        scale: uint8, (ceil(codes.numel() / 32),).
    """
    how = _CODES[name]
    magnitude = (codes & 0x7F if how.is_signed else codes).to(torch.int32)
    power = _power(scale.clamp(min=1))
    power = torch.where(scale == _NO_EXPONENT, torch.nan, power) * (1 / how.fill)
    sums = ((magnitude << how.shift) + how.floor_bits).view(torch.float32)
    value = (sums - how.floor) * _by_group(power, codes)
    return torch.where(codes >= 128, -value, value) if how.is_signed else value


def encode(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of a moment in float32, of its shape, and its groups' exponents."""
    how = _CODES[name]
    bits = value.contiguous().view(torch.int32) & 0x7FFFFFFF
    largest = pad(bits.reshape(-1), (0, -value.numel() % GROUP)).view(-1, GROUP).amax(1) >> 23
    scale = torch.where(largest > _LAST_EXPONENT, _NO_EXPONENT, largest.clamp(min=1))
    power = torch.where(scale == _NO_EXPONENT, 0, _power(254 - scale)) * how.fill
    sums = bits.view(torch.float32) * _by_group(power, value) + how.floor
    code = (sums.view(torch.int32) - how.floor_bits + (1 << how.shift >> 1)) >> how.shift
    if how.is_signed:
        code = code.clamp(0, 127) + 128 * torch.signbit(value)
    else:
        code = torch.where(value > 0, code.clamp(1, 255), 0)
    return code.to(torch.uint8), scale.to(torch.uint8)


def decoded(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a parameter's state with its moments in float32 and without low bits."""
    names = [name for name in _CODES if scale_of(name) in state]
    moments = {name: decode(name, state[name], state[scale_of(name)]) for name in names}
    dropped = {"low_bits", *map(scale_of, names)}
    return {key: moments.get(key, v) for key, v in state.items() if key not in dropped}
