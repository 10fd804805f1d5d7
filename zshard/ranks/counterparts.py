"""Connect a rank to its counterparts on other hosts, over TCP, or find out why not.

Each rank listens, on any free port, at the address where other hosts reach its own; connects to
each counterpart, to send; and admits one connection of each, to receive. All ranks get the same
result.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from zshard.ranks.agreement import gather_objects
from zshard.ranks.groups import Group

_TOKEN, _RANK = 16, 4  # bytes: ranks know each other by the first, and say who they are
_PATIENCE = 30.0  # seconds until all counterparts must have connected
_SIOCGIFADDR = 0x8915
_SCOPES = ("00", "10")  # of IPv6: global, and this host

_T = TypeVar("_T")


class UnreachableError(Exception):
    """Raised on all ranks, with the same reason."""


def _on_all(group: Group, step: Callable[[], _T]) -> list[_T]:
    """Return what `step` returns on each rank. Raises UnreachableError if it raises OSError on
    any. Collective."""
    value, problem = None, ""
    try:
        value = step()
    except OSError as error:
        problem = str(error) or type(error).__name__
    values, problems = zip(*gather_objects((value, problem), group), strict=True)
    for rank, text in enumerate(problems):
        if text:
            raise UnreachableError(f"rank {rank}: {text}")
    return list(values)


def meet(
    group: Group, ranks: Sequence[int], timeout: float, stack: contextlib.ExitStack
) -> list[socket.socket | None]:
    """Return for each of `ranks` a socket to send to it over, and one to receive from it, None for
    this rank. The stack closes them. Collective over `group`; raises UnreachableError."""
    own, token = dist.get_rank(group), os.urandom(_TOKEN)
    addresses = _on_all(group, own_address)
    server = None

    def listen() -> tuple[str, int, bytes]:
        nonlocal server
        server = stack.enter_context(_listen(addresses, own, 2 * len(ranks)))
        return *server.getsockname()[:2], token

    offers = _on_all(group, listen)
    end = time.monotonic() + min(timeout / 2, _PATIENCE)  # the others wait for this one's outcome
    peers = [peer for peer in ranks if peer != own]
    out: dict[int, socket.socket] = {}
    into: dict[int, socket.socket] = {}

    def connect() -> None:
        assert server is not None
        for peer in peers:
            out[peer] = stack.enter_context(_reach(peer, offers[peer], own, end))
        into.update(_admit(peers, server, token, end, stack))

    _on_all(group, connect)
    return [side.get(peer) for peer in ranks for side in (out, into)]


def _listen(addresses: Sequence[str], own: int, backlog: int) -> socket.socket:
    """Listen where the other hosts reach this one."""
    address = addresses[own]
    outer = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    if outer and address not in outer:  # MASTER_ADDR is this host's name, for itself a loopback
        address = _address_towards(outer[0])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def _reach(peer: int, offer: tuple[str, int, bytes], own: int, end: float) -> socket.socket:
    """Connect to a rank, where it listens, and say who connects."""
    address, port, token = offer
    try:
        made = socket.create_connection((address, port), max(end - time.monotonic(), 0.01))
    except OSError as error:
        raise OSError(f"cannot reach rank {peer} at {address}: {error}") from error
    made.settimeout(None)
    made.sendall(token + own.to_bytes(_RANK))
    return made


def _admit(
    peers: Sequence[int],
    server: socket.socket,
    token: bytes,
    end: float,
    stack: contextlib.ExitStack,
) -> dict[int, socket.socket]:
    """Accept a connection from each of `peers`. Others do not know the token, and none of them
    keeps this waiting."""
    made: dict[int, socket.socket] = {}
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while missing := [peer for peer in peers if peer not in made]:
            ready = selector.select(max(end - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"rank {missing[0]} has not connected")
            for key, _ in ready:
                connection: Any = key.fileobj
                if connection is server:
                    with contextlib.suppress(BlockingIOError, ConnectionError):  # it has exited
                        connection = stack.enter_context(server.accept()[0])
                        selector.register(connection, selectors.EVENT_READ, bytearray())
                elif (hello := _hello_of(connection, key.data)) is not None:
                    selector.unregister(connection)
                    peer = int.from_bytes(hello[_TOKEN:])
                    if hello[:_TOKEN] == token and peer in missing:
                        made[peer] = connection
                    else:
                        connection.close()
    return made


def _hello_of(connection: Any, so_far: bytearray) -> bytes | None:
    """Receive what has come. Return all of it at its end; None: more is to come."""
    text = b""
    with contextlib.suppress(ConnectionError):
        text = connection.recv(_TOKEN + _RANK - len(so_far))
    so_far += text
    return None if text and len(so_far) < _TOKEN + _RANK else bytes(so_far)


def own_address() -> str:
    """Return this host's address towards the others: that of gloo's interface, if it is named, or
    the one from which it reaches MASTER_ADDR. Raises OSError."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return _address_of(name)
    return _address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())


def _address_of(interface: str) -> str:
    """Return its IPv4 address, or else its global IPv6 address. Raises OSError."""
    request = struct.pack("256s", interface[:15].encode())
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(FileNotFoundError):  # without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope in _SCOPES:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise OSError(f"GLOO_SOCKET_IFNAME={interface}: it has no address")


def _address_towards(host: str) -> str:
    """Return the address from which this host reaches another; sends nothing. Raises OSError."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"there is no route to {host}")
