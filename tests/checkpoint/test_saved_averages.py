"""zshard.save and zshard.load with an EMA: averages and counts continue with the same bits, at any
strategy and number of ranks, and each file is a plain model."""

from __future__ import annotations

import json
import shutil

import numpy
import pytest
import torch
from checkpoints import manifest_in, tensors_in
from compare import assert_same
from damage import flip
from models import CASES, COMBINATIONS, loss_of, make
from optim_states import HYBRID, rank, wrap
from rows import all_refused
from safetensors.torch import load_file
from scenarios import Stack
from spawn import on_ranks

import zshard
from zshard import EMA, FSDP, _core
from zshard.checkpoint.manifest import NAME

DECAYS = (0.9, 0.999)


def built(name, way):
    model = wrap(name, way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, EMA(model, DECAYS, every=2)


def train(model, optimizer, ema, steps, name):
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
    model, optimizer, ema = built(name, way)
    train(model, optimizer, ema, range(5), name)
    zshard.save(folder, model, optimizer, ema=ema, asynchronous=asynchronous).wait()
    states = states_of(ema)
    train(model, optimizer, ema, range(5, 9), name)
    others = built(name, way)
    zshard.load(folder, *others[:2], ema=others[2])
    train(*others, range(5, 9), name)
    assert_same(states_of(others[2]), states_of(ema), "the averages of a run that resumes")
    return states


def load_by(name, way, folder, states):
    model, optimizer, ema = built(name, way)
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
        assert_same(found, {n: states[f"{decay} {n}"] for n in found}, "the file")


@on_ranks(2)
def test_averages_of_bfloat16(tmp_path):
    """Their averages are float32 in the file, and come back so; also as a checkpoint of their own."""
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


# --- errors ---------------------------------------------------------------------------------------


def saved(folder, decay=0.9):
    model = FSDP(make(Stack))
    ema = EMA(model, decay)
    ema.update()
    zshard.save(folder, model, ema=ema)
    return model, ema


def test_inspect_and_decays_of_numpy(tmp_path, command):
    model, _ = saved(tmp_path / "a", numpy.array(DECAYS))
    zshard.load(tmp_path / "a", model, ema=EMA(model, DECAYS))
    status, said, _ = command("inspect", tmp_path / "a")
    assert status == 0 and "average-0.999: " in said
    assert command("verify", tmp_path / "a")[0] == 0


ENTRIES = {"a path": {"decays": ["../x"]}, "below 0": {"decays": [0.9], "calls": -1}}
ENTRIES |= {"a number": {"decays": 3}, "nothing": {}}


def test_what_does_not_fit(tmp_path):
    """Also damage: found when averages are loaded, and not in the way of the model alone."""
    model, ema = saved(tmp_path / "a")
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
