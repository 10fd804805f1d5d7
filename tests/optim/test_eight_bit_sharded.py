"""8-bit optimizers, and stochastic rounding: sharding does not change the bits, nor do saving and
loading, or what else a run may do."""

import functools
import math
import zlib

import pytest
import torch
from compare import assert_same
from models import COMBINATIONS, Case, Mlp, make
from nursery import fork_ranks
from optim_cases import SIZES, give_grads, make_params
from scenario import Scenario
from spawn import RankFailure, on_ranks
from torch import nn

import zshard
from zshard import FSDP

BF16 = torch.bfloat16
EIGHT = {"lr": 1e-2, "min_8bit_size": 8, "master": "int8"}
ROUNDED = {"stochastic_rounding": True, "rounding_seed": 5}
KINDS = {
    "AdamW8bit": functools.partial(zshard.AdamW8bit, **EIGHT),
    "Adam8bit": functools.partial(zshard.Adam8bit, **EIGHT, weight_decay=0.01),
    "SGD8bit": functools.partial(zshard.SGD8bit, **EIGHT, momentum=0.9, nesterov=True),
    "AdamW rounded": functools.partial(zshard.AdamW, lr=1e-2, **ROUNDED),
    "SGD rounded": functools.partial(zshard.SGD, lr=2.0**-10, **ROUNDED),
}
WHOLE = {"AdamW8bit": zshard.AdamW, "Adam8bit": zshard.Adam, "SGD8bit": zshard.SGD}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])


def mlp(kind, *way, dtype=BF16, **options):
    case = Case(
        lambda: Mlp().to(dtype),
        lambda generator: torch.randn(5, 7, generator=generator).to(dtype),
        {nn.Linear},
    )
    way = way or ("full_shard", "shm")
    return Scenario(case, way, lambda model: KINDS[kind](model.parameters()), options=options)


def sharded(scenario, steps=0):
    """All ranks have the same batches: the mean of their gradients has the bits of one rank's."""
    training = scenario.sharded()
    training.rank = 0
    return training.go(steps)


def assert_like_plain(training, steps=5):
    """Fail unless model and state have the bits of a plain model after so many steps."""
    plain = training.scenario.plain(steps)
    states = [[each.state(), each.optimizer.state_dict()["state"]] for each in (training, plain)]
    assert_same(*states, "what is trained")


@pytest.mark.sampled(4)
@EACH_KIND
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(1, 2, 3, 4)
def test_sharding_does_not_change_the_bits(combination, kind):
    assert_like_plain(sharded(mlp(kind, *combination), 5))


@EACH_KIND
@on_ranks(2)
def test_late_steps_in_backward_and_disks_do_not_change_the_bits(kind, tmp_path):
    early = sharded(mlp(kind))
    early.model.optimizer_in_backward(early.optimizer)
    assert_like_plain(early.go(5))
    assert_like_plain(sharded(mlp(kind, offload=str(tmp_path)), 5))
    late = mlp(kind).plain(1)  # the plain model makes the first step, shards the others
    late.optimizer.zero_grad()
    FSDP(late.model, auto_wrap_policy={nn.Linear})
    assert_like_plain(late.go(4))


def checksums():
    """Return the instructions that the loops use, and checksums of the optimizers' results."""
    sums = {}
    for kind, dtype in [*((kind, BF16) for kind in KINDS), *((k, torch.float32) for k in WHOLE)]:
        params = make_params(dtype, [*SIZES, (3, 400)])  # blocks of 256 elements and the rest
        optimizer = KINDS[kind](params)
        for step in range(4):
            give_grads(params, seed=step)
            grad = params[-1].grad.view(-1)
            grad[::97] = grad[600:640] = 0
            grad[700], grad[5], grad[300] = 1e-40, math.inf, math.nan
            optimizer.step()
        states = [v for own in optimizer.state.values() for v in own.values() if v.dim()]
        values = [each.detach().contiguous().view(torch.uint8) for each in (*params, *states)]
        sums[kind, dtype] = [zlib.crc32(each.numpy().tobytes()) for each in values]
    return zshard.available_features()["loops"], sums


def test_instruction_sets_have_the_same_bits():
    sums = {}
    for isa in ("base", "avx2", "avx512"):
        (rank,) = fork_ranks(checksums, 1, env={"ZSHARD_ISA": isa}, check=True, alone=True)
        loops, sums[isa] = rank.value
        assert isa != "base" or loops == "base"
    assert sums["avx2"] == sums["avx512"]
    for each in sums.values():  # base has no FMA: a rule with a rounded product differs there
        del each["AdamW rounded", BF16]
    assert sums["base"] == sums["avx2"]


