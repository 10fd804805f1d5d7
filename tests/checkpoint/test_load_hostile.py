"""zshard.load of checkpoints that were tampered with: links, invalid manifests, pickles.

A good checkpoint with one change and valid checksums is the same error on all ranks; it names the
file and the problem, and nothing on any rank has changed. Pickles that request more memory, time or
stack than their size explains are read with little memory left.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import re
import resource
import shutil
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from damage import check, good_one
from nursery import fork_ranks
from torch import nn
from torch.distributed import checkpoint as dcp

import zshard
from zshard import CheckpointError, _core
from zshard.checkpoint import manifest
from zshard.checkpoint.manifest import BLOCK, FileRecord, Manifest
from zshard.extras.per_host.parts import Spread


@pytest.fixture(scope="module")
def good(pools, tmp_path_factory):
    """A checkpoint of two ranks; tests must not change it."""
    return good_one(pools, tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good, tmp_path):
    """A copy of it."""
    return shutil.copytree(good, tmp_path / "x")


def rewritten(path, **changes):
    """Change the manifest's content, with a valid checksum."""
    file = path / "zshard.json"
    made = Manifest.parse(file.read_bytes(), str(file))
    file.write_bytes(replace(made, **changes).dump())


def records(path):
    return dict(Manifest.parse((path / "zshard.json").read_bytes(), "x").files)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
@pytest.mark.parametrize("name", ["model-00001-of", "optimizer.safetensors.i", "zshard.json"])
def test_non_regular_files_are_refused(pool2, path, name, kind):
    file = next(each for each in path.iterdir() if each.name.startswith(name))
    moved = file.rename(path.parent / file.name)
    if kind == "link":
        file.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    is_link = kind == "link" and name == "zshard.json"
    check(pool2, path, [f"'{file}'", "is a symbolic link" if is_link else "regular file"])


def test_index_entry_missing_from_the_manifest(pool2, path):
    index = path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    first = next(iter(told["weight_map"]))
    told["weight_map"][first] = "other.safetensors"
    index.write_text(json.dumps(told))
    files = records(path)
    with zshard._core.File.open(index) as file:
        crc = memoryview(file.check(0, file.size, manifest.BLOCK)).cast("Q")[2]
        files[index.name] = manifest.FileRecord(file.size, (crc,))
    rewritten(path, files=files)
    check(
        pool2, path, f"'{path / 'other.safetensors'}' is listed in an index, but not in zshard.json"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {}}, "lacks 'groups'"),
        ({"optimizer": {"class": "A", "groups": 3, "state": {}}}, "has an invalid optimizer entry"),
        ({"optimizer": {"class": "A", "groups": [], "state": {}}}, "does not list the optimizer's"),
        (
            {"optimizer": {"class": "A", "groups": [], "state": {"a": {"tensors": ["b"]}}}},
            "lacks 'a.b'",
        ),
        (
            {"model": {"extra_state": []}},
            "not a valid manifest: TypeError('expected an object, got []",
        ),
        ({"model": {"extra_state": {"a": {"$object": 1}}}}, "not a value that this version"),
        ({"model": {"versions": {"head": "2"}}}, "module versions that are not integers"),
        ({"extra": [[1]]}, "extra must be a dict, got list"),
        ({"extra": [{"a": {"$tuple": 1, "$x": 2}}]}, "not a value that this version"),
    ],
)
def test_implausible_manifest(pool2, path, changes, words):
    rewritten(path, **changes)
    check(pool2, path, words)


def test_newer_format_version(pool2, path):
    file = path / "zshard.json"
    whole = json.loads(file.read_text())
    whole["checkpoint"]["version"] = 3
    file.write_text(json.dumps(whole))
    check(pool2, path, ["has format version 3, but this zshard reads versions 1 and 2"])


def test_folder_of_an_interrupted_save(pool2, path):
    (path / "zshard.json").unlink()
    left = path.rename(path.parent / f".x.{'0' * 32}.tmp")
    check(pool2, left, "an interrupted save left", options=None, with_optimizer=False)


# --- pickles --------------------------------------------------------------------------------------


