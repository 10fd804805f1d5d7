"""A ResNet with BatchNorm that classifies handwritten digits (scikit-learn's, 8 x 8 pixels).

    torchrun --standalone --nproc-per-node 2 examples/resnet.py --strategy full_shard

BatchNorm normalises by the rank's own batch. Its running statistics are buffers: each forward takes
rank 0's, as under DDP. SGD with momentum is DDP's bit for bit.
"""

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = 0.93  # of held-out digits that are recognised; chance: 0.1
BATCH = 64  # per rank
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}


class Block(nn.Module):
    """Two convolutions with a shortcut: (B, C, H, W) -> (B, D, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(y)))


class ResNet(nn.Module):
    """Images (B, 1, 8, 8) -> features (B, 4 x width), or with a head -> logits (B, 10)."""

    def __init__(self, width: int, classes: int | None = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        widths = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.Sequential(
            *(
                block
                for inputs, outputs, stride in widths
                for block in (Block(inputs, outputs, stride), Block(outputs, outputs))
            )
        )
        self.head = nn.Linear(4 * width, classes) if classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def most_frequent(answers: Tensor) -> tuple[str, float]:
    """The trivial baseline."""
    return "the most frequent digit", answers.bincount().max().item() / len(answers)


def train(run: common.Run) -> None:
    (images, labels), (held_out, answers) = common.digits()
    images, labels = images[run.rank :: run.world], labels[run.rank :: run.world]
    model = run.wrap(ResNet(width=8 if run.quick else 32))
    optimizer = run.optimizer("SGD", model, **SGD)

    for _ in run.steps(model, optimizer):
        pixels, classes = common.draw_batch(BATCH, images, labels)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(common.distorted(pixels)), classes)
        loss.backward()
        optimizer.step()
        run.log(loss)

    model.eval()
    with torch.no_grad():
        guesses = model(held_out[run.rank :: run.world]).argmax(1)
    right = guesses == answers[run.rank :: run.world]
    wrong = held_out[run.rank :: run.world][~right]

    def draw(axes) -> None:
        axes.imshow(common.grid(wrong, columns=max(1, min(8, len(wrong)))), cmap="gray_r")
        axes.set(xlabel="digits of rank 0 that are not recognised", xticks=[], yticks=[])

    baseline = most_frequent(answers)
    accuracy = right.float().mean().item()
    run.result("held-out accuracy", accuracy, expected=EXPECTED, baseline=baseline, draw=draw)


if __name__ == "__main__":
    common.main(__doc__, train, steps=120)
