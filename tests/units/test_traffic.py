"""The bytes that a rank receives in a step: the formulas of docs/gpus.md.

The engine determines the traffic, whatever transport carries it, so the bytes that torch's profiler
records over c10d apply to a GPU's backends as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collectives import Collectives
from groups import mesh_of
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP

UNITS, WIDTH = 5, 128
P = UNITS * WIDTH * WIDTH  # elements of all parameters; no unit is padded for 2 or 4 ranks
U = WIDTH * WIDTH  # of the last unit, which is not gathered for backward: it is still unsharded
R = 4  # bytes of an element at rest, and of a gradient of an unsharded parameter
HYBRID = ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")

Formula = Callable[[int, int, int, int], tuple[float, float]]
"""(ranks, of them in a copy, bytes of an element computed with, bytes of one sent) -> bytes of
parameters, bytes of gradients."""

FORMULAS: dict[str, Formula] = {
    "full_shard": lambda w, s, c, g: ((2 * P - U) * c * (w - 1) / w, P * g * (w - 1) / w),
    "shard_grad_op": lambda w, s, c, g: (P * c * (w - 1) / w, P * g * (w - 1) / w),
    "zero1": lambda w, s, c, g: (P * c * (w - 1) / w, P * g * (w - 1) / w),
    "no_shard": lambda w, s, c, g: (P * R * (w - 1) / w, P * R * (w - 1) / w),
    "hybrid_shard": lambda w, s, c, g: ((2 * P - U) * c * (s - 1) / s, P * g * (w - 1) / s),
    "hybrid_shard_zero2": lambda w, s, c, g: (P * c * (s - 1) / s, P * g * (w - 1) / s),
    "hybrid_full": lambda w, s, c, g: (
        (2 * P - U) * c * (s - 1) / s + P * c * (1 / s - 1 / w),
        P * g * (w - 1) / w,
    ),
}


def traffic(strategy: str, precision: Any) -> tuple[int, int]:
    """Return the bytes of parameters and of gradients that this rank receives in the second
    step."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
    options: dict[str, Any] = {"device_mesh": mesh_of(2, 2)} if strategy in HYBRID else {}
    model = FSDP(
        nn.Sequential(*layers),
        strategy=strategy,
        transport="c10d",
        auto_wrap_policy={nn.Linear},
        mixed_precision=precision,
        **options,
    )
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        with Collectives() as seen:
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.received["gather"], seen.received["scatter"]


BF16 = zshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@pytest.mark.sampled(4)
@ranks(2, 4)
@pytest.mark.parametrize(("precision", "bytes_"), [(None, 4), (BF16, 2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", FORMULAS)
def test_bytes_of_a_step_match_the_formulas(
    pool: Any, strategy: str, precision: Any, bytes_: int
) -> None:
    if strategy in HYBRID and pool.world != 4:
        pytest.skip("a mesh of two by two")
    copy = 2 if strategy in HYBRID else pool.world
    params, grads = FORMULAS[strategy](pool.world, copy, bytes_, bytes_)
    # Over c10d the used parameters and the rank's state travel along: 128 bytes to each rank. (On
    # GPUs the hosts exchange them.)
    expected = params, grads + UNITS * 128 * (pool.world - 1)
    assert pool.run(traffic, strategy, precision) == [expected] * pool.world
