"""Image GPT: digits pixel by pixel, each predicted from those before it.

    torchrun --standalone --nproc-per-node 2 examples/image_gpt.py --strategy full_shard

An image has 64 pixels of 17 gray levels. The blocks are torch's own TransformerEncoderLayer with a
causal mask; zshard makes each of them a unit. The picture shows held-out digits whose lower halves
the model has drawn.
"""

import math

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = 2.2  # bits per pixel of held-out digits; uniform guesses: 4.09
LEVELS, PIXELS = 17, 64
START = LEVELS  # the token before the first pixel
BATCH = 32  # images per rank


class ImageGPT(nn.Module):
    """Pixels (B, T), int64 -> logits of each pixel and of the next one (if any), LEVELS each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS + 1, width)
        self.place = nn.Embedding(PIXELS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LEVELS, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = F.pad(pixels, (1, 0), value=START)[:, :PIXELS]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.level(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


def bits(logits: Tensor, pixels: Tensor) -> Tensor:
    """The mean bits per pixel."""
    return F.cross_entropy(logits.flatten(0, 1), pixels.flatten()) / math.log(2)


def of_each_place(pixels: Tensor, held_out: Tensor) -> float:
    """The baseline: the bits per held-out pixel by how often each place has had each level."""
    counts = 1 + F.one_hot(pixels, LEVELS).sum(0)
    logits = (counts / counts.sum(1, keepdim=True)).log()
    return bits(logits.expand(len(held_out), -1, -1), held_out).item()


@torch.no_grad()
def completed(model: nn.Module, pixels: Tensor) -> Tensor:
    """Images (N, PIXELS) whose lower halves the model draws. All ranks call it."""
    drawn = pixels[:, : PIXELS // 2]
    while drawn.shape[1] < PIXELS:
        chances = model(drawn)[:, -1].softmax(-1)
        drawn = torch.cat([drawn, torch.multinomial(chances, 1)], 1)
    return drawn


def train(run: common.Run) -> None:
    (images, _), (held_out, _) = common.digits()
    pixels, held_out = ((side * 16).long().flatten(1) for side in (images, held_out))
    mine, judged = pixels[run.rank :: run.world], held_out[run.rank :: run.world]
    model = run.wrap(ImageGPT(width=32, layers=2) if run.quick else ImageGPT(width=96, layers=3))
    optimizer = run.optimizer("AdamW", model, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    for _ in run.steps(model, optimizer):
        (batch,) = common.draw_batch(4 if run.quick else BATCH, mine)
        optimizer.zero_grad()
        loss = bits(model(batch), batch)
        loss.backward()
        optimizer.step()
        run.log(loss)

    model.eval()
    with torch.no_grad():
        per_pixel = sum(bits(model(x), x).item() * len(x) for x in judged.split(60)) / len(judged)
    drawn = completed(model, held_out[:16]) if run.args.picture else held_out[:16]
    rows = torch.stack([held_out[:16], drawn]).view(2, 2, 8, 1, 8, 8).transpose(0, 1)

    def draw(axes) -> None:
        axes.imshow(common.grid(rows.flatten(0, 2), columns=8), cmap="gray_r")
        axes.set(xlabel="held-out digits; below, the lower half drawn", xticks=[], yticks=[])

    baseline = ("levels by how often each place has them", of_each_place(pixels, held_out))
    what = "held-out bits per pixel"
    run.result(what, per_pixel, expected=EXPECTED, baseline=baseline, draw=draw)


if __name__ == "__main__":
    common.main(__doc__, train, steps=200)
