"""zshard.available_features() and `python -m zshard doctor`: what is found, what is said to be missing.

The one idea: the driver is looked for once in a process, so each case is a process of its own, with
the stand-in for libcuda (fake_cuda.py), none, or one that is too old.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import fake_cuda
import pytest
import torch

import zshard

ASK = "import json, zshard; print(json.dumps(zshard.available_features()))"
# A torch that says that it has CUDA and sees a GPU: what zshard asks of it is these two.
WITH_CUDA = "import torch; torch.version.cuda = '13.0'; torch.cuda.is_available = lambda: True\n"


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "ZSHARD_CUDA_LIB": "/no/libcuda.so.1", "ZSHARD_NCCL_LIB": "/no/nccl"}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env={**whole, **env})


def features(before: str = "", **env: str) -> dict:
    done = run("-c", before + ASK, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stand_in() -> str:
    return str(fake_cuda.library())


def has_kernels() -> bool:
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


def test_gpus_are_used_only_where_nothing_is_missing() -> None:
    there = {"ZSHARD_CUDA_LIB": stand_in()}
    whole = features(WITH_CUDA, **there)
    assert whole["gpu"] == has_kernels()
    assert ("kernels" in whole["missing"]) != has_kernels()
    if not has_kernels():
        assert (
            "rebuild it with `make build CUDA=1` or `ZSHARD_CUDA=1" in whole["missing"]["kernels"]
        )
    if torch.version.cuda is None:
        without = features(**there)
        assert not without["gpu"] and "is built without CUDA" in without["missing"]["torch_cuda"]
    hidden = WITH_CUDA.replace("True", "False")
    blind = features(hidden, **there)
    assert not blind["gpu"] and "but sees no GPU" in blind["missing"]["torch_cuda"]


@pytest.mark.skipif(
    not has_kernels(), reason="built without CUDA kernels: make test CUDA=1 (needs nvcc)"
)
def test_driver_older_than_the_kernels_cannot_run_them() -> None:
    found = features(WITH_CUDA, ZSHARD_CUDA_LIB=stand_in(), FAKE_CUDA_VERSION="12000")
    built = found["kernels_cuda"]
    if built.startswith("12."):
        assert found["gpu"]
    else:
        assert not found["gpu"]
        assert (
            f"built with CUDA {built}, but the driver supports only CUDA 12.0"
            in found["missing"]["kernels"]
        )


def test_an_error_of_the_driver_is_an_exception() -> None:
    fail = {"FAKE_CUDA_FAIL": "cuDeviceGetName:1:999"}
    done = run("-c", ASK, ZSHARD_CUDA_LIB=stand_in(), **fail)
    assert "CudaError: cuDeviceGetName: CUDA_ERROR_FAKE_999 (999): fake error 999" in done.stderr


def test_doctor_says_what_is_missing_and_what_to_do() -> None:
    done = run("-m", "zshard", "doctor")
    assert done.returncode == 0, done.stderr
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert torch.__version__ in lines["torch"]
    assert "MISSING: CUDA driver not found" in lines["driver"]
    assert "unset ZSHARD_CUDA_LIB" in lines["driver"]
    assert "MISSING" in lines["nccl"] and "GPUs        none" in done.stdout
    assert "CPU training is available" in done.stdout
    assert "GPU training is not available; see above: driver" in done.stdout


def test_doctor_tells_what_ranks_take_of_limits() -> None:
    lines = run("-m", "zshard", "doctor").stdout.splitlines()
    heads = [line for line in lines if line.startswith("ranks ")]
    assert heads == ["ranks  open files  mappings  (mixed precision)  address space"]
    rows = [line.split() for line in lines[lines.index(heads[0]) + 1 :]]
    assert [row[0] for row in rows] == ["8", "16", "32", "64", "128", "limit"]
    for row in rows[:-1]:  # what is allowed in an ordinary container
        assert int(row[1]) < 1024 and int(row[2]) < int(row[3]) < 65530
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert rows[-1][1] == str(limit) and rows[-1][-1] == "-v)"


def test_doctor_fails_where_a_gpu_lies_idle() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    done = run("-m", "zshard", "doctor", ZSHARD_CUDA_LIB=stand_in())
    assert done.returncode == 1 and "Fake GPU (9.0)" in done.stdout
    assert "GPU training is not available; see above: torch_cuda" in done.stdout
    assert run("-m", "zshard").returncode == 2  # says which commands there are
