"""Connections between ranks of different hosts: who is admitted, over which addresses, and that all
ranks take c10d with one reason if a rank cannot connect."""

import contextlib
import socket
import struct
import time
import warnings

import pytest
import torch.distributed as dist
from groups import case_of, hosts_of
from spawn import on_ranks

from zshard.ranks import counterparts

TOKEN = bytes(range(16))
PEER = 3
HELLO = TOKEN + PEER.to_bytes(4)
SOON = 60.0
"""Seconds that nothing here takes."""


def admitted(*talks):
    """Return who is admitted if these connect in turn, each a list of its messages, before the
    peer, which sends byte by byte. A stray's message is followed by a reset if it is None."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = [stack.enter_context(socket.create_connection(server.getsockname())) for _ in talks]
        for connection, words in zip(made, talks, strict=True):
            for word in words:
                if word is None:
                    reset = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                    connection.close()
                else:
                    connection.sendall(word)
        peer = stack.enter_context(socket.create_connection(server.getsockname()))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(len(HELLO)):
            peer.sendall(HELLO[i : i + 1])
        found = counterparts._admit([PEER], server, TOKEN, time.monotonic() + SOON, stack)
        assert found[PEER].getpeername() == peer.getsockname()
        assert found[PEER].gettimeout() is None
        peer.sendall(b"what follows")
        assert found[PEER].recv(4) == b"what"
        return set(found)


@pytest.mark.parametrize(
    "stray",
    [
        [],
        [HELLO[:5]],
        [HELLO[:5], None],
        [None],
        [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"],
        [TOKEN + (PEER + 1).to_bytes(4)],
        [TOKEN[::-1] + PEER.to_bytes(4)],
    ],
    ids=["silent", "partial", "partial-reset", "reset", "http", "other-rank", "wrong-token"],
)
def test_strays_are_refused_and_no_rank_waits(stray):
    assert admitted(stray, stray) == {PEER}


def test_hello_in_parts():
    first, second = socket.socketpair()
    with first, second:
        so_far = bytearray()
        second.sendall(HELLO[:7])
        assert counterparts._hello_of(first, so_far) is None
        second.sendall(HELLO[7:] + b"more")
        assert counterparts._hello_of(first, so_far) == HELLO
        assert first.recv(9) == b"more"


def test_peer_that_does_not_come_is_named():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with pytest.raises(TimeoutError, match="rank 3 has not connected"):
            counterparts._admit([PEER], server, TOKEN, time.monotonic(), stack)


# --- addresses ------------------------------------------------------------------------------------


def test_loopback_is_replaced_where_others_are_outside(monkeypatch):
    asked = []
    monkeypatch.setattr(
        counterparts, "_address_towards", lambda to: asked.append(to) or "127.0.0.2"
    )
    with counterparts._listen(["127.0.1.1", "127.0.0.1", "192.0.2.7"], 0, 2) as server:
        assert server.getsockname()[0] == "127.0.0.2" and asked == ["192.0.2.7"]
    with counterparts._listen(["127.0.0.1", "127.0.0.1"], 0, 2) as server:
        assert server.getsockname()[0] == "127.0.0.1" and len(asked) == 1


def test_own_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert counterparts.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert counterparts.own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none77")
    with pytest.raises(OSError, match="none77"):
        counterparts.own_address()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def head_of(group, transport="auto"):
    """Return the transport that a model takes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = case_of(group, "mlp", transport=transport, timeout=60).summary().splitlines()[0]
    return head, [str(each.message) for each in caught if "hosts" in str(each.message)]


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
@on_ranks(2)
def test_ipv6():
    with hosts_of(1, 1) as group, pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        patch.setenv("MASTER_ADDR", "::1")
        assert counterparts.own_address() == "::1"
        head, _ = head_of(group, "hosts")
    assert "transport hosts" in head


# --- where ranks cannot connect -------------------------------------------------------------------


def closed(*_):
    """Return a socket that refuses connections."""
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


def fails(*_):
    raise OSError("no such network")


def forges(reach):
    """Return `reach`, but with another token."""
    return lambda peer, offer, own, end: reach(peer, (*offer[:2], TOKEN), own, end)


def check_refusal(sizes, guilty, patch, reason):
    """All ranks take c10d, and say why, if the attributes of `patch` are replaced on one rank."""
    with hosts_of(*sizes) as group, pytest.MonkeyPatch.context() as patches:
        patches.setattr(counterparts, "_PATIENCE", 1.0)
        if dist.get_rank() == guilty:
            for name, value in patch.items():
                patches.setattr(counterparts, name, value)
        with pytest.raises(RuntimeError) as error:
            head_of(group, "hosts")
        text = str(error.value)
        assert "ranks of different hosts cannot connect" in text and reason in text, text
        head, texts = head_of(group)
    assert "transport c10d" in head
    assert len(texts) == (dist.get_rank() == 0)
    assert all(reason in each for each in texts), texts


@on_ranks(4)
def test_refused_connection():
    check_refusal((2, 2), 2, {"_listen": closed}, "rank 0: cannot reach rank 2 at 127.0.0.1")


@on_ranks(4)
def test_rank_without_an_address():
    check_refusal((2, 2), 3, {"own_address": fails}, "rank 3: no such network")


@on_ranks(2)
def test_wrong_token():
    forged = {"_reach": forges(counterparts._reach)}
    check_refusal((1, 1), 0, forged, "rank 1: rank 0 has not connected")
