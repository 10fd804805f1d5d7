"""Train a byte-level GPT on Python's standard library, sharded by zshard or another library.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --size 10m --steps 300
    python examples/train_gpt.py --size tiny                  # one process, the same script
    torchrun ... examples/train_gpt.py --library ddp          # the same run under DDP

The loop below is the loop of a single-process script. One line selects the library
(`LIBRARIES[...].use`, see libraries.py); seeds, data and initial parameters are the same for all
of them, so their loss curves must agree.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import torch
from gpt import GPT, SIZES, Config
from libraries import (
    LIBRARIES,
    Options,
    Sharded,
    gather_from_ranks,
    mean_over_ranks,
    process_group,
)
from measure import MIB, Meter, PeakMemory, Progress, save_curve, save_json, surroundings
from metrics import Metrics, writers
from torch import Tensor

PROMPTS = (b"class ", b"def ", b"import ", b"for ")
SAMPLE_SEED = 1234


class Trainer:
    """One run on one rank: the model, its data, and the results so far."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        self.args, self.rank, self.world = args, rank, world
        self.config = config_of(args)
        self.train_text, self.held_out_text = corpus.load()
        torch.manual_seed(args.seed)  # the same initial parameters on all ranks
        model = GPT(self.config)
        options = Options(args.strategy, args.lr, args.transport, not args.no_auto_wrap)
        self.sharded: Sharded = LIBRARIES[args.library].use(model, options)
        self.held_out: list[list[float]] = []  # (step, loss)
        self.compared: dict[str, Any] = {}  # the results at --compare-at
        self.metrics = self.metrics_of(self.config)

    def metrics_of(self, config: Config) -> Metrics:
        """What prints every --log-every steps."""
        args, attention = self.args, 12 * config.layers * config.width * config.context
        flops = 6 * config.parameter_count() + attention
        made = writers(args.tensorboard, args.wandb, vars(args))
        tokens, every = args.batch * config.context, args.log_every
        return Metrics(self.sharded.model, tokens, every, flops, args.peak_tflops, made)

    def train(self, progress: Progress, meter: Meter) -> None:
        """Run steps 1 to --stop-after; measure the held-out loss every --eval-every steps."""
        model, optimizer, clip = self.sharded
        for step, (inputs, targets) in zip(
            range(1, self.args.stop_after + 1), self.batches(), strict=False
        ):
            meter.start_step()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.args)
            loss = model(inputs, targets)
            loss.backward()
            if self.args.clip:
                clip(self.args.clip)
            optimizer.step()
            optimizer.zero_grad()
            meter.end_step(loss.item())
            self.metrics.step(loss)
            if step % self.args.eval_every == 0 or step in self.args.always_eval:
                with self.metrics.paused():
                    self.held_out.append([step, self.held_out_loss()])
            if step == self.args.compare_at:
                self.compared = self.results(meter)
            progress.update(step, meter.line() + self.last_held_out())

    def results(self, meter: Meter) -> dict[str, Any]:
        """Held-out loss, speed and every rank's peak memory so far. Collective."""
        return {
            "steps": len(meter.losses),
            "held_out": self.held_out[-1][1],
            "peak_memory_mib": gather_from_ranks(meter.memory.mib),
            **meter.speed(),
        }

    def last_held_out(self) -> str:
        """The newest held-out loss, for the progress line; "" before the first one."""
        return f", held-out {self.held_out[-1][1]:.2f}" if self.held_out else ""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return corpus.train_batches(
            self.train_text,
            self.args.batch,
            self.config.context,
            seed=self.args.seed,
            rank=self.rank,
        )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss over all ranks' held-out windows. Collective."""
        batches = corpus.held_out_batches(
            self.held_out_text,
            self.args.batch,
            self.config.context,
            self.args.eval_sequences,
            rank=self.rank,
            world=self.world,
        )
        summed = sum(self.sharded.model(*batch).item() * len(batch[0]) for batch in batches)
        return mean_over_ranks([summed / self.args.eval_sequences])[0]

    @torch.no_grad()
    def sample(self, length: int) -> str:
        """`length` bytes that the model generates after this rank's prompt.

        Collective, with the same length on all ranks: each forward gathers parameters.
        """
        generator = torch.Generator().manual_seed(SAMPLE_SEED + self.rank)
        text = list(PROMPTS[self.rank % len(PROMPTS)])
        for _ in range(length):
            window = torch.tensor([text[-self.config.context :]])
            logits = self.sharded.model(window)[0, -1] / self.args.temperature
            text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return bytes(text).decode(errors="replace")


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warmup, then a cosine to a tenth of --lr at --steps (not --stop-after)."""
    if step <= args.warmup:
        return float(args.lr * step / args.warmup)
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * done)))


def config_of(args: argparse.Namespace) -> Config:
    size = SIZES[args.size]
    return replace(size, context=args.context or size.context)


def run(args: argparse.Namespace, rank: int, world: int) -> None:
    """Train, evaluate, sample and write the results: everything that one rank does."""
    with PeakMemory() as memory:
        trainer = Trainer(args, rank, world)
        if rank == 0 and not args.brief:
            print(describe(trainer), flush=True)
        meter = Meter(args.batch * trainer.config.context * world, memory)
        show = rank == 0 and args.log_every > args.steps  # else Metrics prints
        progress = Progress(args.stop_after, args.library, show=show)
        trainer.train(progress, meter)
        progress.close()
        trainer.metrics.close()
        texts = gather_from_ranks(trainer.sample(args.sample) if args.sample else "")
    losses = mean_over_ranks(meter.losses)
    final = trainer.results(meter)
    if rank == 0:
        report(trainer, meter, {"loss": losses, "samples": texts, "final": final})


def describe(trainer: Trainer) -> str:
    """The model and the corpus, for the top of the log."""
    args, config = trainer.args, trainer.config
    train, held_out = trainer.train_text.numel() / MIB, trainer.held_out_text.numel() / MIB
    lines = [
        f"{args.library} {args.strategy}, {count(trainer.world, 'rank')}: GPT {args.size}, "
        f"{config.parameter_count():,} parameters, batch {args.batch} x {config.context} per rank",
        f"corpus: Python's standard library, {train:.1f} MiB for training, {held_out:.1f} held out",
    ]
    summary = getattr(trainer.sharded.model, "summary", None)
    if summary and args.compare_at is None:  # demo.py prints a table of its own
        lines.append(summary())
    return "\n".join(lines)


def report(trainer: Trainer, meter: Meter, numbers: dict[str, Any]) -> None:
    """Print the results; write run.json and the loss plot to --out (rank 0 only)."""
    args, final = trainer.args, numbers["final"]
    for text in filter(None, numbers["samples"]):
        print(f"\n--- sample ---\n{text}")
    numbers |= {
        "config": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
        },
        "parameters": trainer.config.parameter_count(),
        "ranks": trainer.world,
        "held_out": trainer.held_out,
        "compared": trainer.compared,
        "memory_kind": meter.memory.kind,
    } | surroundings()
    args.out.mkdir(parents=True, exist_ok=True)
    save_json(args.out / "run.json", numbers)
    if args.compare_at:  # demo.py prints and plots the results
        return
    print(
        f"\nheld-out loss {final['held_out']:.4f} nats per byte, "
        f"{final['tokens_per_second']:,.0f} tokens/s (median step), "
        f"peak memory {max(final['peak_memory_mib']):,.0f} MiB per rank ({meter.memory.kind})"
    )
    title = f"{args.library} {args.strategy}, GPT {args.size}, {count(trainer.world, 'rank')}"
    if save_curve(args.out / "loss.png", title, numbers["loss"], trainer.held_out):
        print(f"wrote {args.out / 'run.json'} and {args.out / 'loss.png'}")
    else:
        print(f"wrote {args.out / 'run.json'}; no plot: matplotlib is not installed")


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--library", choices=LIBRARIES, default="zshard", help="(default: %(default)s)")
    add(
        "--strategy",
        help="full_shard, shard_grad_op or no_shard (default: the library's first)",
    )
    add("--size", choices=SIZES, default="10m", help="model size (default: %(default)s)")
    add("--steps", type=int, default=300, help="steps of the learning-rate schedule")
    add("--stop-after", type=int, help="stop at this step of the schedule (default: --steps)")
    add("--batch", type=int, default=8, help="sequences per rank and step")
    add("--context", type=int, help="bytes per sequence (default: that of --size)")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--warmup", type=int, default=20, help="steps of linear learning-rate warmup")
    add("--clip", type=float, default=1.0, help="maximum gradient norm; 0 disables clipping")
    add("--seed", type=int, default=0, help="seed of the parameters and the data")
    add("--eval-every", type=int, default=50, help="steps between held-out losses")
    add("--eval-sequences", type=int, default=64, help="held-out sequences per rank")
    add("--compare-at", type=int, help="also record the results at this step, for demo.py")
    add("--sample", type=int, default=300, help="bytes of text to generate at the end")
    add("--temperature", type=float, default=0.7, help="sampling temperature of that text")
    add("--transport", help="zshard only: shm or c10d (default: the fastest available)")
    add("--no-auto-wrap", action="store_true", help="wrap the model as one unit: saves no memory")
    add("--log-every", type=int, metavar="N", help="print metrics every N steps")
    add("--tensorboard", type=Path, metavar="DIR", help="also write them here (default N: 10)")
    add("--wandb", metavar="PROJECT", help="also send them to Weights & Biases (default N: 10)")
    add("--peak-tflops", type=float, help="of a rank, for MFU (default: measured)")
    add("--brief", action="store_true", help="print only the progress and the sample")
    add("--out", type=Path, help="directory for run.json and loss.png (default: runs/LIBRARY-SIZE)")
    args = parser.parse_args(arguments)
    complete(parser, args)
    return args


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in defaults that depend on other flags; reject invalid combinations."""
    strategies = LIBRARIES[args.library].strategies
    args.strategy = args.strategy or strategies[0]
    if args.strategy not in strategies:
        parser.error(
            f"--strategy {args.strategy} is not available with {args.library}: "
            f"choose {' or '.join(strategies)}"
        )
    if args.transport and args.library != "zshard":
        parser.error(f"--transport requires --library zshard, got {args.library}")
    for name in ("steps", "batch", "eval_every", "eval_sequences"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    args.stop_after = min(args.stop_after or args.steps, args.steps)
    never = args.steps + 1
    args.log_every = args.log_every or (10 if args.tensorboard or args.wandb else never)
    args.always_eval = [args.compare_at, args.stop_after]
    args.out = args.out or Path("runs") / f"{args.library}-{args.size}"


def main() -> int:
    args = parse()
    try:
        with process_group() as (rank, world):
            run(args, rank, world)
    except corpus.CorpusError as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
