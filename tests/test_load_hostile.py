"""zshard.load of checkpoints that somebody has tampered with: links, strange manifests, pickles.

The one idea: a good checkpoint with one thing changed, and all checksums right again, is one error on
all ranks, which names the file and what is wrong; and nothing on any rank has changed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
from damage import check, good_one

import zshard
from zshard import CheckpointError
from zshard._checkpoint import manifest


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
