"""Durations of the machine at hand: its ranks run a plan's operations, and FSDP without a model.

Operations run one by one, with tensors of their shapes; each distinct one is timed once. What FSDP
adds is timed by steps of units that compute nothing, of the model's sizes, over its transport.
Everything is collective: all ranks run the same at the same time, as in training, and take the mean
of what they find.
"""

from __future__ import annotations

import bisect
import os
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

import zshard.optim
from zshard.fsdp import FSDP
from zshard.memory.host_limits import Sharing, rooms
from zshard.offload import Offload
from zshard.planner.kernels import Layout, Segment, TorchCall
from zshard.precision import MixedPrecision
from zshard.ranks.agreement import check_agreement, gather_bytes
from zshard.ranks.wire import Wire
from zshard.units.units import state_of

COLD = 64 << 20
"""Bytes of copies of a parameter that an operation reads in turn: in a step, none is in a cache."""

CALLS, SECONDS = 5, 0.05
"""An operation is timed for so many calls and so long, whichever is more."""

UNITS, ELEMENTS, SMALL, STEPS, WARM_UP = 6, 32 << 20, 1 << 10, 5, 3
"""FSDP's own work is timed with up to UNITS units, which have up to ELEMENTS elements together, of
the model's sizes and of SMALL elements."""


class Cost(NamedTuple):
    """Seconds that something takes, and those of them in which it keeps this rank's core busy."""

    seconds: float
    work: float

    def times(self, factor: float) -> Cost:
        return Cost(self.seconds * factor, self.work * factor)

    def less(self, other: Cost) -> Cost:
        return Cost(max(0.0, self.seconds - other.seconds), max(0.0, self.work - other.work))


