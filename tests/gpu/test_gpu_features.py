"""Features besides plain steps, on a GPU: checkpoints, offload, loss scaling, torch's optimizers,
graphs.

As in test_gpu.py, plain PyTorch on the same device is the reference; several ranks are compared
with ranks on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import (
    ADAM,
    BFLOAT16,
    DEEP,
    EXACT,
    FP32,
    GPU,
    Trained,
    adamw,
    assert_near,
    device,
    far,
    full_state,
    is_real,
    on_device,
    on_host,
    plain,
    sgd,
    train,
    trained,
    wrap,
)
from models import loss_of
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision

# --- checkpoints, offload ---------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("asynchronous", [False, True])
@on_device(2)
def test_checkpoints(tmp_path: Path, asynchronous: bool, strategy: str) -> None:
    """One that loads into another model, and both train on."""
    rank, folder = dist.get_rank(), str(tmp_path)
    model = wrap(mixed_precision=BFLOAT16)
    optimizer = adamw(model)
    train(model, optimizer, steps=2, rank=rank)
    zshard.save(folder, model, optimizer, step=2, asynchronous=asynchronous).wait()
    with torch.device("meta"):
        empty = DEEP.make()
    other = FSDP(
        empty,
        device_id=device() if is_real() else None,
        param_init_fn=zshard.uninitialized,
        strategy=strategy,
        mixed_precision=BFLOAT16,
    )
    again = adamw(other)
    assert zshard.load(folder, other, again).step == 2
    assert far(full_state(other, again), full_state(model, optimizer), EXACT) == []
    losses = [train(m, o, rank=rank) for m, o in ((model, optimizer), (other, again))]
    assert losses[1] == pytest.approx(losses[0], **FP32)


@on_device()
def test_checkpoint_loads_into_a_plain_model(tmp_path: Path) -> None:
    model, theirs = wrap(), DEEP.make().to(device())
    train(model, sgd(model), steps=1)
    zshard.save(str(tmp_path), model, step=1)
    zshard.load(str(tmp_path), theirs)
    assert far(on_host(theirs.state_dict()), on_host(model.state_dict()), EXACT) == []


OFFLOADS: dict[str, dict[str, Any]] = {
    "parameters": {"cpu_offload": True},
    "all": {"offload": zshard.Offload(grads=True)},
    "half of the state": {"offload": zshard.Offload(params=False, fraction=0.5)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", OFFLOADS)
@on_device(2)
def test_offload_to_the_host(how: str) -> None:
    usual, ours = wrap(), wrap(**OFFLOADS[how])
    rank = dist.get_rank()
    assert_near(
        trained(ours, adamw(ours), rank=rank), trained(usual, adamw(usual), rank=rank), ADAM
    )


# --- loss scaling, optimizers, parts of a model -------------------------------------------------------


@on_device()
def test_loss_scaling() -> None:
    """Losses in float16 are near those in float32; a step with an infinite gradient changes nothing."""
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    usual, ours = wrap(), wrap(mixed_precision=half)
    optimizer = sgd(ours)
    scaler = zshard.GradScaler(device().type, init_scale=1024.0)

    def step(number: int, factor: float = 1.0) -> float:
        optimizer.zero_grad()
        loss = loss_of(ours(DEEP.batch(number, 0).to(device())).float())
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss)

    losses = [step(number) for number in range(4)]
    assert losses == pytest.approx(train(usual, sgd(usual)), rel=2e-2, abs=1e-3)
    before = on_host(ours.state_dict())
    step(0, 1e30)
    assert far(on_host(ours.state_dict()), before, EXACT) == [] and scaler.get_scale() == 512.0


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "fused": True},
    "Adam": {"lr": 0.01, "foreach": True, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "foreach": True},
    "RMSprop": {"lr": 0.001},
    "Adagrad": {"lr": 0.01},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_device()
def test_optimizers_of_torch(name: str) -> None:
    kind = getattr(torch.optim, name)
    theirs, ours = (trained(m, kind(m.parameters(), **OPTIMIZERS[name])) for m in (plain(), wrap()))
    assert_near(ours, theirs, ADAM)


@on_device()
def test_fully_shard() -> None:
    theirs, ours = plain(), plain()
    for block in ours.blocks:
        zshard.fully_shard(block)
    zshard.fully_shard(ours)
    losses = [train(model, sgd(model, torch.optim)) for model in (theirs, ours)]
    assert losses[1] == pytest.approx(losses[0], **FP32)
    whole = {name: zshard.full_tensor(p) for name, p in ours.named_parameters()}
    assert far(on_host(whole), on_host(dict(theirs.named_parameters())), FP32) == []


def double(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)


@on_device(2)
def test_unsharded_parameters() -> None:
    theirs, ours = plain().cpu(), wrap()
    values = dict(theirs.named_parameters())
    with FSDP.summon_full_params(ours):
        assert far(on_host(dict(ours.named_parameters())), values, EXACT) == []
        double(ours)
    double(theirs)
    assert far(on_host(dict(zshard.whole_named_parameters(ours))), values, EXACT) == []
    norms = {name: torch.tensor(norm) for name, norm in zshard.named_norms(ours).items()}
    assert far(norms, {name: value.norm() for name, value in values.items()}, FP32) == []
    x = DEEP.batch(0, 0)
    with torch.no_grad():
        assert far({"eval": ours.eval()(x.to(device()))}, {"eval": theirs(x)}, FP32) == []


@on_device()
def test_frozen_parts() -> None:
    losses = []
    for library in (torch.optim, zshard):
        model = plain()
        model.blocks[0].requires_grad_(False)
        if library is zshard:
            model = FSDP(model, auto_wrap_policy=DEEP.policy)
        rest = [p for p in model.parameters() if p.requires_grad]
        losses.append(train(model, library.SGD(rest, lr=0.05, momentum=0.9)))
    assert losses[1] == pytest.approx(losses[0], **FP32)


# --- streams, groups, graphs --------------------------------------------------------------------------


def losses_in(streams: list[Any]) -> list[float]:
    """Return the losses of steps that take turns between these streams; None: the default one."""
    model = wrap(mixed_precision=BFLOAT16)
    optimizer, losses = adamw(model), []
    for step in range(6):
        stream, before = streams[step % len(streams)], torch.cuda.current_stream()
        if stream is not None:
            stream.wait_stream(before)
        with torch.cuda.stream(stream):
            optimizer.zero_grad()
            loss = loss_of(model(DEEP.batch(step, 0).to(device())))
            loss.backward()
            optimizer.step()
        if stream is not None:
            before.wait_stream(stream)
        losses.append(float(loss))
    return losses


@on_device(kinds=GPU)
def test_steps_in_other_streams() -> None:
    assert losses_in([torch.cuda.Stream(), torch.cuda.Stream()]) == losses_in([None])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
@pytest.mark.parametrize("backend", ["c10d", "nccl"])
@on_device(4)
def test_hybrid_groups(backend: str, strategy: str) -> None:
    """Four ranks as two hosts of two have the sums of full_shard."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    by = backend if is_real() else "c10d"
    groups = halves[rank // 2], across[rank % 2]
    usual = wrap(transport=by, strategy="full_shard")
    ours = wrap(transport=by, strategy=strategy, process_group=groups)
    theirs = trained(usual, adamw(usual), rank=rank)
    assert_near(trained(ours, adamw(ours), rank=rank), theirs, EXACT)


# --- CUDA graphs: replays have the bits of the same steps without one ---------------------------------

# On a GPU the step is captured once and replayed; over the fakes, which cannot replay, each of
# these steps runs as a capture, which forbids what CUDA forbids (test_cuda_graphs.py).
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


def train_by_graph(repeated: bool, strategy: str, precision: Any) -> Trained:
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_device()
def test_graph_is_bit_identical_to_the_steps(strategy: str, precision: Any) -> None:
    assert_near(
        train_by_graph(True, strategy, precision), train_by_graph(False, strategy, precision), EXACT
    )
