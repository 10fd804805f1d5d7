"""FSDP(wire=...) over NCCL: gradients and parameters that cross hosts in fewer bytes.

Ranks seem to be on several hosts. The references are the arithmetic in torch (tests/lib/wires.py)
and, for whole runs, the transport "hosts" on CPUs, whose numbers are the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    ADAM,
    DEEP,
    EXACT,
    KINDS,
    Start,
    device,
    far,
    is_real,
    let_nccl_share_a_gpu,
    on_host,
)
from groups import hosts_of
from models import Case, loss_of, make
from scenarios import message_of
from spawn import RankPool
from torch import Tensor, nn
from wires import (
    NUMEL,
    Model,
    Products,
    Seen,
    decoded,
    steps_after,
    steps_as,
    steps_with_a_scale,
    weights,
)

import zshard
from zshard import FSDP, Wire

Hosts = Callable[[int], RankPool]
SIZES = [(1, 1), (2, 2), (1, 1, 1, 1)]
shapes = pytest.mark.parametrize(
    ("kind", "sizes"), [(kind, sizes) for kind in KINDS for sizes in SIZES]
)


def wrapped(module: nn.Module, group: Any, on_gpu: bool = True, **options: Any) -> Any:
    """Return the module sharded over NCCL, or on the host over "hosts"."""
    options = {"auto_wrap_policy": None, "timeout": 60, **options}
    any_order = options.pop("any_order", False)
    if not on_gpu:
        return FSDP(module, process_group=group, transport="hosts", **options)
    let_nccl_share_a_gpu(dist.get_rank())
    over: Any = "nccl" if is_real() else "c10d"  # of the fakes: the one between their hosts
    if any_order:
        over = zshard.NcclOptions(any_order=True)
    return FSDP(module.to(device()), process_group=group, transport=over, **options)


# --- gradients ------------------------------------------------------------------------------------


def arithmetic(sizes: tuple[int, ...], strategy: str) -> list[bool]:
    """Return which of several steps have the reference's bits."""
    with hosts_of(*sizes) as group:
        model = wrapped(Products(), group, strategy=strategy, wire="bf16")
        assert "gradients cross hosts as bf16" in model.summary()
        beside = Model(len(sizes), sizes[0])
        return steps_as(beside, model, strategy)


@shapes
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@pytest.mark.sampled(6)
def test_bit_identical_to_reference_arithmetic(
    start: Start, kind: str, sizes: tuple[int, ...], strategy: str
) -> None:
    world = sum(sizes)
    found = start(kind, world, "nccl").run(arithmetic, sizes, strategy)
    assert found == [[True] * 4] * world


def scaled(sizes: tuple[int, ...]) -> list[bool]:
    with hosts_of(*sizes) as group:
        return steps_with_a_scale(lambda: wrapped(Products(), group, wire="bf16"))


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_follow_the_loss_scale(start: Start, kind: str) -> None:
    assert start(kind, 2, "nccl").run(scaled, (1, 1)) == [[True] * 4] * 2


def skipped(sizes: tuple[int, ...]) -> tuple[list[float], bool, bool]:
    with hosts_of(*sizes) as group:
        return steps_after(math.inf, wrapped(Products(), group, wire="bf16"))


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_skip_a_step_together(start: Start, kind: str) -> None:
    assert start(kind, 2, "nccl").run(skipped, (1, 1)) == [([2.0, 2.0], True, True)] * 2


# --- bytes ----------------------------------------------------------------------------------------


def counted(wire: str | None) -> list[float]:
    """Return the bytes in the metrics, of gathers and reductions: from all ranks, from other
    hosts."""
    with hosts_of(2, 2) as group:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]  # a shard has 2048 numbers
        model = wrapped(nn.Sequential(*layers), group, wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(3, 64, device=device())).sum().backward()
            optimizer.step()
        found = model.metrics()
    kinds = ("gather", "reduce")
    return [found[f"bytes/{kind}{of}"] for of in ("", "_other_hosts") for kind in kinds]


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_count_bytes(start: Start, kind: str) -> None:
    shard, code = 4 * 2048, 2 * 2048
    pool = start(kind, 4, "nccl")
    assert pool.run(counted, None) == [[3 * shard, 3 * shard, 2 * shard, 2 * shard]] * 4
    assert pool.run(counted, "bf16") == [[3 * code, 2 * shard + code, 2 * code, code]] * 4


# --- parameters -----------------------------------------------------------------------------------


