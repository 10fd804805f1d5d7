"""Micro-batches of a trainer under zshard's mixed precision, for the tests of adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zshard

MICRO = 16
LOW = zshard.MixedPrecision(torch.bfloat16)
STRATEGY = "no_shard"  # which sends gradients without a cast: all errors are those of the sums


def full_grads(module: Any) -> list[Tensor]:
    return [zshard.full_tensor(param.grad).clone() for param in module.parameters()]


def check_sums(gradients: Callable[[], list[Tensor]]) -> None:
    """Fail unless what gradients() returns, as it trains within no_sync(), is near the same where
    each backward reduces, which sums in float32."""
    ours = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zshard.FSDP, "no_sync", lambda model: contextlib.nullcontext())
        theirs = gradients()
    pairs = zip(ours, theirs, strict=True)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    assert max(errors) < 2e-6, errors
