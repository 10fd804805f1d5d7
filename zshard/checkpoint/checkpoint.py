"""The content of a checkpoint, whatever its format: tensors by name, and where to read each one.

Code that loads does not see the format. zshard checkpoints, safetensors files, Hugging Face folders
and torch.distributed.checkpoint folders all become a Checkpoint. Formats describe the state of an
optimizer in several ways, which all become an OptimizerState.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint import script_state
from zshard.checkpoint.manifest import Block, Manifest, dict_of
from zshard.checkpoint.safetensors import OpenFile
from zshard.ranks.agreement import bytes_of

_File = TypeVar("_File", bound=OpenFile)


class Averages(Protocol):
    """zshard.EMA, which stands above this."""

    def update(self) -> None: ...
    def swapped(self, decay: float | None = None) -> AbstractContextManager[None]: ...


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


def read_whole(entry: Readable) -> torch.Tensor:
    """Read a full tensor into new memory on the CPU."""
    made = torch.empty(entry.shape, dtype=entry.dtype)
    if made.numel() > 0:
        entry.read_into(bytes_of(made), 0)
    return made


class InParts(Protocol):
    """The files of a checkpoint that no folder has as they are: an extra's."""

    path: str
    manifest: Manifest

    def open(self, name: str, kind: type[_File]) -> _File:
        """Open a file of the checkpoint as a `kind` of OpenFile."""

    def own_blocks(self, comm: _core.Comm, wanted: Iterable[tuple[str, int, int]]) -> list[Block]:
        """Return the blocks on disk that this rank verifies. Collective. wanted: (file, first byte,
        byte after the last) of what this rank will read."""

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

    def extra_of(self, rank: int, strict: bool = True) -> dict[str, Any]:
        """Return the `extra` that `rank` saved. Raise CheckpointError if it is not a dict or, with
        `strict`, if an entry is not plain data; otherwise warn and skip that entry."""
        if self.manifest is None:
            return self.shared(strict)
        found = decode(self.manifest.extra_of(rank), self.path)
        if not isinstance(found, dict):
            raise CheckpointError(
                f"'{self.path}': extra must be a dict, got {type(found).__name__}"
            )
        return found

    def close(self) -> None:
        """Close all files. Further calls do nothing."""
        for file in self.files.values():
            file.close()
        if self.spread is not None:
            self.spread.close()


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
    told: Mapping[str, Any], tensors: Mapping[str, Readable], where: str
) -> OptimizerState:
    """Return the optimizer's state as a manifest describes it; see contents.py. Raise
    CheckpointError if the description is invalid or does not fit the tensors."""
    left = dict(tensors)
    state: dict[str, dict[str, Readable]] = {}
    values: dict[str, dict[str, Any]] = {}
    try:
        groups = [
            {**dict_of(decode(group["options"], where)), "params": _names(group["params"])}
            for group in told["groups"]
        ]
        for name, own in told["state"].items():
            state[name] = {key: left.pop(f"{name}.{key}") for key in _names(own["tensors"])}
            values[name] = dict_of(decode(own["values"], where))
        kind, other = _name(told["class"]), dict_of(decode(told.get("other", {}), where))
    except KeyError as error:
        raise CheckpointError(
            f"'{where}' and the optimizer's files do not match: one of them lacks {error}"
        ) from None
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"'{where}' has an invalid optimizer entry: {error}") from None
    if left:
        raise CheckpointError(f"'{where}' does not list the optimizer's tensor '{min(left)}'")
    return OptimizerState(kind, groups, state, values, other=other)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, got {value!r:.40}")
    return value


def _names(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r:.40}")
    return [_name(each) for each in value]