def test_folders_of_pickles(pool2, tmp_path):
    for name, files, words in (
        ("torch", ["pytorch_model.bin"], "looks like a pickle"),
        ("ds", ["zero_pp_rank_0_mp_rank_00_optim_states.pt"], "zero_to_fp32.py"),
        ("ds2", ["latest", "global_step10/mp_rank_00_model_states.pt"], "zero_to_fp32.py"),
        ("empty", ["notes.txt"], "no finished checkpoint in"),
    ):
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
        kind = OSError if name == "empty" else CheckpointError
        check(pool2, tmp_path / name, words, kind=kind, options=None, with_optimizer=False)
    file = tmp_path / "torch" / "pytorch_model.bin"
    check(pool2, file, "looks like a pickle", options=None, with_optimizer=False)


def int32(number):
    return number.to_bytes(4, "little")


def doubled(first, twice):
    """Return a value that contains the first one 2**60 times, through the memo."""
    steps = (b"q%c" % i + twice.replace(b"?", b"h%c" % i) for i in range(60))
    return first + b"".join(steps)


NAME = b"ctorch.serialization\n_get_layout\n"
THING = NAME + b")R"
TUPLES = doubled(b"(K\1t", b"??\x86")
DEEP = b"N" + b"\x85" * 300_000
TEXT = b"X" + int32(100_000) + b"a" * 100_000

# Programs without the STOP at their end.
HOSTILE = {
    # the size that an index or a length requests
    "memo read": b"j\xff\xff\xff\x7f",
    "long": b"\x8b\xff\xff\xff\xff",
    "bytes": b"B\xff\xff\xff\xff",
    "bytes8": b"\x8e" + b"\xff" * 7 + b"\x0f",
    "text8": b"\x8d" + b"\xff" * 7 + b"\x0f",
    "bytearray": b"\x96" + int32(2**30) + bytes(4),
    # opcodes that data does not need
    "extension": b"\x82\1",
    "buffer": b"\x97",
    "instance": b"(imodule\nname\n",
    "new object with keywords": NAME + b")}\x92",
    # a stack without an opcode's operands
    "nothing": b"",
    "no mark": b"u",
    "too few": b"N\x86",
    "odd": b"}(Nu",
    # objects in operations that they do not support
    "a call of data": b"N)R",
    "a call of a result": THING + b")R",
    "a name that is not allowed": b"cargparse\nNamespace\n)\x81",
    "attributes of a list": b"]}X\1\0\0\0aNsb",
    "attributes of a name": NAME + b"}b",
    "slots of a list": b"]N}X\7\0\0\0__doc__Ns\x86b",
    "an item of a dict": b"}Na",
    "a name of bytes": b"C\1aC\1b\x93",
    "a number of no type": b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n"
    + TUPLES
    + b"\x85RC\1a\x86R",
    # small programs for large or deep objects
    "doubled tuples": TUPLES,
    "doubled lists": doubled(b"]", b"]?a?a"),
    "doubled dicts": doubled(b"}", b"}K\0?sK\1?s"),
    "doubled calls": doubled(THING, NAME + b"??\x86R"),
    "doubled states": doubled(THING, THING + b"??\x86b"),
    "itself": b"]q\0h\0a",
    "deep tuples": DEEP,
    "deep lists": b"]" * 200_000 + b"a" * 199_999,
    "deep dicts": b"}N" * 200_000 + b"}" + b"s" * 200_000,
    "deep calls": NAME * 50_000 + b"N" + b"\x85R" * 50_000,
    "deep states": THING * 50_000 + b"b" * 49_999,
    # keys: hashing a tuple walks all of it
    "doubled key": TUPLES + b"q<}h<Ns",
    "doubled keys": TUPLES + b"q<}(h<Nu",
    "deep key": b"}" + DEEP + b"Ns",
    "deep element of a set": b"\x8f(" + DEEP + b"\x90",
    "deep element of a frozen set": b"(" + DEEP + b"\x91",
    "a list as key": b"}]Ns",
    # storages, whose names are hashed and whose kinds are printed
    "deep storage": b"(X\7\0\0\0storagectorch\nFloatStorage\n" + DEEP + b"X\3\0\0\0cpuK\6tQ",
    "doubled storage": b"(" + TUPLES + b"ctorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\6tQ",
    # calls that would copy their arguments
    "copied tuples": b"(" + b"N" * 100_000 + b"tq\0cbuiltins\nset\nq\1]" + b"h\1h\0\x85Ra" * 50_000,
    "copied dicts": b"}("
    + b"".join(b"J" + int32(i) + b"N" for i in range(50_000))
    + b"uq\0ccollections\nOrderedDict\nq\1]"
    + b"h\1h\0\x85Ra" * 50_000,
    "copied names": TEXT + b"q\0]" + b"h\0h\0\x93a" * 50_000,
}
# Programs for which the standard library's unpickler in C would need much memory.
HARMLESS = {
    "frame": b"\x80\4\x95" + b"\xff" * 7 + b"\x0fN",
    "memo": b"Nr\xff\xff\xff\x0f",
    "copies": b"]" + b"2" * 1000,
}


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))


