"""What ranks of one host tell each other while their scripts are elsewhere: a thread that answers.

The one idea: over shm the ranks' parameters lie in memory that all of them map, so one rank alone
can read them; all else is each rank's own. So each process has a thread with a socket, which calls
what has been registered for a question (_books.py: slices of optimizer state) and sends the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["Answer", "Reply", "address", "answer_with", "ask", "lives", "stop"]

Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""What can be told in JSON, and contiguous tensors in host memory."""

_answerer: Callable[[Any], Answer] | None = None
_SLOWEST = 300.0  # seconds that a rank may take to read one tensor


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
        line.connect("\0" + address)
        if not _is_own_user(line):
            raise ConnectionRefusedError("a process of another user answers")
        line.sendall(json.dumps(question).encode() + b"\n")
        yield Reply(line)


def lives(address: str) -> bool:
    """Return whether the process that answers there has not ended."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1.0)
            line.connect("\0" + address)
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


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
        room = _bytes_of(tensor)
        while room:
            count = self._file.readinto(room)
            if not count:
                raise ConnectionResetError("the connection was closed")
            room = room[count:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def _is_own_user(line: socket.socket) -> bool:
    """Whether a process of this user is at the other end: anybody may know the socket's name."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", raw)[1] == os.geteuid())


class _Handler(socketserver.StreamRequestHandler):
    timeout = _SLOWEST

    def handle(self) -> None:
        if not _is_own_user(self.connection):
            return
        question = self.rfile.readline()
        if not question:  # it only wanted to know whether this process lives
            return
        header, tensors = self._answer(json.loads(question))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has raised
            self.wfile.write(json.dumps(header).encode() + b"\n")
            for tensor in tensors:
                if tensor.numel():
                    self.wfile.write(_bytes_of(tensor))

    def _answer(self, question: Any) -> Answer:
        if _answerer is None:
            return {"error": "it has nothing to tell"}, []
        try:
            return _answerer(question)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}, []


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The process's thread that waits for questions."""

    daemon_threads = True
    request_queue_size = 128
    _own: _Server | None = None
    name: str

    @classmethod
    def address_of_this_process(cls) -> str:
        if cls._own is None:
            name = f"zshard-answers-{secrets.token_hex(12)}"
            try:
                cls._own = cls("\0" + name, _Handler)
            except OSError:
                return ""
            cls._own.name = name
            run = threading.Thread(target=cls._own.serve_forever, args=(3600.0,), daemon=True)
            run.name = "zshard-answers"
            run.start()
            os.register_at_fork(after_in_child=cls._forget)
        return cls._own.name

    @classmethod
    def stop_own(cls) -> None:
        own, cls._own = cls._own, None
        if own is None:
            return
        stopping = threading.Thread(target=own.shutdown, daemon=True)
        stopping.start()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.connect("\0" + own.name)  # it looks whether it is to stop once it has been asked
        stopping.join(1.0)
        own.socket.close()

    @classmethod
    def _forget(cls) -> None:
        """In a forked child, which is no rank."""
        if cls._own is not None:
            cls._own.socket.close()
        cls._own = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A question that makes no sense is hung up on."""
