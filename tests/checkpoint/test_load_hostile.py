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
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from damage import check
from nursery import fork_ranks
from rows import all_rows
from torch import nn
from torch.distributed import checkpoint as dcp

import zshard
from zshard import CheckpointError, _core
from zshard.checkpoint.manifest import FileRecord, Manifest

# --- one change of a good checkpoint: each function makes it, and returns the error's text --------


def not_regular(name, kind, path):
    file = next(each for each in path.iterdir() if each.name.startswith(name))
    moved = file.rename(path.with_suffix(".moved"))
    if kind == "link":
        file.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    is_link = kind == "link" and name == "zshard.json"
    return [f"'{file}'", "is a symbolic link" if is_link else "regular file"]


def index_entry_missing_from_the_manifest(path):
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = "other.safetensors"
    text = json.dumps(content)
    index.write_text(text)
    files = dict(Manifest.read(str(path)).files)
    files[index.name] = FileRecord(len(text), (_core.crc32c(text.encode()),))
    rewritten("", path, files=files)
    return f"'{path / 'other.safetensors'}' is listed in an index, but not in zshard.json"


def newer_format_version(path):
    file = path / "zshard.json"
    content = json.loads(file.read_text())
    content["checkpoint"]["version"] = 3
    file.write_text(json.dumps(content))
    return "has format version 3, but this zshard reads versions 1 and 2"


def rewritten(said, path, **changes):
    """Change the manifest's content, with a valid checksum."""
    file = path / "zshard.json"
    file.write_bytes(replace(Manifest.parse(file.read_bytes(), str(file)), **changes).dump())
    return said


STATE = {"a": {"tensors": ["b"]}}
TAMPERED = {
    **{
        f"a {kind} at {name}": partial(not_regular, name, kind)
        for kind in ("link", "fifo", "folder")
        for name in ("model-00001-of", "optimizer.safetensors.i", "zshard.json")
    },
    "index": index_entry_missing_from_the_manifest,
    "version": newer_format_version,
    **{
        f"{changes}": partial(rewritten, said, **changes)
        for said, changes in {
            "lacks 'groups'": {"optimizer": {}},
            "invalid optimizer entry": {"optimizer": {"class": "A", "groups": 3, "state": {}}},
            "not list the optimizer's": {"optimizer": {"class": "A", "groups": [], "state": {}}},
            "lacks 'a.b'": {"optimizer": {"class": "A", "groups": [], "state": STATE}},
            "TypeError('expected an object, got []": {"model": {"extra_state": []}},
            "not a value that this": {"model": {"extra_state": {"a": {"$object": 1}}}},
            "module versions that are not": {"model": {"versions": {"head": "2"}}},
            "extra must be a dict, got list": {"extra": [[1]]},
            "not a value that this version": {"extra": [{"a": {"$tuple": 1, "$x": 2}}]},
        }.items()
    },
}


def test_tampered_folders(pool2, good, tmp_path):
    with all_rows() as row:
        for number, (name, change) in enumerate(TAMPERED.items()):
            with row(name):
                path = shutil.copytree(good, tmp_path / str(number))
                check(pool2, path, change(path))


def test_folder_of_an_interrupted_save(pool2, path):
    (path / "zshard.json").unlink()
    left = path.rename(path.parent / f".x.{'0' * 32}.tmp")
    check(pool2, left, "an interrupted save left", with_optimizer=False)


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
        check(pool2, tmp_path / name, words, kind, with_optimizer=False)
    file = tmp_path / "torch" / "pytorch_model.bin"
    check(pool2, file, "looks like a pickle", with_optimizer=False)


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
    """A torch folder with a value in addition to the model."""
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
    before, behind = pickled(of_six((3, 1), False, None)).rsplit(b"N", 1)
    put_behind(folder, "model.a", before + program.removesuffix(b".") + behind)


def put_behind(folder, name, program):
    """Replace the tensor stored as `name` by a file of torch.save() with this pickle."""
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
    """Load each program in a process that has 256 MiB left."""
    args = folder, put, {name: code + b"." for name, code in programs.items()}, 256 << 20
    (result,) = fork_ranks(in_little_memory, 1, *args, timeout=300, check=True)
    return result.value


