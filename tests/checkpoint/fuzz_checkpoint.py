"""A fuzz target for all readers of foreign files: safetensors files, their headers and indices,
manifests, pickles that are read as data, torch's files and metadata.

For any bytes, a reader returns valid content or raises CheckpointError. Any other exception, any
sanitizer report in the core and, except for torch's files and metadata, memory or time out of
proportion to the input is a fault.

    make fuzz ARGS=-max_total_time=60                  # with sanitizers; the corpus stays in build/
    python tests/checkpoint/fuzz_checkpoint.py CORPUS             # without; a folder, which is filled

tests/checkpoint/test_safetensors.py runs the seeds, and the fuzzer for a moment where it is installed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

# Modules to watch must be instrumented while they are imported.
with (
    atheris.instrument_imports(include=["zshard.checkpoint", "zshard.extras.readers"])
    if atheris
    else contextlib.nullcontext()
):
    from zshard._errors import CheckpointError
    from zshard.checkpoint import manifest, safetensors
    from zshard.checkpoint.checkpoint import Checkpoint, decode, optimizer_of_manifest
    from zshard.extras.readers import chunked, dcp, torch_file
    from zshard.ranks.agreement import bytes_of
    from zshard.state.source import filled

import torch
import torch.distributed.checkpoint
from safetensors_files import WRONG, packed, right_header

NAME = "some/file"


def header(data: bytes) -> None:
    """A file's length and header; its data may be present or missing."""
    size = len(data) + (data[-1] if data else 0)
    length = safetensors.header_length(data[:8], size, NAME)
    if 8 + length > len(data):
        return
    spans, notes = safetensors.parse_header(data[8 : 8 + length], size, NAME)
    at = 8 + length
    for span in sorted(spans.values(), key=lambda span: (span.begin, span.end)):
        assert span.begin == at and span.end <= size
        at = span.end
    assert at == size and all(isinstance(value, str) for value in notes.values())


def index(data: bytes) -> None:
    for name in safetensors.parse_index(data, NAME).values():
        assert Path(name).name == name and name.endswith(".safetensors")


def a_manifest(data: bytes) -> None:
    """The text of a manifest; and the content of one, with a valid checksum."""
    with contextlib.suppress(CheckpointError):
        manifest.Manifest.parse(data, NAME)
    body = safetensors.object_of(data, NAME, manifest.LIMIT)
    whole = {"crc32c": manifest._checksum(body), "checkpoint": body}
    made = manifest.Manifest.parse(json.dumps(whole).encode(), NAME)
    assert all(Path(name).name == name for name in made.files)
    for rank in range(min(made.world, 3)):
        with contextlib.suppress(CheckpointError):
            decode(made.extra_of(rank), NAME)
    if made.optimizer is not None:
        optimizer_of_manifest(made.optimizer, {}, NAME)


def a_pickle(data: bytes) -> None:
    """A pickle, alone and as torch.save() files it."""
    with contextlib.suppress(CheckpointError), torch_file.reading(NAME):
        torch_file.parse(data)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in {"data.pkl": data, "data/0": bytes(24), "version": b"3"}.items():
            archive.writestr(f"x/{name}", text)
    saved_by_torch(file.getvalue())


_FOLDER = tempfile.TemporaryDirectory()


def metadata(data: bytes) -> None:
    """Torch's metadata, next to existing files."""
    Path(_FOLDER.name, dcp.METADATA).write_bytes(data)
    found = Checkpoint(_FOLDER.name)
    try:
        dcp.open_into(found, with_optimizer=True)
        for entry in found.model.values():
            entry.check()
            if 0 < math.prod(entry.shape) < 1000:
                filled(found.pending("", entry))
    finally:
        found.close()


def a_file(data: bytes) -> None:
    """A safetensors file on disk: each tensor is read as its header describes it."""
    path = Path(_OWN.name, "model.safetensors")
    path.write_bytes(data)
    with safetensors.SafetensorsFile(str(path)) as file:
        for entry in file.entries.values():
            span = safetensors.Span(*entry[1:])
            room = bytearray(span.end - span.begin)
            entry.read_into(memoryview(room), 0)
            assert room == data[span.begin : span.end]


def parts(data: bytes) -> None:
    """A file of torch's Hugging Face writer, with its parts of tensors."""
    path = Path(_PARTS.name, "shard-00001-model-00001-of-00001.safetensors")
    path.write_bytes(data)
    found = Checkpoint(_PARTS.name)
    try:
        chunked.open_shards_into(found, [path.name])
        for entry in found.model.values():
            size = math.prod(entry.shape) * entry.dtype.itemsize
            assert size <= len(data)
            if size > 0:
                entry.read_into(memoryview(bytearray(size)), 0)
    finally:
        found.close()


def saved_by_torch(data: bytes) -> None:
    """A file of torch.save() within another one: as plain data, and as a tensor."""
    path = Path(_OWN.name, "__0_0.distcp")
    path.write_bytes(b"before" + data + b"behind")
    with safetensors.OpenFile(str(path)) as file:
        stored = torch_file.Stored(file, len(b"before"), len(data), NAME)
        with contextlib.suppress(CheckpointError):
            stored.value()
        entry = torch_file.StoredTensor(stored, torch.float32, (2, 3), {})
        entry.check()
        room = bytearray(16)
        entry.read_into(memoryview(room), 8)
        assert room == bytes_of(entry.kept[entry])[8:24]


