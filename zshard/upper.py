"""Imports the features that must be there when a model is sharded or loaded: integrations whose
libraries the script has imported, extras that an environment variable, an argument, a method or
a path asks for.

This is the only place where the core names what is above it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from logging import INFO
from types import ModuleType
from typing import Any

from zshard._logger import log

_OF_LIBRARY = {
    "bitsandbytes": "zshard.integrations.bitsandbytes",
    "peft": "zshard.integrations.peft",
    "transformers": "zshard.integrations.transformers",
}
_OF_VARIABLE = {"ZSHARD_LOG": "zshard.extras.log", "ZSHARD_TRACE": "zshard.extras.trace.asked"}
_OF_ARGUMENT = {  # of FSDP(): its default, and the extra, whose parse() takes all that are its own
    **dict.fromkeys(("deterministic", "micro_batches"), (None, "zshard.extras.any_world")),
    "nonfinite": (None, "zshard.extras.checks.step_guard"),
    "check_replicas": (0, "zshard.extras.checks.step_guard"),
}
ARGUMENTS = tuple(_OF_ARGUMENT)
_OF_OPTIMIZER = {  # by the names that predict_memory() takes
    **dict.fromkeys(("adam8bit", "adamw8bit", "sgd8bit"), "zshard.extras.optimizers.eight_bit"),
    "muon": "zshard.extras.optimizers.matrices",
}
OPTIMIZERS = tuple(_OF_OPTIMIZER)
_OF_CALL = {  # methods of models, arguments of save() and load()
    "join": "zshard.extras.join",
    "micro_batches": "zshard.extras.any_world",
    "ema": "zshard.extras.averages",
    "per_host": "zshard.extras.per_host",
    "readers": "zshard.extras.readers",  # of what is no checkpoint of zshard's own
}


def import_upper() -> None:
    """Import them. Each registers itself on import."""
    for library, module in _OF_LIBRARY.items():
        if library in sys.modules:
            importlib.import_module(module)
    for variable, module in _OF_VARIABLE.items():
        if os.environ.get(variable) or (variable == "ZSHARD_LOG" and log.isEnabledFor(INFO)):
            importlib.import_module(module)


def module_for(name: str) -> ModuleType:
    """Import the extra that serves a call, an argument or an optimizer of this name; return it."""
    return importlib.import_module({**_OF_CALL, **_OF_OPTIMIZER}[name])


def parse_extras(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return what extras make of their arguments of FSDP(), by name; those that are not used stay
    away. Raises TypeError or ValueError for an invalid argument."""
    parsed: dict[str, Any] = {}
    used: dict[str, None] = {}
    for name, (default, module) in _OF_ARGUMENT.items():
        value = arguments.get(name, default)
        if type(value) is not type(default) or value != default:  # False is not 0 steps
            used[module] = None
    for module in used:
        defaults = {n: default for n, (default, of) in _OF_ARGUMENT.items() if of == module}
        its_arguments = {name: arguments.get(name, default) for name, default in defaults.items()}
        parsed |= importlib.import_module(module).parse(**its_arguments)
    return parsed
