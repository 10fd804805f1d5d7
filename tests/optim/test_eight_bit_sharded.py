"""AdamW8bit, Adam8bit and SGD8bit: sharding does not change the bits, nor do saving and loading."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch
from compare import differences
from models import COMBINATIONS, TRANSPORTS, Mlp, loss_of, make
from nursery import fork_ranks
from optim_cases import give_grads, make_params
from spawn import RankFailure, on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP

BF16 = torch.bfloat16


# --- the same bits everywhere --------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW8bit": (zshard.AdamW8bit, {"lr": 1e-2}),
    "Adam8bit": (zshard.Adam8bit, {"lr": 1e-2, "weight_decay": 0.01}),
    "SGD8bit": (zshard.SGD8bit, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


def new_optimizer(kind, params, **options):
    cls, defaults = OPTIMIZERS[kind]
    return cls(params, **defaults, **{"min_8bit_size": 8, "master": "int8", **options})


def steps_of(model, optimizer, begin, end):
    dtype = next(model.parameters()).dtype
    for step in range(begin, end):
        optimizer.zero_grad()
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        loss_of(model(inputs.to(dtype))).backward()
        optimizer.step()


def mlp(dtype):
    return make(lambda: Mlp().to(dtype))


def result(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def trained_plain(kind, dtype):
    model = mlp(dtype)
    optimizer = new_optimizer(kind, model.parameters())
    steps_of(model, optimizer, 0, 5)
    return result(model, optimizer)


def trained_sharded(combination, kind, dtype):
    strategy, transport = combination
    model = FSDP(mlp(dtype), strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})
    optimizer = new_optimizer(kind, model.parameters())
    steps_of(model, optimizer, 0, 5)
    return differences(result(model, optimizer), trained_plain(kind, dtype))


@ranks(2, 3)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_sharding_does_not_change_the_bits(pool, combination):
    for found in pool.run(trained_sharded, combination, "AdamW8bit", BF16):
        assert found == []


@ranks(1, 4)
@pytest.mark.thorough
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_more_rank_counts_do_not_change_the_bits(pool, combination):
    for found in pool.run(trained_sharded, combination, "AdamW8bit", torch.float32):
        assert found == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_class_has_the_same_bits_when_sharded(pool2, kind):
    for found in pool2.run(trained_sharded, ("full_shard", "shm"), kind, BF16):
        assert found == []


def digests():
    """Return which instructions the loops use, and checksums of what the optimizers make."""
    found = []
    for dtype, kind in itertools.product((torch.float32, BF16), OPTIMIZERS):
        params = make_params(dtype)
        optimizer = new_optimizer(kind, params)
        for step in range(4):
            give_grads(params, seed=step)
            optimizer.step()
        states = [v for own in optimizer.state.values() for v in own.values() if v.dim()]
        for each in (*params, *states):
            plain = each.detach().contiguous().view(torch.uint8).numpy()
            found.append(zlib.crc32(plain.tobytes()))
    return zshard.available_features()["loops"], found


def test_instruction_sets_have_the_same_bits():
    found = {}
    for isa in ("base", "avx2", "avx512"):
        (rank,) = fork_ranks(digests, 1, env={"ZSHARD_ISA": isa}, check=True, alone=True)
        used, found[isa] = rank.value
        assert isa != "base" or used == "base"
    assert found["base"] == found["avx2"] == found["avx512"]


@on_ranks(2)
def test_a_step_in_backward_has_the_same_bits():
    """Return what differs between stepping in backward and calling step()."""
    results = []
    for early in (False, True):
        model = FSDP(mlp(BF16), auto_wrap_policy={nn.Linear})
        optimizer = new_optimizer("AdamW8bit", model.parameters())
        if early:
            model.optimizer_in_backward(optimizer)
        for step in range(4):
            inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
            loss_of(model(inputs.to(BF16))).backward()
            if not early:
                optimizer.step()
                optimizer.zero_grad()
        results.append(result(model, optimizer))
    found = differences(*results)
    assert found == []


@on_ranks(2)
def test_state_on_a_disk_has_the_same_bits(tmp_path):
    folder = str(tmp_path)
    model = FSDP(mlp(BF16), auto_wrap_policy={nn.Linear}, offload=folder)
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    steps_of(model, optimizer, 0, 5)
    found = differences(result(model, optimizer), trained_plain("AdamW8bit", BF16))
    assert found == []


# --- state dicts ---------------------------------------------------------------------------------


def saved_after_three(transport):
    model = FSDP(mlp(BF16), transport=transport, auto_wrap_policy={nn.Linear})
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    steps_of(model, optimizer, 0, 3)
    return model.state_dict(), optimizer.state_dict()


def continued(transport, saved):
    """Return what differs from an uninterrupted run in one process."""
    model = FSDP(mlp(BF16), transport=transport, auto_wrap_policy={nn.Linear})
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    steps_of(model, optimizer, 3, 5)
    return differences(result(model, optimizer), trained_plain("AdamW8bit", BF16))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_state_saved_at_two_ranks_continues_at_three_and_at_one(pool2, pool3, transport):
    saved = pool2.run(saved_after_three, transport)[0]
    for found in pool3.run(continued, transport, saved):
        assert found == []
    model = mlp(BF16)
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    steps_of(model, optimizer, 3, 5)
    assert differences(result(model, optimizer), trained_plain("AdamW8bit", BF16)) == []


def saved_to_disk(folder):
    model = FSDP(mlp(BF16), auto_wrap_policy={nn.Linear})
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    steps_of(model, optimizer, 0, 3)
    zshard.save(folder, model, optimizer)


def loaded_from_disk(folder):
    model = FSDP(mlp(BF16), auto_wrap_policy={nn.Linear})
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    zshard.load(folder, model, optimizer)
    steps_of(model, optimizer, 3, 5)
    return differences(result(model, optimizer), trained_plain("AdamW8bit", BF16))


def test_a_checkpoint_of_two_ranks_continues_at_three(pool2, pool3, tmp_path):
    folder = str(tmp_path / "checkpoint")
    pool2.run(saved_to_disk, folder)
    for found in pool3.run(loaded_from_disk, folder):
        assert found == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_converts_from_and_to_float32(kind):
    whole = {"AdamW8bit": zshard.AdamW, "Adam8bit": zshard.Adam, "SGD8bit": zshard.SGD}[kind]
    params, others = make_params(), make_params()
    exact = whole(params, **OPTIMIZERS[kind][1])
    for step in range(3):
        give_grads(params, seed=step)
        exact.step()
    ours = new_optimizer(kind, others)
    ours.load_state_dict(exact.state_dict())
    assert (
        ours.state[others[4]]["momentum_buffer" if kind == "SGD8bit" else "exp_avg"].dtype
        == torch.uint8
    )
    again = whole(make_params(), **OPTIMIZERS[kind][1])
    again.load_state_dict(type(ours).to_fp32(ours.state_dict()))
    for mine, theirs in zip(again.state.values(), exact.state.values(), strict=True):
        for key, value in theirs.items():
            if value.numel():
                assert (mine[key] - value).abs().max() <= 2**-5 * value.abs().max()


@on_ranks(2)
def test_float32_state_converts_to_the_same_codes_when_sharded():
    model = FSDP(mlp(torch.float32), auto_wrap_policy={nn.Linear})
    exact = zshard.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, exact, 0, 3)
    ours = new_optimizer("AdamW8bit", model.parameters())
    ours.load_state_dict(exact.state_dict())
    sharded = ours.state_dict()["state"]
    plain = new_optimizer("AdamW8bit", mlp(torch.float32).parameters())
    plain.load_state_dict(exact.state_dict())
    found = differences(sharded, plain.state_dict()["state"])
    assert found == []


@on_ranks(2)
def test_state_of_eight_bits_is_refused_by_a_32_bit_optimizer():
    model = FSDP(mlp(torch.float32), auto_wrap_policy={nn.Linear})
    ours = new_optimizer("AdamW8bit", model.parameters())
    steps_of(model, ours, 0, 1)
    with pytest.raises(ValueError) as raised:
        zshard.AdamW(model.parameters()).load_state_dict(ours.state_dict())
    message = str(raised.value)
    assert "AdamW8bit.to_fp32" in message


class Passes(torch.optim.Optimizer):
    """A wrapper as libraries have them, which passes on another optimizer's groups and state."""

    def __init__(self, optimizer):
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults, self.state_dict = optimizer.defaults, optimizer.state_dict


