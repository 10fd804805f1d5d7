"""zshard.AdamW, Adam and SGD against torch.optim: numbers, state, options, and when a plan is old.

The yardstick is torch's own: SGD must have the bits of torch.optim.SGD, Adam and AdamW those of
torch's fused step, and stay within 3e-7 of its default step, whose square root is less exact.
"""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import zshard

SIZES = [(16,), (3, 5), (1,), (0,), (130, 77), (64, 1, 1), (4099,)]

ADAM_OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.3, 0.5), "eps": 1e-3, "lr": 0.5},
    {"betas": (0.0, 0.0)},
]
SGD_OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
]
PAIRS = [
    *((zshard.AdamW, torch.optim.AdamW, options) for options in ADAM_OPTIONS),
    *((zshard.Adam, torch.optim.Adam, options) for options in ADAM_OPTIONS),
    *((zshard.SGD, torch.optim.SGD, options) for options in SGD_OPTIONS),
]
IDS = [f"{ours.__name__}-{options}" for ours, _, options in PAIRS]


def make_params(dtype=torch.float32, sizes=SIZES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def give_grads(*lists, seed=0):
    """Equal random gradients for the parameters of each list."""
    for params in zip(*lists, strict=True):
        seed += 1
        grad = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(seed))
        for param in params:
            param.grad = grad.to(param.dtype)


def train(optimizers_and_params, steps=5, start=0):
    """Steps all optimizers side by side, with equal gradients."""
    for step in range(start, start + steps):
        give_grads(*(params for _, params in optimizers_and_params), seed=1000 * step)
        for optimizer, _ in optimizers_and_params:
            optimizer.step()


def assert_same_bits(mine, theirs):
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} elements differ"


def state_tensors(optimizer, params, names):
    return [optimizer.state[p][name] for p in params for name in names]


def reference(cls, params, **options):
    """Torch's optimizer that computes what ours does: its fused Adam, its plain SGD."""
    fused = {} if cls is torch.optim.SGD else {"fused": True}
    return cls(params, **options, **fused)


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_of_torch(ours, torchs, options, dtype):
    mine, theirs = make_params(dtype), make_params(dtype)
    if torchs is not torch.optim.SGD:  # the scalar tail of torch's loop may round otherwise
        mine, theirs = mine[4:6], theirs[4:6]
        mine[0], theirs[0] = (
            nn.Parameter(p.detach()[:128, :64].clone()) for p in (mine[0], theirs[0])
        )
    a, b = ours(mine, **options), reference(torchs, theirs, **options)
    train([(a, mine), (b, theirs)])
    assert_same_bits(mine, theirs)
    names = [name for name in b.state[theirs[0]] if b.state[theirs[0]][name] is not None]
    assert list(a.state[mine[0]]) == names
    assert_same_bits(state_tensors(a, mine, names), state_tensors(b, theirs, names))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("ours", [zshard.AdamW, zshard.Adam])