@pytest.fixture
def folder(tmp_path):
    """A torch folder with a value beside the model."""
    state = {"model": {"a": torch.ones(2, 3)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def as_metadata(folder, program):
    (folder / ".metadata").write_bytes(program)


def as_value(folder, program):
    """The program as the value, in a file of torch.save() after everything else."""
    put_behind(folder, "step", program)


def as_hooks(folder, program):
    """The program as a part of the model's tensor that loading ignores."""
    tensor = pickled(OfTensor(SIX, 0, ROWS, (3, 1), False, None))
    before, behind = tensor.rsplit(b"N", 1)
    put_behind(folder, "model.a", before + program.removesuffix(b".") + behind)


def put_behind(folder, name, program):
    """Replace what is stored as `name` by a file of torch.save() with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", torch.arange(6.0).numpy().tobytes())
        archive.writestr("archive/version", "3\n")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    path = folder / info.relative_path
    info.offset, info.length = path.stat().st_size, len(file.getvalue())
    with path.open("ab") as behind:
        behind.write(file.getvalue())
    as_metadata(folder, pickle.dumps(metadata))


def in_little_memory(folder, put, programs, free):
    """Return the message of a load of each program, in a process that may map only `free` more
    bytes."""
    copyreg.add_extension("posix", "system", 1)
    good, said = folder.with_name("good"), {}
    folder.rename(good)
    zshard.load(good, One())  # maps libraries
    status = Path("/proc/self/status").read_text()
    limit = 1024 * int(re.search(r"VmSize:\s+(\d+)", status)[1]) + free
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, program in programs.items():
        shutil.copytree(good, folder)
        put(folder, program)
        try:
            zshard.load(folder, One())
        except CheckpointError as error:
            said[name] = str(error)
        except BaseException as error:
            said[name] = f"not a CheckpointError: {error!r:.500}"
        shutil.rmtree(folder)
    return said


def alone(put, folder, programs):
    (result,) = fork_ranks(
        in_little_memory, 1, folder, put, programs, 256 << 20, timeout=300, check=True
    )
    return result.value


@pytest.mark.parametrize("put", [as_metadata, as_value, as_hooks])
def test_pickles_in_little_memory(folder, put):
    """256 MiB are left, while a memo index of these bytes could request 4 GiB."""
    programs = {name: code + b"." for name, code in (HOSTILE | HARMLESS).items()}
    said = alone(put, folder, programs)
    if put is not as_hooks:
        assert said.keys() == HOSTILE.keys() | (HARMLESS.keys() if put is as_metadata else set())
    for name, text in said.items():
        assert str(folder) in text and "not a CheckpointError" not in text, (name, text)
        name = {as_value: "'step'", as_hooks: "'model.a'"}.get(put, "")
        assert name in text, (name, text)


def test_pickle_calls_nothing(folder):
    """However a class or function is called, or given a state or items."""
    sign = folder.with_name("ran")
    command = f"touch {sign}".encode()
    system = b"cposix\nsystem\n"
    text = b"X" + int32(len(command)) + command
    ways = {
        "called": system + text + b"\x85R",
        "made": system + text + b"\x85\x81",
        "by name": b"\x8c\5posix\x8c\6system\x93" + text + b"\x85R",
        "by the registry": b"\x82\1" + text + b"\x85R",
        "by another": b"cfunctools\npartial\n" + system + text + b"\x86R)R",
        "by a map": b"cbuiltins\nlist\ncbuiltins\nmap\n" + system + text + b"\x85\x86R\x85R",
        "by a state": THING + b"}X\x0c\0\0\0__setstate__" + system + b"sb" + text + b"b",
        "by items": THING + b"}X\6\0\0\0extend" + system + b"sb(" + text + b"e",
        "by a factory": b"ccollections\ndefaultdict\n" + system + b"\x85R" + text + b"Ns",
        "by a persistent id": system + text + b"\x86Q",
        "as Python": b"cbuiltins\nexec\n" + b"X\x12\0\0\0import os; os.abort" + b"\x85R",
    }
    programs = {name: code + b"." for name, code in ways.items()}
    for put in (as_metadata, as_value, as_hooks):
        said = alone(
            put, Path(shutil.copytree(folder, folder.parent / put.__name__ / "x")), programs
        )
        assert said.keys() == programs.keys()
        assert [t for t in said.values() if t.startswith("not a CheckpointError")] == []
    assert not sign.exists()


class OfTensor:
    """It is pickled as torch.save() pickles a tensor."""

    def __init__(self, storage, first, shape, strides, *more):
        self.args = (storage, first, shape, strides, *(more or (False, OrderedDict())))

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.args


class Storage(NamedTuple):
    """A storage, as torch.save() describes it."""

    kind: type = torch.FloatStorage
    key: str = "0"
    location: str = "cpu"
    numel: int = 6


class OfTorch(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", *value) if isinstance(value, Storage) else None


def pickled(value):
    file = io.BytesIO()
    OfTorch(file, protocol=2).dump(value)
    return file.getvalue()


SIX, ROWS = Storage(), (2, 3)
TENSORS = {  # the pickle of model.a, of shape (2, 3) in the metadata, and what is read: None, an error
    "rows": (OfTensor(SIX, 0, ROWS, (3, 1)), [0, 1, 2, 3, 4, 5]),
    "columns": (OfTensor(SIX, 0, ROWS, (1, 2)), [0, 2, 4, 1, 3, 5]),
    "one row": (OfTensor(SIX, 1, ROWS, (0, 1)), [1, 2, 3, 1, 2, 3]),
    "of a GPU": (OfTensor(Storage(location="cuda:7"), 0, ROWS, (3, 1)), [0, 1, 2, 3, 4, 5]),
    "on meta": (OfTensor(Storage(location="meta"), 0, ROWS, (3, 1)), [0, 1, 2, 3, 4, 5]),
    "more than is stored": (OfTensor(Storage(numel=600), 0, ROWS, (300, 1)), None),
    "far more than is stored": (OfTensor(Storage(numel=2**40), 0, ROWS, (2**39, 1)), None),
    "less than nothing": (OfTensor(Storage(numel=-6), 0, ROWS, (3, 1)), None),
    "no record": (OfTensor(Storage(key="7"), 0, ROWS, (3, 1)), None),
    "another record": (OfTensor(Storage(key="../version"), 0, ROWS, (3, 1)), None),
    "a list as record": (OfTensor(Storage(key=[]), 0, ROWS, (3, 1)), None),
    "another dtype": (OfTensor(Storage(torch.IntStorage), 0, ROWS, (3, 1)), None),
    "another shape": (OfTensor(SIX, 0, (3, 2), (2, 1)), None),
    "a far step": (OfTensor(SIX, 0, ROWS, (4, 1)), None),
    "a step of 2**62": (OfTensor(SIX, 0, ROWS, (2**62, 1)), None),
    "a step of 2**70": (OfTensor(SIX, 0, ROWS, (2**70, 1)), None),
    "backwards": (OfTensor(SIX, 5, ROWS, (-3, -1)), None),
    "fewer strides": (OfTensor(SIX, 0, ROWS, (3,)), None),
    "far off": (OfTensor(SIX, 1, ROWS, (3, 1)), None),
    "before it": (OfTensor(SIX, -1, ROWS, (3, 1)), None),
    "gradients of a list": (OfTensor(SIX, 0, ROWS, (3, 1), [], OrderedDict()), None),
    "conjugate": (OfTensor(SIX, 0, ROWS, (3, 1), False, OrderedDict(), {"conj": True}), None),
    "two": ([OfTensor(SIX, 0, ROWS, (3, 1)), OfTensor(SIX, 0, ROWS, (3, 1))], None),
    "no storage": (OfTensor([1.0] * 6, 0, ROWS, (3, 1)), None),
    "a storage alone": (SIX, None),
    "a number": (3, None),
}


def read_each(folder, programs):
    """Return what a tensor is after a load, or the error, for each pickle."""
    found = {}
    for name, program in programs.items():
        put_behind(folder, "model.a", program)
        model = One()
        try:
            zshard.load(folder, model)
            found[name] = model.a.flatten().tolist()
        except CheckpointError as error:
            found[name] = str(error)
    return found


def test_tensors_that_are_stored_otherwise(folder):
    """A view of what is stored is read as it is, anything beyond it is an error; in a process of
    its own, as reading beyond it may crash."""
    programs = {name: pickled(value) for name, (value, _) in TENSORS.items()}
    (result,) = fork_ranks(read_each, 1, folder, programs, timeout=300, check=True)
    for name, (_, wanted) in TENSORS.items():
        found = result.value[name]
        assert found == wanted or (wanted is None and "'model.a'" in found), (name, found)


# --- manifests ------------------------------------------------------------------------------------


_SOME = Manifest(
    id="0123456789abcdef" * 2,
    step=7,
    world=2,
    files={
        "model.safetensors": FileRecord(BLOCK + 1, (1, 0xFFFFFFFF)),
        "empty.json": FileRecord(0, ()),
    },
    tied={"head.weight": "token.weight"},
    model={"extra_state": {}},
    optimizer={"class": "AdamW", "groups": [], "state": {}},
    extra=({"a": 1}, {"a": 2.5}),
    software={"zshard": "0.1.0", "torch": "2.13.0"},
)


def signed(body):
    """Return the text of a manifest with this content and a valid checksum."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"crc32c": f"{_core.crc32c(text.encode()):08x}", "checkpoint": body}).encode()


def body():
    return json.loads(_SOME.dump())["checkpoint"]


def test_manifest_round_trips():
    assert Manifest.parse(_SOME.dump(), "x") == _SOME


def test_manifest_may_be_reformatted():
    text = json.dumps(json.loads(_SOME.dump()), indent=7).encode()
    assert Manifest.parse(text, "x") == _SOME


def test_extra_of_ranks():
    assert _SOME.extra_of(1) == {"a": 2.5}
    assert _SOME.extra_of(5) == {"a": 1}
    assert Manifest("0" * 32, None, 3, {}, extra=({"b": 1},)).extra_of(2) == {"b": 1}
    assert Manifest("0" * 32, None, 3, {}).extra_of(2) == {}


def test_flipped_bit_is_detected_or_harmless():
    """Bits of white space, for example, may not matter; the content must then be the same."""
    text = _SOME.dump()
    for at in range(8 * len(text)):
        bad = bytearray(text)
        bad[at // 8] ^= 1 << at % 8
        try:
            found = Manifest.parse(bytes(bad), "x")
        except CheckpointError:
            continue
        assert found == _SOME, f"bit {at}"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("version", 3, "format version 3, but this zshard reads versions 1 and 2"),
        ("version", 2, "invalid parts: None"),
        (
            "parts",
            {"a": {"host": "h", "rank": 0, "runs": {"b": "0+1"}}},
            "invalid parts: ",
        ),
        ("format", "other", "not the manifest of a zshard checkpoint"),
        ("id", "../../etc", "invalid id"),
        ("id", 5, "not a valid manifest"),
        ("step", -1, "expected a non-negative integer, got -1"),
        ("step", True, "expected a non-negative integer, got True"),
        ("world", 2.0, "expected a non-negative integer, got 2.0"),
        ("block", 4096, "invalid block: 4096"),
        ("files", [], "not a valid manifest"),
        ("files", {"../x": {"size": 0, "crc32c": ""}}, "not the name of a file in the same folder"),
        ("files", {"a/b": {"size": 0, "crc32c": ""}}, "not the name of a file in the same folder"),
        ("files", {"zshard.json": {"size": 0, "crc32c": ""}}, "not the name of a file"),
        ("files", {"a": {"size": 1, "crc32c": ""}}, "wrong number of checksums for 'a'"),
        ("files", {"a": {"size": 2**63, "crc32c": ""}}, "expected a non-negative integer"),
        ("files", {"a": {"size": 1, "crc32c": "0000000g"}}, "not a valid manifest"),
        ("tied", {"a": 1}, "expected an object of strings"),
        ("optimizer", [], "expected an object, got"),
        ("extra", [{}, {}, {}], "invalid extra: "),
        ("software", None, "not a valid manifest"),
        ("finite", 1, "invalid finite: 1"),
    ],
)
def test_invalid_manifest_content(key, value, said):
    with pytest.raises(CheckpointError, match=said):
        Manifest.parse(signed({**body(), key: value}), "zshard.json")


_PARTS = {"a": {"host": "h", "rank": 0, "runs": {"b": "0+3 5+2", "c": "0+1"}}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": {"a": {**_PARTS["a"], "host": 5}}}, "expected a host and a rank, got 5"),
        ({"parts": {"a": {**_PARTS["a"], "rank": 1.5}}}, "expected a host and a rank"),
        ({"parts": [1]}, "not a valid manifest"),
        ({"parts": {"../a": _PARTS["a"]}}, "'../a' does not have the size of its runs"),
        ({"parts": {"x": _PARTS["a"]}}, "'x' does not have the size of its runs"),
        ({"parts": {"a": {**_PARTS["a"], "runs": {"b": "0+3"}}}}, "'a' does not have the size"),
        ({"parts": {"a": {**_PARTS["a"], "runs": {"b": "0+-3 0+9"}}}}, "'a' exceeds 'b'"),
        ({"parts": {"a": {**_PARTS["a"], "runs": {"b": "-1+6"}}}}, "'a' exceeds 'b'"),
        ({"parts": {"a": {**_PARTS["a"], "runs": {"b": "x"}}}}, "not a valid manifest"),
        ({"whole": {"b": 6, "c": 1}}, "'a' exceeds 'b'"),
        ({"whole": {"c": 1}}, "not a valid manifest"),
        ({"whole": {"b/b": 7, "c": 1}}, "not the name of a file in the same folder"),
        ({"whole": {}}, "invalid parts: "),
    ],
)
def test_invalid_parts(changes, said):
    record = {"size": 6, "crc32c": "00000000"}
    valid = {"version": 2, "files": {"a": record}, "parts": _PARTS, "whole": {"b": 7, "c": 1}}
    made = Manifest.parse(signed({**body(), **valid}), "zshard.json")
    with pytest.raises(CheckpointError, match=r"host 'h' .*, with 8 bytes"):
        Spread("x", made, ()).check()
    with pytest.raises(CheckpointError, match="no host has 2 bytes"):  # of "b"
        Spread("x", made, (), elsewhere=["a"]).check()
    with pytest.raises(CheckpointError, match=said):
        Spread("x", Manifest.parse(signed({**body(), **valid, **changes}), "zshard.json"), ())


@pytest.mark.parametrize(
    "key", sorted(json.loads(_SOME.dump())["checkpoint"].keys() - {"averages"})
)  # older ones have no averages
def test_missing_manifest_content(key):
    rest = {name: value for name, value in body().items() if name != key}
    with pytest.raises(CheckpointError):
        Manifest.parse(signed(rest), "zshard.json")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b'{"a": 1, "a": 1}',
        b'{"crc32c": "00000000", "checkpoint": NaN}',
        b'{"crc32c": "00000000", "checkpoint": {"format": "zshard", "version": 1, "x": 1e999}}',
        b"[" * 100_000,
        b'{"checkpoint":'
        + b'{"format": "zshard", "version": 1, "x": '
        + b"[" * 900
        + b"]" * 900
        + b"}}",
    ],
)
def test_text_that_is_not_a_manifest(text):
    with pytest.raises(CheckpointError, match="'x' is"):
        Manifest.parse(text, "x")
