"""Train a byte-level GPT on Python's own sources, sharded by zshard or by one of its peers.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --size 10m --steps 300
    python examples/train_gpt.py --size tiny                  # one process, the same script
    torchrun ... examples/train_gpt.py --library ddp          # the same run under a peer

The one idea: the loop below is the loop of a script for one process. Which library shards the
model is one line (`LIBRARIES[...].use`, see libraries.py); seeds, data and start are the same for
all of them, so the loss curves are to be the same too.
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
from torch import Tensor

PROMPTS = (b"class ", b"def ", b"import ", b"for ")
SAMPLE_SEED = 1234


class Trainer:
    """One run on one rank: the model, its data, and the numbers seen so far."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int) -> None:
        self.args, self.rank, self.world = args, rank, world
        self.config = config_of(args)
        self.train_text, self.held_out_text = corpus.load()
        torch.manual_seed(args.seed)  # the same on all ranks: they start from the same parameters
        model = GPT(self.config)
        options = Options(args.strategy, args.lr, args.transport, not args.no_auto_wrap)
        self.sharded: Sharded = LIBRARIES[args.library].use(model, options)
        self.held_out: list[list[float]] = []  # (step, loss)

    def train(self, progress: Progress, meter: Meter) -> None:
        """The steps from 1 to --stop-after, with the held-out loss at every --eval-every."""
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
            progress.update(step, meter.line())
            if step % self.args.eval_every == 0 or step == self.args.stop_after:
                self.held_out.append([step, self.held_out_loss()])
                progress.note(f"step {step}: held-out loss {self.held_out[-1][1]:.4f}")

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
        """Mean loss over held-out windows of all ranks; all ranks must call this together."""
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
        """`length` bytes that the model writes after this rank's prompt.

        All ranks must call this together with the same length: each forward gathers parameters.
        """
        generator = torch.Generator().manual_seed(SAMPLE_SEED + self.rank)
        text = list(PROMPTS[self.rank % len(PROMPTS)])
        for _ in range(length):
            window = torch.tensor([text[-self.config.context :]])
            logits = self.sharded.model(window)[0, -1] / self.args.temperature
            text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return bytes(text).decode(errors="replace")


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warmup, then a cosine down to a tenth, over --steps (not --stop-after)."""
    if step <= args.warmup:
        return float(args.lr * step / args.warmup)
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * done)))


def config_of(args: argparse.Namespace) -> Config:
    size = SIZES[args.size]
    return replace(size, context=args.context or size.context)


def run(args: argparse.Namespace, rank: int, world: int) -> None:
    """Train, evaluate, sample and write the reports: the whole of one rank's life."""
    with PeakMemory() as memory:
        trainer = Trainer(args, rank, world)
        if rank == 0:
            print(describe(trainer), flush=True)
        meter = Meter(args.batch * trainer.config.context * world, memory)
        progress = Progress(args.stop_after, args.library, show=rank == 0)
        trainer.train(progress, meter)
        progress.close()
        texts = gather_from_ranks(trainer.sample(args.sample) if args.sample else "")
    losses = mean_over_ranks(meter.losses)
    peaks = gather_from_ranks(memory.mib)
    if rank == 0:
        report(trainer, meter, {"loss": losses, "peak_memory_mib": peaks, "samples": texts})


def describe(trainer: Trainer) -> str:
    """What is about to run, for the top of the log."""
    args, config = trainer.args, trainer.config
    train, held_out = trainer.train_text.numel() / MIB, trainer.held_out_text.numel() / MIB
    lines = [
        f"{args.library} {args.strategy}, {trainer.world} rank(s): GPT {args.size}, "
        f"{config.parameter_count():,} parameters, batch {args.batch} x {config.context} a rank",
        f"corpus: Python's standard library, {train:.1f} MiB to train on, {held_out:.1f} held out",
    ]
    summary = getattr(trainer.sharded.model, "summary", None)
    return "\n".join(lines + ([summary()] if summary else []))


def report(trainer: Trainer, meter: Meter, numbers: dict[str, Any]) -> None:
    """Print the result; write the JSON and the loss curve into --out (rank 0 only)."""
    args = trainer.args
    for text in filter(None, numbers["samples"]):
        print(f"\n--- sample ---\n{text}")
    seconds = sorted(meter.seconds)
    median = seconds[len(seconds) // 2]
    numbers |= {
        "config": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
        },
        "parameters": trainer.config.parameter_count(),
        "ranks": trainer.world,
        "held_out": trainer.held_out,
        "tokens_per_second": meter.tokens_per_step / median,
        "step_seconds": {"min": seconds[0], "median": median, "max": seconds[-1]},
        "memory_kind": meter.memory.kind,
    } | surroundings()
    print(
        f"\nheld-out loss {trainer.held_out[-1][1]:.4f} nats a byte, "
        f"{numbers['tokens_per_second']:,.0f} tokens/s (median step), "
        f"peak memory {max(numbers['peak_memory_mib']):,.0f} MiB a rank ({meter.memory.kind})"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    save_json(args.out / "run.json", numbers)
    title = f"{args.library} {args.strategy}, GPT {args.size}, {trainer.world} ranks"
    if save_curve(args.out / "loss.png", title, numbers["loss"], trainer.held_out):
        print(f"wrote {args.out / 'run.json'} and {args.out / 'loss.png'}")
    else:
        print(f"wrote {args.out / 'run.json'}; no loss curve: matplotlib is not installed")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--library", choices=LIBRARIES, default="zshard")
    add("--strategy", help="full_shard, shard_grad_op or no_shard (default: the library's first)")
    add("--size", choices=SIZES, default="10m")
    add("--steps", type=int, default=300, help="length of the learning-rate schedule")
    add("--stop-after", type=int, help="stop at this step of the schedule (default: --steps)")
    add("--batch", type=int, default=8, help="sequences a rank and step")
    add("--context", type=int, help="bytes a sequence (default: the size's own)")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=20, help="steps of linear warmup")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=50, help="steps between held-out losses")
    add("--eval-sequences", type=int, default=64, help="held-out sequences a rank")
    add("--sample", type=int, default=300, help="bytes of text to write at the end; 0: none")
    add("--temperature", type=float, default=0.7, help="of that text")
    add("--transport", help="zshard only: shm or c10d (default: the fastest that works)")
    add("--no-auto-wrap", action="store_true", help="one unit of everything: saves no memory")
    add("--out", type=Path, help="folder for run.json and loss.png (default: runs/LIBRARY-SIZE)")
    args = parser.parse_args(arguments)
    complete(parser, args)
    return args


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in the defaults that hang on other flags; refuse what cannot be meant."""
    strategies = LIBRARIES[args.library].strategies
    args.strategy = args.strategy or strategies[0]
    if args.strategy not in strategies:
        parser.error(f"{args.library} has {', '.join(strategies)}, not {args.strategy}")
    if args.transport and args.library != "zshard":
        parser.error(f"--transport is zshard's: {args.library} has no such choice")
    for name in ("steps", "batch", "eval_every", "eval_sequences"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    args.stop_after = min(args.stop_after or args.steps, args.steps)
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
