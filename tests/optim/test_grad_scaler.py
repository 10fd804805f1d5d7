"""Loss scaling: either all ranks skip a step or none, and the scale equals torch's under DDP."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from groups import hosts_of
from models import CASES, COMBINATIONS, ddp, differences, loss_of, make, wrapped
from scenarios import Stack, floats, message_of
from spawn import on_ranks, ranks
from torch import nn

import zshard

SCALERS = {"zshard": zshard.GradScaler, "torch": torch.amp.GradScaler}
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


def scaler_of(name, **options):
    return SCALERS[name]("cpu", **{"init_scale": 1024.0, "growth_interval": 2, **options})


def poison(model, rank, bad=math.inf):
    """Put NaN or inf into a gradient that has a shard on `rank`; elsewhere there is none. (Over shm
    small units are on rank 0 alone.)"""
    if dist.get_rank() == rank:
        grad = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
        zshard.to_local(grad).view(-1)[0] = bad


def victim(transport):
    return 0 if transport == "shm" else dist.get_world_size() - 1


# --- one rank's inf --------------------------------------------------------------------------------


def one_step(combination, library, bad, early):
    """Return (was the step skipped, scale afterwards, inf found by torch's own check of this rank's
    gradients)."""
    model = wrapped(Stack, combination)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = scaler_of(library)
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    if bad is not None:
        poison(model, victim(combination[1]), bad)
    finite = all(zshard.to_local(p.grad).isfinite().all() for p in model.parameters())
    if early:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return differences(model.state_dict(), before) == [], scaler.get_scale(), finite


@pytest.mark.sampled(6)
@ranks(2, 3)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("library", SCALERS)
@pytest.mark.parametrize("combination", SHARDED)
def test_all_ranks_skip_together(pool, combination, library, early):
    for bad in (math.inf, -math.inf, math.nan):
        found = pool.run(one_step, combination, library, bad, early)
        assert sorted(finite for *_, finite in found) == [False] + [True] * (pool.world - 1)
        assert [result[:2] for result in found] == [(True, 512.0)] * pool.world
    assert (
        pool.run(one_step, combination, library, None, early)
        == [(False, 1024.0, True)] * pool.world
    )


def fused_step(bad):
    """torch's fused optimizers get the result as a tensor, and skip by themselves."""
    model = wrapped(Stack, ("full_shard", "shm"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = scaler_of("zshard")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    if bad:
        poison(model, 0)
    scaler.step(optimizer)
    scaler.update()
    return differences(model.state_dict(), before) == [], scaler.get_scale()


def test_fused_optimizers_skip_as_well(pool2):
    assert pool2.run(fused_step, True) == [(True, 512.0)] * 2
    assert pool2.run(fused_step, False) == [(False, 1024.0)] * 2


def with_codes(library):
    """Return the weight after steps with a change of the scale, which carried errors follow."""
    with hosts_of(1, 1) as group:
        torch.manual_seed(0)
        model = zshard.FSDP(nn.Linear(64, 64), process_group=group, wire="bf16", timeout=60)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = scaler_of(library, growth_interval=2000)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(
                4, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
            )
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(1.0 if step == 2 else None)
        return model.state_dict()["weight"]


def test_both_scalers_rescale_what_codes_carry_over(pool2):
    ours, theirs = (pool2.run(with_codes, library)[0] for library in SCALERS)
    assert torch.equal(ours, theirs)


# --- training --------------------------------------------------------------------------------------


def trained(parallel, model, case, scaler, library):
    """Return (state, scales, losses) of training with two optimizers and overflows on one rank."""
    named = list(model.named_parameters())
    cls = zshard.SGD if library == "zshard" else torch.optim.SGD
    groups = ([p for i, (_, p) in enumerate(named) if i % 2 == half] for half in (0, 1))
    optimizers = [cls(group, lr=0.1, momentum=0.9) for group in groups]
    scales, losses = [], []
    for step in range(9):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(parallel(case.batch(step, dist.get_rank())))
        # One rank's loss is too large: after the mean over ranks some gradients are inf.
        huge = math.inf if step in (2, 5) and dist.get_rank() == 1 else 1.0
        scaler.scale(loss * huge).backward()
        for optimizer in optimizers[: 1 + step % 2]:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return model.state_dict(), scales, losses


def compare(name, combination, library):
    case = CASES[name]
    plain = make(case.make)
    parallel = ddp(plain, find_unused_parameters=case.unused)
    state, scales, losses = trained(parallel, plain, case, scaler_of("torch"), "torch")
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy)
    ours = trained(model, model, case, scaler_of(library), library)
    return differences(ours[0], state), ours[1] == scales, ours[2] == losses, scales


@pytest.mark.sampled(5)
@pytest.mark.parametrize("library", SCALERS)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["mlp", "net", "odds"])
def test_training_and_scales_are_bit_identical_to_ddp(pool2, name, combination, library):
    for wrong, same_scales, same_losses, scales in pool2.run(compare, name, combination, library):
        assert wrong == [] and same_scales and same_losses
        assert scales[2] == scales[1] / 2 and max(scales) > 1024.0  # it changed in both directions


