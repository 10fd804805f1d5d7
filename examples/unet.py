"""A diffusion model: a UNet that removes noise from digits, and draws digits out of noise.

    torchrun --standalone --nproc-per-node 2 examples/unet.py --strategy full_shard

The model sees an image mixed with noise and predicts the noise. It is judged on held-out digits,
each at noise levels drawn once. The picture shows digits that it has drawn from noise alone.
"""

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = 0.3  # mean squared error of the noise in held-out digits; guessing zero: 1
LEVELS = 100  # of noise, from almost none to noise alone
SHARES = torch.cos(torch.linspace(0.02, 0.99, LEVELS) * torch.pi / 2) ** 2  # of the image left
BATCH = 64  # images per rank


class Block(nn.Module):
    """Two convolutions with a shortcut, conditioned on the noise level: (B, C, H, W) -> (B, D, H,
    W)."""

    def __init__(self, inputs: int, outputs: int, level: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(min(8, inputs), inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.level = nn.Linear(level, outputs)
        self.second_norm = nn.GroupNorm(8, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm(x))) + self.level(level)[:, :, None, None]
        return self.shortcut(x) + self.second(F.silu(self.second_norm(y)))


class UNet(nn.Module):
    """Noisy images (B, 1, 8, 8) and their levels (B,), int64 -> the noise (B, 1, 8, 8)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.level = nn.Sequential(nn.Embedding(LEVELS, width), nn.SiLU())
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, width), Block(width, 2 * width, width)])
        self.middle = Block(2 * width, 2 * width, width)
        self.up = nn.ModuleList([Block(4 * width, width, width), Block(2 * width, width, width)])
        self.norm = nn.GroupNorm(8, width)
        self.head = nn.Conv2d(width, 1, 3, padding=1, bias=False)

    def forward(self, noisy: Tensor, levels: Tensor) -> Tensor:
        x, level, kept = self.stem(noisy), self.level(levels), []
        for block in self.down:
            x = block(x, level)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, level)
        for block in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1)
            x = block(x, level)
        return self.head(F.silu(self.norm(x)))


def with_noise(images: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Images mixed with noise, and the noise."""
    share, noise = SHARES[levels][:, None, None, None], torch.randn_like(images)
    return share.sqrt() * images + (1 - share).sqrt() * noise, noise


@torch.no_grad()
def drawn(model: nn.Module, count: int) -> Tensor:
    """Images that the model draws from noise, level by level (DDPM). All ranks call it."""
    x = torch.randn(count, 1, 8, 8)
    for level in reversed(range(LEVELS)):
        share, before = SHARES[level], SHARES[level - 1] if level else torch.ones(())
        noise = model(x, torch.full((count,), level))
        image = ((x - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-1, 1)
        step = share / before
        mean = before.sqrt() * (1 - step) * image + step.sqrt() * (1 - before) * x
        variance = (1 - step) * (1 - before) / (1 - share)
        x = mean / (1 - share) + variance.sqrt() * torch.randn_like(x)
    return x


def train(run: common.Run) -> None:
    (images, _), (held_out, _) = common.digits()
    images, judged = images[run.rank :: run.world] * 2 - 1, held_out[run.rank :: run.world] * 2 - 1
    levels = torch.arange(len(judged)) % LEVELS
    noisy, noise = with_noise(judged, levels)
    model = run.wrap(UNet(width=8 if run.quick else 32))
    optimizer = run.optimizer("AdamW", model, lr=2e-3, weight_decay=1e-2)

    for _ in run.steps(model, optimizer):
        (batch,) = common.draw_batch(BATCH, images)
        at = torch.randint(LEVELS, (BATCH,))
        mixed, added = with_noise(batch, at)
        optimizer.zero_grad()
        loss = F.mse_loss(model(mixed, at), added)
        loss.backward()
        optimizer.step()
        run.log(loss)

    model.eval()
    with torch.no_grad():
        error = F.mse_loss(model(noisy, levels), noise).item()
    shown = drawn(model, 40) if run.args.picture else judged[:40]

    def draw(axes) -> None:
        axes.imshow(common.grid(shown, columns=8), cmap="gray_r", vmin=-1, vmax=1)
        axes.set(xlabel="drawn from noise", xticks=[], yticks=[])

    # The best multiple where pixels are near -1 or 1, as most are.
    multiple = (1 - SHARES[levels]).sqrt()[:, None, None, None] * noisy
    baseline = ("each pixel by itself, scaled", F.mse_loss(multiple, noise).item())
    run.result(
        "held-out squared error of the noise",
        error,
        expected=EXPECTED,
        baseline=baseline,
        draw=draw,
    )


if __name__ == "__main__":
    common.main(__doc__, train, steps=200)
