"""Open what others wrote: safetensors files, Hugging Face folders, and those of
torch.distributed.checkpoint; explain what is no checkpoint.

    chunked.py      tensors in chunks; safetensors files of torch.distributed.checkpoint
    torch_file.py   pickles and torch.save() files, which are untrusted
    dcp.py          folders of torch.distributed.checkpoint
    other_states.py what they have of an optimizer
"""

from __future__ import annotations

import os
import re
from typing import NoReturn, TypeVar

from zshard.api import NAME, Checkpoint, CheckpointError, OpenFile, SafetensorsFile
from zshard.extras.readers import chunked, dcp

_FIRST = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_DEEPSPEED = r"(bf16_)?zero_pp_rank_|mp_rank_\d+_model_states"
_File = TypeVar("_File", bound=OpenFile)


def open_into(checkpoint: Checkpoint, with_optimizer: bool) -> bool:
    """Open what is at `checkpoint.path`, unless it is a folder of no known format; return whether
    it is open."""
    path = checkpoint.path
    if not os.path.isdir(path):
        _refuse_pickles(path)
        checkpoint.files[os.path.basename(path)] = file = SafetensorsFile(path)
        _add_tensors(checkpoint, {"": file})
        return True
    first = next((name for name in _FIRST if os.path.exists(os.path.join(path, name))), None)
    if first is not None:
        _open_huggingface(checkpoint, first)
    elif os.path.lexists(os.path.join(path, dcp.METADATA)):
        dcp.open_into(checkpoint, with_optimizer)
    elif names := chunked.shards_in(path):
        chunked.open_shards_into(checkpoint, names)
    else:
        return False
    return True


def _open_huggingface(checkpoint: Checkpoint, first: str) -> None:
    """first: the file that has the tensors or their index."""
    folder = os.path.basename(os.path.abspath(checkpoint.path))
    if re.fullmatch(r"\..*\.[0-9a-f]{32}\.tmp", folder):
        # The files have their full length, but zeros where nothing was written.
        raise CheckpointError(f"an interrupted save left '{checkpoint.path}': load another one")

    def opened_file(name: str, kind: type[_File]) -> _File:
        path = os.path.join(checkpoint.path, name)
        if not os.path.exists(path):
            index = os.path.join(checkpoint.path, first)
            raise FileNotFoundError(
                f"'{index}' refers to '{name}', which is missing: copy that file as well"
            )
        return kind(path)

    _add_tensors(checkpoint, checkpoint.open_listed(first, opened_file))


def _add_tensors(checkpoint: Checkpoint, files: dict[str, SafetensorsFile]) -> None:
    model = {name: entry for file in files.values() for name, entry in file.entries.items()}
    checkpoint.model = model
    checkpoint.tied = {a: n for f in files.values() for a, n in f.notes.items() if n in model}


# --- what is no checkpoint ------------------------------------------------------------------------


def refuse(path: str) -> NoReturn:
    """Raise CheckpointError or FileNotFoundError for a folder without a checkpoint."""
    # Trainers create subfolders with one each: the intended one is unknown.
    marks = (NAME, dcp.METADATA, *_FIRST)
    with os.scandir(path) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir())
    inside = [f for f in folders if any(os.path.exists(os.path.join(path, f, m)) for m in marks)]
    if inside:
        names = ", ".join(f"'{name}'" for name in inside[:5]) + (", ..." if inside[5:] else "")
        raise FileNotFoundError(f"'{path}' is not a checkpoint, but contains {names}: pass one")
    _refuse_pickles(path)
    files = f"{NAME}, {', '.join(_FIRST)} or numbered checkpoints"
    raise FileNotFoundError(f"no finished checkpoint in '{path}': it has no {files}")


def _refuse_pickles(path: str) -> None:
    if not os.path.isdir(path):
        if path.endswith(_PICKLES):
            raise CheckpointError(
                f"'{path}' looks like a pickle, which can execute arbitrary code: convert it with "
                "torch.load(weights_only=True) and safetensors.torch.save_file()"
            )
        return
    names = os.listdir(path)
    inner = next((name for name in names if name.startswith("global_step")), "")
    below = os.path.join(path, inner)
    names_below = os.listdir(below) if inner and os.path.isdir(below) else []
    if any(map(re.compile(_DEEPSPEED).match, names + names_below)):
        raise CheckpointError(
            f"'{path}' is a DeepSpeed checkpoint, whose pickles can execute any code: convert "
            "it with DeepSpeed's zero_to_fp32.py --safe_serialization"
        )
    for name in sorted(names):
        if name.endswith(_PICKLES):
            _refuse_pickles(os.path.join(path, name))
