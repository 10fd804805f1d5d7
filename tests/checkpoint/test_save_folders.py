"""zshard.save into folders that are taken, full, read-only, somebody else's, locked or not shared.

As in test_save_errors.py: an error of one kind on all ranks, a folder that has what it
had before, to the bit, and a model that trains on and saves well.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import APART, bit_by_bit, inside, outcome, tried
from models import Mlp, wrapped
from nursery import fork_ranks
from optim_states import rank
from torch import nn

import zshard
from zshard import FSDP, _core
from zshard.checkpoint import folder as folders
from zshard.ranks.transports import comm_for

FOLDERS = {
    "taken": (FileExistsError, "already exists", "old", {}),
    "a file": (FileExistsError, "already exists", "file", {}),
    "to overwrite a file": (
        FileExistsError,
        "is not a zshard checkpoint",
        "file",
        {"overwrite": True},
    ),
    "to overwrite mine": (
        FileExistsError,
        "is not a zshard checkpoint",
        "mine",
        {"overwrite": True},
    ),
    "to overwrite a link": (
        FileExistsError,
        "is not a zshard checkpoint",
        "link",
        {"overwrite": True},
    ),
    "no parent": (FileNotFoundError, "/gone' does not exist", "gone/new", {}),
    "no parent of a directory": (
        FileNotFoundError,
        "/gone/new' does not exist",
        "gone/new",
        {"step": 1},
    ),
    "below a file": (NotADirectoryError, "/file' is not a directory", "file/new", {}),
    "a directory that is a file": (
        NotADirectoryError,
        "/file' is not a directory",
        "file",
        {"step": 1},
    ),
}


def of_folders(case, folder):
    kind, text, name, options = FOLDERS[case]
    return tried(
        folder, kind, text, lambda f, model, opt: zshard.save(f / name, model, opt, **options)
    )


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(pool2, case, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    assert pool2.run(of_folders, case, tmp_path) == [[], []]
    assert inside(tmp_path / "mine") == ["notes"]


@contextlib.contextmanager
def mounted(path, options):
    """Context with a file system in memory at `path`; skips the test where that is not allowed."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", path], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip(f"no mounts here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def into_full(folder):
    model = FSDP(nn.Linear(1024, 1024, bias=False))
    zshard.save(folder / "old", model, overwrite=True)
    before = inside(folder), bit_by_bit(folder / "old")
    found = outcome(lambda: zshard.save(folder / "new", model))
    assert rank() == 1 or before == (inside(folder), bit_by_bit(folder / "old"))
    return found


def test_a_full_disk(pool2, tmp_path):
    with mounted(tmp_path / "disk", "size=6m"):
        first, second = pool2.run(into_full, tmp_path / "disk")
        assert inside(tmp_path / "disk") == ["old"]
    assert first[0] is OSError and "No space left on device: '" in first[1]
    assert second[0] is OSError and "rank 0: [Errno 28] No space left on device: '" in second[1]
    assert "model.safetensors'" in second[1]


def test_a_disk_that_is_read_only(pool2, tmp_path):
    with mounted(tmp_path / "disk", "ro,size=1m"):
        found = pool2.run(refused, tmp_path / "disk")
    assert [kind for kind, _ in found] == [OSError, OSError]
    for _, text in found:
        assert "Read-only file system: '" in text


def refused(folder):
    return outcome(lambda: zshard.save(folder / "new", FSDP(nn.Linear(2, 2))))


def without_rights(folder):
    """As somebody who may not write there."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        return refused(folder)
    finally:
        os.seteuid(before)


def test_a_folder_that_is_somebody_elses():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are root's alone
        os.chmod(folder, 0o555)
        kind, text = fork_ranks(without_rights, 1, Path(folder), check=True)[0].value
        os.chmod(folder, 0o755)
    assert kind is PermissionError and f"Permission denied: '{folder}/" in text


def while_another(folder, is_numbered):
    """A save while somebody else has the lock, and after that."""
    model, options = wrapped(Mlp, APART), {"step": 5} if is_numbered else {}
    path, comm = folder / "new", comm_for(torch.distributed.group.WORLD, None, None)
    target = folders.Target.of(path, options.get("step"))
    lock = None
    if rank() == 0:
        path.mkdir() if is_numbered else None
        lock = folders._locked(target)
    comm.exchange(b"")
    found = outcome(lambda: zshard.save(path, model, **options))
    comm.exchange(b"")
    if lock is not None:
        _core.unlock(lock)
    comm.exchange(b"")
    zshard.save(path, model, **options)
    comm.exchange(b"")  # rank 0 tidies up last
    return found, inside(folder)


@pytest.mark.parametrize("is_numbered", [False, True])
def test_while_another_save_is_under_way(pool2, is_numbered, tmp_path):
    for (kind, text), names in pool2.run(while_another, tmp_path, is_numbered):
        assert kind is RuntimeError and names == ["new"]
        assert "another save to '" in text and "process " in text and ".zshard.lock'" in text


def on_disks_of_their_own(folder, model, optimizer):
    """Rank 1 finds another folder under the path."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(folders.Target, "hidden", lambda self, id: f"/elsewhere/{id}")
        zshard.save(folder / "new", model, optimizer)


def not_shared(folder):
    text = "this rank cannot see '/elsewhere/" if rank() == 1 else "rank 1: this rank cannot see"
    return tried(folder, FileNotFoundError, text, on_disks_of_their_own)


def test_a_folder_that_ranks_do_not_share(pool2, tmp_path):
    assert pool2.run(not_shared, tmp_path) == [[], []]
