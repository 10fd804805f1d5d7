"""Shared by the examples: flags, ranks, wrapping, save and resume, the result and its picture.

    torchrun --standalone --nproc-per-node 2 examples/resnet.py --strategy full_shard

`--strategy ddp` trains with torch's DistributedDataParallel, `plain` without a wrapper on one rank
(`python examples/resnet.py --strategy plain`), and each other strategy with zshard. All begin with
the same parameters and draw the same batches, so losses can be compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: 60 MiB that are not the model's
import torch.distributed as dist
import torch.nn.functional as F
from libraries import gather_from_ranks, mean_over_ranks, process_group
from measure import MIB, PeakMemory, pyplot_for_files, smoothed
from torch import Tensor, nn

import zshard

STRATEGIES = [*(strategy.value for strategy in zshard.ShardingStrategy), "zero2", "zero3"]
HELD_OUT_DIGITS = 360  # of scikit-learn's 1,797 digits, the last ones
KNOWN = 100  # labels that a linear probe learns from

Digits = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Features = Callable[[Tensor], Tensor]


class Run:
    """One training run on this rank. If `quick` is set, models are tiny: the form for tests."""

    def __init__(self, args: argparse.Namespace, memory: PeakMemory) -> None:
        self.args, self.memory = args, memory
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.quick: bool = args.quick
        self.kept: dict[str, Tensor] = {}  # this rank's own tensors, saved with the model
        self.first = 0  # the step that this run begins with
        self.losses: list[float] = []
        self.seconds: list[float] = []
        torch.manual_seed(args.seed)  # the same initial parameters on all ranks

    def wrap(self, model: nn.Module, *, unused: bool = False, units: Any = "auto") -> Any:
        """Wrap the model as `--strategy` says. From here on each rank draws its own numbers.

        unused: parameters may stay unused in a forward, which DDP needs to know.
        units: zshard's `auto_wrap_policy`, such as the classes whose parameters are gathered apart.
        """
        self.note(model)
        torch.manual_seed(self.args.seed + 1 + self.rank)
        if self.args.strategy == "plain":
            return model
        if self.args.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        options = {"auto_wrap_policy": units, "forward_sync_buffers": True}
        return zshard.FSDP(model, strategy=self.args.strategy, **options)

    def note(self, model: nn.Module) -> None:
        """Note the size of the plain model, for the report."""
        self.parameters = sum(p.numel() for p in model.parameters())
        size = sum(p.nbytes for p in model.parameters())
        self.start_mib = self.memory.now() - size / MIB  # with data and libraries, without a model

    def optimizer(self, name: str, model: nn.Module, lr: float, **options: Any) -> Any:
        """zshard's optimizer of that name, or torch's where zshard does not wrap the model."""
        self.lr = lr
        if self.args.strategy not in ("plain", "ddp"):
            return getattr(zshard, name)(model.parameters(), lr=lr, **options)
        if name == "AdamW":
            options["fused"] = True  # zshard's rounds as this one does
        return getattr(torch.optim, name)(model.parameters(), lr=lr, **options)

    def steps(self, model: nn.Module, optimizer: Any) -> Iterator[int]:
        """The steps to train, with a learning rate that rises and then falls along a cosine.

        Resumes and saves where the flags ask for it.
        """
        args = self.args
        if args.resume and zshard.latest_checkpoint(args.resume):
            loaded = zshard.load(args.resume, model, optimizer)
            zshard.set_rng_state(loaded["rng"])
            for name, tensor in self.kept.items():
                tensor.copy_(loaded["kept"][name])
            self.first = loaded.step or 0
        for step in range(self.first, args.stop_after):
            rise = min(1.0, (step + 1) / (0.1 * args.steps))
            for group in optimizer.param_groups:
                group["lr"] = self.lr * rise * (0.5 + 0.5 * math.cos(math.pi * step / args.steps))
            began = time.perf_counter()
            yield step
            self.seconds.append(time.perf_counter() - began)
            if args.save and (step + 1) % args.save_every == 0:
                extra = {"rng": zshard.rng_state(), "kept": self.kept}
                zshard.save(args.save, model, optimizer, step=step + 1, extra=extra, keep_last=2)

    def seed_of(self, step: int) -> int:
        """A seed for this rank's random numbers in a step, where checkpoints have no random numbers
        and a resumed run should draw those of an undisturbed one."""
        return self.world * (1_000_003 * self.args.seed + step) + self.rank

    def log(self, loss: Tensor) -> None:
        """Keep this rank's loss of a step; rank 0 prints a few."""
        self.losses.append(loss.item())
        step = self.first + len(self.losses)
        if self.rank == 0 and step % max(1, self.args.steps // 5) == 0:
            print(f"step {step:4d}/{self.args.steps}  loss {self.losses[-1]:.4f}", flush=True)

    def result(
        self,
        what: str,
        mine: float,
        *,
        expected: float,
        baseline: tuple[str, float],
        draw: Callable[[Any], None] | None = None,
    ) -> None:
        """Report the mean of `mine` over ranks; exit with an error if it is not good enough.

        Good enough is farther from the trivial baseline (name, value) than `expected` is. A short
        run is not judged. draw: draws the model's output into matplotlib's axes; None: nothing.
        """
        args, sides = self.args, gather_from_ranks((self.memory.mib - self.start_mib, self.losses))
        (value,) = mean_over_ranks([mine])
        numbers = {
            "strategy": args.strategy,
            "parameters": self.parameters,
            "first": self.first,
            "steps": args.steps,
            "losses": [losses for _, losses in sides],
            "what": what,
            "value": value,
            "expected": expected,
            "baseline": baseline,
            "peak_mib": max(peak for peak, _ in sides),
            "step_ms": 1000 * sorted(self.seconds)[len(self.seconds) // 2],
        }
        judged = not self.quick and args.stop_after == args.steps
        if self.rank == 0:
            print(line_of(numbers, judged), flush=True)
            if args.json:
                args.json.write_text(json.dumps(numbers) + "\n")
            if args.picture:
                save_picture(args.picture, numbers, draw)
        if judged and not (value - expected) * (expected - baseline[1]) > 0:  # also NaN
            sys.exit(f"{what} is {value:.4f}; expected better than {expected}")


def line_of(numbers: dict[str, Any], judged: bool) -> str:
    name, value = numbers["baseline"]
    goal = f"expected better than {numbers['expected']}" if judged else "a short run"
    return (
        f"{Path(sys.argv[0]).stem} {numbers['strategy']}: {numbers['what']} {numbers['value']:.4f} "
        f"({goal}; {name}: {value:.4f}); {numbers['parameters']:,} parameters, peak memory "
        f"{numbers['peak_mib']:.0f} MiB per rank, {numbers['step_ms']:.0f} ms per step"
    )


def save_picture(path: Path, numbers: dict[str, Any], draw: Any) -> None:
    """Draw rank 0's losses, and next to them the picture of `draw`."""
    pyplot = pyplot_for_files()
    if pyplot is None:
        sys.exit("--picture needs matplotlib: pip install matplotlib")
    panels = 1 if draw is None else 2
    figure, axes = pyplot.subplots(1, panels, figsize=(5 * panels, 4.5), dpi=120, squeeze=False)
    curve = axes[0][0]
    steps, losses = range(1 + numbers["first"], 10**9), numbers["losses"][0]
    curve.plot(*zip(*zip(steps, losses)), linewidth=0.6, alpha=0.45)  # noqa: B905
    curve.plot(*zip(*zip(steps, smoothed(losses))), color="tab:blue")  # noqa: B905
    curve.set(title=f"strategy {numbers['strategy']}", xlabel="step", ylabel="training loss")
    curve.grid(alpha=0.3)
    axes[0][-1].set_title(f"{numbers['what']}: {numbers['value']:.3f}")
    if draw is not None:
        draw(axes[0][1])
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def newest(folder: Path | None, pattern: str, *, but: str = "") -> str | None:
    """The newest of a trainer's checkpoints of that name in a folder, if there is one. but: the
    name of one that does not count."""
    found = [path for path in folder.glob(pattern) if path.name != but] if folder else []
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None


def digits() -> Digits:
    """scikit-learn's digits: (images, labels) to train on and (images, labels) held out.

    Images are (N, 1, 8, 8), from 0 to 1 in steps of 1/16.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels, held_out = torch.tensor(data.target), len(images) - HELD_OUT_DIGITS
    return (images[:held_out], labels[:held_out]), (images[held_out:], labels[held_out:])


def draw_batch(size: int, *tensors: Tensor) -> list[Tensor]:
    """`size` random entries of each tensor, the same ones of all."""
    chosen = torch.randint(len(tensors[0]), (size,))
    return [tensor[chosen] for tensor in tensors]


def distorted(images: Tensor) -> Tensor:
    """Turn, scale and move each image (N, 1, H, W) a little, at random, and add noise."""
    angle, size = torch.randn(len(images)) * 0.2, 1 + torch.randn(len(images)) * 0.1
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1) * size[:, None]
    move = torch.randn(len(images), 2, 1) * 0.15
    where = F.affine_grid(torch.cat([turn.view(-1, 2, 2), move], 2), images.shape, False)
    return F.grid_sample(images, where, align_corners=False) + torch.randn_like(images) * 0.05


@torch.no_grad()
def probe(features: Features, digits: Digits) -> float:
    """The held-out accuracy of a linear classifier (ridge regression) on features, (N, D), that
    learns from KNOWN labels."""
    (images, labels), (held_out, answers) = digits
    known, unknown = features(images[:KNOWN]), features(held_out)
    mean, scale = known.mean(0), known.std(0) + 1e-3
    x, y = (F.pad((f - mean) / scale, (0, 1), value=1.0).double() for f in (known, unknown))
    ridge = x.T @ x + len(x) / 100 * torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(ridge, x.T @ F.one_hot(labels[:KNOWN]).double())
    return ((y @ weights).argmax(1) == answers).float().mean().item()


def judge_features(
    run: Run,
    features: Features,
    digits: Digits,
    *,
    untrained: float,
    expected: float,
) -> None:
    """Report a probe of features, (N, D), and draw those of held-out digits. untrained: the probe's
    accuracy before training."""
    held_out, answers = digits[1]
    accuracy = probe(features, digits)
    with torch.no_grad():
        found = features(held_out)
    run.result(
        f"held-out accuracy of a probe with {KNOWN} labels",
        accuracy,
        expected=expected,
        baseline=("the same on the untrained model", untrained),
        draw=lambda axes: scatter(axes, found, answers),
    )


def scatter(axes: Any, features: Tensor, labels: Tensor) -> None:
    """Draw features (N, D) in the two directions in which they vary most, a color per label."""
    directions = torch.linalg.svd(features - features.mean(0), full_matrices=False)[2][:2]
    points = axes.scatter(*(features @ directions.T).T, c=labels, cmap="tab10", s=9)
    axes.legend(*points.legend_elements(), fontsize=7, title="digit")


def grid(images: Tensor, columns: int) -> Tensor:
    """Images (N, 1, H, W) side by side in rows, with gray lines between them, as one image."""
    framed = F.pad(images, (1, 0, 1, 0), value=0.5)
    rows = framed[: len(images) // columns * columns, 0].unflatten(0, (-1, columns))
    return rows.transpose(1, 2).flatten(0, 1).flatten(1)


def main(text: str, train: Callable[[Run], None], steps: int, strategy: str = "full_shard") -> None:
    """Parse the flags, join the other ranks, and train. `text` is the example's docstring, `steps`
    and `strategy` are defaults of flags."""
    args = parse(text, steps, strategy)
    with process_group(), PeakMemory(files=False) as memory:
        if args.strategy == "plain" and dist.get_world_size() > 1:
            sys.exit("--strategy plain takes one rank: start it without torchrun")
        train(Run(args, memory))


def parse(text: str, steps: int, strategy: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    add = parser.add_argument
    choices = dict.fromkeys([strategy, "ddp", "plain", *STRATEGIES])
    add("--strategy", choices=choices, default=strategy, help="(default: %(default)s)")
    add("--quick", action="store_true", help="a tiny model and a few steps: does it run?")
    add("--steps", type=int, help=f"steps to train (default: {steps}, with --quick 6)")
    add("--stop-after", type=int, help="stop early: the schedule stays that of --steps")
    add("--seed", type=int, default=0, help="seed of parameters and batches")
    add("--save", type=Path, metavar="DIR", help="save checkpoints here")
    add("--save-every", type=int, metavar="N", help="steps between them (default: a tenth)")
    add("--resume", type=Path, metavar="DIR", help="begin with the newest checkpoint here, if any")
    add("--picture", type=Path, metavar="FILE", help="write a picture (.png, .svg)")
    add("--json", type=Path, metavar="FILE", help="write losses and the result as JSON")
    args = parser.parse_args()
    args.steps = args.steps or (6 if args.quick else steps)
    args.stop_after = min(args.stop_after or args.steps, args.steps)
    args.save_every = args.save_every or max(1, args.steps // 10)
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    return args
