"""Clipping and unscaling without a pass over the gradients: their squares come from the sums over
the ranks, and the step multiplies. Code in between must see the same values as without this.
"""

import copy
import ctypes
import gc
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
SHM = ("full_shard", "shm")
EACH_COMBINATION = pytest.mark.parametrize("combination", SHARDED)


def params_of(model):
    return list(model.parameters())


def grads_of(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def locals_of(grads):
    return [zshard.to_local(grad).clone() for grad in grads]


def backward(model, seed):
    loss_of(model(floats(seed))).backward()


def backward_and_norm(model, seed):
    model.zero_grad()
    backward(model, seed)
    return model.clip_grad_norm_(1e9).item()


def scaler_of(model, scale):
    """A scaler, and an optimizer for its unscale_()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return scaler, torch.optim.SGD(model.parameters(), lr=1.0)


# --- norms from the sums --------------------------------------------------------------------------


def norms(combination):
    """The norms of the same gradients on all ranks, read at first, then known from the sums."""
    model = wrapped(Stack, combination)
    return [backward_and_norm(model, seed) for seed in (1, 1, 2, 2)]


@ranks(2, 3, 4)
@EACH_COMBINATION
def test_norms_from_the_sums_are_those_of_the_gradients(pool, combination):
    first, *others = pool.run(norms, combination)
    assert first[0] == first[1] != first[2] == first[3]
    assert all(other == first for other in others)


def reduced_norms():
    """The norm of gradients that are equal for any number of ranks: these divide exactly."""
    model = FSDP(nn.Linear(200, 301, bias=False))
    model(torch.ones(1, 200) * 0.37).square().sum().backward()
    return [model.clip_grad_norm_(1e9).item() for _ in range(2)]


def test_norms_do_not_depend_on_the_number_of_ranks(pool2, pool4):
    results = [*pool2.run(reduced_norms), *pool4.run(reduced_norms)]
    assert len({norm for each in results for norm in each}) == 1


# --- scripts between backward and clipping --------------------------------------------------------


def twice(change):
    """A writer that doubles each gradient by a function of its parameter."""
    return lambda model: [change(param) for param in model.parameters()]


def by_numpy(param):
    param.grad.to_local().numpy()[...] *= 2


def by_address(param):
    memory = (ctypes.c_float * param.grad.numel()).from_address(param.grad.data_ptr())
    for i in range(param.grad.numel()):
        memory[i] *= 2


def unscale(scale):
    def writer(model):
        scaler, optimizer = scaler_of(model, scale)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)

    return writer


def unscale_and_settle(model):
    unscale(4.0)(model)
    zshard.to_local(next(model.parameters()).grad)


WRITERS = {
    "numpy": twice(by_numpy),
    "an address": twice(by_address),
    "a list": lambda model: torch._foreach_mul_(grads_of(model), 2),
    "data": twice(lambda param: param.grad.data.mul_(2)),
    # A name that the script has kept since the backward before.
    "a kept alias": lambda model: [alias.mul_(2) for alias in model.kept_aliases],
    "out=": twice(lambda param: torch.mul(param.grad, 2, out=param.grad)),
    "itself": twice(lambda param: param.grad.add_(param.grad)),
    "unscale": unscale(0.5),
    "unscale down": unscale(2.0**33),
    "unscale unevenly": unscale(3.0),
    "unscale and settle": unscale_and_settle,
}


@pytest.mark.parametrize("combination", [SHM, ("full_shard", "c10d")])
@pytest.mark.parametrize("writer", WRITERS)
@on_ranks(2)
def test_changed_gradients_have_another_norm(writer, combination):
    model = wrapped(Stack, combination)
    backward_and_norm(model, 1)
    keeps = writer == "a kept alias"
    model.zero_grad(set_to_none=not keeps)
    if keeps:
        model.kept_aliases = [zshard.to_local(grad).data for grad in grads_of(model)]
    backward(model, 1)
    WRITERS[writer](model)
    norm = model.clip_grad_norm_(1e9).item()
    squares = [zshard.full_tensor(grad).double().square().sum() for grad in grads_of(model)]
    assert norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


@on_ranks(2)
def test_norms_of_some_gradients():
    """Gradients of some parameters only: set to None, or clipped apart from the others."""
    model = wrapped(Stack, SHM)
    for _ in range(2):
        backward_and_norm(model, 1)
    params = params_of(model)
    squares = [zshard.full_tensor(p.grad).double().square().sum() for p in params]

    def is_root(norm, square):
        assert norm.item() == pytest.approx(math.sqrt(square), rel=1e-6)

    is_root(nn.utils.clip_grad_norm_(params[::2], 1e9), sum(squares[::2]))
    params[1].grad = None
    is_root(model.clip_grad_norm_(1e9), sum(squares) - squares[1])
    again = nn.utils.clip_grad_norm_([*params, params[0]], 1e9)
    is_root(again, sum(squares) - squares[1] + squares[0])


# --- scripts between clipping and the step --------------------------------------------------------


def keywords(model, held):
    """As the only argument, and as one of several."""
    products = [torch.mul(input=p.grad, other=1.0) for p in model.parameters()]
    return products + [torch.add(p.detach(), alpha=2, other=p.grad) for p in model.parameters()]


def addresses(model, held):
    grads = grads_of(model)
    return [list((ctypes.c_float * g.numel()).from_address(g.data_ptr())) for g in grads]


def summoned(model, held):
    with FSDP.summon_full_params(model, with_grads=True):
        grads = locals_of(grads_of(model))
    return grads + grads_of(model)


def clips_by_value(model, held):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return grads_of(model)


def zeroes(model, held):
    model.zero_grad(set_to_none=False)
    return [*grads_of(model), *held]


def keeps_them(model, held):
    """Old gradients live on in the script's variables."""
    model.zero_grad()
    backward(model, 7)
    model.clip_grad_norm_(0.05)
    return [*held, *grads_of(model)]


def swaps(model, held):
    """The clipped gradient is put back after a backward."""
    saved = grads_of(model)
    model.zero_grad()
    backward(model, 7)
    for param, grad in zip(model.parameters(), saved, strict=True):
        param.grad = grad
    backward(model, 8)
    return grads_of(model)


READERS = {  # functions of the model, and of gradients that the script holds
    "locals": lambda model, held: grads_of(model),
    "fulls": lambda model, held: [zshard.full_tensor(grad) for grad in grads_of(model)],
    "products": lambda model, held: [grad * 3 + 1 for grad in grads_of(model)],
    "data": lambda model, held: [grad.data for grad in grads_of(model)],
    "held": lambda model, held: held,
    "lists": lambda model, held: torch._foreach_add(grads_of(model), 1),
    "norms": lambda model, held: sorted(zshard.named_norms(model, grads=True).items()),
    "a copy": lambda model, held: grads_of(copy.deepcopy(model)),
}
FUNCTIONS = [keywords, addresses, summoned, clips_by_value, zeroes, keeps_them, swaps]
READERS |= {each.__name__: each for each in FUNCTIONS}


def muon(params):
    matrices = [p for p in params if len(zshard.shard_info(p)["shape"]) == 2]
    rest = [p for p in params if len(zshard.shard_info(p)["shape"]) != 2]
    groups = [{"params": matrices}, {"params": rest, "use_muon": False}]
    return zshard.Muon(groups, ns_dtype="float32")


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
    "Muon": muon,
    "WholeMatrix": lambda params: zshard.WholeMatrix(torch.optim.Adafactor, params, lr=0.1),
}


