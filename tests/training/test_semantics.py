"""Hooks, optimizers, exceptions, misuse and lifetimes: right numbers, or an error that says what to do."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from guarded import same
from models import (
    CASES,
    COMBINATIONS,
    STRATEGIES,
    TRANSPORTS,
    Block,
    ddp,
    differences,
    loss_of,
    make,
    train,
    wrapped,
)
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
    wrong_grads,
)
from spawn import on_ranks
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import zshard
from zshard import FSDP, MixedPrecision

# --- after a failure -------------------------------------------------------------------------------


class Planted(RuntimeError):
    pass


def fail(*_):
    raise Planted


def fail_in_forward(model, rank):
    handle = model.blocks[1].down.register_forward_hook(fail)
    with pytest.raises(Planted):
        model(floats(rank))
    handle.remove()


def fail_in_backward(model, rank):
    handle = model.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(Planted):
        loss_of(model(floats(rank))).backward()
    handle.remove()


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_training_continues_after_exceptions(combination):
    """Gradients are right after a pass that failed."""
    expected = mean_grads(Stack, forward_backward)
    model = wrapped(Stack, combination)
    for run in (fail_in_forward, fail_in_backward, fail_in_backward, fail_in_forward):
        run(model, dist.get_rank())
        model.zero_grad()
        forward_backward(model, dist.get_rank())
        assert_same(whole_grads(model), expected, f"the gradients after {run.__name__}")


@on_ranks(2)
def test_training_continues_after_an_exception_in_a_hook():
    """A hook that sees the reduced gradient raises; then a right step."""
    combination = FULL
    model = wrapped(Stack, combination)
    handle = model.head.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(Planted):
        forward_backward(model, dist.get_rank())
    handle.remove()
    model.zero_grad()
    forward_backward(model, dist.get_rank())
    assert_same(whole_grads(model), mean_grads(Stack, forward_backward), "the gradients")


# --- hooks and optimizers of the user --------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_tensor_hooks_see_the_full_local_gradient(combination, early):
    """A hook on a weight sees the full local gradient, set before or after wrapping."""
    rank, seen = dist.get_rank(), []
    model = make(Stack)

    def hook(grad):
        seen.append(grad.clone())
        return grad * 2

    if early:
        model.blocks[1].up.weight.register_hook(hook)
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    if not early:
        model.blocks[1].up.weight.register_hook(hook)
    forward_backward(model, rank)

    plain = make(Stack)
    forward_backward(plain, rank)
    local = plain.blocks[1].up.weight.grad
    expected = mean_grads(Stack, forward_backward)
    expected["blocks.1.up.weight"] *= 2
    assert_same(seen, [local], "what the hook has seen")
    assert_same(whole_grads(model), expected, "the gradients")


def count(calls, name, grads, *_):
    calls.append((name, sum(g is not None for g in grads) if name == "all" else 1))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_hooks_on_gradient_nodes_run_as_in_a_plain_model(combination, precision, early):
    """Return what hooks on gradient nodes, and those over several tensors, see: how often, of how
    many gradients; of a plain model and of a sharded one."""
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


def accumulate_hooks(combination, when):
    """Post-accumulate hooks run once per backward and see the reduced shard."""
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
        params = dict(model.named_parameters())
        assert sorted(name for name, _, _ in seen) == sorted(params)
        for name, fits, grad in seen:
            assert fits, f"{name} was not a shard"
            assert same(grad, params[name].grad), f"{name} was not final"
        expected = mean_grads(Stack, functools.partial(one_batch, step))
        assert_same(whole_grads(model), expected, f"the gradients of step {step}")


def one_batch(step, model, rank):
    loss_of(model(floats(rank, step))).backward()


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_post_accumulate_hooks_run_once_with_the_reduced_shard(pool2, combination, when):
    pool2.run(accumulate_hooks, combination, when)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_post_accumulate_hooks_may_be_set_between_forward_and_backward(transport):
    for strategy in STRATEGIES:
        accumulate_hooks((strategy, transport), "before backward")


@on_ranks(2)
def test_optimizer_steps_in_post_accumulate_hooks():
    """Stepping each parameter from its own hook (then .grad is None) trains as one step does."""
    rank, case = dist.get_rank(), CASES["net"]
    plain, model = make(case.make), wrapped(case.make, FULL)
    parallel = ddp(plain)
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def step(param):
        optimizers[param].step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    whole = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for number in range(3):
        loss_of(model(case.batch(number, rank))).backward()
        whole.zero_grad()
        loss_of(parallel(case.batch(number, rank))).backward()
        whole.step()
    assert_same(model.state_dict(), plain.state_dict(), "the state")


def by_ndim(model):
    """Only matrices are decayed."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def by_name(model):
    """Biases and norms are not decayed."""
    plain = ("bias", "norm.weight", "gain")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(plain)], "weight_decay": 0.5},
        {"params": [p for n, p in named if n.endswith(plain)], "weight_decay": 0.0},
    ]


