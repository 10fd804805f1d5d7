"""auto_wrap_policy="auto" on real models: tiny copies of transformers' models.

Each is planned and run once; no parameter may be used outside of its unit, and units must be
neither the entire model nor tiny. Skipped if transformers is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from unit_watch import uses_while_sharded

from zshard.wrap import plan_units

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.arange(10).reshape(2, 5)
TEXT = {"input_ids": IDS}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS}
IMAGE = {"pixel_values": torch.randn(2, 3, 64, 64)}


def sizes(width: int = 16, layers: int = 6, inner: int = 32, heads: int = 2) -> dict[str, Any]:
    """Names that most configurations use for these sizes."""
    return {
        "vocab_size": 64,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
    }


GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 6, "n_head": 2}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 6, "num_heads": 2}
BART = {
    **{"vocab_size": 64, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16},
}
SWIN = {
    "image_size": 64,
    "window_size": 2,
    "embed_dim": 8,
    "depths": [2, 2, 6, 2],
    "num_heads": [1, 2, 2, 2],
}
VISION = {**sizes(), "image_size": 64, "patch_size": 8}
MIXTURE = {**sizes(), "num_local_experts": 4}
QWEN_MIXTURE = {
    **{**sizes(), "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
WAV2VEC2 = {
    **{**sizes(), "conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2)},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    "num_feat_extract_layers": 2,
}
MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 6, "state_size": 4}
JAMBA = {
    **{**sizes(), "num_experts": 2, "use_mamba_kernels": False, "mamba_d_state": 4},
    **{"attn_layer_period": 6, "attn_layer_offset": 3, "mamba_dt_rank": 4},
}
CONVNEXT = {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 6, 2]}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128]}
SEGFORMER = {"hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
LLAVA = {  # its forward gets the embedding from the language model by a getter
    "text_config": {"model_type": "llama", **sizes()},
    "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 16},
}


@dataclass(frozen=True)
class Case:
    """A model to build and run, the class of the units in the middle, how many there are, and the
    largest share of the model that one unit may have."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: dict[str, Any]
    block: str
    count: int
    share: float = 0.3


CASES = [
    Case("GPT2LMHeadModel", "GPT2Config", GPT2, TEXT, "GPT2Block", 6),
    Case("LlamaForCausalLM", "LlamaConfig", sizes(), TEXT, "LlamaDecoderLayer", 6),
    Case("BertForMaskedLM", "BertConfig", sizes(), TEXT, "BertLayer", 6, 0.5),
    Case("T5ForConditionalGeneration", "T5Config", T5, PAIR, "T5Block", 12),
    Case("BartForConditionalGeneration", "BartConfig", BART, PAIR, "BartEncoderLayer", 3),
    Case("ViTForImageClassification", "ViTConfig", VISION, IMAGE, "ViTLayer", 6),
    Case("SwinForImageClassification", "SwinConfig", SWIN, IMAGE, "SwinLayer", 8),
    Case("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT, IMAGE, "ConvNextLayer", 8),
    Case("ResNetForImageClassification", "ResNetConfig", RESNET, IMAGE, "ResNetBottleNeckLayer", 8),
    Case("SegformerModel", "SegformerConfig", SEGFORMER, IMAGE, "SegformerLayer", 4),
    Case("MixtralForCausalLM", "MixtralConfig", MIXTURE, TEXT, "MixtralDecoderLayer", 6),
    Case("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN_MIXTURE, TEXT, "Qwen2MoeDecoderLayer", 6),
    Case(
        *("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2, {"input_values": torch.randn(2, 400)}),
        *("Wav2Vec2EncoderLayer", 6),
    ),
    Case("MambaForCausalLM", "MambaConfig", MAMBA, TEXT, "MambaBlock", 6),
    Case("JambaForCausalLM", "JambaConfig", JAMBA, TEXT, "JambaMambaDecoderLayer", 5),
    Case(
        *("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
        {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": IDS},
        *("WhisperDecoderLayer", 3),
    ),
    Case("LlavaForConditionalGeneration", "LlavaConfig", LLAVA, TEXT, "LlamaDecoderLayer", 6),
]


def build(case: Case) -> nn.Module:
    model_class = getattr(transformers, case.model, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {case.model}")
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = getattr(transformers, case.config)(**case.options, **special)
    model: nn.Module = model_class(config).eval()
    return model


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_auto_splits_the_model_into_its_blocks(case: Case) -> None:
    model = build(case)
    units = plan_units(model)
    total = sum(param.numel() for param in model.parameters())
    assert sum(unit.numel for unit in units) == total
    assert [u.name for u in units if type(u.module).forward is nn.Module.forward] == []
    assert sum(type(unit.module).__name__ == case.block for unit in units) == case.count
    assert max(unit.numel for unit in units) <= case.share * total
    assert min((unit.numel for unit in units[:-1]), default=total) >= total / 1000
    assert uses_while_sharded(units, **case.inputs) == []
