"""zshard.save: the content of the files, for every kind of model, strategy and optimizer.

The files, as other tools read them, are bit-identical to the model's own state_dict() and to
optim_state_dict().
"""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import CHUNK, manifest_in, saved, tensors_in, unlike
from compare import assert_same
from groups import mesh_of
from models import (
    CASES,
    COMBINATIONS,
    Block,
    Mlp,
    Net,
    loss_of,
    make,
    make_optimizer,
    train,
)
from offloaded import KINDS as OFFLOADS
from offloaded import Wide, steps, to
from optim_states import FULL, HYBRID, KINDS, rank, trained, wrap
from scenarios import Stack, floats, over, stack
from spawn import on_ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP, MixedPrecision

APART = ("full_shard", "c10d")
each_way = pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda both: " ".join(both))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, 3)
def test_files_are_bit_identical_to_state_dicts(name, tmp_path):
    kind = "torch.SGD" if name in ("conv", "frozen") else "zshard.AdamW"
    for combination in COMBINATIONS:
        assert saved(tmp_path, *trained(name, combination, kind)) == [], combination


@pytest.mark.parametrize("name", ["odds", "mlp", "tied"])
@on_ranks(4)
def test_hybrid_strategies(name, tmp_path):
    for combination in [*HYBRID, ("hybrid_shard", 4, 1), ("hybrid_shard", 1, 4)]:
        assert saved(tmp_path, *trained(name, combination, "zshard.AdamW")) == [], combination


@on_ranks(4)
def test_units_over_different_groups(tmp_path):
    """Some units are sharded over neighbors, others over ranks further apart, and one is not
    sharded."""
    model, mesh = make(Net), mesh_of(2, 2)
    near, far = mesh.get_group("shard"), mesh.get_group("replicate")
    for i, block in enumerate(model.blocks):
        groups = (near, far) if i % 2 else (far, near)
        FSDP(block, groups, "hybrid_shard", auto_wrap_policy={nn.Linear}, transport="c10d")
    FSDP(model.embed, strategy="no_shard", transport="c10d")
    optimizer = zshard.AdamW(model.parameters())
    train(model, CASES["net"], optimizer, rank(), 1)
    assert saved(tmp_path, model, optimizer) == []


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_elementwise_optimizers(kind, tmp_path):
    model = wrap("odds", FULL)
    optimizer = KINDS[kind](model.parameters())
    assert saved(tmp_path, model, optimizer) == []  # most have no state yet
    train(model, CASES["odds"], optimizer, rank(), steps=2)
    assert saved(tmp_path, model, optimizer) == []


def test_no_files_for_an_optimizer_without_state(tmp_path):
    model = FSDP(make(Mlp))
    zshard.save(tmp_path / "x", model, torch.optim.SGD(model.parameters(), 0.1))
    assert not list(tmp_path.glob("x/optimizer*"))
    assert manifest_in(tmp_path / "x").optimizer["state"] == {}
    zshard.save(tmp_path / "y", model)
    assert manifest_in(tmp_path / "y").optimizer is None


# --- setups ---------------------------------------------------------------------------------------


def of_some_parameters():
    model = wrap("net", ("shard_grad_op", "c10d"))
    some = [p for name, p in model.named_parameters() if "blocks" in name]
    groups = [{"params": some[::2], "lr": 0.5}, {"params": some[1::2], "betas": (0.5, 0.6)}]
    optimizer = zshard.AdamW(groups, lr=0.01)
    train(model, CASES["net"], optimizer, rank(), 1)
    return model, optimizer


def stepped_in_backward():
    model = wrap("net", APART)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    model.optimizer_in_backward(optimizer)
    for step in range(2):
        loss_of(model(CASES["net"].batch(step, rank()))).backward()
    return model, optimizer


def by_fully_shard(transport):
    with over(transport):
        model = stack()
    return step_of(model, floats(rank()))


