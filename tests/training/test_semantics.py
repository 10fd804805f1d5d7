"""Hooks, optimizers, exceptions, misuse and lifetimes: right numbers, or an error with a remedy."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import (
    CASES,
    COMBINATIONS,
    STRATEGIES,
    TRANSPORTS,
    Block,
    Parts,
    ddp,
    loss_of,
    make,
    wrapped,
)
from scenario import Scenario, Training
from scenarios import (
    FULL,
    WIDTH,
    Stack,
    floats,
    forward_backward,
    mean_grads,
    message_of,
    near,
    square_sum,
    whole_grads,
)
from spawn import on_ranks
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import zshard
from zshard import FSDP, MixedPrecision


def check_a_step(model, what):
    """A step's gradients are right."""
    model.zero_grad()
    forward_backward(model, dist.get_rank())
    assert_same(whole_grads(model), mean_grads(Stack, forward_backward), f"the gradients {what}")


# --- after a failure (more in walk.py) ------------------------------------------------------------


class Planted(RuntimeError):
    pass


def fail(*_):
    raise Planted


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_full_gradients_of_a_failed_backward_are_refused(transport):
    """A failed backward adds to held gradients: the mean, or this rank's gradient alone. Timing
    decides which, so neither may be used."""
    training = Scenario("net", ("no_shard", transport), "torch.SGD").sharded(1)
    handle = next(training.model.parameters()).register_hook(fail)
    with pytest.raises(Planted):
        training.backward()
    handle.remove()
    for call in (training.optimizer.step, training.backward):
        with pytest.raises(RuntimeError, match=r"call zero_grad\(\) on all ranks"):
            call()
    training.go(1)


# --- hooks and optimizers of the user -------------------------------------------------------------


EARLY = pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])


@EARLY
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_tensor_hooks_see_the_full_local_gradient(combination, early):
    rank, seen = dist.get_rank(), []

    def hook(grad):
        seen.append(grad.clone())
        return grad * 2

    model, plain = make(Stack), make(Stack)
    weight = model.blocks[1].up.weight
    if early:
        weight.register_hook(hook)
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    if not early:
        weight.register_hook(hook)
    for each in (model, plain):
        forward_backward(each, rank)
    expected = mean_grads(Stack, forward_backward)
    expected["blocks.1.up.weight"] *= 2
    assert_same(seen, [plain.blocks[1].up.weight.grad], "what the hook has seen")
    assert_same(whole_grads(model), expected, "the gradients")


def count(calls, name, grads, *_):
    calls.append((name, sum(g is not None for g in grads) if name == "all" else 1))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_hooks_on_gradient_nodes_run_as_in_a_plain_model(combination, precision, early):
    """Also those over several tensors: called as often, with the same number of gradients."""
    seen = []
    for model in (make(Stack), wrapped(Stack, combination, mixed_precision=precision)):
        calls, nodes, params = [], [], list(model.parameters())
        if not early:
            forward_backward(model, dist.get_rank())
        for some in (params, list(model.blocks[1].parameters())):
            register_multi_grad_hook(some, functools.partial(count, calls, "all"))
            register_multi_grad_hook(some, functools.partial(count, calls, "any"), mode="any")
        for param in params:
            nodes.append(get_gradient_edge(param).node)
            nodes[-1].register_hook(functools.partial(count, calls, "node"))
            nodes[-1].register_prehook(functools.partial(count, calls, "before node"))
        for _ in range(2):
            forward_backward(model, dist.get_rank())
        with torch.no_grad():
            model(floats(0))
        forward_backward(model, dist.get_rank())
        seen.append(sorted(calls))
    plain, sharded = seen
    assert sharded == plain and ("all", 20) in plain


