"""What stands on the core and has to be there when a model is sharded or loaded: integrations whose
libraries the script has imported, extras that an environment variable or an argument asks for.

This is the only place where the core names what is above it.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

_OF_LIBRARY = {
    "bitsandbytes": "zshard.integrations.bitsandbytes",
    "peft": "zshard.integrations.peft",
    "transformers": "zshard.integrations.transformers",
}
_OF_VARIABLE = {"ZSHARD_TRACE": "zshard.extras.trace.asked"}
_OF_ARGUMENT = dict.fromkeys(("deterministic", "micro_batches"), "zshard.extras.any_world")


def import_upper() -> None:
    """Import them. Each registers itself on import."""
    for library, module in _OF_LIBRARY.items():
        if library in sys.modules:
            importlib.import_module(module)
    for variable, module in _OF_VARIABLE.items():
        if os.environ.get(variable):
            importlib.import_module(module)


def of_argument(name: str) -> ModuleType:
    """Import the extra that an argument of FSDP() belongs to, and return it."""
    return importlib.import_module(_OF_ARGUMENT[name])
