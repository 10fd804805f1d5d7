"""A byte-level GPT in plain PyTorch, without a line of code for sharding.

The model is written for a single process, and `FSDP(model)` finds the repeated
blocks. The vocabulary is the 256 byte values, so there is no tokenizer: `bytes` in, `bytes` out.

Shapes use B (batch), T (time, at most the context), D (width), H (heads) and V = 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Config:
    """The shape of a GPT. `context` is the longest sequence, in bytes."""

    layers: int
    width: int
    heads: int
    context: int = 128

    def parameter_count(self) -> int:
        """The number of parameters of `GPT(self)`."""
        block = 12 * self.width**2 + 13 * self.width  # weights, then biases and the two norms
        ends = 2 * VOCABULARY * self.width + 2 * self.width  # embedding, head, last norm
        return self.layers * block + ends


SIZES = {
    "tiny": Config(layers=2, width=64, heads=2, context=64),
    "5m": Config(layers=6, width=256, heads=4),
    "10m": Config(layers=6, width=384, heads=6),
    "85m": Config(layers=12, width=768, heads=12),
    "350m": Config(layers=28, width=1024, heads=16),
}


class Rotation(NamedTuple):
    """Rotary positions: the cosines and sines of a position's angles, each (T, D / H / 2)."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, time: int, size: int, device: torch.device) -> Rotation:
        """For heads of even `size`; pair i turns by 10,000^(-2i / size) per position."""
        rates = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.arange(time, device=device)[:, None] * rates
        return cls(angles.cos(), angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        """Rotate each pair (x[i], x[i + half]) of (B, H, T, D / H) by its position's angle.

        The product of a rotated query and key then depends only on their distance.
        """
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (
                first * self.cosines - second * self.sines,
                first * self.sines + second * self.cosines,
            ),
            dim=-1,
        )


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D / H)
        query, key = rotation.turn(query), rotation.turn(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Position-wise network: (B, T, D) -> (B, T, D), with a hidden width of 4 D."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, 4 * config.width)
        self.output = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.inner(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes (B, T) int64 -> logits (B, T, V); with targets (B, T), the mean loss, nats per byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(VOCABULARY, config.width)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialize(blocks)

    def _initialize(self, blocks: list[Block]) -> None:
        """Variances independent of depth and width; a small head: almost uniform first guesses."""
        depth = 2 * len(blocks)  # terms that the blocks add to the residual stream
        for block in blocks:
            for layer in (block.attention.query_key_value, block.mlp.inner):
                _draw(layer, std=layer.in_features**-0.5)
            for layer in (block.attention.output, block.mlp.output):
                _draw(layer, std=(depth * layer.in_features) ** -0.5)
        nn.init.normal_(self.byte_embedding.weight)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(
                f"a sequence of {time} bytes exceeds the model's context of {self.config.context}"
            )
        head_size = self.config.width // self.config.heads
        rotation = Rotation.of(time, head_size, tokens.device)
        x = self.byte_embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def _draw(layer: nn.Linear, std: float) -> None:
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
