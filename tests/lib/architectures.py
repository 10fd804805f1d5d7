"""Real architectures, tiny: models that transformers builds from configurations, and their inputs.

An architecture is two class names, the options that make it small, and a function that
draws a batch. Nothing is downloaded, and dropout is off. Ranks import this file, so that
transformers is imported where a model is made and not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
Batch = dict[str, Any]
Draw = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Architecture:
    model: str
    config: str
    options: dict[str, Any]
    draw: Draw
    unused: bool = False  # some parameters are unused, at least on some rank

    def build(self) -> nn.Module:
        """Return a new model in training mode; KeyError if this transformers lacks the class."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model of a configuration needs no network
        import transformers

        classes = [getattr(transformers, name, None) for name in (self.model, self.config)]
        if None in classes:
            raise KeyError(f"transformers {transformers.__version__} has no {self.model}")
        model_class, config_class = classes
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = config_class(**{**special, "decoder_start_token_id": 1, **self.options})
        model: nn.Module = model_class(_without_dropout(config))
        return model.train()

    def batch(self, step: int, rank: int) -> Batch:
        """Return the input of `rank` at `step`: the same on every process."""
        return self.draw(torch.Generator().manual_seed(1000 * step + rank))


def _without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, 0.0)
    return config


# --- inputs ---------------------------------------------------------------------------------------


def _ids(generator: torch.Generator, length: int = 6) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=generator)


def text(generator: torch.Generator) -> Batch:
    """A batch that is its own label: language models shift it themselves."""
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> Batch:
    """Text of two lengths, the shorter one padded."""
    ids = _ids(generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def pair(generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(generator), "labels": _ids(generator, 5)}


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def captioned(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return {"input_ids": _ids(generator), "pixel_values": pixels, "return_loss": True}


def waves(generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(2, 200, generator=generator),
        "labels": _ids(generator, 4),
    }


def spectra(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(2, 8, 32, generator=generator),
        "labels": _ids(generator, 5),
    }


# --- sizes ----------------------------------------------------------------------------------------


def sizes(**options: Any) -> dict[str, Any]:
    """Options for these sizes under the names of most configurations, and `options`."""
    usual = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    return {**usual, **options}


POSITIONS = {"max_position_embeddings": 32}
VISION = {**sizes(), "image_size": 32, "patch_size": 8}
T5 = {
    **{"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48},
    **{"num_layers": 3, "num_decoder_layers": 3, "num_heads": 4},
}
BART = {
    **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, **POSITIONS},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], **POSITIONS}
ALBERT = {"embedding_size": 16, "num_hidden_groups": 1, **POSITIONS}
SWITCH = {
    **{**T5, "num_experts": 4, "expert_capacity": 8, "router_jitter_noise": 0.0},
    **{"num_layers": 4, "num_decoder_layers": 4},
    **{"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 4},
}
# One layer of experts holds so much of this model that each expert becomes a unit: ranks whose
# tokens use other experts run other units, which only shm allows.
SWITCH_OF_FEW_LAYERS = {
    **{**SWITCH, "num_layers": 2, "num_decoder_layers": 2},
    **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32, 48], "depths": [2, 2, 2]}
CLIP = {
    "text_config": sizes(**POSITIONS, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "vision_config": {**VISION, "projection_dim": 16},
    "projection_dim": 16,
}
WAV2VEC2 = sizes(
    **{"conv_dim": (8, 8), "conv_kernel": (5, 3), "conv_stride": (3, 2)},
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4},
    **{"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False},
)
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
JAMBA = sizes(
    **{"num_key_value_heads": 2, "num_experts": 2, "use_mamba_kernels": False},
    **{"mamba_d_state": 4, "mamba_dt_rank": 4, "num_hidden_layers": 4},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "tie_word_embeddings": False},
)


# --- the architectures ----------------------------------------------------------------------------


def _causal(name: str, options: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", options, text, **more)


def _masked(name: str, options: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", options, masked, **more)


def _seq2seq(name: str, options: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(f"{name}ForConditionalGeneration", f"{name}Config", options, pair, **more)


def _vision(name: str, options: dict[str, Any]) -> Architecture:
    return Architecture(f"{name}ForImageClassification", f"{name}Config", options, images)


GPT2 = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4}

ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "gpt2, tied": Architecture("GPT2LMHeadModel", "GPT2Config", GPT2, text),
    "llama, untied": _causal("Llama", sizes(num_key_value_heads=2, tie_word_embeddings=False)),
    "qwen2": _causal("Qwen2", sizes(num_key_value_heads=2, tie_word_embeddings=True)),
    "opt": _causal("OPT", sizes(ffn_dim=48, word_embed_proj_dim=16, **POSITIONS)),
    "gpt_neox": _causal("GPTNeoX", sizes()),
    # encoders
    "bert": _masked("Bert", sizes(**POSITIONS)),
    "albert": _masked("Albert", sizes(**ALBERT)),
    "deberta": _masked("Deberta", sizes(**DEBERTA)),
    # encoders and decoders
    "t5, tied": _seq2seq("T5", T5),
    "t5, untied": _seq2seq(
        "T5", {**T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    ),
    "bart": _seq2seq("Bart", BART),
    # mixtures of experts
    "mixtral": _causal("Mixtral", sizes(num_key_value_heads=2, num_local_experts=4)),
    "switch": _seq2seq("SwitchTransformers", SWITCH, unused=True),
    "switch, few layers": _seq2seq("SwitchTransformers", SWITCH_OF_FEW_LAYERS, unused=True),
    # vision
    "vit": _vision("ViT", VISION),
    "resnet": _vision("ResNet", RESNET),
    "clip": Architecture("CLIPModel", "CLIPConfig", CLIP, captioned),
    # speech
    "wav2vec2": Architecture("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2, waves, unused=True),
    "whisper": Architecture(
        "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, spectra, unused=True
    ),
    # state spaces
    "jamba": _causal("Jamba", JAMBA),
}
