"""SwAV: features of digits learned without labels, by clusters that all ranks share.

    torchrun --standalone --nproc-per-node 2 examples/swav.py --strategy full_shard

Each image is distorted twice. Each view must predict the cluster of the other view. The forward
normalises the prototypes, the centers of the clusters, before it uses them: a write to a sharded
parameter. A queue of earlier projections helps to spread images evenly over the clusters; it is
each rank's own and is saved with the checkpoint. A linear probe on 100 labels judges the result.
"""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from resnet import Block, ResNet
from torch import Tensor, nn

EXPECTED = 0.7  # of held-out digits, by a linear probe with 100 labels; chance: 0.1
BATCH = 64  # images per rank, each twice
PROTOTYPES, SIZE = 32, 32
QUEUED, QUEUE_STARTS = 256, 20  # projections of each view; the step from which they are used
TEMPERATURE, SHARPNESS = 0.1, 0.05


class SwAV(nn.Module):
    """Images, and earlier projections (Q, SIZE) -> features, projections, and the scores of these
    projections and of the earlier ones, (B, PROTOTYPES) and (Q, PROTOTYPES)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = ResNet(width, classes=None)
        self.projector = nn.Sequential(
            nn.Linear(4 * width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, SIZE),
            nn.BatchNorm1d(SIZE, affine=False),  # or all projections begin close to each other
        )
        self.prototypes = nn.Linear(SIZE, PROTOTYPES, bias=False)

    def forward(self, images: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.training:  # a row per prototype, of length 1
            with torch.no_grad():
                self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        features = self.encoder(images)
        projections = F.normalize(self.projector(features), dim=1)
        scores = self.prototypes(torch.cat([projections, earlier]))
        return features, projections, scores[: len(images)], scores[len(images) :]


@torch.no_grad()
def clusters(scores: Tensor) -> Tensor:
    """Sinkhorn-Knopp over all ranks: scores (N, PROTOTYPES) -> chances; clusters of equal size."""
    q = (scores / SHARPNESS).exp()
    for _ in range(3):
        sizes = q.sum(0)
        dist.all_reduce(sizes)
        q = q / sizes
        q = q / q.sum(1, keepdim=True)
    return q


def train(run: common.Run) -> None:
    digits = common.digits()
    (images, _), _ = digits
    mine, none = images[run.rank :: run.world], torch.empty(0, SIZE)
    units = {Block, nn.Linear}  # prototypes are one: a forward may write to a unit inside its own
    model = run.wrap(SwAV(width=8 if run.quick else 16), units=units)
    optimizer = run.optimizer("AdamW", model, lr=3e-3, weight_decay=1e-2)
    queue = run.kept["queue"] = F.normalize(torch.randn(2, QUEUED, SIZE), dim=2)
    start = 2 if run.quick else QUEUE_STARTS

    def features(images: Tensor) -> Tensor:
        return model(images, none)[0]

    model.eval()
    untrained = common.probe(features, digits)

    model.train()
    for step in run.steps(model, optimizer):
        (batch,) = common.draw_batch(BATCH, mine)
        views = torch.cat([common.distorted(batch), common.distorted(batch)])
        earlier = queue.flatten(0, 1) if step >= start else none
        _, projections, scores, old = model(views, earlier.clone())
        loss = torch.zeros(())
        for view, other in ((0, 1), (1, 0)):
            known = torch.cat([scores.chunk(2)[view], old.chunk(2)[view]])
            targets = clusters(known.detach())[:BATCH]
            loss = loss + F.cross_entropy(scores.chunk(2)[other] / TEMPERATURE, targets) / 2
            new = projections.detach().chunk(2)[view]
            queue[view] = torch.cat([new, queue[view]])[:QUEUED]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)

    model.eval()
    common.judge_features(run, features, digits, untrained=untrained, expected=EXPECTED)


if __name__ == "__main__":
    common.main(__doc__, train, steps=400)
