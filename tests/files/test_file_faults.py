"""Every call on files and folders fails, is cut short, interrupted or killed.

A scenario makes all of _core's calls. It runs once to count the calls of csrc/checkpoint/fs.h, then
again for each call and each fault. If the scenario cannot complete, its error names the file; if it
can, the fault has no effect.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_faults import file_faults, file_log, forked
from nursery import fork_ranks
from power_cut import Disk, logged, read_log, tree_of
from rows import all_rows
from test_files import descriptors, write

from zshard import _core
from zshard._core import File

BLOCK = 512 << 10
DATA = os.urandom(700 << 10)  # two blocks, and more than one write
SMALL = b"0123456789"


def story(root: Path) -> bytes:
    """Make all calls, on a new folder; return the bytes read."""
    lock = _core.lock_file(root / "lock")
    try:
        staging = root / "staging"
        _core.make_folder(staging)
        with File.create(staging / "a", len(DATA)) as file:
            sums = file.write([(0, DATA[:100]), (100, DATA[100:])], BLOCK)
            assert file.size == len(DATA)
            with File.open_to_write(staging / "a") as other:
                other.write([(len(DATA), SMALL)], BLOCK)
                other.sync()
            file.sync()
        _core.sync_folder(staging)
        _core.rename(staging, root / "done")
        _core.sync_folder(root)
        _core.make_folder(root / "other")
        _core.swap(root / "other", root / "done")
        _core.remove_folder(root / "done")
        room = bytearray(len(DATA) + len(SMALL))
        with File.open(root / "other" / "a") as file:
            file.read([(0, room)])
            assert file.check(0, 100, BLOCK) + file.check(100, len(DATA), BLOCK) == sums
        File.create(root / "gone", 1).close()
        _core.remove_file(root / "gone")
    finally:
        _core.unlock(lock)
    return bytes(room)


@contextlib.contextmanager
def new_root() -> Iterator[Path]:
    """Give an empty folder; afterwards, no calls fail."""
    memory = "/dev/shm"  # syncs take no time there
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="zshard-test-", dir=where) as folder:
        root = Path(folder, "root")
        root.mkdir()
        try:
            yield root
        finally:
            file_faults(0)
            file_log(None)


@pytest.fixture(autouse=True)
def no_faults_stay() -> Iterator[None]:
    yield
    file_faults(0)
    file_log(None)


def names_of_calls() -> list[str]:
    """Return the scenario's calls in order."""
    with new_root() as root:
        with logged(root.parent / "log"):
            story(root)
        return [call.name for call in read_log(root.parent / "log")]


CALLS = names_of_calls()
CREATED = ("lock", "a", "gone")


def at_each_call(check: Callable[[Path, int, Any], None], *variants: Any) -> None:
    """Run `check(root, nth, variant)` in a new folder for each of the scenario's calls."""
    with all_rows() as row:
        for nth, variant in itertools.product(range(1, len(CALLS) + 1), variants):
            with row(nth, CALLS[nth - 1], variant), new_root() as root:
                check(root, nth, variant)


def test_scenario_makes_every_call() -> None:
    assert set(CALLS) == {
        *("open", "create", "close", "stat", "disk", "read", "write", "reserve", "sync", "lock"),
        *("make_folder", "remove_folder", "remove", "rename", "swap"),
    }


def check_error(root: Path, nth: int, fault: str) -> None:
    before, name = descriptors(), CALLS[nth - 1]
    file_faults(nth, fault)
    # A file system need not know how much is free. The descriptors for syncing folders and holding
    # locks have written nothing, so a failed close loses no bytes.
    harmless = name == "close" and CALLS[nth - 3 : nth - 1] == ["open", "sync"]
    if harmless or name == "disk" or nth == len(CALLS):
        assert story(root) == DATA + SMALL
    else:
        with pytest.raises(OSError) as caught:
            story(root)
        assert caught.value.errno == getattr(errno, fault)
        assert nth == len(CALLS) - 1 or str(root) in str(caught.value.filename)
    assert descriptors() == before
    if name in ("create", "reserve"):
        left = {path.name for path in root.rglob("*") if path.is_file()}
        assert left == set(CREATED[: CALLS[:nth].count("create") - 1])
    _core.unlock(_core.lock_file(root / "lock"))


def test_errors_name_the_file_and_close_everything() -> None:
    at_each_call(check_error, "ENOSPC", "EIO", "EACCES")


