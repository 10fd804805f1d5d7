"""The models of the benchmarks, plain fp32 torch without dropout: two sides with the same seed must
give the same losses. A Workload holds everything a side needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with its data. `batch` draws one rank's (inputs, targets); `lr` keeps it finite."""

    name: str
    build: Callable[[], nn.Module]
    units: frozenset[type[nn.Module]]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    lr: float

    def parameters(self) -> int:
        """Return the number of elements of all parameters."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        split = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class MLP(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GPTBlock(nn.Module):
    """Pre-norm decoder block, the unit of the GPTs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), SelfAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A GPT, byte-level by default: int64 [batch, seq] to logits [batch, seq, vocabulary].

    tied: the head shares the embedding's weight, initialized as in GPT-2.
    """

    VOCABULARY = 256

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        seq: int,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(seq, width) * 0.02)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.token.weight, std=0.02)
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class BertClassifier(nn.Module):
    """BERT-base with pooler and classifier: int64 [batch, seq] to fp32 logits [batch, labels]."""

    VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, labels: int = 2):
        super().__init__()
        self.word = nn.Embedding(self.VOCABULARY, width)
        self.position = nn.Embedding(self.POSITIONS, width)
        self.segment = nn.Embedding(self.SEGMENTS, width)
        self.norm = nn.LayerNorm(width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, labels)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.word(ids) + self.position(places) + self.segment(torch.zeros_like(ids))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return logits


class TinyBlock(nn.Module):
    """A residual block with almost no arithmetic, so that the library's overhead dominates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def build_stack(layers: int, width: int) -> nn.Sequential:
    """Return `layers` times Linear + ReLU with He initialization: by torch's, gradients shrink by
    2.4 per layer, and the CPU's slow path for denormal numbers would be timed."""
    stack = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        stack.extend([linear, nn.ReLU()])
    return stack


def _text_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())


def _row_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]).to(batch[1].dtype), batch[1])  # on a GPU, of one dtype


def gpt(
    name: str,
    layers: int,
    width: int,
    seq: int,
    rows: int,
    vocabulary: int = GPT.VOCABULARY,
    tied: bool = False,
) -> Workload:
    """Return a GPT with head size 64 and batches of `rows` random texts of `seq` tokens."""

    def batch(generator: torch.Generator) -> Batch:
        text = torch.randint(vocabulary, (rows, seq + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def build() -> nn.Module:
        return GPT(layers, width, width // 64, seq, vocabulary, tied)

    return Workload(name, build, frozenset({GPTBlock}), batch, _text_loss, lr=1e-4)


def _bert(rows: int, seq: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        ids = torch.randint(BertClassifier.VOCABULARY, (rows, seq), generator=generator)
        return ids, torch.randint(2, (rows,), generator=generator)

    return Workload(
        "bert", BertClassifier, frozenset({nn.TransformerEncoderLayer}), batch, _text_loss, lr=2e-5
    )


def rows(
    name: str, build: Callable[[], nn.Module], unit: type[nn.Module], rows: int, width: int
) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        pair = torch.randn(2, rows, width, generator=generator)
        return pair[0], pair[1]

    return Workload(name, build, frozenset({unit}), batch, _row_loss, lr=1e-5)


TINY_BLOCKS = 32
"""Number of units of the host-time model; its root has no parameters."""


def build_tiny() -> nn.Sequential:
    return nn.Sequential(*(TinyBlock(16) for _ in range(TINY_BLOCKS)))


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        gpt("gpt10m", layers=6, width=384, seq=128, rows=8),
        gpt("gpt85m", layers=12, width=768, seq=64, rows=2),
        rows("stack100", lambda: build_stack(100, 1024), nn.Linear, rows=16, width=1024),
        rows("stack128", lambda: build_stack(128, 2048), nn.Linear, rows=8, width=2048),
        _bert(rows=2, seq=64),
        rows("tiny32", build_tiny, TinyBlock, rows=4, width=16),
    )
}
