"""zshard.Muon and WholeMatrix in use and misuse: each is right, or an error that says what to do."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import loss_of, make
from scenarios import Stack, floats
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers import muon

COMMON = {"auto_wrap_policy": {nn.Linear}}


def rank():
    return torch.distributed.get_rank()


def build():
    return nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 5))


def model_over(transport, **options):
    return FSDP(make(build), transport=transport, **COMMON, **options)


def backward(model, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + rank())
    loss = model(torch.randn(7, 48, generator=generator)).square().mean()
    loss.backward()
    return loss.detach()


def steps(model, optimizer, n=2):
    for seed in range(n):
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def both(*tests):
    """Run a test on two ranks over shm and over c10d."""
    return ranks(2)(pytest.mark.parametrize("transport", ["shm", "c10d"])(*tests))


# --- a rank that does something else --------------------------------------------------------------


def raises_on_one_rank(transport):
    """All ranks raise, and the next step uses the right elements."""
    found = []
    for fails in (False, True):
        model = model_over(transport)
        optimizer = zshard.Muon(model, lr=0.05)
        steps(model, optimizer, 1)
        before = muon.orthogonalized

        def fail(*_):
            raise MemoryError("no memory")

        if fails:
            state = optimizer.state_dict()
            values = model.state_dict()
            muon.orthogonalized = fail if rank() == 1 else before
            backward(model, 5)
            try:
                said = "no memory" if rank() == 1 else "rank 1: no memory"
                with pytest.raises(MemoryError, match=f"^{said}$"):
                    optimizer.step()
            finally:
                muon.orthogonalized = before
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
        found.append(steps(model, optimizer, 2))
    assert_same(*found, "the model")


@both
def test_an_error_on_one_rank_is_raised_on_all(pool, transport):
    pool.run(raises_on_one_rank, transport)


def whole_matrix_raises(transport):
    class Failing(torch.optim.Adafactor):
        def step(self, closure=None):
            if rank() == 1:
                raise ValueError("no step")
            return super().step(closure)

    model = model_over(transport)
    optimizer = zshard.WholeMatrix(Failing, model.parameters())
    backward(model)
    with pytest.raises(ValueError, match="no step"):
        optimizer.step()


@both
def test_an_error_of_the_optimizer_is_raised_on_all(pool, transport):
    pool.run(whole_matrix_raises, transport)


def lacks_a_gradient(transport):
    """The step is refused before AdamW has updated anything, too."""
    model = model_over(transport)
    optimizer = zshard.Muon(model)
    backward(model)
    if rank() == 0:
        model[0].weight.grad = None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = "the gradient of '0.weight' is None on rank 0, but set on rank 1"
    with pytest.raises(zshard.DivergenceError, match=expected):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert_same(value, before[name], name)


@both
def test_gradients_on_some_ranks_only(pool, transport):
    pool.run(lacks_a_gradient, transport)


def steps_alone(transport):
    model = model_over(transport, timeout=20)
    optimizer = zshard.Muon(model)
    backward(model)
    with pytest.raises(zshard.DivergenceError, match=r"Muon\.step\(\)"):
        if rank() == 0:
            optimizer.step()
        backward(model, 1)


@both
def test_a_step_on_one_rank_alone(pool, transport):
    pool.run(steps_alone, transport)


# --- parameters that take no part -----------------------------------------------------------------


def some_have_no_gradient(transport):
    model = model_over(transport)
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


@both
def test_parameters_without_gradients(pool, transport):
    pool.run(some_have_no_gradient, transport)


def unsharded_beside(transport):
    """A matrix of no sharded model is this rank's alone."""
    model = model_over(transport)
    torch.manual_seed(rank())
    values = torch.randn(6, 4)
    mine, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = zshard.Muon([model[0].weight, mine], lr=0.05)
    backward(model)
    mine.grad = theirs.grad = torch.randn(6, 4)
    optimizer.step()
    torch.optim.Muon([theirs], lr=0.05).step()
    assert_same(mine, theirs, "the matrix")


@both
def test_matrix_of_an_unsharded_module(pool, transport):
    pool.run(unsharded_beside, transport)


# --- with other features --------------------------------------------------------------------------


@on_ranks(2)
def test_offload(tmp_path):
    folder = str(tmp_path)
    found = []
    for options in ({}, {"offload": zshard.Offload(folder)}):
        model = model_over("shm", **options)
        found.append(steps(model, zshard.Muon(model, lr=0.05)))
    assert_same(*found, "the model")


