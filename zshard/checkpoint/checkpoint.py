"""The content of a checkpoint of any format: tensors by name, and where to read each one.

Opening one checks everything that it states about itself: sizes, headers, indices, the manifest. It
reads no values. Code that loads does not see the format. zshard checkpoints, safetensors files,
Hugging Face folders and torch.distributed.checkpoint folders all become a Checkpoint. Formats
describe the state of an optimizer in several ways, which all become an OptimizerState.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint import script_state
from zshard.checkpoint.folder import absolute, finished, name_of, path_of
from zshard.checkpoint.manifest import NAME, FileBlocks, Manifest, dict_of
from zshard.checkpoint.progress import advance
from zshard.checkpoint.safetensors import (
    HEADER_LIMIT,
    OpenFile,
    SafetensorsFile,
    check_homes,
    parse_index,
)
from zshard.ranks.agreement import bytes_of
from zshard.state.source import ChunkMemory, chunks, flat_of
from zshard.state.stand_ins import Pending
from zshard.upper import module_for

_MODEL, _OPTIMIZER = "model", "optimizer"
"""The prefixes of file names."""

_LONGEST_TAG = 255
_File = TypeVar("_File", bound=OpenFile)


class Averages(Protocol):
    """zshard.EMA, which stands above this."""

    def update(self) -> None: ...
    def swapped(self, decay: float | None = None) -> contextlib.AbstractContextManager[None]: ...


class Readable(Protocol):
    """A tensor that can be read."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def files(self) -> list[str]:
        """Return the names of the files that contain the tensor."""

    def check(self) -> None:
        """Check what opening has not checked and what does not need values. Raise CheckpointError
        if something is wrong."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, starting at byte `offset`."""


class Reader:
    """The source of values in files.

    A shard of a tensor is one run of bytes in the checkpoint, and one in memory. If dtype and
    device match, the run is read directly into place; otherwise it is read a chunk at a time and
    cast, or copied to the device.
    """

    def __init__(self) -> None:
        self._memory = ChunkMemory()

    def read(self, entry: Readable, begin: int, target: torch.Tensor) -> None:
        """Fill `target` with row-major elements of `entry` from `begin` on, cast to its dtype.
        Raise OSError or CheckpointError, naming the file."""
        if target.numel() == 0:
            return
        item = entry.dtype.itemsize
        with flat_of(target) as flat:
            is_plain = flat.device.type == "cpu" and not (flat.is_conj() or flat.is_neg())
            if flat.dtype == entry.dtype and is_plain:
                entry.read_into(bytes_of(flat), begin * item)
                advance(flat.numel() * item)
                torch.autograd.graph.increment_version(target)
            else:
                for first, last in chunks(flat.numel(), entry.dtype):
                    chunk = self._memory.of(last - first, entry.dtype)
                    entry.read_into(bytes_of(chunk), (begin + first) * item)
                    flat[first:last].copy_(chunk)
                    advance(chunk.numel() * item)


class InParts(Protocol):
    """The files of a checkpoint that no folder has as they are: an extra's."""

    def open(self, name: str, kind: type[_File]) -> _File:
        """Open a file of the checkpoint as a `kind` of OpenFile."""

    def own_blocks(self, comm: _core.Comm, wanted: Iterable[tuple[str, int, int]]) -> FileBlocks:
        """Return the blocks on disk that this rank verifies. Collective. wanted: (file, first byte,
        byte after the last) of what this rank will read. Raise CheckpointError if it lacks some."""

    def close(self) -> None: ...


