"""A mixture of experts: a byte-level language model of Python's own sources.

    torchrun --standalone --nproc-per-node 2 examples/moe.py --strategy full_shard

In each block a router sends each byte to two of eight experts. A rank runs only the experts that
its bytes chose: the others' gradients count as zero. zshard needs no argument for that, DDP needs
`find_unused_parameters=True`. Attention and positions are gpt.py's.
"""

import math

import common
import corpus
import torch
import torch.nn.functional as F
from gpt import VOCABULARY, Attention, Config, Rotation
from torch import Tensor, nn

EXPECTED = 3.9  # bits per byte of held-out files; uniform guesses: 8
EXPERTS, CHOSEN = 8, 2
BALANCE = 0.01  # the weight of the loss that keeps experts equally busy
BATCH = 8  # sequences per rank
JUDGED = 64  # held-out sequences per rank


class Experts(nn.Module):
    """Each row (N, D) is computed by the CHOSEN experts that its router prefers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the balance loss, and the share of rows that each expert gets."""
        chances = self.router(x).softmax(-1)
        best, who = chances.topk(CHOSEN)
        best = best / best.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = (who == index).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * best[rows, place, None])
        share = F.one_hot(who, EXPERTS).float().mean((0, 1))
        return y, EXPERTS * (share * chances.mean(0)).sum(), share


class Block(nn.Module):
    """Attention and experts, each with a shortcut."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.experts_norm, self.mlp = nn.LayerNorm(config.width), Experts(config.width)

    def forward(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotation)
        y, balance, share = self.mlp(self.experts_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance, share


class MixtureOfExperts(nn.Module):
    """Bytes (B, T) -> logits (B, T, 256), the balance loss, and each block's shares."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head_size = self.config.width // self.config.heads
        rotation = Rotation.of(tokens.shape[1], head_size, tokens.device)
        x, balances, shares = self.embedding(tokens), [], []
        for block in self.blocks:
            x, balance, share = block(x, rotation)
            balances.append(balance)
            shares.append(share)
        return self.head(self.norm(x)), torch.stack(balances).sum(), torch.stack(shares)


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean bits per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


def of_single_bytes(text: Tensor, held_out: Tensor) -> float:
    """The baseline: the bits per held-out byte by how often each byte occurs."""
    counts = 1 + text.long().bincount(minlength=VOCABULARY)
    chances = (counts / counts.sum()).double()
    return -chances.log2()[held_out.long()].mean().item()


def train(run: common.Run) -> None:
    text, held_out = corpus.load()
    small, full = Config(2, 32, 2, context=32), Config(2, 128, 4, context=128)
    config = small if run.quick else full
    model = run.wrap(MixtureOfExperts(config), unused=True)
    optimizer = run.optimizer("AdamW", model, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    for _ in run.steps(model, optimizer):
        starts = torch.randint(len(text) - config.context, (BATCH, 1))
        window = text[starts + torch.arange(config.context + 1)].long()
        optimizer.zero_grad()
        logits, balance, _ = model(window[:, :-1])
        loss = bits(logits, window[:, 1:])
        (loss + BALANCE * balance).backward()
        optimizer.step()
        run.log(loss)

    judged = {"count": 8 if run.quick else JUDGED, "rank": run.rank, "world": run.world}
    batches = corpus.held_out_batches(held_out, BATCH, config.context, **judged)
    model.eval()
    with torch.no_grad():
        results = [(model(inputs), targets) for inputs, targets in batches]
    per_byte = sum(bits(made[0], targets).item() for made, targets in results) / len(results)
    shares = sum(made[2] for made, _ in results) / len(results)

    def draw(axes) -> None:
        axes.imshow(shares, vmin=0)
        axes.set(xlabel="expert", ylabel="block", yticks=range(len(shares)))
        for block, expert in torch.cartesian_prod(*map(torch.arange, shares.shape)).tolist():
            label = f"{100 * shares[block, expert]:.0f} %"
            axes.text(expert, block, label, color="white", ha="center", va="center")

    baseline = ("bytes by how often each occurs", of_single_bytes(text, held_out))
    what = "held-out bits per byte"
    run.result(what, per_byte, expected=EXPECTED, baseline=baseline, draw=draw)


if __name__ == "__main__":
    common.main(__doc__, train, steps=200)
