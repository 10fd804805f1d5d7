"""zshard.save and zshard.load with an EMA: averages and counts continue with the same bits, at any
strategy and number of ranks, and each file is a plain model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import manifest_in, tensors_in
from compare import assert_same, differences
from models import CASES, COMBINATIONS, loss_of, make
from optim_states import HYBRID, wrap
from safetensors.torch import load_file
from scenarios import Stack, floats
from spawn import on_ranks

import zshard
from zshard import EMA, FSDP, _core
from zshard.__main__ import main
from zshard.checkpoint.manifest import NAME

DECAYS = (0.9, 0.999)


def trained(model, optimizer, ema, steps, name):
    """Train on batches that are the same on all ranks, so that the number of ranks does not
    matter much; average after each step."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model(CASES[name].batch(step, 0))).backward()
        optimizer.step()
        ema.update()


def built(name, way):
    model = wrap(name, way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, EMA(model, DECAYS, every=2)


def saved_by(name, way, folder, asynchronous):
    parts = built(name, way)
    trained(*parts, range(5), name)
    model, optimizer, ema = parts
    zshard.save(folder, model, optimizer, ema=ema, asynchronous=asynchronous).wait()
    states = {decay: ema.state_dict(decay) for decay in DECAYS}
    trained(*parts, range(5, 9), name)
    return states, {decay: ema.state_dict(decay) for decay in DECAYS}


def loaded_by(name, way, folder):
    model, optimizer, ema = built(name, way)
    zshard.load(folder, model, optimizer, ema=ema)
    assert (ema.calls, ema.updates) == (5, 2)
    return {decay: ema.state_dict(decay) for decay in DECAYS}


def continued(name, way, folder):
    """On the same ranks, the run continues with the same bits."""
    model, optimizer, ema = built(name, way)
    zshard.load(folder, model, optimizer, ema=ema)
    trained(model, optimizer, ema, range(5, 9), name)
    return {decay: ema.state_dict(decay) for decay in DECAYS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["net", "odds", "tied", "dtypes", "conv"])
@pytest.mark.parametrize("way", COMBINATIONS)
def test_saved_and_loaded(pool2, pool3, pool4, name, way, tmp_path):
    folder = tmp_path / "saved"
    (states, later), *_ = pool2.run(saved_by, name, way, folder, way[1] == "shm")
    manifest_in(folder)
    for found in pool2.run(continued, name, way, folder):
        assert differences(flat(found), flat(later)) == []
    others = [COMBINATIONS[COMBINATIONS.index(way) - 1]]
    for pool, ways in ((pool3, others), (pool4, HYBRID[:1]), (pool2, others)):
        for other in ways:
            for found in pool.run(loaded_by, name, other, folder):
                assert differences(flat(found), flat(states)) == [], other


def flat(states):
    return {f"{decay} {n}": v for decay, state in states.items() for n, v in state.items()}


def test_files_are_plain_models(pool2, tmp_path):
    (states, _), _ = pool2.run(saved_by, "conv", ("full_shard", "shm"), tmp_path / "a", False)
    for decay in DECAYS:
        plain = make(CASES["conv"].make, 3)
        found = load_file(tmp_path / "a" / f"average-{decay}.safetensors")
        missing = plain.load_state_dict(found, strict=False).missing_keys
        assert set(missing) <= {name for name, _ in plain.named_buffers()}
        assert found.keys() == dict(plain.named_parameters()).keys()
        own = {name: value for name, value in states[decay].items() if name in found}
        assert_same(found, own, "the file")


def low_precision(folder):
    """bfloat16 parameters: their averages are float32 in the file, and come back so."""
    model = FSDP(make(Stack).bfloat16())
    ema = EMA(model, 0.9)
    for step in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 0.3 * step)
        ema.update()
    zshard.save(folder, model, ema=ema)
    again = EMA(model, 0.9)
    zshard.load(folder, model, ema=again)
    for ours, theirs in zip(ema.averages[0], again.averages[0], strict=True):
        assert_same(ours, theirs, "the average")
    return {
        name: zshard.full_tensor(v) for name, v in zip(ema.params, ema.averages[0], strict=True)
    }


def test_averages_of_bfloat16(pool2, tmp_path):
    found, _ = pool2.run(low_precision, tmp_path / "a")
    assert_same(tensors_in(tmp_path / "a", "average-0.9"), found, "the file")


def exported(folder):
    """The average as a checkpoint of its own."""
    model = FSDP(make(Stack))
    optimizer, ema = torch.optim.SGD(model.parameters(), 0.1), EMA(model, 0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(floats(0, step))).backward()
        optimizer.step()
        ema.update()
    with ema.swapped():
        zshard.save(folder, model)
    return ema.state_dict()