def seen(sizes: tuple[int, ...], dtype: torch.dtype) -> list[bool]:
    """Return whether each forward's parameters, and the shards, are as expected."""
    with hosts_of(*sizes) as group:
        model = wrapped(Seen(dtype), group, wire=Wire(parameters="bf16"))
        exact = weights().to(dtype)
        rounded = decoded(exact)
        code = "bf16" if dtype is torch.float32 else "they are"
        assert f"parameters cross hosts as {code}" in model.summary()
        for _ in range(2):
            model(torch.ones(NUMEL, dtype=dtype, device=device())).backward()
        found = [torch.equal(each, rounded) for each in model.seen]
        found.append(torch.equal(model.state_dict()["weight"].cpu(), exact))
    return found


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(6)
def test_forward_computes_with_decoded_parameters(
    start: Start, kind: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    world = sum(sizes)
    assert start(kind, world, "nccl").run(seen, sizes, dtype) == [[True] * 3] * world


# --- runs, beside those of the hosts transport ----------------------------------------------------


class Choosing(nn.Module):
    """Layers; a forward runs some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: Tensor, path: list[int]) -> Tensor:
        for i in path:
            x = torch.tanh(self.layers[i](x))
        return x


CHOOSING = Case(Choosing, lambda generator: torch.randn(4, 40, generator=generator), {nn.Linear})
PATHS = {
    "all": lambda rank, step: [0, 1, 2, 3],
    "one host": lambda rank, step: [0, 1, 2, 3] if rank < 2 else [0, 3],
    "one rank": lambda rank, step: [0, 1, 2, 3] if rank == step else [0, 3],
}
"""Which layers a rank of four, on two hosts, runs at a step."""


def trained(on_gpu: bool, path: str, strategy: str) -> dict[str, Tensor]:
    """Return the parameters after some steps, and the losses."""
    with hosts_of(2, 2) as group:
        there = device() if on_gpu else torch.device("cpu")
        how = {"auto_wrap_policy": CHOOSING.policy, "strategy": strategy, "wire": "bf16"}
        model = wrapped(make(CHOOSING.make), group, on_gpu, any_order=path != "all", **how)
        optimizer, losses = zshard.AdamW(model.parameters(), lr=0.01), []
        for step in range(4):
            x = CHOOSING.batch(step, dist.get_rank()).to(there)
            loss = loss_of(model(x, PATHS[path](dist.get_rank(), step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        found = {**on_host(model.state_dict()), "losses": torch.stack(losses)}
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_trains_with_the_numbers_of_hosts(
    start: Start, hosts: Hosts, kind: str, strategy: str, path: str
) -> None:
    ours = start(kind, 4, "nccl").run(trained, True, path, strategy)
    theirs = hosts(4).run(trained, False, path, strategy)
    for mine, other in zip(ours, theirs, strict=True):
        assert far(mine, other, EXACT if kind == "stand-in" else ADAM) == []


def losses_of(raises: bool) -> list[float]:
    """Return the losses of three steps. raises: before each, a backward raises on all ranks."""
    with hosts_of(1, 1) as group:
        model = wrapped(make(DEEP.make), group, auto_wrap_policy=DEEP.policy, wire="bf16")
        optimizer, losses = zshard.AdamW(model.parameters(), lr=0.01), []
        for step in range(3):
            x = DEEP.batch(step, dist.get_rank()).to(device())
            if raises:
                out = model(x)
                out.register_hook(lambda grad: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    loss_of(out).backward()
                optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_that_raises_changes_nothing(start: Start, kind: str) -> None:
    ranks = start(kind, 2, "nccl")
    assert ranks.run(losses_of, True) == ranks.run(losses_of, False)


# --- memory, and what is refused ------------------------------------------------------------------


def sizes_of(wire: Any) -> tuple[int, int]:
    """Return the transport's memory as predicted, and at its peak."""
    with hosts_of(2, 2) as group:
        model = wrapped(make(DEEP.make), group, auto_wrap_policy=DEEP.policy, wire=wire)
        predicted = model.memory("predicted")["transport"]
        for step in range(2):
            loss_of(model(DEEP.batch(step, dist.get_rank()).to(device()))).backward()
        peak = model.memory("peak")["transport"]
    return int(predicted), int(peak)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_as_predicted(start: Start, kind: str) -> None:
    ranks = start(kind, 4, "nccl")
    exact = ranks.run(sizes_of, None)
    for wire in ("bf16", Wire(gradients="bf16"), Wire(parameters="bf16")):
        for (predicted, peak), (before, _) in zip(ranks.run(sizes_of, wire), exact, strict=True):
            assert predicted == peak > before


def refused() -> str:
    with hosts_of(1, 1) as group:
        module = Products().to(device())
        return message_of(
            lambda: FSDP(module, process_group=group, transport="c10d", wire="bf16"),
            NotImplementedError,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_refused_over_c10d(start: Start, kind: str) -> None:
    for message in start(kind, 2, "c10d").run(refused):
        assert "wire='bf16' is not supported by transport='c10d'" in message
        assert "transport='nccl'" in message


def on_one_host() -> str:
    return str(wrapped(Products(), dist.new_group(), wire="bf16").summary())


@pytest.mark.parametrize("kind", KINDS)
def test_no_effect_on_one_host(start: Start, kind: str) -> None:
    for summary in start(kind, 2, "nccl").run(on_one_host):
        assert "wire='bf16' has no effect on one host" in summary
