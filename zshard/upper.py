"""What stands on the core and has to be there when a model is sharded or loaded: integrations whose
libraries the script has imported, and extras that an environment variable asks for.

This is the only place where the core names what is above it.
"""

from __future__ import annotations

import importlib
import os
import sys

_OF_LIBRARY = {
    "bitsandbytes": "zshard.integrations.bitsandbytes",
    "peft": "zshard.integrations.peft",
    "transformers": "zshard.integrations.transformers",
}
_OF_VARIABLE = {"ZSHARD_TRACE": "zshard.extras.trace.asked"}


def import_upper() -> None:
    """Import them. Each registers itself on import."""
    for library, module in _OF_LIBRARY.items():
        if library in sys.modules:
            importlib.import_module(module)
    for variable, module in _OF_VARIABLE.items():
        if os.environ.get(variable):
            importlib.import_module(module)
