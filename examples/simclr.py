"""SimCLR: features of digits learned without labels; negatives come from the batches of all ranks.

    torchrun --standalone --nproc-per-node 2 examples/simclr.py --strategy full_shard

Each image is distorted twice. The loss asks which of all other images, on any rank, is the second
view of the same image. So the features of all ranks are gathered, and a rank's features get
gradients from the losses of all ranks. A linear probe on 100 labels judges the result.
"""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from resnet import ResNet
from torch import Tensor, nn

EXPECTED = 0.8  # of held-out digits, by a linear probe with 100 labels; chance: 0.1
BATCH = 64  # images per rank, each twice
TEMPERATURE = 0.2


class SimCLR(nn.Module):
    """Images (B, 1, 8, 8) -> features (B, 4 x width) and projections (B, 64) of length 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = ResNet(width, classes=None)
        self.projector = nn.Sequential(
            nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 64)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.encoder(images)
        return features, F.normalize(self.projector(features), dim=1)


class OfAllRanks(torch.autograd.Function):
    """All ranks' rows, in rank order; the gradient of mine is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, mine: Tensor) -> Tensor:
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed.chunk(dist.get_world_size())[dist.get_rank()]


def contrastive_loss(first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent of two views, each (B, 64): this rank's rows against the rows of all ranks."""
    everyone = OfAllRanks.apply(torch.cat([first, second]))  # (world x 2B, 64)
    mine, size = torch.cat([first, second]), len(first)
    here = 2 * size * dist.get_rank() + torch.arange(2 * size)  # the index of my rows
    similar = mine @ everyone.T / TEMPERATURE
    similar = similar.scatter(1, here[:, None], float("-inf"))  # no row is its own negative
    return F.cross_entropy(similar, here.roll(size))  # the other view of each


def train(run: common.Run) -> None:
    digits = common.digits()
    (images, _), _ = digits
    mine = images[run.rank :: run.world]
    model = run.wrap(SimCLR(width=8 if run.quick else 16))
    optimizer = run.optimizer("AdamW", model, lr=3e-3, weight_decay=1e-2)

    def features(images: Tensor) -> Tensor:
        return model(images)[0]

    model.eval()
    untrained = common.probe(features, digits)

    model.train()
    for _ in run.steps(model, optimizer):
        (batch,) = common.draw_batch(BATCH, mine)
        views = torch.cat([common.distorted(batch), common.distorted(batch)])
        optimizer.zero_grad()
        loss = contrastive_loss(*model(views)[1].chunk(2))
        loss.backward()
        optimizer.step()
        run.log(loss)

    model.eval()
    common.judge_features(run, features, digits, untrained=untrained, expected=EXPECTED)


if __name__ == "__main__":
    common.main(__doc__, train, steps=200)
