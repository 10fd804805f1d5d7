"""python -m zshard ckpt: inspect a checkpoint, verify it, export it as a Hugging Face folder, or
collect its parts from several hosts.

One process handles what any number of ranks have written, and needs no model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

import torch

from zshard import api
from zshard.api import (
    BLOCK,
    NAME,
    Checkpoint,
    CheckpointError,
    Entry,
    OpenFile,
    Readable,
    Staging,
    Target,
    advance,
    bar,
    bytes_of,
    chunks,
    index_of,
    lay_out,
    parse_size,
    with_dtype,
    write_text,
)
from zshard.extras.averages.saved_averages import AVERAGE, SavedAverages, stem_of
from zshard.extras.per_host.collect import collect
from zshard.extras.per_host.parts import Spread

_DTYPES = {
    **dict.fromkeys(("float32", "fp32", "f32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "f16"), torch.float16),
    **dict.fromkeys(("float64", "fp64", "f64"), torch.float64),
}
_COPIED = ("config.json", "generation_config.json")
_COMMANDS = {
    "inspect": "show tensors, step, world size, versions, optimizer",
    "verify": "check every block against its checksum; exit status 1 if it is damaged",
    "export": "write the model as one folder that from_pretrained() loads",
    "collect": "bring together a checkpoint whose parts are on several hosts",
}
_PATH = (
    "a checkpoint, a checkpoint directory (its newest checkpoint is used), a .safetensors file, or "
    "a Hugging Face or torch.distributed.checkpoint folder"
)
_FOLDERS = (
    "copies of the hosts' folders, and the folder to create; or under torchrun on the hosts, the "
    "one path where each has its parts, and gets those that it lacks"
)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt` to the subparsers of `python -m zshard`; run() takes the parsed arguments."""
    what = "inspect, verify, export or collect a checkpoint"
    ckpt = commands.add_parser("ckpt", aliases=["checkpoint"], help=what)
    words = ckpt.add_subparsers(required=True, metavar="command", dest="word")
    inspect, verify, export, gather = (
        words.add_parser(name, help=what) for name, what in _COMMANDS.items()
    )
    for each in (inspect, verify, export):
        each.add_argument("path", help=_PATH)
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    export.add_argument("out", help="the folder to create")
    dtype_help = "convert floating-point tensors (default: keep dtypes)"
    export.add_argument("--dtype", choices=_DTYPES, help=dtype_help)
    size_help = "maximum bytes of tensors per file (default: 5GB)"
    export.add_argument("--max-shard-size", default="5GB", help=size_help)
    gather.add_argument("paths", nargs="+", metavar="folder", help=_FOLDERS)
    ckpt.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a command and return its exit status: 1 if the checkpoint is invalid or unreadable."""
    try:
        if args.word == "inspect":
            with Checkpoint.opened(args.path, with_optimizer=True) as checkpoint:
                facts = _facts(checkpoint)
            print(json.dumps(facts, indent=1, default=str) if args.json else _text(facts))
            return 0
        if args.word == "verify":
            with Checkpoint.opened(args.path, with_optimizer=True) as checkpoint:
                path = checkpoint.path
                if checkpoint.manifest is None:
                    raise CheckpointError(f"cannot verify '{path}': it has no {NAME}")
                size, count = _check_all(checkpoint), len(checkpoint.files)
                print(f"'{path}' is intact: {size:,} bytes in {count} files")
            return 0
        if args.word == "collect":
            line = collect(args.paths)
            if line is not None:
                print(line)
            return 0
        return _export(args.path, args.out, _DTYPES.get(args.dtype), args.max_shard_size)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# --- inspect --------------------------------------------------------------------------------------


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": checkpoint.path, "step": checkpoint.step}
    if checkpoint.manifest is not None:
        manifest = checkpoint.manifest
        facts |= {"id": manifest.id, "world": manifest.world, "software": dict(manifest.software)}
        if isinstance(checkpoint.spread, Spread):
            here = checkpoint.spread.here
            facts["parts"] = {
                name: {"host": part.host, "bytes": part.size, "here": name in here}
                for name, part in checkpoint.spread.parts.items()
            }
    facts["model"] = {name: _of(entry) for name, entry in checkpoint.model.items()}
    facts["tied"] = dict(checkpoint.tied)
    averages = SavedAverages.of(checkpoint)
    for decay, entries in averages.by_decay.items() if averages is not None else ():
        facts[stem_of(decay)] = {name: _of(entry) for name, entry in entries.items()}
    if checkpoint.optimizer is not None:
        state = checkpoint.optimizer
        tensors = {
            f"{n}.{key}": _of(e) for n, each in state.tensors.items() for key, e in each.items()
        }
        facts["optimizer"] = {"class": state.kind, "groups": state.groups, "tensors": tensors}
    return facts


def _of(entry: Readable) -> dict[str, Any]:
    size = math.prod(entry.shape) * entry.dtype.itemsize
    dtype = str(entry.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(entry.shape), "bytes": size, "files": entry.files}


def _text(facts: Mapping[str, Any]) -> str:
    lines = [facts["path"]]
    if facts["step"] is not None:
        lines.append(f"step {facts['step']}")
    if "world" in facts:
        versions = ", ".join(f"{name} {version}" for name, version in facts["software"].items())
        lines.append(f"world size {facts['world']}; {versions}; id {facts['id']}")
    else:
        lines.append(f"no {NAME}: not saved by zshard, no checksums")
    for name, part in facts.get("parts", {}).items():
        where = "here" if part["here"] else "not in this folder"
        lines.append(f"{name} of host '{part['host']}', {part['bytes']:,} bytes: {where}")
    lines += ["", *_table("model", facts["model"])]
    lines += [f"{alias} is tied to {name}" for alias, name in facts["tied"].items()]
    for stem in (key for key in facts if key.startswith(AVERAGE)):
        lines += ["", *_table(stem, facts[stem])]
    if "optimizer" in facts:
        optimizer = facts["optimizer"]
        title = f"optimizer {optimizer['class'] or ''}".strip()
        lines += ["", *_table(title, optimizer["tensors"])]
        for i, group in enumerate(optimizer["groups"]):
            options = {key: value for key, value in group.items() if key != "params"}
            lines.append(f"group {i}: {len(group['params'])} parameters, {options}")
    return "\n".join(lines)


def _table(title: str, tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    total = sum(each["bytes"] for each in tensors.values())
    rows = [
        (name, t["dtype"], "x".join(map(str, t["shape"])) or "()", f"{t['bytes']:,}", *t["files"])
        for name, t in tensors.items()
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [f"{title}: {len(tensors)} tensors, {total:,} bytes"] + [
        f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {' '.join(row[4:])}"
        for row in rows
    ]


# --- verify, export -------------------------------------------------------------------------------


def _check_all(checkpoint: Checkpoint) -> int:
    """Check all files of the manifest and return their bytes. Raise CheckpointError for damage."""
    spread, manifest = checkpoint.spread, checkpoint.manifest
    assert manifest is not None, "the caller checks this"
    here = spread.here if isinstance(spread, Spread) else manifest.files
    size = sum(manifest.files[name].size for name in here)
    with bar("verifying", lambda: size, show=True):
        if not isinstance(spread, Spread):
            return checkpoint.verify()
        spread.check()
        spread.blocks().check()
    return size


def _export(path: str, out: str, dtype: torch.dtype | None, limit: str) -> int:
    size = parse_size("max_shard_size", limit, base=1000)
    if os.path.lexists(out):
        raise FileExistsError(f"'{out}' already exists: choose another folder")
    with Checkpoint.opened(path) as checkpoint:
        if not checkpoint.model:
            raise CheckpointError(f"'{checkpoint.path}' contains no model tensors")
        if checkpoint.manifest is not None:
            _check_all(checkpoint)
        for entry in checkpoint.model.values():
            entry.check()
        items = []
        for name, entry in checkpoint.model.items():
            cast = dtype if entry.dtype.is_floating_point else None
            items.append(Entry(name, entry.shape, cast or entry.dtype))
        staging = Staging(Target.of(out, None), secrets.token_hex(16), overwrite=False)
        try:
            staging.open()
            names = _write_all(staging.path, items, size, checkpoint, dtype)
            staging.commit()
        except BaseException:
            staging.discard()
            raise
        finally:
            staging.close()
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    print(f"wrote {len(items)} tensors to '{out}' ({where})")
    if not os.path.exists(os.path.join(out, "config.json")):
        print("there is no config.json: for from_pretrained(), copy the model's to the folder")
    return 0


def _write_all(
    folder: str,
    items: list[Entry],
    limit: int,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
) -> list[str]:
    files = lay_out(items, "model", limit, checkpoint.tied)
    with bar("exporting", lambda: sum(file.size for file in files), show=True):
        for file in files:
            with api.File.create(os.path.join(folder, file.name), file.size) as opened_file:
                opened_file.write([(0, file.header)], BLOCK)
                for item, offset in file.places:
                    _write(opened_file, item, offset, checkpoint.model[item.name])
                opened_file.sync()
    if len(files) > 1:
        write_text(os.path.join(folder, "model.safetensors.index.json"), index_of(files))
    spread = checkpoint.spread
    for name in _COPIED:  # the checkpoint may have none, or be a file itself
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            is_in_parts = spread is not None and name in checkpoint.manifest.whole  # type: ignore[union-attr]
            path = os.path.join(checkpoint.path, name)
            with spread.open(name, OpenFile) if is_in_parts else OpenFile(path) as config:  # type: ignore[union-attr]
                text = bytes(config.bytes_of(config.size))
            if dtype is not None and name == "config.json":
                with contextlib.suppress(TypeError, ValueError):  # not a model's: copied as it is
                    text = with_dtype(json.loads(text), dtype)
            write_text(os.path.join(folder, name), text)
    return [file.name for file in files]


def _write(file: api.File, item: Entry, offset: int, entry: Readable) -> None:
    size = entry.dtype.itemsize
    larger = max(item.dtype, entry.dtype, key=lambda dtype: dtype.itemsize)
    for begin, end in chunks(math.prod(item.shape), larger):
        values = torch.empty(end - begin, dtype=entry.dtype)
        entry.read_into(bytes_of(values), begin * size)
        place = offset + begin * item.dtype.itemsize
        cast = values.to(item.dtype)  # outlives its bytes
        file.write([(place, bytes_of(cast))], BLOCK)
        advance(cast.nbytes)
