"""The bytes that a rank receives in a step: the formulas of docs/gpus.md, and model.metrics().

The engine determines the traffic, whatever transport carries it, so the bytes that torch's profiler
records over c10d apply to a GPU's backends as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from groups import hosts_of, mesh_of
from spawn import on_ranks
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


def wrapped(strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
    module = nn.Sequential(*layers)
    return FSDP(module, strategy=strategy, auto_wrap_policy={nn.Linear}, **options)


def step(model: Any, optimizer: Any) -> None:
    model(torch.randn(3, WIDTH)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def counted(model: Any) -> list[float]:
    """Return the bytes in the model's metrics, of parameters and of gradients: from all ranks, and
    from other hosts."""
    metrics = model.metrics()
    kinds = ("gather", "reduce", "gather_other_hosts", "reduce_other_hosts")
    return [metrics[f"bytes/{kind}"] for kind in kinds]


BF16 = zshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("precision", "bytes_"), [(None, 4), (BF16, 2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", FORMULAS)
@on_ranks(2, 4)
def test_bytes_of_a_step_match_the_formulas(strategy, precision, bytes_):
    world, options = dist.get_world_size(), {}
    if strategy in HYBRID:
        options = {"device_mesh": mesh_of(world // 2, 2)}
    model = wrapped(strategy, transport="c10d", mixed_precision=precision, **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        with Collectives() as seen:
            step(model, optimizer)
    params, grads = FORMULAS[strategy](world, 2 if strategy in HYBRID else world, bytes_, bytes_)
    # Over c10d the used parameters and the rank's state travel along: 128 bytes to each rank. (On
    # GPUs the hosts exchange them.)
    expected = params, grads + UNITS * 128 * (world - 1)
    assert (seen.received["gather"], seen.received["scatter"]) == expected
    of_metrics = [0, params + grads] if strategy == "no_shard" else [params, grads]
    assert counted(model) == [*of_metrics, 0, 0]


G = (2 * P - U) * R  # bytes of the gathers of a step of full_shard, on all ranks
B = P * R  # bytes of all parameters, and of all gradients

# For each transport, hosts, strategy and wire: bytes of parameters and of gradients from this host,
# and from others.
COUNTED: dict[tuple[str, tuple[int, ...], str, str | None], tuple[float, float, float, float]] = {
    # Over shm only gradients are read, each rank's shard of them from the peers.
    ("shm", (2,), "full_shard", None): (0, B / 2, 0, 0),
    ("shm", (2,), "zero1", None): (0, B / 2, 0, 0),
    ("shm", (2,), "no_shard", None): (0, B / 2 + B / 2, 0, 0),
    ("shm", (4,), "full_shard", None): (0, 3 * B / 4, 0, 0),
    # c10d knows hosts, and sends as if there were none.
    ("c10d", (2, 2), "full_shard", None): (G / 4, B / 4, 2 * G / 4, 2 * B / 4),
    ("c10d", (2, 2), "no_shard", None): (0, 2 * B / 4, 0, 2 * 2 * B / 4),
    # On two hosts "auto" is "hosts": a rank sums its host's gradients of its shard and of its
    # counterpart's, and one shard crosses.
    ("auto", (1, 1), "full_shard", None): (0, 0, G / 2, B / 2),
    ("auto", (2, 2), "full_shard", None): (0, 2 * B / 4, G / 4, B / 4),
    # Each rank has full parameters of its own, which it gathers as over c10d.
    ("auto", (2, 2), "zero1", None): (B / 4, 2 * B / 4, 2 * B / 4, B / 4),
    ("auto", (2, 2), "no_shard", None): (0, 2 * 2 * B / 4, 0, 2 * B / 4),
    # Two shards in a copy of the model: two hosts' sums of each rank's half.
    ("auto", (2, 2), "hybrid_shard", None): (0, 2 * B / 2, 0, B / 2),
    ("shm", (4,), "hybrid_shard", None): (0, 3 * B / 2, 0, 0),
    ("auto", (2, 2), "full_shard", "bf16"): (0, 2 * B / 4, G / 8, B / 8),
}


def check_metrics(transport, sizes, strategy, wire):
    """The bytes in the metrics after the second step, on hosts of so many ranks each."""
    gather, reduce, gather_afar, reduce_afar = COUNTED[transport, sizes, strategy, wire]
    with hosts_of(*sizes) as group:
        options: dict[str, Any] = {"process_group": group, "keep_gathered": False, "wire": wire}
        if strategy in HYBRID:  # new groups
            names = ("replicate", "shard")
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            options |= {"process_group": None, "device_mesh": mesh}
        model = wrapped(strategy, transport=transport, **options)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            step(model, optimizer)
        expected = [gather + gather_afar, reduce + reduce_afar, gather_afar, reduce_afar]
        assert counted(model) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [case for case in COUNTED if sum(case[1]) == 2], ids=str)
@on_ranks(2)
def test_metrics_count_bytes_of_two_ranks(case):
    check_metrics(*case)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [case for case in COUNTED if sum(case[1]) == 4], ids=str)
@on_ranks(4)
def test_metrics_count_bytes_of_four_ranks(case):
    check_metrics(*case)
