"""The changes that zshard makes to torch, from the first FSDP(...) of a process on.

Importing zshard changes nothing. This file lists each change with the attributes of torch that it
needs, what they must look like, and what fails without it. Where an attribute is private, a comment
explains why no public one works. If a later torch changes an attribute, zshard skips the change and
warns of what does not work. tests/project/test_patches.py limits the length of the list and names a
test of each private attribute.

Uses of torch's hooks are not changes: optimizer steps (optim/hooks.py), parameters that are added
to a model (wrap/late_parameters.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.variable import Variable
from torch.distributed import distributed_c10d
from torch.nn.utils import clip_grad

from zshard import _core, grad_scaler
from zshard._errors import warn
from zshard.guard import draws, handlers, outside
from zshard.guard.plain import is_tracing
from zshard.optim import clip, hooks
from zshard.state import optimizer
from zshard.wrap import late_parameters


class _TorchPlace(NamedTuple):
    """An attribute of an object in torch."""

    owner: object
    name: str
    takes: tuple[str, ...] | None = None  # the first parameters of a function; None: not a function

    def is_as_expected(self) -> bool:
        value = getattr(self.owner, self.name, None)
        if value is None or self.takes is None:
            return value is not None
        try:
            parameters = tuple(inspect.signature(value).parameters)
        except (TypeError, ValueError):
            return False
        return parameters[: len(self.takes)] == self.takes

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


class _Patch(NamedTuple):
    """A change to torch."""

    lost: str  # what does not work without the change
    install: Callable[[], None]
    places: tuple[_TorchPlace, ...]


class AutogradEngine(torch._C._ImperativeEngine):
    """torch's engine, but before each backward the core finds where it enters the units of
    models. torch.autograd.backward(), torch.autograd.grad() and torch.func all call it."""

    def run_backward(self, roots: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run a backward from `roots`, tensors or GradientEdges."""
        if not is_tracing():  # a traced graph has no values and does not run
            _core.before_backward(roots)
        return super().run_backward(roots, *args, **kwargs)


def _install_engine() -> None:
    Variable._execution_engine = AutogradEngine()


_OPTIMIZER = torch.optim.Optimizer

_PATCHES = (
    _Patch(
        "backward does not find the units that it needs, and fails on sharded parameters",
        _install_engine,
        # torch has no hook for the start of a backward.
        (_TorchPlace(Variable, "_execution_engine"),),
    ),
    _Patch(
        "some functions of torch.nn.init refuse sharded parameters",
        draws.install,
        # Scripts import functions that call these by name, so changing those functions would be too
        # late.
        (
            _TorchPlace(torch.nn.init, "_calculate_fan_in_and_fan_out", ("tensor",)),
            _TorchPlace(torch.nn.init, "_no_grad_trunc_normal_", ("tensor",)),
            _TorchPlace(torch.nn.init, "kaiming_normal_", ("tensor",)),
        ),
    ),
    _Patch(
        "torch.distributed does not refuse shards (dist.all_reduce(p.grad))",
        outside.install_check,
        # torch's collectives do not dispatch to tensor subclasses; all of them check a tensor here.
        (_TorchPlace(distributed_c10d, "_check_single_tensor", ("param", "param_name")),),
    ),
    _Patch(
        "a rank that evaluates alone weights that all ranks have written in place waits for ranks "
        "that are in a barrier",
        outside.install_barrier,
        (_TorchPlace(dist, "barrier", ("group", "async_op")),),
    ),
    _Patch(
        "torch's elementwise optimizers take twice as long on CPUs",
        hooks.install_steps,
        (_TorchPlace(_OPTIMIZER, "profile_hook_step", ("func",)),),
    ),
    _Patch(
        "torch.nn.utils.clip_grad_norm_ sees this rank's shards only: call model.clip_grad_norm_()",
        clip.install,
        # clip_grad_norm_() does not dispatch a norm over several tensors, and scripts import it by
        # name.
        (
            _TorchPlace(
                clip_grad, "_get_total_norm", ("tensors", "norm_type", "error_if_nonfinite")
            ),
            _TorchPlace(
                clip_grad, "_clip_grads_with_norm_", ("parameters", "max_norm", "total_norm")
            ),
        ),
    ),
    _Patch(
        "state_dict() and load_state_dict() of optimizers see this rank's shards only: call "
        "zshard.optim_state_dict() and zshard.load_optim_state_dict()",
        optimizer.install,
        (
            _TorchPlace(_OPTIMIZER, "state_dict", ("self",)),
            _TorchPlace(_OPTIMIZER, "load_state_dict", ("self", "state_dict")),
        ),
    ),
    _Patch(
        "torch.amp.GradScaler decides on each rank alone whether to skip a step: use "
        "zshard.GradScaler",
        grad_scaler.install,
        # unscale_() and step() check for inf only here.
        (
            _TorchPlace(
                torch.amp.GradScaler,
                "_unscale_grads_",
                ("self", "optimizer", "inv_scale", "found_inf"),
            ),
        ),
    ),
)


@functools.cache
def install() -> None:
    """Change torch, once per process."""
    handlers.set_guard()
    hooks.install()
    late_parameters.install()
    outside.install_safetensors()
    for patch in _PATCHES:
        strange = [str(place) for place in patch.places if not place.is_as_expected()]
        if not strange:
            patch.install()
            continue
        what = f"{' and '.join(strange)} of torch {torch.__version__}"
        warn(f"zshard does not know {what}, so {patch.lost}. Use another torch", RuntimeWarning)
