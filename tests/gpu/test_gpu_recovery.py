"""Faults that a script can meet on a GPU end as on the CPU: Ctrl-C, errors that are caught, ranks that are killed
or hang, saves that fail, too little memory.

As in test_gpu.py, ranks run on a GPU if there is one, and over the fakes. They share it: over NCCL, and over gloo.
Calls of the driver that fail, one by one, are in test_gpu_faults.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    BACKENDS,
    DEEP,
    EXACT,
    FP32,
    GPU,
    KINDS,
    Deep,
    adamw,
    device,
    far,
    is_real,
    on_device,
    on_host,
    over,
    run_fresh,
    sgd,
    train,
    wrap,
)
from models import Case, loss_of
from torch import Tensor

import zshard

PATIENCE = 3.0  # seconds until a wait for a rank that hangs ends
ENDS = ("PeerError", "PeerTimeoutError", "DivergenceError")


def join_ranks(backend: str, timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
    """This rank, and options for its models."""
    dist.init_process_group("gloo")
    return dist.get_rank(), {"transport": over(backend), "timeout": timeout}


def batch(step: int, rank: int) -> Tensor:
    return DEEP.batch(step, rank).to(device())


def end_of(call: Callable[[], Any]) -> tuple[str, str]:
    """The name and the words of the exception that ends `call`."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


both = pytest.mark.parametrize("kind", KINDS)
backends = pytest.mark.parametrize("backend", BACKENDS)

# --- Ctrl-C ---------------------------------------------------------------------------------------


def beside(call: Callable[[], None]) -> None:
    """Run it as torch runs a backward on a GPU: on another thread, while this one waits in C, where
    signals interrupt nothing."""
    if is_real():
        call()
        return
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)

    def work() -> None:
        call()
        libc.pthread_mutex_unlock(mutex)

    threading.Thread(target=work).start()
    libc.pthread_mutex_lock(mutex)


def press_in_backward(backend: str, own_handler: bool, pressed: str) -> dict[str, Any]:
    """The effect of Ctrl-C on rank 0, whose backward waits for rank 1, which waits for the file
    `pressed`. This backward gathers nothing: the calling thread is the fake's compute stream."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    rank, options = join_ranks(backend)
    model = wrap(strategy="shard_grad_op", **options)
    loss = loss_of(model(batch(0, rank)))
    said: dict[str, Any] = {"backward": "", "main": "", "handled": 0}

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if own_handler:
            Path(pressed).touch()

    def handle(*_: Any) -> None:
        said["handled"] += 1

    def backward() -> None:
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            said["backward"] = f"{type(error).__name__}: {error}"
        Path(pressed).touch()

    if own_handler:
        signal.signal(signal.SIGINT, handle)
    if rank == 0:
        loss.register_hook(lambda _grad: threading.Timer(0.3, press).start())
    while rank and not os.path.exists(pressed):
        time.sleep(0.01)
    try:
        beside(backward)
        time.sleep(0.01)  # Python has a turn to raise it
    except KeyboardInterrupt as error:
        said["main"] = "KeyboardInterrupt"
        said["backward"] = said["backward"] or f"{error.__context__}"
        Path(pressed).touch()
    return said


@pytest.mark.sampled(2)
@backends
@both
def test_ctrl_c_interrupts_a_backward(kind: str, backend: str, tmp_path: Path) -> None:
    pressed = str(tmp_path / "pressed")
    results = run_fresh(kind, 2, backend, press_in_backward, backend, False, pressed)
    said, other = (result.value for result in results)
    assert "interrupted while waiting for another rank" in said["backward"], said
    assert said["main"] == "KeyboardInterrupt"
    assert "PeerError" in other["backward"] and "rank 0" in other["backward"], other


@on_device(2, "nccl", fresh=True)
def test_ctrl_c_with_a_handler_of_the_script(tmp_path: Path) -> None:
    said = press_in_backward("nccl", True, str(tmp_path / "pressed"))
    assert said == {"backward": "", "main": "", "handled": 1 - dist.get_rank()}


# --- errors that are caught ---------------------------------------------------------------------------


class Refused(Exception):
    """Not one of zshard's."""


