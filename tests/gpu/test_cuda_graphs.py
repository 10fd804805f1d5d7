"""Steps that a CUDA graph can repeat: the numbers of capturable optimizers, and what a step calls.

A capture is a set of things that must not be done, and of waits that must be there.
The stand-in for CUDA's driver (tests/c/fake_cuda.h) is told that torch's stream is captured, and
then fails what a GPU would fail (allocations, synchronisation, queries, waits for what happened
outside), while it computes as ever; so a step that passes has the numbers to show for it, and its
log says whether every side stream that it used was forked and joined.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from compare import assert_same
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

STEPS, WARM = 5, 2  # steps in all, and those before the capture
FORBIDDEN = re.compile(
    r"cu(MemAlloc|MemFree|MemHost\w+|MemcpyHtoDAsync|Stream(Synchronize|Query|Create\w+|Destroy)"
    r"|Event(Synchronize|Create|Destroy)|LibraryLoadData)\b"
)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": zshard.AdamW,
    "amsgrad": lambda params, **options: zshard.Adam(params, amsgrad=True, **options),
    "sgd": lambda params, **options: zshard.SGD(params, momentum=0.9, nesterov=True, **options),
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(33, 5)).to(dtype)


def wrap(model: nn.Module, options: dict[str, Any]) -> Any:
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    return FSDP(model, auto_wrap_policy=policy, transport="c10d", **options)


@contextmanager
def captured(number: int, log: str) -> Iterator[None]:
    """What is done within is the stand-in's capture `number`, and is written to `log`."""
    os.environ.update(FAKE_CUDA_CAPTURE=str(number), FAKE_CUDA_LOG=log)
    try:
        yield
    finally:
        del os.environ["FAKE_CUDA_CAPTURE"], os.environ["FAKE_CUDA_LOG"]


def train(env: dict[str, str], options: dict[str, Any], how: dict[str, Any]) -> Any:
    """Losses, parameters and the optimizer's state after some steps.

    how: optimizer: its name; capturable: its option, None to leave it out; lr_tensor: its lr is one,
    and halved after each step; clip: whether; log: a path, {rank} in it: captures the later steps.
    """
    os.environ.update(env)
    rank = int(os.environ["RANK"])
    model = wrap(make_model(), options)
    lr = torch.tensor(0.01, dtype=torch.float64) if how.get("lr_tensor") else 0.01
    more = {} if how.get("capturable") is None else {"capturable": how["capturable"]}
    optimizer = OPTIMIZERS[how["optimizer"]](model.parameters(), lr=lr, **more)
    losses, norms = [], []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        inputs = torch.randn(4, 33)
        path = how.get("log", "").format(rank=rank)
        with captured(step, path) if path and step >= WARM else nullcontext():
            loss = model(inputs).square().mean()
            loss.backward()
            if how.get("clip"):
                norms.append(model.clip_grad_norm_(0.05))
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(lr, torch.Tensor):
            lr.mul_(0.5)
        losses.append(float(loss.detach()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    held = [optimizer.state[p] for p in model.parameters()]
    steps = [float(entry["step"]) for entry in held if "step" in entry]
    return losses, state, [float(norm) for norm in norms], steps


def same(mine: Any, other: Any) -> None:
    """The same losses, norms, counters and bits."""
    assert mine[0] == other[0] and mine[2:] == other[2:]
    assert_same(mine[1], other[1], "the state")


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.needs_fma
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2])
def test_capturable_steps_are_bit_identical_to_the_cpu(world: int, optimizer: str) -> None:
    env = stand_ins.environment("nccl")
    how = {"optimizer": optimizer, "lr_tensor": True}
    plain = fork_ranks(train, world, {}, {}, how, check=True)
    ours = fork_ranks(train, world, env, {}, {**how, "capturable": True}, check=True)
    for mine, cpu in zip(ours, plain, strict=True):
        same(mine.value, cpu.value)


def with_a_layer_out(env: dict[str, str], capturable: bool) -> Any:
    """Steps in which some parameters have no gradient, in turn; and a state dict in between."""
    os.environ.update(env)
    model = wrap(make_model(), {})
    kind = {"capturable": True} if capturable else {}
    optimizer = zshard.AdamW(model.parameters(), lr=0.01, **kind)
    parameters = list(model.parameters())
    for step in range(9):
        torch.manual_seed(step)
        model(torch.randn(4, 33)).square().mean().backward()
        for i, parameter in enumerate(parameters):
            if (i + step) % 4 == 0:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
    steps = [float(optimizer.state[p]["step"]) for p in parameters]
    return [], {name: value.clone() for name, value in model.state_dict().items()}, [], steps