def test_save_within_swapped(pool2, tmp_path):
    state, _ = pool2.run(exported, tmp_path / "a")
    assert_same(tensors_in(tmp_path / "a"), state, "the model")


# --- errors ---------------------------------------------------------------------------------------


def saved(folder, decay=0.9):
    model = FSDP(make(Stack))
    ema = EMA(model, decay)
    ema.update()
    zshard.save(folder, model, ema=ema)
    return model, ema


def test_inspect(tmp_path, capsys, monkeypatch):
    saved(tmp_path / "a", DECAYS)
    monkeypatch.setattr("sys.argv", ["zshard", "ckpt", "inspect", str(tmp_path / "a")])
    assert not main()
    assert "average-0.999: " in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["zshard", "ckpt", "verify", str(tmp_path / "a")])
    assert not main()


def test_decays_of_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    model, ema = saved(tmp_path / "a", numpy.array(DECAYS))
    zshard.load(tmp_path / "a", model, ema=EMA(model, DECAYS))
    assert ema.decays == DECAYS


def test_what_does_not_fit(tmp_path):
    model, ema = saved(tmp_path / "a")
    cases = {
        "its decays are [0.9], but the EMA's are [0.9, 0.99]": EMA(model, (0.9, 0.99)),
        "its decays are [0.9], but the EMA's are [0.99]": EMA(model, 0.99),
    }
    for text, other in cases.items():
        with pytest.raises(RuntimeError) as caught:
            zshard.load(tmp_path / "a", model, ema=other)
        assert text in str(caught.value)
    wide = FSDP(torch.nn.ModuleDict({"blocks": make(Stack), "more": torch.nn.Linear(2, 2)}))
    with pytest.raises(RuntimeError) as caught:
        zshard.load(tmp_path / "a", wide, ema=EMA(wide, 0.9), strict=False)
    assert "average-0.9 lacks 'more.weight'" in str(caught.value)
    assert "average-0.9 has 'head.weight', which the EMA does not average" in str(caught.value)
    with pytest.raises(ValueError, match="ema averages another model"):
        zshard.load(tmp_path / "a", wide, ema=ema)
    for call in (zshard.save, zshard.load):
        with pytest.raises(TypeError, match=r"ema must be a zshard.EMA, got list"):
            call(tmp_path / "b", model, ema=[ema])
    zshard.save(tmp_path / "without", model)
    with pytest.raises(RuntimeError, match="has no averages: omit ema"):
        zshard.load(tmp_path / "without", model, ema=ema)


def test_damaged_files(tmp_path):
    """Found when averages are loaded, and not in the way of the model alone."""
    model, ema = saved(tmp_path / "a")
    path = tmp_path / "a" / "average-0.9.safetensors"
    shutil.copy(path, tmp_path / "kept")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(zshard.CheckpointError, match="is damaged: checksum mismatch"):
        zshard.load(tmp_path / "a", model, ema=ema)
    zshard.load(tmp_path / "a", model)
    path.unlink()
    with pytest.raises(zshard.CheckpointError, match="is missing from the checkpoint"):
        zshard.load(tmp_path / "a", model, ema=ema)


@pytest.mark.parametrize(
    "entry", [{"decays": ["../x"]}, {"decays": [0.9], "calls": -1}, {"decays": 3}, {}]
)
def test_invalid_manifests(tmp_path, entry):
    model, ema = saved(tmp_path / "a")
    path = tmp_path / "a" / NAME
    body = json.loads(path.read_text())["checkpoint"] | {"averages": entry}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(
        json.dumps({"crc32c": f"{_core.crc32c(text.encode()):08x}", "checkpoint": body})
    )
    with pytest.raises(zshard.CheckpointError, match=r"invalid entry of averages"):
        zshard.load(tmp_path / "a", model, ema=ema)


@on_ranks(2)
def test_an_ema_on_one_rank(tmp_path):
    """Ranks that pass an EMA, and ranks that pass none."""
    folder = tmp_path / "a"
    model, ema = FSDP(make(Stack)), None
    own = EMA(model, 0.9)
    own.update()
    if torch.distributed.get_rank() == 0:
        ema = own
    said = []
    for call in (zshard.save, zshard.load):
        with pytest.raises(zshard.DivergenceError) as caught:
            call(folder, model, ema=ema)
        said.append(str(caught.value))
    assert "EMA" in said[0] or "average" in said[0]
    assert "load(ema=) is EMA on rank 0, but NoneType on rank 1" in said[1]
