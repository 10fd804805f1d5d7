"""zshard.save: the content of the files, for every kind of model, strategy and optimizer; averages.

The files, as other tools read them, are bit-identical to the model's own state_dict() and to
optim_state_dict().
"""

from __future__ import annotations

import copy
import json
import shutil

import numpy
import pytest
import torch
from checkpoints import CHUNK, manifest_in, saved, tensors_in, unlike
from compare import assert_same
from damage import flip
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
from optim_states import FULL, HYBRID, KINDS, rank, trained
from rows import all_refused
from safetensors.torch import load_file
from scenario import sharded
from scenarios import Stack, floats, over, stack
from spawn import on_ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import EMA, FSDP, MixedPrecision, _core
from zshard.checkpoint.manifest import NAME

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
    model = sharded("odds", FULL)
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
    model = sharded("net", ("shard_grad_op", "c10d"))
    some = [p for name, p in model.named_parameters() if "blocks" in name]
    groups = [{"params": some[::2], "lr": 0.5}, {"params": some[1::2], "betas": (0.5, 0.6)}]
    optimizer = zshard.AdamW(groups, lr=0.01)
    train(model, CASES["net"], optimizer, rank(), 1)
    return model, optimizer


def stepped_in_backward():
    model = sharded("net", APART)
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
    "a part of a model": lambda: (sharded("net", FULL).blocks[1], None),
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
    """The parameters' own values are saved, not the copies that a forward has left."""
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


# --- averages: they continue with the same bits, at any strategy and number of ranks ---------------


DECAYS = (0.9, 0.999)


