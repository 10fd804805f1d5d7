"""python -m zshard ckpt; and checkpoints of wrapped models, which have the plain model's names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import tensors_in
from file_faults import file_faults
from models import Tied, ddp, differences, make, make_optimizer
from optim_states import differ, go_on
from safetensors import safe_open
from safetensors.torch import load_file
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
    state = model.state_dict()
    names = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    return {name: value for name, value in state.items() if name in names}


def read(folder):
    """Return all tensors of a folder, read by the reference implementation."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_inspect(saved, command):
    path, model, _ = saved
    for where in (path, path.parent):
        status, text = command("inspect", where)
        assert status == 0 and "step 7" in text and f"zshard {zshard.__version__}" in text
        assert "head.weight is tied to embed.weight" in text
        assert "optimizer zshard.optim.AdamW" in text and "'lr': 0.01" in text
        for name, value in once(model).items():
            line = next(each for each in text.splitlines() if each.startswith(f"  {name} "))
            shape = "x".join(map(str, value.shape))
            assert line.split()[1:3] == ["float32", shape] and ".safetensors" in line


def test_inspect_as_json(saved, command):
    path, model, optimizer = saved
    status, text = command("inspect", "--json", path)
    facts = json.loads(text)
    assert status == 0 and facts["step"] == 7 and facts["world"] == 1
    assert facts["tied"]["head.weight"] == "embed.weight"
    found = {name: each["shape"] for name, each in facts["model"].items()}
    assert found == {name: list(value.shape) for name, value in once(model).items()}
    sizes = {name: each["bytes"] for name, each in facts["model"].items()}
    assert sizes == {name: value.numel() * 4 for name, value in once(model).items()}
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
    assert (
        differences(read(tmp_path / "out"), {k: v.to(wanted) for k, v in once(model).items()}) == []
    )
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    if dtype != "bf16":
        again = make(Tied, 3)
        zshard.load(tmp_path / "out", again)
        assert differences(again.state_dict(), model.state_dict()) == []


def test_export_into_several_files(saved, command, tmp_path):
    path, model, _ = saved
    assert command("export", path, tmp_path / "out", "--max-shard-size", "900")[0] == 0
    assert differences(read(tmp_path / "out"), once(model)) == []
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == once(model).keys()
    assert len(set(index["weight_map"].values())) > 2


def test_export_of_dcp_folders(command, tmp_path):
    """Also through several chunks of memory, and into another dtype."""
    model = nn.Sequential(nn.Linear(2048, 2100), nn.BatchNorm1d(2100))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert command("export", tmp_path / "x", tmp_path / "out", "--dtype", "bf16")[0] == 0
    wanted = {
        k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()
    }
    assert differences(read(tmp_path / "out"), wanted) == []


def test_export_refuses_invalid_input(saved, command, tmp_path):
    path = saved[0]
    status, text = command("export", path, path)
    assert status == 1 and "already exists: choose another folder" in text
    status, text = command("export", path, tmp_path / "no" / "out")
    assert status == 1 and "does not exist; create it first" in text
    status, text = command("export", path, tmp_path / "out", "--max-shard-size", "a lot")
    assert status == 1 and "max_shard_size must be a positive number" in text
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
            assert differences(read(out), once(saved[1])) == []
            shutil.rmtree(out)
        else:
            failed += 1
            assert "Input/output error" in text and not out.exists()
    assert failed > 30 and status == 0 and out.exists()


