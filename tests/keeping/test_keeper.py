"""The keeper holds the memory of ranks that exit, serves clients while others fail, misuse it or
belong to other runs, and ends when nothing can resume."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import all_refused, all_rows

from zshard import KeeperError
from zshard.extras.keeping import client
from zshard.extras.keeping import keeper as process
from zshard.extras.keeping.client import Keeper, start

PATIENCE = 60.0  # seconds for events that are immediate on an idle machine


def memory(text: bytes) -> int:
    """A memory file with that text."""
    fd = os.memfd_create("kept")
    os.write(fd, text)
    return fd


def text_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def taken(keeper: Keeper, name: str) -> list[bytes]:
    """The texts held under a name."""
    found = keeper.get(name)
    assert found is not None
    texts = [text_of(fd) for fd in found.fds]
    for fd in found.fds:
        os.close(fd)
    return texts


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def has_ended(keeper: Keeper) -> bool:
    try:
        keeper.list()
    except KeeperError:
        return True
    return False


def fork(call: Callable[[], object]) -> int:
    """Start a child that calls, and exits with status 0 unless that raises; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        call()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def in_child(call: Callable[[], object]) -> None:
    assert os.waitpid(fork(call), 0)[1] == 0, "see the traceback on stderr"


def opened_by(pid: int) -> list[str]:
    """The open files of a process."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(link))
    return found


def descriptors_of(keeper: Keeper) -> list[str]:
    """The keeper's open files, except connections: it may not have seen the end of some yet."""
    return [link for link in opened_by(keeper.pid()) if not link.startswith("socket:")]


def connect(keeper: Keeper) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(PATIENCE)
    line.connect("\0" + client._address_of(keeper.token))
    return line


def give(line: socket.socket, packet: bytes, fds: list[int]) -> None:
    socket.send_fds(line, [packet], fds)


def head(op: str, token: str, **more: object) -> bytes:
    return json.dumps({"op": op, "token": token, "bytes": 0, "fds": 0, **more}).encode()


# --- held memory ----------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_read_by_another(keeper: Keeper) -> None:
    def leave() -> None:
        keeper.hold("rank 0", b'{"step": 7}', [memory(b"shards"), memory(b"states")])
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitpid(fork(leave), 0)[1] == signal.SIGKILL
    found = keeper.get("rank 0")
    assert found is not None
    assert (found.meta, [text_of(fd) for fd in found.fds]) == (
        b'{"step": 7}',
        [b"shards", b"states"],
    )
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in found.fds)
    assert keeper.list() == {"rank 0": b'{"step": 7}'}


def test_a_hold_replaces_and_a_drop_frees(keeper: Keeper) -> None:
    keeper.hold("a", b"1", [memory(b"old"), memory(b"older")])
    keeper.hold("b", b"", [])
    keeper.hold("a", b"2\n", [memory(b"new")])
    assert taken(keeper, "a") == [b"new"] and keeper.list() == {"a": b"2\n", "b": b""}
    assert taken(keeper, "b") == []
    assert (keeper.drop("a"), keeper.drop("a")) == (True, False)
    assert keeper.get("a") is None and keeper.list() == {"b": b""}


def test_many_descriptors_and_much_meta_arrive_in_order(keeper: Keeper) -> None:
    fds = [memory(b"%d" % i) for i in range(350)]
    meta = os.urandom(3 * process.PIECE + 1)
    keeper.hold("a", meta, fds)
    for fd in fds:
        os.close(fd)
    assert keeper.list() == {"a": meta}
    assert taken(keeper, "a") == [b"%d" % i for i in range(350)]


def test_what_cannot_be_held_is_refused(keeper: Keeper) -> None:
    def hold(name: str, meta: bytes = b"", fds: tuple[int, ...] = ()) -> Callable[[], None]:
        return lambda: keeper.hold(name, meta, list(fds))

    much = bytes((1 << 24) + 1)
    all_refused(
        {
            "a long name": (hold("n" * 513), KeeperError, "a name has 1 to 512 characters"),
            "no name": (hold(""), KeeperError, "a name has 1 to 512 characters"),
            "meta": (hold("a", much), KeeperError, "a message may have 16777216 bytes at most"),
            "fds": (hold("a", fds=(0,) * 4097), KeeperError, "4096 fds at most, got 4097"),
            "closed": (hold("a", fds=(memory(b""), 10**6)), OSError, "Bad file descriptor"),
        }
    )
    assert keeper.list() == {}


