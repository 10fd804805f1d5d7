"""Clipping and unscaling without a pass over the gradients: their squares come from the sums over
the ranks, and the step multiplies. Whatever a script does in between must see what it would see
without this.
"""

import copy
import ctypes
import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, loss_of, wrapped
from scenarios import Stack, floats
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP, _core

SHARDED = [each for each in COMBINATIONS if each[0] != "no_shard"]


# --- norms from the sums --------------------------------------------------------------------------


def norms(combination, steps):
    """The norms of the same gradients on all ranks, read at first, then known from the sums."""
    model = wrapped(Stack, combination)
    return [backward_and_norm(model, seed) for seed in steps]


def backward_and_norm(model, seed):
    model.zero_grad()
    loss_of(model(floats(seed))).backward()
    return model.clip_grad_norm_(1e9).item()


@ranks(2, 3, 4)
@pytest.mark.parametrize("combination", SHARDED)
def test_norms_from_the_sums_are_those_of_the_gradients(pool, combination):
    first, *others = pool.run(norms, combination, [1, 1, 2, 2])
    assert first[0] == first[1] != first[2] == first[3]
    assert all(other == first for other in others)


def reduced_norm(world):
    """The norm of gradients that are equal whatever the number of ranks: these divide exactly."""
    model = FSDP(nn.Linear(200, 301, bias=False))
    model(torch.ones(1, 200) * 0.37).square().sum().backward()
    return [model.clip_grad_norm_(1e9).item() for _ in range(2)]


def test_norms_do_not_depend_on_the_number_of_ranks(pools, pool2, pool4):
    two, four = pool2.run(reduced_norm, 2), pool4.run(reduced_norm, 4)
    assert len({norm for each in (*two, *four) for norm in each}) == 1


# --- what a script does between backward and clipping ---------------------------------------------


def rewrite_unseen(model):
    for param in model.parameters():
        local = param.grad.to_local()
        local.numpy()[...] *= 2


def rewrite_by_address(model):
    for param in model.parameters():
        n = param.grad.numel()
        memory = (ctypes.c_float * n).from_address(param.grad.data_ptr())
        for i in range(n):
            memory[i] *= 2


def rewrite_lists(model):
    torch._foreach_mul_([p.grad for p in model.parameters()], 2)


def rewrite_data(model):
    for param in model.parameters():
        param.grad.data.mul_(2)


def rewrite_kept_alias(model):
    """A name that the script has kept since the backward before."""
    for alias in model.kept_aliases:
        alias.mul_(2)


def rewrite_out(model):
    for param in model.parameters():
        torch.mul(param.grad, 2, out=param.grad)


def rewrite_hooked(model):
    for param in model.parameters():
        param.grad.add_(param.grad)