def clips_and_scales(transport):
    """Against the plain model: two micro-batches, a scaler, a clip, and a step with inf."""
    found = []
    for wrap in (True, False):
        model = model_over(transport) if wrap else make(build)
        optimizer = zshard.Muon(model, lr=0.05)
        scaler = zshard.GradScaler(init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            for half in range(2):
                generator = torch.Generator().manual_seed(2 * step + half)
                x = torch.randn(7, 48, generator=generator) * (1e38 if step == 1 else 1.0)
                scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    torch.testing.assert_close(*found, rtol=0.05, atol=2e-3)  # the norm has another order of sums


@both
def test_accumulation_clipping_and_scaling(pool, transport):
    pool.run(clips_and_scales, transport)


@on_ranks(2)
def test_optimizer_that_is_older_than_the_sharded_model():
    found = []
    for strategy in ("full_shard", "no_shard"):
        plain = make(build)
        optimizer = zshard.Muon(plain, lr=0.05)
        plain(torch.ones(2, 48)).square().mean().backward()  # the same on all ranks
        optimizer.step()
        model = FSDP(plain, strategy=strategy, **COMMON)
        found.append(steps(model, optimizer))
    assert_same(*found, "the model")


@on_ranks(2)
def test_closure_and_no_step_in_backward():
    model = model_over("shm")
    optimizer = zshard.Muon(model, lr=0.05)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(TypeError, match=r"expects zshard\.AdamW, Adam or SGD"):
        model.optimizer_in_backward(zshard.Muon(model))


def test_float32_is_close_to_bfloat16():
    found = []
    for dtype in ("bfloat16", "float32"):
        model = make(build)
        optimizer = zshard.Muon(model, lr=0.05, ns_dtype=dtype)
        torch.manual_seed(0)
        model(torch.randn(7, 48)).square().mean().backward()
        optimizer.step()
        found.append(dict(model.named_parameters()))
    assert not torch.equal(found[0]["0.weight"], found[1]["0.weight"])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)


def differs_in_an_option(transport):
    model = model_over(transport)
    optimizer = zshard.Muon(model, symmetric=rank() == 1)
    backward(model)
    with pytest.raises(zshard.DivergenceError, match=r"the options of '0.weight'.*symmetric=False"):
        optimizer.step()


@both
def test_ranks_with_other_options(pool, transport):
    pool.run(differs_in_an_option, transport)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": torch.ones(2)}, "tensor of one element"),
        ({"momentum": -0.1}, "momentum must be at least 0"),
        ({"ns_steps": 100}, r"ns_steps must be in 0 \.\.\. 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        (
            {"adjust_lr_fn": "moonshot"},
            "adjust_lr_fn must be one of .* 'original', 'match_rms_adamw'",
        ),
        ({"ns_dtype": "float16"}, "ns_dtype must be 'bfloat16' or 'float32'"),
        ({"symmetric": 1}, "symmetric must be True or False, got 1"),
        ({"split": 5}, "split=5 does not divide parameter of shape"),
        ({"split": (4, 5)}, r"split=\(4, 5\) does not divide parameter"),
        ({"split": (8, 0)}, "does not divide"),
        ({"split": 0}, "does not divide"),
        ({"split": 2.0}, "does not divide"),
        ({"split": "columns"}, "does not divide"),
        ({"split": ("columns", 4)}, r"does not divide .*, 6.*, number of blocks"),
        ({"split": ("columns", (3, 3))}, "does not divide"),
        ({"split": ("rows", 2)}, "does not divide"),
    ],
)
def test_invalid_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        zshard.Muon([nn.Parameter(torch.ones(8, 6))], **options)


def test_vectors_and_patterns_without_matrices_are_refused():
    with pytest.raises(ValueError, match=r"not for parameter of shape \(96,\).*use_muon=False"):
        zshard.Muon(build().parameters())
    with pytest.raises(ValueError, match=r"'\*\.qkv' matches no name of Muon's"):
        zshard.Muon(build(), split={"*.qkv": 3})
    with pytest.raises(ValueError, match="pass a dict, such as"):
        zshard.Muon(build(), split=3)
    for wrong in ("columns", ("columns", [3]), {3}, 2.5):
        with pytest.raises(ValueError, match="does not divide parameter"):
            zshard.Muon(build(), split={"0.weight": wrong})
    with pytest.raises(NotImplementedError, match="capturable=True"):
        zshard.Muon(build(), adamw={"capturable": True})


def test_more_param_groups():
    case_model = build()
    optimizer = zshard.Muon([case_model[0].weight], lr=0.05)
    optimizer.add_param_group({"params": [case_model[0].bias], "use_muon": False})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    whole = zshard.WholeMatrix(torch.optim.Adafactor, [case_model[1].weight], lr=0.5)
    whole.add_param_group({"params": [case_model[1].bias]})
    assert whole.param_groups[1]["lr"] == 0.5
    case_model(torch.ones(2, 48)).sum().backward()
    optimizer.step()
    whole.step()
    assert len(optimizer.state) == len(whole.state_dict()["state"]) == 2


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_the_momentum(name):
    found = []
    for cls in (torch.optim.Muon, zshard.Muon):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(8, 6))
        optimizer = cls([param], lr=0.1)
        if cls is zshard.Muon:
            rest = {"params": [nn.Parameter(torch.ones(3))], "use_muon": False}
            optimizer.add_param_group(rest)
        arguments = (0.1, 10) if name == "OneCycleLR" else (0.01, 0.1)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)
        for step in range(3):
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad = torch.full_like(each, step - 1.5)
            optimizer.step()
            scheduler.step()
        found.append((param.detach(), optimizer.param_groups[0]["momentum"]))
    assert found[0][1] == found[1][1] != 0.95
    assert_same(found[0][0], found[1][0], "the matrix")