def one_batch(step, model, rank):
    loss_of(model(floats(rank, step))).backward()


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "before backward"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_post_accumulate_hooks_run_once_with_the_reduced_shard(combination, when):
    rank, seen = dist.get_rank(), []
    model = make(Stack)

    def watch():
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, p.grad.shape == p.shape, p.grad.clone()))
            )

    if when == "before wrapping":
        watch()
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    if when == "after wrapping":
        watch()
    for step in range(3):
        seen.clear()
        model.zero_grad()
        loss = loss_of(model(floats(rank, step)))
        if when == "before backward" and step == 0:
            watch()  # in torch's slot for ours, also where parameters stay unsharded since forward
        loss.backward()
        assert all(fits for _, fits, _ in seen), "not a shard"
        final = sorted((name, param.grad) for name, param in model.named_parameters())
        ours = sorted((name, grad) for name, _, grad in seen)
        assert_same(ours, final, "what hooks have seen")
        expected = mean_grads(Stack, functools.partial(one_batch, step))
        assert_same(whole_grads(model), expected, f"the gradients of step {step}")


@on_ranks(2)
def test_optimizer_steps_in_post_accumulate_hooks():
    """Stepping each parameter from its own hook (then .grad is None) trains as one step does."""
    scenario = Scenario("net", FULL, "torch.SGD")
    training = scenario.sharded()
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}  # as the scenario's
    optimizers = {p: torch.optim.SGD([p], **options) for p in training.model.parameters()}

    def step(param):
        optimizers[param].step()
        param.grad = None

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        training.backward()
    assert_same(training.state(), scenario.ddp(3).state(), "three steps")


