"""What a rank tells the others of its optimizers while its script is elsewhere.

The one idea: over shm the ranks' parameters lie in memory that all of them map, so one rank alone
can read them; optimizer state is each rank's own. So each process has a thread that sends its
slices of it to a rank of the same host that asks. The rank that asks keeps a reader session open
meanwhile, in which no rank steps: all slices are of one step.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard._units import State, units_of

__all__ = ["Peers", "answer_with", "ask", "meet"]

_CARD = 64  # bytes: what ranks exchange to meet
_TOKEN = 8  # of them, what tells models apart


class Peers:
    """Where the ranks of a model answer, and its parameters, which have the same numbers there."""

    def __init__(self, token: str, addresses: list[str], params: Sequence[nn.Parameter]) -> None:
        self.token = token
        self.addresses = addresses
        self._params = [weakref.ref(param) for param in params]

    @property
    def params(self) -> list[nn.Parameter]:
        """Those that are alive."""
        return [param for ref in self._params if (param := ref()) is not None]


Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]
"""What can be told in JSON, and contiguous tensors in host memory."""

_answerer: Callable[[Peers, Any], Answer] | None = None


def answer_with(answerer: Callable[[Peers, Any], Answer]) -> None:
    """Set what makes an answer of the asked model and the question."""
    global _answerer
    _answerer = answerer


def meet(module: nn.Module, comm: _core.Comm) -> None:
    """Let the ranks of a new model ask each other. Collective over shm; elsewhere a no-op."""
    if comm.transport != "shm":
        return
    address = _Server.address_of_this_process()
    cards = comm.exchange(secrets.token_bytes(_TOKEN) + address.encode().ljust(_CARD - _TOKEN))
    addresses = [card[_TOKEN:].decode().strip() for card in cards]
    states: list[State] = [state for _, state in units_of(module)]
    params = [param for state in states for param in state.unit.params]
    peers = Peers(cards[0][:_TOKEN].hex(), addresses, params) if all(addresses) else None
    for state in states:
        state.peers = peers
    if peers is not None:
        _models[peers.token] = peers


_models: weakref.WeakValueDictionary[str, Peers] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def ask(peers: Peers, rank: int, question: Any, timeout: float) -> Iterator[_Reply]:
    """Context manager: another rank's answer, to be read tensor by tensor.

    Raises PeerError if that rank has ended, PeerTimeoutError if it does not answer in time,
    RuntimeError if it cannot answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(timeout)
            line.connect("\0" + peers.addresses[rank])
            line.sendall(json.dumps([peers.token, question]).encode() + b"\n")
            yield _Reply(line, rank)
    except TimeoutError:
        raise _core.PeerTimeoutError(
            f"rank {rank} did not send its optimizer state within {timeout:.0f} s: is it in a long "
            "call that keeps Python's lock? Raise timeout if it is only slow"
        ) from None
    except OSError as error:
        raise _core.PeerError(f"rank {rank} exited while asked for its state: {error}") from None


class _Reply:
    def __init__(self, line: socket.socket, rank: int) -> None:
        self._file = line.makefile("rb")
        header = self._file.readline()
        if not header:
            raise ConnectionResetError("the connection was closed")
        self.facts: dict[str, Any] = json.loads(header)
        if "error" in self.facts:
            raise RuntimeError(f"rank {rank} cannot send its state: {self.facts['error']}")

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


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        raw = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", raw)[1] != os.geteuid():
            return
        token, question = json.loads(self.rfile.readline())
        header, tensors = self._answer(token, question)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has raised
            self.wfile.write(json.dumps(header).encode() + b"\n")
            for tensor in tensors:
                if tensor.numel():
                    self.wfile.write(_bytes_of(tensor))

    def _answer(self, token: str, question: Any) -> Answer:
        peers = _models.get(token)
        if peers is None or _answerer is None:
            return {"error": "it has deleted the model"}, []
        try:
            return _answerer(peers, question)
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
        """Start it if it does not run. Returns "" where that is not possible."""
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
    def _forget(cls) -> None:
        """In a forked child, which is no rank."""
        if cls._own is not None:
            cls._own.socket.close()
        cls._own = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A question that makes no sense is hung up on."""