def stepped_twice(name):
    def act(model, held):
        optimizer = STEPS[name](params_of(model))
        optimizer.step()
        optimizer.step()  # with the same gradients
        return params_of(model) + grads_of(model)

    return act


ACTS = {**READERS, **{f"step of {name}": stepped_twice(name) for name in STEPS}}
WAYS = {  # the loss's scale, and the norm to clip to; None: no clipping
    "clip": (1.0, 0.03),
    "unscale": (1024.0, None),
    "unscale by 1000": (1000.0, None),
    "unscale and clip": (1024.0, 0.03),
    "unscale by 1000 and clip": (1000.0, 0.03),
}


@pytest.mark.sampled(8)
@EACH_COMBINATION
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", ACTS)
@on_ranks(2)
def test_everyone_reads_scaled_gradients(combination, act, way):
    """After unscaling and clipping: later, and at once, which a second name for the gradients
    enforces."""
    scale, limit = WAYS[way]
    results = []
    others = _core.has_pending()  # earlier tests' models
    for at_once in (False, True):
        model = wrapped(Stack, combination)
        scaler, optimizer = scaler_of(model, scale)
        backward_and_norm(model, 0)
        model.zero_grad()
        scaler.scale(loss_of(model(floats(dist.get_rank())))).backward()
        held = grads_of(model)
        if at_once:
            aliases = [grad.to_local() for grad in held]
        if scale != 1:
            scaler.unscale_(optimizer)
        norm = None if limit is None else model.clip_grad_norm_(limit)
        assert others or _core.has_pending() is not at_once
        values = ACTS[act](model, held)
        tensors = [zshard.to_local(v).clone() if torch.is_tensor(v) else v for v in values]
        results.append([norm, *tensors])
        aliases = []  # noqa: F841
    assert_same(*results, act)