def test_as_a_program(saved):
    command = [sys.executable, "-m", "zshard", "ckpt", "verify", str(saved[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "is intact" in done.stdout and done.stderr == ""


def test_incomplete_command_shows_its_usage(command, capsys):
    with pytest.raises(SystemExit) as caught:
        command("inspect")
    assert caught.value.code == 2
    assert "usage: python -m zshard ckpt inspect" in capsys.readouterr().err


# --- wrappers -------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)  # its state dict has another version

    def forward(self, x):
        return x + self.norm(self.inner(x)).relu()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def fsdp(model):
    return FSDP(model, auto_wrap_policy={Part})


def recomputed(model):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Part | nn.Embedding))
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_within(model):
    """A compiled submodule, and one that is both recomputed and compiled; also the tied head."""
    for i, each in enumerate((compiled, lambda part: checkpoint_wrapper(compiled(part)))):
        model.parts[i] = each(model.parts[i])
    model.head = compiled(model.head)
    return model


WAYS = {
    "as it is": fsdp,
    "recomputed": lambda model: recomputed(fsdp(model)),
    "recomputed before": lambda model: fsdp(recomputed(model)),
    "compiled": lambda model: compiled(fsdp(model)),
    "compiled before": lambda model: fsdp(compiled(model)),
    "compiled within": lambda model: compiled_within(fsdp(model)),
    "ddp": lambda model: compiled(ddp(model)),
}


def made(way, seed):
    torch.manual_seed(seed)
    model = WAYS[way](Whole())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer, value):
    for param in model.parameters():  # the computed values do not matter here
        param.grad = torch.full_like(param, value)
    optimizer.step()


def wrong_names(path):
    """Return the names in a checkpoint that differ from the plain model's."""
    params = dict(Whole().named_parameters())
    told = Manifest.read(path)
    found = tensors_in(path).keys() ^ (Whole().state_dict().keys() - {"head.weight"})
    found |= told.optimizer["state"].keys() ^ params.keys()
    found |= set(told.optimizer["groups"][0]["params"]) ^ params.keys()
    return sorted(found) + ([] if told.tied == {"head.weight": "table.weight"} else [told.tied])


@on_ranks(2)
def test_wrapped_models_load_each_others_checkpoints(tmp_path):
    """Return what differs in the files of models that run in each way, and after a load into
    each."""
    model, optimizer = made("as it is", 1)
    step(model, optimizer, 0.5)
    zshard.save(f"{tmp_path}/plain", model, optimizer)
    found = wrong_names(f"{tmp_path}/plain")
    for way in WAYS:
        model, optimizer = made(way, 2)
        step(model, optimizer, 0.25)
        loaded = zshard.load(f"{tmp_path}/plain", model, optimizer)
        found += [*loaded.missing_keys, *loaded.unexpected_keys]
        zshard.save(f"{tmp_path}/{way}", model, optimizer)
        found += wrong_names(f"{tmp_path}/{way}")
        for stem in ("model", "optimizer"):
            pair = (tensors_in(f"{tmp_path}/{name}", stem) for name in ("plain", way))
            found += [f"{way}: {each}" for each in differences(*pair)]
    assert found == []


def test_shared_compiled_submodule(tmp_path):
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Linear(2, 2))
    model.append(model[0])
    zshard.save(tmp_path / "x", model)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    zshard.load(tmp_path / "x", model)
    assert differences(dict(model.state_dict()), wanted) == []


def by_name(way):
    """Return the optimizer's state by name, loaded from a model of one kind into the plain one."""
    model, optimizer = made(way, 1)
    step(model, optimizer, 0.5)
    state = zshard.optim_state_dict(model, optimizer)
    other, theirs = made("as it is", 2)
    zshard.load_optim_state_dict(other, theirs, state)
    back = zshard.optim_state_dict(other, theirs)
    zshard.load_optim_state_dict(model, optimizer, back)
    return differ(back, state), list(state["state"]) == [n for n, _ in Whole().named_parameters()]


def test_optimizer_state_by_name(pool2):
    for way in ("recomputed", "compiled", "compiled within"):
        assert pool2.run(by_name, way) == [([], True)] * 2, way


def test_nonfinite_recomputed_parameter(tmp_path):
    model, _ = made("recomputed", 1)
    zshard.save(tmp_path, model, step=1, keep_last=1)
    with torch.no_grad():
        model.parts[0].inner.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match=r"NaN or infinite values in 'parts\.0\.inner\.weight'"):
        zshard.save(tmp_path, model, step=2, keep_last=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
