"""FSDP(nonfinite=): a gradient that is infinite or NaN on one rank stops or skips a step on all.

Parameters, optimizer state and counters stay bitwise the same, and the next step is that of
a run without the bad batch.
"""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import COMBINATIONS, loss_of, make
from rows import all_raise
from scenarios import Stack, floats, message_of
from spawn import on_ranks
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
    options = {"process_group": own_group(), "timeout": 30, **options}
    return FSDP(make(Stack), strategy=strategy, transport=transport, **options)


def backward(model, step, bad=0.5, rank=1):
    """A backward in which one rank's own gradient of one parameter has one other element."""
    hook = None
    if dist.get_rank() == rank:
        param = model.blocks[1].down.bias
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
    return {**params, **tensors, "groups": repr(groups)}


def refused_unchanged(model, optimizer, step):
    """Fail unless `step` leaves all as it is; return its result."""
    before = all_of(model, optimizer)
    result = step()
    assert_same(all_of(model, optimizer), before, "what a refused step leaves")
    return result


def train(model, optimizer, bad=None, clip=None):
    for step in range(3):
        for value in (bad, 0.5) if bad is not None and step == 1 else (0.5,):
            optimizer.zero_grad()
            backward(model, step, value)
            if clip is not None:
                model.clip_grad_norm_(clip)
            if value is bad:
                refused_unchanged(model, optimizer, optimizer.step)
            else:
                optimizer.step()
    return all_of(model, optimizer)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2, 3)
@passing_groups()
def test_a_skipped_step_leaves_no_trace(combination, kind, clip, bad):
    plain, model = built(combination), built(combination, nonfinite="skip")
    expected = train(plain, OPTIMIZERS[kind](plain), None, clip)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = train(model, OPTIMIZERS[kind](model), bad, clip)
    assert_same(state, expected, "a run with a bad batch")
    (text,) = [str(each.message) for each in caught if "skip this step" in str(each.message)]
    assert "'blocks.1.down.bias' is not finite: it comes from rank 1;" in text
    assert model.metrics()["steps/skipped"] == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2, 3)
@passing_groups()
def test_all_ranks_raise_before_anything_is_updated(combination, rank):
    model = built(combination, nonfinite="raise")
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, math.nan, rank)

    def step():
        return message_of(optimizer.step, zshard.NonFiniteError)

    text = refused_unchanged(model, optimizer, step)
    assert "all ranks refuse this step: the gradient of 'blocks.1.down.bias'" in text
    assert f"it comes from rank {rank};" in text
    assert 'pass nonfinite="skip"' in text and "steps/skipped" not in model.metrics()
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()  # training continues


def sum_overflows(model):
    for unit in filter(lambda each: isinstance(each, FSDP), model.modules()):
        unit.set_gradient_divide_factor(1.0)  # a mean would not
    backward(model, 0, 3e38 * 0.99, dist.get_rank())


def accumulates(model):
    backward(model, 0, math.nan)
    backward(model, 1)


def in_no_sync(model):
    with model.no_sync():
        backward(model, 0, math.nan)
    backward(model, 1)


def written_by_the_script(model):
    backward(model, 0)
    model.head.weight.grad.mul_(math.nan)


def first_of_several(model):
    hook = model.blocks[1].down.register_forward_hook(lambda _, args, out: out * math.inf)
    if dist.get_rank() != 0:
        hook.remove()
    loss_of(model(floats(dist.get_rank()))).backward()


BIAS = "'blocks.1.down.bias' is not finite: "
CAUSES = {
    "every rank": (
        lambda model: backward(model, 0, math.nan, dist.get_rank()),
        BIAS + "it comes from ranks 0, 1;",
    ),
    "sum overflows": (sum_overflows, BIAS + "each rank's is, but their sum"),
    "accumulated": (accumulates, BIAS + "it comes from rank 1;"),
    "no_sync": (in_no_sync, BIAS + "it comes from rank 1;"),
    "written": (written_by_the_script, "'head.weight' is not finite (on an unknown rank"),
    "first": (first_of_several, "'blocks.0.norm.weight' is not finite: it comes from rank 0;"),
}


@on_ranks(2)
@passing_groups()
def test_what_the_message_says():
    for name, (cause, text) in CAUSES.items():
        model = built(("full_shard", "shm"), nonfinite="raise")
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
        cause(model)
        assert text in message_of(optimizer.step, zshard.NonFiniteError), name
    model = built(("full_shard", "shm"), nonfinite="raise")
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        backward(model, 0, math.nan)
        return 0.0

    assert BIAS + "it comes from rank 1;" in message_of(
        lambda: optimizer.step(closure), zshard.NonFiniteError
    )


@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.AdamW", "torch.fused"])
@on_ranks(2)
@passing_groups()
def test_a_scaler_skips_first(kind):
    """GradScaler's skip comes first, and no finite step is refused."""
    model = built(("full_shard", "shm"), nonfinite="raise")
    optimizer = OPTIMIZERS[kind](model)
    scaler = zshard.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        huge = math.inf if step == 1 and dist.get_rank() == 1 else 1.0
        scaler.scale(loss_of(model(floats(dist.get_rank(), step))) * huge).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)


# --- misuse ---------------------------------------------------------------------------------------


@on_ranks(2)
@passing_groups()
def test_misuse_is_refused():
    def new(**options):
        return built(("no_shard", "shm"), **options)

    modes = "raise", "skip"
    model, other = new(nonfinite="skip"), new()
    adamw, lbfgs = zshard.AdamW(model.parameters()), torch.optim.LBFGS(model.parameters())
    both = zshard.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    all_raise(
        ValueError,
        {
            "nonfinite must be 'raise', 'skip' or None, got 'stop'": lambda: new(nonfinite="stop"),
            "check_replicas must be a number of steps or 0, got -1": lambda: new(check_replicas=-1),
        },
    )
    all_raise(
        NotImplementedError,
        {
            "does not support FSDP(nonfinite=)": lambda: model.optimizer_in_backward(adamw),
            'nonfinite="skip" does not support LBFGS': lambda: lbfgs.step(lambda: 0.0),
            "SGD steps models without nonfinite=": both.step,
        },
    )
    with pytest.raises(zshard.DivergenceError, match="'raise' on rank 0, but 'skip' on rank 1"):
        new(nonfinite=modes[dist.get_rank()])


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
    with pytest.raises(zshard.NonFiniteError, match=r"'weight' is not finite \(on an unknown rank"):
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
