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
    wrap,
)
from spawn import on_ranks, ranks

import zshard
from zshard import FSDP

NAMES = ["mlp", "tied", "odds", "dtypes", "frozen", "conv", "unused"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.SGD", "tests.Counting"])
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_state_equals_the_plain_models_optimizer(name, kind):
    """Return {combination: what differs between the states of a sharded and a DDP model's
    optimizer}."""
    expected = reference(name, kind)[1].state_dict()
    found = {}
    for combination in COMBINATIONS:
        _, optimizer = trained(name, combination, kind)
        state = optimizer.state_dict()
        found[combination] = differ(state, expected)
        if list(state["state"]) != list(expected["state"]):
            found[combination].append("the parameters come in another order")
    assert not any(found.values()), found


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_elementwise_optimizers(kind):
    """Return what differs after a load into another model, including 0-dimensional parameters."""
    case, build = CASES["odds"], KINDS[kind]
    model = wrap("odds", FULL)
    optimizer = build(model.parameters())
    train(model, case, optimizer, rank(), steps=2)
    other = wrap("odds", ("shard_grad_op", "c10d"), seed=3)
    theirs = build(other.parameters())
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    found = differ(theirs.state_dict(), optimizer.state_dict())
    assert found + differ(go_on("odds", other, theirs), go_on("odds", model, optimizer)) == []


def resumed(name, kind, source, target):
    """Return what differs between a run of four steps and one that goes through files after two:
    into a plain model's torch optimizer, and from that into another sharded model."""
    model, optimizer = trained(name, source, kind)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    plain = make(CASES[name].make, seed=2)
    plain.load_state_dict(saved[0])
    torchs = make_optimizer(kind.replace("zshard", "torch"), plain)
    torchs.load_state_dict(saved[1])
    found = differ(torchs.state_dict(), saved[1])
    other = wrap(name, target, seed=3)
    theirs = make_optimizer(kind, other)
    other.load_state_dict(plain.state_dict())
    theirs.load_state_dict(through_a_file(torchs.state_dict()))
    found += differ(theirs.state_dict(), saved[1])
    return found + differ(go_on(name, other, theirs), go_on(name, model, optimizer))


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
def test_resumed_run_is_bit_identical(pool2, name, kind, source, target):
    assert pool2.run(resumed, name, kind, source, target) == [[], []]


@ranks(4)
@pytest.mark.parametrize("name", ["odds", "mlp"])
def test_hybrid_strategies(pool, name):
    for combination in HYBRID:
        way = name, "zshard.AdamW", combination, ("full_shard", "c10d")
        assert pool.run(resumed, *way) == [[]] * 4, combination
    assert pool.run(resumed, name, "zshard.SGD", FULL, HYBRID[0]) == [[]] * 4


def save(name, combination, kind):
    model, optimizer = trained(name, combination, kind)
    return model.state_dict(), optimizer.state_dict()


def load(name, combination, kind, saved):
    """Return an optimizer's state after a load, and whether it steps."""
    model = wrap(name, combination, seed=5)
    optimizer = make_optimizer(kind, model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    state = copy.deepcopy(optimizer.state_dict())
    go_on(name, model, optimizer, steps=1)
    return state


@pytest.mark.parametrize(
    ("name", "kind"),
    [("odds", "zshard.AdamW"), ("tied", "torch.SGD"), ("odds", "tests.Counting")],
)
def test_from_three_ranks_to_two_to_one_and_back(pool3, pool2, name, kind):
    saved = pool3.run(save, name, FULL, kind)[0]
    for state in pool2.run(load, name, ("full_shard", "c10d"), kind, saved):
        assert differ(state, saved[1]) == []
    assert differ(load(name, FULL, kind, (saved[0], state)), saved[1]) == []
    for again in pool3.run(load, name, ("shard_grad_op", "shm"), kind, (saved[0], state)):
        assert differ(again, saved[1]) == []


def distances(model, optimizer):
    """For parameters with a shard on this rank: from the state of each to that of the next."""
    held = [p for p in model.parameters() if p.numel()]
    starts = [optimizer.state[p]["exp_avg"].data_ptr() for p in held]
    return [b - a for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("combination", [FULL, ("no_shard", "c10d")])
@on_ranks(2)
def test_loaded_state_is_adjacent_and_not_shared(combination):
    """Return distances between adjacent state tensors, for a fresh optimizer and for one that has
    loaded; and whether training changes the dict that was loaded."""
    model, optimizer = trained("one unit", combination, "zshard.AdamW")
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    fresh = distances(model, optimizer)
    optimizer.load_state_dict(saved)
    loaded = distances(model, optimizer)
    go_on("one unit", model, optimizer)
    same = fresh == loaded
    count = len(fresh)
    changed = differ(saved, kept)
    assert same and count > 0 and changed == []


@on_ranks(2)
def test_loaded_state_returns_to_disk(tmp_path):
    """Return what differs after a load where state is on a disk; and its bytes there, before and
    after."""
    folder = str(tmp_path)
    kind = "zshard.AdamW"
    model = wrapped(CASES["net"].make, FULL, offload=folder)
    optimizer = make_optimizer(kind, model)
    train(model, CASES["net"], optimizer, rank(), steps=2)
    state, before = optimizer.state_dict(), model.memory()["offloaded"]
    optimizer.load_state_dict(state)
    found = differ(optimizer.state_dict(), state)
    after = model.memory()["offloaded"]
    other, theirs = trained("net", FULL, kind)
    found = found + differ(go_on("net", model, optimizer), go_on("net", other, theirs))
    assert found == [] and before == after > 0


@on_ranks(2)
def test_optimizer_in_backward_continues_after_a_load():
    """Return what differs between training by step() and in backward, both after a load."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    saved = model.state_dict(), optimizer.state_dict()
    expected = go_on("mlp", model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.zero_grad()
    handle = model.optimizer_in_backward(optimizer)
    optimizer.load_state_dict(saved[1])
    found = differ(go_on("mlp", model, optimizer), expected)
    handle.remove()
    assert found == []


def options():
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
    state = optimizer.state_dict()
    other = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    other.load_state_dict(state)
    back = [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]
    return [
        {k: g[k] for k in ("lr", "stochastic_rounding", "rounding_seed", "rounding_step")}
        for g in back
    ], back[0]["tag"]


def test_options_of_groups_and_schedules(pool2):
    rounding = {"stochastic_rounding": True, "rounding_seed": 7, "rounding_step": 2}
    for (first, second), tag in pool2.run(options):
        assert tag == "a"
        assert first == {"lr": pytest.approx(0.005), **rounding}
        assert second == {"lr": pytest.approx(1e-5), **rounding}


def after_an_evaluation(combination, precision):
    """Return what differs where a forward without backward has left parameters unsharded, in
    another dtype."""
    model = wrapped(Mlp, combination, mixed_precision=precision)
    optimizer = zshard.AdamW(model.parameters())
    train(model, CASES["mlp"], optimizer, rank(), steps=1)
    expected = optimizer.state_dict()
    model(torch.randn(2, 7))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    dtypes = {v.dtype for each in optimizer.state.values() for v in each.values()}
    return differ(state, expected) + differ(optimizer.state_dict(), expected), dtypes


@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard", "no_shard"])
def test_after_an_evaluation(pool2, strategy, precision):
    for transport in ("shm", "c10d"):
        found = pool2.run(after_an_evaluation, (strategy, transport), precision)
        assert found == [([], {torch.float32})] * 2


@on_ranks(2)
def test_copies():
    """Copies of a model together with its optimizer, and of the optimizer alone."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    expected = optimizer.state_dict()
    made, theirs = copy.deepcopy((model, optimizer))
    found = differ(theirs.state_dict(), expected)
    go_on("mlp", made, theirs)
    found += differ(optimizer.state_dict(), expected)
    with pytest.raises(zshard.ShardError, match="shard of"):
        pickle.dumps(optimizer)
    alone = copy.deepcopy(optimizer)
    with pytest.raises(zshard.ShardError, match="copy both"):
        alone.state_dict()
    assert found == []
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
    """Return what differs from the plain model's after a step, and after a load in inference
    mode."""
    model, plain = wrap("tied", FULL), make(CASES["tied"].make)
    ours, theirs = PerElement(model.parameters()), PerElement(plain.parameters())
    for optimizer in (ours, theirs):
        optimizer.step()
    with torch.inference_mode():
        state = ours.state_dict()
        found = differ(state, theirs.state_dict())
        ours.load_state_dict(state)
    tensors = [v for entries in ours.state.values() for v in entries.values()]
    assert found + differ(ours.state_dict(), state) == []
    assert not (any(t.is_inference() for t in tensors))


@on_ranks(2)
def test_user_hooks_see_full_tensors():
    """Return the shapes that user hooks see: full ones, in saving and loading."""
    _, optimizer = trained("mlp", FULL, "zshard.AdamW")
    seen = []

    def shape_of(state):
        return tuple(state["state"][0]["exp_avg"].shape)

    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(shape_of(state)))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(shape_of(state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [(13, 7), (13, 7)]
