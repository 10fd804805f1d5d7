"""Steps that a CUDA graph can repeat: the numbers of capturable optimizers, and the calls of a
step.

A capture is a set of things that must not be done, and of waits that must be there.
The fake of CUDA's driver (tests/c/fake_cuda.h) treats torch's stream as captured, and fails all
that a GPU would fail (allocations, synchronisation, queries, waits for what happened outside),
while it computes as ever; so a step that passes has the numbers to show for it, and its log says
whether every side stream that it used was forked and joined.
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

import gpu_log
import pytest
import torch
from compare import assert_same
from gpus import FAKE, on_device, on_fakes
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

STEPS, WARM = 5, 2  # steps in all, and those before the capture
FORBIDDEN = re.compile(
    r"cu(MemAlloc|MemFree|MemHost\w+|MemcpyHtoDAsync|Stream(Synchronize|Query|Create\w+|Destroy)"
    r"|Event(Synchronize|Create|Destroy)|LibraryLoadData)$"
)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": zshard.AdamW,
    "amsgrad": lambda params, **options: zshard.Adam(params, amsgrad=True, **options),
    "sgd": lambda params, **options: zshard.SGD(params, momentum=0.9, nesterov=True, **options),
}
fresh = on_device(2, "nccl", fresh=True, kinds=FAKE)


def wrapped(**options: Any) -> Any:
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)]
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    model = nn.Sequential(*layers, nn.Linear(33, 5))
    return FSDP(model, auto_wrap_policy=policy, transport="c10d", **options)


@contextmanager
def captured(number: int, folder: str = "") -> Iterator[None]:
    """Within, all work belongs to the fake's capture `number`, and is written to the log there."""
    os.environ["FAKE_CUDA_CAPTURE"] = str(number)
    try:
        with gpu_log.written(folder) if folder else nullcontext():
            yield
    finally:
        del os.environ["FAKE_CUDA_CAPTURE"]


def train(options: dict[str, Any], how: dict[str, Any]) -> Any:
    """Losses, parameters, norms, step counters, and scales after some steps.

    how: optimizer: its name; capturable: its option, None to leave it out; lr_tensor: its lr is one,
    and halved after each step; clip: whether; scaled: by a GradScaler, with an infinity on a rank in
    a step; unscale: whether; out: some parameters have no gradient, in turn, and the optimizer's
    state is loaded in between; log: a folder: captures the later steps.
    """
    rank, steps = int(os.environ["RANK"]), 9 if how.get("out") else STEPS
    model = wrapped(**options)
    lr = torch.tensor(0.01, dtype=torch.float64) if how.get("lr_tensor") else 0.01
    more = {} if how.get("capturable") is None else {"capturable": how["capturable"]}
    optimizer = OPTIMIZERS[how.get("optimizer", "adamw")](model.parameters(), lr=lr, **more)
    scaled = how.get("scaled", False)
    scaler = zshard.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
    losses, norms, scales = [], [], []
    parameters = list(model.parameters())
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        inputs, log = torch.randn(4, 33), how.get("log", "")
        with captured(step, log) if log and step >= WARM else nullcontext():
            loss = model(inputs).square().mean()
            factor = float("inf") if scaled and step == 3 and rank == 1 else 1.0
            scaler.scale(loss * factor).backward()
            for parameter in parameters[step % 4 :: 4] if how.get("out") else ():
                parameter.grad = None
            if how.get("clip"):
                norms.append(model.clip_grad_norm_(0.05))
            if how.get("unscale"):
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if isinstance(lr, torch.Tensor):
            lr.mul_(0.5)
        if how.get("out") and step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    held = [optimizer.state[p] for p in parameters]
    counters = [float(entry["step"]) for entry in held if "step" in entry]
    return losses, state, [float(norm) for norm in norms], counters, scales