def unscale(model, scale=0.5):
    scaler, optimizer = scaler_of(model, scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def unscale_down(model):
    unscale(model, 2.0**33)


def unscale_unevenly(model):
    unscale(model, 3.0)


def unscale_and_settle(model):
    unscale(model, 4.0)
    zshard.to_local(next(model.parameters()).grad)


WRITERS = [
    *(rewrite_unseen, rewrite_by_address, rewrite_lists, rewrite_data, rewrite_kept_alias),
    *(rewrite_out, rewrite_hooked, unscale, unscale_down, unscale_unevenly, unscale_and_settle),
]


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@pytest.mark.parametrize("writer", WRITERS)
@on_ranks(2)
def test_changed_gradients_have_another_norm(writer, combination):
    model = wrapped(Stack, combination)
    backward_and_norm(model, 1)
    model.zero_grad(set_to_none=writer is not rewrite_kept_alias)
    model.kept_aliases = []
    if writer is rewrite_kept_alias:
        model.kept_aliases = [zshard.to_local(p.grad).data for p in model.parameters()]
    loss_of(model(floats(1))).backward()
    writer(model)
    norm = model.clip_grad_norm_(1e9).item()
    whole = [zshard.full_tensor(p.grad).double().square().sum() for p in model.parameters()]
    expected = math.sqrt(sum(whole))
    assert norm == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_norms_of_some_gradients():
    """Gradients of some parameters only: set to None, or clipped apart from the others."""
    model = wrapped(Stack, ("full_shard", "shm"))
    backward_and_norm(model, 1)
    backward_and_norm(model, 1)
    params = list(model.parameters())
    halves = [zshard.full_tensor(p.grad).double().square().sum() for p in params]
    found = nn.utils.clip_grad_norm_(params[::2], 1e9)
    assert found.item() == pytest.approx(math.sqrt(sum(halves[::2])), rel=1e-6)
    params[1].grad = None
    found = model.clip_grad_norm_(1e9)
    assert found.item() == pytest.approx(math.sqrt(sum(halves) - halves[1]), rel=1e-6)
    twice = nn.utils.clip_grad_norm_([*params, params[0]], 1e9)
    expected = math.sqrt(sum(halves) - halves[1] + halves[0])
    assert twice.item() == pytest.approx(expected, rel=1e-6)


# --- what a script does between clipping and the step ---------------------------------------------


def locals_of(model):
    return [zshard.to_local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def reads_locals(model, held):
    return locals_of(model)


def reads_fulls(model, held):
    return [zshard.full_tensor(p.grad) for p in model.parameters()]


def reads_products(model, held):
    return [zshard.to_local(p.grad * 3 + 1) for p in model.parameters()]


def reads_data(model, held):
    return [zshard.to_local(p.grad.data).clone() for p in model.parameters()]


def reads_held(model, held):
    return [zshard.to_local(grad).clone() for grad in held]


def reads_lists(model, held):
    return [zshard.to_local(g) for g in torch._foreach_add([p.grad for p in model.parameters()], 1)]


def reads_keywords(model, held):
    """As the only argument, and as one of several."""
    found = [torch.mul(input=p.grad, other=1.0) for p in model.parameters()]
    found += [torch.add(p.detach(), alpha=2, other=p.grad) for p in model.parameters()]
    return [zshard.to_local(each) for each in found]


def reads_address(model, held):
    grads = [p.grad for p in model.parameters()]
    return [list((ctypes.c_float * g.numel()).from_address(g.data_ptr())) for g in grads]


def reads_norms(model, held):
    return dict(sorted(zshard.named_norms(model, grads=True).items()))


def reads_a_copy(model, held):
    return locals_of(copy.deepcopy(model))


def reads_summoned(model, held):
    with FSDP.summon_full_params(model, with_grads=True):
        found = [zshard.to_local(p.grad).clone() for p in model.parameters()]
    return found + locals_of(model)


def clips_again(model, held):
    return [model.clip_grad_norm_(0.01), *locals_of(model)]


def clips_by_value(model, held):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return locals_of(model)


def accumulates(model, held):
    loss_of(model(floats(7))).backward()
    return [model.clip_grad_norm_(0.05), *locals_of(model)]


def accumulates_locally(model, held):
    with model.no_sync():
        loss_of(model(floats(7))).backward()
    loss_of(model(floats(8))).backward()
    return locals_of(model)


def zeroes(model, held):
    model.zero_grad(set_to_none=False)
    return [*locals_of(model), *(zshard.to_local(each) for each in held)]


def keeps_them(model, held):
    """Old gradients live on in the script's variables."""
    model.zero_grad()
    loss_of(model(floats(7))).backward()
    model.clip_grad_norm_(0.05)
    return [zshard.to_local(grad).clone() for grad in held] + locals_of(model)


def replaces(model, held):
    for param in model.parameters():
        param.grad = param.grad * 2 if param.grad.dim() > 1 else param.grad
    return locals_of(model)


def swaps(model, held):
    """The clipped gradient is put back after a backward."""
    saved = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss_of(model(floats(7))).backward()
    for param, grad in zip(model.parameters(), saved, strict=True):
        param.grad = grad
    loss_of(model(floats(8))).backward()
    return locals_of(model)


READERS = [
    *(reads_locals, reads_fulls, reads_products, reads_data, reads_held, reads_lists),
    *(reads_address, reads_norms, reads_a_copy, reads_summoned, reads_keywords),
    *(clips_again, clips_by_value, accumulates, accumulates_locally, zeroes, keeps_them),
    *(replaces, swaps),
]

STEPS = {
    "torch.SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "torch.AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "torch.Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=False),
    "AdamW": lambda params: zshard.AdamW(params, lr=0.1),
    "AdamW amsgrad": lambda params: zshard.AdamW(params, lr=0.1, amsgrad=True),
    "SGD": lambda params: zshard.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW8bit": lambda params: zshard.AdamW8bit(params, lr=0.1, min_8bit_size=1),
    "SGD8bit": lambda params: zshard.SGD8bit(params, lr=0.1, momentum=0.9, min_8bit_size=1),
    "Muon": lambda params: zshard.Muon(
        [
            {"params": [p for p in params if len(zshard.shard_info(p)["shape"]) == 2]},
            {
                "params": [p for p in params if len(zshard.shard_info(p)["shape"]) != 2],
                "use_muon": False,
            },
        ],
        ns_dtype="float32",
    ),
    "WholeMatrix": lambda params: zshard.WholeMatrix(torch.optim.Adafactor, params, lr=0.1),
}


def scaler_of(model, scale):
    """A scaler, and an optimizer for its unscale_()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return scaler, torch.optim.SGD(model.parameters(), lr=1.0)


WAYS = {
    "clip": (1.0, 0.03),
    "unscale": (1024.0, None),
    "unscale by 1000": (1000.0, None),
    "unscale and clip": (1024.0, 0.03),
    "unscale by 1000 and clip": (1000.0, 0.03),
}
"""Name -> the loss's scale, and the norm to clip to; None: no clipping."""


def both_ways(combination, act, way):
    """Run act(model, its gradients) after unscaling and clipping: later, and at once, which a
    second name for the gradients enforces."""
    scale, limit = WAYS[way]
    found = []
    others = _core.has_pending()  # earlier tests' models
    for at_once in (False, True):
        model = wrapped(Stack, combination)
        scaler, optimizer = scaler_of(model, scale)
        backward_and_norm(model, 0)
        model.zero_grad()
        scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
        held = [p.grad for p in model.parameters()]
        if at_once:
            aliases = [grad.to_local() for grad in held]
        if scale != 1:
            scaler.unscale_(optimizer)
        norm = None if limit is None else model.clip_grad_norm_(limit)
        assert others or _core.has_pending() is not at_once
        found.append([norm, *act(model, held)])
        aliases = []  # noqa: F841
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reader", READERS)
@on_ranks(2)
def test_everyone_reads_scaled_gradients(combination, reader, way):
    def listed(model, held):
        result = reader(model, held)
        return result.values() if isinstance(result, dict) else result

    later, at_once = both_ways(combination, listed, way)
    assert_same(later, at_once, reader.__name__)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPS)
@on_ranks(2)
def test_every_optimizer_steps_by_scaled_gradients(combination, name, way):
    def steps(model, held):
        optimizer = STEPS[name](list(model.parameters()))
        optimizer.step()
        optimizer.step()  # with the same gradients
        values = [zshard.to_local(p).clone() for p in model.parameters()]
        return values + locals_of(model)

    later, at_once = both_ways(combination, steps, way)
    assert_same(later, at_once, name)


def norms_of_unscaled(scales):
    """The norms of gradients from 1e-12 to 1e12, unscaled later and at once."""
    found = []
    for at_once in (False, True):
        torch.manual_seed(1)
        model = FSDP(nn.Linear(2000, 3, bias=False))
        inputs = 10.0 ** torch.arange(-12, 12, 0.012).view(1, 2000)
        for scale in scales:
            scaler, optimizer = scaler_of(model, scale)
            scaler.scale(model(inputs).sum()).backward()
            alias = zshard.to_local(model.weight.grad) if at_once else None
            scaler.unscale_(optimizer)
            found.append(model.clip_grad_norm_(1e30).item())
            model.zero_grad()
            del alias
    return found[: len(scales)], found[len(scales) :]


def test_squares_are_unscaled_exactly(pool2):
    scales = [2.0**k for k in (1, 1, 15, 16, 17, 31, 32, 33, 60, 80)]
    for later, at_once in pool2.run(norms_of_unscaled, scales):
        assert later == at_once and set(later) == {later[0]}


def clip_to_nothing(limit):
    """A factor of 0 or NaN."""
    model = wrapped(Stack, ("full_shard", "shm"))
    loss_of(model(floats(1))).backward()
    for param in model.parameters() if math.isnan(limit) else ():
        param.grad.mul_(math.nan)
    model.clip_grad_norm_(1.0 if math.isnan(limit) else limit)
    return [zshard.to_local(p.grad).clone() for p in model.parameters()]


def test_factors_of_zero_and_nan(pool2):
    for grads in pool2.run(clip_to_nothing, 0.0):
        assert all((grad == 0).all() for grad in grads)
    for grads in pool2.run(clip_to_nothing, math.nan):
        assert all(grad.isnan().all() for grad in grads)
