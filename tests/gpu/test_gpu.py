"""Training on a GPU is training in plain PyTorch: numbers, memory, errors, on one GPU by one rank.

What is torch's own on a GPU (its allocator, streams, cuBLAS) is compared by tolerances
that are stated in gpus.py; what is zshard's on both sides, by bits. The kernels are those of
test_cuda_kernels.py, test_cuda_updates.py and test_cuda_wire.py, which run again on the real driver. Several ranks:
test_gpu_ranks.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from c_compile import ROOT
from gpus import (
    ADAM,
    BF16,
    BFLOAT16,
    DEEP,
    EXACT,
    FP32,
    Deep,
    Start,
    device,
    environment,
    far,
    is_real,
    on_host,
    sgd,
    train,
    wrap,
)
from models import CASES, Case, loss_of, make
from spawn import RankPool
from torch import Tensor, nn

import zshard
from zshard import FSDP, MixedPrecision, ShardingStrategy, _core

NAMES = ("mlp", "net", "tied", "conv")


# --- one rank: the numbers of plain PyTorch --------------------------------------------------------


def plain_and_sharded(name: str, strategy: str) -> tuple[Any, Any]:
    case = CASES[name]
    plain = make(case.make).to(device())
    ours = wrap(case, strategy=strategy)
    sides = (plain, sgd(plain)), (ours, sgd(ours, zshard))
    losses = [train(model, optimizer, case) for model, optimizer in sides]
    assert {p.device for p in ours.parameters()} == {device()}
    return losses, far(ours.state_dict(), plain.state_dict(), FP32)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", [each.value for each in ShardingStrategy])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_matches_torch(one: RankPool, name: str, strategy: str) -> None:
    ((plain, ours), wrong) = one.run(plain_and_sharded, name, strategy)[0]
    assert ours == pytest.approx(plain, **FP32)
    assert wrong == []


def adamw_of_both() -> tuple[Any, Any]:
    plain = make(DEEP.make).to(device())
    ours = wrap(DEEP)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    mine = zshard.AdamW(ours.parameters(), lr=0.01, weight_decay=0.1)
    losses = train(plain, theirs, DEEP, 10), train(ours, mine, DEEP, 10)
    return losses, far(ours.state_dict(), plain.state_dict(), ADAM)


def test_adamw_matches_torchs_fused_one(one: RankPool) -> None:
    ((plain, ours), wrong) = one.run(adamw_of_both)[0]
    assert ours == pytest.approx(plain, **ADAM)
    assert wrong == []


def by_hand(case: Case, steps: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    """Mixed precision as one writes it without a library: a bfloat16 copy of fp32 parameters."""
    master = make(case.make).to(device())
    low = copy.deepcopy(master).bfloat16()
    optimizer = sgd(master)
    losses = []
    for step in range(steps):
        for coarse, fine in zip(low.parameters(), master.parameters(), strict=True):
            coarse.data.copy_(fine.data)
            coarse.grad = None
        batch = case.batch(step, 0).to(device())
        loss = loss_of(low(batch.bfloat16() if batch.is_floating_point() else batch))
        loss.backward()
        for coarse, fine in zip(low.parameters(), master.parameters(), strict=True):
            fine.grad = coarse.grad.float()
        optimizer.step()
        losses.append(float(loss))
    return losses, master.state_dict()


def mixed_and_by_hand(name: str, strategy: str) -> tuple[Any, Any, Any]:
    case = CASES[name]
    expected, values = by_hand(case)
    ours = wrap(case, strategy=strategy, mixed_precision=BFLOAT16)
    losses = train(ours, sgd(ours, zshard), case)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    return losses, expected, far(ours.state_dict(), values, BF16)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("strategy", [each.value for each in ShardingStrategy])
@pytest.mark.parametrize("name", ["mlp", "net", "tied"])
def test_mixed_precision_matches_a_loop_by_hand(one: RankPool, name: str, strategy: str) -> None:
    ours, expected, wrong = one.run(mixed_and_by_hand, name, strategy)[0]
    assert ours == pytest.approx(expected, **BF16)
    assert wrong == []


def in_backward_and_after(precision: Any) -> list[str]:
    states = []
    for in_backward in (False, True):
        model = wrap(DEEP, mixed_precision=precision)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        if in_backward:
            model.optimizer_in_backward(optimizer)
        train(model, optimizer, DEEP)
        states.append(on_host(model.state_dict()))
    assert far(*states, EXACT) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
def test_optimizer_in_backward_is_bit_identical_to_a_step(one: RankPool, precision: Any) -> None:
    one.run(in_backward_and_after, precision)


def with_and_without_checkpoints(precision: Any) -> tuple[Any, Any]:
    found = []
    for checkpointed in (False, True):
        case = Case(functools.partial(Deep, checkpointed=checkpointed), DEEP.draw)
        model = wrap(case, mixed_precision=precision)
        losses = train(model, sgd(model, zshard), case)
        found.append((losses, on_host(model.state_dict())))
    return found[0][0], (found[1][0], far(found[0][1], found[1][1], FP32))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
def test_activation_checkpointing_changes_nothing(one: RankPool, precision: Any) -> None:
    expected, (ours, wrong) = one.run(with_and_without_checkpoints, precision)[0]
    assert ours == pytest.approx(expected, **FP32)
    assert wrong == []


def gradients_of_backwards(how: str, dtype: torch.dtype) -> None:
    plain, sums = make(DEEP.make).to(device(), dtype), {}
    ours = wrap(DEEP, mixed_precision=MixedPrecision(param_dtype=dtype))
    for step in range(4):
        batch = DEEP.batch(step, 0).to(device())
        plain.zero_grad()
        loss_of(plain(batch.to(dtype))).backward()
        for name, p in plain.named_parameters():
            sums[name] = sums.get(name, 0.0) + p.grad.float()
        waits = how == "no_sync" and step < 3
        with ours.no_sync() if waits else contextlib.nullcontext():
            loss_of(ours(batch)).backward()
    with FSDP.summon_full_params(ours, with_grads=True):
        whole = {name: p.grad.clone() for name, p in ours.named_parameters()}
    assert far(whole, sums, FP32) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["no_sync", "accumulated"])
def test_gradients_add_up_in_float32(one: RankPool, how: str, dtype: torch.dtype) -> None:
    one.run(gradients_of_backwards, how, dtype)


def clipped() -> tuple[float, float, list[str]]:
    plain, ours = make(DEEP.make).to(device()), wrap(DEEP)
    for model in (plain, ours):
        loss_of(model(DEEP.batch(0, 0).to(device()))).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    found = ours.clip_grad_norm_(0.01)
    assert found.device == device()
    pairs = [dict(model.named_parameters()) for model in (ours, plain)]
    grads = [{name: p.grad.flatten() for name, p in params.items()} for params in pairs]
    return float(found), float(expected), far(*grads, FP32)


def test_clipping(one: RankPool) -> None:
    found, expected, wrong = one.run(clipped)[0]
    assert found == pytest.approx(expected, **FP32) and expected > 0.01
    assert wrong == []


# --- one rank: states, set-up, compilers ------------------------------------------------------------


def there_and_back() -> tuple[list[str], list[float], list[float]]:
    """Saved after two steps, loaded into a plain model, and into another sharded one that goes on."""
    model = wrap(DEEP, mixed_precision=BFLOAT16)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, DEEP, steps=2)
    saved, stepped = on_host(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain = DEEP.make()
    plain.load_state_dict(saved)
    second = wrap(Case(DEEP.make, DEEP.draw), mixed_precision=BFLOAT16, strategy="no_shard")
    again = zshard.AdamW(second.parameters(), lr=0.01)
    second.load_state_dict(saved)
    again.load_state_dict(stepped)
    wrong = far(plain.state_dict(), on_host(second.state_dict()), EXACT)
    return wrong, train(model, optimizer, DEEP), train(second, again, DEEP)


def test_state_dicts_round_trip(one: RankPool) -> None:
    wrong, went_on, resumed = one.run(there_and_back)[0]
    assert wrong == []
    assert resumed == pytest.approx(went_on, **FP32)


def fill(module: nn.Module) -> None:
    """Values that do not depend on where they are drawn."""
    for param in module.parameters(recurse=False):
        ramp = torch.linspace(-0.05, 0.05, param.numel()).view(param.shape)
        param.data.copy_(ramp)


def set_up(whence: str) -> tuple[list[float], list[float], set[str]]:
    """Losses of a model that comes to the device by device_id, and of one that was there."""
    plain = DEEP.make().apply(fill).to(device())
    options = {"device_id": 0} if is_real() else {}
    if whence == "meta":
        with torch.device("meta"):
            model = DEEP.make()
        options["param_init_fn"] = fill
    else:
        model = DEEP.make().apply(fill)
    ours = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.float32), **options)
    losses = [train(each, sgd(each), DEEP) for each in (plain, ours)]
    return losses[0], losses[1], {p.device.type for p in ours.parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whence", ["cpu", "meta"])
def test_device_id_moves_the_model(one: RankPool, whence: str) -> None:
    plain, ours, devices = one.run(set_up, whence)[0]
    assert ours == pytest.approx(plain, **FP32)
    assert len(devices) == 1


def compiled_blocks(precision: Any) -> tuple[list[float], list[float]]:
    """Losses with blocks compiled, and without: by inductor on a GPU, which has a compiler there."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = wrap(DEEP, mixed_precision=precision)
        for block in model.blocks if compiled else ():
            block.compile(backend="inductor" if is_real() else "aot_eager")
        found.append(train(model, sgd(model, zshard), DEEP))
    return found[0], found[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
def test_compiled_blocks(one: RankPool, precision: Any) -> None:
    eager, compiled = one.run(compiled_blocks, precision, timeout=240)[0]
    assert compiled == pytest.approx(eager, **(FP32 if precision is None else BF16))


# --- one rank: memory -------------------------------------------------------------------------------


def memory_by_step(precision: Any, strategy: str) -> dict[str, Any]:
    """What zshard counts after each of some steps, what it predicted, and torch's allocator's."""
    case = Case(lambda: Deep(width=256, depth=4), lambda g: torch.randn(32, 256, generator=g))
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS takes its workspaces from torch
        warm = torch.randn(32, 32, device=device(), dtype=dtype, requires_grad=True)
        torch.addmm(warm, warm, warm).sum().backward()
    del warm
    first = torch.cuda.memory_stats() if is_real() else {}
    before = first.get("allocated_bytes.all.current", 0)
    model = wrap(case, mixed_precision=precision, strategy=strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    found: dict[str, Any] = {"now": [], "allocated": [], "peak": [], "counts": [], "mappings": []}
    for _ in range(5):
        if is_real():
            torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, case, steps=1)
        found["now"].append(model.memory("now"))
        found["mappings"].append(_core.mappings())
        if is_real():
            stats = torch.cuda.memory_stats()
            names = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
            found["counts"].append([stats[name] - first[name] for name in names])
            found["allocated"].append(stats["allocated_bytes.all.current"] - before)
            found["peak"].append(stats["allocated_bytes.all.peak"])
    found["predicted"], found["most"] = model.memory("predicted"), model.memory("peak")
    found["torchs grads"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    found["counters"] = sum(
        state["step"].nbytes for state in optimizer.state.values()
    )  # on the host
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])
def test_memory_is_constant_and_predicted(one: RankPool, precision: Any, strategy: str) -> None:
    found = one.run(memory_by_step, precision, strategy)[0]
    parts = found["predicted"]
    # Between passes the model has what stays. One rank's gradients are full ones, of the script.
    rest = {part: 0 for part in ("grads", "slots", "buckets")}
    stays = parts["total"] - sum(parts[part] for part in rest)
    for now in found["now"]:
        assert now == {**parts, **rest, "total": stays}
    assert found["most"] == parts
    assert len(set(found["mappings"])) == 1, found["mappings"]
    if not found["allocated"]:
        return  # the host's allocator says nothing
    assert len(set(found["allocated"])) == 1 and len(set(found["peak"][1:])) == 1, found
    assert found["counts"][1:] == [found["counts"][1]] * len(found["counts"][1:])
    assert found["counts"][0][:2] == [0, 0]
    held = stays + found["torchs grads"] - found["counters"]
    # torch rounds each allocation up to 512 bytes, and what is large to 2 MiB.
    assert held <= found["allocated"][0] <= held * 1.02 + (8 << 20), (held, found)


