"""What scripts do beside plain steps, on a GPU: checkpoints, offload, loss scaling, torch's optimizers, errors.

As in test_gpu.py, a function that a rank runs on its device, with plain PyTorch on the
same device as the reference; several ranks are compared with ranks on the host.
"""

from __future__ import annotations

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
    KINDS,
    Start,
    device,
    far,
    is_real,
    on_host,
    sgd,
    train,
    wrap,
)
from models import loss_of, make
from spawn import RankPool
from torch import Tensor

import zshard
from zshard import FSDP, MixedPrecision


@pytest.fixture(params=KINDS)
def two(request: pytest.FixtureRequest, start: Start) -> RankPool:
    """Two ranks that share a device, over gloo."""
    return start(request.param, 2)


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and the optimizer's tensors, by name, on the host."""
    state = on_host(model.state_dict())
    for number, entries in optimizer.state_dict()["state"].items():
        state |= on_host({f"{number} {key}": torch.as_tensor(v) for key, v in entries.items()})
    return state


# --- checkpoints ------------------------------------------------------------------------------------


def saved_and_loaded(folder: str, asynchronous: bool, strategy: str) -> Any:
    """What differs after a load into another model, and after both have trained on."""
    rank = dist.get_rank()
    model = wrap(DEEP, mixed_precision=BFLOAT16)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, DEEP, steps=2, rank=rank)
    handle = zshard.save(folder, model, optimizer, step=2, asynchronous=asynchronous)
    if asynchronous:
        handle.wait()
    with torch.device("meta"):
        empty = DEEP.make()
    other = FSDP(
        empty,
        device_id=device() if is_real() else None,
        param_init_fn=zshard.uninitialized,
        strategy=strategy,
        mixed_precision=BFLOAT16,
    )
    again = zshard.AdamW(other.parameters(), lr=0.01)
    loaded = zshard.load(folder, other, again)
    wrong = far(state_of(other, again), state_of(model, optimizer), EXACT)
    losses = [train(m, o, DEEP, rank=rank) for m, o in ((model, optimizer), (other, again))]
    return loaded.step, wrong, losses


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(two: RankPool, tmp_path: Path, asynchronous: bool, strategy: str) -> None:
    for step, wrong, losses in two.run(saved_and_loaded, str(tmp_path), asynchronous, strategy):
        assert (step, wrong) == (2, [])
        assert losses[1] == pytest.approx(losses[0], **FP32)


def loaded_into_plain(folder: str) -> list[str]:
    model = wrap(DEEP)
    train(model, sgd(model, zshard), DEEP, steps=1)
    zshard.save(folder, model, step=1)
    plain = DEEP.make().to(device())
    zshard.load(folder, plain)
    assert far(on_host(plain.state_dict()), on_host(model.state_dict()), EXACT) == []


def test_checkpoint_loads_into_a_plain_model(one: RankPool, tmp_path: Path) -> None:
    one.run(loaded_into_plain, str(tmp_path))


# --- offload ----------------------------------------------------------------------------------------


OFFLOADS: dict[str, dict[str, Any]] = {
    "parameters": {"cpu_offload": True},
    "all": {"offload": zshard.Offload(grads=True)},
    "half of the state": {"offload": zshard.Offload(params=False, fraction=0.5)},
}


def offloaded(how: str) -> list[str]:
    states = []
    for each in ({}, OFFLOADS[how]):
        model = wrap(DEEP, **each)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, DEEP, rank=dist.get_rank())
        states.append(on_host(model.state_dict()))
    assert far(*states, ADAM) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", OFFLOADS)
def test_offload_to_the_host(two: RankPool, how: str) -> None:
    two.run(offloaded, how)


# --- loss scaling, optimizers, parts of a model -------------------------------------------------------


def scaled() -> tuple[list[float], list[float], bool]:
    """Losses in float16 and float32; whether a step with an infinite gradient changed anything."""
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    plain, ours = wrap(DEEP), wrap(DEEP, mixed_precision=half)
    optimizer = sgd(ours, zshard)
    scaler = zshard.GradScaler(device().type, init_scale=1024.0)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(ours(DEEP.batch(step, 0).to(device())).float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    before = on_host(ours.state_dict())
    scaler.scale(loss_of(ours(DEEP.batch(0, 0).to(device())).float()) * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()
    same = far(on_host(ours.state_dict()), before, EXACT) == [] and scaler.get_scale() == 512.0
    return losses, train(plain, sgd(plain, zshard), DEEP), same


def test_loss_scaling(one: RankPool) -> None:
    ours, plain, same = one.run(scaled)[0]
    assert ours == pytest.approx(plain, rel=2e-2, abs=1e-3)
    assert same


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "fused": True},
    "Adam": {"lr": 0.01, "foreach": True, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "foreach": True},
    "RMSprop": {"lr": 0.001},
    "Adagrad": {"lr": 0.01},
}


