"""A decoder from numbers: `decoder_of` builds GPT's or Llama's on the meta device, to be traced."""

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

SIZES = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq")


class Dims(NamedTuple):
    """The dimensions of a decoder.

    layers, width (hidden size), heads (attention heads), kv_heads, ffn (intermediate size), vocab,
    seq (sequence length).
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


def decoder_of(dims: Dims, checkpointing: str = "") -> Decoder:
    """Return a decoder on the meta device. checkpointing: see Decoder.

    Raises ValueError for dimensions that do not fit.
    """
    sizes = {name: getattr(dims, name) for name in SIZES}
    wrong = [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]
    if wrong:
        raise ValueError(f"Dims: {wrong[0]} must be a positive integer, got {sizes[wrong[0]]!r}")
    if not isinstance(dims.lora, int) or dims.lora < 0:
        raise ValueError(f"Dims: lora must be a rank, or 0 for no adapters, got {dims.lora!r}")
    if dims.width % (2 * dims.heads) or dims.heads % dims.kv_heads:
        raise ValueError(f"{dims}: width must be a multiple of 2 heads, heads of kv_heads")
    with torch.device("meta"):
        return Decoder(dims, checkpointing)


class Adapted(nn.Linear):
    """A linear layer with LoRA's two small matrices."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.adapters = nn.Sequential(
            nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x) + self.adapters(x)
        return result


class Attention(nn.Module):
    """Q, K and V by three matrices if gated (as Llama), by one if not (as GPT); then the output."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head = dims.width // dims.heads
        self.sizes = [count * self.head for count in (dims.heads, dims.kv_heads, dims.kv_heads)]
        matrices = self.sizes if dims.gated else [sum(self.sizes)]
        self.qkv = nn.ModuleList(_linear(dims, dims.width, size) for size in matrices)
        self.out = _linear(dims, dims.width, dims.width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        parts = [matrix(x) for matrix in self.qkv]
        if len(parts) == 1:
            parts = list(parts[0].split(self.sizes, -1))
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        if turn is not None:
            q, k = _rotate(q, turn), _rotate(k, turn)
        if k.shape != q.shape:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(out.transpose(1, 2).reshape(x.shape))
        return result


class Layer(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(dims), _norm(dims)
        self.attention = Attention(dims)
        self.gate = _linear(dims, dims.width, dims.ffn) if dims.gated else None
        self.up = _linear(dims, dims.width, dims.ffn)
        self.down = _linear(dims, dims.ffn, dims.width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), turn)
        y = self.norm2(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        result: torch.Tensor = x + self.down(hidden)
        return result


class Decoder(nn.Module):
    """The model: tokens [batch, seq] -> the loss of predicting each token's successor.

    checkpointing: "" for none, "full" (a block's input is kept), "alternate" (the same of every
    second block) or "selective" (so are the results of attention and of every second matmul, as
    torchtitan's default).
    """

    turn: torch.Tensor | None

    def __init__(self, dims: Dims, checkpointing: str = "") -> None:
        super().__init__()
        self.dims, self.checkpointing = dims, checkpointing
        self.embed = nn.Embedding(dims.vocab, dims.width)
        self.positions = None if dims.gated else nn.Embedding(dims.seq, dims.width)
        self.blocks = nn.ModuleList(Layer(dims) for _ in range(dims.layers))
        self.norm = _norm(dims)
        self.head = nn.Linear(dims.width, dims.vocab, bias=False)
        turn = torch.zeros(2, dims.seq, dims.width // dims.heads) if dims.gated else None
        self.register_buffer("turn", turn, persistent=False)
        if dims.tied:
            self.head.weight = self.embed.weight
        for name, param in self.named_parameters() if dims.lora else ():
            param.requires_grad_(".adapters." in name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        kind = self.checkpointing
        contexts: dict[str, Any] = {"context_fn": _keep_some} if kind == "selective" else {}
        for i, block in enumerate(self.blocks):
            if not kind or (kind == "alternate" and i % 2 == 1):
                x = block(x, self.turn)
            else:
                x = checkpoint(block, x, self.turn, use_reentrant=False, **contexts)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.dims.vocab), tokens.reshape(-1))


def _norm(dims: Dims) -> nn.Module:
    return (nn.RMSNorm if dims.gated else nn.LayerNorm)(dims.width)


def _linear(dims: Dims, inputs: int, outputs: int) -> nn.Linear:
    if dims.lora:
        return Adapted(inputs, outputs, dims.lora, dims.bias)
    return nn.Linear(inputs, outputs, bias=dims.bias)


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return x [batch, heads, seq, head] with rotary positions. turn: [2, seq, head]."""
    left, right = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-right, left), -1) * turn[1]


def _keep_some() -> Any:
    """Return the contexts of a checkpoint that keeps every second matmul, and attention."""
    seen = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        packet = func._overloadpacket
        keep = packet is aten._scaled_dot_product_flash_attention_for_cpu
        if packet in (aten.mm, aten.addmm):
            phase = "recompute" if ctx.is_recompute else "forward"
            seen[phase] += 1
            keep = seen[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
