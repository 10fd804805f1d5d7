"""The names that zshard shows: dir() lists the public ones.

What dir() shows is what people and editors take for the interface, so it is compared
with a list that is written here, and not with `__all__`.
"""

from __future__ import annotations

import json
import subprocess
import sys

import zshard

PUBLIC = {
    *("Adam", "AdamW", "CPUOffloadPolicy", "CheckpointError", "CudaError", "DivergenceError"),
    *("FSDP", "FullyShardedDataParallel", "GradScaler", "Loaded", "MixedPrecision"),
    *("MixedPrecisionPolicy", "NcclError", "NcclOptions", "Offload", "OffloadPolicy"),
    *("PeerError", "PeerTimeoutError", "SGD", "SaveHandle", "ShardingStrategy", "Wire"),
    *("available_features", "fully_shard", "initialize", "latest_checkpoint", "load"),
    *("load_optim_state_dict", "load_state_dict", "optim_state_dict", "predict_memory"),
    *("register_forward_method", "rng_state", "save", "set_rng_state", "shard_info"),
    *("ShardError", "ShardParameter", "ShardTensor", "full_tensor", "named_norms", "to_local"),
    *("num_parameters", "uninitialized", "whole_named_parameters", "wrap"),
    # torch's, see docs/migration.md
    *("BackwardPrefetch", "CPUOffload", "DataParallelMeshDims", "DistributedDataParallel"),
    *("FSDPModule", "FlatParameter", "FullOptimStateDictConfig", "FullStateDictConfig"),
    *("LocalOptimStateDictConfig", "LocalStateDictConfig", "OptimStateDictConfig"),
    *(
        "ShardedGradScaler",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
    ),
    *("StateDictConfig", "StateDictSettings", "StateDictType", "UnshardHandle"),
    *("register_fsdp_forward_method", "share_comm_ctx"),
}
LOOK = """
import importlib, json, pkgutil
import zshard
first = dir(zshard)
for module in pkgutil.walk_packages(zshard.__path__, "zshard.", onerror=lambda name: None):
    if not module.name.endswith("__main__") and "lightning" not in module.name:  # it needs Lightning
        importlib.import_module(module.name)
from zshard import *
import zshard.wrap, zshard.optim
from zshard.precision import MixedPrecision
starred = [name for name in globals() if not name.startswith("_")]
kinds = [type(each).__name__ for each in (zshard.wrap, zshard.optim, zshard.precision, zshard.fsdp)]
print(json.dumps([first, dir(zshard), starred, kinds, callable(zshard.fully_shard)]))
"""


def dunders(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("__") and name.endswith("__")}


def test_dir_shows_the_public_names_only() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, later, starred, kinds, is_function = json.loads(done.stdout)
    for names in (first, later):
        assert {*names} - dunders(names) == PUBLIC
        assert {"__all__", "__doc__", "__file__", "__name__", "__version__"} <= dunders(names)
        assert names == sorted(names)
    own = {"importlib", "json", "module", "pkgutil", "zshard", "first"}
    assert {*starred} - own == PUBLIC
    assert kinds == ["module"] * 4, "submodules are attributes once imported"
    assert is_function, "no submodule takes the place of zshard.fully_shard"


def test_all_public_names_exist() -> None:
    assert {*zshard.__all__} == PUBLIC and len(zshard.__all__) == len(PUBLIC)
    assert [name for name in zshard.__all__ if not hasattr(zshard, name)] == []