class Failing(Deep):
    """Raises in the middle of a forward or of a backward, as `fails` says; "memory": torch's own
    error in a backward."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.fails == "forward":
                raise Refused
            x = block(x)
            if number == 1 and self.fails in HOOKS:
                x.register_hook(HOOKS[self.fails])
        return x


def refuse(_grad: Tensor) -> None:
    raise Refused


def run_out_of_memory(grad: Tensor) -> None:
    torch.empty(1 << 60, dtype=torch.uint8, device=grad.device)


HOOKS = {"backward": refuse, "memory": run_out_of_memory}


FAILING = Case(Failing, lambda generator: DEEP.draw(generator)[:4])  # fails with a larger batch


def fail(model: Any, rank: int, where: str) -> None:
    model.module.fails = where
    try:
        loss_of(model(batch(9, rank))).backward()
    finally:
        model.module.fails = ""


@pytest.mark.sampled(4)
@backends
@pytest.mark.parametrize("where", ["forward", *HOOKS])
@pytest.mark.parametrize(("kind", "world"), [("gpu", 2), ("stand-in", 1), ("stand-in", 3)])
@on_device(fresh=True)
def test_caught_error_changes_nothing(kind: str, world: int, where: str, backend: str) -> None:
    """Losses of a model, and of one that fails twice on all ranks, in its first step and later."""
    rank, options = join_ranks(backend)
    usual, ours = (wrap(FAILING, **options) for _ in range(2))
    optimizers = adamw(usual), adamw(ours)
    for _ in range(2):
        end = end_of(lambda: fail(ours, rank, where))
        assert end[0] == "Refused" or (where == "memory" and "memory" in end[1]), end
        steps = {"steps": 2, "rank": rank}
        expected = train(usual, optimizers[0], FAILING, **steps)
        losses = train(ours, optimizers[1], FAILING, **steps)
        assert losses == pytest.approx(expected, **(FP32 if is_real() else EXACT))


@on_device(1, "nccl", fresh=True, kinds=GPU)
def test_smaller_batch_trains_on_after_lack_of_memory() -> None:
    """Three big batches, some of which run out of the GPU's memory, each at another point of
    backward, and small ones between them, within the same memory. The host has no such limit: see
    "memory"."""
    _, options = join_ranks("nccl")
    total = torch.cuda.get_device_properties(device()).total_memory
    case = Case(functools.partial(Deep, 1024, 4), lambda g: torch.randn(64, 1024, generator=g))
    raised, losses = 0, ([], [])
    for big in (False, True):
        model = wrap(case, **options)
        optimizer = adamw(model)
        losses[big].extend(train(model, optimizer, case, steps=2))
        for more in (0, 96, 192):
            if big:
                loss = loss_of(model(torch.randn(16384, 1024, device=device())))  # 64 MiB each
                torch.cuda.empty_cache()
                room = torch.cuda.memory_reserved() + (more << 20)
                torch.cuda.set_per_process_memory_fraction(room / total)
                raised += "OutOfMemoryError" in end_of(loss.backward)
                del loss
                optimizer.zero_grad()
            losses[big].extend(train(model, optimizer, case, steps=2))
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert raised > 0
    assert losses[True] == pytest.approx(losses[False], **FP32)


def fail_alone(backend: str, where: str) -> list[tuple[str, str]]:
    """The end of both steps if rank 1 alone fails in the first, catches that and continues."""
    rank, options = join_ranks(backend, PATIENCE)
    model = wrap(FAILING, **options)
    optimizer = adamw(model)
    first = end_of(lambda: fail(model, rank, where if rank == 1 else ""))
    return [first, end_of(lambda: train(model, optimizer, FAILING, rank=rank))]


@pytest.mark.sampled(2)
@backends
@pytest.mark.parametrize("where", ["forward", "backward"])
@both
def test_error_on_one_rank_is_an_error_on_all(kind: str, where: str, backend: str) -> None:
    results = run_fresh(kind, 2, backend, fail_alone, backend, where)
    ends = [result.value for result in results]
    assert ends[1][0][0] == "Refused"
    told = [
        error in ENDS or "cannot continue after an earlier failure" in words
        for error, words in (*ends[0], ends[1][1])
    ]
    # Over c10d, ranks may train on after a backward that one of them abandoned, as on CPUs.
    goes_on = backend == "c10d" and where == "backward"
    assert any(told[:2]) and (all(told) or backend == "c10d"), ends
    assert told == [True, False, False] if goes_on else told[2], ends


# --- ranks that are killed or hang ----------------------------------------------------------------------


def die_in_training(backend: str, killed: int) -> tuple[str, str]:
    """The last ranks are killed between forward and backward; how the others end."""
    rank, options = join_ranks(backend)
    model = wrap(**options)
    loss_of(model(batch(0, rank))).backward()
    loss = loss_of(model(batch(0, rank)))
    if rank >= dist.get_world_size() - killed:
        os.kill(os.getpid(), signal.SIGKILL)

    def train_again() -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        loss_of(model(batch(0, rank))).item()

    return end_of(train_again)


@pytest.mark.sampled(3)
@backends
@pytest.mark.parametrize(("world", "killed"), [(2, 1), (4, 2)])
@both
def test_killed_ranks_are_reported(kind: str, world: int, killed: int, backend: str) -> None:
    results = run_fresh(kind, world, backend, die_in_training, backend, killed, check=False)
    gone = range(world - killed, world)
    assert [results[rank].returncode for rank in gone] == [-signal.SIGKILL] * killed
    for result in results[: gone[0]]:
        assert result.value is not None, result.stderr
        error, words = result.value
        assert error == "PeerError" and any(f"rank {rank}" in words for rank in gone), words


def hang_in_a_kernel(backend: str, folder: str) -> tuple[str, str]:
    """The GPU of rank 1 does not end a kernel of the script's; how the other ranks end."""
    rank, options = join_ranks(backend, PATIENCE)
    model = wrap(**options)
    optimizer = sgd(model)
    train(model, optimizer, steps=2, rank=rank)
    if rank == 1:
        kill_after(os.path.join(folder, "0"), os.path.join(folder, "2"))
        if is_real():
            torch.cuda._sleep(int(10 * PATIENCE * 2e9))  # cycles
        else:  # the fake's side streams hang
            os.environ["FAKE_CUDA_DELAY_US"] = str(int(10 * PATIENCE * 1e6))
    end = end_of(lambda: train(model, optimizer, rank=rank))
    Path(folder, str(rank)).touch()
    if rank == 1:
        signal.pause()
    return end


