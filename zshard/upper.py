"""What stands on the core and has to be there when a model is sharded or loaded: integrations whose
libraries the script has imported, extras that an environment variable or an argument asks for.

This is the only place where the core names what is above it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_OF_LIBRARY = {
    "bitsandbytes": "zshard.integrations.bitsandbytes",
    "peft": "zshard.integrations.peft",
    "transformers": "zshard.integrations.transformers",
}
_OF_VARIABLE = {"ZSHARD_TRACE": "zshard.extras.trace.asked"}
_OF_FSDP = {  # its arguments: the extra, whose parse() takes all that are its own
    **dict.fromkeys(("deterministic", "micro_batches"), "zshard.extras.any_world"),
    **dict.fromkeys(("nonfinite", "check_replicas"), "zshard.extras.checks.step_guard"),
}
_OF_SAVE = {"ema": "zshard.extras.averages", "per_host": "zshard.extras.per_host"}  # and of load()
ARGUMENTS = tuple(_OF_FSDP)


def import_upper() -> None:
    """Import them. Each registers itself on import."""
    for library, module in _OF_LIBRARY.items():
        if library in sys.modules:
            importlib.import_module(module)
    for variable, module in _OF_VARIABLE.items():
        if os.environ.get(variable):
            importlib.import_module(module)


def of_argument(name: str) -> ModuleType:
    """Import the extra that an argument of FSDP(), save() or load() belongs to, and return it."""
    return importlib.import_module({**_OF_FSDP, **_OF_SAVE}[name])


def parse_extras(given: Mapping[str, object]) -> dict[str, Any]:
    """Return what extras make of their arguments, by name; those that are not used stay away.
    given: all such arguments of FSDP(); None is the default, but 0 that of check_replicas. Raises
    TypeError or ValueError for an invalid one."""
    found: dict[str, Any] = {}
    used = [name for name, value in given.items() if name != "check_replicas" and value is not None]
    if type(given["check_replicas"]) is not int or given["check_replicas"] != 0:
        used.append("check_replicas")
    for module in dict.fromkeys(_OF_FSDP[name] for name in used):
        own = {name: value for name, value in given.items() if _OF_FSDP[name] == module}
        found |= importlib.import_module(module).parse(**own)
    return found
