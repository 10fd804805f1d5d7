"""Checkpoints of Hugging Face models, read by Hugging Face's tools without zshard.

Readers of the folder do not need zshard. A process that cannot import it loads the folder with
`from_pretrained` and with safetensors, and finds the values at the end of training.
"""

from __future__ import annotations

import json

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import inside, manifest_in
from models import differences, loss_of
from nursery import forked_python
from optim_states import rank

import zshard
from zshard import FSDP

transformers = pytest.importorskip("transformers")


def config_of(name, is_tied):
    sizes = {"vocab_size": 61, "tie_word_embeddings": is_tied}
    if name == "gpt2":
        return transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **sizes)
    return transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **sizes,
    )


def plain(name, is_tied):
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config_of(name, is_tied))


def save(name, is_tied, folder, options):
    """Save a trained model; its state dict goes to `folder`/state.pt."""
    model = FSDP(plain(name, is_tied), transport="c10d")
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(20).reshape(2, 10) + rank()
    loss_of(model(ids).logits).backward()
    optimizer.step()
    zshard.save(folder / "x", model, optimizer, step=None, **options)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if rank() == 0:
        torch.save(state, folder / "state.pt")


READER = """
import json, sys
sys.modules["zshard"] = None  # importing it is an error
import torch, transformers
from safetensors.torch import load_file

def read(folder, dtype):
    dtype = getattr(torch, dtype)
    expected = torch.load(f"{folder}/state.pt", weights_only=True)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/x", output_loading_info=True, local_files_only=True
    )
    wrong = [n for n, v in model.state_dict().items() if not torch.equal(v, expected[n].to(dtype))]
    index = json.load(open(f"{folder}/x/model.safetensors.index.json"))["weight_map"]
    for file in set(index.values()):
        for name, value in load_file(f"{folder}/x/{file}").items():
            wrong += [] if torch.equal(value, expected[name].to(dtype)) else [f"{name} in {file}"]
            index.pop(name)
    told = {key: list(value) for key, value in told.items() if value}
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return wrong, sorted(index), told, is_tied, type(model).__name__, len(expected)

print(json.dumps([read(*each) for each in json.loads(sys.argv[1])]))
"""

CASES = [
    ("gpt2", True, {}),
    ("gpt2", False, {"max_shard_size": 5000}),
    ("llama", True, {"max_shard_size": "4KB"}),
    ("llama", False, {"dtype": torch.bfloat16}),
]


@pytest.mark.thorough
def test_from_pretrained(pool2, tmp_path):
    folders, dtypes = [], []
    for number, case in enumerate(CASES):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        pool2.run(save, *case[:2], folders[-1], case[2])
        dtypes.append(str(case[2].get("dtype", torch.float32)).removeprefix("torch."))
    told = json.dumps([(str(folder), dtype) for folder, dtype in zip(folders, dtypes, strict=True)])
    done = forked_python("-c", READER, told)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    for case, folder, dtype, result in zip(CASES, folders, dtypes, results, strict=True):
        wrong, unread, info, is_tied, kind, count = result
        assert wrong == unread == [] and info == {} and count > 10, case
        assert is_tied is case[1] and kind == type(plain(*case[:2])).__name__, case
        assert manifest_in(folder / "x").tied.keys() == ({"lm_head.weight"} if is_tied else set())
        config = json.loads((folder / "x" / "config.json").read_text())
        assert config["architectures"] == [kind] and config["dtype"] == dtype, case
        assert {"config.json", "generation_config.json"} < set(inside(folder / "x"))


def of_architectures(names, folder):
    """Return {name: what differs after from_pretrained} for what two ranks have saved."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = {}
    for name in names:
        torch.manual_seed(1)
        model = ARCHITECTURES[name].build()
        kind = type(model)
        model = FSDP(model, transport="c10d")
        zshard.save(folder / "x", model, overwrite=True)
        expected = model.state_dict()
        if rank() == 0:
            again, told = kind.from_pretrained(
                folder / "x", output_loading_info=True, local_files_only=True
            )
            wrong = differences(again.state_dict(), expected)
            found[name] = wrong + [f"{key}: {value}" for key, value in told.items() if value]
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_architectures(pool2, tmp_path):
    found = pool2.run(of_architectures, list(ARCHITECTURES), tmp_path)[0]
    assert len(found) > 30 and not any(found.values()), found


def test_model_with_a_different_kind_of_config(tmp_path):
    model = torch.nn.Linear(2, 2)
    for config in (None, {"a": 1}, object()):
        model.config = config
        zshard.save(tmp_path / "x", model, overwrite=True)
        assert "config.json" not in inside(tmp_path / "x")


class Around(torch.nn.Module):
    """A head on a Hugging Face model, with that model's configuration."""

    def __init__(self):
        super().__init__()
        self.model = plain("gpt2", False)
        self.config = self.model.config


def save_around(folder):
    zshard.save(folder, FSDP(Around()))


def test_module_around_a_model_saves_no_config(pool2, tmp_path):
    """With the configuration, from_pretrained() would load none of its weights and draw all of
    them."""
    pool2.run(save_around, tmp_path / "x")
    assert "config.json" not in inside(tmp_path / "x")
    zshard.load(tmp_path / "x", Around())
