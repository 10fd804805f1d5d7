"""Opening a checkpoint, of whatever kind it is.

The one idea: what is opened has been checked as far as it says something of itself: sizes, headers,
indices, manifest. No value has been read. What would have to be run to be read is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from zshard._checkpoint import dcp, hf_shards
from zshard._checkpoint.checkpoint import Checkpoint, OptimizerState, Readable, decode
from zshard._checkpoint.folder import finished, name_of, path_of
from zshard._checkpoint.manifest import LIMIT, NAME, CheckpointError, Manifest, parse
from zshard._checkpoint.safetensors import (
    HEADER_LIMIT,
    File,
    SafetensorsFile,
    check_homes,
    parse_index,
)

MODEL, OPTIMIZER = "model", "optimizer"
"""What names of files begin with."""


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], with_optimizer: bool = False) -> Iterator[Checkpoint]:
    """Context in which the checkpoint at `path` is open.

    path: a .safetensors file, a folder, or a directory of numbered checkpoints, of which the newest
        finished one is taken.
    with_optimizer: open the optimizer's files, too.

    Raises OSError for what cannot be opened, CheckpointError for what is not valid; both name it.
    """
    found = Checkpoint(path_of(path))
    try:
        _open(found, with_optimizer)
        yield found
    finally:
        found.close()


def _open(found: Checkpoint, with_optimizer: bool) -> None:
    if not os.path.isdir(found.path):
        _refuse_pickles(found.path)
        _add_model(found, {os.path.basename(found.path): found.path})
    elif os.path.lexists(os.path.join(found.path, NAME)):
        _open_zshard(found, with_optimizer)
    elif _of_huggingface(found.path, MODEL) is not None:
        _refuse_staging(found.path)
        _open_huggingface(found)
    elif os.path.lexists(os.path.join(found.path, dcp.METADATA)):
        dcp.open_into(found, with_optimizer)
    elif hf_shards.shards_in(found.path):
        hf_shards.open_into(found)
    else:
        _open_newest(found, with_optimizer)


# --- numbered ones, and what is none --------------------------------------------------------------


def _open_newest(found: Checkpoint, with_optimizer: bool) -> None:
    directory, steps = found.path, finished(found.path)
    if not steps:
        _point_inside(found.path)
        _refuse_pickles(found.path)
        raise FileNotFoundError(
            f"the folder '{found.path}' has no finished checkpoint: no {NAME}, model.safetensors, "
            "model.safetensors.index.json or numbered checkpoints"
        )
    found.path = os.path.join(directory, name_of(steps[-1]))
    try:
        _open_zshard(found, with_optimizer)
    except (OSError, CheckpointError) as error:
        if finished(directory)[-1:] != steps[-1:]:  # another job goes on saving and deleting there
            found.close()
            found.path, found.files = directory, {}
            _open_newest(found, with_optimizer)
        elif isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}{older_than(found.path)}") from None
        else:
            raise


def _point_inside(path: str) -> None:
    """FileNotFoundError for a folder without tensors in which there are folders that have some, as
    trainers make: which one is meant nobody can know."""
    marks = (NAME, dcp.METADATA, f"{MODEL}.safetensors", f"{MODEL}.safetensors.index.json")
    with os.scandir(path) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir())
    inside = [f for f in folders if any(os.path.exists(os.path.join(path, f, m)) for m in marks)]
    if inside:
        names = ", ".join(f"'{name}'" for name in inside[:5]) + (", ..." if inside[5:] else "")
        raise FileNotFoundError(
            f"the folder '{path}' is no checkpoint, but {names} in it may be: give the path of one"
        )


def older_than(path: str) -> str:
    """Words on the finished checkpoint before the numbered one at `path`, or none."""
    parent, name = os.path.split(os.path.abspath(path))
    names = [name_of(step) for step in finished(parent)]
    before = names[: names.index(name)] if name in names else []
    return f"; '{os.path.join(parent, before[-1])}' is an older one" if before else ""


def _refuse_staging(path: str) -> None:
    """A save that has not come to its end leaves files of full length, partly of zeros."""
    name = os.path.basename(os.path.abspath(path))
    if re.fullmatch(r"\..*\.[0-9a-f]{32}\.tmp", name):
        raise CheckpointError(f"'{path}' is what an interrupted save has left: no checkpoint")


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def _refuse_pickles(path: str) -> None:
    """CheckpointError for what programs have to be run for to be read."""
    if not os.path.isdir(path):
        if path.endswith(_PICKLES):
            raise CheckpointError(
                f"'{path}' is a pickle by its name, which can run any program when it is read: "
                "load it with torch.load(weights_only=True), and write it with "
                "safetensors.torch.save_file()"
            )
        return
    names = os.listdir(path)
    inner = [name for name in names if name.startswith("global_step")]
    below = os.listdir(os.path.join(path, inner[0])) if _is_folder(path, inner) else []
    if any(re.match(r"(bf16_)?zero_pp_rank_|mp_rank_\d+_model_states", n) for n in names + below):
        raise CheckpointError(
            f"'{path}' is a checkpoint of DeepSpeed: pickles, which can run any program when they "
            "are read. Where you trust it, have DeepSpeed's zero_to_fp32.py write it as "
            "safetensors (--safe_serialization), and load that folder"
        )
    for name in sorted(names):
        if name.endswith(_PICKLES):
            _refuse_pickles(os.path.join(path, name))


def _is_folder(path: str, names: list[str]) -> bool:
    return bool(names) and os.path.isdir(os.path.join(path, names[0]))


# --- safetensors ----------------------------------------------------------------------------------


def _of_huggingface(path: str, prefix: str) -> str | None:
    """The file of a folder that has tensors or their index, if there is one."""
    for name in (f"{prefix}.safetensors", f"{prefix}.safetensors.index.json"):
        if os.path.exists(os.path.join(path, name)):
            return name
    return None


def _open_huggingface(found: Checkpoint) -> None:
    name = _of_huggingface(found.path, MODEL) or ""
    path = os.path.join(found.path, name)
    if name.endswith(".safetensors"):
        _add_model(found, {name: path})
        return
    with File(path) as file:
        homes = parse_index(file.bytes_of(min(file.size, HEADER_LIMIT + 1)), path)
    paths = {}
    for file_name in dict.fromkeys(homes.values()):
        paths[file_name] = os.path.join(found.path, file_name)
        if not os.path.exists(paths[file_name]):
            raise FileNotFoundError(f"'{path}' names '{file_name}', which is not there")
    files = _add_model(found, paths)
    check_homes(homes, files, path)


def _add_model(found: Checkpoint, paths: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    files = {}
    for name, path in paths.items():
        found.files[name] = files[name] = SafetensorsFile(path)
    found.model = {name: entry for file in files.values() for name, entry in file.entries.items()}
    notes = {alias: name for file in files.values() for alias, name in file.notes.items()}
    found.tied = {a: name for a, name in notes.items() if name in found.model}
    return files


# --- zshard's own ---------------------------------------------------------------------------------


def _open_zshard(found: Checkpoint, with_optimizer: bool) -> None:
    found.manifest = read_manifest(found.path)
    found.step = found.manifest.step
    found.model = _add_own(found, found.manifest, MODEL)
    found.tied = dict(found.manifest.tied)
    where = os.path.join(found.path, NAME)
    told = found.manifest.model
    found.others = {name: decode(each, where) for name, each in _dict(told, "extra_state").items()}
    found.versions = decode(_dict(told, "versions"), where)
    if not all(type(version) is int for version in found.versions.values()):
        raise CheckpointError(f"'{where}' has versions of modules that are no numbers")
    if with_optimizer and found.manifest.optimizer is not None:
        tensors = _add_own(found, found.manifest, OPTIMIZER)
        found.optimizer = _optimizer_of(found.manifest.optimizer, tensors, where)


def _dict(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = told.get(name, {})
    if not isinstance(value, dict):
        raise CheckpointError(f"the manifest has a {type(value).__name__} as {name}, no object")
    return value


def read_manifest(path: str) -> Manifest:
    """That of the checkpoint at `path`."""
    where = os.path.join(path, NAME)
    with File(where, follow=False) as file:
        return parse(bytes(file.bytes_of(min(file.size, LIMIT + 1))), where)


def _add_own(found: Checkpoint, manifest: Manifest, prefix: str) -> dict[str, Readable]:
    """Opens the files of the model or the optimizer, by what the manifest names and nothing else:
    other files in the folder are of no save, or of another one."""
    one, index = f"{prefix}.safetensors", f"{prefix}.safetensors.index.json"
    homes = None
    if one in manifest.files:
        names = [one]
    elif index in manifest.files:
        file = found.files[index] = _own(found, manifest, index, File)
        homes = parse_index(file.bytes_of(min(file.size, HEADER_LIMIT + 1)), file.path)
        names = list(dict.fromkeys(homes.values()))
    elif prefix == OPTIMIZER:
        return {}  # one without state
    else:
        raise CheckpointError(f"'{os.path.join(found.path, NAME)}' names no {one} and no {index}")
    files = {}
    for name in names:
        found.files[name] = files[name] = _own(found, manifest, name, SafetensorsFile)
    if homes is not None:
        check_homes(homes, files, os.path.join(found.path, index))
    return {name: entry for file in files.values() for name, entry in file.entries.items()}


def _own(found: Checkpoint, manifest: Manifest, name: str, kind: Any) -> Any:
    """Opens a file of the manifest as a `kind` of File; it has to have the size that it had."""
    path = os.path.join(found.path, name)
    if name not in manifest.files:
        raise CheckpointError(f"'{path}' is named by an index, and not by {NAME}")
    if not os.path.lexists(path):
        raise CheckpointError(f"'{path}' is missing; the checkpoint was saved with it")
    facts, saved = os.lstat(path), manifest.files[name].size
    if not stat.S_ISREG(facts.st_mode):
        raise CheckpointError(f"'{path}' is a link or no regular file; it was saved as one")
    if facts.st_size != saved:
        raise CheckpointError(f"'{path}' has {facts.st_size} bytes; it was saved with {saved}")
    return kind(path, follow=False)


def _optimizer_of(
    told: Mapping[str, Any], tensors: Mapping[str, Readable], where: str
) -> OptimizerState:
    """What a manifest says of the optimizer; see outline.py."""
    left = dict(tensors)
    state: dict[str, dict[str, Readable]] = {}
    values: dict[str, dict[str, Any]] = {}
    try:
        groups = [
            {**_dict_of(decode(group["options"], where)), "params": _names(group["params"])}
            for group in told["groups"]
        ]
        for name, own in told["state"].items():
            state[name] = {key: left.pop(f"{name}.{key}") for key in _names(own["tensors"])}
            values[name] = _dict_of(decode(own["values"], where))
        kind = _name(told["class"])
    except KeyError as error:
        raise CheckpointError(
            f"'{where}' and the optimizer's files do not fit: one of them lacks {error}"
        ) from None
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"'{where}' has no valid optimizer: {error}") from None
    if left:
        raise CheckpointError(f"'{where}' does not know the optimizer's tensor '{min(left)}'")
    return OptimizerState(kind, groups, state, values)


def _dict_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is no dict")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no name")
    return value


def _names(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return [_name(each) for each in value]