def kill_after(*files: str) -> None:
    """Have another process kill this one once these exist, in any wait."""
    there = " && ".join(f"[ -e '{file}' ]" for file in files)
    wait = f"until {there}; do sleep 0.05; done; kill -9 {os.getpid()}"
    subprocess.Popen(["sh", "-c", wait], start_new_session=True)


@pytest.mark.sampled(2)
@backends
@both
def test_hanging_kernel_ends_the_others_by_timeout(kind: str, backend: str, tmp_path: Path) -> None:
    """On a GPU, NCCL may report another rank's timeout before a rank's own."""
    results = run_fresh(kind, 3, backend, hang_in_a_kernel, backend, str(tmp_path), check=False)
    first, hung, last = results
    assert hung.returncode == -signal.SIGKILL, hung
    assert first.value is not None and last.value is not None, first.stderr + last.stderr
    ends = [first.value, last.value]
    assert {error for error, _ in ends} <= {"PeerTimeoutError", "NcclError"}, ends
    late = [words for error, words in ends if error == "PeerTimeoutError"]
    assert len(late) == 2 or (late and kind == "gpu"), ends
    for words in late:
        for part in (f"finish within {PATIENCE:g} s", "hangs in a kernel", "is parameters of unit"):
            assert part in words, words


# --- saves that fail --------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("kind", "backend"), [("gpu", "nccl"), *(("stand-in", b) for b in BACKENDS)]
)
@on_device(2, fresh=True)
def test_failed_save_changes_nothing(
    kind: str, backend: str, asynchronous: bool, tmp_path: Path
) -> None:
    """Rank 1 cannot write. Training continues as without the save, and a later save is complete."""
    rank, options = join_ranks(backend)
    folder, near = str(tmp_path / "checkpoint"), FP32 if is_real() else EXACT
    usual, model = wrap(**options), wrap(**options)
    optimizers = adamw(usual), adamw(model)

    def train_both(steps: int) -> None:
        expected = train(usual, optimizers[0], steps=steps, rank=rank)
        losses = train(model, optimizers[1], steps=steps, rank=rank)
        assert losses == pytest.approx(expected, **near)

    def save() -> None:
        zshard.save(folder, model, optimizers[1], step=2, asynchronous=asynchronous).wait()

    train_both(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    end = end_of(save)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert end[0] == "OSError" and "File too large" in end[1], end
    dist.barrier()
    assert os.listdir(folder) == []
    dist.barrier()
    train_both(4)
    save()
    other = wrap(**options)
    zshard.load(folder, other, adamw(other))
    assert far(on_host(other.state_dict()), on_host(model.state_dict()), EXACT) == []
