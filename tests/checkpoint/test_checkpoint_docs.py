"""The examples of docs/checkpoints.md run as printed.

Each block of Python runs with the names that a reader would have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import differences
from optim_states import differ
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig

import zshard
from zshard import FSDP

TEXT = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def trained() -> dict[str, Any]:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "zshard": zshard}


def step_of(names: dict[str, Any]) -> None:
    names["optimizer"].zero_grad()
    names["model"](torch.randn(2, 3)).sum().backward()
    names["optimizer"].step()
    names["scheduler"].step()


def run(text: str, steps: int) -> dict[str, Any]:
    names = trained()
    exec(text.replace("...", "step_of(globals())"), {**names, "steps": steps, "step_of": step_of})
    return dict(names["model"].state_dict())


def test_a_run_goes_on(tmp_path, monkeypatch):
    (text,) = (block for block in BLOCKS if "for step in" in block)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    torch.manual_seed(3)
    wanted = run(text, 500)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    torch.manual_seed(3)
    run(text, 250)  # which is lost from step 200 on
    torch.manual_seed(4)
    found = run(text, 500)
    assert differences(found, wanted) == []
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == [
        f"step-00000{number}" for number in (300, 400, 500)
    ]


def test_a_model_from_the_meta_device(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    (text,) = (block for block in BLOCKS if '"meta"' in block)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=1)
    monkeypatch.chdir(tmp_path)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained("llama")
    names = {"torch": torch, "zshard": zshard, "FSDP": FSDP, "config": config}
    names["LlamaForCausalLM"] = transformers.LlamaForCausalLM
    exec(text, names)
    ids = torch.arange(6).reshape(2, 3)
    assert_same(names["model"](ids).logits, model(ids).logits, "the logits")


# --- state dicts ----------------------------------------------------------------------------------


def saved_and_loaded(folder, saving, loading):
    """Trains, runs a block that saves and, with another model, one that loads: the differences
    between both models and optimizers, and whether the load changed anything."""
    names = {"FullStateDictConfig": FullStateDictConfig, "FSDP": FSDP, "torch": torch}
    names["rank"] = dist.get_rank()
    ours, theirs = trained(), trained()
    step_of(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(saving, {**names, **ours})
        dist.barrier()
        before = theirs["model"].state_dict()
        exec(loading, {**names, **theirs})
    wanted = ours["model"].state_dict()
    found = differences(theirs["model"].state_dict(), wanted)
    found += differ(theirs["optimizer"].state_dict(), ours["optimizer"].state_dict())
    return found, differences(before, wanted) != []


@pytest.mark.parametrize("file", ["state.pt", "rank0.pt"])
def test_state_dicts(pool2, file, tmp_path):
    saving, loading = (block for block in BLOCKS if file in block)
    assert pool2.run(saved_and_loaded, tmp_path, saving, loading) == [([], True)] * 2


def test_each_block_is_run():
    marks = ("for step in", '"meta"', "state.pt", "rank0.pt")
    assert [sum(mark in block for block in BLOCKS) for mark in marks] == [1, 1, 2, 2]
    assert len(BLOCKS) == 6