# --- state dicts ---------------------------------------------------------------------------------


def saved_after_three(kind, transport, folder):
    training = sharded(mlp(kind, "full_shard", transport), 3)
    zshard.save(folder, training.model, training.optimizer)
    return training.losses, training.model.state_dict(), training.optimizer.state_dict()


def load(training, losses, model, optimizer):
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    training.losses = list(losses)
    return training


def continues(kind, transport, folder, saved):
    scenario = mlp(kind, "full_shard", transport)
    from_file = sharded(scenario)
    from_file.losses = list(saved[0])
    zshard.load(folder, from_file.model, from_file.optimizer)
    for training in (load(sharded(scenario), *saved), from_file):
        assert_like_plain(training.go(2))


@pytest.mark.sampled(2)
@EACH_KIND
@EACH_WAY
def test_state_saved_at_two_ranks_continues_at_three_and_at_one(
    pool2, pool3, tmp_path, transport, kind
):
    folder = str(tmp_path / "there")
    saved = pool2.run(saved_after_three, kind, transport, folder)[0]
    pool3.run(continues, kind, transport, folder, saved)
    assert_like_plain(load(mlp(kind).plain(), *saved).go(2))


@pytest.mark.parametrize("kind", WHOLE)
def test_state_converts_from_and_to_float32(kind):
    options = {"lr": 1e-2, **({"momentum": 0.9} if kind == "SGD8bit" else {})}
    params, others = make_params(), make_params()
    exact = WHOLE[kind](params, **options)
    for step in range(3):
        give_grads(params, seed=step)
        exact.step()
    ours = KINDS[kind](others)
    ours.load_state_dict(exact.state_dict())
    name = "momentum_buffer" if kind == "SGD8bit" else "exp_avg"
    assert ours.state[others[4]][name].dtype == torch.uint8
    again = WHOLE[kind](make_params(), **options)
    again.load_state_dict(type(ours).to_fp32(ours.state_dict()))
    for mine, theirs in zip(again.state.values(), exact.state.values(), strict=True):
        for key, value in theirs.items():
            if value.numel():
                assert (mine[key] - value).abs().max() <= 2**-5 * value.abs().max()


@on_ranks(2)
def test_float32_state_converts_to_the_same_codes_when_sharded():
    exact = Scenario("mlp").sharded(3)
    models = exact.model, make(Mlp)
    coded = []
    for model in models:
        ours = KINDS["AdamW8bit"](model.parameters())
        ours.load_state_dict(exact.optimizer.state_dict())
        coded.append(ours.state_dict()["state"])
    assert_same(*coded, "the codes")


class Passes(torch.optim.Optimizer):
    """A wrapper as libraries have them, which passes on another optimizer's groups and state."""

    def __init__(self, optimizer):
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults, self.state_dict = optimizer.defaults, optimizer.state_dict


@pytest.mark.parametrize("combination", COMBINATIONS[:4], ids=str)
@on_ranks(2)
def test_a_wrapper_is_saved_as_the_optimizer_in_it(combination, tmp_path):
    training = sharded(mlp("AdamW8bit", *combination, auto_wrap_policy=None), 2)
    model, optimizer = training.model, training.optimizer
    zshard.save(tmp_path / "run", model, Passes(optimizer))
    other = KINDS["AdamW8bit"](model.parameters())
    zshard.load(tmp_path / "run", model, other, strict=False)  # the class differs
    states = [zshard.optim_state_dict(model, each)["state"] for each in (optimizer, other)]
    assert_same(*states, "the state")
    with pytest.raises(ValueError, match=r"8-bit moments(.|\n)*AdamW8bit\.to_fp32") as caught:
        zshard.AdamW(model.parameters()).load_state_dict(optimizer.state_dict())
    assert str(caught.value).count("\n") == 1  # a heading, and the remedy


class AdamW4bit(torch.optim.Optimizer):
    """A fake of torchao's, which need not be installed."""

    __module__ = "torchao.optim.adam"

    def step(self, closure=None):
        raise AssertionError("the step must not run")


def step_of_torchao():
    mlp("AdamW8bit").but(optimizer=lambda model: AdamW4bit(model.parameters(), {})).sharded(1)


def test_other_libraries_quantized_state_is_refused_with_ours_as_advice(pool2):
    with pytest.raises(RankFailure, match=r"ShardError: torchao.*use zshard\.AdamW"):
        pool2.run(step_of_torchao)
