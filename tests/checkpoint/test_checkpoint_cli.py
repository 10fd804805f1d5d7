"""python -m zshard ckpt; and checkpoints of wrapped models, which have the plain model's names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import inside, tensors_in
from compare import assert_same
from file_faults import file_faults
from models import Conv, Tied, ddp, make, make_optimizer
from optim_states import differ, go_on
from safetensors import safe_open
from spawn import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import zshard
from zshard import FSDP
from zshard.checkpoint import manifest
from zshard.checkpoint.manifest import Manifest


class Configured(Tied):
    """Has the attributes of Hugging Face's models."""

    class Config:
        def to_json_string(self):
            return json.dumps({"model_type": "tied"})

    config_class = Config
    config = Config()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint in several files, its model and its optimizer."""
    path = tmp_path_factory.mktemp("saved") / "run"
    model = make(Configured)
    optimizer = make_optimizer("zshard.AdamW", model)
    go_on("tied", model, optimizer, 0)
    zshard.save(path, model, optimizer, step=7, max_shard_size="1KB", extra={"secret": 3})
    return path / "step-00000007", model, optimizer


@pytest.fixture
def command(command):
    """Run `python -m zshard ckpt` with arguments; return (exit status, output and errors)."""

    def run(*args):
        status, said, errors = command(*args)
        return status, said + errors

    return run


def once(model):
    """Return the state of a tied model without its aliases."""
    names = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    return {name: value for name, value in model.state_dict().items() if name in names}


def test_inspect(saved, command):
    path, model, optimizer = saved
    for where in (path, path.parent):
        status, text = command("inspect", where)
        assert status == 0 and "step 7" in text and f"zshard {zshard.__version__}" in text
        assert "head.weight is tied to embed.weight" in text
        assert "optimizer zshard.optim.AdamW" in text and "'lr': 0.01" in text
        for name, value in once(model).items():
            line = next(each for each in text.splitlines() if each.startswith(f"  {name} "))
            shape = "x".join(map(str, value.shape))
            assert line.split()[1:3] == ["float32", shape] and ".safetensors" in line
    facts = json.loads(command("inspect", "--json", path)[1])
    assert (facts["step"], facts["world"]) == (7, 1)
    assert facts["tied"]["head.weight"] == "embed.weight"
    found = {name: (each["shape"], each["bytes"]) for name, each in facts["model"].items()}
    assert found == {n: (list(v.shape), v.numel() * 4) for n, v in once(model).items()}
    assert len(facts["optimizer"]["tensors"]) == sum(map(len, optimizer.state.values()))
    assert facts["optimizer"]["groups"][0]["weight_decay"] == 0.1


def test_verify(saved, command, tmp_path):
    path = shutil.copytree(saved[0], tmp_path / "x")
    status, text = command("verify", path)
    files = [each for each in sorted(path.iterdir()) if each.name != manifest.NAME]
    total = sum(each.stat().st_size for each in files)
    assert status == 0 and f"is intact: {total:,} bytes" in text
    for file in files:
        right = file.read_bytes()
        for content in (right[:-1] + bytes([right[-1] ^ 1]), right[:-1], right + b" "):
            file.write_bytes(content)
            status, text = command("verify", path)
            assert status == 1 and str(file) in text
        file.unlink()
        assert command("verify", path)[0] == 1
        file.write_bytes(right)
    assert command("verify", path)[0] == 0


def test_verify_without_checksums(command, tmp_path):
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "x", no_dist=True)
    status, text = command("verify", tmp_path / "x")
    assert status == 1 and "it has no zshard.json" in text
    status, text = command("verify", tmp_path / "nowhere")
    assert status == 1 and "nowhere" in text


@pytest.mark.parametrize("dtype", [None, "bf16", "float64"])
def test_export(saved, command, dtype, tmp_path):
    path, model, _ = saved
    options = ["--dtype", dtype] if dtype else []
    status, text = command("export", path, tmp_path / "out", *options)
    assert status == 0 and "model.safetensors" in text
    wanted = {"bf16": torch.bfloat16, "float64": torch.float64, None: torch.float32}[dtype]
    state = {name: value.to(wanted) for name, value in once(model).items()}
    assert inside(tmp_path / "out") == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert command("export", path, tmp_path / "many", "--max-shard-size", "400", *options)[0] == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys() and len({*index["weight_map"].values()}) > 1
    for folder in (tmp_path / "out", tmp_path / "many"):
        assert_same(tensors_in(folder), state, "the files")
        config = json.loads((folder / "config.json").read_text())
        assert options == [] or config["dtype"] == str(wanted).removeprefix("torch.")
        if dtype != "bf16":
            again = make(Tied, 3)
            zshard.load(folder, again)
            assert_same(again.state_dict(), model.state_dict(), "the model")


def test_export_of_dcp_folders(command, tmp_path):
    """Also through several chunks of memory, and into another dtype."""
    model = nn.Sequential(nn.Linear(2048, 2100), nn.BatchNorm1d(2100))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "x", no_dist=True)
    status, text = command("export", tmp_path / "x", tmp_path / "out", "--dtype", "bf16")
    assert status == 0 and "there is no config.json" in text
    state = model.state_dict()
    wanted = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}
    assert_same(tensors_in(tmp_path / "out"), wanted, "the files")
    for i, other in enumerate(("[]", '{"a": 1')):  # not a model's config
        (tmp_path / "x" / "config.json").write_text(other)
        assert command("export", tmp_path / "x", tmp_path / f"out{i}", "--dtype", "bf16")[0] == 0
        assert (tmp_path / f"out{i}" / "config.json").read_text() == other


def test_export_refuses_invalid_input(saved, command, tmp_path):
    path, out = saved[0], tmp_path / "out"
    for words, said in (
        ([path], "already exists: choose another folder"),
        ([tmp_path / "no" / "out"], "does not exist; create it first"),
        ([out, "--max-shard-size", "a lot"], "max_shard_size must be a positive number"),
    ):
        status, text = command("export", path, *words)
        assert status == 1 and said in text
    assert list(tmp_path.iterdir()) == []


def test_export_is_atomic(saved, command, tmp_path):
    """Each file call fails in turn."""
    out, failed = tmp_path / "out", 0
    for nth in range(1, 1000):
        file_faults(nth, "EIO")
        status, text = command("export", saved[0], out)
        if file_faults(0) < nth:
            break
        if status == 0:  # a call that may fail: closing a file that was only read
            assert_same(tensors_in(out), once(saved[1]), "the files")
            shutil.rmtree(out)
        else:
            failed += 1
            assert "Input/output error" in text and not out.exists()
    assert failed > 30 and status == 0 and out.exists()


def test_as_a_program(saved):
    command = [sys.executable, "-m", "zshard", "ckpt", "verify", str(saved[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "is intact" in done.stdout and done.stderr == ""


# --- wrappers -------------------------------------------------------------------------------------


class Whole(Conv):
    """A model with BatchNorm, whose state dict has another version, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.head.weight