class Curve(NamedTuple):
    """Costs of some sizes, in rising order; others lie on straight lines through their two
    neighbours."""

    sizes: Sequence[int]
    costs: Sequence[Cost]

    @classmethod
    def through(cls, points: Mapping[int, Cost]) -> Curve:
        """Return the curve through the costs of two sizes or more."""
        sizes = sorted(points)
        return cls(sizes, [points[size] for size in sizes])

    def at(self, size: int) -> Cost:
        """Return the cost of a size."""
        i = min(max(bisect.bisect(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[i - 1], self.sizes[i]
        part = max(0.0, (size - low) / (high - low))
        rest = self.costs[i - 1].times(1 - part)
        more = self.costs[i].times(part)
        return Cost(max(0.0, rest.seconds + more.seconds), max(0.0, rest.work + more.work))


class Exchange(NamedTuple):
    """What FSDP does beside a model's kernels, by numbers of elements.

    gather, reduce: of a unit. step: the optimizer's, of all units.
    """

    gather: Curve
    reduce: Curve
    step: Curve


class FsdpArgs(NamedTuple):
    """What FSDP's own work depends on: fields of ways.Way, and keep_gathered."""

    strategy: str
    precision: str
    optimizer: str | int | None
    offload: Offload | None
    wire: Wire
    kept: bool


class Machine:
    """The ranks and their devices. What has been measured is not measured again. Collective.

    device: where the operations run. transport: as for FSDP. Raises what FSDP raises.
    """

    def __init__(self, device: torch.device, transport: str | None = None) -> None:
        self._device, self._asked = device, transport
        self._model = FSDP(idle_model(1, device), transport=transport)  # keeps the connection
        self._comm = state_of(self._model).comms.all
        self.ranks, self.transport = self._comm.world, self._comm.transport
        self.per_host = self._comm.per_host or self.ranks
        self._known: dict[TorchCall, float] = {}
        self._phases_of: dict[tuple[FsdpArgs, int], Sequence[Cost]] = {}
        cores = len(os.sched_getaffinity(0))
        self._shares_core = device.type == "cpu" and cores < 2 * self.per_host

    def agree(self, facts: Sequence[tuple[str, str]]) -> None:
        """Raise DivergenceError on all ranks if these differ."""
        check_agreement(self._comm, facts, "plans")

    def room(self) -> float:
        """Return the bytes that are free for a rank, the least of all ranks."""
        if self._device.type == "cuda":
            mine = torch.cuda.mem_get_info(self._device)[0]
        else:
            mine = min(room.bytes for room in rooms(Sharing(self.per_host, self.per_host)))
        return min(self._all([mine]))[0]

    # --- operations -------------------------------------------------------------------------------

    def of_segments(self, segments: Sequence[Segment]) -> list[float]:
        """Return the seconds of each segment. Collective."""
        parts = [[k.operation for k in each.kernels if k.operation] for each in segments]
        new = list(dict.fromkeys(op for part in parts for op in part if op not in self._known))
        if new:
            facts = [("operation", repr(operation)) for operation in new]
            self.agree(facts)
            with torch.random.fork_rng():
                found = [self._seconds(operation) for operation in new]
            self._known.update(zip(new, self._means(found), strict=True))
        return [sum(self._known[operation] for operation in part) for part in parts]

    def _seconds(self, operation: TorchCall) -> float:
        name = str(operation.func)
        if "rnn" in name:
            raise ValueError(
                f"{name} cannot run alone, because some of its arguments come from a forward: a "
                "model with recurrent layers cannot be measured; pass gpus= and gpu= instead"
            )
        run = [_bound(operation, arguments) for arguments in self._arguments(operation)]
        times: list[float] = []
        spent = 0.0
        with torch.no_grad():
            try:
                run[0]()
            except RuntimeError as error:
                raise ValueError(
                    f"{name} cannot run alone and be measured: pass gpus= and gpu= instead"
                ) from error
            while len(times) < CALLS or spent < SECONDS:
                times.append(self._time(run[len(times) % len(run)]))
                spent += times[-1]
        return statistics.fmean(times)  # as a step is a sum of them

    def _arguments(self, operation: TorchCall) -> list[list[Any]]:
        """Return arguments, several times with other memory for parameters."""
        params = [_bytes(each) for each in operation.arguments if _is_param(each)]
        copies = max(1, COLD // max(sum(params), 1 << 20)) if params else 1
        first = [self._tensor(each) for each in operation.arguments]
        return [
            first,
            *(
                [
                    self._tensor(layout) if _is_param(layout) else tensor
                    for layout, tensor in zip(operation.arguments, first, strict=True)
                ]
                for _ in range(copies - 1)
            ),
        ]

    def _tensor(self, given: Any) -> Any:
        if isinstance(given, torch.device):
            return self._device
        if not isinstance(given, Layout):
            return given
        base = torch.empty(_bytes(given) // given.dtype.itemsize, dtype=given.dtype)
        if given.dtype.is_floating_point:
            base.normal_(0, 0.05)
        else:
            base.fill_(given.dtype == torch.bool)  # 0 is a valid index everywhere
        return base.to(self._device).as_strided(given.shape, given.stride)

    def _time(self, call: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        made = call()
        self._wait()
        ended = time.perf_counter()
        del made
        return ended - begun

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # --- FSDP -------------------------------------------------------------------------------------

    def exchange(
        self, args: FsdpArgs, sizes: Iterable[int], again: Callable[[int], float]
    ) -> Exchange:
        """Return what FSDP does with these arguments and units of these sizes. Collective.

        again: how often a backward gathers a unit of a model of so many.
        """
        gathers, reduces, steps = {}, {}, {}
        for size in sorted({SMALL, 2 * SMALL, *sizes}):  # two at least
            n = n_idle(size)
            forward, backward, step, fill = self._phases(args, size)
            gathers[size] = forward.times(1 / n)
            reduces[size] = backward.less(fill).times(1 / n).less(gathers[size].times(again(n)))
            steps[n * size] = step
        return Exchange(Curve.through(gathers), Curve.through(reduces), Curve.through(steps))

    def _phases(self, args: FsdpArgs, size: int) -> Sequence[Cost]:
        """Return what all idle units take: forward, backward, step, and to fill their gradients."""
        if (args, size) not in self._phases_of:
            model = self._wrap(idle_model(size, self._device), args)
            optimizer = optimizer_of(args.optimizer, model)
            samples = [self._step(model, optimizer) for _ in range(WARM_UP + STEPS)]
            medians = [statistics.median(each) for each in zip(*samples[WARM_UP:], strict=True)]
            means = self._means(medians)
            self._phases_of[args, size] = [Cost(*means[i : i + 2]) for i in range(0, len(means), 2)]
        return self._phases_of[args, size]

    def _wrap(self, model: nn.Module, args: FsdpArgs) -> nn.Module:
        return FSDP(
            model,
            auto_wrap_policy={Idle},
            strategy=args.strategy,
            mixed_precision=None if args.precision == "fp32" else MixedPrecision(torch.bfloat16),
            keep_gathered=args.kept,
            offload=args.offload,
            wire=args.wire,
            transport=self._asked,
        )

    def _step(self, model: nn.Module, optimizer: Any) -> list[float]:
        """Return seconds and work of a step's parts: see _phases()."""
        found: list[float] = []
        losses: list[torch.Tensor] = []

        def forward() -> None:
            losses.append(model(torch.zeros(1, device=self._device)).sum())

        def backward() -> None:
            losses.pop().backward()  # type: ignore[no-untyped-call]

        def update() -> None:
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        def fill() -> None:
            for unit in model.modules():
                if isinstance(unit, Idle):
                    unit.fill()

        for part in (forward, backward, update, fill):
            self._comm.exchange(b"")
            work, begun = self._work(), time.perf_counter()
            part()
            self._wait()
            seconds = time.perf_counter() - begun
            found += [seconds, min(seconds, self._work() - work)]
        return found

    def _work(self) -> float:
        """Return the processor time of all that competes with this rank's kernels."""
        return time.process_time() if self._shares_core else time.thread_time()

    # --- ranks ------------------------------------------------------------------------------------

    def _all(self, mine: Sequence[float]) -> list[tuple[float, ...]]:
        """Return the numbers of every rank."""
        data = struct.pack(f"{len(mine)}d", *mine)
        return [struct.unpack(f"{len(mine)}d", each) for each in gather_bytes(self._comm, data)]

    def _means(self, mine: Sequence[float]) -> list[float]:
        return [statistics.fmean(each) for each in zip(*self._all(mine), strict=True)]


# --- units that compute nothing -------------------------------------------------------------------


class Idle(nn.Module):
    """A unit with one parameter, whose forward does nothing. Its backward fills the gradient, so
    that it is in the cache as it would be after the operation that has made it."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device))
        self._grad: torch.Tensor | None = None

    def fill(self) -> torch.Tensor | None:
        """Return the gradient, filled; None before the first forward."""
        return None if self._grad is None else self._grad.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._grad is None:
            self._grad = torch.zeros_like(self.weight, requires_grad=False)
        out: torch.Tensor = _Pass.apply(x, self.weight, self.fill)  # type: ignore[no-untyped-call]
        return out


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fill: Any) -> Any:
        ctx.fill = fill
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], ctx.fill(), None


def n_idle(size: int) -> int:
    """Return the number of units of idle_model()."""
    return min(max(2, ELEMENTS // size), UNITS)


def idle_model(size: int, device: torch.device) -> nn.Sequential:
    """Return a model of idle units of `size` elements each."""
    return nn.Sequential(*(Idle(size, device) for _ in range(n_idle(size))))


# --- helpers --------------------------------------------------------------------------------------


def optimizer_of(name: str | int | None, model: nn.Module) -> Any:
    """Return an optimizer by its name for predict_memory(); zshard's where it has one.

    Raises ValueError where the time of a step cannot be measured so: for a number of state tensors,
    and for Muon, whose step depends on the shapes of matrices.
    """
    if name is None:
        return None
    if not isinstance(name, str) or name.lower() == "muon":
        raise ValueError(
            f"optimizer={name!r}: no step of it can be measured without the model: pass the name "
            'of an elementwise optimizer, such as "adamw" or "adamw8bit"'
        )
    names = (*vars(torch.optim).items(), *vars(zshard.optim).items())
    found = {each.lower(): kind for each, kind in names if isinstance(kind, type)}
    return found[name.lower()](model.parameters())


def _is_param(given: Any) -> bool:
    return isinstance(given, Layout) and given.is_param


def _bytes(layout: Layout) -> int:
    if 0 in layout.shape:
        return 0
    last = sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    return (1 + last) * layout.dtype.itemsize


def _bound(operation: TorchCall, arguments: list[Any]) -> Callable[[], object]:
    args, kwargs = tree_unflatten(arguments, operation.tree)
    return lambda: operation.func(*args, **kwargs)
