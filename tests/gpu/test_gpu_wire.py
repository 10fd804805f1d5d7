"""FSDP(wire=...) over NCCL: gradients and parameters that cross hosts in fewer bytes.

Ranks seem to be on several hosts. The references are the arithmetic in torch (tests/lib/wires.py)
and, for whole runs, the transport "hosts" on CPUs, whose numbers are the same.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    DEEP,
    KINDS,
    Hosts,
    Start,
    adamw,
    compare,
    device,
    on_device,
    on_host,
    over,
    train,
)
from groups import hosts_of
from models import Case, loss_of, make
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

from zshard import FSDP, Wire

SIZES = [(1, 1), (2, 2), (1, 1, 1, 1)]
shapes = pytest.mark.parametrize(
    ("kind", "world", "sizes"), [(kind, sum(sizes), sizes) for kind in KINDS for sizes in SIZES]
)


def wrapped(module: nn.Module, group: Any, on_gpu: bool = True, **options: Any) -> Any:
    """Return the module sharded over NCCL, or on the host over "hosts"."""
    transport: Any = "hosts"
    if on_gpu:
        transport = over("nccl", options.pop("any_order", False))
        transport = "c10d" if transport == "shm" else transport  # the one between the fakes' hosts
        module = module.to(device())
    options = {"auto_wrap_policy": None, "timeout": 60, **options}
    return FSDP(module, process_group=group, transport=transport, **options)


# --- gradients ------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1", "no_shard"])
@pytest.mark.sampled(6)
@on_device(0, "nccl")
def test_bit_identical_to_reference_arithmetic(
    kind: str, world: int, sizes: tuple[int, ...], strategy: str
) -> None:
    with hosts_of(*sizes) as group:
        model = wrapped(Products(), group, strategy=strategy, wire="bf16")
        assert "gradients cross hosts as bf16" in model.summary()
        beside = Model(len(sizes), sizes[0])
        assert steps_as(beside, model, strategy) == [True] * 4


@on_device(2, "nccl")
def test_residuals_follow_the_loss_scale() -> None:
    with hosts_of(1, 1) as group:
        steps = steps_with_a_scale(lambda: wrapped(Products(), group, wire="bf16"))
    assert steps == [True] * 4


@on_device(2, "nccl")
def test_all_ranks_skip_a_step_together() -> None:
    with hosts_of(1, 1) as group:
        steps = steps_after(math.inf, wrapped(Products(), group, wire="bf16"))
    assert steps == ([2.0, 2.0], True, True)


# --- bytes ----------------------------------------------------------------------------------------


SHARD, CODE = 4 * 2048, 2 * 2048
BYTES = {
    None: [3 * SHARD, 3 * SHARD, 2 * SHARD, 2 * SHARD],
    "bf16": [3 * CODE, 2 * SHARD + CODE, 2 * CODE, CODE],
}
"""By wire: of gathers and reductions from all ranks, and from other hosts."""


@pytest.mark.parametrize("wire", BYTES)
@pytest.mark.sampled(4)
@on_device(4, "nccl")
def test_metrics_count_bytes(wire: str | None) -> None:
    with hosts_of(2, 2) as group:
        layers = [nn.Linear(64, 64, bias=False) for _ in range(2)]  # a shard has 2048 numbers
        model = wrapped(nn.Sequential(*layers), group, wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(3, 64, device=device())).sum().backward()
            optimizer.step()
        metrics = model.metrics()
    kinds = [f"bytes/{kind}{of}" for of in ("", "_other_hosts") for kind in ("gather", "reduce")]
    assert [metrics[kind] for kind in kinds] == BYTES[wire]


# --- parameters -----------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(6)
@on_device(0, "nccl")
def test_forward_computes_with_decoded_parameters(
    kind: str, world: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    with hosts_of(*sizes) as group:
        model = wrapped(Seen(dtype), group, wire=Wire(parameters="bf16"))
        exact = weights().to(dtype)
        code = "bf16" if dtype is torch.float32 else "they are"
        assert f"parameters cross hosts as {code}" in model.summary()
        for _ in range(2):
            model(torch.ones(NUMEL, dtype=dtype, device=device())).backward()
        assert all(torch.equal(each, decoded(exact)) for each in model.seen)
        assert torch.equal(model.state_dict()["weight"].cpu(), exact)


# --- runs, compared with those of the hosts transport ---------------------------------------------


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
"""The layers that a rank of four, on two hosts, runs at a step."""


def train_over(backend: str | None, path: str, strategy: str) -> dict[str, Tensor]:
    """Return the parameters after some steps, and the losses."""
    with hosts_of(2, 2) as group:
        there = device() if backend else torch.device("cpu")
        how = {"auto_wrap_policy": CHOOSING.policy, "strategy": strategy, "wire": "bf16"}
        if backend:
            how["any_order"] = path != "all"
        model = wrapped(make(CHOOSING.make), group, bool(backend), **how)
        optimizer, losses = adamw(model), []
        for step in range(4):
            x = CHOOSING.batch(step, dist.get_rank()).to(there)
            loss = loss_of(model(x, PATHS[path](dist.get_rank(), step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        return {**on_host(model.state_dict()), "losses": torch.stack(losses)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_trains_with_the_numbers_of_hosts(
    start: Start, hosts: Hosts, kind: str, strategy: str, path: str
) -> None:
    compare(start, hosts, (kind, 4, "nccl"), train_over, path, strategy)


def deep(group: Any, **options: Any) -> Any:
    return wrapped(make(DEEP.make), group, auto_wrap_policy=DEEP.policy, **options)


@on_device(2, "nccl")
def test_a_backward_that_raises_changes_nothing() -> None:
    losses: list[list[float]] = []
    with hosts_of(1, 1) as group:
        for raises in (False, True):
            model = deep(group, wire="bf16")
            optimizer, rank = adamw(model), dist.get_rank()
            losses.append([])
            for step in range(3):
                if raises:
                    out = model(DEEP.batch(step, rank).to(device()))
                    out.register_hook(lambda grad: 1 / 0)
                    with contextlib.suppress(ZeroDivisionError):
                        loss_of(out).backward()
                losses[-1] += train(model, optimizer, steps=1, rank=rank)
    assert losses[0] == losses[1]


# --- memory, and refusals -------------------------------------------------------------------------


@on_device(4, "nccl")
def test_memory_is_as_predicted() -> None:
    sizes = []
    for wire in (None, "bf16", Wire(gradients="bf16"), Wire(parameters="bf16")):
        with hosts_of(2, 2) as group:
            model = deep(group, wire=wire)
            sizes.append(model.memory("predicted")["transport"])
            for step in range(2):
                loss_of(model(DEEP.batch(step, dist.get_rank()).to(device()))).backward()
            assert wire is None or model.memory("peak")["transport"] == sizes[-1]
    assert all(size > sizes[0] for size in sizes[1:])


@on_device(2)
def test_refused_over_c10d() -> None:
    words = "wire='bf16' is not supported by transport='c10d'.*transport='nccl'"
    with hosts_of(1, 1) as group, pytest.raises(NotImplementedError, match=f"(?s){words}"):
        FSDP(Products().to(device()), process_group=group, transport="c10d", wire="bf16")


@on_device(2, "nccl")
def test_no_effect_on_one_host() -> None:
    summary = wrapped(Products(), dist.new_group(), wire="bf16").summary()
    assert "wire='bf16' has no effect on one host" in summary