def test_only_the_latest_plans_are_kept():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(12)]
    optimizer = zshard.Muon(params, ns_steps=1)
    for i in (*range(12), 11, 3):
        params[i].grad = torch.ones(4, 4)
        optimizer.step()
        params[i].grad = None
    (known,) = optimizer._whole._members.values()
    assert [key[1] for key in known.plans] == [(i,) for i in (5, 6, 7, 8, 9, 10, 11, 3)]


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


WRONG_GROUPS = [
    (zshard.Muon, {"params": [nn.Parameter(torch.ones(8))]}),
    (zshard.Muon, {"params": [nn.Parameter(torch.ones(8, 8))], "split": 3}),
    (zshard.AdamW, {"params": [nn.Parameter(torch.ones(8))], "differentiable": True}),
    (zshard.AdamW8bit, {"params": [nn.Parameter(torch.ones(8).half())]}),
]


@pytest.mark.parametrize(("made", "group"), WRONG_GROUPS)
def test_a_param_group_that_is_refused_is_not_stepped(made, group):
    optimizer = made([nn.Parameter(torch.ones(8, 8))])
    with pytest.raises((ValueError, NotImplementedError)):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_ns_dtype_of_a_loaded_state_counts_after_steps():
    optimizer = zshard.Muon([nn.Parameter(torch.ones(48, 24))], ns_dtype="bfloat16")
    fresh = zshard.Muon([nn.Parameter(torch.ones(48, 24))], ns_dtype="float32")
    grad = torch.randn(48, 24, generator=torch.Generator().manual_seed(0))
    params = [each.param_groups[0]["params"][0] for each in (optimizer, fresh)]
    params[0].grad = grad.clone()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["ns_dtype"] = "float32"
    for each in (optimizer, fresh):
        each.load_state_dict(copy.deepcopy(state))
    with torch.no_grad():
        params[1].copy_(params[0])
    for param, each in zip(params, (optimizer, fresh), strict=True):
        param.grad = grad.flip(0)
        each.step()
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("kind", ["Muon", "WholeMatrix"])
@on_ranks(2)
def test_a_rank_may_read_alone_before_a_step_of_all(kind):
    """Rank 1 reads full parameters after the backward, when rank 0 steps already."""
    model = FSDP(make(Stack), strategy="full_shard", transport="shm")
    if kind == "Muon":
        optimizer = zshard.Muon(model, lr=0.01)
    else:
        optimizer = zshard.WholeMatrix(torch.optim.Adafactor, model.parameters(), lr=0.01)
    for step in range(3):
        loss_of(model(floats(dist.get_rank(), step))).backward()
        if dist.get_rank() == 1:
            time.sleep(0.1)
            before = [zshard.full_tensor(p) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    after = [zshard.full_tensor(p) for p in model.parameters()]
    assert dist.get_rank() == 0 or not all(a.equal(b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("how", ["hook", "step"])
@pytest.mark.parametrize("kind", ["Muon", "WholeMatrix"])
@on_ranks(2)
def test_gradients_that_differ_when_the_step_begins_are_refused(kind, how):
    """One rank's gradient goes where other ranks have one, after torch's first hooks."""
    model = FSDP(make(Stack), strategy="full_shard", transport="shm", timeout=20)
    cls = zshard.Muon if kind == "Muon" else zshard.WholeMatrix

    def drop(self, *_):
        if dist.get_rank() == 1:
            next(p for group in self.param_groups for p in group["params"]).grad = None

    class Dropping(cls):
        def step(self, closure=None):
            drop(self)
            return super().step(closure)

    made = Dropping if how == "step" else cls
    given = (model,) if kind == "Muon" else (torch.optim.Adafactor, model.parameters())
    optimizer = made(*given, lr=0.01)
    if how == "hook":
        optimizer.register_step_pre_hook(drop)
    loss_of(model(floats(dist.get_rank()))).backward()
    with pytest.raises(zshard.DivergenceError, match="is set on rank 0, but None on rank 1"):
        optimizer.step()
    assert True


def test_whole_matrix_over_a_plain_model_refuses_changed_parameters():
    model = nn.Linear(4, 4)
    optimizer = zshard.WholeMatrix(torch.optim.Adafactor, model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="have lost parameters"):
        optimizer.step()