@on_ranks(2)
def test_squares_are_unscaled_exactly():
    """The norms of gradients from 1e-12 to 1e12, unscaled later and at once, by powers of two."""
    results = set()
    for at_once in (False, True):
        torch.manual_seed(1)
        model = FSDP(nn.Linear(2000, 3, bias=False))
        inputs = 10.0 ** torch.arange(-12, 12, 0.012).view(1, 2000)
        for power in (1, 1, 15, 16, 17, 31, 32, 33, 60, 80):
            scaler, optimizer = scaler_of(model, 2.0**power)
            scaler.scale(model(inputs).sum()).backward()
            alias = zshard.to_local(model.weight.grad) if at_once else None
            scaler.unscale_(optimizer)
            results.add(model.clip_grad_norm_(1e30).item())
            model.zero_grad()
            del alias
    assert len(results) == 1


@pytest.mark.parametrize("factor", [0.0, math.nan])
@on_ranks(2)
def test_factors_of_zero_and_nan(factor):
    model = wrapped(Stack, SHM)
    backward(model, 1)
    for grad in grads_of(model) if math.isnan(factor) else ():
        grad.mul_(math.nan)
    model.clip_grad_norm_(1.0 if math.isnan(factor) else factor)
    for grad in locals_of(grads_of(model)):
        assert grad.isnan().all() if math.isnan(factor) else (grad == 0).all()


def is_pending(model):
    """Return whether the gradients had a pending factor; now they are multiplied."""
    before = _core.bytes_passed()
    locals_of(grads_of(model))
    return _core.bytes_passed() > before


@pytest.mark.parametrize("transports", [("shm",), ("c10d", "shm"), ("shm", "c10d")])
@on_ranks(2)
def test_unscaling_and_clipping_pass_over_no_more_memory_than_the_step(transports):
    """The last model's; those before it have other transports, and gradients."""
    gc.collect()  # a model that dies applies pending factors, which counts
    models = [wrapped(Stack, ("full_shard", each)) for each in transports]
    for model in models:
        backward_and_norm(model, 0)
    optimizer = zshard.AdamW(model.parameters())
    optimizer.step()
    before = _core.bytes_passed()
    optimizer.step()
    of_a_step = _core.bytes_passed() - before
    optimizer.zero_grad()
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model(floats(1)))).backward()
        grads = grads_of(model)
        before = _core.bytes_passed()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.03)
        scaler.step(optimizer)
        assert _core.bytes_passed() - before == of_a_step
        assert is_pending(model) and not is_pending(model)
        optimizer.zero_grad()
        del grads
    backward(model, 1)
    assert not is_pending(model)
