"""The content of a checkpoint, whatever its format: tensors by name, and where to read each one.

Code that loads does not see the format. zshard checkpoints, safetensors files,
Hugging Face folders and torch.distributed.checkpoint folders all become a Checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zshard._errors import CheckpointError
from zshard.checkpoint import script_state
from zshard.checkpoint.foreign.torch_file import NoDataError
from zshard.checkpoint.manifest import Manifest
from zshard.checkpoint.safetensors import OpenFile


class Readable(Protocol):
    """A tensor that can be read."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def files(self) -> list[str]:
        """The names of the files that contain it."""

    def check(self) -> None:
        """Check what opening has not checked and what does not need the values. Raise
        CheckpointError if something is wrong."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, from byte `offset` on."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, keyed by parameter name; by number, where a file has no names."""

    kind: str | None  # the qualified name of its class
    groups: list[dict[str, Any]]  # options, and parameter names under "params"
    tensors: dict[str, dict[str, Readable]]  # {parameter: {"exp_avg": ..., ...}}
    values: dict[str, dict[str, Any]]  # state that is not a tensor
    options: dict[str, dict[str, Any]] | None = None  # instead of groups: options per parameter


@dataclass
class Checkpoint:
    """An open checkpoint; close() closes its files."""

    path: str
    step: int | None = None
    model: Mapping[str, Readable] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)  # alias: name in `model`
    others: Mapping[str, Any] = field(default_factory=dict)  # state dict entries without tensors
    versions: Mapping[str, int] | None = None  # of modules, by prefix, where the version is not 1
    optimizer: OptimizerState | None = None
    no_optimizer: str = ""  # why there is none, where that needs an explanation
    manifest: Manifest | None = None
    files: dict[str, OpenFile] = field(default_factory=dict)  # open files by name
    shared: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # extra of all ranks

    def extra_of(self, rank: int, strict: bool = True) -> dict[str, Any]:
        """Return the `extra` that `rank` saved. Raise CheckpointError if it is not a dict or, with
        `strict`, if an entry is not plain data; otherwise warn and skip that entry."""
        if self.manifest is None:
            return self._shared(strict)
        found = decode(self.manifest.extra_of(rank), self.path)
        if not isinstance(found, dict):
            raise CheckpointError(
                f"'{self.path}': extra must be a dict, got {type(found).__name__}"
            )
        return found

    def _shared(self, strict: bool) -> dict[str, Any]:
        found = {}
        for name, read in self.shared.items():
            try:
                found[name] = read()
            except NoDataError as error:
                if strict:
                    raise NoDataError(f"{error}; pass strict=False to skip it") from None
                warnings.warn(f"{error}; skipped", stacklevel=2)
        return found

    def close(self) -> None:
        """Close all files. Further calls do nothing."""
        for file in self.files.values():
            file.close()


def decode(value: Any, path: str) -> Any:
    """Call script_state.decode(); CheckpointError, which names the file, for invalid values."""
    try:
        return script_state.decode(value)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not a valid manifest: {error}") from None