def fsdp(model):
    return FSDP(model, auto_wrap_policy={nn.Sequential})


def recomputed(model):
    kinds = nn.BatchNorm2d | nn.Conv2d
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kinds))
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_within(model):
    """A compiled submodule, and one that is both recomputed and compiled; also the tied head."""
    for i, each in enumerate((compiled, lambda part: checkpoint_wrapper(compiled(part)))):
        model.stages[i] = each(model.stages[i])
    model.tied = compiled(model.tied)
    return model


WAYS = {
    "as it is": fsdp,
    "recomputed": lambda model: recomputed(fsdp(model)),
    "recomputed before": lambda model: fsdp(recomputed(model)),
    "compiled": lambda model: compiled(fsdp(model)),
    "compiled before": lambda model: fsdp(compiled(model)),
    "compiled within": lambda model: compiled_within(fsdp(model)),
    "ddp": lambda model: compiled(ddp(model, find_unused_parameters=True)),
}


def made(way, seed, value):
    """Return a model and its optimizer, after a step."""
    torch.manual_seed(seed)
    model = WAYS[way](Whole())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():  # the computed values do not matter here
        param.grad = torch.full_like(param, value)
    optimizer.step()
    return model, optimizer


def check_names(path):
    """Fail unless the names in a checkpoint are the plain model's."""
    params = dict(Whole().named_parameters()).keys()
    facts = Manifest.read(path)
    assert tensors_in(path).keys() == Whole().state_dict().keys() - {"tied.weight"}
    assert facts.optimizer["state"].keys() == params
    assert set(facts.optimizer["groups"][0]["params"]) == params
    assert facts.tied == {"tied.weight": "head.weight"}


@on_ranks(2)
def test_wrapped_models_load_each_others_checkpoints(tmp_path):
    """Models that run in each way load the plain one's, and save the same."""
    zshard.save(f"{tmp_path}/plain", *made("as it is", 1, 0.5))
    check_names(f"{tmp_path}/plain")
    for way in WAYS:
        model, optimizer = made(way, 2, 0.25)
        loaded = zshard.load(f"{tmp_path}/plain", model, optimizer)
        assert not loaded.missing_keys and not loaded.unexpected_keys
        zshard.save(f"{tmp_path}/{way}", model, optimizer)
        check_names(f"{tmp_path}/{way}")
        for stem in ("model", "optimizer"):
            pair = (tensors_in(f"{tmp_path}/{name}", stem) for name in ("plain", way))
            assert_same(*pair, f"the {stem}, {way}")
        if way == "ddp":
            continue
        state, (other, theirs) = zshard.optim_state_dict(model, optimizer), made("as it is", 2, 1.0)
        zshard.load_optim_state_dict(other, theirs, state)
        back = zshard.optim_state_dict(other, theirs)
        zshard.load_optim_state_dict(model, optimizer, back)
        assert differ(back, state) == [], way
        assert list(state["state"]) == [name for name, _ in Whole().named_parameters()]


def test_shared_compiled_submodule(tmp_path):
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Linear(2, 2))
    model.append(model[0])
    zshard.save(tmp_path / "x", model)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    zshard.load(tmp_path / "x", model)
    assert_same(dict(model.state_dict()), wanted, "the model")


def test_nonfinite_recomputed_parameter(tmp_path):
    model, _ = made("recomputed", 1, 0.5)
    zshard.save(tmp_path, model, step=1, keep_last=1)
    with torch.no_grad():
        model.stages[0][0].weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match=r"NaN or infinite values in 'stages\.0\.0\.weight'"):
        zshard.save(tmp_path, model, step=2, keep_last=1)
    assert inside(tmp_path) == ["step-00000001", "step-00000002"]
