"""States of a folder after a power cut, rebuilt from the log of all file calls.

Only an fsync guarantees the contents of the disk. Unsynced writes to a file may be present or
missing, in any part. In a folder, creations, renames and removals may be present up to any one of
them, separately for each folder, until it is synced. So the log is replayed on a model that knows
the certain and the pending changes of each file and folder; at each cut the pending changes are
applied or dropped in many ways. A test then checks each of these folders as after a restart.

    disk = Disk(folder)                     # what is there now is on the disk
    with logged(log):                       # or, in each of several ranks, file_log(log)
        save(folder)
    calls = read_log(log)                   # each state says before which it was cut
    for state in disk.states(calls, tmp_path / "cut"):
        found = newest(state.folder)
        assert found.is_whole() and (state.calls < len(calls) or found.is_new())
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from file_faults import file_log

Tree = dict[str, "bytes | None"]  # {path below the root: content, None for a folder}


@dataclass(frozen=True)
class Call:
    """A call of csrc/checkpoint/fs.h: `error` is its errno, 0 if it succeeded."""

    name: str
    pid: int
    fd: int
    error: int
    offset: int
    length: int
    path: str
    to: str
    data: bytes


@contextlib.contextmanager
def logged(log: Path) -> Iterator[None]:
    """Append all file calls of this process to `log`."""
    file_log(log)
    try:
        yield
    finally:
        file_log(None)


def read_log(log: Path) -> list[Call]:
    """Return the calls in `log`, in a possible order of all processes together."""
    calls, rest = [], log.read_bytes()
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, *numbers = line.split()
        pid, fd, error, offset, length, *lengths = map(int, numbers)
        parts = []
        for size in lengths:
            parts.append(rest[:size])
            rest = rest[size:]
        path, to, data = parts
        what = name.decode(), pid, fd, error, offset, length
        calls.append(Call(*what, os.fsdecode(path), os.fsdecode(to), data))
    return calls


# --- files and folders with certain and pending changes ------------------------------------------


@dataclass(frozen=True)
class Write:
    """Bytes that were written at an offset."""

    offset: int
    data: bytes

    def apply(self, content: bytes) -> bytes:
        content = content.ljust(self.offset, b"\0")
        return content[: self.offset] + self.data + content[self.offset + len(self.data) :]


@dataclass(frozen=True)
class Length:
    """A file was resized, or extended to at least a size."""

    bytes: int
    at_least: bool

    def apply(self, content: bytes) -> bytes:
        content = content.ljust(self.bytes, b"\0")
        return content if self.at_least else content[: self.bytes]


@dataclass(eq=False)
class File:
    sure: bytes = b""
    pending: list[Write | Length] = field(default_factory=list)

    def content(self, changes: Iterable[Write | Length]) -> bytes:
        content = self.sure
        for change in changes:
            content = change.apply(content)
        return content

    def sync(self) -> None:
        self.sure, self.pending = self.content(self.pending), []

    def outcomes(self) -> list[bytes]:
        """Return possible contents of the disk: up to any of the changes, that one in part, and all
        but one."""
        n = len(self.pending)
        found = [self.content(self.pending[:k]) for k in range(n + 1)]
        for k, change in enumerate(self.pending):
            found.append(self.content(self.pending[:k] + self.pending[k + 1 :]))
            if isinstance(change, Write) and len(change.data) > 1:
                half = len(change.data) // 2
                for part in (
                    Write(change.offset, change.data[:half]),
                    Write(change.offset + half, change.data[half:]),
                ):
                    found.append(self.content([*self.pending[:k], part]))
        return list(dict.fromkeys(found))


Names = dict[str, "File | Folder"]


@dataclass(eq=False)
class Folder:
    sure: Names = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)  # None: removed

    def names(self, n: int | None = None) -> Names:
        """Return its content after the first n pending changes; after all."""
        names: dict[str, File | Folder | None] = dict(self.sure)
        for change in self.pending[:n]:
            names.update(change)
        return {name: node for name, node in names.items() if node is not None}

    def sync(self) -> None:
        self.sure, self.pending = self.names(), []

    def outcomes(self) -> list[Names]:
        """Return possible contents of the disk: up to any of the changes."""
        return [self.names(n) for n in range(len(self.pending) + 1)]


# The fate of files and folders with pending changes: {node: one of its outcomes}. Missing nodes
# have all of their changes.
Fate = dict["File | Folder", "bytes | Names"]


def _tree(folder: Folder, fate: Fate, prefix: str = "") -> Tree:
    tree: Tree = {}
    names = fate.get(folder, None)
    for name, node in (folder.names() if names is None else names).items():
        if isinstance(node, Folder):
            tree[prefix + name] = None
            tree.update(_tree(node, fate, f"{prefix}{name}/"))
        else:
            content = fate.get(node)
            tree[prefix + name] = node.content(node.pending) if content is None else content
    return tree


def tree_of(path: Path) -> Tree:
    """Return the content of a folder. Links are not followed; checkpoints contain none."""
    tree: Tree = {}
    for each in sorted(path.rglob("*")):
        assert not each.is_symlink(), f"{each} is a link"
        tree[str(each.relative_to(path))] = None if each.is_dir() else each.read_bytes()
    return tree


def _nodes(path: Path) -> Folder:
    """Return a folder as it is, with no pending changes."""
    found = ((p.name, _nodes(p) if p.is_dir() else File(p.read_bytes())) for p in path.iterdir())
    return Folder(dict(found))


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A folder as a power cut may leave it, after the first `calls` calls of the log."""

    folder: Path
    calls: int


