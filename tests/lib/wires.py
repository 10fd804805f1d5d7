"""Wire codes (FSDP(wire=...)) in torch: the values of numbers that have crossed hosts; and the
comparisons that ranks make on CPUs and on GPUs.

If a loss is a sum of products, a test chooses its gradients, so it can compute the entire encoding
separately, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard

NUMEL = 29_000  # of the only parameter: shards with padding


class Products(nn.Module):
    """The parameter's gradient equals the argument of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Seen(Products):
    """Records the parameters of its forwards."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(weights().to(dtype))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().cpu().clone())
        return super().forward(x)


def weights(seed: int = 0) -> Tensor:
    """Numbers of many magnitudes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=draw) * torch.randn(NUMEL, generator=draw).exp()


def gradient(rank: int, step: int = 0) -> Tensor:
    return weights(100 * rank + step)


def reduced(model: Any, gradients: Tensor) -> Tensor:
    """Return the full reduced gradient; collective."""
    model.zero_grad()
    model(gradients.to(model.weight.device)).backward()
    local = zshard.to_local(model.weight.grad).flatten().cpu()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (zshard.shard_info(model.weight)["begin"], local))
    whole = torch.zeros(NUMEL)
    for begin, part in parts:
        whole[begin : begin + part.numel()] = part
    return whole


def decoded(numbers: Tensor) -> Tensor:
    """Return the values of float32 numbers after the wire; others cross as they are."""
    return numbers.bfloat16().float() if numbers.dtype is torch.float32 else numbers


class Model:
    """Hosts of `per_host` ranks each."""

    def __init__(self, hosts: int, per_host: int) -> None:
        self.hosts, self.per_host = hosts, per_host
        self.lost = torch.zeros(hosts, NUMEL)

    def reduce(self, gradients: list[Tensor]) -> Tensor:
        arrived = []
        for host in range(self.hosts):
            first, *others = gradients[host * self.per_host : (host + 1) * self.per_host]
            total = first.clone()
            for other in others:
                total += other
            total += self.lost[host]
            code = decoded(total)
            self.lost[host] = total - code
            arrived.append(code)
        whole = arrived[0].clone()
        for other in arrived[1:]:
            whole += other
        return whole / len(gradients)


# --- on ranks -------------------------------------------------------------------------------------


def steps_as(beside: Model, model: Any, strategy: str) -> list[bool]:
    """Return which of several steps have the bits of `beside`; `model` is Products, wrapped."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    there = model.weight.device
    for step in range(4):
        if strategy == "no_shard":
            model.zero_grad()
            model(gradient(rank, step).to(there)).backward()
            whole = model.weight.grad.cpu()
        else:
            whole = reduced(model, gradient(rank, step))
        exact = beside.reduce([gradient(rank, step) for rank in range(world)])
        found.append(torch.equal(whole, exact))
    return found


def steps_with_a_scale(wrapped: Callable[[], Any]) -> list[bool]:
    """Return which steps have the same gradients with a loss scale that grows, and without one."""
    found = []
    for scale in (False, True):
        model = wrapped()
        there = model.weight.device
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        scaler = zshard.GradScaler(there.type, 1.0, growth_interval=1, enabled=scale)
        grads = []
        for step in range(4):
            model.zero_grad()
            scaler.scale(model(gradient(dist.get_rank(), step).to(there))).backward()
            scaler.unscale_(optimizer)
            grads.append(zshard.to_local(model.weight.grad).clone())
            scaler.step(optimizer)
            scaler.update()
        found.append(grads)
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]


def steps_after(bad: float, model: Any) -> tuple[list[float], bool, bool]:
    """After a bad gradient on the last rank: is the step skipped, and is the next one finite?"""
    there, rank = model.weight.device, dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = zshard.GradScaler(there.type, init_scale=4.0)
    found = []
    for step in range(2):
        grads = gradient(rank, step)
        if step == 0 and rank == dist.get_world_size() - 1:
            grads[5] = bad
        model.zero_grad()
        scaler.scale(model(grads.to(there))).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    weight = model.state_dict()["weight"]
    return found, bool(weight.isfinite().all()), bool((weight != 0).any())
