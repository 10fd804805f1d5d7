"""The plan of a save: the bytes and files that each rank writes, agreed between all ranks.

A plan is made without reading a value, and writing needs nothing else, so any thread can write
while the model trains. The layout of all files follows from names, shapes and dtypes, on which the
ranks have agreed, so each rank computes it by itself.

Files are split as Hugging Face's tools split them: tensors in order, and a new file when the next
tensor would exceed the limit. Within a file, larger dtypes come first, so that the offset of each
tensor is a multiple of its item size; spaces pad the header to a multiple of ALIGN.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._version import __version__
from zshard.checkpoint.contents import Contents, Replicas, SaveShare, facts_of
from zshard.checkpoint.folder import Target, retain, warn_of_newer
from zshard.checkpoint.manifest import FileRecord, Manifest
from zshard.checkpoint.safetensors import CODES, HEADER_LIMIT
from zshard.ranks.agreement import Fact, gather, on_all_ranks
from zshard.units.extensions import EXTENSIONS
from zshard.units.shards import Entry
from zshard.units.units import class_of, plain_name

ALIGN = 4096  # bytes


class PlannedFile(NamedTuple):
    """A safetensors file to write."""

    name: str
    header: bytes  # with its length, padded
    size: int
    places: list[tuple[Entry, int]]  # tensors and their first bytes in the file


class Piece(NamedTuple):
    """A run of bytes that this rank writes: some elements of a tensor, cast to a dtype."""

    file: int  # its number
    offset: int  # of the first byte
    values: Tensor
    begin: int  # row-major elements of `values`, from ... to
    end: int
    dtype: torch.dtype
    name: str  # of the tensor
    is_whole: bool  # of a tensor without shards, which rank 0 writes

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return (self.end - self.begin) * self.dtype.itemsize


WrittenRun = tuple[int, int, Piece | bytes]
"""A run of bytes that this rank writes to a file: where it begins there, its length, what it is."""


class Kept(NamedTuple):
    """The arguments about other checkpoints."""

    step: int | None
    keep_last: int | None
    overwrite: bool


class Beside(NamedTuple):
    """Contents that an extra saves in addition to the model and the optimizer."""

    name: str  # of its entry in the manifest
    entry: Mapping[str, Any]
    contents: Mapping[str, Contents]  # by the stem of their files


class SaveRequest(NamedTuple):
    """The request to save, as this rank got it; ranks may disagree."""

    target: Target
    kept: Kept
    limit: int  # bytes in a file
    contents: list[Contents]  # of the model and, if given, the optimizer
    extra: object  # this rank's, encoded
    per_host: bool  # hosts share no disk
    beside: Sequence[Beside]

    def facts(self) -> list[Fact]:
        facts = [(name, repr(value)) for name, value in self.kept._asdict().items()]
        target = self.target.name if self.per_host else self.target.path
        facts += [("per_host", repr(self.per_host)), ("path", repr(target))]
        facts.append(("max_shard_size", repr(self.limit)))
        for what, contents in zip(("tensor", "optimizer tensor"), self.contents, strict=False):
            facts += facts_of(contents, what)
        if len(self.contents) > 1:
            optimizer = self.contents[1].facts
            names = [group["params"] for group in optimizer["groups"]]
            facts += [("the optimizer", optimizer["class"]), ("param_groups", repr(names))]
        for beside in self.beside:
            for stem, contents in beside.contents.items():
                facts += facts_of(contents, f"tensor of {stem}")
            facts.append((f"the {beside.name}", repr(beside.entry)))
        return facts


@dataclass(frozen=True)
class SavePlan:
    """Everything that writing needs. The values of `pieces` are read when they are written."""

    target: Target
    kept: Kept
    files: list[PlannedFile]
    pieces: list[Piece]  # this rank's, by file
    texts: Mapping[str, bytes]  # (rank 0) further files
    draft: Manifest  # without what is known once all is written
    parameters: frozenset[str]  # names

    @property
    def id(self) -> str:
        """Of the checkpoint."""
        return self.draft.id

    def manifest(
        self, files: Mapping[str, FileRecord], finite: bool, parts: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the manifest's text. finite: whether all parameters are. parts: the entry of that
        name, where hosts share no disk."""
        if not parts:
            return replace(self.draft, files=files, finite=finite).dump()
        whole = {file.name: file.size for file in self.files}
        whole |= {name: len(text) for name, text in self.texts.items()}  # on rank 0
        more = {**self.draft.more, "parts": parts}
        return replace(self.draft, files=files, finite=finite, whole=whole, more=more).dump()

    def runs(self, headers: bool, texts: bool) -> dict[str, list[WrittenRun]]:
        """Return what this rank writes, by file; the headers of all files, and further files, if it
        is the rank for these."""
        runs: dict[str, list[WrittenRun]] = {}
        for file in self.files if headers else ():
            runs[file.name] = [(0, len(file.header), file.header)]
        for piece in self.pieces:
            run = (piece.offset, piece.size, piece)
            runs.setdefault(self.files[piece.file].name, []).append(run)
        for name, text in self.texts.items() if texts else ():
            runs[name] = [(0, len(text), text)]
        return runs

    def size(self, headers: bool, texts: bool) -> int:
        """Return how many bytes these are."""
        return sum(run[1] for of_file in self.runs(headers, texts).values() for run in of_file)

    def clean_up(self, comm: _core.Comm, leads: bool, strange: Collection[str]) -> None:
        """After the save, delete older checkpoints, and warn of NaN and of newer ones. Collective.

        leads: whether this rank does so for others that see its folder.
        strange: the names of parameters with NaN or infinite values.
        """
        with on_all_ranks(comm):  # a script may have made warnings errors
            if leads and self.kept.keep_last is not None:
                retain(self.target, self.kept.keep_last, self.id)
            if comm.rank == 0 and strange:
                listed = ", ".join(f"'{name}'" for name in sorted(strange))
                text = f"the checkpoint '{self.target.path}' has NaN or infinite values in {listed}"
                warnings.warn(f"{text}; keep_last also keeps the newest without any", stacklevel=2)
            if leads:
                warn_of_newer(self.target)


