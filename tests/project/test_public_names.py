"""The names that zshard shows: dir() lists the public ones, and nothing else.

What dir() shows is what people and editors take for the interface, so it is compared with a list
that is written here, and not with `__all__`. torch's names are in zshard.compat, and importable
from the top without standing there; so are DeepSpeed's, which are in zshard.deepspeed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback

import pytest

import zshard
import zshard.compat
import zshard.deepspeed

PUBLIC = {
    *("FSDP", "EMA", "Adam", "AdamW", "SGD", "Adam8bit", "AdamW8bit", "SGD8bit", "Muon"),
    *("WholeMatrix", "GradScaler", "Keep", "MicroBatchSampler", "DataPosition"),
    *("ShardingStrategy", "MixedPrecision", "Offload", "Wire", "NcclOptions"),
    "NonFiniteError",
    *("CheckpointError", "CudaError", "DivergenceError", "NcclError", "PeerError"),
    *("PeerTimeoutError", "ShardError", "KeeperError", "keep"),
    *("export", "Exported", "receive_export", "SharedWeights"),
    *("save", "load", "latest_checkpoint", "rng_state", "set_rng_state"),
    *("load_state_dict", "optim_state_dict", "load_optim_state_dict"),
    *(
        "predict_memory",
        "profile",
        "available_features",
        "register_forward_method",
        "uninitialized",
        "wrap",
    ),
    *("full_tensor", "named_norms", "num_parameters", "shard_info", "to_local"),
    "whole_named_parameters",
}
TORCHS = {  # see docs/migration.md
    *("BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "DataParallelMeshDims"),
    *("DistributedDataParallel", "FSDPModule", "FlatParameter", "FullOptimStateDictConfig"),
    *("FullStateDictConfig", "FullyShardedDataParallel", "GradientReductionHandle"),
    *("LocalOptimStateDictConfig", "LocalStateDictConfig", "MixedPrecisionPolicy"),
    *("OffloadPolicy", "OptimStateDictConfig"),
    *("ShardedGradScaler", "ShardedOptimStateDictConfig", "ShardedStateDictConfig"),
    *("StateDictConfig", "StateDictSettings", "StateDictType", "UnshardHandle", "fully_shard"),
    *("register_fsdp_forward_method", "share_comm_ctx"),
}
DEEPSPEEDS = {"DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"}
RETURNED = {"Export", "Loaded", "SaveHandle", "ShardParameter", "ShardTensor"}  # for annotations
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


def test_names_of_torch_and_deepspeed_are_importable_from_the_top() -> None:
    assert {*zshard.compat.__all__} == TORCHS
    assert {*zshard.deepspeed.__all__} == DEEPSPEEDS
    for module, names in ((zshard.compat, TORCHS), (zshard.deepspeed, DEEPSPEEDS)):
        for name in names:
            assert getattr(zshard, name) is getattr(module, name), name
    assert [name for name in RETURNED if not hasattr(zshard, name)] == []


@pytest.mark.parametrize("module", [zshard, zshard.compat, zshard.deepspeed])
def test_another_name_is_an_attribute_error(module) -> None:
    with pytest.raises(AttributeError, match="no attribute 'PipelineModule'"):
        module.PipelineModule  # noqa: B018


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("FulyShard", "fully_shard"),
        ("FulyShardedDataParallel", "FullyShardedDataParallel"),
        ("adamw", "AdamW"),
        ("initialise", "initialize"),
        ("plans", "plan"),
    ],
)
def test_slip_of_a_name_is_named_once(slip: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(zshard, slip)
    shown = traceback.format_exception(caught.value)[-1]  # where Python adds hints
    assert shown.lower().count("did you mean") == 1 and f"did you mean '{meant}'?" in shown
    assert not hasattr(zshard, slip)
