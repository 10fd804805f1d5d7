"""The APIs of FSDP1, FSDP2 and DDP: their arguments and names, as thin layers over zshard's own.

    from zshard.compat import MixedPrecisionPolicy, fully_shard

All names are torch's, for scripts that change only their imports; `from zshard import ...` finds
them as well. FSDP uses some modules of this package and others use FSDP, so they are imported when
a script first uses a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zshard.compat.classes import *  # noqa: F403
    from zshard.compat.ddp import *  # noqa: F403
    from zshard.compat.fsdp1 import *  # noqa: F403
    from zshard.compat.fsdp2 import *  # noqa: F403

else:

    def __getattr__(name: str) -> object:
        modules = [
            importlib.import_module(f"zshard.compat.{each}")
            for each in ("classes", "ddp", "fsdp1", "fsdp2")
        ]
        if name == "__all__":
            return sorted(name for module in modules for name in module.__all__)
        for module in modules:
            if name in module.__all__:
                return getattr(module, name)
        raise AttributeError(f"module 'zshard.compat' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
