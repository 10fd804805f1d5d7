"""Export.save(): one rank writes a Hugging Face folder from an export, bucket by bucket.

The layout of the files follows from names, shapes and dtypes, so each tensor is written to its
place when it comes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

import torch

from zshard import api
from zshard.api import (
    BLOCK,
    Entry,
    Staging,
    Target,
    bytes_of,
    index_of,
    lay_out,
    texts_of,
    write_text,
)

if TYPE_CHECKING:
    from zshard.extras.weights.export import Export, Rounds


def save(export: Export, path: str | os.PathLike[str], limit: int) -> None:
    """See Export.save(). limit: the most bytes of tensors in a file."""
    if export.since is not None:
        raise ValueError("a folder must have all tensors: call export() without since for save()")
    target = Target.of(path, None)
    with contextlib.ExitStack() as stack:
        made: list[_Folder] = []

        def prepare(rounds: Rounds) -> None:
            made.append(stack.enter_context(contextlib.closing(_Folder(target, limit))))
            made[0].open(rounds)

        with export.rounds(export.sender, prepare) as rounds:
            for batch in rounds.batches:
                room = made[0].room(batch) if rounds.takes else []
                rounds.fill(batch, room)
                with rounds.together():
                    if rounds.takes:
                        made[0].write(batch, room)
            with rounds.together():
                if rounds.takes:
                    made[0].finish()


class _Folder:
    """A folder that is being written, under a hidden name until finish()."""

    def __init__(self, target: Target, limit: int) -> None:
        self._staging = Staging(target, secrets.token_hex(16), overwrite=None)
        self._limit = limit
        self._files: list[api.File] = []
        self._places: dict[str, tuple[api.File, int]] = {}
        self._texts: dict[str, bytes] = {}

    def open(self, rounds: Rounds) -> None:
        """Create the files with their headers."""
        planned = lay_out(rounds.entries, "model", self._limit, rounds.tied)
        self._texts = texts_of(rounds.model, planned)
        if len(planned) > 1:
            self._texts["model.safetensors.index.json"] = index_of(planned)
        self._staging.open()
        for each in planned:
            file = api.File.create(os.path.join(self._staging.path, each.name), each.size)
            self._files.append(file)
            file.write([(0, each.header)], BLOCK)
            self._places.update((item.name, (file, offset)) for item, offset in each.places)

    def room(self, batch: list[Entry]) -> list[torch.Tensor]:
        """Return memory for a batch."""
        return [torch.empty(each.shape, dtype=each.dtype) for each in batch]

    def write(self, batch: list[Entry], tensors: list[torch.Tensor]) -> None:
        """Write the tensors of a batch to their places."""
        for entry, tensor in zip(batch, tensors, strict=True):
            file, offset = self._places[entry.name]
            if tensor.numel() > 0:
                file.write([(offset, bytes_of(tensor))], BLOCK)

    def finish(self) -> None:
        """Sync everything, and give the folder its name."""
        for file in self._files:
            file.sync()
        for name, text in self._texts.items():
            write_text(os.path.join(self._staging.path, name), text)
        self._staging.commit()

    def close(self) -> None:
        """Close the files, and delete what is not finished."""
        for file in self._files:
            file.close()
        self._staging.discard()
        self._staging.close()
