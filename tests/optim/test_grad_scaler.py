"""Loss scaling: either all ranks skip a step or none, and the scale equals torch's under DDP."""

import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import hosts_of
from models import CASES, COMBINATIONS, ddp, differences, loss_of, make, wrapped
from scenarios import Stack, floats, message_of
from spawn import on_ranks
from torch import nn

import zshard

SCALERS = {"zshard": zshard.GradScaler, "torch": torch.amp.GradScaler}
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
SHM = ("full_shard", "shm")


def scaler_of(name="zshard", **options):
    return SCALERS[name]("cpu", **{"init_scale": 1024.0, "growth_interval": 2, **options})


def backward(model, scaler, step=0):
    scaler.scale(loss_of(model(floats(dist.get_rank(), step)))).backward()


def poison(model, rank, bad=math.inf):
    """Put NaN or inf into a gradient that has a shard on `rank`; elsewhere there is none. (Over shm
    small units are on rank 0 alone.)"""
    if dist.get_rank() == rank:
        grad = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
        zshard.to_local(grad).view(-1)[0] = bad


def victim(transport):
    return 0 if transport == "shm" else dist.get_world_size() - 1


# --- one rank's inf -------------------------------------------------------------------------------

STEPS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    # torch's fused optimizers get the result as a tensor, and skip the step internally.
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, None])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("library", "kind"), [("zshard", "SGD"), ("torch", "SGD"), ("zshard", "fused")]
)
@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2, 3)
def test_all_ranks_skip_together(combination, library, kind, early, bad):
    model = wrapped(Stack, combination)
    optimizer = STEPS[kind](model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler, rank = scaler_of(library), victim(combination[1])
    backward(model, scaler)
    if bad is not None:
        poison(model, rank, bad)
    is_finite = all(zshard.to_local(p.grad).isfinite().all() for p in model.parameters())
    assert is_finite == (bad is None or dist.get_rank() != rank)  # only one rank sees it
    if early:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (differences(model.state_dict(), before) == []) == (bad is not None)
    assert scaler.get_scale() == (1024.0 if bad is None else 512.0)


@on_ranks(2)
def test_both_scalers_rescale_what_codes_carry_over():
    """Steps with a change of the scale, which carried errors follow."""
    weights = []
    for library in SCALERS:
        with hosts_of(1, 1) as group:
            torch.manual_seed(0)
            model = zshard.FSDP(nn.Linear(64, 64), process_group=group, wire="bf16", timeout=60)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = scaler_of(library, growth_interval=2000)
            for step in range(6):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
                x = torch.randn(4, 64, generator=generator)
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update(1.0 if step == 2 else None)
            weights.append(model.state_dict())
    assert_same(*weights, "the model")


# --- training -------------------------------------------------------------------------------------


def trained(parallel, model, case, scaler, library):
    """Return (state, scales, losses) of training with two optimizers and overflows on one rank."""
    params = list(model.parameters())
    cls = zshard.SGD if library == "zshard" else torch.optim.SGD
    optimizers = [cls(params[half::2], lr=0.1, momentum=0.9) for half in (0, 1)]
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("library", SCALERS)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["mlp", "net", "odds"])
@on_ranks(2)
def test_training_and_scales_are_bit_identical_to_ddp(name, combination, library):
    case = CASES[name]
    plain = make(case.make)
    theirs = trained(ddp(plain), plain, case, scaler_of("torch"), "torch")
    model = wrapped(case.make, combination, auto_wrap_policy=case.policy)
    assert_same(trained(model, model, case, scaler_of(library), library), theirs, "the training")
    scales = theirs[1]
    assert scales[2] == scales[1] / 2 and max(scales) > 1024.0  # it changed in both directions


@on_ranks(2)
def test_each_optimizer_is_checked_separately():
    """An inf in one optimizer's gradients does not stop the other from stepping; they share the
    scale."""
    model = wrapped(Stack, SHM)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model.blocks, model.head)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = scaler_of()
    backward(model, scaler)
    poison(model.blocks, 0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    changed = {line.partition(":")[0] for line in differences(model.state_dict(), before)}
    assert changed == {"head.weight", "head.bias"}
    assert scaler.get_scale() == 512.0


# --- unsharded models -----------------------------------------------------------------------------


@on_ranks(2)
def test_unsharded_parameters_of_the_optimizer_count():
    """An inf in a parameter that is not sharded, in the same optimizer: one decision for all."""
    model, extra = wrapped(Stack, SHM), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], 0.1)
    before = model.state_dict()
    scaler = scaler_of("torch")
    scaler.scale(loss_of(model(floats(dist.get_rank()))) + extra.sum()).backward()
    if dist.get_rank() == 1:
        extra.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same(model.state_dict(), before, "the model")
    assert scaler.get_scale() == 512.0


@on_ranks(2)
def test_unsharded_models_use_torchs_scaler():
    """Every rank is independent: zshard has no part in this model."""
    plain = make(Stack)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    scaler = scaler_of("torch")
    backward(plain, scaler)
    poison(plain, 1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (1024.0, 512.0)[dist.get_rank()]


@pytest.mark.parametrize("bad", [math.inf, None])
@pytest.mark.parametrize("library", SCALERS)
def test_single_rank_uses_torchs_scaler(library, bad):
    results = []
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
        results.append([net.state_dict(), scaler.state_dict()])
    assert_same(*results, "model and scaler")
    assert results[0][1]["scale"] == (2048.0 if bad is None else 512.0)


# --- mistakes -------------------------------------------------------------------------------------


@on_ranks(2)
def test_unreduced_gradients_are_refused_unchanged():
    model = wrapped(Stack, SHM)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), scaler_of()
    with model.no_sync():
        backward(model, scaler)
    grads = [p.grad.clone() for p in model.parameters()]
    assert "no_sync()" in message_of(lambda: scaler.unscale_(optimizer), RuntimeError)
    assert_same([p.grad for p in model.parameters()], grads, "the gradients")


def test_devices():
    assert zshard.GradScaler().is_enabled()  # torch's default device is missing here
    with pytest.raises(ValueError, match="one of 'cpu', 'cuda', got 'tpu'"):
        zshard.GradScaler("tpu")
    assert issubclass(zshard.GradScaler, torch.amp.GradScaler)
