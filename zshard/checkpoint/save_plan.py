"""The plan of a save: what to save, into which bytes of which files, agreed on by all ranks.

A plan is made without reading a value, and writing needs nothing else, so any thread
can write while the model trains on.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from zshard import _core
from zshard._version import __version__
from zshard.checkpoint.contents import Contents, facts_of
from zshard.checkpoint.folder import Target
from zshard.checkpoint.layout import Piece, PlannedFile, index_of, lay_out, pieces_of
from zshard.checkpoint.manifest import FileRecord, Manifest, dump
from zshard.checkpoint.safetensors import CODES
from zshard.model.build import MADE
from zshard.ranks.agreement import Fact, gather_bytes, on_all_ranks
from zshard.units.names import plain_name
from zshard.units.units import units_of


class Kept(NamedTuple):
    """The arguments about other checkpoints."""

    step: int | None
    keep_last: int | None
    overwrite: bool


class SaveRequest(NamedTuple):
    """What this rank was asked to save; ranks may disagree."""

    target: Target
    kept: Kept
    limit: int  # bytes in a file
    contents: list[Contents]  # of the model and, if given, the optimizer
    extra: Any  # this rank's, encoded

    def facts(self) -> list[Fact]:
        facts = [(name, repr(value)) for name, value in self.kept._asdict().items()]
        facts += [("path", repr(self.target.path)), ("max_shard_size", repr(self.limit))]
        for what, contents in zip(("tensor", "optimizer tensor"), self.contents, strict=False):
            facts += facts_of(contents, what)
        if len(self.contents) > 1:
            told = self.contents[1].told
            names = [group["params"] for group in told["groups"]]
            facts += [("the optimizer", told["class"]), ("param_groups", repr(names))]
        return facts


@dataclass(frozen=True)
class SavePlan:
    """Everything that writing needs. The values of `pieces` are read when they are written."""

    target: Target
    kept: Kept
    files: list[PlannedFile]
    pieces: list[Piece]  # this rank's, by file
    texts: Mapping[str, bytes]  # (rank 0) further files
    manifest: Callable[[Mapping[str, FileRecord], bool], bytes]  # its text: of files; finite?
    id: str
    parameters: frozenset[str]  # names


def checked_step(step: Any) -> int | None:
    if step is None:
        return None
    number = _whole("step", step)
    if not 0 <= number < 2**63 or isinstance(step, bool):
        raise ValueError(f"step must be an integer from 0 to 2**63 - 1, got {step!r}")
    return number


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r}: {error}") from None


def check_arguments(kept: Kept, extra: Any, dtype: Any) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict, got {type(extra).__name__}")
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
        if not dtype.is_floating_point or dtype not in CODES:
            raise ValueError(
                f"dtype must be a floating-point dtype that safetensors supports, got {dtype}"
            )
    if kept.keep_last is not None:
        if kept.step is None:
            raise ValueError("keep_last needs numbered checkpoints: pass step as well")
        if _whole("keep_last", kept.keep_last) < 1:
            raise ValueError(f"keep_last must be at least 1, got {kept.keep_last}")


def check_steps(model: nn.Module) -> None:
    """Raise DivergenceError if the ranks' shards are of different steps. Collective."""
    for engine in {
        state.unit.engine_id: state.unit.engine for _, state in units_of(model)
    }.values():
        engine.compare()


def check_nested(comm: _core.Comm, found: str) -> None:
    """Refuse shards within lists and dicts of an optimizer's state if all ranks found some: on one
    rank alone, a shape may match by chance."""
    if all(told == b"\1" for told in comm.exchange(b"\1" if found else b"\0")):
        raise RuntimeError(
            f"cannot save {found} in the optimizer state, which contains this rank's shards: store "
            "each tensor under a key of its own"
        )


def plan_of(comm: _core.Comm, asked: SaveRequest, model: nn.Module) -> SavePlan:
    """Collective. The ranks agree on `asked`."""
    own, *others = asked.contents
    extras = _from_all(comm, asked.extra)
    id = comm.exchange(os.urandom(16))[0].hex()
    with on_all_ranks(comm):
        files = lay_out(own.items, "model", asked.limit, own.tied)
        texts = _texts(model, files) if comm.rank == 0 else {}
        texts["model.safetensors.index.json"] = index_of(files)
        if others and others[0].items:
            more = lay_out(others[0].items, "optimizer", asked.limit)
            texts["optimizer.safetensors.index.json"] = index_of(more)
            files = files + more

    def manifest(records: Mapping[str, FileRecord], finite: bool) -> bytes:
        return dump(
            Manifest(
                id=id,
                step=asked.kept.step,
                world=comm.world,
                files=records,
                tied=own.tied,
                model=own.told,
                optimizer=others[0].told if others else None,
                extra=extras,
                software=_software(),
                finite=finite,
            )
        )

    names = frozenset(plain_name(n) for n, _ in model.named_parameters(remove_duplicate=False))
    return SavePlan(asked.target, asked.kept, files, pieces_of(files), texts, manifest, id, names)


def _from_all(comm: _core.Comm, mine: Any) -> list[Any]:
    """The JSON values of all ranks, or only one if all are equal."""
    text = json.dumps(mine).encode()
    if len(set(comm.exchange(hashlib.sha256(text).digest()))) == 1:
        return [mine]
    return [json.loads(each) for each in gather_bytes(comm, text)]


def _software() -> dict[str, str]:
    return {"zshard": __version__, "torch": torch.__version__}


def _texts(model: nn.Module, files: Sequence[PlannedFile]) -> dict[str, bytes]:
    """Hugging Face's configuration files, if from_pretrained() finds all weights by them: not of a
    module around a model whose configuration it has, nor of a model with PEFT's adapters, whose
    weights have other names."""
    config: Any = getattr(model, "config", None)
    if not hasattr(type(model), "config_class") or _has_adapters(model):
        return {}
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    told = json.loads(config.to_json_string())
    dtypes = [item.dtype for file in files for item, _ in file.places]
    stored = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    if stored is not None:  # like save_pretrained(): from_pretrained() uses this dtype
        told["torch_dtype" if "torch_dtype" in told else "dtype"] = str(stored)[len("torch.") :]
    if not told.get("architectures"):
        told["architectures"] = [_own_class(model).__name__]
    texts = {"config.json": json.dumps(told, indent=2, sort_keys=True).encode()}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        texts["generation_config.json"] = generation.to_json_string().encode()
    return texts


def _has_adapters(model: nn.Module) -> bool:
    return any(type(each).__module__.partition(".")[0] == "peft" for each in model.modules())


def _own_class(model: nn.Module) -> type:
    """The class of the model before it was wrapped."""
    kinds = (kind for kind in type(model).__mro__ if MADE not in vars(kind))
    return next(kind for kind in kinds if not kind.__module__.startswith("zshard."))
