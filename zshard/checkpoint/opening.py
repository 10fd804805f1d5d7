"""Open a checkpoint of any supported format.

Opening checks everything that a checkpoint states about itself: sizes, headers, indices, the
manifest. It reads no values. It refuses files that would have to be executed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from zshard._errors import CheckpointError
from zshard.checkpoint import chunked, dcp
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
from zshard.upper import of_argument

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
        else:
            _open(found, with_optimizer)
        yield found
    finally:
        found.close()


def _open(found: Checkpoint, with_optimizer: bool) -> None:
    if not os.path.isdir(found.path):
        _refuse_pickles(found.path)
        name = os.path.basename(found.path)
        found.files[name] = file = SafetensorsFile(found.path)
        _note_model(found, {name: file})
    elif os.path.lexists(os.path.join(found.path, NAME)):
        _open_zshard(found, with_optimizer)
    elif _of_huggingface(found.path, MODEL) is not None:
        _refuse_staging(found.path)
        _open_huggingface(found)
    elif os.path.lexists(os.path.join(found.path, dcp.METADATA)):
        dcp.open_into(found, with_optimizer)
    elif chunked.shards_in(found.path):
        chunked.open_shards_into(found)
    else:
        _open_newest(found, with_optimizer)


# --- checkpoint directories, and errors -----------------------------------------------------------


def _open_newest(found: Checkpoint, with_optimizer: bool) -> None:
    directory, steps = found.path, finished(found.path)
    tagged = None if steps else _tagged_in(directory)
    if tagged is not None:
        found.path = tagged
        _open_zshard(found, with_optimizer)
        return
    if not steps:
        _point_inside(found.path)
        _refuse_pickles(found.path)
        raise FileNotFoundError(
            f"no finished checkpoint in '{found.path}': it has no {NAME}, model.safetensors, "
            "model.safetensors.index.json or numbered checkpoints; pass the path that "
            "zshard.save() got"
        )
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


def _point_inside(path: str) -> None:
    """Raise FileNotFoundError for a folder without tensors whose subfolders have some, as trainers
    create them: the intended one is unknown."""
    marks = (NAME, dcp.METADATA, f"{MODEL}.safetensors", f"{MODEL}.safetensors.index.json")
    with os.scandir(path) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir())
    inside = [f for f in folders if any(os.path.exists(os.path.join(path, f, m)) for m in marks)]
    if inside:
        names = ", ".join(f"'{name}'" for name in inside[:5]) + (", ..." if inside[5:] else "")
        raise FileNotFoundError(
            f"'{path}' is not a checkpoint, but contains {names}: pass the path of the one to load"
        )


def older_than(path: str) -> str:
    """Return a hint at the finished checkpoint before the numbered one at `path`, or ""."""
    parent, name = os.path.split(absolute(path))
    names = [name_of(step) for step in finished(parent)]
    before = names[: names.index(name)] if name in names else []
    return f"; '{os.path.join(parent, before[-1])}' is an older checkpoint" if before else ""


def _refuse_staging(path: str) -> None:
    """Raise CheckpointError for the folder of an interrupted save, whose files have their full
    length, but zeros where nothing was written."""
    name = os.path.basename(absolute(path))
    if re.fullmatch(r"\..*\.[0-9a-f]{32}\.tmp", name):
        raise CheckpointError(
            f"'{path}' is not a checkpoint: an interrupted save left it; load another one"
        )


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def _refuse_pickles(path: str) -> None:
    """Raise CheckpointError for pickles."""
    if not os.path.isdir(path):
        if path.endswith(_PICKLES):
            raise CheckpointError(
                f"'{path}' looks like a pickle, which can execute arbitrary code: load it with "
                "torch.load(weights_only=True) and convert it with safetensors.torch.save_file()"
            )
        return
    names = os.listdir(path)
    inner = next((name for name in names if name.startswith("global_step")), "")
    below = os.path.join(path, inner)
    names_below = os.listdir(below) if inner and os.path.isdir(below) else []
    if any(
        re.match(r"(bf16_)?zero_pp_rank_|mp_rank_\d+_model_states", n) for n in names + names_below
    ):
        raise CheckpointError(
            f"'{path}' is a DeepSpeed checkpoint, which consists of pickles that can execute "
            "arbitrary code: if you trust it, convert it with DeepSpeed's zero_to_fp32.py "
            "--safe_serialization and load the resulting folder"
        )
    for name in sorted(names):
        if name.endswith(_PICKLES):
            _refuse_pickles(os.path.join(path, name))


# --- safetensors ----------------------------------------------------------------------------------


def _of_huggingface(path: str, prefix: str) -> str | None:
    """Return the file in a folder that has the tensors or their index, if there is one."""
    for name in (f"{prefix}.safetensors", f"{prefix}.safetensors.index.json"):
        if os.path.exists(os.path.join(path, name)):
            return name
    return None


def _open_huggingface(found: Checkpoint) -> None:
    first = _of_huggingface(found.path, MODEL) or ""

    def opened_file(name: str, kind: type[_File]) -> _File:
        path = os.path.join(found.path, name)
        if not os.path.exists(path):
            index = os.path.join(found.path, first)
            raise FileNotFoundError(
                f"'{index}' refers to '{name}', which is missing; copy all files of the model"
            )
        return kind(path)

    _note_model(found, _files_of(found, first, opened_file))


def _files_of(
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


def _note_model(found: Checkpoint, files: Mapping[str, SafetensorsFile]) -> None:
    found.model = _entries(files)
    notes = {alias: name for file in files.values() for alias, name in file.notes.items()}
    found.tied = {a: name for a, name in notes.items() if name in found.model}


def _entries(files: Mapping[str, SafetensorsFile]) -> dict[str, Readable]:
    return {name: entry for file in files.values() for name, entry in file.entries.items()}


# --- zshard checkpoints ---------------------------------------------------------------------------


def _open_zshard(found: Checkpoint, with_optimizer: bool) -> None:
    manifest = read_manifest(found.path)
    spread: InParts | None = None
    if manifest.whole:
        spread = of_argument("per_host").Spread(found.path, manifest, [found.path])
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
            return _entries(_files_of(found, name, functools.partial(open_own, found, manifest)))
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
