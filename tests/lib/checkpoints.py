"""Checkpoint files for tests of code that writes them: read without zshard's readers; and saves
that must fail and leave the files unchanged.

Other tools read these files, so the reference implementation of safetensors reads them here, and
checksums are recomputed with a separate table.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES, differences, train
from optim_states import rank, trained
from rows import all_rows
from safetensors import safe_open
from torch import Tensor, nn

import zshard
from zshard import _core
from zshard.checkpoint import manifest as manifests
from zshard.checkpoint import write
from zshard.checkpoint.manifest import BLOCK, Manifest
from zshard.checkpoint.script_state import decode as decode
from zshard.state.source import CHUNK as CHUNK


def tensors_in(folder: str | Path, stem: str = "model") -> dict[str, Tensor]:
    """Return all tensors of `<stem>*.safetensors`, by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob(f"{stem}*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def manifest_in(folder: str | Path) -> Manifest:
    """Return the manifest, after checking all that it states about the other files."""
    path = Path(folder, manifests.NAME)
    made = Manifest.parse(path.read_bytes(), str(path))
    others = {each.name for each in Path(folder).iterdir()} - {manifests.NAME}
    assert set(made.files) == others
    for name, record in made.files.items():
        data = Path(folder, name).read_bytes()
        assert len(data) == record.size, name
        sums = [_core.crc32c(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]
        assert tuple(sums) == record.checksums, name
    return made


def whole(folder: str | Path) -> dict[str, Tensor]:
    """Return the model's state dict, including tied names."""
    state = tensors_in(folder)
    tied = manifest_in(folder).tied
    assert not state.keys() & tied.keys()
    return state | {name: state[home] for name, home in tied.items()}


def states_in(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state by name, as in "state" of zshard.optim_state_dict()."""
    told, tensors = manifest_in(folder).optimizer, tensors_in(folder, "optimizer")
    assert told is not None
    listed = {f"{name}.{key}" for name, own in told["state"].items() for key in own["tensors"]}
    assert listed == set(tensors)
    return {
        name: {key: tensors[f"{name}.{key}"] for key in own["tensors"]} | own["values"]
        for name, own in told["state"].items()
    }


def check_files(folder: str | Path) -> list[str]:
    """Return the faults in the format of the safetensors files: the begin of data, its alignment,
    and the indices."""
    wrong = []
    for stem in ("model", "optimizer"):
        index = Path(folder, f"{stem}.safetensors.index.json")
        homes = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        for path in sorted(Path(folder).glob(f"{stem}*.safetensors")):
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            if (8 + length) % 4096 or header.pop("__metadata__")["format"] != "pt":
                wrong.append(f"{path.name}: data from byte {8 + length} on")
            sizes = [torch.empty((), dtype=_DTYPES[h["dtype"]]).itemsize for h in header.values()]
            if sizes != sorted(sizes, reverse=True):
                wrong.append(f"{path.name}: items of {sizes} bytes")
            wrong += [
                f"{name}: not in the index" for name in header if homes.get(name) != path.name
            ]
            for name in header:
                homes.pop(name, None)
        wrong += [f"{name}: in the index only" for name in homes]
    return wrong


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
_DTYPES |= {"F16": torch.float16, "BOOL": torch.bool, "U8": torch.uint8, "C64": torch.complex64}
_DTYPES |= {"I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}


def unlike(
    folder: str | Path, state: dict[str, Any], optimizer: dict[str, Any] | None
) -> list[str]:
    """Return what differs in a checkpoint from a state dict and from optim_state_dict(), or is
    malformed."""
    found = check_files(folder) + differences(whole(folder), state)
    if optimizer is None:
        return found + (["an optimizer"] if manifest_in(folder).optimizer is not None else [])
    saved = states_in(folder)
    for name in sorted(saved.keys() | optimizer["state"].keys()):
        ours, theirs = saved.get(name, {}), optimizer["state"].get(name, {})
        found += [f"{name}: {each}" for each in differences(ours, theirs)]
    told = manifest_in(folder).optimizer
    assert told is not None
    for ours, theirs in zip(told["groups"], optimizer["param_groups"], strict=True):
        if ours["params"] != theirs["params"] or ours["options"]["lr"] != theirs["lr"]:
            found.append(f"a group of {ours}")
    return found


def bit_by_bit(folder: str | Path) -> dict[str, bytes]:
    """Return all files, to compare."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def inside(folder: str | Path) -> list[str]:
    """Return the names in a folder, in order."""
    return sorted(path.name for path in Path(folder).iterdir())


def saved(folder: str | Path, model: nn.Module, optimizer: Any = None, **options: Any) -> list[str]:
    """Save a model and return what differs in the files from rank 0's state; `dtype` is one of
    zshard.save's options."""
    path = f"{folder}/x"
    named = None if optimizer is None else zshard.optim_state_dict(model, optimizer)
    dtype = options.get("dtype")
    state = {
        name: value.to(dtype) if dtype and value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    assert zshard.save(path, model, optimizer, overwrite=True, **options).path == path
    return unlike(path, state, named) if rank() == 0 else []


def finished(folder: str | Path) -> list[str]:
    """Return the paths of the finished checkpoints of numbered saves to a folder."""
    return [str(each.parent) for each in sorted(Path(folder).glob("step-*/zshard.json"))]


@contextlib.contextmanager
def small_chunks(size: int) -> Iterator[None]:
    """Context manager in which saves copy through a chunk of `size` bytes."""
    before, write.CHUNK = write.CHUNK, size
    try:
        yield
    finally:
        write.CHUNK = before


# --- failing saves --------------------------------------------------------------------------------

APART = ("full_shard", "c10d")
"""Each rank has a part even of a small model."""


def outcome(action):
    """Return (kind of the exception, its text) of `action`; None if it succeeds."""
    try:
        action()
    except Exception as error:
        return type(error), str(error)
    return None


def check_refused(folder, table):
    """Fail unless the call of each row, `call(folder, model, optimizer)`, raises that kind of error with
    that text, and changes no file; training and saving continue after them all. On ranks."""
    model, optimizer = trained("mlp", APART, "zshard.AdamW")
    zshard.save(folder / "old", model, optimizer)
    before = inside(folder), bit_by_bit(folder / "old")
    with all_rows() as row:
        for name, (call, kind, text) in table.items():
            with row(name):
                with pytest.raises(kind) as caught:
                    call(folder, model, optimizer)
                assert text in str(caught.value)
                assert rank() > 0 or before == (inside(folder), bit_by_bit(folder / "old"))
    train(model, CASES["mlp"], optimizer, rank(), 1)
    assert saved(folder, model, optimizer) == []
