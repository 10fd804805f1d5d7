"""Memory files, children and raw connections for the tests of the keeper."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from zshard import KeeperError
from zshard.extras.keeping import client
from zshard.extras.keeping.client import Keeper

PATIENCE = 60.0  # seconds for what happens at once on an idle machine


def memory(text: bytes) -> int:
    """A memory file with that text."""
    fd = os.memfd_create("kept")
    os.write(fd, text)
    return fd


def text_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def taken(keeper: Keeper, name: str) -> list[bytes]:
    """The texts of what is held under a name."""
    found = keeper.get(name)
    assert found is not None
    texts = [text_of(fd) for fd in found.fds]
    for fd in found.fds:
        os.close(fd)
    return texts


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def has_ended(keeper: Keeper) -> bool:
    try:
        keeper.list()
    except KeeperError:
        return True
    return False


def fork(call: Callable[[], object]) -> int:
    """Start a child that calls, and exits with status 0 unless that raises; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        call()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def in_child(call: Callable[[], object]) -> None:
    assert os.waitpid(fork(call), 0)[1] == 0, "see the traceback on stderr"


def opened_by(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(link))
    return found


def descriptors_of(keeper: Keeper) -> list[str]:
    """What the keeper has open, except connections: it may not have seen the end of some yet."""
    return [link for link in opened_by(keeper.pid()) if not link.startswith("socket:")]


def connect(keeper: Keeper) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(PATIENCE)
    line.connect("\0" + client._address_of(keeper.token))
    return line


def give(line: socket.socket, packet: bytes, fds: list[int]) -> None:
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    line.sendmsg([packet], control)


def head(op: str, token: str, **more: object) -> bytes:
    return json.dumps({"op": op, "token": token, "bytes": 0, "fds": 0, **more}).encode()
