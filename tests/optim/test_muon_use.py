"""zshard.Muon and WholeMatrix in use and misuse: right, or an error that says what to do."""

import contextlib
import functools
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import loss_of, make
from rows import all_raise, all_refused, all_rows
from scenarios import Stack, floats
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers import muon

EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])
EACH_KIND = pytest.mark.parametrize("kind", ["Muon", "WholeMatrix"])


def built():
    return nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 5))


def over(transport, **options):
    return FSDP(make(built), transport=transport, auto_wrap_policy={nn.Linear}, **options)


def backward(model, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    loss = model(torch.randn(7, 48, generator=generator)).square().mean()
    loss.backward()
    return loss.detach()


def new_optimizer(cls, model):
    """Return a kind of Muon or of WholeMatrix."""
    rest = (model,) if issubclass(cls, zshard.Muon) else (torch.optim.Adafactor, model.parameters())
    return cls(*rest, lr=0.01)


def steps(model, optimizer, n=2):
    for seed in range(n):
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- a rank that does something else --------------------------------------------------------------


@contextlib.contextmanager
def fails_on_rank_1():
    usual = muon.orthogonalized

    def fail(*_):
        raise MemoryError("no memory")

    muon.orthogonalized = fail if dist.get_rank() == 1 else usual
    try:
        yield
    finally:
        muon.orthogonalized = usual


@EACH_WAY
@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(transport):
    """And the next step uses the right elements."""
    results = []
    for fails in (False, True):
        model = over(transport)
        optimizer = zshard.Muon(model, lr=0.05)
        steps(model, optimizer, 1)
        if fails:
            state, values = optimizer.state_dict(), model.state_dict()
            backward(model, 5)
            said = "no memory" if dist.get_rank() == 1 else "rank 1: no memory"
            with fails_on_rank_1(), pytest.raises(MemoryError, match=f"^{said}$"):
                optimizer.step()
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
        results.append(steps(model, optimizer, 2))
    assert_same(*results, "the model")


@pytest.mark.sampled(3)
@EACH_WAY
@pytest.mark.parametrize("how", ["before", "hook", "step"])
@EACH_KIND
@on_ranks(2)
def test_gradients_that_differ_when_the_step_begins_are_refused(kind, how, transport):
    """One rank's gradient goes where other ranks have one, before or after torch's first hooks;
    nothing has been updated then, by AdamW neither."""
    model, cls = over(transport, timeout=20), getattr(zshard, kind)

    def drop(self, *_):
        if dist.get_rank() == 1:
            model[0].weight.grad = None

    class Dropping(cls):
        def step(self, closure=None):
            drop(self)
            return super().step(closure)

    optimizer = new_optimizer(Dropping if how == "step" else cls, model)
    if how == "hook":
        optimizer.register_step_pre_hook(drop)
    backward(model)
    if how == "before":
        drop(optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = "the gradient of '0.weight' is set on rank 0, but None on rank 1"
    with pytest.raises(zshard.DivergenceError, match=said):
        optimizer.step()
    assert_same(model.state_dict(), before, "the model")


@EACH_WAY
@on_ranks(2)
def test_a_step_on_one_rank_alone(transport):
    model = over(transport, timeout=20)
    optimizer = zshard.Muon(model)
    backward(model)
    with pytest.raises(zshard.DivergenceError, match=r"Muon\.step\(\)"):
        if dist.get_rank() == 0:
            optimizer.step()
        backward(model, 1)


@EACH_WAY
@on_ranks(2)
def test_ranks_with_other_options(transport):
    model = over(transport)
    optimizer = zshard.Muon(model, symmetric=dist.get_rank() == 1)
    backward(model)
    with pytest.raises(zshard.DivergenceError, match=r"the options of '0.weight'.*symmetric=False"):
        optimizer.step()


@EACH_KIND
@on_ranks(2)
def test_a_rank_may_read_alone_before_a_step_of_all(kind):
    """Rank 1 reads full parameters after the backward, when rank 0 steps already."""
    model = FSDP(make(Stack), strategy="full_shard", transport="shm")
    optimizer = new_optimizer(getattr(zshard, kind), model)
    for step in range(3):
        loss_of(model(floats(dist.get_rank(), step))).backward()
        if dist.get_rank() == 1:
            time.sleep(0.1)
            before = [zshard.full_tensor(p) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    after = [zshard.full_tensor(p) for p in model.parameters()]
    assert dist.get_rank() == 0 or not all(a.equal(b) for a, b in zip(before, after, strict=True))


# --- with other features --------------------------------------------------------------------------


@EACH_WAY
@on_ranks(2)
def test_parameters_without_gradients(transport):
    model = over(transport)
    optimizer = zshard.Muon(model)
    optimizer.step()
    assert not optimizer.state
    backward(model)
    before = zshard.full_tensor(model[1].weight)
    model[1].weight.grad = model[1].bias.grad = None
    optimizer.step()
    assert_same(zshard.full_tensor(model[1].weight), before, "the weight")
    assert model[1].weight not in optimizer.state
    model[1].requires_grad_(False)
    steps(model, optimizer, 1)


@EACH_WAY
@on_ranks(2)
def test_matrix_of_an_unsharded_module(transport):
    """A matrix of no sharded model is this rank's alone."""
    model = over(transport)
    torch.manual_seed(dist.get_rank())
    values = torch.randn(6, 4)
    mine, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = zshard.Muon([model[0].weight, mine], lr=0.05)
    backward(model)
    mine.grad = theirs.grad = torch.randn(6, 4)
    optimizer.step()
    torch.optim.Muon([theirs], lr=0.05).step()
    assert_same(mine, theirs, "the matrix")


@on_ranks(2)
def test_closure_and_no_step_in_backward():
    model = over("shm")
    optimizer = zshard.Muon(model, lr=0.05)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(TypeError, match=r"expects zshard\.AdamW, Adam or SGD"):
        model.optimizer_in_backward(zshard.Muon(model))


def test_more_param_groups():
    model = built()
    optimizer = zshard.Muon([model[0].weight], lr=0.05)
    optimizer.add_param_group({"params": [model[0].bias], "use_muon": False})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    whole = zshard.WholeMatrix(torch.optim.Adafactor, [model[1].weight], lr=0.5)
    whole.add_param_group({"params": [model[1].bias]})
    assert whole.param_groups[1]["lr"] == 0.5
    model(torch.ones(2, 48)).sum().backward()
    optimizer.step()
    whole.step()
    assert len(optimizer.state) == len(whole.state_dict()["state"]) == 2


def test_a_plan_does_not_outlive_its_parameters():
    """A new parameter may get the id of one that was freed."""
    param = nn.Parameter(torch.ones(8, 8))
    optimizer = zshard.Muon([param], ns_steps=1)
    for rows in range(8, 12):
        optimizer.state.clear()
        optimizer.param_groups[0]["params"].clear()
        del param
        param = nn.Parameter(torch.ones(rows, 8))
        optimizer.param_groups[0]["params"].append(param)
        param.grad = torch.ones(rows, 8)
        optimizer.step()
        (known,) = optimizer._whole._members.values()
        assert known.params[0]() is param and known.ranges == [((0, 8 * rows),)]


# --- arguments ------------------------------------------------------------------------------------

WRONG = [
    ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
    ({"lr": torch.ones(2)}, "tensor of one element"),
    ({"momentum": -0.1}, "momentum must be at least 0"),
    ({"ns_steps": 100}, "ns_steps must be in 0 ... 99, got 100"),
    ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
    ({"adjust_lr_fn": "moonshot"}, "'original', 'match_rms_adamw'"),
    ({"ns_dtype": "float16"}, "ns_dtype must be 'bfloat16' or 'float32'"),
    ({"symmetric": 1}, "symmetric must be True or False, got 1"),
    ({"split": 5}, "split=5 does not divide parameter of shape"),
    ({"split": (4, 5)}, "split=(4, 5) does not divide paramete"),
    ({"split": (8, 0)}, "does not divide"),
    ({"split": 0}, "does not divide"),
    ({"split": 2.0}, "does not divide"),
    ({"split": "columns"}, "does not divide"),
    ({"split": ("columns", 4)}, "number of blocks"),
    ({"split": ("columns", (3, 3))}, "does not divide"),
    ({"split": ("rows", 2)}, "does not divide"),
]


def test_invalid_arguments():
    matrix, vector, model = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(8)), built()
    table = {
        f"{options}": (lambda options=options: zshard.Muon([matrix], **options), ValueError, said)
        for options, said in WRONG
    }
    for wrong in ("columns", ("columns", [3]), {3}, 2.5):
        options = {"split": {"0.weight": wrong}}
        call = functools.partial(zshard.Muon, model, **options)
        table[f"{options}"] = (call, ValueError, "does not divide parameter")
    new = functools.partial(zshard.Muon, model)
    table |= {
        "vectors": (lambda: zshard.Muon(model.parameters()), ValueError, "use_muon=False"),
        "a pattern": (lambda: new(split={"*.qkv": 3}), ValueError, "'*.qkv' matches no name of"),
        "no pattern": (lambda: new(split=3), ValueError, "pass a dict, such as"),
    }
    all_refused(table)
    capturable = {"capturable": True}
    all_raise(NotImplementedError, {"capturable=True": lambda: new(adamw=capturable)})
    lbfgs = functools.partial(zshard.WholeMatrix, torch.optim.LBFGS, [vector])
    all_raise(TypeError, {"LBFGS needs a closure": lbfgs})


def test_a_param_group_that_is_refused_is_not_stepped():
    vector, matrix = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8, 8))
    half = nn.Parameter(torch.ones(8).half())
    with all_rows() as row:
        for cls, group in (
            (zshard.Muon, {"params": [vector]}),
            (zshard.Muon, {"params": [nn.Parameter(torch.ones(8, 8))], "split": 3}),
            (zshard.AdamW, {"params": [vector], "differentiable": True}),
            (zshard.AdamW8bit, {"params": [half]}),
        ):
            with row(cls.__name__, *group):
                optimizer = cls([matrix])
                with pytest.raises((ValueError, NotImplementedError)):
                    optimizer.add_param_group(group)
                assert len(optimizer.param_groups) == 1