def clipped(combination):
    """unscale_, clip, step, update; one rank has an inf in the middle."""
    model, other = wrapped(Stack, combination), wrapped(Stack, combination)
    scaler, scales, norms = scaler_of("zshard"), [], []
    for step in range(4):
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, other)]
        scaler.scale(loss_of(model(floats(dist.get_rank(), step)))).backward()
        loss_of(other(floats(dist.get_rank(), step))).backward()
        if step == 2:
            poison(model, victim(combination[1]))
        scaler.unscale_(optimizers[0])
        norms.append([float(net.clip_grad_norm_(0.05)) for net in (model, other)])
        scaler.step(optimizers[0])
        scaler.update()
        scales.append(scaler.get_scale())
        if step != 2:
            optimizers[1].step()
        for net in (model, other):
            net.zero_grad()
    return scales, norms, differences(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("combination", SHARDED)
def test_unscale_clip_step_update(pool2, combination):
    first, second = pool2.run(clipped, combination)
    assert first[:2] == second[:2] or math.isnan(first[1][2][0])
    scales, norms, wrong = first
    assert scales == second[0] == [1024.0, 2048.0, 1024.0, 1024.0]
    assert wrong == second[2] == []  # powers of two: scaling changes no bit
    for step, (ours, expected) in enumerate(norms):
        assert ours == expected if step != 2 else not math.isfinite(ours)


@on_ranks(2)
def test_each_optimizer_is_checked_separately():
    """An inf in one optimizer's gradients does not stop the other from stepping; they share the
    scale."""
    model = wrapped(Stack, ("full_shard", "shm"))
    first = torch.optim.SGD(model.blocks.parameters(), 0.1)
    second = torch.optim.SGD(model.head.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = scaler_of("zshard")
    scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    poison(model.blocks, 0)
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    changed = {line.partition(":")[0] for line in differences(model.state_dict(), before)}
    assert changed == {"head.weight", "head.bias"}
    assert scaler.get_scale() == 512.0


# --- unsharded models ------------------------------------------------------------------------------


@on_ranks(2)
def test_unsharded_parameters_of_the_optimizer_count():
    """An inf in a parameter that is not sharded, in the same optimizer: one decision for all."""
    model, extra = wrapped(Stack, ("full_shard", "shm")), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], 0.1)
    before = model.state_dict()
    scaler = scaler_of("torch")
    scaler.scale(loss_of(model(floats(dist.get_rank()))) + extra.sum()).backward()
    if dist.get_rank() == 1:
        extra.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert differences(model.state_dict(), before) == []
    assert scaler.get_scale() == 512.0


def not_sharded():
    """Every rank is independent: zshard has no part in this model."""
    plain = make(Stack)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    scaler = scaler_of("torch")
    scaler.scale(loss_of(plain(floats(0)))).backward()
    poison(plain, 1)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_unsharded_models_use_torchs_scaler(pool2):
    assert pool2.run(not_sharded) == [1024.0, 512.0]


@pytest.mark.parametrize("bad", [math.inf, None])
@pytest.mark.parametrize("library", SCALERS)
def test_single_rank_uses_torchs_scaler(library, bad):
    found = []
    for net in (make(Stack), zshard.FSDP(make(Stack))):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = scaler_of(library)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(net(floats(0, step)))).backward()
            if bad is not None and step == 1:
                net.head.bias.grad[0] = bad
            scaler.step(optimizer)
            scaler.update()
        found.append((net.state_dict(), scaler.state_dict()))
    assert differences(*(state for state, _ in found)) == []
    assert found[0][1] == found[1][1]
    assert found[0][1]["scale"] == (2048.0 if bad is None else 512.0)


# --- mistakes --------------------------------------------------------------------------------------


@on_ranks(2)
def test_unreduced_gradients_are_refused_unchanged():
    model = wrapped(Stack, ("full_shard", "shm"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = scaler_of("zshard")
    with model.no_sync():
        scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    message = message_of(lambda: scaler.unscale_(optimizer), RuntimeError)
    wrong = differences([p.grad for p in model.parameters()], grads)
    assert "no_sync()" in message and wrong == []


def test_devices():
    assert zshard.GradScaler().is_enabled()  # torch's default device is missing here
    with pytest.raises(ValueError, match="one of 'cpu', 'cuda', got 'tpu'"):
        zshard.GradScaler("tpu")
    assert issubclass(zshard.GradScaler, torch.amp.GradScaler)
