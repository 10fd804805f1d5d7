"""The torch.optim interface of zshard's optimizers: what C does not support, options, state_dict,
copies."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from compare import assert_same
from optim_cases import IDS, PAIRS, assert_same_bits, give_grads, make_params, reference, train
from rows import all_refused
from torch import nn

import zshard

# --- tensors that the C loop does not support ----------------------------------------------------


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
def test_unusual_memory_layouts_go_to_torch(ours, torchs, options):
    """channels_last, a strided view, a transposed gradient, complex, among plain parameters."""

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
    assert_same(mine.weight, theirs.weight, "the weight")

    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*SparseAdam"):
        zshard.AdamW(table.parameters()).step()


@pytest.mark.parametrize("ours", [zshard.AdamW, zshard.Adam])
def test_unsupported_options_are_refused(ours):
    optimizer, rows = ours(make_params()), {}
    for option in ("capturable", "differentiable"):
        saved = optimizer.state_dict()
        saved["param_groups"][0][option] = True
        group = {"params": make_params(seed=1), option: True}
        calls = {
            "new": functools.partial(ours, make_params(), **{option: True}),
            "group": functools.partial(optimizer.add_param_group, group),
            "load": functools.partial(optimizer.load_state_dict, saved),
        }
        said = f"zshard.{ours.__name__}: {option}=True"
        rows |= {f"{n} {option}": (call, NotImplementedError, said) for n, call in calls.items()}
    for bad in ({"lr": -1}, {"eps": -1}, {"betas": (1.0, 0.9)}, {"weight_decay": -1}):
        rows[f"{bad}"] = (functools.partial(ours, make_params(), **bad), ValueError, "Invalid")
    stepped(optimizer)
    del optimizer.param_groups[0]["eps"]
    all_refused({**rows, "no eps": (optimizer.step, KeyError, "'eps'")})


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


@pytest.mark.parametrize("cls", [zshard.AdamW, zshard.SGD])
def test_a_group_without_parameters_steps_nothing(cls):
    for options in ({"capturable": True}, {}):
        cls([{"params": []}], **options).step()


# --- the rest of torch's interface ---------------------------------------------------------------


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
def test_state_dict_round_trip_through_torch(ours, torchs, options):
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


def stepped(optimizer, grad=1.0):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, grad)
    optimizer.step()
    return optimizer


def two_groups(cls, first, second, shape=(12, 8), dtype=torch.bfloat16, **options):
    groups = [{"params": [nn.Parameter(torch.ones(shape).to(dtype))]} for _ in range(2)]
    return cls([{**groups[0], **first}, {**groups[1], **second}], **options)


ROUNDED = {"stochastic_rounding": True, "rounding_seed": 3}
OWN_OPTIONS = [
    (zshard.AdamW, torch.optim.AdamW, ROUNDED, {}),
    (zshard.SGD, torch.optim.SGD, {"stochastic_rounding": False}, ROUNDED),
    (zshard.SGD, torch.optim.Adam, {"momentum": 0.5}, {"nesterov": False}),
    (zshard.AdamW8bit, torch.optim.AdamW, {"bits": 32}, {"master": "int8", "min_8bit_size": 7}),
    (zshard.Muon, torch.optim.Muon, {"split": 3, "ns_dtype": "float32"}, {"symmetric": True}),
]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("row", OWN_OPTIONS)
def test_options_that_a_state_dict_lacks_stay_those_of_each_group(row, steps):
    ours, torchs, first, second = row  # the two groups' options
    theirs = two_groups(torchs, {}, {}, lr=0.5)
    if torchs is not torch.optim.Adam:  # whose state is not SGD's
        stepped(theirs)
    defaults = {"stochastic_rounding": True} if first.get("stochastic_rounding") is False else {}
    optimizer = two_groups(ours, first, second, **defaults)
    for _ in range(steps):
        stepped(optimizer)
    optimizer.load_state_dict(theirs.state_dict())
    for group, options in zip(optimizer.param_groups, (first, second), strict=True):
        assert {key: group[key] for key in options} == options
        assert group["lr"] == 0.5
        assert group.get("rounding_step", 0) == 0
    stepped(optimizer)


@pytest.mark.parametrize("steps", [0, 1])
def test_options_of_adamws_groups_in_muon_stay_those_of_each_group(steps):
    params = [nn.Parameter(torch.ones(80, 80)) for _ in range(3)]
    groups = [{"params": [params[0]]}, *({"params": [p], "use_muon": False} for p in params[1:])]
    saved = stepped(zshard.Muon(copy.deepcopy(groups))).state_dict()
    groups[2]["bits"] = 32
    optimizer = zshard.Muon(groups, adamw={"bits": 8})
    for _ in range(steps):
        stepped(optimizer)
    optimizer.load_state_dict(saved)
    assert [group.get("bits") for group in optimizer.param_groups] == [None, 8, 32]
    stepped(optimizer)
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in params[1:]]
    assert dtypes == [torch.uint8, torch.float32]


SECOND_GROUPS = [
    (zshard.AdamW, "differentiable"),
    (zshard.SGD, "differentiable"),
    (zshard.AdamW8bit, "amsgrad"),
    (zshard.Muon, "symmetric"),
]


@pytest.mark.parametrize(("cls", "option"), SECOND_GROUPS)
def test_a_refused_load_changes_nothing(cls, option):
    """The second group is refused, and the first one's options would be another."""
    optimizer = stepped(two_groups(cls, {}, {}, dtype=torch.float32))
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["lr"] = 0.7
    saved["param_groups"][1][option] = 2
    for each in saved["state"].values():
        for value in each.values():
            value.add_(1)
    with pytest.raises((NotImplementedError, ValueError), match=option):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before, "the state dict")


