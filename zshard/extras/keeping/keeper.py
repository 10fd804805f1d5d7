"""The keeper: a process that holds descriptors of memory files while the ranks of a run die.

client.py starts this file as a program, `python -I -S keeper.py`. It imports the standard library
alone, so it starts in tens of milliseconds and takes about 10 MiB; the client imports the packets
from here.

A connection carries one request and its reply, each a message: a packet with a head in JSON, then
packets of "+" and a piece of the body, with descriptors. The head has their totals, "bytes" and
"fds". Packets (SOCK_SEQPACKET) arrive in full or not at all, so a client that dies leaves nothing
half-read.

The address is an abstract socket, which lies in no directory and ends with the process. Only
processes of the keeper's own user are answered; the kernel names the user. Requests also need the
token, since containers that share a network have the same users. A request that cannot be served
is refused in the reply.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from _operator import _compare_digest  # hmac's, without the 4 MiB of OpenSSL
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PREFIX = "zshard-keeper-"
PIECE, FDS = 1 << 15, 100  # of a packet: bytes and descriptors at most
MOST_BYTES, MOST_FDS, MOST_NAME = 1 << 24, 4096, 512  # of a message
MOST_LINES = 200  # open connections; more wait to be accepted
PATIENCE = 10.0  # seconds without progress after which a connection is closed
SPARE = MOST_LINES + 64  # descriptors that the keeper itself needs

Head = dict[str, Any]
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)


class Descriptors(list[int]):
    """Owns descriptors: closes them with its last reference, as a reply may still name some that
    were replaced."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in self:  # also when Python has emptied this module, at exit
            close(fd)


class Message:
    """A message as its packets arrive. head: {} until the first packet. is_limited: refuse one that
    is too long for a request."""

    def __init__(self, is_limited: bool = True) -> None:
        self.is_limited = is_limited
        self.head: Head = {}
        self.body = bytearray()
        self.fds = Descriptors()

    def add(self, packet: bytes, fds: Descriptors) -> bool:
        """Add a packet; return whether the message is complete. Raises ValueError for a packet that
        is no part of a message."""
        if not self.head:
            self.head = _read_head(packet, self.is_limited)
        elif packet[:1] != b"+":
            raise ValueError("a packet is out of order")
        else:
            self.body += packet[1:]
            self.fds += fds
            fds.clear()
        over = (len(self.body) - self.head["bytes"], len(self.fds) - self.head["fds"])
        if max(over) > 0:
            raise ValueError("a message is longer than its head says")
        return over == (0, 0)


def _read_head(packet: bytes, is_limited: bool) -> Head:
    try:
        head = json.loads(packet)
        sizes = [head[name] for name in ("bytes", "fds")]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("a packet is not of zshard's protocol") from None
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a head lacks its sizes")
    for size, most, what in zip(sizes, (MOST_BYTES, MOST_FDS), ("bytes", "fds"), strict=True):
        if is_limited and size > most:
            raise ValueError(f"a message may have {most} {what} at most, got {size}")
    return dict(head)