def with_averages(name, way):
    model = sharded(name, way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, EMA(model, DECAYS, every=2)


def train_both(model, optimizer, ema, steps, name):
    """Train on batches that are the same on all ranks, so that the number of ranks does not
    matter much; average after each step."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(CASES[name].batch(step, 0))).backward()
        optimizer.step()
        ema.update()


def states_of(ema):
    return {f"{decay} {n}": v for decay in DECAYS for n, v in ema.state_dict(decay).items()}


def saved_by(name, way, folder, asynchronous):
    """Return the averages that are saved; fail unless a load continues with the same bits."""
    model, optimizer, ema = with_averages(name, way)
    train_both(model, optimizer, ema, range(5), name)
    zshard.save(folder, model, optimizer, ema=ema, asynchronous=asynchronous).wait()
    states = states_of(ema)
    train_both(model, optimizer, ema, range(5, 9), name)
    others = with_averages(name, way)
    zshard.load(folder, *others[:2], ema=others[2])
    train_both(*others, range(5, 9), name)
    assert_same(states_of(others[2]), states_of(ema), "the averages of a run that resumes")
    return states


def load_by(name, way, folder, states):
    model, optimizer, ema = with_averages(name, way)
    zshard.load(folder, model, optimizer, ema=ema)
    assert (ema.calls, ema.updates) == (5, 2)
    assert_same(states_of(ema), states, f"the averages under {way}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["net", "odds", "tied", "dtypes", "conv"])
@pytest.mark.parametrize("way", COMBINATIONS)
def test_saved_and_loaded(pool2, pool3, pool4, name, way, tmp_path):
    """Each file is a plain model."""
    folder, other = tmp_path / "saved", COMBINATIONS[COMBINATIONS.index(way) - 1]
    states, _ = pool2.run(saved_by, name, way, folder, way[1] == "shm")
    manifest_in(folder)
    for pool, loader in ((pool2, other), (pool3, other), (pool4, HYBRID[0])):
        pool.run(load_by, name, loader, folder, states)
    for decay in DECAYS:
        plain = make(CASES[name].make, 3)
        found = load_file(folder / f"average-{decay}.safetensors")
        assert found.keys() == dict(plain.named_parameters()).keys()
        for parameter, value in found.items():  # float32 of bfloat16
            expected = states[f"{decay} {parameter}"]
            assert_same(value.to(expected.dtype), expected, parameter)


@on_ranks(2)
def test_averages_of_bfloat16(tmp_path):
    """Their averages are float32 in the file, and come back so; also as a separate checkpoint."""
    model = FSDP(make(Stack).bfloat16())
    ema, again = EMA(model, 0.9), EMA(model, 0.9)
    for step in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 0.3 * step)
        ema.update()
    zshard.save(tmp_path / "a", model, ema=ema)
    zshard.load(tmp_path / "a", model, ema=again)
    assert_same(ema.averages[0], again.averages[0], "the averages")
    pairs = zip(ema.params, ema.averages[0], strict=True)
    full = {name: zshard.full_tensor(value) for name, value in pairs}
    assert_same(tensors_in(tmp_path / "a", "average-0.9"), full, "the file")
    with ema.swapped():
        zshard.save(tmp_path / "b", model)
    assert_same(tensors_in(tmp_path / "b"), ema.state_dict(), "the model")


def average_in(folder, decay=0.9):
    model = FSDP(make(Stack))
    ema = EMA(model, decay)
    ema.update()
    zshard.save(folder, model, ema=ema)
    return model, ema


def test_inspect_and_decays_of_numpy(tmp_path, command):
    model, _ = average_in(tmp_path / "a", numpy.array(DECAYS))
    zshard.load(tmp_path / "a", model, ema=EMA(model, DECAYS))
    status, said, _ = command("inspect", tmp_path / "a")
    assert status == 0 and "average-0.999: " in said
    assert command("verify", tmp_path / "a")[0] == 0


ENTRIES = {"a path": {"decays": ["../x"]}, "below 0": {"decays": [0.9], "calls": -1}}
ENTRIES |= {"a number": {"decays": 3}, "nothing": {}}


def test_what_does_not_fit(tmp_path):
    """Also damage: found when averages are loaded, and not in the way of the model alone."""
    model, ema = average_in(tmp_path / "a")
    wide = FSDP(torch.nn.ModuleDict({"blocks": make(Stack), "more": torch.nn.Linear(2, 2)}))

    def load(name="a", into=model, ema=ema, **options):
        return lambda: zshard.load(tmp_path / name, into, ema=ema, **options)

    two, other, loose = EMA(model, (0.9, 0.99)), EMA(model, 0.99), {"strict": False}
    strange, kind = EMA(wide, 0.9), "ema must be a zshard.EMA, got list"
    file = "average-0.9.safetensors"
    damaged = shutil.copytree(tmp_path / "a", tmp_path / "damaged")
    flip(damaged / file, -1)
    (shutil.copytree(tmp_path / "a", tmp_path / "missing") / file).unlink()
    zshard.save(tmp_path / "without", model)
    table = {
        "its decays are [0.9], but the EMA's are [0.9, 0.99]": (load(ema=two), RuntimeError),
        "its decays are [0.9], but the EMA's are [0.99]": (load(ema=other), RuntimeError),
        "average-0.9 lacks 'more.weight'": (load("a", wide, strange, **loose), RuntimeError),
        "average-0.9 has 'head.weight', which": (load("a", wide, strange, **loose), RuntimeError),
        "ema averages another model": (load("a", wide), ValueError),
        f"{kind}": (load(ema=[ema]), TypeError),
        f"{kind}"[:-1]: (lambda: zshard.save(tmp_path / "b", model, ema=[ema]), TypeError),
        "has no averages: omit ema": (load("without"), RuntimeError),
        "is damaged: checksum mismatch": (load("damaged"), zshard.CheckpointError),
        "is missing from the checkpoint": (load("missing"), zshard.CheckpointError),
    }
    rows = {text: (*row, text) for text, row in table.items()}
    for name, entry in ENTRIES.items():
        path = shutil.copytree(tmp_path / "a", tmp_path / name) / NAME
        body = json.loads(path.read_text())["checkpoint"] | {"averages": entry}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        crc = f"{_core.crc32c(text.encode()):08x}"
        path.write_text(json.dumps({"crc32c": crc, "checkpoint": body}))
        rows[name] = load(name), zshard.CheckpointError, "invalid entry of averages"
    all_refused(rows)
    load("damaged", ema=None)()


@on_ranks(2)
def test_an_ema_on_one_rank(tmp_path):
    model = FSDP(make(Stack))
    ema = EMA(model, 0.9)
    ema.update()
    ema = None if rank() else ema
    differ = zshard.DivergenceError
    with pytest.raises(differ, match=r"EMA|average"):
        zshard.save(tmp_path / "a", model, ema=ema)
    with pytest.raises(differ, match="is EMA on rank 0, but NoneType on rank 1"):
        zshard.load(tmp_path / "a", model, ema=ema)