def check_interrupted(root: Path, nth: int, times: int) -> None:
    file_faults(nth, "EINTR", times)
    # Another fsync cannot find out what reached the disk.
    if CALLS[nth - 1] in ("sync", "stat"):
        with pytest.raises(InterruptedError):
            story(root)
    else:
        assert story(root) == DATA + SMALL
        assert (root / "other" / "a").read_bytes() == DATA + SMALL


def test_interrupted_calls_are_retried() -> None:
    at_each_call(check_interrupted, 1)
    with new_root() as root:
        check_interrupted(root, CALLS.index("write") + 1, 100)


def check_short_counts(root: Path, nth: int, times: int) -> None:
    file_faults(nth, "short", times)
    assert story(root) == DATA + SMALL
    assert (root / "other" / "a").read_bytes() == DATA + SMALL
    assert file_faults(0) >= len(CALLS)


def test_short_counts_are_resumed() -> None:
    at_each_call(check_short_counts, 1, 3, 1000)


# --- killed ----------------------------------------------------------------------------------------


def check_killed(root: Path, nth: int, what: str) -> None:
    """The process dies there; the results of earlier calls remain, and the lock is free."""
    disk, log = Disk(root), root.parent / "log"
    with logged(log):
        assert forked(nth, what, lambda: story(root)) is None
    calls = read_log(log)
    assert [call.name for call in calls] == CALLS[: nth - (what == "kill")]
    assert disk.replayed(log) == tree_of(root)
    if what == "killshort" and CALLS[nth - 1] == "write":
        assert calls[-1].length > 0 and calls[-1].length <= max(1, (256 << 10) // 2)
    if (root / "lock").exists():
        _core.unlock(_core.lock_file(root / "lock"))


@pytest.mark.parametrize("what", ["kill", "killafter", "killshort"])
def test_killed(what: str) -> None:
    """In a small process, whose forks take little."""
    fork_ranks(at_each_call, 1, check_killed, what, timeout=200, check=True)


# --- limited file systems --------------------------------------------------------------------------


@pytest.mark.parametrize("unsupported", ["EOPNOTSUPP", "ENOSYS"])
def test_create_without_preallocation(tmp_path: Path, unsupported: str) -> None:
    file_faults(3, unsupported)
    with File.create(tmp_path / "a", 1 << 20) as file:
        assert file.size == 1 << 20
    assert (tmp_path / "a").read_bytes() == bytes(1 << 20)


def test_sync_of_a_missing_folder(tmp_path: Path) -> None:
    file_faults(2, "EINVAL")
    _core.sync_folder(tmp_path)
    file_faults(2, "EIO")
    with pytest.raises(OSError) as caught:
        _core.sync_folder(tmp_path)
    assert caught.value.errno == errno.EIO and caught.value.filename == tmp_path


def test_full_disk(tmp_path: Path) -> None:
    """A request for more than is free is refused before any of it is taken."""
    room = os.statvfs(tmp_path)
    file_faults(0)
    with pytest.raises(OSError) as caught:
        File.create(tmp_path / "a", room.f_bavail * room.f_frsize * 2)
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []
    assert file_faults(0) == 4  # create, disk, remove, close: nothing was reserved


# --- without faults --------------------------------------------------------------------------------


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
    with pytest.raises(NotADirectoryError):
        _core.sync_folder(folder / "file")
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


@pytest.mark.parametrize("take", [Path.touch, Path.mkdir, lambda new: new.symlink_to("nowhere")])
def test_rename_never_replaces(tmp_path: Path, take: Callable[[Path], None]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    take(new)
    with pytest.raises(FileExistsError) as caught:
        _core.rename(old, new)
    assert caught.value.filename == old and caught.value.filename2 == new
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("unsupported", ["", "EINVAL", "ENOSYS"])
def test_rename_without_renameat2(tmp_path: Path, unsupported: str) -> None:
    """The results are the same if the file system cannot rename without replacing atomically
    (NFS)."""
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


def test_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = _core.lock_file(path)
    with pytest.raises(BlockingIOError) as caught:
        _core.lock_file(path)
    assert caught.value.filename == path
    _core.unlock(lock)
    _core.unlock(_core.lock_file(path))
    assert os.listdir(tmp_path) == [".lock"]


def test_lock_does_not_follow_links(tmp_path: Path) -> None:
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
