"""A transformer from its dimensions, to be traced: GPT's block or Llama's, with a causal mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten


class Dims(NamedTuple):
    """The dimensions of a decoder.

    layers, width, heads, kv_heads, ffn (width of the MLP), vocab, seq (tokens in a sequence).
    gated: an MLP of three matrices (SwiGLU) with RMSNorm and rotary positions, as Llama's; else of
    two (GELU) with LayerNorm and learned positions, as GPT's. tied: the head shares the weight of
    the embedding. lora: the rank of LoRA's adapters, which all linear layers of the blocks get; all
    else is frozen. 0: everything is trained.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    tied: bool = False
    bias: bool = False
    lora: int = 0


class Adapted(nn.Linear):
    """A linear layer with LoRA's two small matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.adapters = nn.Sequential(
            nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x) + self.adapters(x)
        return found


def _linear(dims: Dims, inputs: int, outputs: int) -> nn.Linear:
    if dims.lora:
        return Adapted(inputs, outputs, dims.lora, dims.bias)
    return nn.Linear(inputs, outputs, bias=dims.bias)


class Attention(nn.Module):
    """Q, K and V by three matrices if gated (as Llama), by one if not (as GPT); then the output."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        head = dims.width // dims.heads
        kv = dims.kv_heads * head
        sizes = (dims.width, kv, kv) if dims.gated else (dims.width + 2 * kv,)
        self.qkv = nn.ModuleList(_linear(dims, dims.width, size) for size in sizes)
        self.out = _linear(dims, dims.width, dims.width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        batch, seq, width = x.shape
        heads, kv, head = self.dims.heads, self.dims.kv_heads, self.dims.width // self.dims.heads
        parts = [matrix(x) for matrix in self.qkv]
        if len(parts) == 1:
            parts = list(parts[0].split([heads * head, kv * head, kv * head], -1))
        q, k, v = (part.view(batch, seq, -1, head).transpose(1, 2) for part in parts)
        if turn is not None:
            q, k = _rotate(q, turn), _rotate(k, turn)
        if kv != heads:
            k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.out(out.transpose(1, 2).reshape(batch, seq, width))
        return found


class Layer(nn.Module):
    """One layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        norm = nn.RMSNorm if dims.gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(dims.width), norm(dims.width)
        self.attention = Attention(dims)
        self.gate = _linear(dims, dims.width, dims.ffn) if dims.gated else None
        self.up = _linear(dims, dims.width, dims.ffn)
        self.down = _linear(dims, dims.ffn, dims.width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), turn)
        y = self.norm2(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        found: torch.Tensor = x + self.down(hidden)
        return found


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return x [batch, heads, seq, head] with rotary positions. turn: [2, seq, head]."""
    left, right = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-right, left), -1) * turn[1]


class Decoder(nn.Module):
    """The model: tokens [batch, seq] -> the loss of predicting each token's successor.

    checkpointing: "" for none, "full" (a block's input is kept), "alternate" (the same of every
    second block) or "selective" (so are the results of attention and of every second matmul, as
    torchtitan's default).
    """

    checkpointing: str
    turn: torch.Tensor | None

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.embed = nn.Embedding(dims.vocab, dims.width)
        self.positions = None if dims.gated else nn.Embedding(dims.seq, dims.width)
        self.blocks = nn.ModuleList(Layer(dims) for _ in range(dims.layers))
        self.norm = (nn.RMSNorm if dims.gated else nn.LayerNorm)(dims.width)
        self.head = nn.Linear(dims.width, dims.vocab, bias=False)
        if dims.tied:
            self.head.weight = self.embed.weight
        self.checkpointing = ""
        head = dims.width // dims.heads
        turn = torch.zeros(2, dims.seq, head, dtype=self.embed.weight.dtype) if dims.gated else None
        self.register_buffer("turn", turn, persistent=False)
        if dims.lora:
            self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Adapted):
                module.adapters.requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for i, block in enumerate(self.blocks):
            x = self.run(block, x, i)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.dims.vocab), tokens.reshape(-1))

    def run(self, block: nn.Module, x: torch.Tensor, i: int) -> torch.Tensor:
        found: torch.Tensor
        if not self.checkpointing or (self.checkpointing == "alternate" and i % 2 == 1):
            found = block(x, self.turn)
            return found
        contexts: dict[str, Any] = {}
        if self.checkpointing == "selective":
            contexts["context_fn"] = _keep_some
        found = checkpoint(block, x, self.turn, use_reentrant=False, **contexts)
        return found


def _keep_some() -> Any:
    """Return the contexts of a checkpoint that keeps every second matmul, and attention."""
    seen = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        packet = func._overloadpacket
        if packet is aten._scaled_dot_product_flash_attention_for_cpu:
            return CheckpointPolicy.MUST_SAVE
        if packet not in (aten.mm, aten.addmm):
            return CheckpointPolicy.PREFER_RECOMPUTE
        phase = "recompute" if ctx.is_recompute else "forward"
        seen[phase] += 1
        keep = seen[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    make: Any = create_selective_checkpoint_contexts
    return make(policy)