def by_ndim(model):
    """Only matrices are decayed."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


@pytest.mark.sampled(4)
@EARLY
@pytest.mark.parametrize("cls", [torch.optim.AdamW, zshard.SGD])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_parameter_groups(combination, cls, early):
    """An optimizer made before or after wrapping trains as under DDP."""
    scenario, rank, case = Scenario("net"), dist.get_rank(), CASES["net"]
    plain, model = make(case.make), make(case.make)
    before = list(model.parameters())
    optimizer = cls(by_ndim(model), lr=0.01) if early else None
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    ours, theirs = (
        Training(scenario, model, model, rank),
        Training(scenario, ddp(plain), plain, rank),
    )
    ours.optimizer = optimizer or cls(by_ndim(model), lr=0.01)
    theirs.optimizer = cls(by_ndim(plain), lr=0.01)
    assert_same(ours.go(4).state(), theirs.go(4).state(), "four steps")


# --- uses at forbidden moments --------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_view_kept_from_a_forward_cannot_be_read(transport):
    """The error names the unit."""
    model, kept = wrapped(Stack, ("full_shard", transport)), []
    model.blocks[1].register_forward_pre_hook(lambda m, _: kept.append(m.up.weight.view(-1)))
    forward_backward(model, dist.get_rank())
    message = message_of(lambda: kept[0].sum(), RuntimeError)
    assert "'blocks.1'" in message and "sharded" in message


def loss_and_penalty(model, rank):
    loss = loss_of(model(floats(rank)))
    (loss + 0.1 * square_sum(model)).backward()


def penalty_and_loss(model, rank):
    squares = square_sum(model)
    (loss_of(model(floats(rank))) + 0.1 * squares).backward()


@pytest.mark.parametrize("run", [loss_and_penalty, penalty_and_loss])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_penalty_over_parameters_is_right_or_an_error(combination, run):
    """It is an error where shards cannot give it; then steps without it are right."""
    model, message = wrapped(Stack, combination), ""
    try:
        run(model, dist.get_rank())
    except RuntimeError as error:
        message = str(error)
    else:
        ours, expected = whole_grads(model), mean_grads(Stack, run)
        ours = {name: near(grad, expected[name]) for name, grad in ours.items()}
        assert_same(ours, expected, "the gradients")
    check_a_step(model, "without a penalty")
    check_a_step(model, "without a penalty, again")
    assert combination[0] != "full_shard" or message, "slices cannot have given the penalty"
    assert combination[0] != "no_shard" or not message


@on_ranks(2)
def test_weight_modified_within_forward_is_an_error():
    model = make(Stack)

    def forward(x, block=model.blocks[1], plain=model.blocks[1].forward):
        with torch.no_grad():
            block.up.weight.mul_(0.5)
        return plain(x)

    model.blocks[1].forward = forward
    model = FSDP(model, auto_wrap_policy={Block})
    message = message_of(lambda: forward_backward(model, dist.get_rank()), RuntimeError)
    assert "'blocks.1.up.weight'" in message and "modified in place" in message
    assert "make its module a unit of its own (auto_wrap_policy)" in message


# --- lifetimes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_loss_may_outlive_the_model(combination):
    """After the model is freed, no backward crashes, kept parameters can be read, and the next
    model trains."""
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    loss = loss_of(model(floats(dist.get_rank())))
    kept = list(model.parameters())
    values = [(p.detach().clone(), p.grad.clone()) for p in kept]
    del model
    gc.collect()
    assert_same([(p, p.grad) for p in kept], values, "what is kept of the model")
    del kept
    loss.backward()
    del loss
    check_a_step(wrapped(Stack, combination), "of the next model")


def blocks():
    return nn.Sequential(Block(WIDTH), Block(WIDTH))


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_two_models_train_on_each_others_outputs(combination):
    """As GANs do."""

    def trained(maker, learner, forward):
        slow, fast = (torch.optim.SGD(m.parameters(), 0.05) for m in (maker, learner))
        for step in range(3):
            made = forward[0](floats(dist.get_rank(), step))
            fast.zero_grad()
            loss_of(forward[1](made.detach())).backward()
            fast.step()
            slow.zero_grad()
            loss_of(forward[1](made)).backward()  # reaches into the maker
            slow.step()
        return {"maker": maker.state_dict(), "learner": learner.state_dict()}

    plain = make(blocks), make(Stack, seed=2)
    expected = trained(*plain, [ddp(each) for each in plain])
    ours = wrapped(blocks, combination), FSDP(make(Stack, seed=2), strategy=combination[0])
    assert_same(trained(*ours, ours), expected, "the two models")


def chain():
    """Units small.0 to small.3 and large: its forward runs those that it is given."""

    def forward(model, x, before, between, after, large=False):
        out = model.large(x).mean() if large else 0.0
        for i in before:
            x = model.small[i](x)
        x = between(x)
        for i in after:
            x = model.small[i](x)
        return x.mean() + out

    small = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return Parts(forward, small=small, large=nn.Linear(WIDTH, 1000))


def with_all_reduce(x):
    x.register_hook(lambda grad: dist.all_reduce(grad.clone()))
    return x * 1.0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("between", ["all_reduce", "a model over c10d"])
@on_ranks(2)
def test_collectives_within_a_backward_over_shm(strategy, between):
    """Ranks that did different things before, and so have other buckets, end the same rounds before
    a collective that shm knows nothing of."""
    rank = dist.get_rank()
    model = FSDP(make(chain), strategy=strategy, transport="shm", auto_wrap_policy={nn.Linear})
    if between == "a model over c10d":
        between = FSDP(make(lambda: Block(WIDTH)), strategy=strategy, transport="c10d")
    else:
        between = with_all_reduce
    used = [2, 3] if rank == 0 else []
    model(floats(rank), used, nn.Identity(), [], large=True).backward()
    model(floats(rank), [0], between, [1, 2, 3]).backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_copied_unit_does_not_drive_the_original(transport):
    """A deepcopy of a unit computes the same and trains separately; the model stays as it was."""
    model = wrapped(Stack, ("full_shard", transport), auto_wrap_policy={Block})
    x, before = floats(dist.get_rank()), model.state_dict()
    twin = copy.deepcopy(model.blocks[1])
    assert_same(twin(x), model.blocks[1](x), "the copy's output")
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    loss_of(twin(x)).backward()
    optimizer.step()
    assert not torch.equal(twin.state_dict()["up.weight"], before["blocks.1.up.weight"])
    assert_same(model.state_dict(), before, "the state")
    assert all(param.grad is None for param in model.parameters())