def plan_of(comm: _core.Comm, asked: SaveRequest, model: nn.Module, copies: Replicas) -> SavePlan:
    """Collective. The ranks agree on `asked`."""
    of_model, *others = asked.contents
    digest = hashlib.sha256(json.dumps(asked.extra).encode()).digest()
    is_same = len(set(comm.exchange(digest))) == 1
    extras = [asked.extra] if is_same else gather(comm, asked.extra)
    with on_all_ranks(comm):
        files = lay_out(of_model.entries, "model", asked.limit, of_model.tied)
        texts = texts_of(model, files) if comm.rank == 0 else {}
        texts["model.safetensors.index.json"] = index_of(files)
        more = {"optimizer": others[0]} if others and others[0].entries else {}
        for beside in asked.beside:
            more |= beside.contents
        for stem, contents in more.items():
            files_of_stem = lay_out(contents.entries, stem, asked.limit)
            texts[f"{stem}.safetensors.index.json"] = index_of(files_of_stem)
            files = files + files_of_stem

    facts = {key: value for each in EXTENSIONS for key, value in each.recorded(model).items()}
    draft = Manifest(
        id=comm.exchange(os.urandom(16))[0].hex(),
        step=asked.kept.step,
        world=comm.world,
        files={},
        tied=of_model.tied,
        model={**of_model.facts, **facts},
        optimizer=others[0].facts if others else None,
        extra=extras,
        software={"zshard": __version__, "torch": torch.__version__},
        more={beside.name: beside.entry for beside in asked.beside},
    )
    names = frozenset(plain_name(n) for n, _ in model.named_parameters(remove_duplicate=False))
    pieces = pieces_of(files, copies.share)
    return SavePlan(asked.target, asked.kept, files, pieces, texts, draft, names)


