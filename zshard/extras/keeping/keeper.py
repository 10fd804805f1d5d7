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
is refused in the reply; only the loop below waits, so no client can block another.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import sys
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


def send(line: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    """Send a packet; raises what sendmsg raises; ETOOMANYREFS passes."""
    control = [(*_RIGHTS, array.array("i", fds))] if fds else []
    line.sendmsg([packet], control, socket.MSG_NOSIGNAL)


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


class _Line:
    """A connection. packets: what is to be sent of the reply; owner: who owns its descriptors."""

    def __init__(self, line: socket.socket) -> None:
        self.socket = line
        self.request = Message()
        self.packets: collections.deque[tuple[bytes, Sequence[int]]] = collections.deque()
        self.owner: Sequence[int] = ()
        self.is_answered = False
        self.moved()

    def moved(self) -> None:
        self.deadline = time.monotonic() + PATIENCE

    def reply(self, head: Head, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        self.is_answered, self.owner = True, fds
        self.packets.extend(packets(head, body, fds))
        self.request = Message()


class _Keeping:
    """The keeper's state and its loop. pidfd: of the launcher, with which it ends."""

    def __init__(self, token: str, pidfd: int) -> None:
        self.token, self.pidfd, self.is_over = token, pidfd, False
        self.held: dict[str, tuple[bytes, Descriptors]] = {}  # meta and files, by name
        self.lines: dict[int, _Line] = {}
        self.last: _Line | None = None  # whose reply is the last, after `end`
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, listener: socket.socket) -> None:
        while not self.is_over and (self.last is None or self.last.packets):
            self.turn(listener)

    def turn(self, listener: socket.socket) -> None:
        poll = select.poll()
        if len(self.lines) < MOST_LINES and self.last is None:
            poll.register(listener, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        for fd, line in self.lines.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if line.packets else 0))
        for fd, events in poll.poll(self.patience()):
            if fd == listener.fileno():
                self.accept(listener)
            elif fd in self.lines:
                self.serve(self.lines[fd], events)
            elif fd == self.pidfd:
                self.is_over = True
        now = time.monotonic()
        for line in [line for line in self.lines.values() if line.deadline < now]:
            self.close(line)

    def patience(self) -> int | None:
        """Return the milliseconds until something is due without an event."""
        ends = [line.deadline - time.monotonic() for line in self.lines.values()]
        return max(0, int(min(min(ends), 3600.0) * 1e3) + 1) if ends else None

    def accept(self, listener: socket.socket) -> None:
        try:
            sock = listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                time.sleep(0.01)  # it stays readable
            return
        if peer_of(sock)[1] != os.geteuid():
            sock.close()
            return
        sock.setblocking(False)
        self.lines[sock.fileno()] = _Line(sock)

    def close(self, line: _Line) -> None:
        self.lines.pop(line.socket.fileno(), None)
        line.packets.clear()
        line.socket.close()

    def serve(self, line: _Line, events: int) -> None:
        try:
            if events & select.POLLIN:
                self.read(line)
            elif events & (select.POLLHUP | select.POLLERR):
                self.close(line)
            elif events & select.POLLOUT:
                send(line.socket, *line.packets[0])
                line.packets.popleft()
                line.moved()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # until others receive theirs
                time.sleep(0.005)
            else:
                self.close(line)
        except Exception:  # one bad request must not drop what is held for others
            self.close(line)

    def read(self, line: _Line) -> None:
        """Take a packet; answer a complete request. What comes after an answer is dropped: the
        client closes the line when it has read."""
        try:
            packet, fds = receive(line.socket)
            if not packet:
                self.close(line)
            elif not line.is_answered:
                line.moved()
                if line.request.add(packet, fds):
                    self.answer(line, line.request)
        except (ValueError, _Refused) as error:
            self.refuse(line, str(error))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self.refuse(line, "it has as many descriptors open as the limit allows (ulimit -n)")

    def refuse(self, line: _Line, why: str) -> None:
        if not line.is_answered:
            line.reply({"refused": why})

    # --- requests ---------------------------------------------------------------------------------

    def answer(self, line: _Line, request: Message) -> None:
        serve = getattr(self, f"op_{request.head.get('op')}", None)
        if serve is None:
            raise _Refused("it has no such operation")
        token = str(request.head.get("token")).encode(errors="replace")
        if not _compare_digest(token, self.token.encode()):
            raise _Refused("the token is wrong")
        serve(line, request)

    def op_hold(self, line: _Line, request: Message) -> None:
        name = self.name_in(request)
        others = sum(len(fds) for key, (_, fds) in self.held.items() if key != name)
        if others + len(request.fds) > self.room:
            raise _Refused(
                f"it may hold {max(0, self.room)} descriptors: raise that (ulimit -n -H)"
            )
        self.held[name] = bytes(request.body), request.fds
        line.reply({})

    def op_get(self, line: _Line, request: Message) -> None:
        entry = self.held.get(self.name_in(request))
        if entry is None:
            line.reply({"found": False})
        else:
            line.reply({"found": True}, *entry)

    def op_list(self, line: _Line, _: Message) -> None:
        sizes = [[name, len(meta)] for name, (meta, _) in self.held.items()]
        metas = b"".join(meta for meta, _ in self.held.values())
        line.reply({}, json.dumps(sizes).encode() + b"\n" + metas)

    def op_drop(self, line: _Line, request: Message) -> None:
        line.reply({"found": self.held.pop(self.name_in(request), None) is not None})

    def op_end(self, line: _Line, _: Message) -> None:
        self.held.clear()
        self.last = line
        line.reply({})

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
    _Keeping(token, int(pidfd)).run(listener)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