@pytest.mark.parametrize("combination", COMBINATIONS[:4], ids=str)
@on_ranks(2)
def test_a_wrapper_is_saved_as_the_optimizer_in_it(combination, tmp_path):
    strategy, transport = combination
    model = FSDP(make(Mlp), strategy=strategy, transport=transport)
    optimizer = new_optimizer("AdamW8bit", model.parameters())
    steps_of(model, optimizer, 0, 2)
    zshard.save(tmp_path / "run", model, Passes(optimizer))
    other = new_optimizer("AdamW8bit", model.parameters())
    zshard.load(tmp_path / "run", model, other, strict=False)  # the class differs
    ours, loaded = (zshard.optim_state_dict(model, each) for each in (optimizer, other))
    assert differences(ours["state"], loaded["state"]) == []
    plain = zshard.AdamW(model.parameters())
    with pytest.raises(ValueError, match="8-bit moments") as caught:
        plain.load_state_dict(optimizer.state_dict())
    assert str(caught.value).count("\n") == 1  # a heading, and the remedy


# --- refusals ------------------------------------------------------------------------------------


class AdamW4bit(torch.optim.Optimizer):
    """Stands for torchao's, which need not be installed."""

    __module__ = "torchao.optim.adam"

    def step(self, closure=None):
        raise AssertionError("the step must not run")


def step_of_torchao():
    model = FSDP(mlp(torch.float32), auto_wrap_policy={nn.Linear})
    optimizer = AdamW4bit(model.parameters(), {})
    steps_of(model, optimizer, 0, 1)


def test_other_libraries_quantized_state_is_refused_with_ours_as_advice(pool2):
    with pytest.raises(RankFailure, match=r"ShardError: torchao.*use zshard\.AdamW"):
        pool2.run(step_of_torchao)
