"""zshard.json: the files of a checkpoint, their sizes and their checksums.

It is written when all other files are synced, and before the folder is renamed into
place. So a folder with a valid manifest is finished, and a file that does not match it has been
damaged since. CRC-32C checksums of 4 MiB blocks cover every byte of every file, and one checksum
covers the manifest itself.

    {"crc32c": "89abcdef", "checkpoint": {"format": "zshard", "version": 1, "id": ..., ...}}

The checksum covers the object under "checkpoint", as json.dumps() writes it with sorted keys and
without spaces: reformatting the text does no damage.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from zshard import _core
from zshard._errors import CheckpointError

NAME = "zshard.json"
BLOCK = 2**22  # bytes per checksum
VERSION = 1
LIMIT = 2**30  # bytes of a manifest

_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint."""

    size: int  # bytes
    checksums: tuple[int, ...]  # CRC-32C of each BLOCK; the last block may be shorter


@dataclass(frozen=True)
class Manifest:
    """The content of zshard.json."""

    id: str  # 32 hexadecimal digits, unique to a save
    step: int | None
    world: int  # ranks that wrote it
    files: Mapping[str, FileRecord]  # all files but the manifest
    tied: Mapping[str, str] = field(default_factory=dict)  # alias: name in a file
    model: Mapping[str, Any] = field(default_factory=dict)  # {"extra_state": {name: encoded value}}
    optimizer: Mapping[str, Any] | None = None  # {"class", "groups", "state"}: see contents.py
    extra: Sequence[Any] = ()  # encoded, by rank; only one if all are equal
    software: Mapping[str, str] = field(default_factory=dict)  # names and versions
    finite: bool = True  # whether no parameter is NaN or infinite

    def extra_of(self, rank: int) -> Any:
        """Return what `rank` saved, or rank 0 if there was no such rank; encoded."""
        if not self.extra:
            return {}
        return self.extra[rank if rank < len(self.extra) else 0]


def dump(manifest: Manifest) -> bytes:
    """Return the text of zshard.json."""
    files = {
        name: {"size": record.size, "crc32c": "".join(f"{crc:08x}" for crc in record.checksums)}
        for name, record in manifest.files.items()
    }
    body = {each.name: getattr(manifest, each.name) for each in fields(manifest)}
    body |= {"format": "zshard", "version": VERSION, "block": BLOCK, "files": files}
    body["extra"] = list(manifest.extra)
    whole = {"crc32c": _checksum(body), "checkpoint": body}
    return json.dumps(whole, indent=1, allow_nan=False).encode()


def parse(text: bytes, path: str) -> Manifest:
    """Return the Manifest that dump() made into `text`; messages refer to `path`. Raise
    CheckpointError for any other text."""
    whole = object_of(text, f"'{path}'")
    body = whole.get("checkpoint")
    if not isinstance(body, dict) or body.get("format") != "zshard":
        raise CheckpointError(f"'{path}' is not the manifest of a zshard checkpoint")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"'{path}' has format version {str(body.get('version'))[:20]}, but this zshard reads "
            f"version {VERSION}: upgrade zshard"
        )
    if whole.get("crc32c") != _checksum(body):
        raise CheckpointError(f"'{path}' is damaged: its checksum does not match its content")
    try:
        return _manifest_of(body)
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' is not a valid manifest: {error!r}") from None


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{_core.crc32c(text.encode()):08x}"


def object_of(text: bytes | bytearray, what: str, limit: int = LIMIT) -> dict[str, Any]:
    """Parse a JSON object: UTF-8, at most `limit` bytes, no duplicate keys, no NaN or infinity.
    Raise CheckpointError, which names `what`, for anything else."""
    if len(text) > limit:
        raise CheckpointError(f"{what} is longer than {limit} bytes")
    try:
        whole = json.loads(
            str(text, "utf-8"),
            object_pairs_hook=_unique,
            parse_float=_number,
            parse_constant=_number,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: {error}") from None
    if not isinstance(whole, dict):
        raise CheckpointError(f"{what} is damaged: expected a JSON object")
    return whole


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not a valid JSON number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return made


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    if body["block"] != BLOCK:
        raise ValueError(f"unsupported block size {body['block']!r}")
    step = body["step"]
    made = Manifest(
        id=body["id"],
        step=None if step is None else _count(step),
        world=_count(body["world"]),
        files={_plain(name): _record_of(name, told) for name, told in body["files"].items()},
        tied=_strings(body["tied"]),
        model=_dict(body["model"]),
        optimizer=None if body["optimizer"] is None else _dict(body["optimizer"]),
        extra=tuple(body["extra"]),
        software=_strings(body["software"]),
        finite=body["finite"],
    )
    if type(made.finite) is not bool:
        raise TypeError(f"finite must be a boolean, got {made.finite!r:.40}")
    if not _HEX.fullmatch(made.id):
        raise ValueError(f"invalid id {made.id!r:.40}")
    if len(made.extra) not in (0, 1, made.world):
        raise ValueError(f"extra has {len(made.extra)} entries for {made.world} ranks")
    return made


def _record_of(name: str, told: Mapping[str, Any]) -> FileRecord:
    size, text = _count(told["size"]), told["crc32c"]
    if len(text) != 8 * -(-size // BLOCK):
        raise ValueError(
            f"wrong number of checksums for '{name:.80}' ({size} bytes): {len(text) // 8}"
        )
    return FileRecord(size, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


def _plain(name: str) -> str:
    """Check that a file name does not lead out of the folder."""
    if not name or name in (".", "..", NAME) or set(name) & set("/\\\0") or len(name) > 255:
        raise ValueError(f"{name!r:.80} is not the name of a file in the same folder")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a non-negative integer, got {value!r:.40}")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.40}")
    return value


def _strings(value: Any) -> dict[str, str]:
    if not all(isinstance(each, str) for each in _dict(value).values()):
        raise TypeError("expected an object of strings")
    return dict(value)
