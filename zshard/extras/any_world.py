"""deterministic="any-world": the same bits for any number of ranks.

A step is a fixed number of micro-batches, each with a forward and a backward of its own. The ranks
divide them into runs, and the core adds their gradients in one order (csrc/base/tree.h). This file
has the other half: which micro-batches a rank computes, on which samples, from which random
numbers, and what would make results depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import operator
import random
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from zshard import api
from zshard.api import EXTENSIONS, Extension, checksum, is_unit, state_of
from zshard.extras.data_position import order_of

NAME = "any-world"
_OPTION = f"deterministic={NAME!r}"
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_SUPPORTED = ("self", "shm", "c10d")  # transports that carry several gradients in a round
_FULL = (torch.float32, torch.float64)


def parse(deterministic: str | None, micro_batches: int | None) -> dict[str, int]:
    """Parse FSDP()'s two arguments: "micro_batches" in a step. Raises ValueError or TypeError."""
    if deterministic not in (None, NAME):
        raise ValueError(f"deterministic must be {NAME!r} or None, got {deterministic!r}")
    if micro_batches is None or deterministic is None:
        raise ValueError(f"{_OPTION} and micro_batches belong together: pass both")
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
        raise TypeError(f"micro_batches must be an int, got {micro_batches!r}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    return {"micro_batches": micro_batches}


class _AnyWorld(Extension):
    """Makes such models' results independent of the number of ranks, or refuses the model."""

    def check_model(
        self,
        module: nn.Module,
        options: Sequence[Any],
        inner: Iterable[Any],
        held: Collection[int],
        device: str,
    ) -> None:
        count = options[-1].micro_batches
        if any(each.micro_batches != count for each in inner):
            raise ValueError("pass the same micro_batches to all FSDP() calls of a model")
        if count == 0:
            return
        if device != "cpu":
            raise NotImplementedError(f"{_OPTION} is not supported on GPUs: omit it")
        if options[-1].wire.codes != (0, 0):
            raise ValueError(f"{_OPTION} does not allow wire=: omit one of them")
        dtypes = [each.precision.wire for each in options if each.precision.wire is not None]
        if dtypes and dtypes[0] not in _FULL:
            raise ValueError(f"{_OPTION} adds in float32: omit reduce_dtype={dtypes[0]}")
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            if id(param) not in held:
                raise ValueError(f"parameter '{name}' is ignored, but trains: freeze it")
            if param.dtype not in _FULL:
                raise ValueError(
                    f"{_OPTION} needs parameters in float32, but '{name}' has {param.dtype}: "
                    f"convert the model, and pass mixed_precision=MixedPrecision({param.dtype})"
                )

    def check_transport(self, options: Any, comm: api.Comm, asked: object) -> None:
        # Others add gradients within hosts first.
        if options.micro_batches and comm.transport not in _SUPPORTED:
            text = f"{_OPTION} is not supported by transport={asked!r}"
            raise NotImplementedError(f"{text}: between hosts, pass transport='c10d'")

    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        if state_of(model).options.micro_batches:
            _models.add(model)
            _watch_buffers(model)

    def exact_norms(self) -> bool:
        """Return whether this process has such a model. Then all norms are independent of the
        number of ranks, also those of gradients that are not sharded."""
        return len(_models) > 0

    def check_norm(self, norm_type: float) -> None:
        if self.exact_norms() and norm_type not in (2.0, math.inf):
            raise NotImplementedError(f"{_OPTION} needs norm_type=2 or inf, got {norm_type}")

    def recorded(self, model: nn.Module) -> dict[str, Any]:
        count = state_of(model).options.micro_batches if is_unit(model) else 0
        run = {"micro_batches": count, "threads": torch.get_num_threads()}
        return {"any_world": run} if count else {}

    def check_recorded(self, model: nn.Module, recorded: Mapping[str, Any], path: str) -> None:
        """Refuse to continue a run whose bits this one would not repeat."""
        run = self.recorded(model).get("any_world", {})
        saved = recorded.get("any_world") or run
        for name, value in run.items():
            if value != saved.get(name):
                how = "micro_batches" if name == "micro_batches" else "OMP_NUM_THREADS"
                raise ValueError(
                    f"'{path}' was saved with {how}={saved.get(name)}, but this run has "
                    f"{how}={value}: start it with the former, or without {_OPTION}"
                )


EXTENSIONS.append(_AnyWorld())


def _watch_buffers(module: nn.Module) -> None:
    """A forward that trains, or that has a module in training mode, and changes, adds or removes a
    buffer raises RuntimeError at its end: a rank would change it as often as it has
    micro-batches."""
    before: dict[str, tuple[object, ...]] = {}

    def look(*_: object) -> None:
        before.clear()
        if _may_train(module):
            before.update(_buffers_of(module))

    def check(*_: object) -> None:
        now = _buffers_of(module) if _may_train(module) else before
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            raise RuntimeError(
                f"buffer '{changed[0]}' was changed in a training forward, which {_OPTION} does "
                "not allow: put BatchNorm into eval() mode, or use GroupNorm"
            )

    hooks = [module.register_forward_pre_hook(look), module.register_forward_hook(check)]
    state_of(module).note_hooks(module, hooks)  # which copies of the model do not get


def _may_train(module: nn.Module) -> bool:
    return torch.is_grad_enabled() or any(each.training for each in module.modules())


def _buffers_of(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """Return what shows whether a buffer was changed, also by `.data`, which has no version."""
    return {name: (b.dtype, b.shape, checksum(b)) for name, b in module.named_buffers()}


def micro_batches_in(model: nn.Module, step: int, seed: int) -> Iterator[int]:
    """See FSDP.micro_batches()."""
    state = state_of(model)
    count = state.options.micro_batches
    if count == 0:
        raise RuntimeError(f"micro_batches() needs FSDP(model, {_OPTION}, micro_batches=...)")
    if state.unit.name:
        raise ValueError(f"micro_batches() was called on unit '{state.unit.name}', not the model")
    engine = state.unit.engine
    engine.restart_step()
    for index in engine.leaves():
        _seed(seed, step, index)
        engine.begin_leaf()
        yield index
        if not engine.leaf_is_done():
            engine.restart_step()
            text = f"micro-batch {index} of step {step} had no backward, or a failed one"
            raise RuntimeError(f"{text}: call model.micro_batches(step) again on all ranks")
    _seed(seed, step, count)


def _seed(*numbers: int) -> None:
    """Seed the random number generators of this process: torch's, Python's, and NumPy's if it is
    imported."""
    plain = tuple(map(operator.index, numbers))  # NumPy's have another repr()
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


class MicroBatchSampler(Sampler[list[int]]):
    """The samples of this rank's micro-batches: DataLoader(dataset, batch_sampler=sampler).

    It never ends: each pass over the data set has an order of its own, which depends on `seed` and
    not on the number of ranks. What does not fill a step at the end of a pass is left out.

    Args:
        model: FSDP(model, deterministic="any-world", micro_batches=...).
        n_samples: the length of the data set.
        batch_size: samples in a micro-batch.
        shuffle: draw a new order in each pass. Default: True.
        seed: of these orders. Default: 0.

    Attributes:
        step: where iter() begins: set it before, when a run continues.

    Raises TypeError for another model; ValueError if the data set has fewer samples than a step.
    """

    def __init__(
        self,
        model: nn.Module,
        n_samples: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if not is_unit(model) or state_of(model).options.micro_batches == 0:
            raise TypeError(f"MicroBatchSampler() needs FSDP(model, {_OPTION}, micro_batches=...)")
        count = state_of(model).options.micro_batches
        if batch_size < 1 or n_samples < count * batch_size:
            step = f"a step of {count} micro-batches of {batch_size}"
            raise ValueError(f"{n_samples} samples are fewer than {step}: use a smaller batch_size")
        self.step = 0
        self._size, self._count = batch_size, count
        self._order = n_samples, shuffle, seed
        self._run = state_of(model).unit.engine.leaves()

    def __iter__(self) -> Iterator[list[int]]:
        steps = self._order[0] // (self._count * self._size)
        step, epoch, order = self.step, -1, torch.empty(0)
        while True:
            if step // steps != epoch:
                epoch = step // steps
                order = order_of(epoch, *self._order)
            first = step % steps * self._count
            for index in self._run:
                begin = (first + index) * self._size
                yield order[begin : begin + self._size].tolist()
            step += 1
