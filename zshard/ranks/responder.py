"""Threads that answer other ranks while this rank's script is busy elsewhere.

Over shm all ranks map each other's parameters, so one rank alone can read them; everything else is
private to its rank. So each process has threads with a socket, which call the function registered
for a request (optim/state_registry.py: shards of optimizer state) and send its answer. Over c10d a
thread answers, through the process group's store, whether this rank waits as the others do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard import _core
from zshard.ranks.agreement import bytes_of

Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""What can be told in JSON, and contiguous tensors in host memory."""

_SLOWEST = 300.0  # seconds that a rank may take to read one tensor
_THREADS = 4  # requests at a time; others wait
_QUEUE = 128

ENDED = (ConnectionRefusedError, FileNotFoundError)
"""What ask() raises for a process that has ended. Other OSErrors may pass."""


_answerer: Callable[[Any], Answer] | None = None
_server: _Server | None = None


def answer_with(answerer: Callable[[Any], Answer]) -> None:
    """Set the function that answers requests, on threads of its own."""
    global _answerer
    _answerer = answerer


def address() -> str:
    """Return this process's address for requests, and start its threads if necessary. "" where that
    is not possible."""
    global _server
    if _server is None:
        try:
            _server = _Server()
        except OSError:
            return ""
    return _server.name


def stop() -> None:
    """Stop the threads, so that the interpreter does not exit while they answer."""
    global _server
    own, _server = _server, None
    if own is not None:
        own.stop()


@contextlib.contextmanager
def ask(address: str, question: object, timeout: float) -> Iterator[Reply]:
    """Context manager: another process's answer, to be read tensor by tensor.

    Raises OSError if the process has ended, TimeoutError (a subclass) if it does not answer in
    time, RuntimeError with its text if it cannot answer.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(timeout)
        _connect(line, address, timeout)
        if not _is_own_user(line):
            raise ConnectionRefusedError("a process of another user answers")
        line.sendall(json.dumps(question).encode() + b"\n")
        yield Reply(line)


def _connect(line: socket.socket, address: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return line.connect("\0" + address)
        except BlockingIOError:  # its queue is full
            if time.monotonic() > deadline:
                raise TimeoutError("the process takes no question") from None
            time.sleep(0.01)


class Reply:
    """An answer. `facts` is its JSON content."""

    def __init__(self, line: socket.socket) -> None:
        self._file = line.makefile("rb")
        header = self._file.readline()
        if not header:
            raise ConnectionResetError("the connection was closed")
        self.facts: dict[str, Any] = json.loads(header)
        if "error" in self.facts:
            raise RuntimeError(self.facts["error"])

    def read_into(self, tensor: torch.Tensor) -> None:
        """Read the next tensor into contiguous host memory."""
        room = bytes_of(tensor)
        while room:
            count = self._file.readinto(room)
            if not count:
                raise ConnectionResetError("the connection was closed")
            room = room[count:]


def _is_own_user(line: socket.socket) -> bool:
    """Return whether a process of this user is at the other end: other users may find the socket's
    name."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", raw)[1] == os.geteuid())


class _Server:
    """The threads of this process that wait for requests. All start at once: at the end of a
    script, when others may ask, Python starts no threads any more."""

    def __init__(self) -> None:
        self.name = f"zshard-answers-{secrets.token_hex(12)}"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind("\0" + self.name)
        self.socket.listen(_QUEUE)
        self.threads = [
            threading.Thread(target=self._run, name=f"zshard-answers-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self.socket.accept()
            except OSError:
                return  # closed
            with line, contextlib.suppress(OSError, ValueError):  # who asked has raised, or ended
                self._serve(line)

    def _serve(self, line: socket.socket) -> None:
        line.settimeout(_SLOWEST)
        if not _is_own_user(line):
            return
        with line.makefile("rb") as file:
            question = file.readline()
        if not question:  # the asking process has exited
            return
        try:
            assert _answerer is not None
            facts, tensors = _answerer(json.loads(question))
        except Exception as error:
            facts, tensors = {"error": f"{type(error).__name__}: {error}"}, []
        line.sendall(json.dumps(facts).encode() + b"\n")
        for tensor in tensors:
            if tensor.numel():
                line.sendall(bytes_of(tensor))

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # makes accept() return
        for thread in self.threads:
            thread.join(1.0)
        self.socket.close()


# --- ranks that wait over c10d --------------------------------------------------------------------

_EVERY = 1.0  # seconds between two checks for a request
_ASKED, _ANSWER = "zshard/asked", "zshard/at/{}/{}"  # must match torch_c10d.cpp
_ending = threading.Event()


def answer_stalls(comm: _core.Comm, group: dist.ProcessGroup, own: dist.ProcessGroup) -> None:
    """Answer ranks of `comm`, the c10d transport of `group` over zshard's group `own`, when they
    ask why this rank is late, until one of these groups is destroyed. c10d_stall.c prints the
    answer."""
    try:
        # A separate connection, as the script may also be waiting for the store.
        store: Any = distributed_c10d._world.pg_map[own][1]
        store = store.clone()
        store.set_timeout(timedelta(seconds=5))
    except (AttributeError, RuntimeError, NotImplementedError):  # a store of another kind
        return
    groups = [weakref.ref(group), weakref.ref(own)]
    thread = threading.Thread(
        target=_answer_stalls, args=(comm, store, groups), name="zshard-stalls", daemon=True
    )
    thread.start()
    atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    _ending.set()
    thread.join(_EVERY)


def _answer_stalls(
    comm: _core.Comm, store: Any, groups: list[weakref.ref[dist.ProcessGroup]]
) -> None:
    answered = 0
    with contextlib.suppress(Exception):  # the process with the store has exited
        while not _ending.wait(_EVERY):
            if any(group() not in distributed_c10d._world.pg_map for group in groups):
                return
            asked = store.add(_ASKED, 0)
            if asked != answered:
                answered = asked
                said = "w" if comm.is_waiting else "-not in a zshard collective"
                store.set(_ANSWER.format(asked, comm.rank), said)


def _in_child() -> None:
    """Reset the state in a forked child, which is not a rank."""
    global _server, _ending
    if _server is not None:
        _server.socket.close()
    _server, _ending = None, threading.Event()


os.register_at_fork(after_in_child=_in_child)
