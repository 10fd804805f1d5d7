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

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zshard

LINE = {  # the parts of a line: name in the dict, factor, text
    "loss": (1, "loss {:.4f}"),
    "seconds/step": (1e3, "{:.1f} ms"),
    "tokens/s": (1, "{:,.0f} tokens/s"),
    "mfu": (100, "MFU {:.1f} %"),
    "memory/now/total": (2**-20, "memory {:,.0f} MiB"),
    "memory/peak/total": (2**-20, "peak {:,.0f} MiB"),
    "memory/cuda/peak": (2**-20, "peak with activations {:,.0f} MiB"),
    "grad_norm": (1, "norm {:.3f}"),
    "seconds/wait": (1e3, "wait {:.1f} ms"),
}


class Metrics:
    """model: sharded or plain. tokens: of this rank in an optimizer step, with all micro-batches.

    every: steps between two lines. flops_per_token: default: flops_of(model). peak_tflops: of this
    rank's device, from its data sheet; default: measured by a large matrix product. writers: with
    add_scalar(), as TensorBoard's, or log(), as a run of W&B. To resume, set `steps`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: int,
        every: int = 10,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        writers: Any = (),
    ) -> None:
        self.model = getattr(model, "_orig_mod", model)  # without torch.compile()
        self.tokens, self.every, self.writers, self.steps = tokens, every, writers, 0
        self.flops = flops_of(model) if flops_per_token is None else flops_per_token
        self.peak = peak_tflops
        is_alone = not dist.is_initialized()
        self.rank, self.world = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._mark: float | None = None  # the end of the last step; None: the first is not timed
        self._steps, self._seconds = 0, 0.0  # since the last line

    def step(self, loss: Any = None) -> dict[str, float] | None:
        """Call it after each optimizer.step(). Every N steps, return the numbers: model.metrics(),
        "loss" of this rank, "seconds/step" as a mean without pauses, "tokens/s" of all ranks, and
        "mfu", a fraction."""
        self.steps += 1
        is_due = self.steps % self.every == 0
        numbers = {}
        if is_due and loss is not None:
            numbers["loss"] = float(torch.as_tensor(loss).item())  # waits for a GPU
        now = time.perf_counter()
        if self._mark is not None:
            self._steps, self._seconds = self._steps + 1, self._seconds + now - self._mark
        self._mark = now
        if not is_due:
            return None
        with self.paused():
            self._complete(numbers)
            if self.rank == 0:
                self._write(numbers)
        return numbers

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the body, such as validation and saving."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # queued work belongs to the steps before
        mark, began = self._mark, time.perf_counter()
        try:
            yield
        finally:
            if mark is not None:  # of the outermost pause
                self._mark = mark + time.perf_counter() - began

    def close(self) -> None:
        """Close the writers."""
        for writer in self.writers:
            writer.finish() if hasattr(writer, "finish") else writer.close()

    def _complete(self, numbers: dict[str, float]) -> None:
        if isinstance(self.model, zshard.FSDP):
            numbers.update(zshard.FSDP.metrics(self.model))
        numbers.pop("seconds/step", None)
        if torch.cuda.is_initialized():
            numbers["memory/cuda/peak"] = float(torch.cuda.max_memory_allocated())
        if self._seconds > 0:
            self.peak = matmul_tflops(self.model) if self.peak is None else self.peak
            rate = self.tokens * self._steps / self._seconds  # of this rank
            numbers["seconds/step"] = self._seconds / self._steps
            numbers["tokens/s"], numbers["mfu"] = (
                self.world * rate,
                self.flops * rate / self.peak / 1e12,
            )
        self._steps, self._seconds = 0, 0.0

    def _write(self, numbers: dict[str, float]) -> None:
        words = [
            text.format(by * numbers[name]) for name, (by, text) in LINE.items() if name in numbers
        ]
        print(f"step {self.steps:4d}  {', '.join(words)}", flush=True)
        for writer in self.writers:
            if hasattr(writer, "log"):
                writer.log(numbers, step=self.steps)
                continue
            for name, value in numbers.items():
                writer.add_scalar(name, value, self.steps)


def flops_of(model: nn.Module, layers: int = 0, width: int = 0, length: int = 0) -> float:
    """Operations for a token, forward and backward: 6 for each parameter, 4 if it is frozen, and
    attention's 12 * layers * width * length, if the sizes are given."""
    trained = zshard.num_parameters(model, trainable_only=True)
    return 4.0 * zshard.num_parameters(model) + 2 * trained + 12 * layers * width * length


def matmul_tflops(model: nn.Module) -> float:
    """The best of three matrix products on the model's device, in its dtype."""
    like = next(model.parameters())
    size, times = 8192 if like.is_cuda else 1024, []
    a = torch.ones(size, size, device=like.device, dtype=like.dtype)
    for _ in range(4):  # the first one warms up
        began = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times[1:]) / 1e12


def writers(tensorboard: Any = None, wandb: str | None = None, config: Any = None) -> list[Any]:
    """Return writers to a folder for TensorBoard and to a project of W&B on rank 0, [] on others.
    config: the run's settings, for W&B. Raises ImportError if a package is missing."""
    makers: list[Any] = []
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        makers.append(lambda: SummaryWriter(str(tensorboard)))
    if wandb:
        from wandb import init

        makers.append(lambda: init(project=wandb, config=config))
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return [make() for make in makers if is_first]