def same(ours: list[Any], theirs: list[Any]) -> None:
    """The same losses, norms, counters and bits."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0] == other[0] and mine[2:] == other[2:]
        assert_same(mine[1], other[1], "the state")


def on_the_cpu(world: int, **how: Any) -> list[Any]:
    return [result.value for result in fork_ranks(train, world, {}, how, check=True)]


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.needs_fma
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2])
def test_capturable_steps_are_bit_identical_to_the_cpu(world: int, optimizer: str) -> None:
    how = {"optimizer": optimizer, "lr_tensor": True}
    same(on_fakes(train, world, {}, {**how, "capturable": True}), on_the_cpu(world, **how))


@pytest.mark.needs_fma
def test_step_counters_of_parameters_without_gradients() -> None:
    plain = on_the_cpu(2, out=True)
    assert len(set(plain[0][3])) > 1
    same(on_fakes(train, 2, {}, {"out": True, "capturable": True}), plain)


# --- calls of a step ------------------------------------------------------------------------------


def assert_can_be_captured(folder: Path, world: int) -> list[str]:
    """Return the kernels that were launched."""
    kernels = []
    for rank in range(world):
        lines = gpu_log.read(folder / f"calls.{rank}")
        assert [line for line in lines if FORBIDDEN.match(line[0])] == []
        order = gpu_log.order_of(lines)
        assert any(stream > 0 for stream in order.counts) == (world > 1)
        assert gpu_log.unjoined(order) == set()
        kernels += [fields["kernel"] for _, fields in lines if "kernel" in fields]
    return kernels


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
    how = {"clip": True, "lr_tensor": True}
    logged = {**how, "capturable": True, "log": str(tmp_path)}
    ours = on_fakes(train, world, options, logged, backend=backend)
    same(ours, on_fakes(train, world, options, how, backend=backend))
    kernels = assert_can_be_captured(tmp_path, world)
    assert "zs_live_adam_f32" in kernels
    assert world == 1 or "zs_scale_f32" in kernels


@pytest.mark.needs_fma
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_skips_a_step_on_the_gpu(tmp_path: Path, unscale: bool) -> None:
    how = {"scaled": True, "unscale": unscale}
    plain = on_the_cpu(2, **how)
    assert set(plain[0][3]) == {STEPS - 1.0}
    same(on_fakes(train, 2, {}, {**how, "capturable": True, "log": str(tmp_path)}), plain)
    assert_can_be_captured(tmp_path, 2)


# --- refusals ------------------------------------------------------------------------------------

WARM_UP = "run a warm-up step before the capture"
REFUSED: list[tuple[Any, dict[str, Any], int, str]] = [  # a kind, options, steps before, words
    (zshard.AdamW, {"capturable": True}, 0, WARM_UP),
    (zshard.AdamW, {}, 2, "create the optimizer with capturable=True"),
    (zshard.SGD, {"momentum": 0.9}, 0, WARM_UP),
    (zshard.SGD, {}, 2, ""),  # which is fine
]


@fresh
def test_steps_that_a_graph_cannot_repeat_are_refused() -> None:
    """Nothing may have changed."""
    for kind, options, warm, words in REFUSED:
        model = wrapped()
        optimizer = kind(model.parameters(), lr=0.01, **options)
        for step in range(warm + 1):
            model(torch.ones(4, 33)).square().mean().backward()
            before = [param.detach().clone() for param in model.parameters()]
            refused = step == warm and words
            error = pytest.raises(RuntimeError, match=words) if refused else nullcontext()
            with error, captured(step + 1) if step == warm else nullcontext():
                optimizer.step()
            if refused:
                assert_same(model.parameters(), before, "the parameters")
    coarse = FSDP(nn.Linear(9, 9, dtype=torch.bfloat16), transport="c10d")
    words = "stochastic_rounding=True does not support capturable=True"
    with pytest.raises(NotImplementedError, match=words):
        zshard.AdamW(coarse.parameters(), capturable=True, stochastic_rounding=True)


@fresh
def test_zero1_is_refused_in_a_capture() -> None:
    """A strategy that compares parameters on the host when a session opens."""
    model = wrapped(strategy="zero1")
    for _ in range(2):
        model(torch.ones(4, 33)).square().mean().backward()
    words = "on the host during CUDA graph capture"
    with pytest.raises(NotImplementedError, match=words), captured(1):
        model(torch.ones(4, 33)).square().mean().backward()


@fresh
def test_watchdog_does_not_break_a_capture() -> None:
    """Its thread asks about events, which is unsafe in the default mode of a thread."""
    driver = ctypes.CDLL(os.environ["ZSHARD_CUDA_LIB"])
    model = wrapped()
    for number in range(1, 4):
        model(torch.ones(4, 33)).square().mean().backward()
        with captured(number):
            time.sleep(0.25)  # the watchdog looks ten times a second
            assert driver.fake_cuda_capture_broken() == 0
