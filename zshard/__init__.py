"""zshard: sharded data-parallel training for PyTorch, with its hot path in C.

    from zshard import FSDP, AdamW
    model = FSDP(model)
    optimizer = AdamW(model.parameters(), lr=3e-4)

README.md describes what it does, ARCHITECTURE.md how. `zshard.compat` has torch's names
(`fully_shard`, `StateDictType`), `zshard.deepspeed` has DeepSpeed's, `zshard.planner` has plan();
`from zshard import ...` finds them all.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch  # noqa: F401 - first: the core links to its libraries

from zshard import _build_check, wrap  # noqa: F401 - the check before the core is loaded
from zshard._core import CudaError, DivergenceError, NcclError, PeerError, PeerTimeoutError
from zshard._errors import CheckpointError, ShardError
from zshard._version import __version__ as __version__
from zshard.fsdp import FSDP, shard_info
from zshard.grad_scaler import GradScaler
from zshard.guard.slices import ShardParameter as ShardParameter
from zshard.guard.slices import ShardTensor as ShardTensor
from zshard.guard.slices import to_local
from zshard.guard.whole_values import full_tensor, named_norms, whole_named_parameters
from zshard.model.methods import register_forward_method
from zshard.offload import Offload
from zshard.optim import SGD, Adam, AdamW
from zshard.precision import MixedPrecision
from zshard.ranks.nccl import NcclOptions
from zshard.ranks.wire import Wire
from zshard.state.load_state_dict import load_state_dict
from zshard.strategy import ShardingStrategy
from zshard.wrap.meta import uninitialized

# Types that functions return serve annotations: Export, Loaded, SaveHandle, ShardParameter,
# ShardTensor.
__all__ = [
    "EMA",
    "FSDP",
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "CheckpointError",
    "CudaError",
    "DataPosition",
    "DivergenceError",
    "Exported",
    "GradScaler",
    "Keep",
    "KeeperError",
    "MicroBatchSampler",
    "MixedPrecision",
    "Muon",
    "NcclError",
    "NcclOptions",
    "NonFiniteError",
    "Offload",
    "PeerError",
    "PeerTimeoutError",
    "SGD8bit",
    "ShardError",
    "ShardingStrategy",
    "WholeMatrix",
    "Wire",
    "available_features",
    "export",
    "full_tensor",
    "latest_checkpoint",
    "load",
    "load_optim_state_dict",
    "load_state_dict",
    "named_norms",
    "num_parameters",
    "optim_state_dict",
    "predict_memory",
    "profile",
    "receive_export",
    "register_forward_method",
    "rng_state",
    "save",
    "set_rng_state",
    "shard_info",
    "to_local",
    "uninitialized",
    "whole_named_parameters",
    "wrap",
]

# Names of what stands on the core, and of checkpoints: imported when a script first uses one. The
# tests of dir() compare each list with its package's.
_LATER = {
    **dict.fromkeys(
        (
            *("BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "DataParallelMeshDims"),
            *("DistributedDataParallel", "FSDPModule", "FlatParameter", "FullOptimStateDictConfig"),
            *("FullStateDictConfig", "FullyShardedDataParallel", "GradientReductionHandle"),
            *("LocalOptimStateDictConfig", "LocalStateDictConfig", "MixedPrecisionPolicy"),
            *("OffloadPolicy", "OptimStateDictConfig", "ShardedGradScaler"),
            *("ShardedOptimStateDictConfig", "ShardedStateDictConfig", "StateDictConfig"),
            *("StateDictSettings", "StateDictType", "UnshardHandle", "fully_shard"),
            "register_fsdp_forward_method",
        ),
        "compat",
    ),
    **dict.fromkeys(
        ("DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"),
        "deepspeed",
    ),
    **dict.fromkeys(("Dims", "Plan", "plan"), "planner"),
    **dict.fromkeys(("Loaded", "load"), "checkpoint.load"),
    **dict.fromkeys(("SaveHandle", "save"), "checkpoint.save"),
    **dict.fromkeys(("rng_state", "set_rng_state"), "checkpoint.script_state"),
    "latest_checkpoint": "checkpoint.folder",
    **dict.fromkeys(("num_parameters", "predict_memory"), "memory.report"),
    **dict.fromkeys(("load_optim_state_dict", "optim_state_dict"), "state.optimizer_names"),
    **dict.fromkeys(("Adam8bit", "AdamW8bit", "SGD8bit"), "extras.optimizers.eight_bit"),
    **dict.fromkeys(("Export", "export"), "extras.weights.export"),
    "DataPosition": "extras.data_position",
    "EMA": "extras.averages",
    "Exported": "extras.weights.delta",
    "Keep": "extras.recovery.keep",
    "KeeperError": "extras.keeping",
    "MicroBatchSampler": "extras.any_world",
    "Muon": "extras.optimizers.muon",
    "NonFiniteError": "extras.checks",
    "WholeMatrix": "extras.optimizers.whole_matrix",
    "available_features": "extras.doctor",
    "profile": "extras.trace",
    "receive_export": "extras.weights.send",
}

if _TYPE_CHECKING:
    from zshard.checkpoint.folder import latest_checkpoint
    from zshard.checkpoint.load import Loaded as Loaded
    from zshard.checkpoint.load import load
    from zshard.checkpoint.save import SaveHandle as SaveHandle
    from zshard.checkpoint.save import save
    from zshard.checkpoint.script_state import rng_state, set_rng_state
    from zshard.extras.any_world import MicroBatchSampler
    from zshard.extras.averages import EMA
    from zshard.extras.checks import NonFiniteError
    from zshard.extras.data_position import DataPosition
    from zshard.extras.doctor import available_features
    from zshard.extras.keeping import KeeperError
    from zshard.extras.optimizers.eight_bit import Adam8bit, AdamW8bit, SGD8bit
    from zshard.extras.optimizers.muon import Muon
    from zshard.extras.optimizers.whole_matrix import WholeMatrix
    from zshard.extras.planner import *  # noqa: F403
    from zshard.extras.recovery.keep import Keep
    from zshard.extras.trace import profile
    from zshard.extras.weights.delta import Exported
    from zshard.extras.weights.export import Export as Export
    from zshard.extras.weights.export import export
    from zshard.extras.weights.send import receive_export
    from zshard.integrations.compat import *  # noqa: F403
    from zshard.integrations.deepspeed import *  # noqa: F403
    from zshard.memory.report import num_parameters, predict_memory
    from zshard.state.optimizer_names import load_optim_state_dict, optim_state_dict
else:

    def __getattr__(name: str) -> object:
        if name in ("accelerate", "compat", "transformers"):
            import importlib

            return importlib.import_module(f"zshard.{name}")  # zshard.accelerate.shard()
        if name not in _LATER:
            from zshard._errors import did_you_mean, warn
            from zshard._removed import REMOVED, removal

            text = removal(name)
            if text is not None and name in REMOVED:
                warn(text)  # `from zshard import ...` replaces the text of the error below
            hint = did_you_mean(name, [*__all__, *_LATER]) if not name.startswith("__") else ""
            text = text or f"module 'zshard' has no attribute '{name}'{hint}"
            raise AttributeError(text, name=name, obj=None)  # with `obj`, Python adds its own hint
        import importlib

        return getattr(importlib.import_module(f"zshard.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    """List only the public names: not the submodules, which also become attributes on import."""
    later = _LATER.keys() - {"Export", "Loaded", "SaveHandle"}  # types for annotations
    return sorted({*__all__, *later, *(name for name in globals() if name.startswith("__"))})
