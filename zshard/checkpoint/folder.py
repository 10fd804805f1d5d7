"""Checkpoint directories: names, finished checkpoints, the lock of a save, and cleaning up.

A checkpoint is renamed into place when it is finished, and renamed away before any of
it is deleted. In between it has a hidden name, `.<name>.<id>.tmp`. The holder of the lock may
delete such folders, since no other process can be using them.

The checkpoints of a run are in one directory, as `step-00000100`, and share one lock; any other
checkpoint has its own lock. Locks are flock() files: when a process dies, its lock is released.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import warnings
from typing import NamedTuple

from torch import nn

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint.manifest import NAME as MANIFEST
from zshard.checkpoint.manifest import Manifest
from zshard.upper import module_for

PART = ".part"  # ends the names of part files, where hosts share no disk

_STEP = r"step-[0-9]{8,}"
_ID = r"[0-9a-f]{32}"
_NO_SWAPS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def path_of(path: str | os.PathLike[str] | None) -> str:
    """Return a path as text. Raise TypeError or ValueError for an invalid path."""
    text = path if path is None else os.fspath(path)
    if not isinstance(text, str):
        why = ""
        if path is None:
            why = "; zshard.latest_checkpoint() returns None where it finds no finished checkpoint"
        raise TypeError(f"path must be a string or a pathlib.Path, got {text!r}{why}")
    if "\0" in text:
        raise ValueError(f"path={text!r} contains a NUL byte")
    return text


class Target(NamedTuple):
    """The place of a checkpoint."""

    parent: str  # an absolute path
    name: str
    is_numbered: bool  # `parent` is a directory of numbered checkpoints

    @staticmethod
    def of(path: str | os.PathLike[str], step: int | None) -> Target:
        """Raise TypeError or ValueError for a path that cannot name a folder."""
        text = path_of(path)
        full = absolute(text) if text else ""
        parent, name = (full, name_of(step)) if step is not None else os.path.split(full)
        if not parent or not name:
            raise ValueError(f"path={text!r} does not name a folder")
        return Target(parent, name, step is not None)

    @property
    def path(self) -> str:
        return os.path.join(self.parent, self.name)

    def make_parent(self) -> None:
        """Create a missing directory of numbered checkpoints; no other parent is created. Raise
        OSError if there is no parent."""
        above = os.path.dirname(self.parent)
        if self.is_numbered and not os.path.lexists(self.parent) and os.path.isdir(above):
            with contextlib.suppress(FileExistsError):
                _core.make_folder(self.parent)
            _core.sync_folder(above)
        if not os.path.isdir(self.parent):
            text = f"cannot save '{self.path}': '{self.parent}'"
            if os.path.exists(self.parent):
                raise NotADirectoryError(f"{text} is not a directory; choose another path")
            raise FileNotFoundError(f"{text} does not exist; create it first")

    def hidden(self, id: str) -> str:
        """Return its temporary path, until it is finished."""
        return os.path.join(self.parent, f".{self.name}.{id}.tmp")


def absolute(path: str) -> str:
    """Return the absolute path of what the system finds under `path`: "link/.." is the folder above
    the one that the link points to, unlike for os.path.abspath()."""
    if os.pardir not in path.split(os.sep):
        return os.path.abspath(path)
    above, name = os.path.split(path.rstrip(os.sep))
    if name in (os.curdir, os.pardir):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(above), name)


# --- numbered checkpoints -------------------------------------------------------------------------


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint; None for all other names."""
    if re.fullmatch(_STEP, name) is None:
        return None
    step = int(name.removeprefix("step-"))
    return step if name_of(step) == name else None


def latest_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module | None = None
) -> str | None:
    """Return the path of the finished checkpoint with the highest step in a checkpoint directory.

    directory: the path that zshard.save() took together with `step`.
    model: for checkpoints of `save(per_host=True)`: the model whose ranks ask. Then it is
        collective, and returns the newest checkpoint that the hosts have together, as load() takes
        it, on all ranks: also on a host that has nothing of it.

    Returns None if it has no finished checkpoint, or does not exist. Raises NotADirectoryError if
    it is a file; with `model`, CheckpointError if no host can read a manifest.
    """
    if model is not None:
        path: str | None = module_for("per_host").latest_of_hosts(directory, model)
        return path
    steps = finished(directory)
    return os.path.join(os.fspath(directory), name_of(steps[-1])) if steps else None


