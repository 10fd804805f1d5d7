"""Export.share() and zshard.SharedWeights: weights in shared memory, which other processes of the
host open by name, without a copy.

The memory is a file of a page and the image of a safetensors file. The page holds a count of
exports, odd while one is written, and the stamp of the zshard.Exported that it follows. A lock of
the file keeps readers and the writer apart: a reader never sees half of an export, and a process
that dies gives up its lock. If the writer dies, the count stays odd, which readers refuse.

A file whose tensors have other names, shapes or dtypes is replaced by a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zshard.checkpoint.contents import Item
from zshard.checkpoint.safetensors import header_length, parse_header
from zshard.checkpoint.save_plan import PlannedFile, lay_out
from zshard.ranks.ends import may_stay_open

if TYPE_CHECKING:
    from zshard.weights.export import Export, Rounds

_FOLDER = "/dev/shm"
_PAGE = 4096
_HEAD = struct.Struct("<8sQ24s")  # magic, count, stamp
_MAGIC = b"zshardW1"
_NO_STAMP = bytes(24)
_PERIOD = 0.002  # seconds between two looks at a lock


def share(export: Export, name: str, timeout: float) -> None:
    """See Export.share()."""
    path = _path_of(name)
    with contextlib.ExitStack() as stack:
        made: list[_SharedFile] = []

        def prepare(rounds: Rounds) -> None:
            made.append(stack.enter_context(contextlib.closing(_SharedFile(path, rounds, timeout))))
            if export.since is not None and made[0].stamp != export.since.stamp:
                export.since.reset()  # the file lacks what came before

        with export.rounds(export.sender, prepare) as rounds:
            for writer in made:
                writer.begin()
            for batch in rounds.batches:
                room = [made[0].places[entry.name] for entry in batch] if rounds.takes else []
                rounds.fill(batch, room)
            with rounds.together():
                for writer in made:
                    writer.end(_NO_STAMP if export.since is None else export.since.next_stamp)


class _SharedFile:
    """The file, locked and mapped for writing."""

    def __init__(self, path: str, rounds: Rounds, timeout: float) -> None:
        items = [Item(each.name, each.shape, each.dtype, None) for each in rounds.entries]
        (planned,) = lay_out(items, "weights", 2**63, rounds.tied)
        self._fd = _locked(path, fcntl.LOCK_EX, timeout, os.O_RDWR | os.O_CREAT)
        try:
            if not _has(self._fd, planned):
                self._fd = _replaced(path, self._fd, planned)
            self._map = mmap.mmap(self._fd, _PAGE + planned.size)
        except BaseException:
            os.close(self._fd)
            raise
        _, self._count, self.stamp = _HEAD.unpack_from(self._map)
        image = torch.frombuffer(self._map, dtype=torch.uint8)[_PAGE:]
        self.places = {
            item.name: _view(image, offset, item.dtype, item.shape)
            for item, offset in planned.places
        }

    def begin(self) -> None:
        """Mark the file as unfinished."""
        self._count |= 1
        _HEAD.pack_into(self._map, 0, _MAGIC, self._count, _NO_STAMP)

    def end(self, stamp: bytes) -> None:
        """Mark the file as complete."""
        _HEAD.pack_into(self._map, 0, _MAGIC, self._count + 1, stamp)

    def close(self) -> None:
        """Release the lock. The memory is unmapped with the last tensor."""
        self.places = {}
        os.close(self._fd)


class SharedWeights:
    """Weights that another process of this host has exported by `export(...).share(name)`.

    Raises ValueError for an invalid name.
    """

    def __init__(self, name: str) -> None:
        self._path = _path_of(name)

    @contextlib.contextmanager
    @may_stay_open
    def read(self, timeout: float = 60.0) -> Iterator[dict[str, Tensor]]:
        """Context manager with the tensors of the last export, by name, without a copy.

        The next export waits until the block ends. Then the tensors become empty: copy what you
        keep (`load_weights(tensors.items())` of a serving engine copies). Writing to a tensor
        changes it within the block only.

        Args:
            timeout: seconds to wait while an export is written.

        Raises FileNotFoundError if nothing was exported under this name; TimeoutError if an export
        is still being written after `timeout`; RuntimeError if the last export did not finish, as
        its process died or raised: export again; PermissionError if another user made the memory.
        """
        fd = _locked(self._path, fcntl.LOCK_SH, timeout, os.O_RDONLY)
        try:
            tensors = _tensors_of(fd, self._path)
            try:
                yield tensors
            finally:
                with torch.no_grad():
                    for each in tensors.values():
                        each.set_()  # type: ignore[call-overload]
        finally:
            os.close(fd)

    def generation(self) -> int:
        """Return the number of exports under this name so far, finished or not; 0 if there are
        none. A number that has grown says that read() has something new."""
        try:
            fd = _opened(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return 0
        with open(fd, "rb", buffering=0) as file:
            head = file.read(_HEAD.size)
        return _count_of(head) // 2 if len(head) == _HEAD.size else 0

    def unlink(self) -> None:
        """Remove the memory; no-op if there is none. Blocks of read() are not disturbed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def _tensors_of(fd: int, path: str) -> dict[str, Tensor]:
    size = os.fstat(fd).st_size
    head = os.pread(fd, _HEAD.size, 0)
    if size <= _PAGE or len(head) < _HEAD.size or _count_of(head) % 2 == 1:
        raise RuntimeError(
            f"the last export to '{path}' did not finish: its process died or raised; export again"
        )
    # A private mapping: what this process writes stays with it.
    memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    image = torch.frombuffer(memory, dtype=torch.uint8)[_PAGE:]
    length = header_length(bytes(memory[_PAGE : _PAGE + 8]), size - _PAGE, path)
    text = bytes(memory[_PAGE + 8 : _PAGE + 8 + length])
    spans = parse_header(text, size - _PAGE, path).spans
    return {name: _view(image, each.begin, each.dtype, each.shape) for name, each in spans.items()}


