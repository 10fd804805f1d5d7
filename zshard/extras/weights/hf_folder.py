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
    Staging,
    Target,
    advance,
    bar,
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
    staging = Staging(Target.of(path, None), secrets.token_hex(16), overwrite=None)
    files: list[api.File] = []
    places: dict[str, tuple[api.File, int]] = {}
    texts: dict[str, bytes] = {}

    def prepare(rounds: Rounds) -> None:
        """Create the files with their headers."""
        stack.callback(staging.close)
        stack.callback(staging.discard)  # what is not finished
        planned = lay_out(rounds.entries, "model", limit, rounds.tied)
        texts.update(texts_of(rounds.model, planned))
        if len(planned) > 1:
            texts["model.safetensors.index.json"] = index_of(planned)
        staging.open()
        for plan in planned:
            file = api.File.create(os.path.join(staging.path, plan.name), plan.size)
            stack.callback(file.close)
            files.append(file)
            file.write([(0, plan.header)], BLOCK)
            places.update((item.name, (file, offset)) for item, offset in plan.places)

    with contextlib.ExitStack() as stack, export.rounds(export.sender, prepare) as rounds:
        sizes = (entry.size for batch in rounds.batches for entry in batch)
        stack.enter_context(bar("exporting", lambda: sum(sizes), rounds.takes))
        for batch in rounds.batches:
            taken = batch if rounds.takes else []
            tensors = [torch.empty(entry.shape, dtype=entry.dtype) for entry in taken]
            rounds.fill(batch, tensors)
            with rounds.together():
                for i, entry in enumerate(taken):
                    file, offset = places[entry.name]
                    if entry.size > 0:
                        file.write([(offset, bytes_of(tensors[i]))], BLOCK)
                        advance(entry.size)
        with rounds.together():
            if rounds.takes:
                for file in files:
                    file.sync()
                for name, text in texts.items():
                    write_text(os.path.join(staging.path, name), text)
                staging.commit()
