"""state_dict() and load_state_dict() of optimizers over sharded parameters: full state both ways.

A sharded model's optimizer saves the same state as the plain model's, bit for bit, and any
optimizer that loads it continues identically. For mismatches see test_optim_state_errors.py, for
states by name test_optim_names.py.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from models import CASES, COMBINATIONS, Mlp, make, make_optimizer, train, wrapped
from optim_states import (
    FULL,
    HYBRID,
    KINDS,
    differ,
    go_on,
    rank,
    reference,
    through_a_file,
    trained,
)
from scenario import sharded
from spawn import on_ranks

import zshard
from zshard import FSDP

NAMES = ["mlp", "tied", "odds", "dtypes", "frozen", "conv", "unused"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.SGD", "tests.Counting"])
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_state_equals_the_plain_models_optimizer(name, kind, combination):
    expected = reference(name, kind)[1].state_dict()
    _, optimizer = trained(name, combination, kind)
    state = optimizer.state_dict()
    assert differ(state, expected) == []
    assert list(state["state"]) == list(expected["state"])


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_elementwise_optimizers(kind):
    """A load into another model, including 0-dimensional parameters."""
    case, build = CASES["odds"], KINDS[kind]
    model = sharded("odds", FULL)
    optimizer = build(model.parameters())
    train(model, case, optimizer, rank(), steps=2)
    other = sharded("odds", ("shard_grad_op", "c10d"), seed=3)
    theirs = build(other.parameters())
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    assert differ(theirs.state_dict(), optimizer.state_dict()) == []
    assert differ(go_on("odds", other, theirs), go_on("odds", model, optimizer)) == []


def resume(name, kind, source, target):
    """Compare a run of four steps with one that goes through files after two: into a plain model's
    torch optimizer, and from that into another sharded model."""
    model, optimizer = trained(name, source, kind)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    plain = make(CASES[name].make, seed=2)
    plain.load_state_dict(saved[0])
    torchs = make_optimizer(kind.replace("zshard", "torch"), plain)
    torchs.load_state_dict(saved[1])
    assert differ(torchs.state_dict(), saved[1]) == []
    other = sharded(name, target, seed=3)
    theirs = make_optimizer(kind, other)
    other.load_state_dict(plain.state_dict())
    theirs.load_state_dict(through_a_file(torchs.state_dict()))
    assert differ(theirs.state_dict(), saved[1]) == []
    assert differ(go_on(name, other, theirs), go_on(name, model, optimizer)) == []


WAYS = [
    ("mlp", "zshard.AdamW", FULL, ("no_shard", "c10d")),
    ("mlp", "torch.AdamW", ("no_shard", "shm"), FULL),
    ("tied", "zshard.Adam", ("zero1", "c10d"), ("shard_grad_op", "shm")),
    ("odds", "zshard.SGD", ("shard_grad_op", "c10d"), FULL),
    ("frozen", "torch.SGD", FULL, ("zero1", "c10d")),
    ("dtypes", "zshard.AdamW", FULL, ("full_shard", "c10d")),
    ("conv", "zshard.AdamW", ("full_shard", "c10d"), ("shard_grad_op", "shm")),
    ("odds", "tests.Counting", FULL, ("full_shard", "c10d")),
    ("tied", "tests.Counting", ("zero1", "c10d"), ("no_shard", "shm")),
]


@pytest.mark.parametrize(("name", "kind", "source", "target"), WAYS)
@on_ranks(2)
def test_resumed_run_is_bit_identical(name, kind, source, target):
    resume(name, kind, source, target)


@pytest.mark.parametrize("combination", HYBRID)
@pytest.mark.parametrize("name", ["odds", "mlp"])
@on_ranks(4)
def test_hybrid_strategies(name, combination):
    resume(name, "zshard.AdamW", combination, ("full_shard", "c10d"))
    resume(name, "zshard.SGD", FULL, combination)


def loaded(name, combination, kind, saved):
    """Return an optimizer's state after a load, with which it steps."""
    model = sharded(name, combination, seed=5)
    optimizer = make_optimizer(kind, model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    state = copy.deepcopy(optimizer.state_dict())
    assert differ(state, saved[1]) == []
    go_on(name, model, optimizer, steps=1)
    return saved[0], state


def both_states(*args):
    return tuple(each.state_dict() for each in trained(*args))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("odds", "zshard.AdamW"), ("tied", "torch.SGD"), ("odds", "tests.Counting")],
)
def test_from_three_ranks_to_two_to_one_and_back(pool3, pool2, name, kind):
    saved = pool3.run(both_states, name, FULL, kind)[0]
    saved = pool2.run(loaded, name, ("full_shard", "c10d"), kind, saved)[1]
    saved = loaded(name, FULL, kind, saved)
    pool3.run(loaded, name, ("shard_grad_op", "shm"), kind, saved)


