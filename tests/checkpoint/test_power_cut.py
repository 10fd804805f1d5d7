"""The power cut model (power_cut.py), on small protocols in which every step is needed.

A model that allows too little would pass anything. So each test omits one step, and the model must
find a state that reveals it; with all steps there is none.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_faults import file_faults, file_log
from power_cut import Disk, File, Length, Write, logged, read_log, tree_of

from zshard import _core

OLD, NEW = b"the old content" * 30, b"the new content" * 40
BLOCK = 1 << 20
Step = Callable[[], object]


def put(path: Path, content: bytes, sync: bool = True) -> None:
    """Write a file in two pieces."""
    half = len(content) // 2
    with _core.File.create(path, len(content)) as file:
        file.write([(half, content[half:])], BLOCK)
        file.write([(0, content[:half])], BLOCK)
        if sync:
            file.sync()


# --- protocol: create a complete folder ------------------------------------------------------------

STEPS = ("sync file", "sync staging", "sync parent")


def publish(root: Path, without: str = "") -> None:
    """Create root/new with two files, under a temporary name first."""
    staging = root / ".new.tmp"
    _core.make_folder(staging)
    for name in ("a", "b"):
        put(staging / name, NEW, sync=without != "sync file")
    if without != "sync staging":
        _core.sync_folder(staging)
    _core.rename(staging, root / "new")
    if without != "sync parent":
        _core.sync_folder(root)


def faults_of(folder: Path, returned: bool) -> set[str]:
    """Return what is wrong with a folder that `publish` worked in."""
    faults = set()
    if (folder / "old").read_bytes() != OLD:
        faults.add("old is damaged")
    if not (folder / "new").exists():
        return faults | ({"new is lost"} if returned else set())
    for name in ("a", "b"):
        if not (folder / "new" / name).exists():
            faults.add("a file is lost")
        elif (folder / "new" / name).read_bytes() != NEW:
            faults.add("a file is damaged")
    return faults


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "old").write_bytes(OLD)
    return folder


def cut(root: Path, act: Step, judge: Callable[[Path, bool], set[str]]) -> set[str]:
    """Return all states of `root` that a power cut during or just after `act` can leave."""
    disk, log = Disk(root), root.parent / "log"
    with logged(log):
        act()
    returned = len(read_log(log))
    assert disk.replayed(log) == tree_of(root), "the log does not explain the folder"
    found = set()
    for state in disk.states(log, root.parent / "cut"):
        found |= judge(state.folder, state.calls >= returned)
    return found


@pytest.mark.parametrize(
    ("without", "faults"),
    [
        ("", set()),
        ("sync file", {"a file is damaged"}),
        ("sync staging", {"a file is lost"}),
        ("sync parent", {"new is lost"}),
    ],
)
def test_publishing_needs_each_sync(root: Path, without: str, faults: set[str]) -> None:
    assert cut(root, lambda: publish(root, without), faults_of) == faults


# --- protocol: replace one folder by another -------------------------------------------------------


def replace(root: Path, in_place: bool) -> None:
    """Replace root/current: under a temporary name, then swapped; or in place, which is wrong."""
    if in_place:
        _core.remove_file(root / "current" / "a")
        put(root / "current" / "a", NEW)
        _core.sync_folder(root / "current")
        return
    staging = root / ".current.tmp"
    _core.make_folder(staging)
    put(staging / "a", NEW)
    _core.sync_folder(staging)
    _core.swap(staging, root / "current")
    _core.sync_folder(root)
    _core.remove_file(staging / "a")
    _core.remove_folder(staging)


def faults_of_current(folder: Path, returned: bool) -> set[str]:
    path = folder / "current" / "a"
    content = path.read_bytes() if path.exists() else None
    if returned:
        return set() if content == NEW else {"not new"}
    return set() if content in (OLD, NEW) else {"neither old nor new"}


@pytest.mark.parametrize(("in_place", "faults"), [(False, set()), (True, {"neither old nor new"})])
def test_replacing_needs_the_swap(tmp_path: Path, in_place: bool, faults: set[str]) -> None:
    root = tmp_path / "root"
    (root / "current").mkdir(parents=True)
    (root / "current" / "a").write_bytes(OLD)
    assert cut(root, lambda: replace(root, in_place), faults_of_current) == faults


# --- two processes, one log ------------------------------------------------------------------------


def in_child(act: Step) -> int:
    """Return the exit status of a forked child of this process."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_ranks_share_a_log(root: Path) -> None:
    """Another process writes a part, and its sync counts like the first one's."""

    def second() -> None:
        with _core.File.open_to_write(root / "shared") as file:
            file.write([(2, b"22")], 64)
            file.sync()

    disk, log = Disk(root), root.parent / "log"
    with logged(log), _core.File.create(root / "shared", 4) as file:
        file.write([(0, b"11")], 64)
        _core.sync_folder(root)
        assert in_child(second) == 0
    assert len({call.pid for call in read_log(log)}) == 2
    assert disk.replayed(log) == tree_of(root) == {"old": OLD, "shared": b"1122"}
    found = set()
    for state in disk.states(log, root.parent / "cut"):
        shared = state.folder / "shared"
        found.add(shared.read_bytes() if shared.exists() else None)
    # Before the sync, anything may be missing. At the end, nothing is.
    assert {None, b"", b"\0\0\0\0", b"11\0\0", b"1122", b"\0\00022"} <= found


# --- the model's parts -------------------------------------------------------------------------------


def test_outcomes_of_a_file() -> None:
    file = File(b"old", [Length(4, at_least=True), Write(0, b"ab"), Write(4, b"c")])
    assert set(file.outcomes()) == {
        *(b"old", b"old\0", b"abd\0", b"abd\0c"),  # a prefix
        *(b"abd\0c", b"old\0c"),  # all but one
        *(b"ald\0", b"obd\0"),  # a two-byte write in part
    }
    file.sync()
    assert (file.sure, file.pending, file.outcomes()) == (b"abd\0c", [], [b"abd\0c"])


def test_log_records_every_call_and_its_outcome(root: Path) -> None:
    log = root.parent / "log"
    file_faults(0)
    with logged(log):
        publish(root)
        with pytest.raises(FileNotFoundError):
            _core.remove_file(root / "none")
    calls = read_log(log)
    assert len(calls) == file_faults(0)
    assert [call.error for call in calls] == [0] * (len(calls) - 1) + [2]
    names = [call.name for call in calls]
    of_file = ["create", "disk", "reserve", "write", "write", "sync", "close"]
    of_folder = ["open", "sync", "close"]
    assert names == [
        "make_folder", *of_file, *of_file, *of_folder, "rename", *of_folder, "remove"
    ]  # fmt: skip
    assert b"".join(c.data for c in calls if c.offset == 0) == NEW[: len(NEW) // 2] * 2
    publish_again = root.parent / "again"
    publish_again.mkdir()
    publish(publish_again)
    assert read_log(log) == calls, "it goes on when it has been told to end"


def test_log_that_cannot_be_written_is_an_error(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_log(root / "none" / "log")
    file_log("/dev/full")
    publish(root)
    with pytest.raises(OSError, match="No space left"):
        file_log(None)
    file_log(None)


def test_writes_that_bypass_the_log_are_detected(root: Path) -> None:
    disk, log = Disk(root), root.parent / "log"
    with logged(log):
        publish(root)
        (root / "new" / "c").touch()
    assert disk.replayed(log) != tree_of(root)


@pytest.fixture(autouse=True)
def no_log_stays() -> Iterator[None]:
    yield
    file_log(None)
