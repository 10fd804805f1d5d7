"""The client of a run's keeper (keeper.py), for ranks and launchers; it starts the keeper as well.

    token = start()
    keeper = Keeper(token)
    keeper.hold("rank0", b'{"step": 7}', [fd])  # fd may be closed now
    files = keeper.get("rank0")  # in another process: files.meta, files.fds

Ranks get the token in the environment variable ZSHARD_KEEPER. Each call is a connection of its own,
so forks and threads share nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zshard.extras.keeping import KeeperError
from zshard.extras.keeping import keeper as _keeper

VARIABLE = "ZSHARD_KEEPER"  # the token, in the environment of ranks
TIMEOUT = 30.0


class HeldFiles(NamedTuple):
    """An item that a keeper holds under a name.

    meta: the bytes that came with it. fds: descriptors, now the caller's to close; exec closes
    them.
    """

    meta: bytes
    fds: list[int]


class Keeper:
    """A keeper, by its token.

    Each method raises KeeperError if no keeper answers under the token within `timeout` seconds, if
    it refuses, or if another user has taken its address.
    """

    def __init__(self, token: str, timeout: float = TIMEOUT) -> None:
        self.token, self._timeout = token, timeout
        self._address = _address_of(token)

    def hold(self, name: str, meta: bytes, fds: Sequence[int]) -> None:
        """Have descriptors held under a name, for all that was held there before. The caller may
        close its own. name: 1 to 512 characters. meta: at most 16 MiB. fds: at most 4096.
        """
        self._ask("hold", meta, fds, name=name)

    def get(self, name: str) -> HeldFiles | None:
        """Return what is held under a name, None for nothing. It stays held."""
        reply = self._ask("get", name=name)
        if not reply.head["found"]:
            return None
        fds = list(reply.fds)
        reply.fds.clear()
        return HeldFiles(bytes(reply.body), fds)

    def list(self) -> dict[str, bytes]:
        """Return each name under which something is held, with its meta."""
        reply = self._ask("list")
        line, _, metas = bytes(reply.body).partition(b"\n")
        held, start = {}, 0
        for name, size in json.loads(line):
            held[name] = metas[start : start + size]
            start += size
        return held

    def drop(self, name: str) -> bool:
        """Free what is held under a name; return whether there was anything."""
        return bool(self._ask("drop", name=name).head["found"])

    def pid(self) -> int:
        """Return the keeper's process."""
        self.list()  # it answers once the process that stays has called listen()
        with _connect(self._address, time.monotonic() + self._timeout) as line:
            return _keeper.peer_of(line)[0]

    def end(self) -> None:
        """End the keeper: it frees all that it holds before this returns."""
        self._ask("end")

    def _ask(
        self, op: str, body: bytes = b"", fds: Sequence[int] = (), **words: str | float | None
    ) -> _keeper.Message:
        head = {"op": op, "token": self.token, **words}
        return _ask(self._address, _keeper.packets(head, body, fds), self._timeout)


def keeper_of_run() -> Keeper | None:
    """Return the keeper of this rank's run, None if the run is not kept."""
    token = os.environ.get(VARIABLE)
    return Keeper(token) if token else None


# --- starting ------------------------------------------------------------------------------------


def start(watch_pid: int | None = None) -> str:
    """Start a keeper, in a session of its own, and return its token once it listens.

    watch_pid: the launcher, with which it ends; by default this process.

    Raises:
        KeeperError: the keeper did not start.
        ProcessLookupError: there is no process watch_pid.
    """
    token = secrets.token_hex(16)
    pidfd = os.pidfd_open(watch_pid or os.getpid())
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _keeper.__file__, _address_of(token), str(pidfd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[pidfd],
            start_new_session=True,
            text=True,
        )
    finally:
        os.close(pidfd)
    try:
        _, stderr = process.communicate(token, TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise KeeperError(f"the keeper did not start within {TIMEOUT:g} s: run again") from None
    if process.returncode != 0:
        last = stderr.strip().rpartition("\n")[2] or f"exit status {process.returncode}"
        raise KeeperError(f"the keeper did not start: {last}: see python -m zshard doctor")
    return token


def _address_of(token: str) -> str:
    """The abstract address, which all users of the host can read, does not reveal the token."""
    return _keeper.PREFIX + hashlib.sha256(token.encode()).hexdigest()[:32]


# --- one request ---------------------------------------------------------------------------------


def _ask(
    address: str, packets: Iterator[tuple[bytes, Sequence[int]]], timeout: float
) -> _keeper.Message:
    deadline = time.monotonic() + timeout
    try:
        with _connect(address, deadline) as line:
            for packet, fds in packets:
                _send(line, packet, fds, deadline)
            reply = _receive(line, deadline)
    except TimeoutError:
        raise KeeperError(f"the keeper did not answer within {timeout:g} s: run doctor") from None
    except KeeperError:
        raise
    except OSError as error:
        if error.errno == errno.EBADF:  # the caller's
            raise
        text = f"the keeper cannot be reached: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ETOOMANYREFS):
            text = "too many descriptors are open or in flight: raise it (ulimit -n)"
        if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
            text = "no keeper answers under this token: start the run without it"
        raise KeeperError(text) from error
    if "refused" in reply.head:
        raise KeeperError(f"the keeper refuses: {reply.head['refused']}")
    return reply


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    return left


def _connect(address: str, deadline: float) -> socket.socket:
    """Connect to a keeper of this user. Another user can take any address, so the kernel is asked
    whose it is before anything is sent."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        while True:
            line.settimeout(_left(deadline))
            try:
                line.connect(f"\0{address}")
                break
            except BlockingIOError:  # its queue is full
                time.sleep(0.005)
        user = _keeper.peer_of(line)[1]
        if user != os.geteuid():
            raise KeeperError(f"the keeper of this token belongs to user {user}: run as that user")
    except OSError:
        line.close()
        raise
    return line


def _send(line: socket.socket, packet: bytes, fds: Sequence[int], deadline: float) -> None:
    """Send a packet; wait while the user has too many descriptors in flight."""
    while True:
        line.settimeout(_left(deadline))
        try:
            return _keeper.send(line, packet, fds)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline - 0.01:
                raise
        time.sleep(0.005)


def _receive(line: socket.socket, deadline: float) -> _keeper.Message:
    reply = _keeper.Message(is_limited=False)
    while True:
        line.settimeout(_left(deadline))
        packet, fds = _keeper.receive(line)
        if not packet:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        try:
            if reply.add(packet, fds):
                return reply
        except ValueError as error:
            text = f"the keeper answers in another protocol ({error}): use one build of zshard"
            raise KeeperError(text) from None