def _view(image: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in the image, which is a view of no other tensor."""
    made = torch.empty(0, dtype=dtype)
    made.set_(image.untyped_storage(), (_PAGE + begin) // dtype.itemsize, shape)  # type: ignore[call-overload]
    return made


def _count_of(head: bytes) -> int:
    magic, count, _ = _HEAD.unpack(head)
    return int(count) if magic == _MAGIC else 1


def _has(fd: int, planned: PlannedFile) -> bool:
    """Return whether the file was made for the same tensors."""
    if os.fstat(fd).st_size != _PAGE + planned.size:
        return False
    is_own = os.pread(fd, len(_MAGIC), 0) == _MAGIC
    return is_own and os.pread(fd, len(planned.header), _PAGE) == planned.header


def _replaced(path: str, fd: int, planned: PlannedFile) -> int:
    """Return a new locked file in place of the locked `fd`, which is closed. Readers may still have
    the old one mapped, so it stays as it is."""
    count = 0
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) == _HEAD.size and head.startswith(_MAGIC):
        count = (_count_of(head) + 1) // 2 * 2
    os.unlink(path)
    made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(made, fcntl.LOCK_EX)
    os.close(fd)
    try:
        os.pwrite(made, _HEAD.pack(_MAGIC, count | 1, _NO_STAMP), 0)
        os.posix_fallocate(made, 0, _PAGE + planned.size)  # else a full memory would be a SIGBUS
        os.pwrite(made, planned.header, _PAGE)
    except BaseException:
        os.unlink(path)
        os.close(made)
        raise
    return made


def _path_of(name: str) -> str:
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) is None:
        raise ValueError(
            f"name must be 1 to 200 letters, digits, '.', '_' or '-', got {str(name)[:80]!r}"
        )
    return os.path.join(_FOLDER, f"zshard-{name}")


def _opened(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"'{path}' does not exist: no process of this host has exported weights under this name"
        ) from None
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"'{path}' belongs to another user: choose another name")
    return fd


def _locked(path: str, lock: int, timeout: float, flags: int) -> int:
    """Return the file that the path names, with a lock. Raises TimeoutError."""
    end = time.monotonic() + timeout
    while True:
        fd = _opened(path, flags)
        try:
            while not _tried(fd, lock):
                if time.monotonic() > end:
                    other = "an export still writes" if lock == fcntl.LOCK_SH else "a process reads"
                    raise TimeoutError(
                        f"{other} '{path}' after {timeout:g} s: end its block of "
                        "SharedWeights.read(), or pass a longer timeout"
                    )
                time.sleep(_PERIOD)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was replaced meanwhile


def _tried(fd: int, lock: int) -> bool:
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
