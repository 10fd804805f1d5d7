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
import warnings
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
    "gpu_order.c",
    "gpu_round.c",
    "gpu_table.c",
    "backend_peer.c",
    "kin.c",
    "watchdog.c",
]
CORE += [
    "cuda_driver.c",
    "cuda_kernels.c",
    "cuda_trail.c",
    "device_cuda.c",
    "device_cpu.c",
    "simd.c",
]
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
    """What connect_gpu asks of the transport between hosts: rank 0's, whose peers have these ids."""

    rank = 1

    def __init__(self, peers: list[bytes]) -> None:
        self.peers = peers

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine, *self.peers]


def gpu_at(monkeypatch, bus: int, host: str = "a") -> bytes:
    """The id of a GPU there, as transports make it of what torch says."""
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(transports.meeting, "host_id", lambda: host)
    return transports._gpu_id("cuda:0")


@pytest.mark.parametrize(
    ("peers", "wanted", "kind"),
    [
        ([("a", 2)], "auto", "nccl"),
        ([("a", 1)], "auto", "c10d gloo"),  # two MIG instances, too
        ([("a", 2), ("a", 2)], "auto", "c10d gloo"),
        ([("b", 1)], "auto", "nccl"),  # of another host
        ([("b", 2), ("b", 2)], "auto", "c10d gloo"),
        ([("a", 2)], "peer", "peer"),
        ([("a", 1)], "peer", "peer"),
        ([("a", 1)], "nccl", "nccl"),
    ],
)
def test_transport_that_is_chosen(monkeypatch, peers, wanted, kind):
    chosen = []
    control = Control([gpu_at(monkeypatch, bus, host) for host, bus in peers])
    gpu_at(monkeypatch, 1)
    monkeypatch.setattr(transports, "comm_for", lambda *args: control)
    monkeypatch.setattr(transports, "library", lambda: None)
    monkeypatch.setattr(
        transports, "new_group", lambda group, device, by: SimpleNamespace(group_name=by)
    )
    fake = SimpleNamespace(
        gpu=lambda control, by, device, name, *rest: chosen.append(f"{by} {name}")
    )
    monkeypatch.setattr(transports, "_core", SimpleNamespace(Comm=fake))
    transports.connect_gpu("cuda:0", None, wanted, 1.0)
    assert chosen == [f"{kind} " if " " not in kind else kind] and _core.Comm is not fake


def on_gpus(env, visible, backend):
    """The transport of ranks that each see some GPUs of the machine, of which the first is theirs, and
    what they train there; or what is raised, and warned of."""
    rank = int(os.environ["RANK"])
    os.environ.update(env, ZSHARD_BACKEND=backend, FAKE_CUDA_VISIBLE=visible[rank])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model = wrapped("shm", timeout=20.0)
        except Exception as error:
            return type(error).__name__, str(error), ""
    steps(model, zshard.AdamW(model.parameters(), lr=0.01), 1)
    words = "\n".join(str(each.message) for each in warned)
    return zshard.api.state_of(model).comms.all.transport, "", words


@pytest.mark.parametrize("visible", [["0", "0", "1"], ["0", "0", "0"]], ids="-".join)
def test_ranks_that_share_a_gpu_train_by_default(visible):
    """NCCL refuses them, and where each sees other GPUs no memory can be mapped: neither is tried."""
    env = environment("nccl", late=0)
    first, *others = (r.value for r in fork_ranks(on_gpus, 3, env, visible, "auto", check=True))
    assert first[0] == "c10d_gpu" and {other[0] for other in others} == {"c10d_gpu"}
    assert "ranks 0 and 1 share a GPU, which NCCL does not support" in first[2]
    assert "share" not in others[0][2] + others[1][2]


def test_ranks_with_a_gpu_each_use_nccl_by_default():
    env = environment("nccl", late=0)
    for result in fork_ranks(on_gpus, 2, env, ["0", "1"], "auto", check=True):
        assert result.value == ("nccl", "", "")


def test_peers_whose_gpus_are_not_visible_are_named():
    env = environment("peer", late=0)
    for result in fork_ranks(on_gpus, 2, env, ["0,1", "1"], "peer", check=True):
        kind, text, _ = result.value
        assert kind == "CudaError" and "rank 1 cannot map the GPU memory of rank 0" in text
        assert "CUDA_VISIBLE_DEVICES" in text and "cuIpcOpenMemHandle" in text


@pytest.mark.parametrize("visible", [["0,1", "1,0"], ["0", "0"]], ids="-".join)
def test_peers_that_see_each_others_gpus_map_them(visible):
    env = environment("peer", late=0)
    for result in fork_ranks(on_gpus, 2, env, visible, "peer", check=True):
        assert result.value == ("peer", "", "")