def finished(directory: str | os.PathLike[str]) -> list[int]:
    """Return the steps of all finished checkpoints in a directory, in ascending order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    steps = {step: name for name in names if (step := step_of(name)) is not None}
    return sorted(s for s in steps if os.path.isfile(os.path.join(directory, steps[s], MANIFEST)))


def names_at(path: str) -> list[str]:
    """Return the names of the checkpoints at a path: [""] if it is one itself."""
    if os.path.lexists(os.path.join(path, MANIFEST)):
        return [""]
    return [name_of(step) for step in (finished(path) if os.path.isdir(path) else [])]


def has_parts(path: str) -> bool:
    """Return whether `path` is a checkpoint in parts, or the newest one in this directory is."""
    names = names_at(path)
    inside = os.listdir(os.path.join(path, names[-1])) if names else []
    return any(name.endswith(PART) for name in inside)


# --- the stages of a save -------------------------------------------------------------------------


class Staging:
    """The temporary folder of a save and its lock, on one rank.

    Call open() and then commit(), or discard() at any time; call close() at the end.
    """

    def __init__(self, target: Target, id: str, overwrite: bool | None) -> None:
        """overwrite: None: the caller has no such option."""
        self.path = target.hidden(id)
        self._target, self._overwrite = target, overwrite
        self._lock: int | None = None
        self._there = False  # whether `path` exists
        self._replaced = False  # whether it is the checkpoint that was replaced
        self._is_committed = False

    def open(self) -> None:
        """Create the folder. Raise OSError if the system refuses, FileExistsError if the target
        exists, RuntimeError while another save is in progress there."""
        target = self._target
        target.make_parent()
        self._lock = _locked(target)
        self._check_free()
        name = _STEP if target.is_numbered else re.escape(target.name)
        pattern = re.compile(rf"\.{name}\.{_ID}\.tmp")  # what interrupted saves have left
        for entry in os.listdir(target.parent) if self._lock is not None else ():
            path = os.path.join(target.parent, entry)
            if pattern.fullmatch(entry) and os.path.isdir(path) and not os.path.islink(path):
                with contextlib.suppress(OSError):  # the leftover is harmless
                    remove(path)
        _core.make_folder(self.path)
        self._there = True

    def commit(self) -> None:
        """Rename the folder, whose files are synced, to its final name. If this raises, nothing has
        changed."""
        target = self._target
        _core.sync_folder(self.path)
        self._check_free()
        self._replaced = os.path.lexists(target.path)
        move = _swap if self._replaced else _core.rename
        move(self.path, target.path)
        self._there = self._replaced
        try:
            _core.sync_folder(target.parent)
        except OSError:  # a power failure may undo the rename, so this does not count as saved
            move(target.path, self.path)
            self._there = True
            raise
        self._is_committed = True

    def withdraw(self) -> None:
        """Undo commit(), as far as the system lets it."""
        if self._is_committed:
            move = _swap if self._replaced else _core.rename
            with contextlib.suppress(OSError):
                move(self._target.path, self.path)
                self._there, self._is_committed = True, False

    def discard(self) -> None:
        """Delete leftovers. The next save deletes what cannot be deleted now."""
        if self._there:
            self._there = False
            with contextlib.suppress(OSError):
                remove(self.path)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                _core.remove_file(_lock_path(self._target))
            with contextlib.suppress(OSError):  # the folder is closed in any case
                _core.unlock(lock)

    def _check_free(self) -> None:
        path = self._target.path
        if not os.path.lexists(path):
            return
        if not self._overwrite:
            or_replace = ", or pass overwrite=True" if self._overwrite is False else ""
            raise FileExistsError(f"'{path}' already exists: save to another path{or_replace}")
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if not is_folder or (os.listdir(path) and not os.path.isfile(os.path.join(path, MANIFEST))):
            text = f"cannot overwrite '{path}', which is not a zshard checkpoint"
            raise FileExistsError(f"{text}: save to another path")


def retain(target: Target, keep_last: int, id: str) -> None:
    """Delete checkpoints with lower steps than `target`. Keep the newest ones, so that `keep_last`
    remain including `target`, and the newest one whose parameters are finite. Warn if one cannot
    be deleted: the new one is saved all the same."""
    this = step_of(target.name) or 0
    others = [step for step in finished(target.parent) if step < this]
    old_ones = others[: max(0, len(others) + 1 - keep_last)]
    if old_ones and not _is_finite(target.path):
        finite = (s for s in reversed(others) if _is_finite(target._replace(name=name_of(s)).path))
        newest = next(finite, None)
        old_ones = [step for step in old_ones if step != newest]
    for step in old_ones:
        old = Target(target.parent, name_of(step), True)
        try:
            _core.rename(old.path, old.hidden(id))  # so that no process finds half of it
            remove(old.hidden(id))
        except OSError as error:
            warnings.warn(f"could not delete the checkpoint '{old.path}': {error}", stacklevel=2)


def warn_of_newer(target: Target) -> None:
    """Warn if latest_checkpoint() returns another checkpoint than `target`."""
    newest = latest_checkpoint(target.parent) if target.is_numbered else None
    if newest is not None and newest != target.path:
        text = f"'{newest}' has a later step than '{target.name}', just saved, and load() uses it"
        warnings.warn(f"{text}: delete it, or choose another path", stacklevel=2)


def _is_finite(path: str) -> bool:
    """Return whether the manifest there states that all parameters are finite."""
    try:
        return Manifest.read(path).finite
    except (OSError, CheckpointError):
        return False


def remove(path: str) -> None:
    """Delete a folder with its content, without following links. Raise OSError on failure."""
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
        why = "the file system cannot swap folders: save to another path, then delete this one"
        raise OSError(error.errno, why, old) from None


def _lock_path(target: Target) -> str:
    name = ".zshard.lock" if target.is_numbered else f".{target.name}.zshard.lock"
    return os.path.join(target.parent, name)


def _locked(target: Target) -> int | None:
    """Take the lock. Return None if the file system has no locks; raise RuntimeError if another
    process holds it."""
    path = _lock_path(target)
    while True:
        try:
            lock = _core.lock_file(path)
        except BlockingIOError:
            holder = "an unknown process"
            with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                holder = file.read(200) or holder
            raise RuntimeError(
                f"another save is in progress: {holder} holds the lock '{path}'; wait for it"
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        # The previous holder deletes the file at the end: then this locks a deleted file.
        try:
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return lock
        except FileNotFoundError:
            pass
        except BaseException:  # the disk may be full: this process must not hold the lock for ever
            _core.unlock(lock)
            raise
        _core.unlock(lock)