class Disk:
    """A folder: its content at construction, and later changes from a log.

    The log must contain all calls since. Other changes to the folder are unknown here; `replayed`
    reveals them. Renames between folders are not modelled.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._start = tree_of(root)

    def replayed(self, log: Path) -> Tree:
        """Return the content of the folder after the log, without a power cut, to compare with
        tree_of()."""
        model = _Model(self.root, self._start)
        for call in read_log(log):
            model.apply(call)
        return _tree(model.top, {})

    def states(self, calls: list[Call], into: Path, samples: int = 20) -> Iterator[State]:
        """Turn the folder `into` into each state that a power cut within these calls may leave.

        A cut just before an fsync has all states of earlier ones since the last, so those and the
        end are all cuts. At each: every outcome of one file or folder, while the others have all or
        none of their changes, and `samples` states with random outcomes. Each distinct state comes
        once, with the latest cut.
        """
        for tree, cut in self._trees(calls, samples).items():
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir()
            for path, content in tree:
                if content is None:
                    (into / path).mkdir()
                else:
                    (into / path).write_bytes(content)
            yield State(into, cut)

    def _trees(
        self, calls: list[Call], samples: int
    ) -> dict[tuple[tuple[str, bytes | None], ...], int]:
        model, found = _Model(self.root, self._start), {}
        for k, call in enumerate(calls):
            if call.name == "sync":
                for fate in model.fates(random.Random(k), samples):
                    found[tuple(sorted(_tree(model.top, fate).items()))] = k
            model.apply(call)
        for fate in model.fates(random.Random(-1), samples):
            found[tuple(sorted(_tree(model.top, fate).items()))] = len(calls)
        return found


class _Model:
    """The nodes below the root during a replay."""

    def __init__(self, root: Path, start: Tree) -> None:
        self._root = os.path.abspath(root)
        self.top = Folder()
        self._all: list[File | Folder] = [self.top]
        self._open: dict[tuple[int, int], File | Folder | None] = {}
        for path, content in start.items():
            parent, name = self._at(os.path.join(self._root, path))
            parent.sure[name] = self._new(Folder() if content is None else File(content))

    def _new(self, node: File | Folder) -> File | Folder:
        self._all.append(node)
        return node

    def _is_inside(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self._root + os.sep)

    def _at(self, path: str) -> tuple[Folder, str]:
        """Return the folder of a path, and its name there."""
        node: File | Folder = self.top
        *parents, name = os.path.relpath(os.path.abspath(path), self._root).split(os.sep)
        for parent in parents:
            assert isinstance(node, Folder)
            node = node.names()[parent]
        assert isinstance(node, Folder)
        return node, name

    def _find(self, path: str) -> File | Folder | None:
        if os.path.abspath(path) == self._root:
            return self.top
        if not self._is_inside(path):
            return None
        folder, name = self._at(path)
        return folder.names()[name]

    def apply(self, call: Call) -> None:
        """Apply a call. A failed call has no effect, except a close."""
        if call.name == "close":
            del self._open[call.pid, call.fd]
        elif call.error == 0 and call.path == "":
            self._on_file(call)
        elif call.error == 0:
            self._on_names(call)

    def _on_file(self, call: Call) -> None:
        node = self._open[call.pid, call.fd]
        if node is None:
            return
        if call.name == "sync":
            node.sync()
        elif isinstance(node, File):
            if call.name == "write":
                node.pending.append(Write(call.offset, call.data))
            elif call.name in ("reserve", "truncate"):
                node.pending.append(Length(call.length, at_least=call.name == "reserve"))

    def _on_names(self, call: Call) -> None:
        if call.name == "open":
            self._open[call.pid, call.fd] = self._find(call.path)
        elif not self._is_inside(call.path):
            self._open[call.pid, call.fd] = None  # created elsewhere
        elif call.name == "create":
            folder, name = self._at(call.path)
            if name not in folder.names():  # a lock may be there
                folder.pending.append({name: self._new(File())})
            self._open[call.pid, call.fd] = folder.names()[name]
        elif call.name == "make_folder":
            folder, name = self._at(call.path)
            folder.pending.append({name: self._new(Folder())})
        elif call.name in ("remove", "remove_folder"):
            folder, name = self._at(call.path)
            folder.pending.append({name: None})
        else:
            self._rename(call)

    def _rename(self, call: Call) -> None:
        (folder, old), (other, new) = self._at(call.path), self._at(call.to)
        assert folder is other, f"{call.path} moves to another folder: not modelled"
        names = folder.names()
        left = names[new] if call.name == "swap" else None
        folder.pending.append({old: left, new: names[old]})

    def fates(self, rng: random.Random, samples: int) -> Iterator[Fate]:
        """Yield the possible fates of the pending changes."""
        outcomes = {node: node.outcomes() for node in self._all if node.pending}
        folders = {node: found for node, found in outcomes.items() if isinstance(node, Folder)}
        files = {node: found for node, found in outcomes.items() if isinstance(node, File)}
        for of_folders, of_files in itertools.product(one_by_one(folders), one_by_one(files)):
            yield {**of_folders, **of_files}
        for _ in range(samples if outcomes else 0):
            yield {node: rng.choice(found) for node, found in outcomes.items()}


def one_by_one(outcomes: dict) -> Iterator[Fate]:
    """Yield: all changes applied; none; then each outcome of each node in turn."""
    none = {node: found[0] for node, found in outcomes.items()}
    yield {}
    for node, found in outcomes.items():
        for outcome in found:
            yield {node: outcome}
            yield {**none, node: outcome}
