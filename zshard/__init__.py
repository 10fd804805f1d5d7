"""zshard: sharded data-parallel training for PyTorch, with its hot path in C.

    from zshard import FSDP, AdamW
    model = FSDP(model)
    optimizer = AdamW(model.parameters(), lr=3e-4)

See README.md for what it does, ARCHITECTURE.md for how.
"""

import torch  # noqa: F401 - its libraries have to be loaded before the core that links to them

from zshard import _clip, _optim_guard, wrap
from zshard._core import DivergenceError, PeerError, PeerTimeoutError
from zshard.api import FSDP, register_forward_method, shard_info
from zshard.optim import SGD, Adam, AdamW
from zshard.precision import MixedPrecision, MixedPrecisionPolicy
from zshard.strategy import ShardingStrategy

__version__ = "0.1.0"

__all__ = [
    "FSDP",
    "SGD",
    "Adam",
    "AdamW",
    "DivergenceError",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "PeerError",
    "PeerTimeoutError",
    "ShardingStrategy",
    "register_forward_method",
    "shard_info",
    "wrap",
]

_optim_guard.install()
_clip.install()
