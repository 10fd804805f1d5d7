"""FSDP(nonfinite=): a gradient that is infinite or NaN on one rank stops or skips a step on all.

Parameters, optimizer state and counters stay as they were, to the bit, and the next step is that of
a run without the bad batch.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import COMBINATIONS, differences, loss_of, make
from scenarios import Stack, floats, message_of
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP

OPTIMIZERS = {
    "zshard.AdamW": lambda model: zshard.AdamW(model.parameters(), lr=1e-2),
    "zshard.SGD": lambda model: zshard.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "zshard.AdamW8bit": lambda model: zshard.AdamW8bit(model.parameters(), lr=1e-2),
    "torch.AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "torch.fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "torch.SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "zshard.Muon": lambda model: zshard.Muon(model, lr=1e-2),
}


def built(combination, **options):
    strategy, transport = combination
    given = {"process_group": own_group(), "timeout": 30, **options}
    return FSDP(make(Stack), strategy=strategy, transport=transport, **given)


def backward(model, step, bad=None, rank=1):
    """A backward whose gradient for blocks.1.down.bias is `bad` on one rank."""
    hook = None
    if bad is not None and dist.get_rank() == rank:
        hook = model.blocks[1].down.register_forward_hook(
            lambda _, args, out: out + (bad * out.detach()).sum() * 0 * out
        )
    loss_of(model(floats(dist.get_rank(), step))).backward()
    if hook is not None:
        hook.remove()


def poisoned(model, step, bad, rank):
    """A backward in which one rank's own gradient of one parameter has one bad element."""
    param = model.blocks[1].down.bias
    hook = None
    if dist.get_rank() == rank:
        hook = param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), bad))
    loss_of(model(floats(dist.get_rank(), step))).backward()
    if hook is not None:
        hook.remove()


