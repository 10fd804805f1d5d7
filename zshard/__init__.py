"""zshard: sharded data-parallel training for PyTorch, with its hot path in C.

    from zshard import FSDP, AdamW
    model = FSDP(model)
    optimizer = AdamW(model.parameters(), lr=3e-4)

README.md says what it does, ARCHITECTURE.md how.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import torch as _torch  # noqa: F401 - first: the core links to its libraries

from zshard import _missing_modules, _torch_check, wrap  # noqa: F401 - the check before the core is loaded
from zshard import bitsandbytes as _bitsandbytes  # noqa: F401 - these register themselves
from zshard import peft as _peft  # noqa: F401
from zshard import transformers as _transformers  # noqa: F401
from zshard._core import CudaError, DivergenceError, NcclError, PeerError, PeerTimeoutError
from zshard._errors import CheckpointError, ShardError
from zshard._predict_memory import predict_memory
from zshard._version import __version__ as __version__
from zshard.checkpoint.folder import latest_checkpoint
from zshard.checkpoint.load import Loaded, load
from zshard.checkpoint.save import SaveHandle, save
from zshard.checkpoint.script_state import rng_state, set_rng_state
from zshard.compat.classes import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FlatParameter,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from zshard.compat.distributed_data_parallel import DistributedDataParallel
from zshard.compat.fsdp2 import share_comm_ctx
from zshard.compat.fully_shard import fully_shard
from zshard.compat.sharded_grad_scaler import ShardedGradScaler
from zshard.doctor.features import available_features
from zshard.fsdp import FSDP, shard_info
from zshard.grad_scaler import GradScaler
from zshard.guard.slices import ShardParameter, ShardTensor, to_local
from zshard.guard.whole_values import full_tensor, named_norms, whole_named_parameters
from zshard.memory.report import num_parameters
from zshard.model.methods import register_forward_method
from zshard.model.unit_methods import UnshardHandle
from zshard.offload import Offload
from zshard.optim import SGD, Adam, AdamW
from zshard.ranks.nccl import NcclOptions
from zshard.ranks.wire import Wire
from zshard.state.load_state_dict import load_state_dict
from zshard.state.optimizer_names import load_optim_state_dict, optim_state_dict
from zshard.strategy import ShardingStrategy
from zshard.wrap.meta import uninitialized

_missing_modules.install()

FullyShardedDataParallel = FSDP  # FSDP1's name for it
FSDPModule = FSDP  # FSDP2's, for isinstance()
register_fsdp_forward_method = register_forward_method  # FSDP2's name

__all__ = [
    "FSDP",
    "SGD",
    "Adam",
    "AdamW",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CudaError",
    "DataParallelMeshDims",
    "DistributedDataParallel",
    "DivergenceError",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradScaler",
    "Loaded",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "NcclError",
    "NcclOptions",
    "Offload",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "PeerError",
    "PeerTimeoutError",
    "SaveHandle",
    "ShardError",
    "ShardParameter",
    "ShardTensor",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "Wire",
    "available_features",
    "full_tensor",
    "fully_shard",
    "initialize",
    "latest_checkpoint",
    "load",
    "load_optim_state_dict",
    "load_state_dict",
    "named_norms",
    "num_parameters",
    "optim_state_dict",
    "predict_memory",
    "register_forward_method",
    "register_fsdp_forward_method",
    "rng_state",
    "save",
    "set_rng_state",
    "shard_info",
    "share_comm_ctx",
    "to_local",
    "uninitialized",
    "whole_named_parameters",
    "wrap",
]

if _TYPE_CHECKING:
    from zshard.deepspeed import initialize
else:

    def __getattr__(name: str) -> _Any:
        """DeepSpeed's names, which are imported when a script first uses one."""
        import importlib

        if not name.startswith("__"):
            deepspeed = importlib.import_module("zshard.deepspeed")
            if name in deepspeed.__all__ or name in deepspeed.INSTEAD:
                return getattr(deepspeed, name)
        raise AttributeError(f"module 'zshard' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Only the public names: not the submodules, which are attributes as well once imported."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
