"""Fixtures for the tests of GPUs, for as long as the session: ranks by kind of device (gpus.py), kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_cuda
import pytest
from cuda_kernels import KERNELS, Cuda, compile_kernels
from gpus import KINDS, Start, standing_ranks
from loops import Device
from spawn import RankPool


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    """Starts standing ranks."""
    with standing_ranks() as found:
        yield found


@pytest.fixture(scope="session")
def hosts(pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """Returns ranks on the host, whose numbers are the reference."""
    return lambda world: pools.setdefault(world, RankPool(world))


@pytest.fixture(params=KINDS)
def one(request: pytest.FixtureRequest, start: Start) -> RankPool:
    """A rank that is alone on its device."""
    return start(request.param)


# --- kernels --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(tmp_path_factory.mktemp("kernels") / "kernels.so")


@pytest.fixture(scope="session")
def loaded(compiled: Path) -> Cuda:
    if KERNELS == "gpu":
        return Cuda(compiled)
    before = os.environ.get("ZSHARD_CUDA_LIB")
    os.environ["ZSHARD_CUDA_LIB"] = str(fake_cuda.library())
    try:
        return Cuda(compiled)
    finally:
        os.environ.pop("ZSHARD_CUDA_LIB")
        os.environ.update({} if before is None else {"ZSHARD_CUDA_LIB": before})


@pytest.fixture(params=["default", "side"])
def cuda(loaded: Cuda, request: pytest.FixtureRequest) -> Cuda:
    """The kernels, in torch's stream and in one of our own."""
    loaded.stream = None
    if request.param == "side":
        stream = ctypes.c_void_p()
        loaded.ok(loaded.lib.zs_face_side_stream(ctypes.byref(stream)))
        loaded.stream = stream.value
    return loaded


@pytest.fixture(scope="session")
def cpu(compiled: Path) -> Device:
    return Device(compiled)
