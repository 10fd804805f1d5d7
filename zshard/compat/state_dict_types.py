"""FSDP1's state dict types: which form state_dict() has, for a with block or from now on.

A type and its two configs are one form of zshard's (`zshard/state/__init__.py`), which
remembers what the script passed, so that the script can ask for it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from zshard.compat.classes import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from zshard.state import state_dict_form
from zshard.units.units import StateDictForm, units_of


class _StateDictKind(NamedTuple):
    """A state dict type: whether its dicts contain shards, and its configs, for which torch's
    classes of the same names are accepted."""

    slices: bool
    config: type
    optim_config: type


_KINDS = {
    "FULL_STATE_DICT": _StateDictKind(False, FullStateDictConfig, FullOptimStateDictConfig),
    "SHARDED_STATE_DICT": _StateDictKind(True, ShardedStateDictConfig, ShardedOptimStateDictConfig),
    "LOCAL_STATE_DICT": _StateDictKind(True, LocalStateDictConfig, LocalOptimStateDictConfig),
}


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Context manager that sets what state_dict() of `module` and of its units returns.

    Args:
        module: a module with sharded modules.
        state_dict_type: a StateDictType, zshard's or torch's, or its name.
            FULL_STATE_DICT: full tensors (the default outside this context).
            SHARDED_STATE_DICT or LOCAL_STATE_DICT, equivalent here: this rank's shard of each
            sharded parameter, a 1-D copy under the plain name; full buffers and unsharded
            parameters. Not collective. load_state_dict() accepts such shards within this context,
            on the rank that has the same ones (the dict's `_metadata` records which: keep it, as
            torch.save does), and full tensors as everywhere.
        state_dict_config: the type's config: FullStateDictConfig, ShardedStateDictConfig or
            LocalStateDictConfig, zshard's or torch's. With `rank0_only`, other ranks get an empty
            dict and unshard one unit at a time. `offload_to_cpu` is ignored.
        optim_state_dict_config: the same for FSDP.optim_state_dict(). With `rank0_only`, only rank
            0 passes a dict to FSDP.optim_state_dict_to_load().

    Raises ValueError for an unknown type, TypeError for the config of another type.
    """
    form = _form(state_dict_type, state_dict_config, optim_state_dict_config)
    with state_dict_form(module, **form._asdict()):
        yield


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: Any,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> StateDictSettings:
    """Set what state_dict() of `module` and of its units returns from now on.

    Takes the arguments of FSDP.state_dict_type(), raises what it does, and RuntimeError as
    FSDP.get_state_dict_type() does. Nothing changes then.

    Returns the settings before, whose fields a later call takes to restore them.
    """
    before = get_state_dict_type(module)
    form = _form(state_dict_type, state_dict_config, optim_state_dict_config)
    for _, state in units_of(module):
        state.form = form
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the StateDictSettings that are in effect for `module`: the type and the configs, as
    the script passed them. By default, and without sharded modules: FULL_STATE_DICT.

    Raises RuntimeError if the units of `module` have different settings.
    """
    default = _settings("FULL_STATE_DICT", StateDictType.FULL_STATE_DICT, None, None)
    found = [(state.unit.name, state.form.settings) for _, state in units_of(module)]
    settings = [default if given is None else given for _, given in found]
    for (name, _), given in zip(found, settings, strict=True):
        if repr(given) != repr(settings[0]):
            raise RuntimeError(
                f"units '{found[0][0] or '(root)'}' and '{name}' have different state dict types: "
                f"{settings[0]} and {given}; call FSDP.set_state_dict_type() on the root"
            )
    return settings[0] if settings else default


def _form(given: Any, config: Any, optim_config: Any) -> StateDictForm:
    name = given.name if isinstance(given, enum.Enum) else given
    if name not in _KINDS:
        known = ", ".join(map(repr, _KINDS))
        raise ValueError(f"unknown state_dict_type {name!r}: expected one of {known}")
    kind = _KINDS[name]
    _check_config("state_dict_config", name, config, kind.config)
    _check_config("optim_state_dict_config", name, optim_config, kind.optim_config)
    own, optim = (bool(getattr(each, "rank0_only", False)) for each in (config, optim_config))
    chosen = StateDictType[name] if isinstance(given, str) else given
    settings = _settings(name, chosen, config, optim_config)
    return StateDictForm(kind.slices, own, optim, settings)


def _settings(name: str, given: Any, config: Any, optim_config: Any) -> StateDictSettings:
    kind = _KINDS[name]
    config = kind.config() if config is None else config
    return StateDictSettings(
        given, config, kind.optim_config() if optim_config is None else optim_config
    )


def _check_config(argument: str, name: str, config: Any, expected: type) -> None:
    known = {each.__name__ for each in type(config).__mro__}
    if config is not None and expected.__name__ not in known:
        raise TypeError(f"{argument} for {name} must be a {expected.__name__}, got {config!r}")