def by_module(model):
    """The embedding learns slowly, the head fast."""
    first, last = list(model.embed.parameters()), list(model.head.parameters())
    known = {id(p) for p in (*first, *last)}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [{"params": first, "lr": 0.001}, {"params": rest}, {"params": last, "lr": 0.1}]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("groups", [by_ndim, by_name, by_module])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, zshard.SGD])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_parameter_groups(combination, cls, groups, early):
    """An optimizer made before or after wrapping trains as under DDP."""
    rank, case = dist.get_rank(), CASES["net"]
    plain, model = make(case.make), make(case.make)
    before = list(model.parameters())
    optimizer = cls(groups(model), lr=0.01) if early else None
    model = FSDP(model, strategy=combination[0], transport=combination[1])
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert [p.ndim for p in plain.parameters()] == [p.ndim for p in model.parameters()]
    train(model, case, optimizer or cls(groups(model), lr=0.01), rank)
    train(ddp(plain), case, cls(groups(plain), lr=0.01), rank)
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@on_ranks(2)
def test_schedulers_drive_the_optimizer():
    """A schedule of learning rate and momentum gives DDP's numbers."""
    rank, case = dist.get_rank(), CASES["mlp"]
    plain, model = make(case.make), wrapped(case.make, FULL)
    for each, forward in ((model, model), (plain, ddp(plain))):
        optimizer = zshard.AdamW(each.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(forward(case.batch(step, rank))).backward()
            optimizer.step()
            schedule.step()
    assert_same(model.state_dict(), plain.state_dict(), "the state")


# --- what is used where it must not be -------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_view_kept_from_a_forward_cannot_be_read(transport):
    """A whole weight that was kept from a forward is read after it: an error, with the unit."""
    combination = ("full_shard", transport)
    rank, kept = dist.get_rank(), []
    model = wrapped(Stack, combination)
    model.blocks[1].register_forward_pre_hook(lambda m, _: kept.append(m.up.weight.view(-1)))
    forward_backward(model, rank)
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
    """(message, wrong gradients) of a loss with a penalty over model.parameters(); one of them is
    empty. Then a step without."""
    rank = dist.get_rank()
    model, message, wrong = wrapped(Stack, combination), "", []
    try:
        run(model, rank)
    except RuntimeError as error:
        message = str(error)
    else:
        ours, expected = whole_grads(model), mean_grads(Stack, run)
        wrong = wrong_grads({n: near(g, expected[n]) for n, g in ours.items()}, expected)
    model.zero_grad()
    forward_backward(model, rank)
    model.zero_grad()
    forward_backward(model, rank)
    after = wrong_grads(whole_grads(model), mean_grads(Stack, forward_backward))
    assert wrong == after == []
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


class Scaled(nn.Module):
    """Has a method that uses the root's own weight."""

    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def encode(self, x):
        return torch.tanh(self.block(x) @ self.mix)

    def forward(self, x):
        return self.encode(x)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_unregistered_method_on_shards_is_an_error(transport):
    """It raises rather than compute with shards; the next forward is right."""
    combination = ("full_shard", transport)
    model, x = wrapped(Scaled, combination, auto_wrap_policy={Block}), floats(dist.get_rank())
    message = message_of(lambda: loss_of(model.encode(x)).backward(), RuntimeError)
    assert "shape" in message or "size" in message
    assert_same(model(x), make(Scaled)(x), "the output")


# --- lifetimes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_loss_may_outlive_the_model(combination):
    """A backward after the model is gone: no crash; and the next model trains."""
    model = wrapped(Stack, combination)
    loss = loss_of(model(floats(dist.get_rank())))
    del model
    gc.collect()
    loss.backward()
    del loss
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    assert_same(whole_grads(model), mean_grads(Stack, forward_backward), "the gradients")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_parameters_may_outlive_the_model(combination):
    """Parameters and gradients kept by an optimizer after the model is gone can be read."""
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    kept = list(model.parameters())
    values = [(p.detach().clone(), p.grad.clone()) for p in kept]
    del model
    gc.collect()
    assert_same([(p, p.grad) for p in kept], values, "the result")


def blocks():
    return nn.Sequential(Block(WIDTH), Block(WIDTH))


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_two_models_train_on_each_others_outputs(combination):
    """Two models that train on each other's outputs, as GANs do, match DDP."""
    rank = dist.get_rank()

    def trained(maker, learner, forward):
        slow, fast = (
            torch.optim.SGD(maker.parameters(), 0.05),
            torch.optim.SGD(learner.parameters(), 0.1),
        )
        for step in range(3):
            made = forward[0](floats(rank, step))
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
    assert_same(trained(*ours, ours), expected, "the result")


class Chain(nn.Module):
    """Units small.0 to small.3 and large: its forward runs those that it is given."""

    def __init__(self):
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.large = nn.Linear(WIDTH, 1000)

    def forward(self, x, before, between, after, large=False):
        out = self.large(x).mean() if large else 0.0
        for i in before:
            x = self.small[i](x)
        x = between(x)
        for i in after:
            x = self.small[i](x)
        return x.mean() + out


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
    model = FSDP(make(Chain), strategy=strategy, transport="shm", auto_wrap_policy={nn.Linear})
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
    """A deepcopy of a unit computes the same and trains by itself; the model stays as it was."""
    combination = ("full_shard", transport)
    model, x = wrapped(Stack, combination, auto_wrap_policy={Block}), floats(dist.get_rank())
    before = model.state_dict()
    twin = copy.deepcopy(model.blocks[1])
    assert_same(twin(x), model.blocks[1](x), "the copy's output")
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    loss_of(twin(x)).backward()
    optimizer.step()
    assert differences(twin.state_dict(), model.blocks[1].state_dict())
    assert_same(model.state_dict(), before, "the state")
    assert all(param.grad is None for param in model.parameters())


# --- a backward that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_full_gradients_of_a_failed_backward_are_refused(transport):
    """A failed backward adds to held gradients: the mean, or this rank's gradient alone. Timing
    decides which, so neither may be used."""
    case = CASES["net"]
    model = wrapped(case.make, ("no_shard", transport))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank = dist.get_rank()
    loss_of(model(case.batch(0, rank))).backward()

    def fail(grad):
        raise LookupError

    loss = loss_of(model(case.batch(1, rank)))
    handle = next(model.parameters()).register_hook(fail)
    with pytest.raises(LookupError):
        loss.backward()
    handle.remove()
    loss = loss_of(model(case.batch(2, rank)))
    for call in (optimizer.step, loss.backward):
        with pytest.raises(RuntimeError, match=r"call zero_grad\(\) on all ranks"):
            call()
    optimizer.zero_grad()
    loss_of(model(case.batch(2, rank))).backward()
    optimizer.step()