@pytest.mark.needs_fma
def test_step_counters_of_parameters_without_gradients() -> None:
    plain = fork_ranks(with_a_layer_out, 2, {}, False, check=True)
    ours = fork_ranks(with_a_layer_out, 2, stand_ins.environment("nccl"), True, check=True)
    assert len(set(plain[0].value[3])) > 1
    for mine, cpu in zip(ours, plain, strict=True):
        same(mine.value, cpu.value)


# --- what a step calls ---------------------------------------------------------------------------


def unjoined(lines: list[str]) -> set[int]:
    """The side streams whose last work the default stream does not wait for in the end."""
    recorded: dict[str, int] = {}  # which stream's end an event stands for
    open_streams: set[int] = set()
    for line in lines:
        found = re.search(r"stream=(\d+)", line)
        event = re.search(r"event=(\w+)", line)
        stream = int(found[1]) if found else 0
        if line.startswith("cuEventRecord") and event:
            recorded[event[1]] = stream
        elif line.startswith("cuStreamWaitEvent") and event and stream == 0:
            open_streams.discard(recorded.get(event[1], 0))
        elif stream and not line.startswith("cuStreamIsCapturing"):
            open_streams.add(stream)
    return open_streams


CASES = [
    ("nccl", 2, {"sharding_strategy": "full_shard"}),
    ("nccl", 2, {"sharding_strategy": "shard_grad_op"}),
    ("nccl", 2, {"sharding_strategy": "no_shard"}),
    ("nccl", 2, {"mixed_precision": zshard.MixedPrecision(torch.bfloat16)}),
    ("nccl", 3, {"sharding_strategy": "full_shard"}),
    ("c10d", 1, {"sharding_strategy": "full_shard"}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "world", "options"), CASES, ids=str)
def test_step_makes_no_call_that_a_capture_forbids(
    tmp_path: Path, backend: str, world: int, options: dict[str, Any]
) -> None:
    env = stand_ins.environment(backend)
    how = {"optimizer": "adamw", "capturable": True, "clip": True, "lr_tensor": True}
    log = str(tmp_path / "{rank}.log")
    ours = fork_ranks(train, world, env, options, {**how, "log": log}, check=True)
    plain = fork_ranks(train, world, env, options, {**how, "capturable": None}, check=True)
    for rank, (mine, other) in enumerate(zip(ours, plain, strict=True)):
        same(mine.value, other.value)
        lines = Path(log.format(rank=rank)).read_text().splitlines()
        assert [line for line in lines if FORBIDDEN.match(line)] == []
        assert any("kernel=zs_live_adam_f32" in line for line in lines)
        assert world == 1 or any("kernel=zs_scale_f32" in line for line in lines)
        used = {n for n in re.findall(r"stream=(\d+)", "\n".join(lines)) if n != "0"}
        assert bool(used) == (world > 1)
        assert unjoined(lines) == set()


def test_unjoined_streams_are_found() -> None:
    """The check of joins can fail: a stream that is left, or used again after its join."""
    fork = ["cuEventRecord stream=0 event=0x1", "cuStreamWaitEvent stream=3 event=0x1"]
    join = ["cuEventRecord stream=3 event=0x2", "cuStreamWaitEvent stream=0 event=0x2"]
    assert unjoined([*fork, "cuLaunchKernel stream=3 kernel=a", *join]) == set()
    assert unjoined([*fork, "cuLaunchKernel stream=3 kernel=a"]) == {3}
    assert unjoined([*fork, *join, "cuLaunchKernel stream=3 kernel=a"]) == {3}


# --- loss scaling, refusals ----------------------------------------------------------------------


