"""The computation of a training step: kernels of forward and backward, and activations.

The model runs on fake tensors, which have shapes and no memory, so a trace takes no memory and
hardly any time. Nothing is assumed of the model: each operation that torch would run counts,
those of a checkpointed part twice.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
FORWARD, BACKWARD = "forward", "backward"

_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 2.0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 5.0,
}
"""Operator -> how many products of the size of one attention matrix it computes."""


class Kernel(NamedTuple):
    """One operation of torch's.

    kind: "matmul", "attention" or "move" (anything that is bound by memory). flops: a multiply-add
    counts 2. bytes: read and written. dtype: of the result. shape: (m, n, k) of a matmul, else ().
    again: a checkpoint computes it a second time.
    """

    kind: str
    flops: float
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    again: bool = False


class Segment(NamedTuple):
    """The kernels between two marks. start, peak: bytes of activations, at the begin and at
    most."""

    kernels: list[Kernel]
    start: int
    peak: int

    def above(self, bytes: int) -> Segment:
        """Return the same after more activations."""
        return Segment(self.kernels, self.start + bytes, self.peak + bytes)


class Traced(NamedTuple):
    """A step between marks: a mark is where a module of the given ones begins or ends.

    marks: pairs (index of the module, whether it begins), in the order of the forward.
    forward, backward: [len(marks) + 1] segments; backward[i] is the backward of forward[i].
    kept: bytes of activations that the forward leaves for the backward.
    """

    marks: list[tuple[int, bool]]
    forward: list[Segment]
    backward: list[Segment]
    kept: int

    @property
    def flops(self) -> float:
        """Return the FLOPs without recomputation: by convention, backward needs twice as many as
        forward, and fewer if parameters are frozen."""
        forward, backward = (
            sum(k.flops for segment in phase for k in segment.kernels if not k.again)
            for phase in (self.forward, self.backward)
        )
        return forward + min(backward, 2 * forward)

    def stretched(self, first: int, period: int, times: int) -> Traced:
        """Return the trace of a model with more modules: `period` modules from `first` on, of the
        same kind as those before and behind them, come `times` times."""
        a, b = self.marks.index((first, True)), self.marks.index((first + period, True))
        more = self.forward[b].start - self.forward[a].start

        def row(segments: list[Segment]) -> list[Segment]:
            middle = [s.above(k * more) for k in range(times) for s in segments[a:b]]
            return segments[:a] + middle + [s.above((times - 1) * more) for s in segments[b:]]

        middle = [(i + k * period, begins) for k in range(times) for i, begins in self.marks[a:b]]
        moved = (times - 1) * period
        behind = [(i + moved if i >= first else i, begins) for i, begins in self.marks[b:]]
        marks, kept = self.marks[:a] + middle + behind, self.kept + (times - 1) * more
        return Traced(marks, row(self.forward), row(self.backward), kept)


def trace(
    model: nn.Module,
    modules: Sequence[nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> Traced:
    """Return the trace of loss(model) and its backward on fake tensors.

    Args:
        model: on any device; not changed, and not run with its values.
        modules: of the model, where the step is divided.
        loss: runs the model and returns a scalar. It makes its inputs itself.
        dtype: of the parameters in the step. Default: theirs.

    Raises what the model raises; ValueError for a model that reads values (`.item()`, a branch on a
    tensor, a mask as an index), and if `loss` returns anything but a scalar with a gradient.
    """
    try:
        return _Tracing(modules).of(model, loss, dtype)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the model reads values of tensors ({error.func}): plan a forward without .item(), "
            "branches on tensors and masks as indices"
        ) from error


class _Tracing:
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.marks: list[tuple[int, bool]] = []
        self.meter = _Meter()

    def of(
        self, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], dtype: torch.dtype | None
    ) -> Traced:
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            fakes: dict[str, torch.Tensor] = {}
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                chosen = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                options: Any = {"dtype": chosen, "requires_grad": tensor.requires_grad}
                fakes[name] = torch.empty(tensor.shape, **options)
            hooks = [model.register_forward_pre_hook(_cast_to(dtype), with_kwargs=True)]
            for i, module in enumerate(self._modules):
                begin = functools.partial(self._mark, (i, True))
                hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
                end = functools.partial(self._mark, (i, False))
                hooks.append(module.register_forward_hook(end))
            for hook in hooks:
                stack.callback(hook.remove)
            for fake in fakes.values():
                self.meter.ignore(fake)
                if fake.requires_grad:  # gradients are the engine's to count
                    hooked: Any = fake
                    hooked.register_post_accumulate_grad_hook(_drop)
            stack.enter_context(self.meter)
            self.meter.begin(FORWARD, 0)
            with torch.nn.utils.stateless._reparametrize_module(model, fakes, tie_weights=True):
                result: Any = loss(model)
                is_tensor = isinstance(result, torch.Tensor)
                if not is_tensor or result.numel() != 1 or not result.requires_grad:
                    got = f"shape {tuple(result.shape)}" if is_tensor else result
                    raise ValueError(f"step= must return a scalar loss with a graph, got {got}")
                kept = self.meter.live
                self.meter.begin(BACKWARD, len(self.marks))
                result.backward()
        forward, backward = (
            [self.meter.segment(phase, i) for i in range(len(self.marks) + 1)]
            for phase in (FORWARD, BACKWARD)
        )
        return Traced(self.marks, forward, backward, kept)

    def _mark(self, mark: tuple[int, bool], _: nn.Module, args: Any, more: Any) -> None:
        """A module begins with these arguments and keyword arguments, or ends with an output."""
        if self.meter.phase != FORWARD:
            return  # a checkpoint runs the module again
        at = len(self.marks)
        self.marks.append(mark)
        self.meter.begin(FORWARD, at + 1)
        for tensor in tree_leaves((args, more) if mark[1] else more):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                hooked: Any = tensor
                hooked.register_hook(lambda _, at=at: self.meter.begin(BACKWARD, at))


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records kernels, and the bytes of tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.phase, self._at = FORWARD, 0
        self._segments: dict[tuple[str, int], tuple[list[Kernel], list[int]]] = {}
        self._now = self._of(FORWARD, 0)
        self._counted: set[int] = set()

    def _of(self, phase: str, i: int) -> tuple[list[Kernel], list[int]]:
        return self._segments.setdefault((phase, i), ([], [self.live, self.live]))

    def begin(self, phase: str, i: int) -> None:
        """Assign the kernels that run from now on to this segment.

        A backward goes from the last to the first. Marks of one tensor come at once, in any order;
        the earliest counts.
        """
        begun = self._of(phase, i)
        if phase == BACKWARD == self.phase and i > self._at:
            return
        self.phase, self._at, self._now = phase, i, begun

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor's memory, which the caller keeps."""
        self._counted.add(id(tensor.untyped_storage()))

    def segment(self, phase: str, i: int) -> Segment:
        kernels, (start, peak) = self._of(phase, i)
        return Segment(kernels, start, peak)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            if any([self._track(tensor) for tensor in outputs]) or func._schema.is_mutable:
                kernel = _kernel(func, args, kwargs or {}, inputs, outputs, out)
                again = self.phase == BACKWARD and torch.is_grad_enabled()
                self._now[0].append(kernel._replace(again=again))
        return out

    def _track(self, tensor: torch.Tensor) -> bool:
        """Count a tensor's memory; return whether it is new."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._counted:
            return False
        self._counted.add(key)
        self.live += size
        self._now[1][1] = max(self._now[1][1], self.live)
        weakref.finalize(storage, self._free, key, size)
        return True

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


def _kernel(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    out: Any,
) -> Kernel:
    packet = func._overloadpacket
    size = sum(t.numel() * t.itemsize for t in (*inputs, *outputs))
    dtype = outputs[0].dtype if outputs else torch.float32
    if packet in _ATTENTION:
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        matrix = 2.0 * values["query"].numel() * values["key"].shape[-2]
        causal = 0.5 if values.get("is_causal") else 1.0  # half the matrix is skipped
        return Kernel("attention", float(causal * matrix * _ATTENTION[packet]), size, dtype)
    formula = flop_registry.get(packet)
    if formula is None:
        return Kernel("move", 0.0, size, dtype)
    flops = float(formula(*args, **kwargs, out_val=out))
    n = outputs[0].shape[-1]
    m = outputs[0].numel() // max(1, n)
    shape = m, n, max(1, int(flops / (2 * max(1, m * n))))
    return Kernel("matmul", flops, size, dtype, shape)


def _cast_to(dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a hook that casts a forward's inputs, as FSDP does under mixed precision."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float and dtype is not None else value

    return lambda _, args, kwargs: tree_map(cast, (args, kwargs))


def _drop(tensor: torch.Tensor) -> None:
    tensor.grad = None