@pytest.mark.parametrize("put", [as_metadata, as_value, as_hooks])
def test_pickles_in_little_memory(folder, put):
    """A memo index of these bytes could request 4 GiB."""
    said = alone(put, folder, HOSTILE | HARMLESS)
    if put is not as_hooks:
        assert said.keys() == HOSTILE.keys() | (HARMLESS.keys() if put is as_metadata else set())
    named = {as_value: "'step'", as_hooks: "'model.a'"}.get(put, "")
    for name, text in said.items():
        assert str(folder) in text and "not a CheckpointError" not in text, (name, text)
        assert named in text, (name, text)


@pytest.mark.parametrize("put", [as_metadata, as_value, as_hooks])
@pytest.mark.sampled(3)
def test_pickle_calls_nothing(folder, put):
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
    ways |= {f"protocol {n}": pickle.dumps(Evil(sign), n).removesuffix(b".") for n in (0, 2, 4)}
    said = alone(put, folder, ways)
    assert said.keys() == ways.keys()
    assert [text for text in said.values() if text.startswith("not a CheckpointError")] == []
    assert "as plain data: it contains posix.system" in said["called"]
    assert not sign.exists()


class Evil:
    """Unpickling this runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


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


def of_six(strides=(3, 1), *more, first=0, shape=(2, 3), **storage):
    """A tensor of shape (2, 3) in a storage of six numbers, or with other facts."""
    return OfTensor(Storage(**storage), first, shape, strides, *more)


TENSORS = {  # the pickle of model.a, whose metadata has shape (2, 3), and its value: None, an error
    "rows": (of_six(), [0, 1, 2, 3, 4, 5]),
    "columns": (of_six((1, 2)), [0, 2, 4, 1, 3, 5]),
    "one row": (of_six((0, 1), first=1), [1, 2, 3, 1, 2, 3]),
    "of a GPU": (of_six(location="cuda:7"), [0, 1, 2, 3, 4, 5]),
    "on meta": (of_six(location="meta"), [0, 1, 2, 3, 4, 5]),
    "more than is stored": (of_six((300, 1), numel=600), None),
    "far more than is stored": (of_six((2**39, 1), numel=2**40), None),
    "less than nothing": (of_six(numel=-6), None),
    "no record": (of_six(key="7"), None),
    "another record": (of_six(key="../version"), None),
    "a list as record": (of_six(key=[]), None),
    "another dtype": (of_six(kind=torch.IntStorage), None),
    "another shape": (of_six((2, 1), shape=(3, 2)), None),
    "a far step": (of_six((4, 1)), None),
    "a step of 2**62": (of_six((2**62, 1)), None),
    "a step of 2**70": (of_six((2**70, 1)), None),
    "backwards": (of_six((-3, -1), first=5), None),
    "fewer strides": (of_six((3,)), None),
    "far off": (of_six(first=1), None),
    "before it": (of_six(first=-1), None),
    "gradients of a list": (of_six((3, 1), [], OrderedDict()), None),
    "conjugate": (of_six((3, 1), False, OrderedDict(), {"conj": True}), None),
    "two": ([of_six(), of_six()], None),
    "no storage": (OfTensor([1.0] * 6, 0, (2, 3), (3, 1)), None),
    "a storage alone": (Storage(), None),
    "a number": (3, None),
}


def read_each(folder, programs):
    """Return a tensor after a load, or the error, for each pickle."""
    results = {}
    for name, program in programs.items():
        put_behind(folder, "model.a", program)
        model = One()
        try:
            zshard.load(folder, model)
            results[name] = model.a.flatten().tolist()
        except CheckpointError as error:
            results[name] = str(error)
    return results


def test_tensors_that_are_stored_otherwise(folder):
    """A view of the stored bytes is read as it is, anything beyond them is an error; in a separate
    process, as reading beyond them may crash."""
    programs = {name: pickled(value) for name, (value, _) in TENSORS.items()}
    (result,) = fork_ranks(read_each, 1, folder, programs, timeout=300, check=True)
    for name, (_, wanted) in TENSORS.items():
        found = result.value[name]
        assert found == wanted or (wanted is None and "'model.a'" in found), (name, found)
