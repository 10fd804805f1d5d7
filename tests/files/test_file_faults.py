"""Every call on files, failed, cut short, interrupted or killed at: what the caller sees and what is left.

A story goes through all of _core's calls on files; it is told once to count the calls
of csrc/checkpoint/fs.h, and then again for each of them and each fault. Where the story cannot end well, its
error names the file; where it can, it ends as if nothing had been.
"""

import errno
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_faults import file_faults, file_log
from power_cut import Disk, logged, read_log, tree_of

from zshard import _core
from zshard._core import File

BLOCK = 512 << 10
DATA = os.urandom(700 << 10)  # two blocks, and more than is written at once
SMALL = b"0123456789"


def story(root: Path) -> bytes:
    """All calls, on a new folder; returns what was read."""
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def no_faults_stay() -> Iterator[None]:
    yield
    file_faults(0)
    file_log(None)


def names_of_calls() -> list[str]:
    """The story's calls, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "root").mkdir()
        with logged(Path(folder) / "log"):
            story(Path(folder) / "root")
        return [call.name for call in read_log(Path(folder) / "log")]


CALLS = names_of_calls()
CREATED = ("lock", "a", "gone")
EACH = pytest.mark.parametrize(
    "nth", range(1, len(CALLS) + 1), ids=lambda nth: f"{nth}-{CALLS[nth - 1]}"
)


def test_story_is_told_of_every_call() -> None:
    assert set(CALLS) == {
        *("open", "create", "close", "stat", "disk", "read", "write", "reserve", "sync", "lock"),
        *("make_folder", "remove_folder", "remove", "rename", "swap"),
    }


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.sampled(50)
@EACH
@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EACCES"])
def test_errors_name_the_file_and_leave_nothing_open(root: Path, nth: int, fault: str) -> None:
    before, name = descriptors(), CALLS[nth - 1]
    file_faults(nth, fault)
    # Asked how much is free, a file system need not know. And the descriptors by which folders
    # are synced and locks held have written nothing: no bytes are lost where their close fails.
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


@EACH
def test_interrupted_calls_are_made_again(root: Path, nth: int) -> None:
    file_faults(nth, "EINTR")
    if (
        CALLS[nth - 1] == "sync" or CALLS[nth - 1] == "stat"
    ):  # what is on the disk then cannot be found out by another fsync
        with pytest.raises(InterruptedError):
            story(root)
    else:
        assert story(root) == DATA + SMALL
        assert (root / "other" / "a").read_bytes() == DATA + SMALL


@pytest.mark.sampled(50)
@pytest.mark.parametrize("times", [1, 3, 1000])
@EACH
def test_short_counts_go_on(root: Path, nth: int, times: int) -> None:
    file_faults(nth, "short", times)
    assert story(root) == DATA + SMALL
    assert (root / "other" / "a").read_bytes() == DATA + SMALL
    assert file_faults(0) >= len(CALLS)


def test_all_interrupted_in_a_row(root: Path) -> None:
    """A hundred interrupts at one call; the signal's handler has been asked."""
    nth = CALLS.index("write") + 1
    file_faults(nth, "EINTR", 100)
    assert story(root) == DATA + SMALL
    assert file_faults(0) == len(CALLS) + 100


# --- killed ----------------------------------------------------------------------------------------


def killed(act: Callable[[], object], nth: int, what: str) -> int:
    """The signal by which a child that does `act` with this fault has died; 0: none."""
    child = os.fork()
    if child == 0:
        try:
            file_faults(nth, what)
            act()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.sampled(50)
@EACH
@pytest.mark.parametrize("what", ["kill", "killafter", "killshort"])
def test_killed(root: Path, nth: int, what: str) -> None:
    """It happens there; what is left is what the calls before have made; the lock is free."""
    disk, log = Disk(root), root.parent / "log"
    with logged(log):
        assert killed(lambda: story(root), nth, what) == signal.SIGKILL
    calls = read_log(log)
    assert [call.name for call in calls] == CALLS[: nth - (what == "kill")]
    assert disk.replayed(log) == tree_of(root)
    if what == "killshort" and CALLS[nth - 1] == "write":
        assert calls[-1].length > 0 and calls[-1].length <= max(1, (256 << 10) // 2)
    if (root / "lock").exists():
        _core.unlock(_core.lock_file(root / "lock"))


# --- file systems that can do less -----------------------------------------------------------------


@pytest.mark.parametrize("unsupported", ["EOPNOTSUPP", "ENOSYS"])
def test_create_where_no_room_can_be_reserved(tmp_path: Path, unsupported: str) -> None:
    file_faults(3, unsupported)
    with File.create(tmp_path / "a", 1 << 20) as file:
        assert file.size == 1 << 20
    assert (tmp_path / "a").read_bytes() == bytes(1 << 20)


def test_sync_of_a_folder_where_there_is_none(tmp_path: Path) -> None:
    file_faults(2, "EINVAL")
    _core.sync_folder(tmp_path)
    file_faults(2, "EIO")
    with pytest.raises(OSError) as caught:
        _core.sync_folder(tmp_path)
    assert caught.value.errno == errno.EIO and caught.value.filename == tmp_path


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """More than is free is refused before any of it is taken."""
    room = os.statvfs(tmp_path)
    file_faults(0)
    with pytest.raises(OSError) as caught:
        File.create(tmp_path / "a", room.f_bavail * room.f_frsize * 2)
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []
    assert file_faults(0) == 4  # create, disk, remove, close: nothing was reserved


# --- the shim itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((1, "EWHATEVER"), ValueError, "there is no fault 'EWHATEVER'"),
        ((1,), ValueError, "there is no fault ''"),
        ((-1, "EIO"), ValueError, "no call is number -1"),
        ((1, "EIO", 0), ValueError, "0 times"),
        ((2**63 - 1, "EIO", 2), ValueError, "no call is number"),
        (("1", "EIO"), TypeError, "int"),
        ((), TypeError, "argument"),
    ],
)
def test_faults_refuse(arguments: tuple, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        file_faults(*arguments)


def test_faults_are_over_when_told_so(tmp_path: Path) -> None:
    file_faults(1, "EIO", 1000)
    with pytest.raises(OSError):
        _core.make_folder(tmp_path / "a")
    assert file_faults(0) == 1
    _core.make_folder(tmp_path / "a")
    assert file_faults(0) == 1


def test_faults_at_several_calls(tmp_path: Path) -> None:
    file_faults(2, "ENOSPC", 2)
    outcomes = []
    for k in range(5):
        try:
            _core.make_folder(tmp_path / str(k))
            outcomes.append(0)
        except OSError as error:
            outcomes.append(error.errno)
    assert outcomes == [0, errno.ENOSPC, errno.ENOSPC, 0, 0]