def distances(model, optimizer):
    """For parameters with a shard on this rank: from the state of each to that of the next."""
    held = [p for p in model.parameters() if p.numel()]
    starts = [optimizer.state[p]["exp_avg"].data_ptr() for p in held]
    return [b - a for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("combination", [FULL, ("no_shard", "c10d")])
@on_ranks(2)
def test_loaded_state_is_adjacent_and_not_shared(combination):
    model, optimizer = trained("one unit", combination, "zshard.AdamW")
    saved = optimizer.state_dict()
    before, fresh = copy.deepcopy(saved), distances(model, optimizer)
    optimizer.load_state_dict(saved)
    assert fresh and distances(model, optimizer) == fresh
    go_on("one unit", model, optimizer)
    assert differ(saved, before) == [], "training changes the dict that was loaded"


@on_ranks(2)
def test_loaded_state_returns_to_disk(tmp_path):
    kind = "zshard.AdamW"
    model = wrapped(CASES["net"].make, FULL, offload=str(tmp_path))
    optimizer = make_optimizer(kind, model)
    train(model, CASES["net"], optimizer, rank(), steps=2)
    state, before = optimizer.state_dict(), model.memory()["offloaded"]
    optimizer.load_state_dict(state)
    assert differ(optimizer.state_dict(), state) == []
    assert before == model.memory()["offloaded"] > 0
    assert differ(go_on("net", model, optimizer), go_on("net", *trained("net", FULL, kind))) == []


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_an_optimizer_outlives_its_model(combination):
    for _ in range(5):  # without a session, a rank may be a model ahead
        model, optimizer = trained("net", combination, "zshard.AdamW")
        expected = optimizer.state_dict()
        del model
        assert differ(optimizer.state_dict(), expected) == []


@on_ranks(2)
def test_optimizer_in_backward_continues_after_a_load():
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    saved = model.state_dict(), optimizer.state_dict()
    expected = go_on("mlp", model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.zero_grad()
    handle = model.optimizer_in_backward(optimizer)
    optimizer.load_state_dict(saved[1])
    assert differ(go_on("mlp", model, optimizer), expected) == []
    handle.remove()


@on_ranks(2)
def test_options_of_groups_and_schedules():
    """Options of stochastic rounding, of a schedule and of a group survive a state dict."""
    model = FSDP(make(Mlp).to(torch.bfloat16))
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.5, "tag": "a"}, {"params": params[2:]}]
    optimizer = zshard.AdamW(groups, stochastic_rounding=True, rounding_seed=7)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 7).to(torch.bfloat16)).float().sum().backward()
        optimizer.step()
        schedule.step()
    other = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["tag"] == "a"
    for group, lr in zip(other.param_groups, (0.005, 1e-5), strict=True):
        assert group["lr"] == pytest.approx(lr) and group["stochastic_rounding"]
        assert (group["rounding_seed"], group["rounding_step"]) == (7, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_after_an_evaluation(combination, precision):
    """A forward without backward has left parameters unsharded, in another dtype."""
    model = wrapped(Mlp, combination, mixed_precision=precision)
    optimizer = zshard.AdamW(model.parameters())
    train(model, CASES["mlp"], optimizer, rank(), steps=1)
    expected = optimizer.state_dict()
    model(torch.randn(2, 7))
    state = optimizer.state_dict()
    assert differ(state, expected) == []
    optimizer.load_state_dict(state)
    assert differ(optimizer.state_dict(), expected) == []
    states = optimizer.state.values()
    assert {value.dtype for entries in states for value in entries.values()} == {torch.float32}


@on_ranks(2)
def test_copies():
    """Copies of a model together with its optimizer, and of the optimizer alone."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    expected = optimizer.state_dict()
    twin, theirs = copy.deepcopy((model, optimizer))
    assert differ(theirs.state_dict(), expected) == []
    go_on("mlp", twin, theirs)
    assert differ(optimizer.state_dict(), expected) == []
    with pytest.raises(zshard.ShardError, match="shard of"):
        pickle.dumps(optimizer)
    alone = copy.deepcopy(optimizer)
    with pytest.raises(zshard.ShardError, match="copy both"):
        alone.state_dict()
    assert len(alone.state) == len(optimizer.state)


class PerElement(torch.optim.SGD):
    """A custom optimizer, whose per-element state has names that torch uses for single numbers."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", torch.zeros_like(param, dtype=torch.float64)) + 1
            state["eta"] = param.detach() * 2
            state["mu"] = torch.zeros(())


@on_ranks(2)
def test_custom_optimizer():
    """The plain model's state after a step, and after a load in inference mode."""
    model, plain = sharded("tied", FULL), make(CASES["tied"].make)
    ours, theirs = PerElement(model.parameters()), PerElement(plain.parameters())
    for optimizer in (ours, theirs):
        optimizer.step()
    with torch.inference_mode():
        state = ours.state_dict()
        assert differ(state, theirs.state_dict()) == []
        ours.load_state_dict(state)
    tensors = [v for entries in ours.state.values() for v in entries.values()]
    assert differ(ours.state_dict(), state) == []
    assert not any(tensor.is_inference() for tensor in tensors)


@on_ranks(2)
def test_user_hooks_see_full_tensors():
    _, optimizer = trained("mlp", FULL, "zshard.AdamW")
    seen = []

    def note(_, state):
        seen.append(tuple(state["state"][0]["exp_avg"].shape))

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [(13, 7), (13, 7)]
