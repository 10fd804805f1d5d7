"""The transport "peer": between processes in C, with a stand-in for libcuda; when it is taken, and
what comes of a driver that refuses a call.

The one idea: the stand-in's side streams work late, on threads of their own, so memory is read
rightly only if every wait, of a stream for another rank's too, is where it has to be. Training over
it is in test_backends.py.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from c_compile import BUILDS, C, compile_c, program_environment, skip_without_thread_sanitizer
from c_sources import SHM, sources
from nursery import fork_ranks
from stand_ins import environment
from test_backends import steps, wrapped

import zshard
from zshard import _core
from zshard._ranks import transports

PROGRAM = C / "test_backend_peer.c"
OTHERS = ["peer_rounds.c", "peer_failures.c", "fake_image.c", "serial_parallel_for.c"]
CORE = [
    *SHM,
    "arena.c",
    "comm_gpu.c",
    "gpu_round.c",
    "gpu_table.c",
    "backend_peer.c",
    "kin.c",
    "watchdog.c",
]
CORE += ["cuda_driver.c", "cuda_kernels.c", "device_cuda.c", "device_cpu.c", "simd.c"]
CORE += ["peer_*.c"]
NAMES = re.findall(r"^        TEST\((\w+), ", PROGRAM.read_text(), re.MULTILINE)
THREADS = ["buckets_change_hands", "killed_rank_lets_streams_go", "failing_call_lets_the_peers_go"]
CASES = [
    pytest.param(build, name, marks=[] if build == "release" else pytest.mark.thorough)
    for build in BUILDS
    for name in (THREADS if build == "threads" else NAMES)
]

# --- in C ----------------------------------------------------------------------------------------


def build_program(folder: Path, build: str) -> Path:
    if build == "threads":
        skip_without_thread_sanitizer()
    files = [PROGRAM, *(C / name for name in OTHERS), *sources(*CORE)]
    return compile_c(folder / build, files, BUILDS[build])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The program of a build, compiled when it is first wanted."""
    folder = tmp_path_factory.mktemp("peer")
    return functools.cache(lambda build: build_program(folder, build))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("build", "name"), CASES)
def test_in_c(programs: Callable[[str], Path], build: str, name: str) -> None:
    env = program_environment(ZSHARD_CUDA_LIB=str(fake_cuda.library()))
    command = [str(programs(build)), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{name} +\d ranks  ok", done.stdout, re.MULTILINE)


# --- a driver that refuses ------------------------------------------------------------------------

CALLS = ["cuStreamBatchMemOp", "cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuMemAlloc"]
CALLS += ["cuMemcpyAsync", "cuEventRecord", "cuEventCreate", "cuStreamWaitEvent", "cuLaunchKernel"]
CALLS += ["cuMemsetD8Async", "cuStreamCreateWithPriority", "cuCtxGetCurrent"]


def one_call_fails(env, call, number):
    """Rank 1's driver refuses one call in two steps; what comes of it on this rank."""
    os.environ.update(env)
    if os.environ["RANK"] == "1":
        os.environ["FAKE_CUDA_FAIL"] = f"{call}:{number}"
    try:
        model = wrapped("shm", timeout=20.0)
        steps(model, zshard.AdamW(model.parameters(), lr=0.01), 2)
        model.state_dict()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "number", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 9, 30))]
)
def test_a_refused_call_is_an_exception_on_all_ranks(call, number):
    env = {**environment("peer", late=0), "ZSHARD_TIMEOUT": "20"}
    first, second = (r.value for r in fork_ranks(one_call_fails, 2, env, call, number, check=True))
    if second[0] == "nothing":  # it was not called so often, or was looking only
        assert first[0] == "nothing", first
    else:
        assert second[0] in ("CudaError", "RuntimeError") and "(999)" in second[1], second
        assert first[0] != "nothing", second


# --- which one -----------------------------------------------------------------------------------


class Control:
    """What connect_gpu asks of the transport between hosts."""

    def __init__(self, transport: str, peers: list[str]) -> None:
        self.transport, self.peers = transport, peers

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine, *(peer.encode().ljust(len(mine)) for peer in self.peers)]


@pytest.mark.parametrize(
    ("transport", "peers", "wanted", "kind"),
    [
        ("shm", ["GPU-1"], "auto", "peer"),
        ("shm", ["GPU-2"], "auto", "nccl"),
        ("shm", ["GPU-2", "GPU-2"], "auto", "peer"),
        ("c10d", ["GPU-1"], "auto", "nccl"),
        ("shm", ["GPU-2"], "peer", "peer"),
        ("shm", ["GPU-1"], "nccl", "nccl"),
    ],
)
def test_ranks_on_one_gpu_map_its_memory(monkeypatch, transport, peers, wanted, kind):
    chosen = []
    facts = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(transports, "comm_for", lambda *args: Control(transport, peers))
    monkeypatch.setattr(transports, "library", lambda: None)
    fake = SimpleNamespace(gpu=lambda control, backend, *rest: chosen.append(backend))
    monkeypatch.setattr(transports, "_core", SimpleNamespace(Comm=fake))
    transports.connect_gpu("cuda:0", None, wanted, 1.0)
    assert chosen == [kind] and _core.Comm is not fake
