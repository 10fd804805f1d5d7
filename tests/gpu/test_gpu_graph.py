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
from gpus import BFLOAT16, DEEP, EXACT, KINDS, Start, device, far, is_real, wrap
from models import loss_of

import zshard

WARM, STEPS = 3, 5  # steps before the capture, and with it


def graph_of(step: Callable[[], None]) -> Callable[[], None]:
    """What repeats the step."""
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


def warm_up(step: Callable[[], None], fill: Callable[[int], None]) -> None:
    """The first steps, in a stream of their own, as torch asks for before a capture."""
    if not is_real():
        for number in range(WARM):
            fill(number)
            step()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(WARM):
            fill(number)
            step()
    torch.cuda.current_stream().wait_stream(side)


def train(repeated: bool, strategy: str, precision: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses, and parameters at the end; the later steps by a graph if `repeated`."""
    torch.manual_seed(3)
    model = wrap(DEEP, strategy=strategy, mixed_precision=precision)
    lr = torch.tensor(0.01, device=device())
    optimizer = zshard.AdamW(model.parameters(), lr=lr, capturable=True)
    inputs = DEEP.batch(0, 0).to(device())
    loss = torch.zeros((), device=device())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        now = loss_of(model(inputs))
        now.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        loss.copy_(now.detach())

    def fill(number: int) -> None:
        inputs.copy_(DEEP.batch(number, 0))
        lr.fill_(0.01 / (1 + number))

    warm_up(step, fill)
    losses = []
    run = graph_of(step) if repeated and is_real() else None
    for number in range(WARM, WARM + STEPS):
        fill(number)
        if repeated:
            run = run or graph_of(step)
            run()
        else:
            step()
        losses.append(float(loss))
    return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_graph_is_bit_identical_to_the_steps(
    start: Start, kind: str, strategy: str, precision: Any
) -> None:
    pool = start(kind)
    mine, plain = (pool.run(train, how, strategy, precision)[0] for how in (True, False))
    assert mine[0] == plain[0]
    assert far(mine[1], plain[1], EXACT) == []