def all_of(model, optimizer):
    """All that a skipped step must leave as it is."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = optimizer.state_dict()["state"]
    flat = {f"{i}.{k}": v for i, entries in state.items() for k, v in entries.items()}
    tensors = {k: v.clone() for k, v in flat.items() if torch.is_tensor(v)}
    params = {k: v.clone() for k, v in model.state_dict().items()}
    return {**params, **tensors}, repr(groups)


def train(model, optimizer, steps, bad=None, clip=None):
    for step in range(steps):
        optimizer.zero_grad()
        if bad is not None and step == 1:
            poisoned(model, step, *bad)
            if clip is not None:
                model.clip_grad_norm_(clip)
            before = all_of(model, optimizer)
            optimizer.step()
            after = all_of(model, optimizer)
            assert differences(before[0], after[0]) == [] and before[1] == after[1]
            optimizer.zero_grad()
        poisoned(model, step, 0.5, 1)
        if clip is not None:
            model.clip_grad_norm_(clip)
        optimizer.step()


@passing_groups()
def skipped(combination, kind, bad, clip):
    """Return what differs from a run without the bad batch, the warnings, the count."""
    plain = built(combination)
    train(plain, optimizer := OPTIMIZERS[kind](plain), 3, None, clip)
    expected = all_of(plain, optimizer)
    model = built(combination, nonfinite="skip")
    optimizer = OPTIMIZERS[kind](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 3, (bad, 1), clip)
    found = all_of(model, optimizer)
    texts = [str(each.message) for each in caught if "skip this step" in str(each.message)]
    assert found[1] == expected[1]
    return differences(found[0], expected[0]), texts, model.metrics()["steps/skipped"]


@pytest.mark.sampled(7)
@ranks(2, 3)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_skipped_step_leaves_no_trace(pool, combination, kind, clip):
    for bad in (math.nan, math.inf):
        for different, texts, count in pool.run(skipped, combination, kind, bad, clip):
            assert different == [] and count == 1
            (text,) = texts
            assert "'blocks.1.down.bias' is not finite: it comes from rank 1;" in text


@passing_groups()
def raised(combination, rank):
    model = built(combination, nonfinite="raise")
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    poisoned(model, 1, math.nan, rank)
    before = all_of(model, optimizer)
    text = message_of(optimizer.step, zshard.NonFiniteError)
    after = all_of(model, optimizer)
    assert differences(before[0], after[0]) == [] and before[1] == after[1]
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()  # training continues
    return text, "steps/skipped" in model.metrics()


@pytest.mark.sampled(4)
@ranks(2, 3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_all_ranks_raise_before_anything_is_updated(pool, combination, rank):
    for text, counted in pool.run(raised, combination, rank):
        assert "all ranks refuse this step: the gradient of 'blocks.1.down.bias'" in text
        assert f"it comes from rank {rank};" in text
        assert 'pass nonfinite="skip"' in text and not counted


@passing_groups()
def others(what):
    """Cases of one model each; returns the error's text, or what was found."""
    model = built(("full_shard", "shm"), nonfinite="raise")
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    if what == "every rank":
        poisoned(model, 0, math.nan, dist.get_rank())
    elif what == "sum overflows":
        for unit in filter(lambda each: isinstance(each, zshard.FSDP), model.modules()):
            unit.set_gradient_divide_factor(1.0)  # a mean would not
        poisoned(model, 0, 3e38 * 0.99, dist.get_rank())
        with torch.no_grad():
            assert model.blocks[1].down.bias.grad is not None
    elif what == "accumulated":
        poisoned(model, 0, math.nan, 1)
        backward(model, 1)
    elif what == "no_sync":
        with model.no_sync():
            poisoned(model, 0, math.nan, 1)
        backward(model, 1)
    elif what == "written by the script":
        backward(model, 0)
        model.head.weight.grad.mul_(math.nan)
    elif what == "first of several":
        backward(model, 0, math.inf, 0)
    elif what == "closure":

        def closure():
            optimizer.zero_grad()
            poisoned(model, 0, math.nan, 1)
            return 0.0

        return message_of(lambda: optimizer.step(closure), zshard.NonFiniteError)
    return message_of(optimizer.step, zshard.NonFiniteError)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("every rank", "'blocks.1.down.bias' is not finite: it comes from ranks 0, 1;"),
        ("sum overflows", "'blocks.1.down.bias' is not finite: each rank's is, but their sum"),
        ("accumulated", "'blocks.1.down.bias' is not finite: it comes from rank 1;"),
        ("no_sync", "'blocks.1.down.bias' is not finite: it comes from rank 1;"),
        ("written by the script", "'head.weight' is not finite (on an unknown rank"),
        ("first of several", "'blocks.0.norm.weight' is not finite: it comes from rank 0;"),
        ("closure", "'blocks.1.down.bias' is not finite: it comes from rank 1;"),
    ],
)
def test_what_the_message_says(pool2, what, text):
    for said in pool2.run(others, what):
        assert text in said


@passing_groups()
def scaled(kind):
    """GradScaler's skip comes first, and no finite step is refused."""
    model = built(("full_shard", "shm"), nonfinite="raise")
    optimizer = OPTIMIZERS[kind](model)
    scaler = zshard.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        huge = math.inf if step == 1 and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(model(floats(dist.get_rank(), step))) * huge).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.AdamW", "torch.fused"])
def test_a_scaler_skips_first(pool2, kind):
    assert pool2.run(scaled, kind) == [[1024.0, 512.0, 512.0]] * 2


# --- misuse ---------------------------------------------------------------------------------------


@passing_groups()
def refused(what):
    combination = ("no_shard", "shm")
    if what in ("wrong", "number"):
        options = {"wrong": {"nonfinite": "stop"}, "number": {"check_replicas": -1}}
        return message_of(lambda: built(combination, **options[what]), ValueError)
    if what == "different":
        mode = "skip" if dist.get_rank() else "raise"
        return message_of(lambda: built(combination, nonfinite=mode), zshard.DivergenceError)
    model = built(combination, nonfinite="skip")
    if what == "backward":
        optimizer = zshard.AdamW(model.parameters())
        return message_of(lambda: model.optimizer_in_backward(optimizer), NotImplementedError)
    if what == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters())
        return message_of(lambda: optimizer.step(lambda: 0.0), NotImplementedError)
    other = built(combination)
    optimizer = zshard.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    return message_of(optimizer.step, NotImplementedError)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("wrong", "nonfinite must be 'raise', 'skip' or None, got 'stop'"),
        ("number", "check_replicas must be a number of steps or 0, got -1"),
        ("different", "nonfinite is 'raise' on rank 0, but 'skip' on rank 1"),
        ("backward", "optimizer_in_backward() does not support FSDP(nonfinite=)"),
        ("lbfgs", 'nonfinite="skip" does not support LBFGS'),
        ("two models", "SGD steps models without nonfinite="),
    ],
)
def test_misuse_is_refused(pool2, what, text):
    for said in pool2.run(refused, what):
        assert text in said