def without_memory() -> tuple[str, bool, list[float]]:
    """What comes where the copy in bfloat16 has no room; whether a smaller model trains then."""
    total = torch.cuda.get_device_properties(0).total_memory
    model = Deep(width=4096, depth=2).to(device())  # 0.5 GiB, and a copy of half of that
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (16 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        FSDP(model, mixed_precision=BFLOAT16, memory_limit=None)
        x = torch.randn(1, 4096, device=device())
        loss_of(model(x)).backward()
    except torch.OutOfMemoryError as error:
        kind = f"{type(error).__name__}: {error}"
    else:
        kind = "nothing"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    small = wrap(DEEP, mixed_precision=BFLOAT16)
    return kind, torch.cuda.memory_allocated() > 0, train(small, sgd(small, zshard), DEEP)


def test_lack_of_memory_raises_torchs_error(start: Start) -> None:
    kind, _, losses = start("gpu").run(without_memory)[0]
    assert kind.startswith("OutOfMemoryError: CUDA out of memory"), kind
    assert [loss for loss in losses if not math.isfinite(loss)] == []


# --- the kernels' bits --------------------------------------------------------------------------------


@pytest.mark.needs_fma
@pytest.mark.parametrize("kernels", ["gpu", pytest.param("copies", marks=pytest.mark.thorough)])
def test_kernels_are_bit_identical_to_the_cpu(kernels: str) -> None:
    """All kernels' tests on the GPU; with stand-ins, what brings their arrays there."""
    only = "" if kernels == "gpu" else "factor_is_not_rounded or norms_are_joined or reads_device"
    env = environment(kernels if kernels == "gpu" else "stand-in")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--whole"]
    done = subprocess.run(
        [
            *command,
            *(["-k", only] if only else []),
            *map(str, sorted((ROOT / "tests" / "gpu").glob("test_cuda_[kuw]*.py"))),
        ],
        env={**os.environ, **env, "ZSHARD_TEST_KERNELS": kernels},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
