"""A byte-level GPT of Python's own sources, trained by a script for DeepSpeed with one changed
line: `import zshard as deepspeed`.

    torchrun --standalone --nproc-per-node 2 examples/gpt_deepspeed.py

ds_config.json has the batch size, the optimizer, its schedule and the stage of ZeRO, which
`--strategy` replaces. With `--strategy ddp`, OverDdp is what trains: the same settings over DDP.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import common
import corpus
import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, Config
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import zshard as deepspeed

EXPECTED = 2.9  # bits per byte of held-out files; by how often each byte follows another: 3.48
JUDGED = 64  # held-out sequences per rank
CONFIG = Path(__file__).with_name("ds_config.json")
STAGES = {"no_shard": 0, "zero1": 1, "shard_grad_op": 2, "zero2": 2, "full_shard": 3, "zero3": 3}


class OverDdp(nn.Module):
    """The engine's work with this config, over torch's DDP. It saves nothing."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self.module = nn.parallel.DistributedDataParallel(model)
        options, plan = config["optimizer"]["params"], config["scheduler"]["params"]
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
        rise, end = plan["warmup_num_steps"], plan["total_num_steps"]

        def factor(step: int) -> float:
            """DeepSpeed's schedules count from -1."""
            return min(max(0, step - 1) / rise, (end - step + 1) / (end - rise))

        self.scheduler = LambdaLR(self.optimizer, factor)
        self.global_steps = 0

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def settings(run: common.Run) -> dict[str, Any]:
    """The config, with the number of steps, and the stage if `--strategy` names one."""
    args, config = run.args, json.loads(CONFIG.read_text())
    plan = config["scheduler"]["params"]
    plan.update(total_num_steps=args.steps, warmup_num_steps=max(2, args.steps // 10))
    if args.strategy in STAGES:
        config["zero_optimization"]["stage"] = STAGES[args.strategy]
    elif args.strategy not in ("config", "ddp"):
        sys.exit(
            f"--strategy {args.strategy} is not a stage of ZeRO: pass {', '.join(STAGES)} or ddp"
        )
    return config


def engine_of(run: common.Run, model: nn.Module, config: dict[str, Any]) -> Any:
    if run.args.strategy == "ddp":
        if run.args.save or run.args.resume:
            sys.exit("--strategy ddp has no engine to save or resume")
        return OverDdp(model, config)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    if run.args.resume:
        engine.load_checkpoint(run.args.resume)
    return engine


def batch_of(run: common.Run, windows: Tensor, size: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's bytes and the bytes that follow, each (size, T)."""
    draw = torch.Generator().manual_seed(run.seed_of(step))
    chosen = windows[torch.randint(len(windows), (size,), generator=draw)].long()
    return chosen[:, :-1], chosen[:, 1:]


def of_pairs(text: Tensor, held_out: Tensor) -> float:
    """The baseline: the bits per held-out byte by how often each byte follows each other one."""

    def pairs(side: Tensor) -> Tensor:
        counts = torch.zeros(VOCABULARY**2, dtype=torch.float64)
        for some in side.unfold(0, 2, 1).split(2**18):  # all at once would be the peak of memory
            numbers = VOCABULARY * some[:, 0].long() + some[:, 1]
            counts += numbers.bincount(minlength=len(counts))
        return counts.view(VOCABULARY, VOCABULARY)

    chances = pairs(text) + 0.1
    bits = -(chances / chances.sum(1, keepdim=True)).log2()
    return (pairs(held_out) * bits).sum().item() / (len(held_out) - 1)


def train(run: common.Run) -> None:
    args, (text, held_out) = run.args, corpus.load()
    shape = Config(2, 32, 2, context=32) if run.quick else Config(4, 192, 6, context=128)
    model, config = GPT(shape), settings(run)
    run.note(model)
    engine = engine_of(run, model, config)

    windows = text.unfold(0, shape.context + 1, 1)  # a view: all of them
    size = config["train_micro_batch_size_per_gpu"]
    run.first = engine.global_steps
    for step in range(run.first, args.stop_after):
        began = time.perf_counter()
        loss = engine(*batch_of(run, windows, size, step))
        engine.backward(loss)
        engine.step()
        run.log(loss)
        run.seconds.append(time.perf_counter() - began)
        if args.save and (step + 1) % args.save_every == 0:
            engine.save_checkpoint(args.save)

    judged = {"count": 8 if run.quick else JUDGED, "rank": run.rank, "world": run.world}
    engine.eval()
    found = []
    with torch.no_grad():
        for inputs, targets in corpus.held_out_batches(held_out, 8, shape.context, **judged):
            found.append(F.cross_entropy(engine(inputs).mT, targets, reduction="none"))
    bits = torch.cat(found).mean(0) / math.log(2)  # (T,)
    baseline = ("by how often each byte follows another", of_pairs(text, held_out))

    def draw(axes: Any) -> None:
        axes.plot(range(1, 1 + shape.context), bits, label="the GPT")
        axes.axhline(baseline[1], color="gray", label="by pairs of bytes")
        axes.set(xlabel="bytes that it has seen", ylabel="bits per byte", ylim=(0, 8))
        axes.legend()

    mean = bits.mean().item()
    run.result("held-out bits per byte", mean, expected=EXPECTED, baseline=baseline, draw=draw)


if __name__ == "__main__":
    common.main(__doc__, train, steps=300, strategy="config")