def stepped_by_torch(name: str) -> tuple[Any, list[str]]:
    sides = []
    for model in (make(DEEP.make).to(device()), wrap(DEEP)):
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        losses = train(model, optimizer, DEEP)
        sides.append((losses, on_host(model.state_dict())))
    return (sides[0][0], sides[1][0]), far(sides[1][1], sides[0][1], ADAM)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(one: RankPool, name: str) -> None:
    (plain, ours), wrong = one.run(stepped_by_torch, name)[0]
    assert ours == pytest.approx(plain, **ADAM)
    assert wrong == []


def by_fully_shard() -> tuple[list[float], list[float], list[str]]:
    plain, ours = make(DEEP.make).to(device()), make(DEEP.make).to(device())
    for block in ours.blocks:
        zshard.fully_shard(block)
    zshard.fully_shard(ours)
    losses = [train(model, sgd(model), DEEP) for model in (plain, ours)]
    found = {n: zshard.full_tensor(p) for n, p in ours.named_parameters()}
    return losses[0], losses[1], far(on_host(found), on_host(dict(plain.named_parameters())), FP32)


def test_fully_shard(one: RankPool) -> None:
    plain, ours, wrong = one.run(by_fully_shard)[0]
    assert ours == pytest.approx(plain, **FP32)
    assert wrong == []


def looked_at() -> list[str]:
    """What whole-parameter calls on two ranks get wrong."""
    plain, ours = make(DEEP.make), wrap(DEEP)
    values = dict(plain.named_parameters())
    wrong = []
    with FSDP.summon_full_params(ours):
        wrong += far(on_host(dict(ours.named_parameters())), values, EXACT)
        with torch.no_grad():
            for param in ours.parameters():
                param.mul_(2.0)
    doubled = {name: value * 2 for name, value in values.items()}
    wrong += far(on_host(dict(zshard.whole_named_parameters(ours))), doubled, EXACT)
    norms = {name: torch.tensor(norm) for name, norm in zshard.named_norms(ours).items()}
    wrong += far(norms, {name: v.norm() for name, v in doubled.items()}, FP32)
    x = DEEP.batch(0, 0)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2.0)
        expected = plain(x)
        wrong += far({"eval": ours.eval()(x.to(device()))}, {"eval": expected}, FP32)
    assert wrong == []


def test_unsharded_parameters(two: RankPool) -> None:
    two.run(looked_at)


def with_frozen_parts() -> tuple[list[float], list[float]]:
    found = []
    for side in ("plain", "ours"):
        model = make(DEEP.make).to(device())
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        if side == "ours":
            model = FSDP(model, auto_wrap_policy=DEEP.policy)
        trained = [p for p in model.parameters() if p.requires_grad]
        library = zshard if side == "ours" else torch.optim
        found.append(train(model, library.SGD(trained, lr=0.05, momentum=0.9), DEEP))
    return found[0], found[1]


def test_frozen_parts(one: RankPool) -> None:
    plain, ours = one.run(with_frozen_parts)[0]
    assert ours == pytest.approx(plain, **FP32)


# --- errors, streams -----------------------------------------------------------------------------------


def in_streams() -> tuple[list[float], list[float]]:
    """Losses of steps in the default stream, and of steps that take turns between two others."""
    found = []
    for streams in ([None], [torch.cuda.Stream(), torch.cuda.Stream()]):
        model = wrap(DEEP, mixed_precision=BFLOAT16)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(6):
            stream = streams[step % len(streams)]
            before = torch.cuda.current_stream()
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
        found.append(losses)
    return found[0], found[1]


def test_steps_in_other_streams(start: Start) -> None:
    plain, ours = start("gpu").run(in_streams)[0]
    assert ours == plain


def hybrid(backend: str, strategy: str) -> Any:
    """Losses of four ranks as two hosts of two; of full_shard, which has the same sums."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found = []
    for options in (
        {"strategy": "full_shard"},
        {"strategy": strategy, "process_group": (halves[rank // 2], across[rank % 2])},
    ):
        by = backend if is_real() else "c10d"
        model = wrap(DEEP, transport=by, **options)
        losses = train(model, zshard.AdamW(model.parameters(), lr=0.01), DEEP, rank=rank)
        found.append((losses, on_host(model.state_dict())))
    return found[0][0], found[1][0], far(found[0][1], found[1][1], EXACT)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
@pytest.mark.parametrize("backend", ["c10d", "nccl"])
@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_groups(start: Start, kind: str, backend: str, strategy: str) -> None:
    for full, ours, wrong in start(kind, 4, backend).run(hybrid, backend, strategy):
        assert ours == full
        assert wrong == []
