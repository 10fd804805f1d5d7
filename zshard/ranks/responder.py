"""What ranks of one host tell each other while their scripts are elsewhere: a thread that answers.

Over shm the ranks' parameters lie in memory that all of them map, so one rank alone
can read them; all else is each rank's own. So each process has a thread with a socket, which calls
what has been registered for a question (optim/state_registry.py: slices of optimizer state) and
sends the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zshard.ranks.agreement import bytes_of

__all__ = ["ENDED", "Answer", "Reply", "address", "answer_with", "ask", "stop"]

Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""What can be told in JSON, and contiguous tensors in host memory."""

_answerer: Callable[[Any], Answer] | None = None
_SLOWEST = 300.0  # seconds that a rank may take to read one tensor
_THREADS = 4  # questions that are answered at a time; others wait
_QUEUE = 128

ENDED = (ConnectionRefusedError, FileNotFoundError)
"""What ask() raises for a process that has ended. Other OSErrors may pass."""


def answer_with(answerer: Callable[[Any], Answer]) -> None:
    """Set what answers questions, on threads of its own."""
    global _answerer
    _answerer = answerer


def address() -> str:
    """Return where this process answers, and start the thread if it does not run. "" where that is
    not possible."""
    return _Server.address_of_this_process()


def stop() -> None:
    """End the thread, as before the interpreter ends, which may not happen while it answers."""
    _Server.stop_own()


@contextlib.contextmanager
def ask(address: str, question: Any, timeout: float) -> Iterator[Reply]:
    """Context manager: another process's answer, to be read tensor by tensor.

    Raises OSError if the process has ended, TimeoutError (one of them) if it does not answer in
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
    """An answer. `facts` is what was told in JSON."""

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
        if tensor.numel() == 0:
            return
        room = bytes_of(tensor)
        while room:
            count = self._file.readinto(room)
            if not count:
                raise ConnectionResetError("the connection was closed")
            room = room[count:]


def _is_own_user(line: socket.socket) -> bool:
    """Whether a process of this user is at the other end: anybody may know the socket's name."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", raw)[1] == os.geteuid())


def _answer(question: Any) -> Answer:
    if _answerer is None:
        return {"error": "it has nothing to tell"}, []
    try:
        return _answerer(question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, []


def _serve(line: socket.socket) -> None:
    """Answer the question that comes on a connection."""
    line.settimeout(_SLOWEST)
    if not _is_own_user(line):
        return
    with line.makefile("rb") as file:
        question = file.readline()
    if not question:  # it has ended since
        return
    header, tensors = _answer(json.loads(question))
    line.sendall(json.dumps(header).encode() + b"\n")
    for tensor in tensors:
        if tensor.numel():
            line.sendall(bytes_of(tensor))


class _Server:
    """The process's threads that wait for questions. All are started at once: at the end of a
    script, when others may ask, Python starts no thread any more."""

    _own: _Server | None = None

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
                _serve(line)

    @classmethod
    def address_of_this_process(cls) -> str:
        if cls._own is None:
            try:
                cls._own = cls()
            except OSError:
                return ""
            os.register_at_fork(after_in_child=cls._forget)
        return cls._own.name

    @classmethod
    def stop_own(cls) -> None:
        own, cls._own = cls._own, None
        if own is None:
            return
        with contextlib.suppress(OSError):
            own.socket.shutdown(socket.SHUT_RDWR)  # accept() returns
        for thread in own.threads:
            thread.join(1.0)
        own.socket.close()

    @classmethod
    def _forget(cls) -> None:
        """In a forked child, which is no rank."""
        if cls._own is not None:
            cls._own.socket.close()
        cls._own = None
