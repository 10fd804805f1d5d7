"""Wire codes (FSDP(wire=...)) in torch: what numbers are once they have crossed hosts.

If a loss is a sum of products, a test chooses its gradients, so it can compute the entire encoding
separately, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard

WIRES = ("bf16", "int8")
BLOCK, LEVELS = 256, 127
NUMEL = 29_000  # of the only parameter: shards of many blocks, the last one shorter, and padding


class Products(nn.Module):
    """The parameter's gradient equals the argument of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient(rank: int, step: int = 0) -> Tensor:
    """Numbers of many magnitudes."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(NUMEL, generator=draw) * torch.randn(NUMEL, generator=draw).exp()


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


def decoded(wire: str, numbers: Tensor) -> Tensor:
    """Return the values of float32 numbers after the wire."""
    if wire == "bf16":
        return numbers.bfloat16().float()
    found = [part * 0 for part in numbers.split(BLOCK)]
    for i, part in enumerate(numbers.split(BLOCK)):
        scale = part.abs().max() / LEVELS
        if scale > 0:
            levels = (part / scale).clamp(-LEVELS, LEVELS).round() + 0.0  # an int has no -0
            found[i] = levels * scale
    return torch.cat(found)


class Model:
    """Hosts of `per_host` ranks each, which split the parameter into `parts` shards."""

    def __init__(self, wire: str, hosts: int, per_host: int, parts: int) -> None:
        self.wire, self.hosts, self.per_host = wire, hosts, per_host
        self.slice = math.ceil(NUMEL / parts / 32) * 32
        self.lost = torch.zeros(hosts, parts * self.slice)

    def reduce(self, gradients: list[Tensor]) -> Tensor:
        padded = [torch.zeros_like(self.lost[0]) for _ in gradients]
        for each, given in zip(padded, gradients, strict=True):
            each[:NUMEL] = given
        arrived = []
        for host in range(self.hosts):
            ranks = padded[host * self.per_host : (host + 1) * self.per_host]
            total = ranks[0].clone()
            for other in ranks[1:]:
                total += other
            total += self.lost[host]
            code = torch.cat([decoded(self.wire, part) for part in total.split(self.slice)])
            self.lost[host] = total - code
            arrived.append(code)
        whole = arrived[0].clone()
        for other in arrived[1:]:
            whole += other
        return whole[:NUMEL] / len(gradients)
