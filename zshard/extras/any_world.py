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
from zshard.api import (
    EXTENSIONS,
    Extension,
    checksum,
    is_unit,
    state_of,
)

NAME = "any-world"
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_SUPPORTED = ("self", "shm", "c10d")  # transports that carry several gradients in a round


def parse(deterministic: str | None, micro_batches: int | None) -> dict[str, int]:
    """Parse FSDP()'s two arguments: "micro_batches" in a step. Raises ValueError or TypeError."""
    if deterministic not in (None, NAME):
        raise ValueError(f"deterministic must be {NAME!r} or None, got {deterministic!r}")
    if micro_batches is None or deterministic is None:
        lacks = "micro_batches=..." if micro_batches is None else f"deterministic={NAME!r}"
        raise ValueError(
            f"deterministic={NAME!r} and micro_batches belong together: pass {lacks}, too"
        )
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
        raise TypeError(f"micro_batches must be an int, got {micro_batches!r}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
    return {"micro_batches": micro_batches}


class _AnyWorld(Extension):
    """What makes results of such models independent of the number of ranks, or refuses."""

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
            raise ValueError(
                "a unit of the model was sharded by another FSDP() call with another "
                "micro_batches: pass the same deterministic and micro_batches to all FSDP() calls "
                "of a model"
            )
        if count > 0:
            _check_options(options, device)
            _check_params(module, held)

    def check_transport(self, options: Any, comm: api.Comm, asked: object) -> None:
        """Refuse a transport that adds gradients within hosts first."""
        if options.micro_batches and comm.transport not in _SUPPORTED:
            raise NotImplementedError(
                f"deterministic={NAME!r} is not supported by transport={asked!r}: between hosts, "
                "pass transport='c10d'"
            )

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
            raise NotImplementedError(
                f"norm_type={norm_type} depends on the number of ranks: with "
                f"deterministic={NAME!r}, use norm_type=2 or inf"
            )

    def recorded(self, model: nn.Module) -> dict[str, Any]:
        count = state_of(model).options.micro_batches if is_unit(model) else 0
        run = {"micro_batches": count, "threads": torch.get_num_threads()}
        return {"any_world": run} if count else {}

    def check_recorded(self, model: nn.Module, recorded: Mapping[str, Any], path: str) -> None:
        """Refuse to continue a run whose bits this one would not repeat."""
        ours, saved = self.recorded(model).get("any_world"), recorded.get("any_world")
        if not ours or not saved or ours == saved:
            return
        name = next(name for name in ours if ours[name] != saved.get(name))
        how = "micro_batches" if name == "micro_batches" else "OMP_NUM_THREADS"
        raise ValueError(
            f"'{path}' was saved with {how}={saved.get(name)}, but this run has {how}={ours[name]}:"
            f" start it with {how}={saved.get(name)}, or without deterministic={NAME!r}"
        )


EXTENSIONS.append(_AnyWorld())


def _check_options(options: Sequence[Any], device: str) -> None:
    if device != "cpu":
        raise NotImplementedError(f"deterministic={NAME!r} is not supported on GPUs: omit it")
    if options[-1].wire.codes != (0, 0):
        raise ValueError(f"deterministic={NAME!r} does not allow wire=: omit one of them")
    wire = next((each.precision.wire for each in options if each.precision.wire is not None), None)
    if wire not in (None, torch.float32, torch.float64):
        raise ValueError(
            f"deterministic={NAME!r} adds gradients in float32: omit reduce_dtype={wire}"
        )


def _check_params(module: nn.Module, held: Collection[int]) -> None:
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in held:
            raise ValueError(
                f"parameter '{name}' is ignored, but trains, so each rank would step it by its own "
                f"gradients: with deterministic={NAME!r}, freeze it (requires_grad_(False)), or do "
                "not ignore it"
            )
        if param.requires_grad and param.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"deterministic={NAME!r} needs parameters in float32, but '{name}' has "
                f"{param.dtype}: convert the model, and pass "
                f"mixed_precision=MixedPrecision({param.dtype}) to compute in that dtype"
            )


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
                f"buffer '{changed[0]}' was changed in a training forward, so its values depend "
                f"on the number of ranks: with deterministic={NAME!r}, put BatchNorm into eval() "
                "mode, or use GroupNorm or LayerNorm instead; write to other buffers between steps"
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
        raise RuntimeError(
            f"micro_batches() needs FSDP(model, deterministic={NAME!r}, micro_batches=...)"
        )
    if state.unit.name:
        raise ValueError(
            f"micro_batches() was called on unit '{state.unit.name}': call it on the outermost "
            "sharded module"
        )
    engine = state.unit.engine
    engine.restart_step()
    for index in engine.leaves():
        _seed(seed, step, index)
        engine.begin_leaf()
        yield index
        if not engine.leaf_is_done():
            engine.restart_step()
            raise RuntimeError(
                f"micro-batch {index} of step {step} had no backward, or a failed one: begin the "
                "step anew on all ranks, with model.micro_batches(step)"
            )
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
            raise TypeError(
                f"MicroBatchSampler() needs FSDP(model, deterministic={NAME!r}, micro_batches=...)"
            )
        state = state_of(model)
        count = state.options.micro_batches
        if batch_size < 1 or n_samples < count * batch_size:
            raise ValueError(
                f"a data set of {n_samples} samples has no step of {count} micro-batches of "
                f"{batch_size}: use a smaller batch_size or fewer micro_batches"
            )
        self.step = 0
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._n_samples, self._count = n_samples, count
        self._run = state.unit.engine.leaves()

    def __iter__(self) -> Iterator[list[int]]:
        steps = self._n_samples // (self._count * self._size)
        step, epoch, order = self.step, -1, torch.empty(0)
        while True:
            if step // steps != epoch:
                epoch = step // steps
                order = self._order(epoch)
            first = step % steps * self._count
            for index in self._run:
                begin = (first + index) * self._size
                yield order[begin : begin + self._size].tolist()
            step += 1

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._n_samples)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._n_samples, generator=generator)
