"""A training loop's numbers, every N steps: a line on rank 0, and a dict for TensorBoard and W&B.

    metrics = Metrics(model, tokens=batch * length, writers=writers(tensorboard="runs/a"))
    for batch in batches:
        ...
        optimizer.step()
        metrics.step(loss)  # the dict, every 10 steps; else None
        with metrics.paused():  # does not count
            evaluate()

No call communicates, so a rank may make it alone. A GPU is waited for every N steps, not each step.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zshard

MIB = 2**20
LINE = (
    *(("loss", 1, "loss {:.4f}"), ("seconds/step", 1e3, "{:.1f} ms")),
    *(("tokens/s", 1, "{:,.0f} tokens/s"), ("mfu", 100, "MFU {:.1f} %")),
    ("memory/now/total", 1 / MIB, "memory {:,.0f} MiB"),
    *((f"memory/{of}", 1 / MIB, "peak {:,.0f} MiB") for of in ("peak/total", "cuda/peak")),
    *(("grad_norm", 1, "norm {:.3f}"), ("seconds/wait", 1e3, "wait {:.1f} ms")),
)


class Metrics:
    """tokens: of this rank in an optimizer step, with all its micro-batches. every: steps.

    flops_per_token: default: flops_of(model). peak_tflops: what this rank could do, from the GPU's
    data sheet; default: what a large matrix product reaches. writers: with add_scalar(), as
    TensorBoard's, or with log(), as a run of W&B; rank 0 writes. To resume, set `steps`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: int,
        every: int = 10,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        writers: Sequence[Any] = (),
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.model = getattr(model, "_orig_mod", model)  # without torch.compile()
        self.tokens, self.every, self.writers = tokens, every, writers
        self.flops = flops_of(model) if flops_per_token is None else flops_per_token
        self.peak = peak_tflops
        self.steps = 0  # so far
        is_alone = not dist.is_initialized()
        self.rank, self.world = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._mark: float | None = None  # the end of the last step; None: none has ended
        self._sums = [0, 0.0, 0]  # since the last line: steps, their seconds and tokens

    def step(self, loss: Any = None, tokens: int | None = None) -> dict[str, float] | None:
        """An optimizer step has ended. tokens: if this step had another number of them.

        Every N steps, return the numbers: those of model.metrics(), with "seconds/step" as the mean
        since the last time, without pauses; "loss", of this rank; "tokens/s", of all ranks, if
        each has as many; "mfu", a fraction. The first step, which sets things up, is not timed.
        """
        self.steps += 1
        is_due = self.steps % self.every == 0
        numbers = {}
        if is_due and loss is not None:
            numbers["loss"] = float(torch.as_tensor(loss).item())  # waits for a GPU
        now = time.perf_counter()
        if self._mark is not None:
            more = (1, now - self._mark, self.tokens if tokens is None else tokens)
            self._sums = [old + new for old, new in zip(self._sums, more, strict=True)]
        self._mark = now
        if not is_due:
            return None
        with self.paused():
            self._report(numbers)
        return numbers

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what is done within, such as validation and saving."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what is queued belongs to the steps before
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._mark is not None:
                self._mark += time.perf_counter() - began

    def close(self) -> None:
        """Close the writers."""
        for writer in self.writers:
            getattr(writer, "close" if hasattr(writer, "add_scalar") else "finish")()

    def _report(self, numbers: dict[str, float]) -> None:
        """Complete the numbers of a step; print and write them on rank 0."""
        is_ours = isinstance(self.model, zshard.FSDP)
        own: dict[str, float] = zshard.FSDP.metrics(self.model) if is_ours else {}
        own.pop("seconds/step", None)
        if torch.cuda.is_initialized():  # with activations
            own["memory/cuda/peak"] = float(torch.cuda.max_memory_allocated())
        numbers.update(own)
        (steps, seconds, tokens), self._sums = self._sums, [0, 0.0, 0]
        if steps and seconds > 0:
            self.peak = matmul_tflops(self.model) if self.peak is None else self.peak
            numbers["seconds/step"] = seconds / steps
            numbers["tokens/s"] = self.world * tokens / seconds
            numbers["mfu"] = self.flops * tokens / seconds / (self.peak * 1e12)
        if self.rank != 0:
            return
        words = [text.format(by * numbers[name]) for name, by, text in LINE if name in numbers]
        print(f"step {self.steps:4d}  {', '.join(words)}", flush=True)
        for writer in self.writers:
            if hasattr(writer, "add_scalar"):
                for name, value in numbers.items():
                    writer.add_scalar(name, value, self.steps)
            else:
                writer.log(numbers, step=self.steps)


def flops_of(model: nn.Module, layers: int = 0, width: int = 0, length: int = 0) -> float:
    """Operations for a token, forward and backward: 6 for each parameter, 4 if it is frozen, and
    attention's 12 * layers * width * length, where the sizes are given."""
    trained = zshard.num_parameters(model, trainable_only=True)
    return 4.0 * zshard.num_parameters(model) + 2 * trained + 12 * layers * width * length


def matmul_tflops(model: nn.Module) -> float:
    """What the best of three matrix products reaches on the model's device, in its dtype."""
    first = next(model.parameters())
    size = 8192 if first.is_cuda else 1024
    a = torch.ones(size, size, device=first.device, dtype=first.dtype)
    times = []
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times[1:]) / 1e12


def writers(tensorboard: Any = None, wandb: str | None = None, config: Any = None) -> list[Any]:
    """Writers to a folder of TensorBoard's and to a project of W&B's, on rank 0; [] on others.
    config: a dict of the run's settings, for W&B. Exits if a package is missing."""
    makers: list[Any] = []
    try:
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            makers.append(lambda: SummaryWriter(str(tensorboard)))
        if wandb:
            from wandb import init

            makers.append(lambda: init(project=wandb, config=config))
    except ImportError as error:
        sys.exit(f"{error}: pip install {error.name}")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return [make() for make in makers if is_first]
