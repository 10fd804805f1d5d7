"""The transport "peer": between processes in C, and training over it, with a stand-in for libcuda.

The one idea: the stand-in's side streams work late, on threads of their own, so the CPU's bits come
out only if every wait, of a stream for another rank's too, is where it has to be. What runs over
all of the GPU's transports alike is in test_cuda_path.py.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from c_compile import BUILDS, C, compile_c, skip_without_thread_sanitizer
from c_sources import sources
from nursery import fork_ranks
from stand_ins import environment
from test_c_comm import SHM
from torch import nn

import zshard
from zshard import FSDP, _core, _group

PROGRAM = C / "test_mover_peer.c"
CORE = [*SHM, "arena.c", "comm_gpu.c", "gpu_round.c", "mover_peer.c", "kin.c", "lookout.c"]
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
    files = [PROGRAM, C / "serial_parallel_for.c", *sources(*CORE)]
    return compile_c(folder / build, files, BUILDS[build])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The program of a build, compiled when it is first wanted."""
    folder = tmp_path_factory.mktemp("peer")
    return functools.cache(lambda build: build_program(folder, build))


@pytest.mark.parametrize(("build", "name"), CASES)
def test_in_c(programs: Callable[[str], Path], tmp_path: Path, build: str, name: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    # The stand-in keeps what a stream might still look at.
    (tmp_path / "suppressions").write_text("leak:fake_\n")
    env["LSAN_OPTIONS"] = f"suppressions={tmp_path / 'suppressions'}:print_suppressions=0"
    env["ZSHARD_CUDA_LIB"] = str(fake_cuda.library())
    command = [str(programs(build)), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{name} +\d ranks  ok", done.stdout, re.MULTILINE)


# --- training ------------------------------------------------------------------------------------


def make_model(width: int = 33) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(width), nn.Linear(width, 5))


def wrapped(transport: str, **options):
    return FSDP(
        make_model(),
        transport=transport,
        auto_wrap_policy=zshard.wrap.ModuleWrapPolicy({nn.Linear}),
        **options,
    )


def steps(model, optimizer, count):
    rank, losses = torch.distributed.get_rank(), []
    for step in range(count):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 33)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train(env, transport, strategy):
    """Losses, whole parameters, and the transports, of two models one after the other."""
    os.environ.update(env)
    losses = []
    for _ in range(2):  # the first one's memory goes while the second is trained
        model = wrapped(transport, sharding_strategy=strategy)
        losses += steps(model, zshard.AdamW(model.parameters(), lr=0.01), 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, {entry.comm.transport for entry in _group._entries.values()}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard", "zero1"])
@pytest.mark.parametrize(("world", "transport"), [(2, "shm"), (3, "shm"), (2, "c10d")])
def test_training_has_the_bits_of_the_cpu(world, transport, strategy):
    plain = fork_ranks(train, world, {}, transport, strategy, check=True)
    ours = fork_ranks(train, world, environment("peer"), transport, strategy, check=True)
    for mine, cpu in zip(ours, plain, strict=True):
        losses, state, transports = mine.value
        assert "peer" in transports and "peer" not in cpu.value[2]
        assert losses == cpu.value[0]
        assert state.keys() == cpu.value[1].keys()
        for name, value in cpu.value[1].items():
            assert torch.equal(state[name], value), name


def die_in_training(env):
    """The last rank is killed between forward and backward; how the others end, and when."""
    os.environ.update(env)
    model = wrapped("shm")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model(torch.randn(4, 33)).square().mean().backward()
    loss = model(torch.randn(4, 33)).square().mean()
    start = time.monotonic()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
        model(torch.randn(4, 33))
    except (zshard.PeerError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


@pytest.mark.parametrize("world", [2, 3])
def test_killed_rank_is_an_error_within_seconds(world):
    *survivors, killed = fork_ranks(die_in_training, world, environment("peer"))
    assert killed.returncode == -signal.SIGKILL
    for result in survivors:
        kind, words, seconds = result.value
        assert kind == "PeerError" and f"rank {world - 1}" in words, (kind, words)
        assert seconds < 30


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
    monkeypatch.setattr(_group, "comm_for", lambda *args: Control(transport, peers))
    monkeypatch.setattr(_group, "library", lambda: None)
    fake = SimpleNamespace(gpu=lambda control, mover, *rest: chosen.append(mover))
    monkeypatch.setattr(_group, "_core", SimpleNamespace(Comm=fake))
    _group.connect_gpu("cuda:0", None, wanted, 1.0)
    assert chosen == [kind] and _core.Comm is not fake
