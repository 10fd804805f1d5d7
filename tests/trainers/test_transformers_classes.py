"""docs/transformers_classes.md, a few rows of it: "auto" takes the units that a class of transformers
states, and training has DDP's bits."""

from __future__ import annotations

import pytest
from spawn import on_ranks

pytest.importorskip("transformers", reason="needs zshard[trainers]: make test-trainers")

from class_facts import trained_here

CLASSES = {  # the class, what states its blocks, the class of the blocks
    "LlamaForCausalLM": ("_fsdp_plan", "LlamaDecoderLayer"),
    "Qwen3MoeForCausalLM": ("_fsdp_plan", "Qwen3MoeDecoderLayer"),
    "GPT2LMHeadModel": ("_no_split_modules", "GPT2Block"),
    "T5ForConditionalGeneration": ("_no_split_modules", "T5Block"),
    "LlavaForConditionalGeneration": ("_fsdp_plan", "CLIPEncoderLayer"),
    "BigBirdForCausalLM": ("rule", "BigBirdLayer"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CLASSES)
@on_ranks(2)
def test_class_has_ddps_bits(name):
    source, block = CLASSES[name]
    facts = trained_here(name)
    assert facts["source"] == source
    assert facts["units"][block] >= 4
    assert facts["finite"] and facts["differs"] == []