@dataclass
class Checkpoint:
    """An open checkpoint; close() closes its files."""

    path: str
    step: int | None = None
    model: Mapping[str, Readable] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)  # alias: name in `model`
    others: Mapping[str, Any] = field(default_factory=dict)  # state dict entries without tensors
    versions: Mapping[str, int] | None = None  # versions other than 1 of modules, by prefix
    optimizer: OptimizerState | None = None
    no_optimizer: str = ""  # why there is none, if that needs an explanation
    manifest: Manifest | None = None
    files: dict[str, OpenFile] = field(default_factory=dict)  # open files by name
    spread: InParts | None = None  # where the files are, if they are in parts
    shared: Callable[[bool], dict[str, Any]] = lambda strict: {}  # every rank's extra
    reader: Reader = field(default_factory=Reader)

    @staticmethod
    @contextlib.contextmanager
    def opened(path: str | os.PathLike[str], with_optimizer: bool = False) -> Iterator[Checkpoint]:
        """Context manager in which the checkpoint at `path` is open.

        path: a .safetensors file, a folder, or a checkpoint directory, whose newest finished
            checkpoint is opened.
        with_optimizer: open the optimizer's files as well.

        Raises OSError if a file cannot be opened and CheckpointError if it is invalid, naming the
        file.
        """
        opened = Checkpoint(path_of(path))
        try:
            if os.path.isdir(opened.path) and os.path.lexists(os.path.join(opened.path, NAME)):
                opened._open_with_manifest(with_optimizer)
            elif _has_folders_alone(opened.path) or not module_for("readers").open_into(
                opened, with_optimizer
            ):
                opened._open_newest(with_optimizer)
            yield opened
        finally:
            opened.close()

    def pending(self, name: str, entry: Readable) -> Pending:
        """Return a tensor of the checkpoint for load_state_dict(), which has no values yet."""
        return Pending.of(name, entry, self.reader)

    def extra_of(self, rank: int, strict: bool = True) -> dict[str, Any]:
        """Return the `extra` that `rank` saved. Raise CheckpointError if it is not a dict or, with
        `strict`, if an entry is not plain data; otherwise warn and skip that entry."""
        if self.manifest is None:
            return self.shared(strict)
        extra = decode(self.manifest.extra_of(rank), self.path)
        if not isinstance(extra, dict):
            kind = type(extra).__name__
            raise CheckpointError(f"'{self.path}': extra must be a dict, got {kind}")
        return extra

    def open_listed(
        self, name: str, opened_file: Callable[[str, type[Any]], Any]
    ) -> dict[str, SafetensorsFile]:
        """Open the safetensors file `name`, or the files that an index of that name lists.

        opened_file: opens a file, given its name and a kind of OpenFile.
        """
        if name.endswith(".safetensors"):
            self.files[name] = file = opened_file(name, SafetensorsFile)
            return {name: file}
        self.files[name] = file = opened_file(name, OpenFile)
        homes = parse_index(file.bytes_of(min(file.size, HEADER_LIMIT + 1)), file.path)
        files: dict[str, SafetensorsFile] = {}
        for part in dict.fromkeys(homes.values()):
            self.files[part] = files[part] = opened_file(part, SafetensorsFile)
        check_homes(homes, files, file.path)
        return files

    def tensors(self, prefix: str) -> dict[str, Readable]:
        """Open the files of the model, the optimizer or an extra that the manifest lists, and no
        others: other files in the folder belong to another save or to none."""
        assert self.manifest is not None, "only such a checkpoint has several kinds of tensors"
        for name in (f"{prefix}.safetensors", f"{prefix}.safetensors.index.json"):
            if name in self.manifest.names:
                files = self.open_listed(name, self.open_file)
                return {key: each for file in files.values() for key, each in file.entries.items()}
        if prefix == _OPTIMIZER:
            return {}  # an optimizer without state
        where = os.path.join(self.path, NAME)
        raise CheckpointError(f"'{where}' lists neither {prefix}.safetensors nor its index")

    def open_file(self, name: str, kind: type[_File]) -> _File:
        """Open a file of the manifest as a `kind` of OpenFile; its size must match the manifest."""
        assert self.manifest is not None, "only such a checkpoint lists its files"
        path = os.path.join(self.path, name)
        if name not in self.manifest.names:
            raise CheckpointError(f"'{path}' is listed in an index, but not in {NAME}")
        if self.spread is not None:
            return self.spread.open(name, kind)
        if not os.path.lexists(path):
            raise CheckpointError(f"'{path}' is missing from the checkpoint: copy it again")
        facts, saved = os.lstat(path), self.manifest.files[name].size
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError(f"'{path}' is not a regular file, but was saved as one")
        if facts.st_size != saved:
            sizes = f"it has {facts.st_size} bytes, but was saved with {saved}"
            raise CheckpointError(f"'{path}' is damaged: {sizes}; load an earlier one")
        return kind(path, follow=False)

    def verify(self) -> int:
        """Verify all blocks of the files that the manifest lists; return their bytes. Raise
        CheckpointError for damage."""
        assert self.manifest is not None, "the caller checks this"
        records = self.manifest.files
        for name in records.keys() - self.files.keys():
            self.files[name] = self.open_file(name, OpenFile)
        FileBlocks.heads(self.files, records).check()
        FileBlocks.data(self.files, records).check()
        return sum(record.size for record in records.values())

    def close(self) -> None:
        """Close all files. Further calls do nothing."""
        for file in self.files.values():
            file.close()
        if self.spread is not None:
            self.spread.close()

    # --- opening ----------------------------------------------------------------------------------

    def _open_with_manifest(self, with_optimizer: bool) -> None:
        manifest = Manifest.read(self.path)
        if manifest.whole:
            self.spread = module_for("per_host").Spread(self.path, manifest, [self.path])
        self.manifest = manifest
        self.step = manifest.step
        self.model = self.tensors(_MODEL)
        self.tied = dict(manifest.tied)
        where = os.path.join(self.path, NAME)
        extra_state = manifest.model.get("extra_state", {})
        self.others = {name: decode(value, where) for name, value in extra_state.items()}
        self.versions = decode(manifest.model.get("versions", {}), where)
        if not all(type(version) is int for version in self.versions.values()):
            raise CheckpointError(f"'{where}' has module versions that are not integers")
        if with_optimizer and manifest.optimizer is not None:
            tensors = self.tensors(_OPTIMIZER)
            self.optimizer = optimizer_of_manifest(manifest.optimizer, tensors, where)

    def _open_newest(self, with_optimizer: bool) -> None:
        directory, steps = self.path, finished(self.path)
        tagged = None if steps else _tagged_in(directory)
        if tagged is not None:
            self.path = tagged
            self._open_with_manifest(with_optimizer)
            return
        if not steps:
            module_for("readers").refuse(self.path)
        self.path = os.path.join(directory, name_of(steps[-1]))
        try:
            self._open_with_manifest(with_optimizer)
        except (OSError, CheckpointError) as error:
            if finished(directory)[-1:] != steps[-1:]:  # another job is saving and deleting there
                self.close()
                self.path, self.files = directory, {}
                self._open_newest(with_optimizer)
            elif isinstance(error, CheckpointError):
                raise CheckpointError(f"{error}{older_than(self.path)}") from None
            else:
                raise


