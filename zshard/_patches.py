"""What zshard changes of torch, from a process's first FSDP(...) on.

Importing zshard changes nothing. Each change is listed here with the places in torch
that it needs, what they must look like, and what is lost without it. Where a place looks otherwise,
as a later torch may have it, the change is left out, and a warning says what does not work. One
more comes with the first state dict of shards (state/shard_records.py): torch's module for it
takes long to import.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import _guards
from torch._functorch import eager_transforms, vmap
from torch.autograd.variable import Variable
from torch.distributed import distributed_c10d
from torch.distributed import utils as dist_utils
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad, prune, stateless
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from zshard import grad_scaler
from zshard._errors import stacklevel
from zshard.guard import (
    autograd_engine,
    collectives,
    compiling,
    draws,
    foreign,
    functional,
    library_updates,
    safetensors_files,
    sizes,
    slices,
    torch_names,
    tracing,
    views,
)
from zshard.optim import clip, hooks
from zshard.state import optimizer
from zshard.wrap import late_parameters

__all__ = ["install"]


class _TorchPlace(NamedTuple):
    """An attribute of something in torch."""

    owner: Any
    name: str
    takes: tuple[str, ...] | None = None  # the first parameters of a function; None: no function

    def is_as_expected(self) -> bool:
        found = getattr(self.owner, self.name, None)
        if found is None or self.takes is None:
            return found is not None
        try:
            parameters = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            return False
        return parameters[: len(self.takes)] == self.takes

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


class _Patch(NamedTuple):
    """A change of torch."""

    lost: str  # what does not work without it
    install: Callable[[], None]
    places: tuple[_TorchPlace, ...]


_OPTIMIZER = torch.optim.Optimizer
_SCALER = torch.amp.GradScaler

_PATCHES = (
    _Patch(
        "backward does not find the units that it needs, and fails on sharded parameters",
        autograd_engine.install,
        (_TorchPlace(Variable, "_execution_engine"),),
    ),
    _Patch(
        "torch.optim's optimizers step sharded parameters one at a time",
        slices.install,
        (
            _TorchPlace(torch_optimizer, "_foreach_supported_types"),
            _TorchPlace(_foreach_utils, "_foreach_supported_types"),
        ),
    ),
    _Patch(
        "some functions of torch.nn.init refuse sharded parameters",
        draws.install,
        tuple(_TorchPlace(torch.nn.init, name, ("tensor",)) for name in draws.INITS),
    ),
    _Patch(
        "torch.distributed does not refuse shards (dist.all_reduce(p.grad)), and a rank that looks "
        "at the model alone may wait for others that are in a collective",
        collectives.install,
        (
            _TorchPlace(distributed_c10d, "_check_single_tensor", ("param", "param_name")),
            _TorchPlace(distributed_c10d, "_check_tensor_list", ("param", "param_name")),
            _TorchPlace(distributed_c10d, "_rank_not_in_group", ("group",)),
        ),
    ),
    _Patch(
        "optimizers of torch step without telling the model, so that steps which one rank leaves "
        "out, gradients that are not reduced and parameters that are unsharded go unnoticed",
        hooks.install,
        (
            _TorchPlace(torch_optimizer, "register_optimizer_step_pre_hook", ("hook",)),
            _TorchPlace(torch_optimizer, "register_optimizer_step_post_hook", ("hook",)),
            _TorchPlace(_OPTIMIZER, "zero_grad", ("self", "set_to_none")),
        ),
    ),
    _Patch(
        "parameters that are added to a sharded model are not refused",
        late_parameters.install,
        (
            _TorchPlace(nn_module, "register_module_parameter_registration_hook", ("hook",)),
            _TorchPlace(nn_module, "register_module_module_registration_hook", ("hook",)),
        ),
    ),
    _Patch(
        "DistributedDataParallel, ZeroRedundancyOptimizer and torch.nn.utils.prune do not refuse a "
        "sharded model",
        foreign.install,
        (
            _TorchPlace(torch.nn.parallel.DistributedDataParallel, "__init__", ("self", "module")),
            _TorchPlace(_OPTIMIZER, "__init__", ("self", "params", "defaults")),
            _TorchPlace(prune.BasePruningMethod, "apply", ("module", "name")),
            _TorchPlace(dist_utils, "_sync_module_states", ("module",)),
        ),
    ),
    _Patch(
        "torch.nn.utils.clip_grad_norm_ sees this rank's shards only: call model.clip_grad_norm_()",
        clip.install,
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
        "torch.func.functional_call() fails on a sharded model, and torch.func's transforms take "
        "shards for full parameters",
        functional.install,
        (
            _TorchPlace(stateless, "_reparametrize_module", ("module", "parameters_and_buffers")),
            _TorchPlace(vmap, "_add_batch_dim", ("self", "batch_dim", "level")),
            _TorchPlace(eager_transforms, "_wrap_tensor_for_grad", ("maybe_tensor", "level")),
        ),
    ),
    _Patch(
        "functions that torch.compile compiles fail on shards: call them uncompiled",
        compiling.install,
        (_TorchPlace(torch, "compile", ("model",)),),
    ),
    _Patch(
        "torch.compile cannot compile while gradients are there: call zero_grad() first",
        tracing.install,
        (
            _TorchPlace(_guards, "TracingContext"),
            _TorchPlace(getattr(_guards, "TracingContext", None), "try_get", ()),
        ),
    ),
    _Patch(
        "tensors do not say what to write in place of DTensor's full_tensor()",
        torch_names.install,
        (_TorchPlace(torch.Tensor, "detach"),),
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
        (
            _TorchPlace(
                _SCALER, "_unscale_grads_", ("self", "optimizer", "inv_scale", "found_inf")
            ),
            _TorchPlace(_SCALER, "scale", ("self", "outputs")),
            _TorchPlace(_SCALER, "update", ("self", "new_scale")),
        ),
    ),
)

_installed = False


def install() -> None:
    """Change torch, once in a process."""
    global _installed
    torch_names.warn_of_torchs_names()
    if _installed:
        return
    _installed = True
    slices.set_guard(views.HANDLERS | sizes.HANDLERS | draws.HANDLERS | library_updates.HANDLERS)
    safetensors_files.install()
    for patch in _PATCHES:
        strange = [str(place) for place in patch.places if not place.is_as_expected()]
        if not strange:
            patch.install()
            continue
        warnings.warn(
            f"zshard does not know {' and '.join(strange)} of torch {torch.__version__}, so "
            f"{patch.lost}. Use a version of torch for which zshard was built",
            RuntimeWarning,
            stacklevel=stacklevel(),
        )
