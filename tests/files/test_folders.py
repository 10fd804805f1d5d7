"""The calls on folders and names: make, sync, rename, swap, remove, lock.

A checkpoint appears by a rename, beside whatever else is there: nothing is replaced
that was not meant, also where the file system does not help.
"""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from file_faults import file_faults
from test_files import write

from zshard import _core
from zshard._core import File


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    _core.make_folder(folder)
    _core.sync_folder(tmp_path)
    with pytest.raises(FileExistsError) as caught:
        _core.make_folder(folder)
    assert caught.value.filename == folder
    write(folder / "file", b"")
    with pytest.raises(OSError) as full:
        _core.remove_folder(folder)
    assert full.value.errno == errno.ENOTEMPTY
    with pytest.raises(IsADirectoryError):
        _core.remove_file(folder)
    _core.remove_file(folder / "file")
    _core.remove_folder(folder)
    assert os.listdir(tmp_path) == []
    for call in (_core.sync_folder, _core.remove_file, _core.remove_folder):
        with pytest.raises(FileNotFoundError):
            call(folder)


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _core.make_folder(tmp_path / "folder")
        File.create(tmp_path / "file", 1).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_sync_folder_wants_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        _core.sync_folder(write(tmp_path / "a", b""))


@pytest.mark.parametrize("taken", ["file", "folder", "link"])
def test_rename_never_replaces(tmp_path: Path, taken: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    if taken == "file":
        new.touch()
    elif taken == "folder":
        new.mkdir()
    else:
        new.symlink_to("nowhere")
    with pytest.raises(FileExistsError) as caught:
        _core.rename(old, new)
    assert caught.value.filename == old and caught.value.filename2 == new
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("unsupported", ["", "EINVAL", "ENOSYS"])
def test_rename_without_the_systems_help(tmp_path: Path, unsupported: str) -> None:
    """Where the file system cannot look and rename at once (NFS), the outcomes are the same."""
    write(tmp_path / "old", b"mine")
    (tmp_path / "taken").mkdir()
    file_faults(1 if unsupported else 0, unsupported)
    with pytest.raises(FileExistsError):
        _core.rename(tmp_path / "old", tmp_path / "taken")
    file_faults(1 if unsupported else 0, unsupported)
    _core.rename(tmp_path / "old", tmp_path / "new")
    assert file_faults(0) == (2 if unsupported else 1)
    assert sorted(os.listdir(tmp_path)) == ["new", "taken"]
    assert (tmp_path / "new").read_bytes() == b"mine"


def test_swap(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "file", b"mine")
    write(tmp_path / "b", b"other")
    _core.swap(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"other"
    assert (tmp_path / "b" / "file").read_bytes() == b"mine"
    with pytest.raises(FileNotFoundError):
        _core.swap(tmp_path / "a", tmp_path / "none")


def test_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = _core.lock_file(path)
    with pytest.raises(BlockingIOError) as caught:
        _core.lock_file(path)
    assert caught.value.filename == path
    _core.unlock(lock)
    _core.unlock(_core.lock_file(path))
    assert os.listdir(tmp_path) == [".lock"]


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = f"import time; from zshard import _core; _core.lock_file({str(tmp_path / 'lock')!r}); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(BlockingIOError):
            _core.lock_file(tmp_path / "lock")
        holder.kill()
    _core.unlock(_core.lock_file(tmp_path / "lock"))


def test_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError) as caught:
        _core.lock_file(tmp_path / "lock")
    assert caught.value.errno == errno.ELOOP and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("fd", [-1, 2**31, "1", None])
def test_unlock_refuses(fd: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        _core.unlock(fd)
    with pytest.raises(OSError):
        _core.unlock(1_000_000)