_OWN = tempfile.TemporaryDirectory()
_PARTS = tempfile.TemporaryDirectory()

TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "index": index,
    "manifest": a_manifest,
    "pickle": a_pickle,
    "metadata": metadata,
    "file": a_file,
    "saved": saved_by_torch,
    "parts": parts,
}


def one_input(data: bytes) -> None:
    """Run one input; its first byte selects the reader of the rest."""
    if data:
        target = list(TARGETS.values())[data[0] % len(TARGETS)]
        with contextlib.suppress(CheckpointError):
            target(data[1:])


# --- seeds ----------------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    """Return inputs that are valid, or invalid in a known way."""
    rows = torch.arange(6.0).reshape(2, 3)
    tensors = [_saved(each) for each in (rows, rows.t(), rows.to(torch.float8_e5m2), rows[:, :2])]
    files = [packed(right_header()), packed({}), *(each for each, _ in WRONG.values())]
    pickles = [pickle.dumps(_values(), protocol=p) for p in (2, 4)]
    pickles += [zipfile.ZipFile(io.BytesIO(each)).read("archive/data.pkl") for each in tensors]
    indices = '"metadata": {}, "weight_map": {"a": "model-1.s', '"weight_map": {"a": "../x.s'
    found = {
        "header": files,
        "index": [f'{{{text}afetensors"}}}}'.encode() for text in indices],
        "manifest": _manifests(),
        "pickle": pickles,
        "metadata": [_metadata()],
        "file": files,
        "saved": [*tensors, _saved(_values()), *_spoiled(tensors[0])],
        "parts": [_part(note) for note in _NOTES],
    }
    short = {name: [each for each in some if len(each) < 20_000] for name, some in found.items()}
    return [bytes([i]) + each for i, name in enumerate(TARGETS) for each in short[name]]


_OFFSETS = ([0, 0], [1, 0], [2**62, 2**62], None)
_NOTES = [json.dumps({"a": {"saved_offsets": each}}) for each in _OFFSETS]
_NOTES += [json.dumps({"a": [0]}), "\ud800", "["]


def _part(note: str) -> bytes:
    facts = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return packed({"__metadata__": {"DCP_SHARDING_INFO": note}, "a": facts}, bytes(24))


def _values() -> object:
    return {"a": [1, 2.5, None, True], "b": ("x", b"y", {3: {}}), "d": 2**70}


def _manifests() -> list[bytes]:
    made = manifest.Manifest(
        id="0" * 32,
        step=7,
        world=2,
        files={"model.safetensors": manifest.FileRecord(5, (1,))},
        tied={"b": "a"},
        model={"extra_state": {"x": {"$tuple": [1]}}, "versions": {}},
        optimizer={
            "class": "torch.optim.adamw.AdamW",
            "groups": [{"params": ["a"], "options": {"betas": {"$tuple": [0.9, 0.99]}}}],
            "state": {"a": {"tensors": [], "values": {"momentum_buffer": None}}},
        },
        extra=[{"rng": {"$tensor": {"dtype": "uint8", "shape": [1], "data": "AA=="}}}, {}],
        software={"zshard": "0"},
    )
    text = made.dump()
    body = json.loads(text)["checkpoint"]
    return [text, json.dumps(body).encode()]


def _metadata() -> bytes:
    """The metadata of a small model, whose files are created next to it."""
    state = {
        "model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()},
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["a"]}], "state": {"a": {"x": 1}}},
    }
    torch.distributed.checkpoint.save(state, checkpoint_id=_FOLDER.name, no_dist=True)
    return Path(_FOLDER.name, dcp.METADATA).read_bytes()


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _spoiled(archive: bytes) -> list[bytes]:
    """Return that archive with one field changed of a fully read member, in the directory at its
    end."""
    changes = {
        "flags": (8, (1, 32, 64)),  # encrypted, patched, strongly encrypted
        "method": (10, (8, 9, 12, 14, 99)),  # unpacked by zlib, not at all, by bz2, by lzma
        "packed bytes": (20, (0, 1, 2**31)),
        "bytes": (24, (0, 1, 2**31)),
        "place": (42, (1, 2**31)),
    }
    found = []
    for name in (b"/data.pkl", b"/byteorder"):
        entry = archive.rindex(b"PK\1\2", 0, archive.rindex(name))
        for at, values in changes.values():
            for value in values:
                made = bytearray(archive)
                made[entry + at : entry + at + 2] = (value % 2**16).to_bytes(2, "little")
                if value >= 2**16:
                    made[entry + at + 2 : entry + at + 4] = (value >> 16).to_bytes(2, "little")
                found.append(bytes(made))
    return found


def write_seeds(folder: Path) -> None:
    """Write one file per seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in seeds():
        (folder / f"seed-{zlib.crc32(each):08x}").write_bytes(each)


def main() -> None:
    if atheris is None:
        sys.exit("the fuzzer is not installed: pip install atheris")
    given = [Path(each) for each in sys.argv[1:] if not each.startswith("-")]
    if given and not given[0].is_file():  # an input to run once
        write_seeds(given[0])
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