def scaled(env: dict[str, str], capturable: bool, log: str, unscale: bool) -> Any:
    """Steps with a GradScaler, of which one has an infinity on one rank; what came of each."""
    os.environ.update(env)
    rank = int(os.environ["RANK"])
    model = wrap(make_model(), {})
    kind = {"capturable": True} if capturable else {}
    optimizer = zshard.AdamW(model.parameters(), lr=0.01, **kind)
    scaler = zshard.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        inputs = torch.randn(4, 33)
        path = log.format(rank=rank)
        with captured(step, path) if path and step >= WARM else nullcontext():
            loss = model(inputs).square().mean()
            if step == 3 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    return scales, {name: value.clone() for name, value in model.state_dict().items()}, [], steps


@pytest.mark.needs_fma
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_skips_a_step_on_the_gpu(tmp_path: Path, unscale: bool) -> None:
    env, log = stand_ins.environment("nccl"), str(tmp_path / "{rank}.log")
    plain = fork_ranks(scaled, 2, {}, False, "", unscale, check=True)
    ours = fork_ranks(scaled, 2, env, True, log, unscale, check=True)
    assert set(plain[0].value[3]) == {STEPS - 1.0}
    for rank, (mine, cpu) in enumerate(zip(ours, plain, strict=True)):
        same(mine.value, cpu.value)
        lines = Path(log.format(rank=rank)).read_text().splitlines()
        assert [line for line in lines if FORBIDDEN.match(line)] == []
        assert unjoined(lines) == set()


def refuse(env: dict[str, str]) -> list[str]:
    """What is said to those who capture what cannot be repeated; nothing may have changed."""
    os.environ.update(env)
    said = []
    adam = zshard.AdamW
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (adam, {"capturable": True}, 0),  # the first step
        (adam, {}, 2),
        (zshard.SGD, {"momentum": 0.9}, 0),
        (zshard.SGD, {}, 2),  # which is fine
    ]
    for kind, options, warm in cases:
        model = wrap(make_model(), {})
        optimizer = kind(model.parameters(), lr=0.01, **options)
        for step in range(warm + 1):
            model(torch.ones(4, 33)).square().mean().backward()
            before = [param.detach().clone() for param in model.parameters()]
            try:
                with captured(step + 1, os.devnull) if step == warm else nullcontext():
                    optimizer.step()
                said.append("stepped")
            except RuntimeError as error:
                said.append(str(error))
                assert_same(model.parameters(), before, "the parameters")
    model = wrap(make_model().bfloat16(), {})
    try:
        adam(model.parameters(), capturable=True, stochastic_rounding=True)
    except NotImplementedError as error:
        said.append(str(error))
    return said


def test_steps_that_a_graph_cannot_repeat_are_refused() -> None:
    for result in fork_ranks(refuse, 2, stand_ins.environment("nccl"), check=True):
        first, *warm, number, momentum, _, _, plain, rounding = result.value
        assert "run a warm-up step before the capture" in first
        assert warm == ["stepped", "stepped"] and plain == "stepped"
        assert "create the optimizer with capturable=True" in number
        assert "run a warm-up step before the capture" in momentum
        assert "stochastic_rounding=True does not support capturable=True" in rounding


def kept(env: dict[str, str]) -> str:
    """A strategy that compares parameters on the host when a session opens."""
    os.environ.update(env)
    model = wrap(make_model(), {"strategy": "zero1"})
    for step in range(3):
        try:
            with captured(1, os.devnull) if step == 2 else nullcontext():
                model(torch.ones(4, 33)).square().mean().backward()
        except NotImplementedError as error:
            return str(error)
    return "nothing was said"


def test_zero1_is_refused_in_a_capture() -> None:
    for result in fork_ranks(kept, 2, stand_ins.environment("nccl"), check=True):
        assert "on the host during CUDA graph capture" in result.value


def beside_a_capture(env: dict[str, str]) -> list[int]:
    """Whether captures that begin right behind a step are broken."""
    os.environ.update(env)
    driver = ctypes.CDLL(env["ZSHARD_CUDA_LIB"])
    model = wrap(make_model(), {})
    broken = []
    for number in range(1, 4):
        model(torch.ones(4, 33)).square().mean().backward()
        with captured(number, os.devnull):
            time.sleep(0.25)  # the watchdog looks ten times a second
            broken.append(driver.fake_cuda_capture_broken())
    return broken


def test_watchdog_does_not_break_a_capture() -> None:
    """Its thread asks about events, which is unsafe in the default mode of a thread."""
    for result in fork_ranks(beside_a_capture, 2, stand_ins.environment("nccl"), check=True):
        assert result.value == [0, 0, 0]
