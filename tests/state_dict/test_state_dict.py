"""state_dict() and load_state_dict() of entire models: plain tensors under plain names, both ways.

For submodules see test_state_dict_parts.py, for user hooks and methods test_state_dict_hooks.py, for
unusual moments test_readers.py.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import (
    CASES,
    COMBINATIONS,
    Net,
    Tied,
    differences,
    loss_of,
    make,
    train,
    wrapped,
)
from scenario import Scenario, sharded
from spawn import on_ranks

from zshard import FSDP

FULL = ("full_shard", "shm")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, 3)
def test_names_and_values_equal_the_plain_model(name, combination):
    plain, state = make(CASES[name].make).state_dict(), sharded(name, combination).state_dict()
    assert_same(state, plain, "the state dict")
    assert list(state) == list(plain) and state._metadata == plain._metadata
    assert {(type(v), v.requires_grad) for v in state.values()} == {(torch.Tensor, False)}


ROUND_TRIPS = [
    ("net", FULL, ("no_shard", "c10d")),
    ("net", ("no_shard", "shm"), FULL),
    ("tied", ("shard_grad_op", "shm"), ("full_shard", "c10d")),
    ("conv", ("shard_grad_op", "c10d"), FULL),
    ("odds", FULL, ("shard_grad_op", "shm")),
    ("dtypes", FULL, ("full_shard", "c10d")),
    ("recurrent", FULL, ("shard_grad_op", "shm")),
]


@pytest.mark.parametrize(("name", "source", "target"), ROUND_TRIPS)
@on_ranks(2)
def test_state_dicts_load_across_strategies_and_plain_models(name, source, target):
    """From a trained model through a file into a plain model, into another combination, and back."""
    case = CASES[name]
    model = Scenario(name, source, "torch.SGD").sharded(2).model
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    plain, other = make(case.make, seed=2), sharded(name, target, seed=3)
    for each in (plain, other):
        assert str(each.load_state_dict(state)) == "<All keys matched successfully>"
        assert_same(each.state_dict(), state, "the loaded model")
    with torch.no_grad():
        batch = case.batch(7, dist.get_rank())
        assert_same(other.eval()(batch), plain.eval()(batch), "the output")
    state = make(case.make, seed=4).state_dict()
    model.load_state_dict(state)
    assert_same(model.state_dict(), state, "the first model")


MISFITS = {  # names that a state lacks, and further ones
    "missing": (["blocks.1.inner.0.up.weight", "norm.bias"], []),
    "extra": ([], ["blocks.1.more", "another"]),
    "both": (["head.bias"], ["head.bais"]),
    "a part": ([name for name in Net().state_dict() if not name.startswith("blocks.1")], []),
}


def result_of(model, state, strict):
    """Return what load_state_dict returns or raises, in a comparable form."""
    try:
        keys = model.load_state_dict(state, strict=strict)
        return sorted(keys.missing_keys), sorted(keys.unexpected_keys)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_missing_and_unexpected_names_are_as_in_torch(combination):
    """With strict=False, other entries are loaded, and parameters without one are unchanged."""
    for what, (missing, more) in MISFITS.items():
        state = {**make(Net, seed=2).state_dict(), **{name: torch.zeros(3) for name in more}}
        for name in missing:
            del state[name]
        for strict in (True, False):
            model, plain = wrapped(Net, combination), make(Net)
            assert result_of(model, state, strict) == result_of(plain, state, strict), what
            if not strict:
                assert_same(model.state_dict(), plain.state_dict(), what)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_shape_errors_match_torch(combination):
    state = make(Net, seed=2).state_dict()
    state["blocks.1.inner.0.up.weight"] = torch.zeros(22, 12)
    state["norm.bias"] = torch.zeros(12)
    del state["head.bias"]
    model = wrapped(Net, combination)
    text = result_of(model, state, True)
    for line in result_of(make(Net), state, True).splitlines()[1:]:
        name = line.split(":")[0]  # "size mismatch for NAME", "Missing key(s) in state_dict"
        assert name.strip() in text
    for words in ("22, 12", "22, 11", "12", "11", "head.bias", "Error(s) in loading state_dict"):
        assert words in text
    loss_of(model(CASES["net"].batch(0, dist.get_rank()))).backward()


@on_ranks(2)
def test_tied_weights_have_all_their_names():
    """Tied names: both are in the state and equal, and either one alone can be loaded."""
    model = wrapped(Tied, FULL)
    state = model.state_dict()
    assert_same(state["embed.weight"], state["head.weight"], "the tied head")
    assert_same(state["twins.1.one.weight"], state["twins.1.two.weight"], "the twin")
    assert model.head.weight is model.embed.weight
    other = make(Tied, seed=2).state_dict()
    for left_out in ("embed.weight", "head.weight"):
        part = {key: value for key, value in other.items() if key != left_out}
        fresh = wrapped(Tied, FULL)
        assert fresh.load_state_dict(part, strict=False).missing_keys == [left_out]
        assert_same(fresh.state_dict(), other, "the model")


class WithBuffers(Net):
    """Buffers, one of them not saved, and extra state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.blocks[0].register_buffer("mask", torch.rand(4) > 0.5)
        self.note = "first"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


@on_ranks(2)
def test_buffers_and_extra_state():
    model, plain = wrapped(WithBuffers, FULL), make(WithBuffers)
    model.count.add_(3)
    model.note = "second"
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    assert_same(plain.blocks[0].mask, model.blocks[0].mask, "the buffer that is not saved")
    assert (int(plain.count), plain.note) == (3, "second")
    state["count"] += 4
    state["_extra_state"] = {"note": "third"}
    model.load_state_dict(state)
    assert (int(model.count), model.note) == (7, "third")


@on_ranks(2)
def test_state_dicts_are_copies():
    """A state dict is a copy: training does not change it, and it does not change the model."""
    model = wrapped(Net, FULL)
    state = model.state_dict()
    before = copy.deepcopy(state)
    train(model, CASES["net"], torch.optim.SGD(model.parameters(), 0.1), dist.get_rank(), steps=1)
    assert_same(state, before, "the state dict after training")
    trained = model.state_dict()
    for value in state.values():
        value.zero_()
    assert differences(trained, before) != []
    assert_same(model.state_dict(), trained, "the model")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_assigning_is_refused(combination):
    model = wrapped(Net, combination)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(make(Net, seed=2).state_dict(), assign=True)
    assert_same(model.state_dict(), make(Net).state_dict(), "the model")


@on_ranks(2)
def test_saving_in_inference_mode_returns_normal_tensors():
    model = wrapped(Net, FULL)
    with torch.inference_mode():
        state = model.state_dict()
    assert [name for name, value in state.items() if value.is_inference()] == []


@on_ranks(2)
def test_scalars_of_old_files_are_accepted():
    model, state = sharded("odds", FULL), make(CASES["odds"].make, 2).state_dict()
    model.load_state_dict({**state, "scale": state["scale"].reshape(1)})
    assert_same(model.state_dict(), state, "the model")


@on_ranks(2)
def test_plain_modules_keep_torchs_behavior():
    def put_on_modules(model):
        return [name for module in model.modules() for name in vars(module) if "state_dict" in name]

    assert put_on_modules(wrapped(Net, ("no_shard", "shm"))) == put_on_modules(make(Net))


def test_single_rank():
    plain, other = make(WithBuffers), make(WithBuffers, seed=2)
    model = FSDP(copy.deepcopy(plain))
    assert_same(model.state_dict(), plain.state_dict(), "the state dict")
    model.load_state_dict(other.state_dict())
    assert_same(model.state_dict(), other.state_dict(), "the model")