MOMENTUM = {"momentum": 0.9}
OTHER_STATE = [
    (zshard.AdamW, torch.optim.SGD, MOMENTUM, "'exp_avg' of parameter 0 is missing"),
    (zshard.AdamW8bit, torch.optim.RMSprop, {}, "'exp_avg' of parameter 0 is missing"),
    (zshard.SGD, torch.optim.AdamW, {}, "'momentum_buffer' of parameter 0 is missing"),
    (zshard.SGD8bit, torch.optim.AdamW, {}, "'momentum_buffer' of parameter 0 is missing"),
    (zshard.Muon, torch.optim.SGD, MOMENTUM, "the saved one has not"),
    (zshard.Muon, torch.optim.AdamW, {}, "'momentum_buffer' of parameter 0 is missing"),
]


def test_state_of_an_optimizer_of_another_kind_is_refused():
    rows = {}
    for ours, theirs, options, said in OTHER_STATE:
        saved = stepped(two_groups(theirs, {}, {}, **options)).state_dict()
        own = MOMENTUM if ours in (zshard.SGD, zshard.SGD8bit) else {}
        load = functools.partial(two_groups(ours, {}, {}, **own).load_state_dict, saved)
        rows[f"{ours.__name__} from {theirs.__name__}"] = (load, ValueError, said)
    all_refused(rows)


FITS_NOT = [zshard.Adam, zshard.AdamW8bit, functools.partial(zshard.SGD, momentum=0.9), zshard.Muon]


@pytest.mark.parametrize("cls", FITS_NOT)
def test_state_that_does_not_fit_is_refused(cls):
    def new(*shape):
        return two_groups(cls, {}, {}, shape=shape, dtype=torch.float32)

    saved = stepped(new(80, 90)).state_dict()
    name = next(key for key in ("exp_avg", "momentum_buffer") if key in saved["state"][1])
    said = f"'{name}' of parameter 0 has shape (80, 90), expected (90, 80)"
    rows = {"shape": (functools.partial(new(90, 80).load_state_dict, saved), ValueError, said)}
    for each in {name, "step"} & saved["state"][1].keys():
        lacks = copy.deepcopy(saved)
        lacks["state"][1]["ours"] = lacks["state"][1].pop(each)
        load = functools.partial(new(80, 90).load_state_dict, lacks)
        rows[each] = (load, ValueError, f"'{each}' of parameter 1 is missing")
    all_refused(rows)


SMALL = {"min_8bit_size": 0}
OPTIMIZERS = {
    "SGD": functools.partial(zshard.SGD, lr=0.1, **MOMENTUM),
    "SGD8bit": functools.partial(zshard.SGD8bit, lr=0.1, **MOMENTUM, **SMALL),
    "AdamW": zshard.AdamW,
    "AdamW8bit": functools.partial(zshard.AdamW8bit, **SMALL),
    "Adam": zshard.Adam,
    "Adam8bit": functools.partial(zshard.Adam8bit, **SMALL),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(how, kind):
    params = make_params()
    optimizer = OPTIMIZERS[kind](params)
    train([(optimizer, params)], steps=2)
    pair = (optimizer, params)
    copied, others = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train([(optimizer, params), (copied, others)], steps=2, start=2)
    assert_same_bits(params, others)
    assert others[0].data_ptr() != params[0].data_ptr()


def test_a_copy_of_what_ranks_share_is_refused_with_the_remedy():
    params = [nn.Parameter(torch.ones(4, 4))]
    for optimizer in (zshard.Muon(params), zshard.WholeMatrix(torch.optim.Adafactor, params)):
        for copied in (copy.deepcopy, pickle.dumps):
            said = rf"{type(optimizer).__name__} cannot .* load_state_dict\(\)"
            with pytest.raises(TypeError, match=said):
                copied(optimizer)


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


def test_step_between_forward_and_backward_is_detected():
    params = [nn.Parameter(torch.ones(3))]
    optimizer = zshard.SGD(params, 0.1)
    loss = (params[0] * params[0]).sum()
    params[0].grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nan_and_inf_propagate_as_in_torch():
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
    optimizer = stepped(zshard.AdamW([param]))
    param.optimizer = optimizer
    held = optimizer, param, optimizer.state[param]["exp_avg"]
    references = [weakref.ref(each) for each in held]
    del optimizer, param, held
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
