"""Training on a GPU is training in plain PyTorch: numbers, memory, errors, on one GPU by one rank.

Torch's own parts on a GPU (its allocator, streams, cuBLAS) are compared within the tolerances of
gpus.py, zshard's parts bit for bit. The kernels are those of test_cuda_kernels.py and
test_cuda_updates.py, which run again on the real driver. Several ranks: test_gpu_ranks.py.
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
    GPU,
    Deep,
    adamw,
    assert_near,
    device,
    environment,
    far,
    is_real,
    on_device,
    on_host,
    plain,
    sgd,
    train,
    trained,
    wrap,
)
from models import CASES, Case, loss_of
from torch import Tensor, nn

import zshard
from zshard import FSDP, MixedPrecision, ShardingStrategy, _core

strategies = pytest.mark.parametrize("strategy", [each.value for each in ShardingStrategy])
precisions = pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["fp32", "bf16"])

# --- one rank: the numbers of plain PyTorch --------------------------------------------------------


@pytest.mark.sampled(8)
@strategies
@pytest.mark.parametrize("name", ["mlp", "net", "tied", "conv"])
@on_device()
def test_fp32_matches_torch(name: str, strategy: str) -> None:
    case = CASES[name]
    theirs, ours = plain(case), wrap(case, strategy=strategy)
    reference = trained(theirs, sgd(theirs, torch.optim), case)
    assert_near(trained(ours, sgd(ours), case), reference, FP32)
    assert {p.device for p in ours.parameters()} == {device()}


@on_device()
def test_adamw_matches_torchs_fused_one() -> None:
    theirs, ours = plain(), wrap()
    fused = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    mine = zshard.AdamW(ours.parameters(), lr=0.01, weight_decay=0.1)
    assert_near(trained(ours, mine, steps=10), trained(theirs, fused, steps=10), ADAM)


def by_hand(case: Case, steps: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    """Mixed precision as one writes it without a library: a bfloat16 copy of fp32 parameters."""
    master = plain(case)
    low = copy.deepcopy(master).bfloat16()
    optimizer = sgd(master, torch.optim)
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
    return losses, on_host(master.state_dict())


@pytest.mark.sampled(6)
@strategies
@pytest.mark.parametrize("name", ["mlp", "net", "tied"])
@on_device()
def test_mixed_precision_matches_a_loop_by_hand(name: str, strategy: str) -> None:
    case = CASES[name]
    ours = wrap(case, strategy=strategy, mixed_precision=BFLOAT16)
    assert_near(trained(ours, sgd(ours), case), by_hand(case), BF16)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


@pytest.mark.sampled(2)
@precisions
@on_device()
def test_optimizer_in_backward_is_bit_identical_to_a_step(precision: Any) -> None:
    usual, ours = (wrap(mixed_precision=precision) for _ in range(2))
    optimizer = adamw(ours)
    ours.optimizer_in_backward(optimizer)
    assert_near(trained(ours, optimizer), trained(usual, adamw(usual)), EXACT)


@pytest.mark.sampled(2)
@precisions
@on_device()
def test_activation_checkpointing_changes_nothing(precision: Any) -> None:
    usual = wrap(mixed_precision=precision)
    case = Case(functools.partial(Deep, checkpointed=True), DEEP.draw)
    ours = wrap(case, mixed_precision=precision)
    assert_near(trained(ours, sgd(ours)), trained(usual, sgd(usual)), FP32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["no_sync", "accumulated"])
@on_device()
def test_gradients_add_up_in_float32(how: str, dtype: torch.dtype) -> None:
    theirs, sums = plain().to(dtype), {}
    ours = wrap(mixed_precision=MixedPrecision(param_dtype=dtype))
    for step in range(4):
        batch = DEEP.batch(step, 0).to(device())
        theirs.zero_grad()
        loss_of(theirs(batch.to(dtype))).backward()
        for name, p in theirs.named_parameters():
            sums[name] = sums.get(name, 0.0) + p.grad.float()
        waits = how == "no_sync" and step < 3
        with ours.no_sync() if waits else contextlib.nullcontext():
            loss_of(ours(batch)).backward()
    with FSDP.summon_full_params(ours, with_grads=True):
        whole = {name: p.grad.clone() for name, p in ours.named_parameters()}
    assert far(whole, sums, FP32) == []


@on_device()
def test_clipping() -> None:
    theirs, ours = plain(), wrap()
    for model in (theirs, ours):
        loss_of(model(DEEP.batch(0, 0).to(device()))).backward()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    norm = ours.clip_grad_norm_(0.01)
    assert norm.device == device()
    assert float(norm) == pytest.approx(float(expected), **FP32) and expected > 0.01
    pairs = [dict(model.named_parameters()) for model in (ours, theirs)]
    assert (
        far(*[{name: p.grad.flatten() for name, p in params.items()} for params in pairs], FP32)
        == []
    )


# --- one rank: states, set-up, compilers ------------------------------------------------------------


@on_device()
def test_state_dicts_round_trip() -> None:
    """Saved after two steps, loaded into a plain model, and into another sharded one that
    continues."""
    model = wrap(mixed_precision=BFLOAT16)
    optimizer = adamw(model)
    train(model, optimizer, steps=2)
    saved, stepped = on_host(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    theirs = DEEP.make()
    theirs.load_state_dict(saved)
    second = wrap(mixed_precision=BFLOAT16, strategy="no_shard")
    again = adamw(second)
    second.load_state_dict(saved)
    again.load_state_dict(stepped)
    assert far(theirs.state_dict(), on_host(second.state_dict()), EXACT) == []
    assert train(second, again) == pytest.approx(train(model, optimizer), **FP32)


def fill(module: nn.Module) -> None:
    """Values that do not depend on where they are drawn."""
    for param in module.parameters(recurse=False):
        ramp = torch.linspace(-0.05, 0.05, param.numel()).view(param.shape)
        param.data.copy_(ramp)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whence", ["cpu", "meta"])
@on_device()
def test_device_id_moves_the_model(whence: str) -> None:
    theirs = DEEP.make().apply(fill).to(device())
    options: dict[str, Any] = {"device_id": 0} if is_real() else {}
    if whence == "meta":
        options["param_init_fn"] = fill
    with torch.device(whence):
        model = DEEP.make().apply(fill) if whence == "cpu" else DEEP.make()
    ours = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.float32), **options)
    losses = [train(each, sgd(each, torch.optim)) for each in (theirs, ours)]
    assert losses[1] == pytest.approx(losses[0], **FP32)
    assert len({p.device.type for p in ours.parameters()}) == 1


@pytest.mark.sampled(2)
@precisions
@on_device()
def test_compiled_blocks(precision: Any) -> None:
    """By inductor on a GPU, which has a compiler there."""
    torch._dynamo.reset()
    eager, compiled = (wrap(mixed_precision=precision) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend="inductor" if is_real() else "aot_eager")
    losses = [train(model, sgd(model)) for model in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], **(FP32 if precision is None else BF16))


# --- one rank: memory -------------------------------------------------------------------------------


def warm_up_cublas() -> None:
    """Have cuBLAS take its workspaces from torch."""
    for dtype in (torch.float32, torch.bfloat16):
        warm = torch.randn(32, 32, device=device(), dtype=dtype, requires_grad=True)
        torch.addmm(warm, warm, warm).sum().backward()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@precisions
@on_device()
def test_memory_is_constant_and_predicted(precision: Any, strategy: str) -> None:
    case = Case(lambda: Deep(width=256, depth=4), lambda g: torch.randn(32, 256, generator=g))
    warm_up_cublas()
    first = torch.cuda.memory_stats() if is_real() else {}
    model = wrap(case, mixed_precision=precision, strategy=strategy)
    optimizer, between, mappings = adamw(model), [], set()
    counts, allocated, peaks = [], [], []
    for _ in range(5):
        if is_real():
            torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, case, steps=1)
        between.append(model.memory("now"))
        mappings.add(_core.mappings())
        if is_real():
            stats = torch.cuda.memory_stats()
            names = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
            counts.append([stats[name] - first[name] for name in names])
            allocated.append(stats["allocated_bytes.all.current"])
            peaks.append(stats["allocated_bytes.all.peak"])
    parts = model.memory("predicted")
    # Between passes the model has what stays. One rank's gradients are full ones, of the script.
    rest = {part: 0 for part in ("grads", "slots", "buckets")}
    stays = parts["total"] - sum(parts[part] for part in rest)
    assert between == [{**parts, **rest, "total": stays}] * 5
    assert model.memory("peak") == parts
    assert len(mappings) == 1, mappings
    if not is_real():
        return  # the host's allocator says nothing
    assert len(set(allocated)) == 1 and len(set(peaks[1:])) == 1, (allocated, peaks)
    assert counts[1:] == [counts[1]] * len(counts[1:]) and counts[0][:2] == [0, 0], counts
    grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    held = stays + grads - sum(state["step"].nbytes for state in optimizer.state.values())
    # torch rounds each allocation up to 512 bytes, and large ones to 2 MiB.
    allocated[0] -= first.get("allocated_bytes.all.current", 0)
    assert held <= allocated[0] <= held * 1.02 + (8 << 20), (held, allocated)


@on_device(kinds=GPU)
def test_lack_of_memory_raises_torchs_error() -> None:
    """The copy in bfloat16 has no room; then a smaller model trains."""
    total = torch.cuda.get_device_properties(0).total_memory
    model = Deep(width=4096, depth=2).to(device())  # 0.5 GiB, and a copy of half of that
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (16 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            FSDP(model, mixed_precision=BFLOAT16, memory_limit=None)
            loss_of(model(torch.randn(1, 4096, device=device()))).backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    small = wrap(mixed_precision=BFLOAT16)
    assert all(map(math.isfinite, train(small, sgd(small))))


# --- the kernels' bits --------------------------------------------------------------------------------


@pytest.mark.needs_fma
@pytest.mark.parametrize("kernels", ["gpu", pytest.param("copies", marks=pytest.mark.thorough)])
def test_kernels_are_bit_identical_to_the_cpu(kernels: str) -> None:
    """All kernels' tests on the GPU; with fakes, only the transport of their arrays."""
    only = [] if kernels == "gpu" else ["-k", "factor_is_not or norms_are_joined or reads_device"]
    env = environment(kernels if kernels == "gpu" else "stand-in")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--whole"]
    done = subprocess.run(
        [*command, *only, *map(str, sorted((ROOT / "tests" / "gpu").glob("test_cuda_[ku]*.py")))],
        env={**os.environ, **env, "ZSHARD_TEST_KERNELS": kernels},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
