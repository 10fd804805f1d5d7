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
    bytes_of,
    chunks,
    index_of,
    lay_out,
    parse_size,
    write_text,
)
from zshard.extras.averages.saved_averages import AVERAGE, SavedAverages, stem_of
from zshard.extras.per_host.collect import collect
from zshard.extras.per_host.parts import Spread

_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("float32", "fp32", "f32"),
        torch.bfloat16: ("bfloat16", "bf16"),
        torch.float16: ("float16", "fp16", "f16"),
        torch.float64: ("float64", "fp64", "f64"),
    }.items()
    for name in names
}
_COPIED = ("config.json", "generation_config.json")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ckpt` to the subparsers of `python -m zshard`; run() takes the parsed arguments."""
    ckpt = commands.add_parser(
        "ckpt", aliases=["checkpoint"], help="inspect, verify, export or collect a checkpoint"
    )
    words = ckpt.add_subparsers(required=True, metavar="command", dest="word")
    path_help = "a checkpoint, a checkpoint directory (its newest checkpoint is used), a "
    path_help += ".safetensors file, or a Hugging Face or torch.distributed.checkpoint folder"
    inspect = words.add_parser(
        "inspect", help="show tensors, step, world size, versions, optimizer"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    verify = words.add_parser(
        "verify", help="check every block against its checksum; exit status 1 if it is damaged"
    )
    export = words.add_parser(
        "export", help="write the model as one folder that from_pretrained() loads"
    )
    for each in (inspect, verify, export):
        each.add_argument("path", help=path_help)
    export.add_argument("out", help="the folder to create")
    export.add_argument(
        "--dtype", choices=_DTYPES, help="convert floating-point tensors (default: keep dtypes)"
    )
    export.add_argument(
        "--max-shard-size", default="5GB", help="maximum bytes of tensors per file (default: 5GB)"
    )
    gather = words.add_parser(
        "collect", help="make one folder of a checkpoint whose parts are on several hosts"
    )
    gather.add_argument(
        "folders",
        nargs="+",
        metavar="folder",
        help="where the parts are: copies of the hosts' folders; or under torchrun on the hosts, "
        "the one path that all of them have, whose parts are read over the wire",
    )
    gather.add_argument("out", help="the folder to create; under torchrun on the first rank's host")
    ckpt.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a command and return its exit status: 1 if the checkpoint is invalid or unreadable."""
    try:
        if args.word == "inspect":
            return _inspect(args.path, args.json)
        if args.word == "verify":
            return _verify(args.path)
        if args.word == "collect":
            line = collect(args.folders, args.out)
            if line is not None:
                print(line)
            return 0
        return _export(args.path, args.out, _DTYPES.get(args.dtype), args.max_shard_size)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# --- inspect --------------------------------------------------------------------------------------


def _inspect(path: str, as_json: bool) -> int:
    with Checkpoint.opened(path, with_optimizer=True) as found:
        facts = _facts(found)
    print(json.dumps(facts, indent=1, default=str) if as_json else _text(facts))
    return 0


def _facts(found: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": found.path, "step": found.step}
    if found.manifest is not None:
        manifest = found.manifest
        facts |= {"id": manifest.id, "world": manifest.world, "software": dict(manifest.software)}
        if isinstance(found.spread, Spread):
            here = found.spread.here
            facts["parts"] = {
                name: {"host": part.host, "bytes": part.size, "here": name in here}
                for name, part in found.spread.parts.items()
            }
    facts["model"] = {name: _of(entry) for name, entry in found.model.items()}
    facts["tied"] = dict(found.tied)
    averages = SavedAverages.of(found)
    for decay, entries in averages.by_decay.items() if averages is not None else ():
        facts[stem_of(decay)] = {name: _of(entry) for name, entry in entries.items()}
    if found.optimizer is not None:
        told = found.optimizer
        tensors = {
            f"{name}.{key}": _of(e) for name, own in told.tensors.items() for key, e in own.items()
        }
        facts["optimizer"] = {"class": told.kind, "groups": told.groups, "tensors": tensors}
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


# --- verify ---------------------------------------------------------------------------------------


def _verify(path: str) -> int:
    with Checkpoint.opened(path, with_optimizer=True) as found:
        if found.manifest is None:
            raise CheckpointError(
                f"cannot verify '{found.path}': it has no {NAME}, so no checksums"
            )
        count = _check_all(found)
        print(f"'{found.path}' is intact: {count:,} bytes in {len(found.files)} files")
    return 0


def _check_all(found: Checkpoint) -> int:
    """Check all files of the manifest and return their bytes. Raise CheckpointError for damage."""
    spread = found.spread
    if not isinstance(spread, Spread):
        return found.verify()
    spread.blocks().check()
    if not spread.is_complete():
        raise CheckpointError(f"'{found.path}' is incomplete: {spread.missing()}")
    return sum(spread.manifest.files[name].size for name in spread.here)


# --- export ---------------------------------------------------------------------------------------


def _export(path: str, out: str, dtype: torch.dtype | None, limit: str) -> int:
    size = parse_size("max_shard_size", limit, base=1000)
    if os.path.lexists(out):
        raise FileExistsError(f"'{out}' already exists: choose another folder")
    with Checkpoint.opened(path) as found:
        if not found.model:
            raise CheckpointError(f"'{found.path}' contains no model tensors")
        if found.manifest is not None:
            _check_all(found)
        for entry in found.model.values():
            entry.check()
        items = [_item(name, entry, dtype) for name, entry in found.model.items()]
        staging = Staging(Target.of(out, None), secrets.token_hex(16), overwrite=False)
        try:
            staging.open()
            names = _write_all(staging.path, items, size, found)
            staging.commit()
        except BaseException:
            staging.discard()
            raise
        finally:
            staging.close()
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    print(f"wrote {len(items)} tensors to '{out}' ({where})")
    return 0


def _item(name: str, entry: Readable, dtype: torch.dtype | None) -> Entry:
    cast = dtype is not None and entry.dtype.is_floating_point
    return Entry(name, entry.shape, dtype if cast and dtype is not None else entry.dtype)


def _write_all(folder: str, entries: list[Entry], limit: int, found: Checkpoint) -> list[str]:
    """Write everything; return the names of the files of tensors."""
    files = lay_out(entries, "model", limit, found.tied)
    for file in files:
        with api.File.create(os.path.join(folder, file.name), file.size) as opened_file:
            opened_file.write([(0, file.header)], BLOCK)
            for item, offset in file.places:
                _write(opened_file, item, offset, found.model[item.name])
            opened_file.sync()
    if len(files) > 1:
        write_text(os.path.join(folder, "model.safetensors.index.json"), index_of(files))
    for name in _COPIED:
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with missing, _small_file(found, name) as config:
            write_text(os.path.join(folder, name), bytes(config.bytes_of(config.size)))
    return [file.name for file in files]


def _small_file(found: Checkpoint, name: str) -> OpenFile:
    """Open a file of the checkpoint. Raise FileNotFoundError if it has none of that name, and
    NotADirectoryError if it is a file itself."""
    if found.spread is not None and name in found.spread.manifest.whole:
        return found.spread.open(name, OpenFile)
    return OpenFile(os.path.join(found.path, name))


def _write(file: api.File, item: Entry, offset: int, entry: Readable) -> None:
    """Write one tensor, a chunk at a time."""
    size = entry.dtype.itemsize
    larger = max(item.dtype, entry.dtype, key=lambda dtype: dtype.itemsize)
    for begin, end in chunks(math.prod(item.shape), larger):
        values = torch.empty(end - begin, dtype=entry.dtype)
        entry.read_into(bytes_of(values), begin * size)
        place = offset + begin * item.dtype.itemsize
        cast = values.to(item.dtype)  # outlives its bytes
        file.write([(place, bytes_of(cast))], BLOCK)
