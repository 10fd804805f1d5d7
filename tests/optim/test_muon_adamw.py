"""AdamW inside zshard.Muon: zshard.AdamW's bits, and with "bits": 8 those of zshard.AdamW8bit."""

import pytest
import torch
from compare import assert_same, differences
from groups import case_of, hosts_of
from models import CASES, COMBINATIONS, TRANSPORTS, ddp, make, sharded, train
from optim_states import HYBRID, differ, go_on, wrap
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers.matrices import hidden_matrices

EIGHT = {"lr": 0.01, "bits": 8, "min_8bit_size": 64}


def own_rank():
    return torch.distributed.get_rank()


def rest_of(model):
    hidden = hidden_matrices(model)
    return [param for param in model.parameters() if id(param) not in hidden]


class Pair:
    """torch.optim.Muon for what zshard.Muon chooses, and zshard.AdamW8bit for the rest."""

    def __init__(self, model):
        hidden = hidden_matrices(model)
        self.muon = torch.optim.Muon([p for p in model.parameters() if id(p) in hidden], lr=0.05)
        self.adamw = zshard.AdamW8bit(rest_of(model), lr=0.01, min_8bit_size=64)

    def zero_grad(self):
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self):
        self.muon.step()
        self.adamw.step()


def state_of_rest(state_dict, model):
    """Return AdamW's state in the order of its parameters, which come after Muon's."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    own = numbers[len(numbers) - len(rest_of(model)) :]
    return [state_dict["state"].get(number, {}) for number in own]


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@on_ranks(2)
def test_equals_adamw8bit_beside_torchs_muon(combination):
    case = CASES["wide"]
    model = sharded("wide", combination)
    optimizer = zshard.Muon(model, lr=0.05, adamw=EIGHT)
    losses = train(model, case, optimizer, own_rank())
    plain = make(case.make)
    twin, pair = ddp(plain), Pair(plain)
    assert losses == train(twin, case, pair, own_rank())
    assert not differences(model.state_dict(), plain.state_dict())
    ours = state_of_rest(optimizer.state_dict(), model)
    theirs = list(pair.adamw.state_dict()["state"].values())
    assert not differ(ours, theirs)
    assert any(own["exp_avg"].dtype == torch.uint8 for own in ours)


def values_of(combination):
    model = wrap("wide", combination)
    optimizer = zshard.Muon(model, lr=0.05, adamw=EIGHT)
    train(model, CASES["wide"], optimizer, own_rank())
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("combination", HYBRID)
def test_hybrid_agrees(pool4, combination):
    ours, theirs = pool4.run(values_of, combination), pool4.run(values_of, ("full_shard", "c10d"))
    for (a, own), (b, other) in zip(ours, theirs, strict=True):
        assert_same(a, b, "the model")
        assert not differ(own, other)


@on_ranks(4)
def test_hosts_agree_with_c10d():
    found = []
    with hosts_of(2, 2) as group:
        for transport in ("hosts", "c10d"):
            model = case_of(group, "wide", transport=transport)
            optimizer = zshard.Muon(model, lr=0.05, adamw=EIGHT)
            train(model, CASES["wide"], optimizer, own_rank())
            found.append((model.state_dict(), optimizer.state_dict()))
    (first, own), (second, other) = found
    assert_same(first, second, "the model")
    assert not differ(own, other)


# --- state dicts ----------------------------------------------------------------------------------


def saves(path, transport):
    model = sharded("wide", ("full_shard", transport))
    optimizer = zshard.Muon(model, lr=0.05, adamw=EIGHT)
    train(model, CASES["wide"], optimizer, 0)
    zshard.save(path, model, optimizer)
    return optimizer.state_dict()


def loads(path, transport, how, state):
    model = sharded("wide", ("full_shard", transport), seed=2)
    optimizer = zshard.Muon(model, lr=0.9, adamw={"bits": 8})
    if how == "file":
        zshard.load(path, model, optimizer)
    elif how == "dict":
        optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(state)
        named = zshard.optim_state_dict(model, optimizer)
        optimizer = zshard.Muon(model, adamw={"bits": 8})
        zshard.load_optim_state_dict(model, optimizer, named)
    found = optimizer.state_dict()
    train(model, CASES["wide"], optimizer, own_rank(), steps=1)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["file", "dict", "names"])
def test_saved_at_2_ranks_loads_at_3(pool2, pool3, tmp_path, transport, how):
    path = str(tmp_path / "there")
    saved, *_ = pool2.run(saves, path, transport)
    for found in pool3.run(loads, path, transport, how, saved):
        assert not differ(found, saved)
        assert found["param_groups"] == saved["param_groups"]
    model = CASES["wide"].make()
    plain = zshard.Muon(model, adamw={"bits": 8})
    plain.load_state_dict(saved)
    assert not differ(plain.state_dict(), saved)


def resumes(transport, state):
    model = sharded("wide", ("full_shard", transport))
    optimizer = zshard.Muon(model, lr=0.05, adamw=EIGHT)
    if state is not None:
        optimizer.load_state_dict(state[1])
        model.load_state_dict(state[0])
        return go_on("wide", model, optimizer)
    train(model, CASES["wide"], optimizer, own_rank(), steps=2)
    return (model.state_dict(), optimizer.state_dict()), go_on("wide", model, optimizer)


@ranks(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loaded_run_continues_with_the_bits_of_an_uninterrupted_one(pool, transport):
    results = pool.run(resumes, transport, None)
    for again, (_, expected) in zip(
        pool.run(resumes, transport, results[0][0]), results, strict=True
    ):
        assert not differences(again["model"], expected["model"])
        assert not differ(again["optimizer"], expected["optimizer"])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_state_converts_from_and_to_float32(transport):
    """From float32 to 8 bits, and back by to_fp32(); into 32 bits as it is: an error."""
    model = sharded("wide", ("full_shard", transport))
    exact = zshard.Muon(model, lr=0.05)
    train(model, CASES["wide"], exact, own_rank())
    before = exact.state_dict()
    eight = zshard.Muon(model, adamw=EIGHT)
    eight.load_state_dict(before)
    coded = eight.state_dict()
    with pytest.raises(ValueError, match=r"this Muon does not step.*zshard\.AdamW8bit\.to_fp32"):
        exact.load_state_dict(coded)
    assert not differ(exact.state_dict(), before)
    exact.load_state_dict(zshard.AdamW8bit.to_fp32(coded))
    after = exact.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for number, own in before["state"].items():
        for key, value in own.items():
            bound = 0.1 * value.abs().max() if key.startswith("exp") else 0
            assert (after["state"][number][key] - value).abs().max() <= bound, key
    train(model, CASES["wide"], exact, own_rank(), steps=1)
    plain = zshard.Muon(CASES["wide"].make(), adamw=EIGHT)
    plain.load_state_dict(before)
    assert not differ(plain.state_dict()["state"], coded["state"])


def test_an_unsharded_32_bit_muon_refuses_8_bits_and_keeps_its_state():
    model = CASES["wide"].make()
    optimizers = [zshard.Muon(model, adamw=each) for each in (EIGHT, None)]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for each in optimizers:
        each.step()
    eight, exact = optimizers
    before = exact.state_dict()
    with pytest.raises(ValueError, match=r"to_fp32"):
        exact.load_state_dict(eight.state_dict())
    assert not differ(exact.state_dict(), before)
    exact.step()


def test_a_momentum_of_another_dtype_is_cast_as_torch_does():
    weight, bias = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))
    groups = [{"params": [weight]}, {"params": [bias], "use_muon": False}]
    optimizer = zshard.Muon(groups, adamw={"bits": 8})
    weight.grad, bias.grad = torch.ones(8, 8), torch.ones(8)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"].double()
    optimizer.load_state_dict(state)
    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
    optimizer.step()


@on_ranks(2)
def test_files_convert(tmp_path):
    """A file with 32 bits loads into 8; one with 8 bits into 32 is an error and changes nothing."""
    folder = str(tmp_path)
    model = sharded("wide", ("full_shard", "shm"))
    optimizers = [zshard.Muon(model, adamw=each) for each in (EIGHT, None)]
    for each in optimizers:
        train(model, CASES["wide"], each, own_rank(), steps=1)
    eight, exact = optimizers
    zshard.save(f"{folder}/8", model, eight)
    zshard.save(f"{folder}/32", model, exact)
    before = exact.state_dict()
    with pytest.raises(RuntimeError, match=r"this Muon does not step.*to_fp32"):
        zshard.load(f"{folder}/8", model, exact)
    with pytest.raises(ValueError, match=r"this Muon does not step.*to_fp32"):
        zshard.load_optim_state_dict(model, exact, zshard.optim_state_dict(model, eight))
    assert not differ(exact.state_dict(), before)
    zshard.load(f"{folder}/32", model, eight)
    assert torch.uint8 in dtypes_in(eight)
    for each in optimizers:
        train(model, CASES["wide"], each, own_rank(), steps=1)


# --- with other features --------------------------------------------------------------------------


@on_ranks(2)
def test_optimizer_that_is_older_than_the_model_and_state_on_a_disk(tmp_path):
    """An optimizer that is older than the sharded model, with state; also on a disk."""
    folder = str(tmp_path)
    found, case = [], CASES["wide"]
    for options in ({}, {"strategy": "no_shard"}, {"offload": folder}):
        plain = make(case.make)
        optimizer = zshard.Muon(plain, lr=0.05, adamw=EIGHT)
        train(plain, case, optimizer, 0, steps=1)
        model = FSDP(plain, auto_wrap_policy=case.policy, **options)
        train(model, case, optimizer, own_rank(), steps=2)
        found.append((model.state_dict(), optimizer.state_dict()))
    for values, state in found[1:]:
        assert_same(values, found[0][0], "the model")
        assert not differ(state, found[0][1])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_an_error_of_adamw_on_one_rank(transport):
    """The others name the call in which they waited."""
    model = FSDP(make(CASES["wide"].make), transport=transport, timeout=20)
    optimizer = zshard.Muon(model, adamw=EIGHT)
    batch = CASES["wide"].batch(0, own_rank())
    model(batch).square().mean().backward()
    if own_rank() == 1:
        optimizer.param_groups[-1]["betas"] = "none"
        with pytest.raises(ValueError, match="betas"):
            optimizer.step()
    with pytest.raises(zshard.DivergenceError, match=r"Muon\.step\(\)"):
        model(batch) if own_rank() == 1 else optimizer.step()


# --- which parameters, which options --------------------------------------------------------------


def dtypes_in(optimizer):
    return [
        optimizer.state[param]["exp_avg"].dtype
        for group in optimizer.param_groups
        for param in (() if group["use_muon"] else group["params"])
    ]


def test_small_parameters_and_groups_with_32_bits_stay_in_float32():
    large, small, named = (nn.Parameter(torch.ones(n)) for n in (4096, 4095, 4096))
    optimizer = zshard.Muon(
        [
            {"params": [large, small], "use_muon": False},
            {"params": [named], "use_muon": False, "bits": 32},
            {"params": [nn.Parameter(torch.ones(8, 8))]},
        ],
        adamw={"bits": 8},
    )
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    assert dtypes_in(optimizer) == [torch.uint8, torch.float32, torch.float32]
    assert [group.get("bits") for group in optimizer.param_groups] == [8, 32, None]
    later = nn.Parameter(torch.ones(4096))
    optimizer.add_param_group({"params": [later], "use_muon": False})
    later.grad = torch.ones_like(later)
    optimizer.step()
    assert dtypes_in(optimizer)[-1] == torch.uint8


@pytest.mark.parametrize(
    ("adamw", "error", "said"),
    [
        ({"bits": 4}, ValueError, "bits must be 8 or 32, got 4"),
        ({"bits": None}, ValueError, "bits must be 8 or 32, got None"),
        ({"bits": 8, "amsgrad": True}, NotImplementedError, "amsgrad=True: use zshard.AdamW"),
        ({"bits": 8, "master": "int16"}, ValueError, "master must be None or 'int8'"),
        ({"bits": 8, "min_8bit_size": -1}, ValueError, "at least 0, got -1"),
        ({"master": "int8"}, ValueError, r"master='int8' but no bits: add \"bits\": 8"),
        ({"min_8bit_size": 1}, ValueError, "min_8bit_size=1 but no bits"),
        ({"bits": 8, "lr": -1.0}, ValueError, "Invalid learning rate"),
        (zshard.AdamW8bit, TypeError, "adamw must be a dict of options"),
        ({"stochastic_rounding": True, "bits": 8}, TypeError, "stochastic_rounding"),
    ],
)
def test_invalid_options(adamw, error, said):
    with pytest.raises(error, match=said):
        zshard.Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), adamw=adamw)


@pytest.mark.parametrize(("use_muon", "adamw"), [(False, None), (True, {"bits": 8})])
def test_bits_of_a_group_that_cannot_have_them_are_refused(use_muon, adamw):
    group = {"params": [nn.Parameter(torch.ones(4, 4))], "use_muon": use_muon, "bits": 8}
    with pytest.raises(ValueError, match=r'bits=8 of a param group needs .* adamw={"bits": 8}'):
        zshard.Muon([group], adamw=adamw)


def test_other_dtypes_are_refused():
    with pytest.raises(NotImplementedError, match="AdamW8bit steps float32 and bfloat16"):
        zshard.Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), adamw={"bits": 8})


# --- bfloat16 -------------------------------------------------------------------------------------


def net_in_bfloat16():
    return nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 5)).bfloat16()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize(
    "adamw",
    [{**EIGHT, "master": "int8"}, EIGHT, {"stochastic_rounding": True, "rounding_seed": 3}],
    ids=["master", "8 bits", "stochastic rounding"],
)
@on_ranks(2)
def test_bfloat16(transport, adamw):
    """What AdamW has updated has the bits of the same AdamW over the plain model."""
    model, plain = make(net_in_bfloat16), make(net_in_bfloat16)
    model = FSDP(model, transport=transport, auto_wrap_policy={nn.Linear})
    ours, theirs = (zshard.Muon(m, lr=0.0, weight_decay=0.0, adamw=adamw) for m in (model, plain))
    for step in range(3):
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(step)).bfloat16()
        for each, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            each(x).float().square().mean().backward()
            optimizer.step()
    assert not differences(model.state_dict(), plain.state_dict())
    held = [own for own in ours.state.values() if "low_bits" in own]
    assert len(held) == (4 if "master" in adamw else 0)