def step_of(model, batch):
    """Return the model and an optimizer after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model(batch)).backward()
    optimizer.step()
    return model, optimizer


def in_a_plain_model():
    """FSDP modules inside a plain module."""
    model = nn.Sequential(FSDP(make(Mlp)), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return step_of(model, CASES["mlp"].batch(0, rank()))


def ignored():
    """Modules that zshard ignores are saved with rank 0's values."""
    model = make(Stack, seed=rank())
    model = FSDP(model, ignored_modules=[model.head], auto_wrap_policy={Block})
    return step_of(model, floats(rank()))


def from_meta():
    with torch.device("meta"):
        model = Mlp()
    return FSDP(model, transport="c10d", auto_wrap_policy={nn.Linear}), None


WAYS = {
    "an optimizer of some parameters in groups": of_some_parameters,
    "an optimizer in backward": stepped_in_backward,
    "fully_shard over shm": lambda: by_fully_shard("shm"),
    "fully_shard over c10d": lambda: by_fully_shard("c10d"),
    "within a plain model": in_a_plain_model,
    "a part of a model": lambda: (wrap("net", FULL).blocks[1], None),
    "ignored modules": ignored,
    "a plain model, of which rank 0's values are saved": lambda: step_of(
        Mlp(), CASES["mlp"].batch(0, rank())
    ),
    "from the meta device": from_meta,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_partially_wrapped_models(way, tmp_path):
    torch.manual_seed(rank())
    assert saved(tmp_path, *WAYS[way]()) == []


@each_way
@on_ranks(2)
def test_mixed_precision(combination, tmp_path):
    """The parameters' own values are saved, whatever a forward has left."""
    strategy, transport = combination
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(make(Net), strategy=strategy, transport=transport, mixed_precision=precision)
    optimizer = zshard.AdamW(model.parameters())
    train(model, CASES["net"], optimizer, rank(), 2)
    before = copy.deepcopy(model.state_dict())
    loss = loss_of(model(CASES["net"].batch(2, rank())))
    zshard.save(tmp_path / "x", model, optimizer)
    loss.backward()
    assert {t.dtype for t in tensors_in(tmp_path / "x").values()} == {torch.float32}
    assert unlike(tmp_path / "x", before, zshard.optim_state_dict(model, optimizer)) == []


@each_way
@on_ranks(2)
def test_save_between_forward_and_backward_changes_nothing(combination, tmp_path):
    states = []
    for is_saved in (False, True):
        model, optimizer = trained("net", combination, "zshard.AdamW")
        loss = loss_of(model(CASES["net"].batch(2, rank())))
        if is_saved:
            zshard.save(tmp_path / "x", model, optimizer)
        loss.backward()
        optimizer.step()
        states.append(model.state_dict())
    assert_same(*states, "the model after a save")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", OFFLOADS)
@on_ranks(1, 2)
def test_offload(kind, tmp_path):
    offload = to(str(tmp_path), **OFFLOADS[kind])
    model = FSDP(make(Wide), offload=offload, auto_wrap_policy={nn.Linear})
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer)
    assert saved(tmp_path, model, optimizer) == []


@pytest.mark.parametrize("name", CASES)
def test_unwrapped_model(name, tmp_path):
    model = make(CASES[name].make)
    optimizer = make_optimizer("torch.AdamW", model)
    train(model, CASES[name], optimizer, 0, 2)
    assert saved(tmp_path, model, optimizer) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", COMBINATIONS[:4], ids=lambda both: " ".join(both))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@on_ranks(2)
def test_save_needs_one_chunk_of_memory(combination, dtype, tmp_path):
    layers = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    strategy, transport = combination
    model = FSDP(layers, strategy=strategy, transport=transport, auto_wrap_policy={nn.Linear})
    optimizer = zshard.AdamW(model.parameters())
    loss_of(model(torch.ones(1, 1024))).backward()
    optimizer.step()
    optimizer.zero_grad()
    zshard.save(tmp_path / "x", model, optimizer, dtype=dtype)  # so that all is there
    trim()
    reset_high_water()
    before = high_water()
    zshard.save(tmp_path / "x", model, optimizer, dtype=dtype, overwrite=True)
    assert high_water() - before <= 2**20 + (CHUNK if dtype is not None else 0)
