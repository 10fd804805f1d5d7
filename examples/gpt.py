"""A byte-level GPT in plain PyTorch: nothing here knows that it will be sharded.

The vocabulary is the 256 bytes, so there is no tokenizer: text goes in as `bytes` and comes out as
`bytes`. The one idea to take from this file is what it does not contain: the model is written as for
one process, and `FSDP(model)` in train_gpt.py finds the repeated blocks by itself.

Shapes use B (batch), T (time, at most the context), D (width), H (heads) and V = 256.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """How many parameters `GPT(self)` has."""
        block = 12 * self.width**2 + 13 * self.width  # weights, then biases and the two norms
        embeddings = (2 * VOCABULARY + self.context) * self.width
        return self.layers * block + embeddings + 2 * self.width


SIZES = {
    "tiny": Config(layers=2, width=64, heads=2, context=64),
    "10m": Config(layers=6, width=384, heads=6),
    "85m": Config(layers=12, width=768, heads=12),
    "350m": Config(layers=28, width=1024, heads=16),
}


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D / H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Position-wise network: (B, T, D) -> (B, T, D), four times as wide inside."""

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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes (B, T) int64 -> logits (B, T, V); with `targets` (B, T), the mean loss in nats a byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialize)
        # Each block adds two terms to the residual stream: its variance then does not grow with depth.
        for block in self.blocks:
            for layer in (block.attention.output, block.mlp.output):
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(
                f"{time} bytes do not fit into the model's context of {self.config.context}"
            )
        positions = torch.arange(time, device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
