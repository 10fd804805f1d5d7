"""The number of collectives per step, and when gathers start.

Over c10d each collective is a torch operation that the profiler records. (Over shm there are none.)

Then the bytes that a rank receives in a step: the formulas of docs/gpus.md, and model.metrics().
The engine determines the traffic for every transport, so the bytes that torch's profiler
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
from models import Parts
from rows import all_refused
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

import zshard
from zshard import FSDP

UNITS = 4
WIDTH = 64


def rooted():
    """Blocks, and the root's own parameters: the same number of units as in the stack below."""
    run = lambda model, x: model.blocks(x) * model.scale[:WIDTH]  # noqa: E731
    blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS - 1)])
    return Parts(run, blocks=blocks, scale=nn.Parameter(torch.ones(2048)))


def stack():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])


def wrap(build, strategy="full_shard", **options):
    torch.manual_seed(0)
    options.setdefault("transport", "c10d")
    return FSDP(build(), strategy=strategy, auto_wrap_policy={nn.Linear}, **options)


def batch():
    torch.manual_seed(1 + dist.get_rank())
    return torch.randn(3, WIDTH)


def step(model, x):
    model(x).square().sum().backward()


@pytest.mark.parametrize("build", [stack, rooted])
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("full_shard", (UNITS, UNITS - 1, UNITS)),
        ("shard_grad_op", (UNITS, 0, UNITS)),
        ("zero1", (0, 0, UNITS)),  # nothing has changed since the first step
    ],
)
@on_ranks(2, 3)
def test_collectives_of_a_step(build, strategy, expected):
    """Gathers in forward, gathers in backward, and exchanges of gradients, in a later step."""
    model, x = wrap(build, strategy), batch()
    step(model, x)
    with Collectives() as forward:
        loss = model(x).sum()
    with Collectives() as backward:
        loss.backward()
    assert forward.scatters == 0
    assert (forward.gathers, backward.gathers, backward.scatters) == expected


@on_ranks(2)
def test_no_sync_reduces_nothing():
    model, x = wrap(stack), batch()
    step(model, x)
    with Collectives() as seen, model.no_sync():
        step(model, x)
    with Collectives() as after:
        step(model, x)
    assert seen.gathers == 2 * UNITS - 1
    assert seen.scatters == 0
    assert after.scatters == UNITS


# --- when gathers start ---------------------------------------------------------------------------

LINEAR = "aten::addmm"  # of a block's forward
BACKWARD = "AddmmBackward0"  # of its backward


HAND = ((1, 2, 3), (1, 0))  # prefetches of the first unit in forward, and of the last in backward
ALONE = {"backward_prefetch": None}


@pytest.mark.parametrize(
    ("options", "by_hand", "forward", "backward"),
    [
        ({}, None, "GGfGfGff", "GbGbGbb"),
        (ALONE, None, "GfGfGfGf", "bGbGbGb"),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, None, "GfGfGfGf", "bGbGbGb"),
        ({"forward_prefetch": True}, None, "GGfGfGff", "GbGbGbb"),
        ({"forward_prefetch": True, "limit_all_gathers": False}, None, "GGGfGfff", "GGbGbbb"),
        (ALONE, HAND, "GGGGffff", "GGbGbbb"),
    ],
)
@pytest.mark.sampled(3)
@on_ranks(2)
def test_prefetch_settings_determine_when_gathers_start(options, by_hand, forward, backward):
    """The order of gathers (G) and computations (f, b) in forward and in backward."""
    model, x = wrap(stack, **options), batch()
    if by_hand is not None:
        model[0].set_modules_to_forward_prefetch([model[i] for i in by_hand[0]])
        model[3].set_modules_to_backward_prefetch([model[i] for i in by_hand[1]])
    step(model, x)
    with Collectives(LINEAR) as first:
        loss = model(x).sum()
    with Collectives(BACKWARD) as second:
        loss.backward()
    short = {LINEAR: "f", BACKWARD: "b", "gather": "G"}
    order = ["".join(short.get(name, "") for name in seen.order) for seen in (first, second)]
    assert order == [forward, backward]


