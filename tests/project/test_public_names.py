"""The names that zshard shows: dir() lists the public ones, and nothing else.

What dir() shows is what people and editors take for the interface, so it is compared with a list
that is written here, and not with `__all__`. torch's names are in zshard.compat, DeepSpeed's in
zshard.deepspeed and plan() in zshard.planner: the top shows them, and imports them on first use.
"""

from __future__ import annotations

import json
import re
import traceback
import warnings
from pathlib import Path

import pytest
from nursery import forked_python

import zshard
import zshard.compat
import zshard.deepspeed
import zshard.planner
from zshard._removed import REMOVED

PUBLIC = {
    *("FSDP", "EMA", "Adam", "AdamW", "SGD", "Adam8bit", "AdamW8bit", "SGD8bit", "Muon"),
    *("WholeMatrix", "GradScaler", "Keep", "MicroBatchSampler", "DataPosition"),
    *("ShardingStrategy", "MixedPrecision", "Offload", "Wire", "NcclOptions"),
    "NonFiniteError",
    *("CheckpointError", "CudaError", "DivergenceError", "NcclError", "PeerError"),
    *("PeerTimeoutError", "ShardError", "KeeperError"),
    *("export", "Exported", "receive_export"),
    *("save", "load", "latest_checkpoint", "rng_state", "set_rng_state"),
    *("load_state_dict", "optim_state_dict", "load_optim_state_dict"),
    *("predict_memory", "profile", "available_features", "register_forward_method"),
    *("uninitialized", "wrap"),
    *("full_tensor", "named_norms", "num_parameters", "shard_info", "to_local"),
    "whole_named_parameters",
}
TORCHS = {  # see docs/torch_names.md
    *("BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "DataParallelMeshDims"),
    *("DistributedDataParallel", "FSDPModule", "FlatParameter", "FullOptimStateDictConfig"),
    *("FullStateDictConfig", "FullyShardedDataParallel", "GradientReductionHandle"),
    *("LocalOptimStateDictConfig", "LocalStateDictConfig", "MixedPrecisionPolicy"),
    *("OffloadPolicy", "OptimStateDictConfig"),
    *("ShardedGradScaler", "ShardedOptimStateDictConfig", "ShardedStateDictConfig"),
    *("StateDictConfig", "StateDictSettings", "StateDictType", "UnshardHandle", "fully_shard"),
    "register_fsdp_forward_method",
}
DEEPSPEEDS = {"DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"}
PLANNERS = {"Dims", "Plan", "plan"}
LATER = {zshard.compat: TORCHS, zshard.deepspeed: DEEPSPEEDS, zshard.planner: PLANNERS}
RETURNED = {"Export", "Loaded", "SaveHandle", "ShardParameter", "ShardTensor"}  # for annotations
LOOK = """
import importlib, json, pkgutil, sys
import zshard
first = dir(zshard)
imported = [name for name in ("deepspeed", "planner") if f"zshard.{name}" in sys.modules]
plan = zshard.plan
imported += [name for name in ("compat.ddp", "deepspeed") if f"zshard.{name}" in sys.modules]
del sys, plan
for module in pkgutil.walk_packages(zshard.__path__, "zshard.", onerror=lambda name: None):
    if not module.name.endswith("__main__") and "lightning" not in module.name:  # it needs Lightning
        importlib.import_module(module.name)
from zshard import *
import zshard.wrap, zshard.optim
from zshard.precision import MixedPrecision
starred = [name for name in globals() if not name.startswith("_")]
kinds = [type(each).__name__ for each in (zshard.wrap, zshard.optim, zshard.precision, zshard.fsdp)]
print(json.dumps([first, dir(zshard), starred, kinds, callable(zshard.fully_shard), imported]))
"""


def dunders(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("__") and name.endswith("__")}


def test_dir_shows_the_public_names_only() -> None:
    done = forked_python("-c", LOOK, timeout=200)
    assert done.returncode == 0, done.stderr
    first, later, starred, kinds, is_function, imported = json.loads(done.stdout)
    for names in (first, later):
        assert {*names} - dunders(names) == PUBLIC | TORCHS | DEEPSPEEDS | PLANNERS
        assert {"__all__", "__doc__", "__file__", "__name__", "__version__"} <= dunders(names)
        assert names == sorted(names)
    own = {"importlib", "json", "module", "pkgutil", "zshard", "first", "imported"}
    assert {*starred} - own == PUBLIC
    assert kinds == ["module"] * 4, "submodules are attributes once imported"
    assert imported == [], "dir() imports nothing, and a name only its own package"
    assert is_function, "no submodule takes the place of zshard.fully_shard"


SAVE = """
import sys
import zshard
from torch import nn
model = zshard.FSDP(nn.Linear(2, 2))
optimizer = zshard.AdamW(model.parameters())
zshard.save(sys.argv[1], model, optimizer, step=1, keep_last=1)
zshard.load(sys.argv[1], model, optimizer)
zshard.load(zshard.latest_checkpoint(sys.argv[1]), model)
above = [n for n in sys.modules if n.startswith(("zshard.extras", "zshard.integrations"))]
assert above == [], above
zshard.save(sys.argv[1], model, step=2, ema=zshard.EMA(model, 0.9), per_host=True)
assert {"zshard.extras.averages", "zshard.extras.per_host"} <= sys.modules.keys()
"""


def test_a_save_and_a_load_need_no_extra(tmp_path: Path) -> None:
    done = forked_python("-c", SAVE, str(tmp_path / "run"), timeout=200)
    assert done.returncode == 0, done.stderr


def test_names_of_other_packages_are_importable_from_the_top() -> None:
    for module, names in LATER.items():
        assert {*module.__all__} == names
        for name in names:
            assert getattr(zshard, name) is getattr(module, name), name
    assert [name for name in RETURNED if not hasattr(zshard, name)] == []


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_says_what_to_use(name: str) -> None:
    owner, _, last = name.rpartition(".")
    holder = object.__new__(getattr(zshard, owner)) if owner else zshard
    text = re.escape(f"zshard.{name} was removed in 0.1.0: use {REMOVED[name]}")
    with pytest.raises(AttributeError, match=f"^{text}$"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(holder, last)
    with pytest.raises(AttributeError, match=f"no attribute '{last}_'"):
        getattr(holder, f"{last}_")


def test_an_import_of_a_removed_name_warns_what_to_use() -> None:
    """Python's ImportError has a text of its own."""
    with pytest.warns(UserWarning, match="use zshard.export"), pytest.raises(ImportError):
        from zshard import SharedWeights  # noqa: F401


def test_another_name_is_an_attribute_error_that_names_the_one_meant_once() -> None:
    for module in (zshard, zshard.compat, zshard.deepspeed):
        with pytest.raises(AttributeError, match="no attribute 'PipelineModule'"):
            module.PipelineModule  # noqa: B018
    for slip, meant in (
        ("FulyShard", "fully_shard"),
        ("FulyShardedDataParallel", "FullyShardedDataParallel"),
        ("adamw", "AdamW"),
        ("initialise", "initialize"),
        ("plans", "plan"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(zshard, slip)
        shown = traceback.format_exception(caught.value)[-1]  # where Python adds hints
        assert shown.lower().count("did you mean") == 1 and f"did you mean '{meant}'?" in shown
        assert not hasattr(zshard, slip)
