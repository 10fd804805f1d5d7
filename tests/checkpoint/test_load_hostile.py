"""zshard.load of checkpoints that somebody has tampered with: links, strange manifests, pickles.

A good checkpoint with one thing changed, and all checksums right again, is one error on
all ranks, which names the file and what is wrong; and nothing on any rank has changed. Pickles that
ask for more memory, time or stack than their bytes explain are read where little is left.
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
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from damage import check, good_one
from nursery import fork_ranks
from torch import nn
from torch.distributed import checkpoint as dcp

import zshard
from zshard import CheckpointError
from zshard.checkpoint import manifest


@pytest.fixture(scope="module")
def good(pools, tmp_path_factory):
    """A checkpoint of two ranks, not to be changed."""
    return good_one(pools, tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good, tmp_path):
    """A copy of it."""
    return shutil.copytree(good, tmp_path / "x")


def rewritten(path, **changes):
    """The manifest with other things in it, and a right checksum."""
    file = path / "zshard.json"
    made = manifest.parse(file.read_bytes(), str(file))
    file.write_bytes(manifest.dump(replace(made, **changes)))


def records(path):
    return dict(manifest.parse((path / "zshard.json").read_bytes(), "x").files)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
@pytest.mark.parametrize("name", ["model-00001-of", "optimizer.safetensors.i", "zshard.json"])
def test_what_is_no_regular_file(pool2, path, name, kind):
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


def test_an_index_that_names_what_the_manifest_does_not(pool2, path):
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
        ({"model": {"extra_state": []}}, "extra_state must be an object, got list"),
        ({"model": {"extra_state": {"a": {"$object": 1}}}}, "not a value that this version"),
        ({"model": {"versions": {"head": "2"}}}, "module versions that are not integers"),
        ({"extra": [[1]]}, "extra must be a dict, got list"),
        ({"extra": [{"a": {"$tuple": 1, "$x": 2}}]}, "not a value that this version"),
    ],
)
def test_a_manifest_that_says_strange_things(pool2, path, changes, words):
    rewritten(path, **changes)
    check(pool2, path, words)


def test_a_newer_format(pool2, path):
    file = path / "zshard.json"
    whole = json.loads(file.read_text())
    whole["checkpoint"]["version"] = 2
    file.write_text(json.dumps(whole))
    check(pool2, path, ["has format version 2, but this zshard reads version 1"])


def test_a_folder_of_an_interrupted_save(pool2, path):
    (path / "zshard.json").unlink()
    left = path.rename(path.parent / f".x.{'0' * 32}.tmp")
    check(pool2, left, "an interrupted save left it", options=None, with_optimizer=False)


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


def long(number):
    return b"\x8a\x0c" + number.to_bytes(12, "little")


def doubled(first, twice):
    """A value in which the first one is there 2**60 times, as the memo has each of them."""
    steps = (b"q%c" % i + twice.replace(b"?", b"h%c" % i) for i in range(60))
    return first + b"".join(steps)


THING = b"cmodule\nname\n)R"
TUPLES = doubled(b"(K\1t", b"??\x86")
LISTS = doubled(b"]", b"]?a?a")
DEEP = b"N" + b"\x85" * 300_000
TEXT = b"X" + int32(100_000) + b"a" * 100_000

# Programs without the STOP at their end, and what is said of them as metadata.
HOSTILE = {
    # what an index or a length asks for
    "memo": (b"Nr\xff\xff\xff\x0f", "it numbers a value 268435455"),
    "memo at the end": (b"N" * 99 + b"r\0\0\0\x10", "it numbers a value"),
    "memo of text": (b"Np268435455\n", "opcode PUT"),
    "memo read": (b"j\xff\xff\xff\x7f", "Memo value not found"),
    "long": (b"\x8b\xff\xff\xff\x7f", "not enough data"),
    "long below 0": (b"\x8b\xff\xff\xff\xff", "byte count < 0"),
    "large number": (b"\x8b" + int32(9000) + b"\x7f" * 9000, "more than 10000 bits"),
    "bytes": (b"B\xff\xff\xff\xff", "bytes4, but only"),
    "bytes8": (b"\x8e" + b"\xff" * 7 + b"\x0f", "bytes8, but only"),
    "text": (b"X\xff\xff\xff\xff", "unicodestring4, but only"),
    "text8": (b"\x8d" + b"\xff" * 7 + b"\x0f", "unicodestring8, but only"),
    "bytearray": (b"\x96" + int32(2**30) + bytes(4), "bytearray8, but only"),
    "frame": (b"\x80\4\x95" + b"\xff" * 7 + b"\x0fN", "is not torch"),
    # opcodes that data does not need
    "extension": (b"\x82\1", "opcode EXT1"),
    "buffer": (b"\x97", "opcode NEXT_BUFFER"),
    "buffer, read-only": (b"N\x98", "opcode READONLY_BUFFER"),
    "copies": (b"]" + b"2" * 1000, "opcode DUP"),
    "instance": (b"(imodule\nname\n", "opcode INST"),
    "object": (b"(cmodule\nname\no", "opcode OBJ"),
    "new object with keywords": (b"cmodule\nname\n)}\x92", "opcode NEWOBJ_EX"),
    # a stack that lacks what an opcode takes
    "nothing": (b"", "pickle exhausted|underflow"),
    "no mark": (b"u", "MARK"),
    "a mark": (b"(", "MARK"),
    "too few": (b"N\x86", "underflow"),
    "odd": (b"}(Nu", "odd number"),
    # objects that are used for what they are not
    "a call of data": (b"N)R", "not callable"),
    "a call of a result": (THING + b")R", "not callable"),
    "arguments that are no tuple": (b"cmodule\nname\n]R", "argument list must be a tuple"),
    "a class of data": (b"N)\x81", "not callable"),
    "attributes of a list": (b"]}X\1\0\0\0aNsb", "no attribute '__dict__'"),
    "attributes of a name": (b"cmodule\nname\n}b", "state of an object that has none"),
    "slots of a list": (b"]N}X\7\0\0\0__doc__Ns\x86b", "attribute '__doc__'"),
    "items of a number": (b"K\1NNs", "item assignment"),
    "an item of a dict": (b"}Na", "attribute 'append'"),
    "a name of bytes": (b"C\1aC\1b\x93", "requires str"),
    "a number of no type": (
        b"cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n" + TUPLES + b"\x85RC\1a\x86R",
        "is damaged",
    ),
    # small programs for large or deep objects
    "doubled tuples": (TUPLES, "repeats itself too often"),
    "doubled lists": (LISTS, "repeats itself too often"),
    "doubled dicts": (doubled(b"}", b"}K\0?sK\1?s"), "repeats itself too often"),
    "doubled calls": (doubled(THING, b"cmodule\nname\n??\x86R"), "repeats itself too often"),
    "doubled states": (doubled(THING, THING + b"??\x86b"), "repeats itself too often"),
    "lists that are filled when they are in others": (
        b"(" + b"".join(b"]q%c" % i for i in range(60)) + b"t("
        b"" + b"".join(b"h%c(h%ch%ce" % (i, i + 1, i + 1) for i in range(59)) + b"t\x86",
        "repeats itself too often",
    ),
    "itself": (b"]q\0h\0a", "contains itself"),
    "deep tuples": (DEEP, "nested too deeply"),
    "deep lists": (b"]" * 200_000 + b"a" * 199_999, "nested too deeply"),
    "deep dicts": (b"}N" * 200_000 + b"}" + b"s" * 200_000, "nested too deeply"),
    "deep calls": (b"cm\nn\n" * 50_000 + b"N" + b"\x85R" * 50_000, "nested too deeply"),
    "deep states": (b"cm\nn\n)R" * 50_000 + b"b" * 49_999, "nested too deeply"),
    # keys: a hash walks all of a tuple, and keys of one hash are compared one by one
    "doubled key": (TUPLES + b"q<}h<Ns", "key of more than 100 values"),
    "doubled keys": (TUPLES + b"q<}(h<Nu", "key of more than 100 values"),
    "deep key": (b"}" + DEEP + b"Ns", "key of more than 100 values"),
    "deep element of a set": (b"\x8f(" + DEEP + b"\x90", "nested too deeply"),
    "deep element of a frozen set": (b"(" + DEEP + b"\x91", "nested too deeply"),
    "a list as key": (b"}]Ns", "unhashable"),
    "keys of one hash": (
        b"}(" + b"".join(long(i * (2**61 - 1)) + b"N" for i in range(1, 30_000)) + b"u",
        "more than 100 keys of one hash",
    ),
    # calls that copy what they are given, and so do thousands of bytes for a few
    "copied texts": (
        TEXT + b"q\0c_codecs\nencode\nq\1]" + b"h\1h\0X\6\0\0\0latin1\x86Ra" * 50_000,
        "copies more than it contains",
    ),
    "copied tuples": (
        b"(" + b"N" * 100_000 + b"tq\0cbuiltins\nset\nq\1]" + b"h\1h\0\x85Ra" * 50_000,
        "copies more than it contains",
    ),
    "copied dicts": (
        b"}(" + b"".join(b"J" + int32(i) + b"N" for i in range(50_000)) + b"uq\0"
        b"ccollections\nOrderedDict\nq\1]" + b"h\1h\0\x85Ra" * 50_000,
        "repeats itself too often",
    ),
    "copied names": (TEXT + b"q\0]" + b"h\0h\0\x93a" * 50_000, "more than 1000 characters"),
}


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))


@pytest.fixture
def folder(tmp_path):
    """A folder of torch's, with a value beside the model."""
    state = {"model": {"a": torch.ones(2, 3)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def as_metadata(folder, program):
    (folder / ".metadata").write_bytes(program)


def as_value(folder, program):
    """As the value, in a file of torch.save() behind all else."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "step")
    path = folder / info.relative_path
    info.offset, info.length = path.stat().st_size, len(file.getvalue())
    with path.open("ab") as behind:
        behind.write(file.getvalue())
    as_metadata(folder, pickle.dumps(metadata))


def in_little_memory(folder, put, programs, free):
    """What a load of each program says, in a process that may map only `free` more bytes."""
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


def test_pickles_as_metadata_in_little_memory(folder):
    """256 MiB are left, where a memo index of these bytes could ask for 4 GiB."""
    said = alone(as_metadata, folder, {name: code + b"." for name, (code, _) in HOSTILE.items()})
    for name, (_, words) in HOSTILE.items():
        assert f"'{folder / '.metadata'}'" in said[name], (name, said[name])
        assert re.search(words, said[name]), (name, said[name])


def test_pickles_as_values_in_little_memory(folder):
    said = alone(as_value, folder, {name: code + b"." for name, (code, _) in HOSTILE.items()})
    assert said.keys() == HOSTILE.keys() - {"frame"}  # a longer one than the file: it is ignored
    for name, text in said.items():
        assert str(folder) in text and "'step'" in text, (name, text)
        assert "not a CheckpointError" not in text, (name, text)


def test_a_pickle_calls_nothing(folder):
    """However a class or a function is called, or given a state or items."""
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
    for put in (as_metadata, as_value):
        said = alone(
            put, Path(shutil.copytree(folder, folder.parent / put.__name__ / "x")), programs
        )
        assert said.keys() == programs.keys() - {"by a factory"} or put is as_metadata
        assert [t for t in said.values() if t.startswith("not a CheckpointError")] == []
    assert not sign.exists()
