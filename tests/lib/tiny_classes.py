"""Any model class of transformers, tiny: from its default configuration made smaller, and inputs
that its forward takes.

Nothing here knows a class. Widths are divided by one factor, so that what divides what stays so;
layers become few; inputs follow from the names of forward's arguments. What fits is found by trying:
`find(name)` raises Misfit with the reason if no attempt gives a model whose forward and backward run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model of a configuration needs no network

LAYERS = 4  # hybrids often have an attention in each fourth one
VOCABULARY = 128
SIDE = 64  # pixels of a picture
LAYERWISE = ("per_layer_config",)  # follows from the number of layers if it is left out
ATTEMPTS = (  # widths divided by, smaller pictures too, per-layer lists cut
    *((16, True, True), (16, False, True), (8, False, True), (4, True, True), (4, False, True)),
    *((1, True, True), (1, False, True), (16, True, False), (1, False, False)),
)
LARGEST = 70_000_000  # elements of a model that is still trained
HEADS = (  # the mappings whose class represents a kind of model, the first that has it
    *("CAUSAL_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM"),
    *("SPEECH_SEQ_2_SEQ", "MASKED_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "CTC"),
    *("SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION"),
)
COUNTS = ("layers", "layer", "depth", "blocks", "num_stages")
WIDTHS = (
    *("hidden", "dim", "d_model", "d_ff", "d_kv", "d_inner", "n_embd", "n_inner", "width", "size"),
    *("rank", "channels", "filters", "embed", "planes", "proj"),
)
NOT_WIDTHS = (
    *("vocab", "image", "patch", "window", "kernel", "batch", "chunk", "group", "stride", "pool"),
    *("position", "num_channels", "input_size", "feature_size", "crop", "grid", "block_size"),
    *("out_channels", "in_channels", "temporal", "spatial", "memory_size", "max_", "step"),
)


Batch = dict[str, Callable[[torch.Generator], Any]]


class Misfit(Exception):
    """No attempt gave a model that runs, and why not."""


def representatives() -> dict[str, list[str]]:
    """Return {name of a class: the kinds of models (config.model_type) that it represents}."""
    from transformers.models.auto import modeling_auto

    chosen: dict[str, str] = {}
    for head in (*(f"MODEL_FOR_{name}_MAPPING_NAMES" for name in HEADS), "MODEL_MAPPING_NAMES"):
        for kind, name in getattr(modeling_auto, head).items():
            chosen.setdefault(kind, name if isinstance(name, str) else name[0])
    found: dict[str, list[str]] = {}
    for kind, name in chosen.items():
        found.setdefault(name, []).append(kind)
    return found


@dataclass(frozen=True)
class Tiny:
    """A class with a configuration and inputs that run: numbers of attempts, so ranks may send it."""

    name: str
    attempt: int
    batch: int = 0

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, self.name, None)

    def config(self) -> Any:
        return smaller(self.cls.config_class, *ATTEMPTS[self.attempt])

    def build(self) -> nn.Module:
        """Return a model in training mode, with no parameter that is all zeros or ones."""
        torch.manual_seed(1)
        model: nn.Module = self.cls(self.config()).float()
        with torch.no_grad():
            for param in model.parameters():
                if param.is_floating_point():
                    param.nan_to_num_(0.0, 0.0, 0.0).add_(0.02 * torch.randn_like(param))
        return model.train()

    def batches(self) -> list[Batch]:
        return list(_attempts(self.config(), inspect.signature(self.cls.forward).parameters))

    def draw(self, number: int) -> dict[str, Any]:
        """Return the inputs that belong to a number."""
        generator = torch.Generator().manual_seed(number)
        return {name: make(generator) for name, make in self.batches()[self.batch].items()}


def find(name: str) -> Tiny:
    """Return the first attempt whose forward and backward run. Raises Misfit."""
    cls = Tiny(name, 0).cls
    try:
        is_usable = getattr(cls, "config_class", None) is not None
    except ImportError:  # from the placeholder for a class whose package is not installed
        is_usable = False
    if not is_usable:
        raise Misfit("needs a package that is not installed, or has no configuration of its own")
    reasons = []
    for number in range(len(ATTEMPTS)):
        tiny = Tiny(name, number)
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in cls(tiny.config()).parameters())
            if not 0 < count <= LARGEST:
                raise Misfit(f"{count:,} parameters in its smallest form")
            return _with_inputs(tiny)
        except Exception as error:  # any error of a class about sizes: another attempt follows
            reasons.append(describe(error))
    raise Misfit(reasons[0])


def _with_inputs(tiny: Tiny) -> Tiny:
    model, reasons = tiny.build(), []
    for number in range(len(tiny.batches())):
        found = dataclasses.replace(tiny, batch=number)
        try:
            seed(0)
            loss = loss_of(model(**found.draw(0)))
            loss.backward()
            if not torch.isfinite(loss):
                raise Misfit("the loss is not finite")
            return found
        except Exception as error:
            reasons.append(describe(error))
        model.zero_grad()
    raise Misfit(reasons[0] if reasons else "no inputs are known for its forward")


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Misfit) else f"{type(error).__name__}: {text}"[:150]


# --- configurations -------------------------------------------------------------------------------


def smaller(cls: Any, factor: int, small: bool, cut: bool) -> Any:
    """Return the default configuration with widths divided by `factor` and few layers. small: with
    small pictures; cut: lists with an entry per layer are cut to the same number."""
    options = cls().to_dict()
    options.update(dict.fromkeys(options.keys() & {"use_cache"}, False))
    _shrink(options, factor, small, cut)
    for key in ("transformers_version", "architectures", "model_type"):
        options.pop(key, None)
    return cls(**options)


def _shrink(options: dict[str, Any], factor: int, small: bool, cut: bool) -> None:
    for key in ("id2label", "label2id", "out_features", "out_indices", "stage_names", *LAYERWISE):
        options.pop(key, None)
    counts = {k: v for k, v in options.items() if _is_count(k, v)}
    for key, value in list(options.items()):
        if isinstance(value, dict) and all(isinstance(each, str) for each in value):
            _shrink(value, factor, small, cut)
        elif isinstance(value, list) and cut and len(value) in counts.values():
            options[key] = value[:LAYERS]
        elif isinstance(value, list) and key.endswith("section"):  # of the width of a head
            options[key] = [v // factor for v in value]
        elif isinstance(value, list) and value and all(_is_width(key, v) for v in value):
            options[key] = [max(v // factor, 4) for v in value]
        elif key in counts:
            options[key] = min(value, LAYERS)
        elif isinstance(value, int) and not isinstance(value, bool):
            options[key] = _smaller(key, value, factor, small)


def _smaller(key: str, value: int, factor: int, small: bool) -> int:
    if key.endswith(("token_id", "token_index")):
        return value if 0 <= value < VOCABULARY else VOCABULARY - 1 - len(key) % 20
    if _is_width(key, value):
        return max(value // factor, 4)
    limits = {"vocab_size": VOCABULARY, "experts": 16, "position_embeddings": 256}
    limits |= {"source_positions": 256, "target_positions": 256}
    limits |= {"image_size": SIDE} if small else {}
    return min([value, *(limit for end, limit in limits.items() if key.endswith(end))])


def _is_count(key: str, value: object) -> bool:
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 1 < value <= 200
        and key.endswith(COUNTS)
        and key not in ("cross_attention_layer", "out_layer")
    )


def _is_width(key: str, value: object) -> bool:
    named = any(word in key for word in WIDTHS) and not any(word in key for word in NOT_WIDTHS)
    return named and isinstance(value, int) and not isinstance(value, bool) and value >= 16


# --- inputs ---------------------------------------------------------------------------------------


def _attempts(config: Any, takes: Any) -> Iterator[Batch]:
    kinds = [
        *(("input_ids", make) for make in (_ids(config, 16), _ids(config, 64))),
        *(("pixel_values", make) for make in _pictures(config)),
        *(("pixel_values_videos", make) for make in _videos(config)),
        *(("pixel_values", make) for make in _videos(config)),
        *(("input_values", make) for make in (_noise(4000), _noise(1, 4000), _noise(1024, 128))),
        *(("input_features", make) for make in _spectra(config)),
        *(("audio_values", make) for make in (_noise(1, 4000), _noise(2, 4000))),
        *(("past_values", make) for make in _series(config)),
        *(("inputs", make) for make in (_ids(config, 64),)),
        *(("inputs_embeds", make) for make in (_noise(16, getattr(config, "hidden_size", 64)),)),
    ]
    fitting = [(name, make) for name, make in kinds if name in takes]
    for name, make in fitting:
        yield {name: make}
        if "decoder_input_ids" in takes:
            yield {name: make, "decoder_input_ids": _ids(config, 8)}
    for (one, first), (other, second) in itertools.combinations(fitting, 2):
        if one != other:
            yield {one: first, other: second}


def _first(config: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    """The first attribute of this name in the configuration, or in one within."""
    for each in (config, *vars(config).values()):
        for name in names:
            value = getattr(each, name, None) if hasattr(each, "to_dict") else None
            if isinstance(value, int) and value > 0:
                return value
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                return value[0]
    return otherwise


def _ids(config: Any, length: int) -> Callable[[torch.Generator], Tensor]:
    vocabulary = _first(config, ("vocab_size",), VOCABULARY)
    high = max(min(vocabulary, VOCABULARY) - 32, 4)  # special tokens are above
    return lambda generator: torch.randint(3, high, (2, length), generator=generator)


def _noise(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(2, *shape, generator=generator)


def _pictures(config: Any) -> list[Callable[[torch.Generator], Tensor]]:
    side = _first(config, ("image_size", "img_size", "input_size", "crop_size"), 64)
    channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
    return [_noise(channels, each, each) for each in dict.fromkeys((side, 64, 224)) if each <= 512]


def _videos(config: Any) -> list[Callable[[torch.Generator], Tensor]]:
    side = _first(config, ("image_size", "crop_size"), 64)
    frames = _first(config, ("num_frames", "frames_per_clip"), 4)
    return [_noise(frames, 3, side, side)] if side <= 256 else []


def _spectra(config: Any) -> list[Callable[[torch.Generator], Tensor]]:
    bins = _first(config, ("num_mel_bins", "feature_size", "input_dim", "input_channels"), 80)
    length = 2 * _first(config, ("max_source_positions",), 50)
    return [_noise(bins, length), _noise(64, bins), _noise(bins, 64)]


def _series(config: Any) -> list[Callable[[torch.Generator], Tensor]]:
    length = _first(config, ("context_length",), 64)
    channels = _first(config, ("num_input_channels", "input_size"), 1)
    return [_noise(length, channels), _noise(length)]


# --- training -------------------------------------------------------------------------------------


def loss_of(output: Any) -> Tensor:
    """Return a loss of any output: the mean square of each floating tensor that has a gradient."""
    terms = [value.float().square().mean() for value in _tensors(output) if value.requires_grad]
    if not terms:
        raise Misfit("no output has a gradient")
    return torch.stack(terms).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def seed(number: int) -> None:
    """Seed the generators that a model may use: torch, Python and NumPy."""
    import random

    torch.manual_seed(number)
    random.seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)


def train(model: Any, tiny: Tiny, rank: int, steps: int) -> list[float]:
    """Train on this rank's batches, with the class's own dropout; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(steps):
        seed(100 * step + rank)
        optimizer.zero_grad()
        loss = loss_of(model(**tiny.draw(1000 * step + rank + 1)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