def texts_of(model: nn.Module, files: Sequence[PlannedFile]) -> dict[str, bytes]:
    """Return Hugging Face's configuration files if they let from_pretrained() find all weights: not
    for a module around a model that has the configuration, nor for a model with PEFT's adapters,
    whose weights have other names."""
    config: Any = getattr(model, "config", None)
    has_adapters = any(type(m).__module__.partition(".")[0] == "peft" for m in model.modules())
    writes_json = callable(getattr(config, "to_json_string", None))
    if not hasattr(type(model), "config_class") or has_adapters or not writes_json:
        return {}
    values = json.loads(config.to_json_string())
    dtypes = [item.dtype for file in files for item, _ in file.places]
    stored = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    if not values.get("architectures"):
        values["architectures"] = [class_of(model).__name__]
    texts = {"config.json": with_dtype(values, stored)}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        texts["generation_config.json"] = generation.to_json_string().encode()
    return texts


def with_dtype(config: dict[str, Any], stored: torch.dtype | None) -> bytes:
    """Return a config.json that names the dtype of the stored weights, if it is not None, as
    save_pretrained() writes it: from_pretrained() loads in this dtype."""
    if stored is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(stored).removeprefix("torch.")
    return json.dumps(config, indent=2, sort_keys=True).encode()


# --- the layout of files --------------------------------------------------------------------------


def lay_out(
    items: Sequence[Entry], stem: str, limit: int, tied: Mapping[str, str] | None = None
) -> list[PlannedFile]:
    """Return the files for `items`, each with at most `limit` bytes of tensors, or one tensor.

    stem: files are named `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors` and so on.
    tied: aliases of tensors, which the header of the tensor's file lists as metadata.
    """
    groups: list[list[Entry]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + item.size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size
    names, count = [f"{stem}.safetensors"], len(groups)
    if count > 1:
        names = [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    return [_file(name, group, tied or {}) for name, group in zip(names, groups, strict=True)]


def index_of(files: Sequence[PlannedFile]) -> bytes:
    """Return the text of `<stem>.safetensors.index.json`."""
    homes = {item.name: file.name for file in files for item, _ in file.places}
    total = sum(item.size for file in files for item, _ in file.places)
    whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    return json.dumps(whole, indent=2).encode()


def pieces_of(
    files: Sequence[PlannedFile], share_of: Callable[[Entry], SaveShare | None]
) -> list[Piece]:
    """Return what this rank writes, in order. Ranks that hold the same bytes write an equal share
    of them each."""
    shares = [
        (number, entry, offset, share)
        for number, file in enumerate(files)
        for entry, offset in file.places
        if (share := share_of(entry)) is not None
    ]
    totals: Counter[int] = Counter()  # bytes, by group
    for _, entry, _, (*_, group) in shares:
        totals[group] += entry.value.numel() * entry.dtype.itemsize
    done: Counter[int] = Counter()
    pieces = []
    for number, entry, offset, (first, count, copy, group) in shares:
        size, numel = entry.dtype.itemsize, entry.value.numel()
        # Both neighbors round in the same way, so there is no gap between what they write.
        cuts = (totals[group] * i // count - done[group] for i in (copy, copy + 1))
        begin, end = (min(max(0, cut // size), numel) for cut in cuts)
        if begin < end:
            start = offset + (first + begin) * size
            run = entry.value, begin, end, entry.dtype, entry.name
            pieces.append(Piece(number, start, *run, is_whole=entry.part is None))
        done[group] += numel * size
    return pieces


def _file(name: str, items: list[Entry], tied: Mapping[str, str]) -> PlannedFile:
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)  # a stable sort
    inside = {item.name for item in ordered}
    notes = {other: home for other, home in tied.items() if home in inside}
    header: dict[str, object] = {"__metadata__": {**notes, "format": "pt"}}
    starts, at = [], 0
    for item in ordered:
        shape, offsets = list(item.shape), [at, at + item.size]
        header[item.name] = {"dtype": CODES[item.dtype], "shape": shape, "data_offsets": offsets}
        starts.append(at)
        at += item.size
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > HEADER_LIMIT - ALIGN:
        size = f"the header of '{name}' would have {len(text)} bytes, which is too large"
        raise ValueError(f"{size}: pass a smaller max_shard_size")
    text += b" " * (-(len(text) + 8) % ALIGN)
    begin = 8 + len(text)
    places = [(item, begin + start) for item, start in zip(ordered, starts, strict=True)]
    return PlannedFile(name, len(text).to_bytes(8, "little") + text, begin + at, places)