SLOT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a block's full buffer
FAR = {"forward_prefetch": True, "limit_all_gathers": False, "backward_prefetch": None}


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        (ALONE, 0),
        ({}, 1),
        ({"forward_prefetch": True}, 1),
        (FAR, 2),
        ({"backward_prefetch": "backward_post"}, 0),
    ],
)
@on_ranks(2)
def test_prefetch_is_limited(options, ahead):
    """After training, so many blocks ahead have a full buffer. (Results: test_skipped_units.py.)"""
    model = wrap(stack, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        step(model, batch())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch())
    assert model.memory()["slots"] == (1 + ahead) * SLOT


@on_ranks(2)
def test_mistakes_are_named():
    model, other = wrap(stack), wrap(stack)
    of_another = lambda: model[0].set_modules_to_forward_prefetch([other[0]])  # noqa: E731
    a_word = lambda: wrap(stack, backward_prefetch="soon")  # noqa: E731
    all_refused(
        {
            "another model's": (of_another, ValueError, "different models"),
            "a word": (a_word, ValueError, "'soon'"),
        }
    )


# --- bytes that a rank receives in a step ---------------------------------------------------------

LAYERS, SIDE = 5, 128
P = LAYERS * SIDE * SIDE  # elements of all parameters; no unit is padded for 2 or 4 ranks
U = SIDE * SIDE  # of the last unit, which is not gathered for backward: it is still unsharded
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


def layers(strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    linears = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)]
    module = nn.Sequential(*linears)
    return FSDP(module, strategy=strategy, auto_wrap_policy={nn.Linear}, **options)


def full_step(model: Any, optimizer: Any) -> None:
    model(torch.randn(3, SIDE)).float().square().sum().backward()
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
    model = layers(strategy, transport="c10d", mixed_precision=precision, **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        with Collectives() as seen:
            full_step(model, optimizer)
    params, grads = FORMULAS[strategy](world, 2 if strategy in HYBRID else world, bytes_, bytes_)
    # Over c10d the used parameters and the rank's state travel along: 128 bytes to each rank. (On
    # GPUs the hosts exchange them.)
    expected = params, grads + LAYERS * 128 * (world - 1)
    assert (seen.received["gather"], seen.received["scatter"]) == expected
    of_metrics = [0, params + grads] if strategy == "no_shard" else [params, grads]
    assert counted(model) == [*of_metrics, 0, 0]


G = (2 * P - U) * R  # bytes of the gathers of a full_step of full_shard, on all ranks
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
    # Each rank has its own full parameters, which it gathers as over c10d.
    ("auto", (2, 2), "zero1", None): (B / 4, 2 * B / 4, 2 * B / 4, B / 4),
    ("auto", (2, 2), "no_shard", None): (0, 2 * 2 * B / 4, 0, 2 * B / 4),
    # Two shards in a copy of the model: two hosts' sums of each rank's half.
    ("auto", (2, 2), "hybrid_shard", None): (0, 2 * B / 2, 0, B / 2),
    ("shm", (4,), "hybrid_shard", None): (0, 3 * B / 2, 0, 0),
    ("auto", (2, 2), "full_shard", "bf16"): (0, 2 * B / 4, G / 8, B / 8),
}


def check_metrics(transport, sizes, strategy, wire):
    """The bytes in the metrics after the second full_step, on hosts of so many ranks each."""
    gather, reduce, gather_afar, reduce_afar = COUNTED[transport, sizes, strategy, wire]
    with hosts_of(*sizes) as group:
        options: dict[str, Any] = {"process_group": group, "keep_gathered": False, "wire": wire}
        if strategy in HYBRID:  # new groups
            names = ("replicate", "shard")
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            options |= {"process_group": None, "device_mesh": mesh}
        model = layers(strategy, transport=transport, **options)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            full_step(model, optimizer)
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
