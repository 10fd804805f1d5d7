"""Open a checkpoint of zshard's own; extras/readers opens what others wrote.

Opening checks everything that a checkpoint states about itself: sizes, headers, indices, the
manifest. It reads no values.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from zshard._errors import CheckpointError
from zshard.checkpoint.checkpoint import (
    Checkpoint,
    InParts,
    Readable,
    decode,
    optimizer_of_manifest,
)
from zshard.checkpoint.folder import absolute, finished, name_of, path_of
from zshard.checkpoint.manifest import LIMIT, NAME, Manifest, parse
from zshard.checkpoint.safetensors import (
    HEADER_LIMIT,
    OpenFile,
    SafetensorsFile,
    check_homes,
    parse_index,
)
from zshard.upper import module_for

MODEL, OPTIMIZER = "model", "optimizer"
"""The prefixes of file names."""

_LONGEST_TAG = 255
_File = TypeVar("_File", bound=OpenFile)


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], with_optimizer: bool = False, spread: InParts | None = None
) -> Iterator[Checkpoint]:
    """Context manager in which the checkpoint at `path` is open.

    path: a .safetensors file, a folder, or a checkpoint directory, whose newest finished checkpoint
        is opened.
    with_optimizer: open the optimizer's files, too.
    spread: the checkpoint, if it is in parts and the ranks have opened it together.

    Raises OSError if a file cannot be opened and CheckpointError if it is invalid, naming the file.
    """
    found = Checkpoint(path_of(path))
    try:
        if spread is not None:
            found.path = spread.path
            _note_own(found, spread.manifest, spread, with_optimizer)
        elif os.path.isdir(found.path) and os.path.lexists(os.path.join(found.path, NAME)):
            _open_zshard(found, with_optimizer)
        elif _has_folders_alone(found.path) or not module_for("readers").open_into(
            found, with_optimizer
        ):
            _open_newest(found, with_optimizer)
        yield found
    finally:
        found.close()


# --- checkpoint directories, and errors -----------------------------------------------------------


def _has_folders_alone(path: str) -> bool:
    """Return whether a directory has no files that another library's checkpoint could consist
    of."""
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as entries:
        return all(entry.is_dir() or entry.name == "latest" for entry in entries)


def _open_newest(found: Checkpoint, with_optimizer: bool) -> None:
    directory, steps = found.path, finished(found.path)
    tagged = None if steps else _tagged_in(directory)
    if tagged is not None:
        found.path = tagged
        _open_zshard(found, with_optimizer)
        return
    if not steps:
        module_for("readers").refuse(found.path)
    found.path = os.path.join(directory, name_of(steps[-1]))
    try:
        _open_zshard(found, with_optimizer)
    except (OSError, CheckpointError) as error:
        if finished(directory)[-1:] != steps[-1:]:  # another job is saving and deleting there
            found.close()
            found.path, found.files = directory, {}
            _open_newest(found, with_optimizer)
        elif isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}{older_than(found.path)}") from None
        else:
            raise


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


# --- safetensors ----------------------------------------------------------------------------------


def files_of(
    found: Checkpoint, name: str, opened_file: Callable[[str, type[Any]], Any]
) -> dict[str, SafetensorsFile]:
    """Open the safetensors file `name`, or the files that an index of that name lists.

    opened_file: opens a file, given its name and a kind of OpenFile.
    """
    if name.endswith(".safetensors"):
        found.files[name] = file = opened_file(name, SafetensorsFile)
        return {name: file}
    found.files[name] = file = opened_file(name, OpenFile)
    homes = parse_index(file.bytes_of(min(file.size, HEADER_LIMIT + 1)), file.path)
    files: dict[str, SafetensorsFile] = {}
    for each in dict.fromkeys(homes.values()):
        found.files[each] = files[each] = opened_file(each, SafetensorsFile)
    check_homes(homes, files, file.path)
    return files


# --- zshard checkpoints ---------------------------------------------------------------------------


def _open_zshard(found: Checkpoint, with_optimizer: bool) -> None:
    manifest = read_manifest(found.path)
    spread: InParts | None = None
    if manifest.whole:
        spread = module_for("per_host").Spread(found.path, manifest, [found.path])
    _note_own(found, manifest, spread, with_optimizer)


def _note_own(
    found: Checkpoint, manifest: Manifest, spread: InParts | None, with_optimizer: bool
) -> None:
    found.manifest, found.spread = manifest, spread
    found.step = manifest.step
    found.model = open_tensors(found, manifest, MODEL)
    found.tied = dict(manifest.tied)
    where = os.path.join(found.path, NAME)
    told = manifest.model
    extra_state = told.get("extra_state", {})
    found.others = {name: decode(each, where) for name, each in extra_state.items()}
    found.versions = decode(told.get("versions", {}), where)
    if not all(type(version) is int for version in found.versions.values()):
        raise CheckpointError(f"'{where}' has module versions that are not integers")
    if with_optimizer and manifest.optimizer is not None:
        tensors = open_tensors(found, manifest, OPTIMIZER)
        found.optimizer = optimizer_of_manifest(manifest.optimizer, tensors, where)


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the checkpoint at `path`."""
    where = os.path.join(path, NAME)
    with OpenFile(where, follow=False) as file:
        return parse(bytes(file.bytes_of(min(file.size, LIMIT + 1))), where)


def open_tensors(found: Checkpoint, manifest: Manifest, prefix: str) -> dict[str, Readable]:
    """Open the files of the model, the optimizer or an extra that the manifest lists, and no
    others: other files in the folder belong to another save or to none."""
    for name in (f"{prefix}.safetensors", f"{prefix}.safetensors.index.json"):
        if name in manifest.names:
            files = files_of(found, name, functools.partial(open_own, found, manifest))
            return {key: each for file in files.values() for key, each in file.entries.items()}
    if prefix == OPTIMIZER:
        return {}  # an optimizer without state
    raise CheckpointError(
        f"'{os.path.join(found.path, NAME)}' lists neither {prefix}.safetensors nor its index"
    )


def open_own(found: Checkpoint, manifest: Manifest, name: str, kind: type[_File]) -> _File:
    """Open a file of the manifest as a `kind` of OpenFile; its size must match the manifest."""
    path = os.path.join(found.path, name)
    if name not in manifest.names:
        raise CheckpointError(f"'{path}' is listed in an index, but not in {NAME}")
    if found.spread is not None:
        return found.spread.open(name, kind)
    if not os.path.lexists(path):
        raise CheckpointError(
            f"'{path}' is missing from the checkpoint; copy it again, or load an earlier one"
        )
    facts, saved = os.lstat(path), manifest.files[name].size
    if not stat.S_ISREG(facts.st_mode):
        raise CheckpointError(f"'{path}' is not a regular file, but was saved as one")
    if facts.st_size != saved:
        raise CheckpointError(
            f"'{path}' is damaged: it has {facts.st_size} bytes, but was saved with {saved}; "
            "copy the checkpoint again, or load an earlier one"
        )
    return kind(path, follow=False)