def test_near_torchs_default_at_every_step(ours, amsgrad):
    """Within 3e-7 of the largest of old parameter, new one and update, at each step."""
    torchs = getattr(torch.optim, ours.__name__)
    mine, theirs = make_params(), make_params()
    options = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": amsgrad}
    a, b = ours(mine, **options), torchs(theirs, **options)
    for step in range(10):
        before = [p.detach().clone() for p in theirs]
        train([(a, mine), (b, theirs)], steps=1, start=step)
        for x, y, old in zip(mine, theirs, before, strict=True):
            scale = torch.stack([old, y.detach(), y.detach() - old]).abs().amax(0)
            assert ((x - y).abs() <= 3e-7 * scale).all()
        with torch.no_grad():
            for x, y in zip(mine, theirs, strict=True):
                x.copy_(y)


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_one_float_step_rounded(ours, torchs, options, dtype):
    """Parameter and state go to float, through torch's step, and back rounded."""
    mine = make_params(dtype)
    optimizer = ours(mine, **options)
    floats = [nn.Parameter(p.detach().float()) for p in mine]
    oracle = torchs(floats, **options)
    for step in range(4):
        give_grads(mine, seed=1000 * step)
        for p, f in zip(mine, floats, strict=True):
            f.grad = p.grad.float()
        optimizer.step()
        oracle.step()
        for p, f in zip(mine, floats, strict=True):
            torch.testing.assert_close(p.float(), f, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            with torch.no_grad():
                f.copy_(p)
            for name, value in oracle.state[f].items():
                if name != "step" and value is not None:
                    value.copy_(optimizer.state[p][name])


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_every_instruction_set(isa):
    """Each set's loops, in a process that may use no better one, beside torch limited likewise."""
    tests = "test_bits_of_torch or test_half_precision"
    capability = {"base": "default"}.get(isa, isa)
    env = {**os.environ, "ZSHARD_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        tests,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_threads_do_not_change_bits():
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params = make_params(sizes=[(300_001,), (7,), (70_000,)])
        train([(zshard.AdamW(params), params)], steps=3)
        results.append(params)
    torch.set_num_threads(before)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_neighbours_of_one_flat_buffer_are_not_mixed_up():
    """Slices with and without gaps, some without gradients: as separate tensors."""
    flat = torch.randn(4096)
    pieces = [(0, 100), (100, 300), (304, 304), (304, 1000), (1010, 1011), (2048, 4096)]
    mine = [nn.Parameter(flat[a:b].unsqueeze(1)) for a, b in pieces]
    theirs = [nn.Parameter(flat[a:b].clone().unsqueeze(1)) for a, b in pieces]
    gaps = torch.cat([flat[300:304], flat[1000:1010], flat[1011:2048]])
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    for step in range(6):
        give_grads(mine, theirs, seed=100 * step)
        mine[step].grad = theirs[step].grad = None
        a.step()
        b.step()
    assert_same_bits(mine, theirs)
    assert torch.equal(gaps, torch.cat([flat[300:304], flat[1000:1010], flat[1011:2048]]))


def test_state_lies_side_by_side_like_the_parameters():
    flat = torch.randn(1000)
    params = [nn.Parameter(flat[:300]), nn.Parameter(flat[304:500]), nn.Parameter(flat[500:])]
    optimizer = zshard.AdamW(params)
    train([(optimizer, params)], steps=1)
    for name in ("exp_avg", "exp_avg_sq"):
        tensors = state_tensors(optimizer, params, [name])
        offsets = [t.data_ptr() - tensors[0].data_ptr() for t in tensors]
        assert offsets == [p.data_ptr() - params[0].data_ptr() for p in params]


# --- parameters that come, go and change -------------------------------------------------------


def test_parameters_without_gradients_are_left_alone():
    params = make_params()
    optimizer = zshard.AdamW(params)
    give_grads(params)
    params[0].grad = None
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state
    assert [optimizer.state[p]["step"].item() for p in params[1:]] == [1.0] * (len(params) - 1)


def test_gradients_that_come_later():
    mine, theirs = make_params(), make_params()
    a, b = (
        zshard.SGD(mine, 0.1, momentum=0.9, dampening=0.5),
        torch.optim.SGD(theirs, 0.1, 0.9, 0.5),
    )
    for step in range(5):
        give_grads(mine, theirs, seed=100 * step)
        for i in range(len(mine) - step):
            mine[-1 - i].grad = theirs[-1 - i].grad = None if i >= step + 2 else mine[-1 - i].grad
        a.step()
        b.step()
    assert_same_bits(mine, theirs)


def test_each_step_counts_for_its_own_parameter():
    """Unequal step counts give unequal bias corrections, in one call."""
    mine, theirs = make_params(sizes=[(64,)] * 4), make_params(sizes=[(64,)] * 4)
    a, b = zshard.AdamW(mine), torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        give_grads(mine, theirs, seed=100 * step)
        for i in range(step):
            mine[i].grad = theirs[i].grad = None
        a.step()
        b.step()
    assert_same_bits(mine, theirs)
    assert [a.state[p]["step"].item() for p in mine] == [1.0, 2.0, 3.0, 4.0]


def test_add_param_group_and_groups_of_their_own():
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine[:3], 0.1, momentum=0.9), torch.optim.SGD(theirs[:3], 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    a.add_param_group({"params": mine[3:], "lr": 0.5, "momentum": 0.1})
    b.add_param_group({"params": theirs[3:], "lr": 0.5, "momentum": 0.1})
    train([(a, mine), (b, theirs)], steps=3, start=2)
    assert_same_bits(mine, theirs)


def test_replaced_parameter_list():
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    a.param_groups[0]["params"], b.param_groups[0]["params"] = mine[2:], theirs[2:]
    train([(a, mine), (b, theirs)], steps=2, start=2)
    assert_same_bits(mine, theirs)


def test_moved_memory_is_found():
    """`p.data = ...` for a parameter and for its state, between steps."""
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    mine[4].data = mine[4].data.clone()
    buffer = a.state[mine[4]]["momentum_buffer"]
    buffer.data = buffer.data.clone()
    train([(a, mine), (b, theirs)], steps=2, start=2)
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("how", ["tensor", "entry", "clear", "delete"])
def test_replaced_state_is_found(how):
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    for optimizer, params in ((a, mine), (b, theirs)):
        p, old = params[4], optimizer.state[params[4]]["momentum_buffer"]
        if how == "tensor":
            optimizer.state[p]["momentum_buffer"] = old * 2
        elif how == "entry":
            optimizer.state[p] = {"momentum_buffer": old * 3}
        elif how == "clear":
            optimizer.state.clear()
        else:
            del optimizer.state[p]
    train([(a, mine), (b, theirs)], steps=2, start=2)
    assert_same_bits(mine, theirs)


def test_options_changed_between_steps():
    """A scheduler's lr, and amsgrad and momentum turned on: state that was not needed is made."""
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1), torch.optim.SGD(theirs, 0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (a, b)]
    for step in range(4):
        train([(a, mine), (b, theirs)], steps=1, start=step)
        for schedule in schedules:
            schedule.step()
        a.param_groups[0]["momentum"] = b.param_groups[0]["momentum"] = 0.9 if step else 0
    assert_same_bits(mine, theirs)

    params = make_params()
    adam = zshard.AdamW(params)
    train([(adam, params)], steps=1)
    adam.param_groups[0]["amsgrad"] = True
    train([(adam, params)], steps=1, start=1)
    assert all("max_exp_avg_sq" in adam.state[p] for p in params)


def test_lr_and_betas_as_tensors():
    mine, theirs = make_params(), make_params()
    options = {"lr": torch.tensor(0.125), "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    a, b = zshard.AdamW(mine, **options), zshard.AdamW(theirs, lr=0.125, betas=(0.5, 0.75))
    train([(a, mine), (b, theirs)])
    assert_same_bits(mine, theirs)


# --- what the C loop does not take ---------------------------------------------------------------


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
def test_what_is_not_plain_memory_goes_to_torch(ours, torchs, options):
    """channels_last, a strided view, a transposed gradient, complex, beside plain parameters."""

    def make():
        plain = make_params(sizes=[(8, 3, 3, 3), (6, 4), (5, 7), (9,)])
        plain[0].data = plain[0].data.to(memory_format=torch.channels_last)
        plain[1].data = plain[1].data[:, ::2]
        return [*plain, nn.Parameter(torch.arange(4) * (1 + 2j))]

    mine, theirs = make(), make()
    if "amsgrad" in options:  # torch has no maximum of complex numbers
        mine, theirs = mine[:4], theirs[:4]
    a, b = ours(mine, **options), torchs(theirs, **options)
    for step in range(4):
        give_grads(mine, theirs, seed=100 * step)
        mine[2].grad = theirs[2].grad = mine[2].grad.t().contiguous().t()
        a.step()
        b.step()
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert a.state[mine[3]].keys() == b.state[theirs[3]].keys()
    if torchs is not torch.optim.SGD:
        assert a.state[mine[0]]["exp_avg"].stride() == b.state[theirs[0]]["exp_avg"].stride()


def test_sparse_gradients():
    mine, theirs = (nn.Embedding(10, 3, sparse=True) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    for module, cls in ((mine, zshard.SGD), (theirs, torch.optim.SGD)):
        optimizer = cls(module.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.tensor([1, 2, 2])).sum().backward()
            optimizer.step()
    assert torch.equal(mine.weight, theirs.weight)

    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*SparseAdam"):
        zshard.AdamW(table.parameters()).step()


@pytest.mark.parametrize("ours", [zshard.AdamW, zshard.Adam])
@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_cannot_be_honoured_are_refused(ours, option):
    params = make_params()
    with pytest.raises(NotImplementedError, match=f"zshard.{ours.__name__}: {option}=True"):
        ours(params, **{option: True})
    optimizer = ours(params)
    with pytest.raises(NotImplementedError, match=option):
        optimizer.add_param_group({"params": make_params(seed=1), option: True})
    optimizer = ours(params)
    saved = optimizer.state_dict()
    saved["param_groups"][0][option] = True
    with pytest.raises(NotImplementedError, match=option):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "bad", [{"lr": -1}, {"eps": -1}, {"betas": (1.0, 0.9)}, {"weight_decay": -1}]
)
def test_numbers_out_of_range(bad):
    with pytest.raises(ValueError, match="Invalid"):
        zshard.AdamW(make_params(), **bad)


def test_foreach_and_fused_make_no_difference():
    results = []
    for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
        params = make_params()
        optimizer = zshard.AdamW(params, **options)
        assert not optimizer._step_supports_amp_scaling
        train([(optimizer, params)], steps=2)
        results.append(params)
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_a_group_without_an_option_names_it():
    params = make_params()
    optimizer = zshard.AdamW(params)
    give_grads(params)
    optimizer.step()
    del optimizer.param_groups[0]["eps"]
    with pytest.raises(KeyError, match="'eps'"):
        optimizer.step()


# --- the rest of torch's face --------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
def test_state_dict_there_and_back(ours, torchs, options):
    """Three steps with ours, two with torch's on the saved state, two with ours again."""
    mine, theirs = make_params(sizes=[(64,), (16, 4)]), make_params(sizes=[(64,), (16, 4)])
    a, b = ours(mine, **options), reference(torchs, theirs, **options)
    train([(a, mine), (b, theirs)], steps=3)

    c = reference(torchs, mine, **options)
    c.load_state_dict(_through_disk(a.state_dict()))
    c.param_groups[0]["fused"] = b.param_groups[0]["fused"]
    train([(c, mine), (b, theirs)], steps=2, start=3)
    assert_same_bits(mine, theirs)

    d = ours(mine, **options)
    d.load_state_dict(_through_disk(c.state_dict()))
    train([(d, mine), (b, theirs)], steps=2, start=5)
    assert_same_bits(mine, theirs)
    assert a.state_dict()["param_groups"][0].keys() == b.state_dict()["param_groups"][0].keys()


def _through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_old_state_with_a_number_for_step():
    params = make_params()
    optimizer = zshard.AdamW(params)
    train([(optimizer, params)], steps=2)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["step"] = 2
    optimizer.load_state_dict(saved)
    train([(optimizer, params)], steps=1, start=2)
    assert {optimizer.state[p]["step"].item() for p in params} == {3.0}


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(how):
    params = make_params()
    optimizer = zshard.SGD(params, 0.1, momentum=0.9)
    train([(optimizer, params)], steps=2)
    pair = (optimizer, params)
    copied, others = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train([(optimizer, params), (copied, others)], steps=2, start=2)
    assert_same_bits(params, others)
    assert others[0].data_ptr() != params[0].data_ptr()


def test_closure_hooks_and_profiler_name():
    params = make_params()
    optimizer = zshard.AdamW(params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0
    assert calls == ["before", "closure", "after"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}


def test_a_step_between_forward_and_backward_is_found():
    params = [nn.Parameter(torch.ones(3))]
    optimizer = zshard.SGD(params, 0.1)
    loss = (params[0] * params[0]).sum()
    params[0].grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_grad_scaler():
    params = [nn.Parameter(torch.ones(8))]
    optimizer = zshard.AdamW(params, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((params[0] * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(params[0].grad, torch.full((8,), 2.0))
    after = params[0].detach().clone()
    params[0].grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert torch.equal(params[0], after)


def test_nan_and_inf_go_where_torch_puts_them():
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38, 1.0] * 4
    for ours, torchs, options in PAIRS:
        mine, theirs = make_params(sizes=[(32,)]), make_params(sizes=[(32,)])
        a, b = ours(mine, **options), reference(torchs, theirs, **options)
        for step in range(3):
            give_grads(mine, theirs, seed=step)
            if step == 1:
                mine[0].grad = theirs[0].grad = torch.tensor(values)
            a.step()
            b.step()
        torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0, equal_nan=True)


def test_nothing_is_kept_alive():
    """Not even by an optimizer that its own parameter refers to."""
    param = nn.Parameter(torch.ones(4))
    optimizer = zshard.AdamW([param])
    param.optimizer = optimizer
    param.sum().backward()
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
    refs = [
        weakref.ref(optimizer),
        weakref.ref(param),
        weakref.ref(optimizer.state[param]["exp_avg"]),
    ]
    del optimizer, param
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_plan_refuses_what_it_cannot_use():
    from zshard import _core

    params = make_params()
    with pytest.raises(ValueError, match="'adam' or 'sgd', not 'lion'"):
        _core.OptimPlan("lion", params, {}, set())
    with pytest.raises(TypeError, match="updates tensors, not int"):
        _core.OptimPlan("sgd", [1], {}, set())
    plan = _core.OptimPlan("sgd", params, {}, set())
    with pytest.raises(TypeError, match="both dicts"):
        plan.step(params, {})
    with pytest.raises(KeyError, match="'params'"):
        plan.step({}, {})
