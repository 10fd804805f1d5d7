"""Folders of checkpoints: names, what is finished, one save at a time, what is thrown away.

The one idea: a checkpoint gets its name when it is finished, and loses it before anything of it is
deleted. Whatever is on the way in or out has a hidden name, `.<name>.<id>.tmp`; who has the lock
may delete that, since nobody else can be at work on it.

Checkpoints of a run lie in one directory as `step-00000100`, and share one lock; any other has a
lock of its own. Both are files of the system's (flock): when a process dies, its lock is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import warnings
from typing import Any, NamedTuple

from zshard import _core
from zshard._checkpoint.manifest import NAME as MANIFEST
from zshard._checkpoint.manifest import CheckpointError, parse

_STEP = r"step-[0-9]{8,}"
_ID = r"[0-9a-f]{32}"
_NO_SWAPS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def path_of(path: Any) -> str:
    """A path as text. TypeError, ValueError for what is none."""
    text = path if path is None else os.fspath(path)
    if not isinstance(text, str):
        why = "; zshard.latest() gives None where no checkpoint is finished" if path is None else ""
        raise TypeError(f"path takes a string or a pathlib.Path, not {text!r}{why}")
    if "\0" in text:
        raise ValueError(f"path={text!r} has a NUL byte in it, which no path can have")
    return text


class Target(NamedTuple):
    """Where a checkpoint goes."""

    parent: str  # an absolute path
    name: str
    is_numbered: bool  # `parent` is a directory of numbered ones

    @staticmethod
    def of(path: str | os.PathLike[str], step: int | None) -> Target:
        """TypeError, ValueError for what is no path of a folder."""
        given = path_of(path)
        whole = os.path.abspath(given) if given else ""
        parent, name = (whole, name_of(step)) if step is not None else os.path.split(whole)
        if not parent or not name:
            raise ValueError(f"path={given!r} is no path of a folder")
        return Target(parent, name, step is not None)

    @property
    def path(self) -> str:
        return os.path.join(self.parent, self.name)

    def hidden(self, id: str) -> str:
        """The path that it has while it is not finished."""
        return os.path.join(self.parent, f".{self.name}.{id}.tmp")


# --- numbered ones --------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint with that name; None for all other names."""
    if re.fullmatch(_STEP, name) is None:
        return None
    step = int(name.removeprefix("step-"))
    return step if name_of(step) == name else None


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest finished checkpoint in a directory of numbered ones, as zshard.save
    writes them with `step`: that of the highest step. None where there is none, or no directory.
    NotADirectoryError where it is a file."""
    found = finished(directory)
    return os.path.join(os.fspath(directory), name_of(found[-1])) if found else None


latest = latest_checkpoint  # its earlier name


def finished(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of all finished checkpoints in a directory, in order; none where there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    there = {name: step for name in names if (step := step_of(name)) is not None}
    is_finished = {n: os.path.isfile(os.path.join(directory, n, MANIFEST)) for n in there}
    return sorted(step for name, step in there.items() if is_finished[name])


# --- a save's way ---------------------------------------------------------------------------------


class Staging:
    """The folder of a save until it is finished, and the lock that it needs; on one rank.

    open() and then commit(), or discard() at any time; close() in the end.
    """

    def __init__(self, target: Target, id: str, overwrite: bool) -> None:
        self.path = target.hidden(id)
        self._target, self._overwrite = target, overwrite
        self._lock: int | None = None
        self._there = False  # is something under `path`?
        self._replaced = False  # and it is what was there before

    def open(self) -> None:
        """Makes the folder. Raises OSError where the system refuses, FileExistsError for a path
        that is taken, RuntimeError while another save is under way there."""
        target = self._target
        _check_parent(target)
        self._lock = _locked(target)
        self._check_free()
        if self._lock is not None:
            _clean(target)
        _core.make_folder(self.path)
        self._there = True

    def commit(self) -> None:
        """Gives the folder, of which all is on the disk, its name. Afterwards all is done or, if
        this raises, nothing."""
        target = self._target
        _core.sync_folder(self.path)
        self._check_free()
        self._replaced = os.path.lexists(target.path)
        move = _swap if self._replaced else _core.rename
        move(self.path, target.path)
        self._there = self._replaced
        try:
            _core.sync_folder(target.parent)
        except OSError:  # it may be lost with the power: then it has not been saved
            move(target.path, self.path)
            self._there = True
            raise

    def discard(self) -> None:
        """Deletes what is left; what cannot be deleted now, the next save will find."""
        if self._there:
            self._there = False
            with contextlib.suppress(OSError):
                remove(self.path)

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                _core.remove_file(_lock_path(self._target))
            with contextlib.suppress(OSError):  # it is closed in any case
                _core.unlock(lock)

    def _check_free(self) -> None:
        path = self._target.path
        if not os.path.lexists(path):
            return
        if not self._overwrite:
            raise FileExistsError(
                f"'{path}' is there already: save to another path, or with overwrite=True"
            )
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if not is_folder or (os.listdir(path) and not os.path.isfile(os.path.join(path, MANIFEST))):
            raise FileExistsError(f"'{path}' is no checkpoint of zshard's: it is not overwritten")


def retain(target: Target, keep_last: int, id: str) -> None:
    """Deletes numbered checkpoints before that of `target`, but for the newest ones, which with it
    are `keep_last`, and the newest whose parameters are finite. One that cannot be deleted is a
    warning: the new one is saved."""
    this = step_of(target.name) or 0
    others = [step for step in finished(target.parent) if step < this]
    old_ones = others[: max(0, len(others) + 1 - keep_last)]
    if old_ones and not _is_finite(target.path):
        newest = next((s for s in reversed(others) if _is_finite(_path(target, s))), None)
        old_ones = [step for step in old_ones if step != newest]
    for step in old_ones:
        old = Target(target.parent, name_of(step), True)
        try:
            _core.rename(old.path, old.hidden(id))  # so that no half of it is found
            remove(old.hidden(id))
        except OSError as error:
            warnings.warn(f"the checkpoint '{old.path}' was not deleted: {error}", stacklevel=2)


def warn_of_newer(target: Target) -> None:
    """A warning if the checkpoint of `target` is not the one that latest() gives."""
    newest = latest(target.parent) if target.is_numbered else None
    if newest is not None and newest != target.path:
        warnings.warn(
            f"'{newest}' is of a later step than '{target.name}', which has just been saved: "
            "latest() and load() take it until it is deleted, and keep_last leaves it",
            stacklevel=2,
        )


def _path(target: Target, step: int) -> str:
    return os.path.join(target.parent, name_of(step))


def _is_finite(path: str) -> bool:
    """Does the manifest there say that no parameter is NaN or infinite?"""
    manifest = os.path.join(path, MANIFEST)
    try:
        with open(manifest, "rb") as file:
            return parse(file.read(), manifest).finite
    except (OSError, CheckpointError):
        return False


def remove(path: str) -> None:
    """Deletes a folder and all in it; links are not followed. OSError where that fails."""
    with contextlib.suppress(FileNotFoundError):
        _core.remove_file(os.path.join(path, MANIFEST))  # half a checkpoint must not look finished
    with os.scandir(path) as entries:
        inside = list(entries)
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            remove(entry.path)
        else:
            _core.remove_file(entry.path)
    _core.remove_folder(path)


def _swap(new: str, old: str) -> None:
    try:
        _core.swap(new, old)
    except OSError as error:
        if error.errno not in _NO_SWAPS:
            raise
        why = "the file system cannot exchange folders: save to another path, and delete this one"
        raise OSError(error.errno, why, old) from None


def _check_parent(target: Target) -> None:
    """Makes a directory of numbered checkpoints that is not there; no other folder is made."""
    parent, above = target.parent, os.path.dirname(target.parent)
    if target.is_numbered and not os.path.lexists(parent) and os.path.isdir(above):
        with contextlib.suppress(FileExistsError):
            _core.make_folder(parent)
        _core.sync_folder(above)
    if not os.path.isdir(parent):
        kind = NotADirectoryError if os.path.exists(parent) else FileNotFoundError
        fix = "" if kind is NotADirectoryError else "; make it first"
        raise kind(f"'{target.path}' cannot be saved: '{parent}' is no folder{fix}")


def _clean(target: Target) -> None:
    """Deletes what saves that were broken off have left."""
    name = _STEP if target.is_numbered else re.escape(target.name)
    pattern = re.compile(rf"\.{name}\.{_ID}\.tmp")
    for entry in os.listdir(target.parent):
        path = os.path.join(target.parent, entry)
        if pattern.fullmatch(entry) and os.path.isdir(path) and not os.path.islink(path):
            with contextlib.suppress(OSError):  # it is in nobody's way
                remove(path)


def _lock_path(target: Target) -> str:
    name = ".zshard.lock" if target.is_numbered else f".{target.name}.zshard.lock"
    return os.path.join(target.parent, name)


def _locked(target: Target) -> int | None:
    """The lock; None where the file system has none. RuntimeError where somebody else has it."""
    path = _lock_path(target)
    while True:
        try:
            lock = _core.lock_file(path)
        except BlockingIOError:
            raise RuntimeError(
                f"another save into '{target.parent}' is under way, of {_holder(path)}: it has the "
                f"lock '{path}'"
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        # Whoever had it before deletes it in the end: then this is the lock of a file that is gone.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return lock
        _core.unlock(lock)


def _holder(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(200) or "an unknown process"
    except (OSError, ValueError):
        return "an unknown process"
