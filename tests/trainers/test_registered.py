"""`import zshard` alone loads the core; models of PEFT, transformers and bitsandbytes are sharded as
theirs all the same, also where the library is imported after zshard."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("bitsandbytes", reason="needs zshard[trainers]: make test-trainers")
pytest.importorskip("peft", reason="needs zshard[trainers]: make test-trainers")

BEFORE, AFTER = "import zshard\n", "import bitsandbytes, peft, transformers\n"
SCRIPT = """
import copy, sys
import torch
from torch import nn

above = [name for name in sys.modules if name.startswith(("zshard.integrations", "zshard.extras"))]
assert above == [], above
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
torch.manual_seed(0)
plain = transformers.LlamaForCausalLM(config)
model = zshard.FSDP(copy.deepcopy(plain))
assert model.num_parameters() == plain.num_parameters()
assert model.num_parameters._zshard_counts_full

options = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
adapted = peft.get_peft_model(plain, peft.LoraConfig(**options))
with torch.no_grad():
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            param.fill_(0.125)
sharded = zshard.FSDP(copy.deepcopy(adapted))
assert sharded.get_nb_trainable_parameters() == adapted.get_nb_trainable_parameters()
merged = sharded.merge_and_unload()
for name, param in adapted.merge_and_unload().named_parameters():
    assert merged.get_parameter(name).equal(param), name
assert not hasattr(merged, "peft_config") and zshard.shard_info(next(merged.parameters())) is None

layer = bitsandbytes.nn.Linear4bit(64, 64)
try:
    zshard.FSDP(nn.Sequential(layer))
except ValueError as error:
    assert "is not quantized yet" in str(error), error
else:
    raise AssertionError("no integration has looked at it")
loaded = [name for name in sys.modules if name.startswith("zshard.extras")]
assert loaded == [], loaded
"""


def output_of(script: str) -> str:
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("order", [BEFORE + AFTER, AFTER + BEFORE], ids=["first", "last"])
def test_models_of_libraries_are_recognized(order: str) -> None:
    output_of(order + SCRIPT)


def test_a_script_without_them_loads_none() -> None:
    script = "import torch, zshard; model = zshard.FSDP(torch.nn.Linear(4, 4))\n"
    script += "model(torch.ones(2, 4)).sum().backward()\n"
    script += "zshard.AdamW(model.parameters()).step()\nimport sys\n"
    script += "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    script += "print([n for n in sys.modules if n.startswith(('zshard.integr', 'zshard.extras'))])"
    assert output_of(script) == "[]"
