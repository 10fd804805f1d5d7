"""A CUDA graph of a training step on a GPU: its replays have the bits of the same steps without one.

On a GPU the step is captured once and replayed; over the stand-ins, which cannot replay,
each of these steps runs as a capture, which forbids what CUDA forbids (test_cuda_graphs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpus import (
    BFLOAT16,
    DEEP,
    EXACT,
    Trained,
    assert_near,
    device,
    is_real,
    on_device,
    on_host,
    wrap,
)
from models import loss_of

import zshard

WARM, STEPS = 3, 5  # steps before the capture, and with it


def graph_of(step: Callable[[], None]) -> Callable[[], None]:
    """Return what repeats the step."""
    if is_real():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay: Callable[[], None] = graph.replay
        return replay
    numbers = iter(range(1, 1 + STEPS))

    def captured() -> None:
        os.environ["FAKE_CUDA_CAPTURE"] = str(next(numbers))
        try:
            step()
        finally:
            del os.environ["FAKE_CUDA_CAPTURE"]

    return captured


def in_a_stream_of_its_own(work: Callable[[], Any]) -> None:
    """Do it as torch asks for before a capture."""
    if not is_real():
        work()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)


def train(repeated: bool, strategy: str, precision: Any) -> Trained:
    """Return losses, and parameters at the end; the later steps are by a graph if `repeated`."""
    model = wrap(strategy=strategy, mixed_precision=precision)
    lr = torch.tensor(0.01, device=device())
    optimizer = zshard.AdamW(model.parameters(), lr=lr, capturable=True)
    inputs, loss = DEEP.batch(0, 0).to(device()), torch.zeros((), device=device())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        now = loss_of(model(inputs))
        now.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        loss.copy_(now.detach())

    def go(steps: range, run: Callable[[], None]) -> list[float]:
        losses = []
        for number in steps:
            inputs.copy_(DEEP.batch(number, 0))
            lr.fill_(0.01 / (1 + number))
            run()
            losses.append(float(loss))
        return losses

    in_a_stream_of_its_own(lambda: go(range(WARM), step))
    losses = go(range(WARM, WARM + STEPS), graph_of(step) if repeated else step)
    return losses, on_host(model.state_dict())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_device()
def test_graph_is_bit_identical_to_the_steps(strategy: str, precision: Any) -> None:
    assert_near(train(True, strategy, precision), train(False, strategy, precision), EXACT)
