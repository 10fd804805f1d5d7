"""zshard.available_features() and `python -m zshard doctor`: features that are found, and that are
reported missing.

A process looks for the driver once, so each case is a separate process, with
the fake of libcuda (fake_cuda.py), none, or one that is too old.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable

import fake_cuda
import pytest
import torch
from nursery import fork_ranks
from spawn import RankResult

import zshard

ASK = "import json, zshard; print(json.dumps(zshard.available_features()))"
# A torch that says that it has CUDA and sees a GPU: what zshard asks of it is these two.
WITH_CUDA = "import torch; torch.version.cuda = '13.0'; torch.cuda.is_available = lambda: True\n"


def execute(code: str) -> None:
    exec(code, {"__name__": "__main__"})


def as_program(*words: str) -> None:
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run(what: Callable[..., None], *words: str, **env: str) -> RankResult:
    """A separate process, which has imported zshard and looked for nothing yet."""
    nothing = {"ZSHARD_CUDA_LIB": "/no/libcuda.so.1", "ZSHARD_NCCL_LIB": "/no/nccl"}
    (done,) = fork_ranks(what, 1, *words, env={**nothing, **env})
    return done


def features(before: str = "", **env: str) -> dict:
    done = run(execute, before + ASK, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stand_in() -> str:
    return str(fake_cuda.library())


def has_kernels() -> bool:
    """Asks this process's _core, so not at import: the ranks' parent imports this file as well."""
    return bool(zshard._core.machine()["targets"])


def test_without_a_driver() -> None:
    found = features()
    assert found["torch"] == torch.__version__ and found["torch_cuda"] == torch.version.cuda
    assert found["loops"] in ("base", "avx2", "avx512")
    assert found["driver"] is None and found["gpus"] == [] and found["gpu"] is False
    assert found["nccl"] is None and "/no/nccl" in found["missing"]["nccl"]
    assert "/no/libcuda.so.1" in found["missing"]["driver"]
    assert found["c10d"] == torch.distributed.is_gloo_available()
    assert bool(found["kernels"]) == (found["kernels_cuda"] is not None) == has_kernels()
    names = {*found, "driver"} - {"missing", "gpu", "gpus"}
    assert {name for name in names if not found[name]} - {"kernels_cuda"} == set(found["missing"])


def test_gpus_are_described() -> None:
    found = features(ZSHARD_CUDA_LIB=stand_in(), FAKE_CUDA_DEVICES="2")
    one = {"name": "Fake GPU", "capability": [9, 0], "multiprocessors": 2}
    assert found["driver"] == "13.0" and found["gpus"] == [one, one]
    assert "driver" not in found["missing"]


def test_gpus_are_used_only_if_nothing_is_missing() -> None:
    there = {"ZSHARD_CUDA_LIB": stand_in()}
    full = features(WITH_CUDA, **there)
    assert full["gpu"] == has_kernels()
    assert has_kernels() or "`make build CUDA=1`" in full["missing"]["kernels"]
    if torch.version.cuda is None:
        without = features(**there)
        assert not without["gpu"] and "is built without CUDA" in without["missing"]["torch_cuda"]
    blind = features(WITH_CUDA.replace("True", "False"), **there)
    assert not blind["gpu"] and "but sees no GPU" in blind["missing"]["torch_cuda"]


def test_driver_older_than_the_kernels_cannot_run_them() -> None:
    if not has_kernels():
        pytest.skip("built without CUDA kernels: make test CUDA=1 (needs nvcc)")
    found = features(WITH_CUDA, ZSHARD_CUDA_LIB=stand_in(), FAKE_CUDA_VERSION="12000")
    built = found["kernels_cuda"]
    assert found["gpu"] is built.startswith("12.")
    text = f"built with CUDA {built}, but the driver supports only CUDA 12.0"
    assert found["gpu"] or text in found["missing"]["kernels"]


def test_driver_error_is_raised() -> None:
    fail = {"FAKE_CUDA_FAIL": "cuDeviceGetName:1:999"}
    done = run(execute, ASK, ZSHARD_CUDA_LIB=stand_in(), **fail)
    assert "CudaError: cuDeviceGetName: CUDA_ERROR_FAKE_999 (999): fake error 999" in done.stderr


def test_doctor_lists_what_is_missing() -> None:
    done = run(as_program, "zshard", "doctor")
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert torch.__version__ in lines["torch"]
    assert "for GPUs: CUDA driver not found" in lines["driver"]
    assert "unset ZSHARD_CUDA_LIB" in lines["driver"]
    assert "for GPUs" in lines["nccl"] and "GPUs        none" in done.stdout
    assert "NUMA node" in lines["CPUs"] and "usable: " in lines["CPUs"] and lines["bf16"]
    assert "CPU training is available" in done.stdout
    assert "GPU training is not available; see below: driver" in done.stdout


def test_doctor_on_a_host_without_a_gpu() -> None:
    hidden = WITH_CUDA.replace("True", "False")
    program = "import runpy, sys; sys.argv = ['zshard', 'doctor']\n"
    program += "runpy.run_module('zshard', run_name='__main__', alter_sys=True)"
    no_driver = run(execute, hidden + program)
    none = run(execute, hidden + program, ZSHARD_CUDA_LIB=stand_in(), FAKE_CUDA_DEVICES="0")
    for done in (no_driver, none):
        assert done.returncode == 0 and "torch_cuda  13.0\n" in done.stdout, done.stdout
    assert "GPU training is not available; see below: driver" in no_driver.stdout
    assert "below: driver, torch_cuda" not in no_driver.stdout
    assert "\ndriver      CUDA 13.0. for GPUs: cannot initialize" in none.stdout
    assert "\nGPUs        none" in none.stdout


def test_doctor_fails_if_a_gpu_is_unused() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    done = run(as_program, "zshard", "doctor", ZSHARD_CUDA_LIB=stand_in())
    assert done.returncode == 1 and "Fake GPU (9.0)" in done.stdout
    assert "GPU training is not available; see below: torch_cuda" in done.stdout
    assert run(as_program, "zshard").returncode == 2  # says which commands there are
