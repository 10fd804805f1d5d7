"""Read part files of other hosts over the wire, a range of bytes at a time.

Each rank has one server per host that it reads from, and a thread per client. A request is three
numbers; each chunk of the answer begins with the length of an error's text, 0 if the bytes follow.
Messages are sends and receives of a gloo process group of zshard's own, which knows the hosts'
addresses; they go straight into the memory of the tensor that is read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zshard import api
from zshard.api import CheckpointError, OpenFile, bytes_of

_REQUEST, _ANSWER = 1, 2  # tags
_CHUNK = 2**22  # bytes
_GOODBYE = -1
_DAMAGED, _UNREADABLE = "d", "u"  # how the text of an error begins
_LAST_WORDS = 60.0  # seconds to wait for a client's goodbye after this rank's own


class RemoteParts:
    """Context manager that serves this host's part files, and reads those of others.

    Collective, on entry and on exit. read() is not: it needs no action of other ranks' scripts.
    """

    def __init__(
        self,
        group: ProcessGroup,
        names: Sequence[str],
        paths: Mapping[str, str],
        servers: Mapping[str, int],
        clients: Sequence[int],
        hosts: Sequence[str],
    ) -> None:
        """group: a gloo group of all ranks, for this alone.
        names: all part files, in the same order on all ranks.
        paths: where this host has them, as far as it does.
        servers: the ranks that this rank reads other part files from.
        clients: the ranks that read from this one.
        hosts: by rank.
        """
        self._group, self._names, self._paths = group, names, paths
        self._numbers = {name: i for i, name in enumerate(names)}
        self._servers, self._hosts = servers, hosts
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in clients
        ]

    def __enter__(self) -> RemoteParts:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, api.PeerError):
            return  # the connection of the rank that exited is closed, which ends its server
        for rank in sorted(set(self._servers.values())):
            with contextlib.suppress(RuntimeError):
                self._send(rank, _REQUEST, torch.tensor([_GOODBYE, 0, 0]))
        for thread in self._threads:
            thread.join(_LAST_WORDS)

    def read(self, name: str, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes of a part file from byte `offset` on. Raise CheckpointError
        if the file is damaged, and OSError if it or its host cannot be read; both name the host."""
        rank = self._servers[name]
        host = self._hosts[rank]
        try:
            self._send(rank, _REQUEST, torch.tensor([self._numbers[name], offset, len(memory)]))
            for begin in range(0, len(memory), _CHUNK):
                length = int(self._receive(rank, _ANSWER, torch.empty(1, dtype=torch.int64)))
                if length > 0:
                    data = self._receive(rank, _ANSWER, torch.empty(length, dtype=torch.uint8))
                    text = bytes(data.tolist()).decode(errors="replace")
                    kind = CheckpointError if text.startswith(_DAMAGED) else OSError
                    raise kind(f"on host '{host}': {text[1:]}")
                into = memory[begin : begin + _CHUNK]
                self._receive(rank, _ANSWER, torch.frombuffer(into, dtype=torch.uint8))
        except RuntimeError as error:  # gloo's
            where = f"host '{host}' (rank {rank})"
            raise ConnectionError(f"cannot read '{name}' from {where}: {error}") from None

    # --- the other side, in threads ---------------------------------------------------------------

    def _serve(self, client: int) -> None:
        """Answer the requests of a rank until it says goodbye or exits."""
        chunk = torch.empty(_CHUNK, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError), contextlib.ExitStack() as stack:
            opened: dict[int, OpenFile] = {}
            while True:
                request = self._receive(client, _REQUEST, torch.empty(3, dtype=torch.int64))
                number, offset, length = request.tolist()
                if number == _GOODBYE:
                    return
                for begin in range(0, length, _CHUNK):
                    part = chunk[: min(_CHUNK, length - begin)]
                    error = self._fill(stack, opened, number, offset + begin, part)
                    self._send(client, _ANSWER, torch.tensor([len(error)]))
                    if error:
                        part = torch.frombuffer(bytearray(error), dtype=torch.uint8)
                    self._send(client, _ANSWER, part)
                    if error:
                        break

    def _fill(
        self,
        stack: contextlib.ExitStack,
        opened: dict[int, OpenFile],
        number: int,
        offset: int,
        chunk: Tensor,
    ) -> bytes:
        """Read a chunk of a part file. Return the text of the error, or nothing."""
        try:
            if number not in opened:
                path = self._paths[self._names[number]]
                opened[number] = stack.enter_context(OpenFile(path, follow=False))
            opened[number].read_into(bytes_of(chunk), offset)
        except Exception as error:
            kind = _DAMAGED if isinstance(error, CheckpointError) else _UNREADABLE
            return f"{kind}{error or type(error).__name__}".encode()
        return b""

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, rank: int, tag: int, tensor: Tensor) -> None:
        work: Any = self._group.send([tensor], rank, tag)
        work.wait()

    def _receive(self, rank: int, tag: int, tensor: Tensor) -> Tensor:
        work: Any = self._group.recv([tensor], rank, tag)
        work.wait()
        return tensor
