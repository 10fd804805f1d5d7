"""What a checkpoint has, whoever wrote it: tensors by name, and where each can be read.

The one idea: a checkpoint of zshard, a safetensors file, a folder of Hugging Face's and one of
torch.distributed.checkpoint are the same to whoever loads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zshard._checkpoint import extra
from zshard._checkpoint.manifest import CheckpointError, Manifest
from zshard._checkpoint.safetensors import File
from zshard._checkpoint.torch_file import NoDataError


class Readable(Protocol):
    """A tensor that can be read, as whoever loads it knows it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def files(self) -> list[str]:
        """The names of those that have it."""

    def check(self) -> None:
        """CheckpointError where it can be seen without the values that they are not as they should
        be, and opening has not seen it."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fills `memory`, of bytes, with the tensor's own, row-major, from byte `offset` on."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, by the names of parameters."""

    kind: str | None  # its class, with its module
    groups: list[dict[str, Any]]  # options, and names under "params"
    tensors: dict[str, dict[str, Readable]]  # {parameter: {"exp_avg": ..., ...}}
    values: dict[str, dict[str, Any]]  # what is no tensor
    options: dict[str, dict[str, Any]] | None = None  # in place of groups: of each parameter


@dataclass
class Checkpoint:
    """An opened checkpoint; closing it closes its files."""

    path: str
    step: int | None = None
    model: Mapping[str, Readable] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)  # a name: the one in `model`
    others: Mapping[str, Any] = field(default_factory=dict)  # of a state dict, no tensors
    versions: Mapping[str, int] | None = None  # of modules, by their prefix, where it is not 1
    optimizer: OptimizerState | None = None
    no_optimizer: str = ""  # why there is none, where that is not plain
    manifest: Manifest | None = None
    files: dict[str, File] = field(default_factory=dict)  # those that are read, by name
    shared: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # extra of all ranks

    def extra_of(self, rank: int, strict: bool = True) -> dict[str, Any]:
        """What `rank` gave to be kept. CheckpointError for what is no dict, and (strict) what is no
        plain data, which else is a warning and left out."""
        if self.manifest is None:
            return self._shared(strict)
        found = decode(self.manifest.extra_of(rank), self.path)
        if not isinstance(found, dict):
            raise CheckpointError(f"'{self.path}' has a {type(found).__name__} as extra, no dict")
        return found

    def _shared(self, strict: bool) -> dict[str, Any]:
        found = {}
        for name, read in self.shared.items():
            try:
                found[name] = read()
            except NoDataError as error:
                if strict:
                    raise NoDataError(f"{error}; strict=False leaves it out") from None
                warnings.warn(f"{error}; it is left out", stacklevel=2)
        return found

    def close(self) -> None:
        """More than once is nothing."""
        for file in self.files.values():
            file.close()


def decode(value: Any, path: str) -> Any:
    """As extra.decode(); CheckpointError that names the file."""
    try:
        return extra.decode(value)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is no valid manifest: {error}") from None
