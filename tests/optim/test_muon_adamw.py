"""AdamW inside zshard.Muon: zshard.AdamW's bits, and with "bits": 8 those of zshard.AdamW8bit."""

import functools

import pytest
import torch
from compare import assert_same
from models import CASES, COMBINATIONS, Case, make
from optim_cases import muon
from optim_states import differ
from rows import all_refused
from scenario import Scenario
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

EIGHT = {"lr": 0.01, "bits": 8, "min_8bit_size": 64}
EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])


REST = functools.partial(zshard.AdamW8bit, lr=0.01, min_8bit_size=64)


def muon_of(adamw):
    return lambda model: zshard.Muon(model, lr=0.05, adamw=adamw)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@on_ranks(2)
def test_equals_adamw8bit_beside_torchs_muon(combination):
    ours, theirs = Scenario("wide", combination, muon(REST, EIGHT)).same()
    saved, rest = ours.optimizer.state_dict(), theirs.optimizer.optimizers[1]
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    numbers = numbers[-len(rest.param_groups[0]["params"]) :]  # after Muon's
    states = [saved["state"].get(number, {}) for number in numbers]
    assert not differ(states, list(rest.state_dict()["state"].values()))
    assert any(own["exp_avg"].dtype == torch.uint8 for own in states)


# --- state dicts ----------------------------------------------------------------------------------


@EACH_WAY
@on_ranks(2)
def test_state_converts_from_and_to_float32(transport):
    """From float32 to 8 bits, and back by to_fp32(); into 32 bits as it is: an error."""
    training = Scenario("wide", ("full_shard", transport), muon_of(None)).sharded(3)
    model, exact = training.model, training.optimizer
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
    training.go(1)
    plain = zshard.Muon(CASES["wide"].make(), adamw=EIGHT)
    plain.load_state_dict(before)
    assert not differ(plain.state_dict()["state"], coded["state"])


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
    training = Scenario("wide", optimizer=muon_of(EIGHT)).sharded(1)
    model, eight = training.model, training.optimizer
    exact = training.optimizer = muon_of(None)(model)
    training.go(1)
    zshard.save(tmp_path / "8", model, eight)
    zshard.save(tmp_path / "32", model, exact)
    before = exact.state_dict()
    with pytest.raises(RuntimeError, match=r"this Muon does not step.*to_fp32"):
        zshard.load(tmp_path / "8", model, exact)
    with pytest.raises(ValueError, match=r"this Muon does not step.*to_fp32"):
        zshard.load_optim_state_dict(model, exact, zshard.optim_state_dict(model, eight))
    assert not differ(exact.state_dict(), before)
    zshard.load(tmp_path / "32", model, eight)
    assert torch.uint8 in dtypes_in(eight)
    training.go(1)
    training.optimizer = eight
    training.go(1)


# --- which parameters, which options --------------------------------------------------------------


@EACH_WAY
@on_ranks(2)
def test_an_error_of_adamw_on_one_rank(transport):
    """The others name the call in which they waited."""
    model = FSDP(make(CASES["wide"].make), transport=transport, timeout=20)
    optimizer = zshard.Muon(model, adamw=EIGHT)
    rank = torch.distributed.get_rank()
    batch = CASES["wide"].batch(0, rank)
    model(batch).square().mean().backward()
    if rank == 1:
        optimizer.param_groups[-1]["betas"] = "none"
        with pytest.raises(ValueError, match="betas"):
            optimizer.step()
    with pytest.raises(zshard.DivergenceError, match=r"Muon\.step\(\)"):
        model(batch) if rank == 1 else optimizer.step()


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


def test_invalid_options():
    def new(adamw, dtype=torch.float32):
        layers = nn.Linear(4, 4), nn.Linear(4, 4)
        return lambda: zshard.Muon(nn.Sequential(*layers).to(dtype), adamw=adamw)

    def group(use_muon, adamw):
        params = [nn.Parameter(torch.ones(4, 4))]
        groups = [{"params": params, "use_muon": use_muon, "bits": 8}]
        return lambda: zshard.Muon(groups, adamw=adamw)

    needs = "bits=8 of a param group needs "
    table = [
        (new({"bits": 4}), ValueError, "bits must be 8 or 32, got 4"),
        (new({"bits": None}), ValueError, "bits must be 8 or 32, got None"),
        (new({"bits": 8, "amsgrad": True}), NotImplementedError, "amsgrad=True: use zshard.AdamW"),
        (new({"bits": 8, "master": "int16"}), ValueError, "master must be None or 'int8'"),
        (new({"bits": 8, "min_8bit_size": -1}), ValueError, "at least 0, got -1"),
        (new({"master": "int8"}), ValueError, "master='int8' but no bits: add \"bits\": 8"),
        (new({"min_8bit_size": 1}), ValueError, "min_8bit_size=1 but no bits"),
        (new({"bits": 8, "lr": -1.0}), ValueError, "Invalid learning rate"),
        (new(zshard.AdamW8bit), TypeError, "adamw must be a dict of options"),
        (new({"stochastic_rounding": True, "bits": 8}), TypeError, "stochastic_rounding"),
        (group(False, None), ValueError, needs),
        (group(True, {"bits": 8}), ValueError, needs),
        (new({"bits": 8}, torch.double), NotImplementedError, "steps float32 and bfloat16"),
    ]
    all_refused({f"{number}": row for number, row in enumerate(table)})


# --- bfloat16 -------------------------------------------------------------------------------------


NET = Case(
    lambda: nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 5)).bfloat16(),
    lambda generator: torch.randn(5, 48, generator=generator).bfloat16(),
    {nn.Linear},
)


@EACH_WAY
@pytest.mark.parametrize(
    "adamw",
    [{**EIGHT, "master": "int8"}, EIGHT, {"stochastic_rounding": True, "rounding_seed": 3}],
    ids=["master", "8 bits", "stochastic rounding"],
)
@on_ranks(2)
def test_bfloat16(transport, adamw):
    """AdamW's parameters have the bits of the same AdamW over the plain model."""
    optimizer = functools.partial(zshard.Muon, lr=0.0, weight_decay=0.0, adamw=adamw)
    scenario = Scenario(NET, ("full_shard", transport), optimizer)
    ours = scenario.sharded()
    ours.rank = 0
    assert_same(ours.go(3).state(), scenario.plain(3).state(), "the training")
    held = [own for own in ours.optimizer.state.values() if "low_bits" in own]
    assert len(held) == (4 if "master" in adamw else 0)