def packets(
    head: Head, body: bytes = b"", fds: Sequence[int] = ()
) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Yield a message's packets, with the descriptors of each."""
    yield json.dumps({**head, "bytes": len(body), "fds": len(fds)}).encode(), ()
    for i in range(max(-(-len(body) // PIECE), -(-len(fds) // FDS))):
        yield b"+" + body[i * PIECE :][:PIECE], fds[i * FDS :][:FDS]


def send(line: socket.socket, packet: bytes, fds: Sequence[int], deadline: float) -> None:
    """Send a packet; wait while the user has too many descriptors in flight."""
    control = [(*_RIGHTS, array.array("i", fds))] if fds else []
    while True:
        try:
            line.sendmsg([packet], control, socket.MSG_NOSIGNAL)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def receive(line: socket.socket) -> tuple[bytes, Descriptors]:
    """Receive a packet, b"" at the end. Raises OSError (EMFILE) if this process cannot have that
    many descriptors, and ValueError for a packet that is too long."""
    room = socket.CMSG_SPACE(FDS * array.array("i").itemsize)
    data, control, flags, _ = line.recvmsg(PIECE + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = Descriptors()
    for level, kind, content in control:
        if (level, kind) == _RIGHTS:
            fds += array.array("i", content[: len(content) // 4 * 4])
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if flags & socket.MSG_TRUNC:
        raise ValueError("a packet is too long")
    return data, fds


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end: of a client, that which connected."""
    pid, user, _ = array.array("i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


class _Refused(Exception):
    """Why a request is not served, for the client's error."""


Reply = tuple[Head, bytes, Sequence[int]]


class _Keeping:
    """What the keeper holds. A thread serves each connection, so no client can block another."""

    def __init__(self, token: str) -> None:
        self.token, self.lock, self.is_over = token, threading.Lock(), False
        self.held: dict[str, tuple[bytes, Descriptors]] = {}  # meta and files, by name
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE

    def run(self, listener: socket.socket, pidfd: int) -> None:
        """Serve until the launcher, whose pidfd this is, has ended."""
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(listener, select.POLLIN)
        while all(fd != pidfd for fd, _ in poll.poll()):
            try:
                if threading.active_count() > MOST_LINES:
                    raise BlockingIOError
                line = listener.accept()[0]
            except OSError:  # too many connections or descriptors, or the client ended
                time.sleep(0.01)
                continue
            threading.Thread(target=self.serve, args=(line,), daemon=True).start()

    def serve(self, line: socket.socket) -> None:
        """Answer the request of a connection. What comes after an answer is dropped: the client
        closes the line when it has read."""
        request: Message | None = Message()
        with line, contextlib.suppress(OSError):
            line.settimeout(PATIENCE)
            while peer_of(line)[1] == os.geteuid():
                reply: Reply | None = None
                try:
                    packet, fds = receive(line)
                    if not packet:
                        return
                    if request is not None and request.add(packet, fds):
                        with self.lock:
                            reply = self.answer(request)
                except (ValueError, _Refused) as error:
                    reply = {"refused": str(error)}, b"", ()
                except OSError as error:
                    if error.errno != errno.EMFILE:
                        raise
                    why = "it has as many descriptors open as the limit allows (ulimit -n)"
                    reply = {"refused": why}, b"", ()
                if request is not None and reply is not None:
                    request = None
                    for packet, some in packets(*reply):
                        send(line, packet, some, time.monotonic() + PATIENCE)
                    if self.is_over:
                        os._exit(0)

    # --- requests ---------------------------------------------------------------------------------

    def answer(self, request: Message) -> Reply:
        serve = getattr(self, f"op_{request.head.get('op')}", None)
        if serve is None:
            raise _Refused("it has no such operation")
        token = str(request.head.get("token")).encode(errors="replace")
        if not _compare_digest(token, self.token.encode()):
            raise _Refused("the token is wrong")
        reply: Reply = serve(request)
        return reply

    def op_hold(self, request: Message) -> Reply:
        name = self.name_in(request)
        others = sum(len(fds) for key, (_, fds) in self.held.items() if key != name)
        if others + len(request.fds) > self.room:
            raise _Refused(
                f"it may hold {max(0, self.room)} descriptors: raise that (ulimit -n -H)"
            )
        self.held[name] = bytes(request.body), request.fds
        return {}, b"", ()

    def op_get(self, request: Message) -> Reply:
        entry = self.held.get(self.name_in(request))
        return ({"found": False}, b"", ()) if entry is None else ({"found": True}, *entry)

    def op_list(self, _: Message) -> Reply:
        sizes = [[name, len(meta)] for name, (meta, _) in self.held.items()]
        metas = b"".join(meta for meta, _ in self.held.values())
        return {}, json.dumps(sizes).encode() + b"\n" + metas, ()

    def op_drop(self, request: Message) -> Reply:
        return {"found": self.held.pop(self.name_in(request), None) is not None}, b"", ()

    def op_end(self, _: Message) -> Reply:
        self.held.clear()
        self.is_over = True
        return {}, b"", ()

    @staticmethod
    def name_in(request: Message) -> str:
        name = request.head.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            raise _Refused(f"a name has 1 to {MOST_NAME} characters")
        return name


def _detach() -> None:
    """Leave the job: its session, its Ctrl-C, its folder, and its pipes, whose readers wait for
    their end. The client waits for the parent that exits here."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("zshard-keeper")  # what ps and top show
    for score in ("-1000", "0"):  # the second for users who may not go below what they began with
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(score)
            break


def main(address: str, pidfd: str) -> None:
    """Listen on an address; the token comes from stdin, as arguments can be read by all users."""
    token = sys.stdin.read()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.setblocking(False)
    listener.listen(socket.SOMAXCONN)
    _detach()
    listener.listen(socket.SOMAXCONN)  # again: the kernel names who did so last
    _Keeping(token).run(listener, int(pidfd))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
