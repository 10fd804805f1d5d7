"""A small training run with deterministic="any-world", on any number of ranks."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard
from zshard import FSDP
from zshard.ranks.agreement import bytes_of

VOCABULARY, WIDTH, LENGTH, BATCH = 50, 24, 9, 2

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: zshard.AdamW(model.parameters(), lr=1e-2),
    "adamw 8 bit": lambda model: zshard.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=64),
    "rounding": lambda model: zshard.AdamW(model.parameters(), lr=1e-2, stochastic_rounding=True),
    "torch's momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "muon": lambda model: zshard.Muon(model, lr=1e-2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Tied weights, a block that some micro-batches leave out, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.seldom = Block()
        self.never = nn.Linear(3, 3)

    def forward(self, tokens: Tensor, seldom: bool) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.seldom(x) if seldom else x
        return self.head(x)  # type: ignore[no-any-return]


def batch_of(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
    tokens = batch_of(step, index)
    logits = model(tokens[:, :-1], seldom=index % 3 == 1).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def make(micro_batches: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return FSDP(
        Model(),
        auto_wrap_policy={Block},
        deterministic="any-world",
        micro_batches=micro_batches,
        timeout=30,
        **options,
    )


def train_step(model: Any, optimizer: Any, step: int) -> dict[tuple[int, int], float]:
    """Return the losses of this rank's micro-batches, by step and number."""
    losses = {}
    for index in model.micro_batches(step):
        loss = loss_of(model, step, index)
        loss.backward()
        losses[step, index] = loss.item()
    model.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def digest_of(model: Any, *more: object) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + bytes_of(value.contiguous()))
    digest.update(repr(more).encode())
    return digest.hexdigest()[:16]


def train(
    micro_batches: int = 6,
    optimizer: str = "adamw",
    steps: int = 4,
    per_host: int = 0,
    bf16: bool = False,
    **options: Any,
) -> tuple[dict[tuple[int, int], float], str]:
    """Train on this rank; return its losses, and a digest of weights and norms.

    per_host: pretend to be on hosts with so many ranks each.
    """
    if per_host:
        os.environ["ZSHARD_HOST"] = f"host {int(os.environ['RANK']) // per_host}"
    if bf16:
        options["mixed_precision"] = zshard.MixedPrecision(torch.bfloat16)
    model = make(micro_batches, **options)
    stepped = OPTIMIZERS[optimizer](model)
    losses: dict[tuple[int, int], float] = {}
    norms = []
    for step in range(steps):
        losses |= train_step(model, stepped, step)
        norms.append(model.metrics()["grad_norm"])
    found = losses, digest_of(model, norms)
    if dist.is_initialized():
        dist.barrier()
    return found
