"""The workload: a model and a step of one micro-batch, however the user names them.

`workload_of` takes a module, a transformers config (an object, a file, a folder or a name) or the
dimensions of a decoder. Models that are made here have no memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zshard.api import is_unit
from zshard.extras.planner.decoder import Decoder, Dims, decoder_of
from zshard.extras.planner.kernels import Traced, trace

STRETCHED = 3
"""Periods of a decoder's blocks that are traced; the middle one stands for all others. A period is
one block, or two if every second one is checkpointed."""

TrainStep = Callable[[nn.Module, int], torch.Tensor]
"""Runs the model on a micro-batch of that many samples, which it makes, and returns the loss."""


class Workload(NamedTuple):
    """A model, and how to run it.

    tokens: of a sample; 1 if samples are what counts. unit: "tokens" or "samples". checkpointing:
    the kinds of activation checkpointing that `set_checkpointing(model, kind)` can set; "": none.
    dims: of a decoder, whose blocks are the same; None for other models. traces: those made so far,
    while the model does not change; None: each is made anew.
    """

    model: nn.Module
    step: TrainStep
    tokens: int
    unit: str
    checkpointing: tuple[str, ...] = ("",)
    set_checkpointing: Callable[[Any, str], object] | None = None
    dims: Dims | None = None
    traces: dict[tuple[Any, ...], Traced] | None = None

    def traced(
        self, modules: list[nn.Module], micro_batch: int, kind: str, dtype: torch.dtype | None
    ) -> Traced:
        """Return the trace of a micro-batch, divided where `modules` begin and end."""
        name_of = {module: name for name, module in self.model.named_modules()}
        names = tuple(name_of[module] for module in modules)
        if self.dims is not None and f"blocks.{STRETCHED * _period(kind)}" in names:
            return _decoder_trace(self.dims, names, micro_batch, kind, dtype)
        key = (*map(id, modules), micro_batch, kind, dtype)
        traces = {} if self.traces is None else self.traces
        if key not in traces:
            if self.set_checkpointing is not None:
                self.set_checkpointing(self.model, kind)
            traces[key] = trace(self.model, modules, lambda m: self.step(m, micro_batch), dtype)
        return traces[key]


def workload_of(model: Any, step: TrainStep | None = None, seq: int | None = None) -> Workload:
    """Return the workload that `model` names.

    Args:
        model: a module; a transformers config, or the path of one; or Dims.
        step: for a module: see TrainStep.
        seq: tokens of a sample, for a config. Default: what the config allows, at most 4096.

    Raises TypeError or ValueError for anything else, and for a module without a step.
    """
    if isinstance(model, Dims):
        return decoder(model)
    if isinstance(model, nn.Module):
        if any(is_unit(module) for module in model.modules()):
            raise ValueError("plan() takes the model as it is before FSDP(...): it is sharded")
        if step is None:
            raise ValueError("plan() needs step= for a module: pass step(model, samples) -> loss")
        return Workload(model, step, 1, "samples")
    return _of_config(model, seq)


def decoder(dims: Dims) -> Workload:
    """Return the training of a decoder. Raises ValueError for dimensions that do not fit."""
    kinds = ("", "selective", "alternate", "full")
    return Workload(decoder_of(dims), _run_decoder, dims.seq, "tokens", kinds, _set, dims)


def _set(model: Decoder, kind: str) -> None:
    model.checkpointing = kind


def _run_decoder(model: Any, micro_batch: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.zeros(micro_batch, model.dims.seq, dtype=torch.int64))
    return loss


@functools.lru_cache(maxsize=256)
def _decoder_trace(
    dims: Dims, names: tuple[str, ...], micro_batch: int, kind: str, dtype: torch.dtype | None
) -> Traced:
    """Return the trace of a decoder, divided at the modules with these names: all blocks, and
    others."""
    period = _period(kind)
    times, rest = divmod(dims.layers, period)
    few = decoder_of(dims._replace(layers=STRETCHED * period + rest), kind)
    here = dict(few.named_modules())
    modules = [here[name] for name in names if name in here]
    traced = trace(few, modules, lambda model: _run_decoder(model, micro_batch), dtype)
    return traced.stretched(names.index(f"blocks.{period}"), period, times - STRETCHED + 1)


def _period(kind: str) -> int:
    return 2 if kind == "alternate" else 1


def _of_config(model: Any, seq: int | None) -> Workload:
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        expected = "a module, zshard.Dims or a config (pip install transformers)"
        raise TypeError(f"plan() takes {expected}, got {model!r}") from error
    config: Any = model
    if isinstance(model, str | Path):
        if str(model).endswith(".json") and not Path(model).is_file():
            raise FileNotFoundError(f"{model}: no such config: pass a file, a folder or a name")
        config = transformers.AutoConfig.from_pretrained(model)
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(f"plan() takes a module, zshard.Dims or a config, got {model!r}")
    with torch.device("meta"):
        make: Any = transformers.AutoModelForCausalLM
        module = make.from_config(config)
    most = getattr(config, "max_position_embeddings", None) or 4096
    tokens = min(4096, most) if seq is None else seq

    def step(model: nn.Module, micro_batch: int) -> torch.Tensor:
        ids = torch.zeros(micro_batch, tokens, dtype=torch.int64)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    return Workload(module.train(), step, tokens, "tokens", ("", "full"), _set_transformers)


def _set_transformers(model: Any, kind: str) -> None:
    with warnings.catch_warnings():  # transformers 5 has other names for these
        warnings.simplefilter("ignore", FutureWarning)
        if kind:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