def _has_folders_alone(path: str) -> bool:
    """Return whether a directory has no files that another library's checkpoint could consist
    of."""
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as entries:
        return all(entry.is_dir() or entry.name == "latest" for entry in entries)


def _tagged_in(path: str) -> str | None:
    """Return the checkpoint that the file `latest` names, as an engine's save_checkpoint() writes
    it."""
    try:
        with open(os.path.join(path, "latest"), encoding="utf-8") as file:
            tag = file.read(_LONGEST_TAG).strip()
    except (OSError, UnicodeDecodeError):
        return None
    inside = os.path.join(path, tag)
    is_plain = tag not in ("", ".", "..") and os.path.basename(tag) == tag
    return inside if is_plain and os.path.lexists(os.path.join(inside, NAME)) else None


def older_than(path: str) -> str:
    """Return a hint at the finished checkpoint before the numbered one at `path`, or ""."""
    parent, name = os.path.split(absolute(path))
    names = [name_of(step) for step in finished(parent)]
    before = names[: names.index(name)] if name in names else []
    return f"; '{os.path.join(parent, before[-1])}' is an older checkpoint" if before else ""


def decode(value: object, path: str) -> Any:
    """Call script_state.decode(); CheckpointError, which names the file, for invalid values."""
    try:
        return script_state.decode(value)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not a valid manifest: {error}") from None


def is_extra_state(name: str) -> bool:
    """Return whether it names the result of a module's get_extra_state(). set_extra_state() needs
    values, so a tensor of that name, unlike others, is read at once."""
    return name.rpartition(".")[2] == "_extra_state"


# --- the state of an optimizer --------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, keyed by parameter name."""

    kind: str | None  # the qualified name of its class
    groups: list[dict[str, Any]]  # options, and parameter names under "params"
    tensors: dict[str, dict[str, Readable]]  # {parameter: {"exp_avg": ..., ...}}
    values: dict[str, dict[str, Any]]  # state that is not a tensor
    # Under keys that are no parameters; may have Readables.
    other: dict[Any, Any] = field(default_factory=dict)

    def fitted(
        self, optimizer: Optimizer, names: Mapping[int, str]
    ) -> tuple[OptimizerState, list[str]]:
        """Return the state by name and in param groups, and a list of mismatches.

        names: names of the optimizer's parameters, by id.
        """
        return self, []


def optimizer_of_manifest(
    saved: Mapping[str, Any], tensors: Mapping[str, Readable], where: str
) -> OptimizerState:
    """Return the optimizer's state as a manifest describes it; see contents.py. Raise
    CheckpointError if the description is invalid or does not fit the tensors."""
    left = dict(tensors)
    state: dict[str, dict[str, Readable]] = {}
    values: dict[str, dict[str, Any]] = {}
    try:
        groups = [
            {**dict_of(decode(group["options"], where)), "params": _names(group["params"])}
            for group in saved["groups"]
        ]
        for name, row in saved["state"].items():
            state[name] = {key: left.pop(f"{name}.{key}") for key in _names(row["tensors"])}
            values[name] = dict_of(decode(row["values"], where))
        (kind,) = _names([saved["class"]])
        other = dict_of(decode(saved.get("other", {}), where))
    except KeyError as error:
        text = f"'{where}' and the optimizer's files do not match: one of them lacks {error}"
        raise CheckpointError(text) from None
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"'{where}' has an invalid optimizer entry: {error}") from None
    if left:
        raise CheckpointError(f"'{where}' does not list the optimizer's tensor '{min(left)}'")
    return OptimizerState(kind, groups, state, values, other=other)


def _names(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"expected a list of names, got {value!r:.40}")
    return value