def test_a_single_process_checks_too():
    model = FSDP(nn.Linear(3, 3), nonfinite="raise")
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    (model(torch.ones(1, 3)).sum() * math.nan).backward()
    with pytest.raises(zshard.NonFiniteError, match=r"'weight' is not finite \(on an unknown rank"):
        optimizer.step()


def single(nonfinite, cls=torch.optim.SGD):
    torch.manual_seed(0)
    model = FSDP(nn.Linear(3, 3), nonfinite=nonfinite)
    return model, cls(model.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:all ranks skip this step")
@pytest.mark.parametrize("cls", [torch.optim.SGD, zshard.AdamW])
@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
def test_gradients_that_a_hook_of_the_step_sets_to_none_stay_so(cls, zeroes):
    model, optimizer = single("skip", cls)
    calls = []

    def zero(*_):
        calls.append([param.grad is None for param in model.parameters()])
        (model if zeroes == "model" else optimizer).zero_grad()

    optimizer.register_step_post_hook(zero)
    for step in range(4):
        (model(torch.ones(1, 3)).sum() * (math.nan if step == 1 else 1.0)).backward()
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())
    assert model.metrics()["steps/skipped"] == 1
    assert calls == [[False, False]] * 4  # it sees the gradients, as without a skip
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_an_error_in_a_closure_that_ran_after_a_move_says_so():
    model, optimizer = single("raise", torch.optim.LBFGS)
    losses = iter((1.0, 1.0, math.nan))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum() * next(losses)
        loss.backward()
        return loss

    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(zshard.NonFiniteError, match="continue after a reload"):
        optimizer.step(closure)
    assert not torch.equal(before[1], model.bias)


def test_parameters_of_another_model_in_place_of_as_many_are_checked():
    (first, optimizer), (second, _) = single("raise"), single("raise")
    for model, bad in zip((first, second), (1.0, math.nan), strict=True):
        optimizer.param_groups[0]["params"] = list(model.parameters())
        (model(torch.ones(1, 3)).sum() * bad).backward()
        if bad == 1.0:
            optimizer.step()
    with pytest.raises(zshard.NonFiniteError, match="'weight' is not finite"):
        optimizer.step()


class Composite(torch.optim.Optimizer):
    """Its step() calls two other optimizers', each over a part of its parameters."""

    def __init__(self, *inner):
        super().__init__([p for each in inner for p in each.param_groups[0]["params"]], {})
        self.inner = inner

    def step(self, closure=None):
        for each in self.inner:
            each.step()


@pytest.mark.filterwarnings("ignore:all ranks skip this step")
@pytest.mark.parametrize("kind", [zshard.SGD, torch.optim.AdamW])
def test_a_skipped_step_of_several_optimizers_leaves_no_trace(kind):
    (model, _) = single("skip")
    optimizer = Composite(*(kind([param], lr=0.1) for param in model.parameters()))
    before = []
    for bad in (1.0, math.nan, 1.0):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).square().sum() * bad).backward()
        before.append([param.detach().clone() for param in model.parameters()])
        optimizer.step()
    assert all(map(torch.equal, before[1], before[2]))
    assert not any(map(torch.equal, before[2], model.parameters()))


def test_a_model_whose_group_was_dropped_in_its_step_is_still_checked():
    (first, _), (second, _) = single("raise"), single("raise")
    groups = [{"params": list(model.parameters())} for model in (first, second)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups.pop())
    for model in (first, second):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    other.zero_grad()
    (second(torch.ones(1, 3)).sum() * math.nan).backward()
    with pytest.raises(zshard.NonFiniteError, match="not finite"):
        other.step()