def test_a_thousand_holds_leak_no_descriptor(keeper: Keeper) -> None:
    fd = memory(b"x")
    keeper.hold("a", b"", [fd, fd])
    before = len(descriptors_of(keeper))
    for _ in range(1000):
        keeper.hold("a", b"", [fd, fd])
    assert len(descriptors_of(keeper)) == before
    pid = keeper.pid()
    wait_until(lambda: sum("socket:" in link for link in opened_by(pid)) == 1)  # it listens


def test_fifty_clients_at_once(keeper: Keeper) -> None:
    def use(i: int) -> None:
        for turn in range(4):
            text = b"%d of %d" % (turn, i)
            fds = [memory(text) for _ in range(5)]
            keeper.hold(f"{i}", text, fds)
            assert taken(keeper, f"{i}") == [text] * 5
            for fd in fds:
                os.close(fd)

    children = [fork(lambda i=i: use(i)) for i in range(50)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 50
    assert keeper.list() == {f"{i}": b"3 of %d" % i for i in range(50)}


# --- the process ---------------------------------------------------------------------------------------


def test_it_stands_apart_from_the_job_and_has_no_file(keeper: Keeper) -> None:
    pid = keeper.pid()
    proc = Path(f"/proc/{pid}")
    state = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    assert state["Name"].strip() == "zshard-keeper"
    assert int(state["VmRSS"].split()[0]) < 15 * 1024
    assert int(state["PPid"]) != os.getpid() and os.getsid(pid) not in (os.getsid(0), pid)
    assert os.readlink(proc / "cwd") == "/"
    assert keeper.token not in (proc / "cmdline").read_text()
    assert keeper.token not in Path("/proc/net/unix").read_text()
    assert [os.readlink(proc / f"fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3
    keeper.hold("a", b"", [memory(b"x")])
    kinds = [link.partition(":")[0] for link in descriptors_of(keeper)]
    assert {*kinds} <= {"/dev/null", "anon_inode", "/memfd", "pidfd"} and kinds.count("/memfd") == 1


def test_ctrl_c_and_a_hangup_are_the_jobs(keeper: Keeper) -> None:
    keeper.hold("a", b"", [0])
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(keeper.pid(), number)
    assert list(keeper.list()) == ["a"]
    os.kill(keeper.pid(), signal.SIGTERM)
    wait_until(lambda: has_ended(keeper))


def test_end_frees_and_its_token_is_refused(keeper: Keeper) -> None:
    keeper.hold("a", b"", [memory(b"x")])
    keeper.end()
    with pytest.raises(
        KeeperError, match=r"no keeper answers under this token: start the run without it"
    ):
        keeper.hold("a", b"", [])
    wait_until(lambda: has_ended(keeper))


def test_a_failed_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keeper.py").write_text("raise OSError('no sockets here')")
    monkeypatch.setattr(process, "__file__", str(tmp_path / "keeper.py"))
    with pytest.raises(KeeperError, match="did not start: OSError: no sockets here"):
        start()
    with pytest.raises(ProcessLookupError):
        start(watch_pid=2**22)


# --- its end -------------------------------------------------------------------------------------------


def test_it_ends_with_its_launcher(started: Callable[..., Keeper]) -> None:
    with subprocess.Popen(["sleep", "1000"]) as launcher:
        keeper = started(launcher.pid)
        keeper.hold("a", b"", [memory(b"kept")])
        with connect(keeper):  # a client that says nothing
            launcher.kill()
            launcher.wait()
            wait_until(lambda: has_ended(keeper))


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# --- clients that fail --------------------------------------------------------------------------------


def test_a_client_that_dies_in_a_message_changes_nothing(keeper: Keeper) -> None:
    keeper.hold("a", b"old", [memory(b"old")])
    before = len(descriptors_of(keeper))

    def begin() -> None:
        line = connect(keeper)
        give(line, head("hold", keeper.token, name="a", bytes=100, fds=3), [])
        give(line, b"+new", [memory(b"new"), memory(b"new")])
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(20):
        os.waitpid(fork(begin), 0)
    wait_until(lambda: len(descriptors_of(keeper)) == before)
    assert taken(keeper, "a") == [b"old"] and keeper.list() == {"a": b"old"}


STRANGE = {  # packets, each with its number of descriptors, and the keeper's answer
    "noise": ([(b"\xff\x00\xfe" * 50, 0)], "not of zshard's protocol"),
    "nested": ([(b"[" * 30000, 0)], "not of zshard's protocol"),
    "a list": ([(b"[1, 2]", 0)], "not of zshard's protocol"),
    "no sizes": ([(b'{"op": "list"}', 0)], "not of zshard's protocol"),
    "true": ([(b'{"bytes": true, "fds": 0}', 0)], "lacks its sizes"),
    "negative": ([(b'{"bytes": -1, "fds": 0}', 0)], "lacks its sizes"),
    "huge": ([(b'{"bytes": 99999999999, "fds": 0}', 0)], "16777216 bytes at most"),
    "many": ([(b'{"bytes": 0, "fds": 4097}', 0)], "4096 fds at most"),
    "long": ([(b"x" * 100000, 0)], "a packet is too long"),
    "two heads": ([(b'{"bytes": 9, "fds": 0}', 0)] * 2, "out of order"),
    "more": ([(b'{"bytes": 1, "fds": 0}', 0), (b"+22", 0)], "longer than its head says"),
    "more fds": ([(b'{"bytes": 1, "fds": 1}', 0), (b"+", 2)], "longer than its head says"),
    "no name": ([(b'{"bytes": 0, "fds": 0, "op": "hold", "token": "T"}', 0)], "a name has"),
    "a dict": ([(b'{"bytes": 0, "fds": 0, "op": "get", "token": "T", "name": {}}', 0)], "a name"),
    "no op": ([(b'{"bytes": 0, "fds": 0, "op": {}}', 0)], "no such operation"),
    "wrong token": ([(head("end", "wrong"), 0)], "the token is wrong"),
    "odd token": ([(head("end", "\ud800"), 0)], "the token is wrong"),
    "no token": ([(b'{"bytes": 0, "fds": 0, "op": "end"}', 0)], "the token is wrong"),
    "descriptors": ([(b'{"bytes": 1, "fds": 0}', 100), (b"+1", 100)], "longer than its head"),
    "too many": ([(b'{"bytes": 1, "fds": 200}', 0), (b"+1", 200)], "as many descriptors open"),
}


def test_strange_packets_are_refused(keeper: Keeper) -> None:
    keeper.hold("a", b"", [memory(b"kept")])
    before = len(descriptors_of(keeper))
    with all_rows() as row:
        for strange, (sent, said) in STRANGE.items():
            with row(strange), connect(keeper) as line:
                for packet, count in sent:
                    give(line, packet.replace(b'"T"', f'"{keeper.token}"'.encode()), [0] * count)
                assert said in json.loads(line.recv(1 << 16))["refused"]
                give(line, b"more", [0] * 50)
            wait_until(lambda: len(descriptors_of(keeper)) == before)
    assert taken(keeper, "a") == [b"kept"]


def test_a_client_that_never_reads_blocks_no_other(keeper: Keeper) -> None:
    """Its reply waits, and names the files that were held when it asked."""
    meta = os.urandom(1 << 22)
    keeper.hold("a", meta, [memory(b"old %d" % i) for i in range(300)])
    lazy = [connect(keeper) for _ in range(10)]
    for line in lazy:
        give(line, head("get", keeper.token, name="a"), [])
    wait_until(lambda: bool(lazy[-1].recv(1, socket.MSG_PEEK)))
    keeper.hold("a", b"new", [memory(b"new")] * 300)
    assert taken(keeper, "a") == [b"new"] * 300
    reply = client._receive(lazy[0], time.monotonic() + PATIENCE)
    assert [text_of(fd) for fd in reply.fds] == [b"old %d" % i for i in range(300)]
    assert reply.body == meta
    for line in lazy:
        line.close()
    wait_until(lambda: len(descriptors_of(keeper)) < 400)


def test_idle_connections_make_room(
    started: Callable[..., Keeper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(process.__file__).read_text()
    hasty = text.replace("PATIENCE = 10.0 ", "PATIENCE = 0.3 ")
    assert hasty != text
    (tmp_path / "keeper.py").write_text(hasty)
    monkeypatch.setattr(process, "__file__", str(tmp_path / "keeper.py"))
    keeper = started()
    idle = [connect(keeper) for _ in range(process.MOST_LINES + 20)]
    idle[0].send(head("list", keeper.token))  # and never reads
    keeper.hold("a", b"", [])
    assert keeper.list() == {"a": b""}
    for line in idle:
        line.close()


def test_its_limit_of_descriptors_is_named() -> None:
    def fill() -> None:
        os.closerange(3, 65536)  # files that other tests of this process have open
        resource.setrlimit(resource.RLIMIT_NOFILE, (process.SPARE + 120,) * 2)
        keeper, fd = Keeper(start()), memory(b"x")
        try:
            keeper.hold("a", b"", [fd] * 100)
            for count in (30, 600):
                with pytest.raises(KeeperError, match=r"descriptors.*\(ulimit -n"):
                    keeper.hold("b", b"", [fd] * count)
            keeper.hold("a", b"", [fd] * 110)
            assert list(keeper.list()) == ["a"] and len(taken(keeper, "a")) == 110
        finally:
            keeper.end()

    in_child(fill)


def test_the_clients_limit_of_descriptors_is_named(keeper: Keeper) -> None:
    def use() -> None:
        os.closerange(3, 65536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
        with pytest.raises(KeeperError, match=r"raise it \(ulimit -n\)"):
            keeper.get("a")

    keeper.hold("a", b"", [memory(b"")] * 90)
    in_child(use)
    assert len(taken(keeper, "a")) == 90


def test_a_stopped_keeper_is_a_timeout(keeper: Keeper) -> None:
    pid = keeper.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(KeeperError, match=r"did not answer within 0\.2 s"):
            Keeper(keeper.token, timeout=0.2).list()
    finally:
        os.kill(pid, signal.SIGCONT)
    keeper.list()


# --- other users --------------------------------------------------------------------------------------


@needs_root
def test_another_user_gets_nothing(keeper: Keeper) -> None:
    def ask() -> None:
        os.setuid(NOBODY)
        with pytest.raises(KeeperError, match="belongs to user 0"):
            keeper.get("a")
        with connect(keeper) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.send(head("get", keeper.token, name="a"))
            assert line.recv(100) == b""

    keeper.hold("a", b"", [memory(b"secret")])
    in_child(ask)
    assert taken(keeper, "a") == [b"secret"]


@needs_root
def test_an_address_that_another_user_took_gets_nothing() -> None:
    """It would get descriptors of our memory."""
    keeper = Keeper("a token that others know")
    address = "\0" + client._address_of(keeper.token)
    readable, writable = os.pipe()
    until, until_closed = os.pipe()

    def take() -> None:
        os.setuid(NOBODY)
        os.close(until_closed)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen()
        os.write(writable, b"x")
        # Processes of other tests that list keepers also connect.
        while listener in select.select([listener, until], [], [])[0]:
            assert listener.accept()[0].recv(100) == b""

    child = fork(take)
    os.read(readable, 1)
    with pytest.raises(KeeperError, match="belongs to user 65534"):
        keeper.hold("a", b"", [memory(b"secret")])
    os.close(until_closed)
    assert os.waitpid(child, 0)[1] == 0
