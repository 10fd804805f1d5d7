"""The keeper holds what ranks leave, whatever its clients do, and ends when nothing can resume."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zshard import KeeperError
from zshard.keeping import client
from zshard.keeping import keeper as process
from zshard.keeping.client import Keeper, KeeperStatus, keepers, start

NOBODY = 65534
PATIENCE = 60.0  # seconds for what happens at once on an idle machine
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def memory(text: bytes) -> int:
    """A memory file with that text."""
    fd = os.memfd_create("kept")
    os.write(fd, text)
    return fd


def text_of(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def taken(keeper: Keeper, name: str) -> list[bytes]:
    """The texts of what is held under a name."""
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
        keeper.status()
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


def pid_of(keeper: Keeper) -> int:
    return keeper.status().pid


def opened_by(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(link))
    return found


def descriptors_of(keeper: Keeper) -> list[str]:
    """What the keeper has open, except connections: it may not have seen the end of some yet."""
    return [link for link in opened_by(pid_of(keeper)) if not link.startswith("socket:")]


@pytest.fixture
def started() -> Iterator[Callable[..., Keeper]]:
    """Start keepers that end with the test."""
    made: list[Keeper] = []

    def begin(*args: float, **options: float) -> Keeper:
        made.append(Keeper(start(*args, **options)))
        return made[-1]

    yield begin
    for keeper in made:
        with contextlib.suppress(KeeperError):
            keeper.end()


@pytest.fixture
def keeper(started: Callable[..., Keeper]) -> Keeper:
    return started(600.0)


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process to watch."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


# --- what is held -----------------------------------------------------------------------------------


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
    assert found.holder == 0
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


def test_the_holder_is_named_while_it_lives(keeper: Keeper) -> None:
    def hold() -> None:
        keeper.hold("a", b"", [])
        signal.pause()

    child = fork(hold)
    wait_until(lambda: "a" in keeper.list())
    found = keeper.get("a")
    assert found is not None and found.holder == child == keeper.status().held["a"].holder
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = keeper.get("a")
    assert found is not None and found.holder == 0


def test_many_descriptors_and_much_meta_arrive_in_order(keeper: Keeper) -> None:
    fds = [memory(b"%d" % i) for i in range(350)]
    meta = os.urandom(3 * process.PIECE + 1)
    keeper.hold("a", meta, fds)
    for fd in fds:
        os.close(fd)
    found = keeper.get("a")
    assert found is not None and found.meta == meta
    assert [text_of(fd) for fd in found.fds] == [b"%d" % i for i in range(350)]
    for fd in found.fds:
        os.close(fd)


def test_sizes_count_each_file_once(keeper: Keeper) -> None:
    fd, pages = os.memfd_create("kept"), 40 * 4096
    os.write(fd, bytes(pages))
    keeper.hold("a", b"", [fd, fd])
    keeper.hold("b", b"", [os.dup(fd), memory(b"x")])
    status = keeper.status()
    assert [held[:2] for held in status.held.values()] == [(pages, 2), (pages + 4096, 2)]
    assert status.bytes == pages + 4096 and status.launcher == os.getpid()
    assert status.left is None and status.seconds == 600.0 and 0.0 < status.age < PATIENCE


@pytest.mark.parametrize(
    ("name", "meta", "fds", "said"),
    [
        ("n" * 513, b"", 0, "name must have a length of at most 512, got 513"),
        ("a", bytes((1 << 24) + 1), 0, "meta must have a length of at most 16777216"),
        ("a", b"", 4097, "fds must have a length of at most 4096, got 4097"),
    ],
)
def test_what_is_too_long_is_refused(
    keeper: Keeper, name: str, meta: bytes, fds: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        keeper.hold(name, meta, [0] * fds)


def test_a_descriptor_that_is_closed_is_the_callers_error(keeper: Keeper) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        keeper.hold("a", b"", [memory(b""), 10**6])
    with pytest.raises(KeeperError, match="a name has 1 to 512 characters"):
        keeper.hold("", b"", [])
    assert keeper.list() == {}


def test_a_thousand_holds_leak_no_descriptor(keeper: Keeper) -> None:
    fd = memory(b"x")
    keeper.hold("a", b"", [fd, fd])
    before = len(descriptors_of(keeper))
    for _ in range(1000):
        keeper.hold("a", b"", [fd, fd])
    assert len(descriptors_of(keeper)) == before
    pid = pid_of(keeper)
    wait_until(lambda: sum("socket:" in link for link in opened_by(pid)) == 1)  # it listens


def test_fifty_clients_at_once(keeper: Keeper) -> None:
    def use(i: int) -> None:
        for turn in range(10):
            text = b"%d of %d" % (turn, i)
            fds = [memory(text) for _ in range(5)]
            keeper.hold(f"{i}", text, fds)
            assert taken(keeper, f"{i}") == [text] * 5
            for fd in fds:
                os.close(fd)

    children = [fork(lambda i=i: use(i)) for i in range(50)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 50
    assert keeper.list() == {f"{i}": b"9 of %d" % i for i in range(50)}


# --- clients that fail --------------------------------------------------------------------------------


def connect(keeper: Keeper) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(PATIENCE)
    line.connect("\0" + client._address_of(keeper.token))
    return line


def give(line: socket.socket, packet: bytes, fds: list[int]) -> None:
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    line.sendmsg([packet], control)


def head(op: str, token: str, **more: object) -> bytes:
    return json.dumps({"op": op, "token": token, "bytes": 0, "fds": 0, **more}).encode()


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


STRANGE = {  # packets, each with how many descriptors, and what the keeper says
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
    "no pid": ([(b'{"bytes": 0, "fds": 0, "op": "watch", "token": "T"}', 0)], "not over"),
    "wrong token": ([(head("end", "wrong"), 0)], "the token is wrong"),
    "odd token": ([(head("end", "\ud800"), 0)], "the token is wrong"),
    "no token": ([(b'{"bytes": 0, "fds": 0, "op": "end"}', 0)], "the token is wrong"),
    "descriptors": ([(b'{"bytes": 1, "fds": 0}', 100), (b"+1", 100)], "longer than its head"),
    "too many": ([(b'{"bytes": 1, "fds": 200}', 0), (b"+1", 200)], "as many descriptors open"),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_strange_packets_are_refused(keeper: Keeper, strange: str) -> None:
    keeper.hold("a", b"", [memory(b"kept")])
    before = len(descriptors_of(keeper))
    sent, said = STRANGE[strange]
    with connect(keeper) as line:
        for packet, count in sent:
            give(line, packet.replace(b'"T"', f'"{keeper.token}"'.encode()), [0] * count)
        assert said in json.loads(line.recv(1 << 16))["refused"]
        give(line, b"more", [0] * 50)
    wait_until(lambda: len(descriptors_of(keeper)) == before)
    assert taken(keeper, "a") == [b"kept"]


def test_random_requests_never_end_it(keeper: Keeper) -> None:
    """Requests with the right token and fields of every type."""
    values: list[object] = [
        None,
        True,
        -1,
        1.5,
        10**400,
        "",
        "a",
        "x" * 9000,
        [],
        {},
        [[]],
        "\ud800",
    ]
    for op in ("hold", "get", "list", "drop", "watch", "status", "_held", "__class__"):
        for value in values:
            for field in ("name", "pid", "seconds", "op"):
                with connect(keeper) as line:
                    give(line, head(**{"op": op, "token": keeper.token, field: value}), [])
                    assert "bytes" in json.loads(line.recv(1 << 16)), (op, field, value)
    assert keeper.status().launcher == os.getpid()


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
    idle[0].send(head("status", ""))  # and never reads
    keeper.hold("a", b"", [])
    assert keeper.list() == {"a": b""}
    for line in idle:
        line.close()


def test_its_limit_of_descriptors_is_named() -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (process.SPARE + 120,) * 2)
        keeper, fd = Keeper(start()), memory(b"x")
        try:
            keeper.hold("a", b"", [fd] * 100)
            for count in (30, 600):
                with pytest.raises(KeeperError, match=r"descriptors.*\(ulimit -n"):
                    keeper.hold("b", b"", [fd] * count)
            keeper.hold("a", b"", [fd] * 110)
            assert list(keeper.list()) == ["a"] and keeper.status().held["a"].fds == 110
        finally:
            keeper.end()

    in_child(fill)


def test_the_clients_limit_of_descriptors_is_named(keeper: Keeper) -> None:
    def use() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
        with pytest.raises(KeeperError, match=r"raise it \(ulimit -n\)"):
            keeper.get("a")

    keeper.hold("a", b"", [memory(b"")] * 90)
    in_child(use)
    assert len(taken(keeper, "a")) == 90


def test_a_stopped_keeper_is_a_timeout(keeper: Keeper) -> None:
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(KeeperError, match=r"did not answer within 0\.2 s"):
            Keeper(keeper.token, timeout=0.2).list()
        assert pid in keepers()
    finally:
        os.kill(pid, signal.SIGCONT)
    keeper.list()


# --- other users --------------------------------------------------------------------------------------


@needs_root
def test_another_user_gets_nothing(keeper: Keeper) -> None:
    def ask() -> None:
        os.setuid(NOBODY)
        with pytest.raises(KeeperError, match="belongs to user 0, and this process to 65534"):
            keeper.get("a")
        with connect(keeper) as line, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.send(head("get", keeper.token, name="a"))
            assert line.recv(100) == b""
        assert keepers() == []

    keeper.hold("a", b"", [memory(b"secret")])
    in_child(ask)
    assert taken(keeper, "a") == [b"secret"]


@needs_root
def test_an_address_that_another_user_took_gets_nothing() -> None:
    """It would get descriptors of our memory."""
    keeper = Keeper("a token that others know")
    address = "\0" + client._address_of(keeper.token)
    readable, writable = os.pipe()

    def take() -> None:
        os.setuid(NOBODY)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen()
        os.write(writable, b"x")
        assert listener.accept()[0].recv(100) == b""
        assert listener.accept()[0].recv(100) == b""

    child = fork(take)
    os.read(readable, 1)
    with pytest.raises(KeeperError, match="belongs to user 65534, and this process to 0"):
        keeper.hold("a", b"", [memory(b"secret")])
    with pytest.raises(KeeperError, match="belongs to user 65534"):
        start(token=keeper.token)
    assert os.waitpid(child, 0)[1] == 0


# --- the process ---------------------------------------------------------------------------------------


def test_it_stands_apart_from_the_job(keeper: Keeper) -> None:
    pid = pid_of(keeper)
    proc = Path(f"/proc/{pid}")
    state = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    assert state["Name"].strip() == "zshard-keeper"
    assert int(state["VmRSS"].split()[0]) < 15 * 1024
    assert int(state["PPid"]) != os.getpid() and os.getsid(pid) not in (os.getsid(0), pid)
    assert os.readlink(proc / "cwd") == "/"
    assert keeper.token not in (proc / "cmdline").read_text()
    assert keeper.token not in Path("/proc/net/unix").read_text()
    assert [os.readlink(proc / f"fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3


def test_it_has_no_file(keeper: Keeper) -> None:
    keeper.hold("a", b"", [memory(b"x")])
    kinds = {link.partition(":")[0] for link in descriptors_of(keeper)}
    assert kinds <= {"/dev/null", "anon_inode", "/memfd", "pidfd"}
    assert sum("/memfd:" in link for link in descriptors_of(keeper)) == 1


def test_ctrl_c_and_a_hangup_are_the_jobs(tmp_path: Path) -> None:
    """A job that starts a keeper gets Ctrl-C, with its process group, and ends."""
    code = (
        "import signal; from zshard.keeping.client import Keeper, start; token = start()\n"
        "Keeper(token).hold('a', b'', [0]); print(token, flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as job:
        assert job.stdout is not None
        keeper = Keeper(job.stdout.readline().strip())
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait() != 0
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(pid_of(keeper), number)
    assert list(keeper.list()) == ["a"]
    os.kill(pid_of(keeper), signal.SIGTERM)
    wait_until(lambda: has_ended(keeper))


def test_end_frees_and_its_token_is_refused(keeper: Keeper) -> None:
    keeper.hold("a", b"", [memory(b"x")])
    keeper.end()
    with pytest.raises(KeeperError, match=r"no keeper answers under this token.*without the token"):
        keeper.hold("a", b"", [])
    wait_until(lambda: has_ended(keeper))


def test_of_many_starters_with_one_token_one_wins() -> None:
    token = f"together {os.getpid()}"

    def begin() -> None:
        assert start(token=token, watch_pid=os.getppid()) == token
        Keeper(token).hold(f"{os.getpid()}", b"", [])

    children = [fork(begin) for _ in range(8)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    keeper = Keeper(token)
    try:
        assert {*keeper.list()} == {f"{child}" for child in children}
    finally:
        keeper.end()


def test_a_start_waits_for_the_keeper_that_has_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT", 2.0)
    token = f"early {os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early:
        early.bind("\0" + client._address_of(token))  # it does not listen yet
        with pytest.raises(KeeperError):
            start(token=token)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_are_checked(seconds: float) -> None:
    with pytest.raises(ValueError, match="0 or more seconds"):
        start(seconds)


def test_a_failed_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keeper.py").write_text("raise OSError('no sockets here')")
    monkeypatch.setattr(process, "__file__", str(tmp_path / "keeper.py"))
    with pytest.raises(KeeperError, match="did not start: OSError: no sockets here"):
        start()
    with pytest.raises(ProcessLookupError):
        start(watch_pid=2**22)


# --- its end -------------------------------------------------------------------------------------------


def test_it_outlives_its_launcher(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes]
) -> None:
    keeper = started(600.0, launcher.pid)
    keeper.hold("a", b"", [memory(b"kept")])
    assert keeper.status().left is None
    launcher.kill()
    launcher.wait()
    wait_until(lambda: keeper.status().left is not None)
    assert taken(keeper, "a") == [b"kept"]
    first = keeper.status().left
    time.sleep(0.05)
    second = keeper.status().left
    keeper.list()
    third = keeper.status().left
    assert first is not None and second is not None and third is not None
    assert second <= first - 0.05 and second < third <= 600.0  # a status keeps it no longer


def test_it_ends_some_time_after_its_launcher(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes]
) -> None:
    keeper = started(0.2, launcher.pid)
    keeper.hold("a", b"", [memory(b"kept")])
    time.sleep(0.5)
    assert taken(keeper, "a") == [b"kept"]  # the launcher lives
    launcher.kill()
    launcher.wait()
    wait_until(lambda: has_ended(keeper))


def test_with_nothing_held_it_ends_with_its_launcher(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes]
) -> None:
    keeper = started(600.0, launcher.pid)
    keeper.hold("a", b"", [])
    keeper.drop("a")
    launcher.kill()
    launcher.wait()
    wait_until(lambda: has_ended(keeper))


def test_another_launcher_takes_over_what_no_process_uses(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes]
) -> None:
    keeper = started(600.0, launcher.pid)

    def hold() -> None:
        keeper.hold("a", b"", [memory(b"kept")])
        signal.pause()

    rank = fork(hold)
    wait_until(lambda: "a" in keeper.list())
    with pytest.raises(KeeperError, match=f"its run is not over: wait for process {launcher.pid}"):
        keeper.watch(os.getpid())
    launcher.kill()
    launcher.wait()
    with pytest.raises(KeeperError, match=rf"ranks of its run still live: .*\(kill {rank}\)"):
        keeper.watch(os.getpid())
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    keeper.watch(os.getpid(), 0.0)
    status = keeper.status()
    assert (status.launcher, status.left, status.seconds) == (os.getpid(), None, 0.0)
    keeper.drop("a")
    assert keeper.list() == {}


@pytest.mark.parametrize("pid", [None, "many", {}])
@pytest.mark.parametrize("seconds", [5, [], "many"])
def test_a_strange_launcher_changes_nothing(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes], pid: object, seconds: object
) -> None:
    keeper = started(600.0, launcher.pid)
    keeper.hold("a", b"", [])
    launcher.kill()
    launcher.wait()
    in_child(lambda: keeper.hold("a", b"", []))  # whose end leaves no living holder
    fd = os.pidfd_open(os.getpid())
    strange = head("watch", keeper.token, pid=pid, seconds=seconds, bytes=1, fds=1)
    with connect(keeper) as line:
        give(line, strange, [])
        give(line, b"+1", [fd])
        reply = line.recv(1 << 16)
        assert reply == b"" or "refused" in json.loads(reply)
    os.close(fd)
    status = keeper.status()
    assert (status.launcher, status.seconds) == (launcher.pid, 600.0)
    assert status.left is not None


def test_doctor_lists_keepers(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes]
) -> None:
    from zshard.doctor import of_keeper, report

    keeper = started(600.0, launcher.pid)
    keeper.hold("a", b"", [memory(bytes(3 << 20))])
    pid = pid_of(keeper)
    line = next(line for line in report()[0].splitlines() if f"kill {pid}" in line)
    assert f"process {pid}, " in line and "holds 3.0 MiB in 1 memory file(s)" in line
    assert f"ends with process {launcher.pid}" in line
    launcher.kill()
    launcher.wait()
    wait_until(lambda: keeper.status().left is not None)
    found = [each for each in keepers() if isinstance(each, KeeperStatus) and each.pid == pid]
    assert "unless its run is resumed" in of_keeper(found[0])
    assert of_keeper(7) == "process 7 does not answer: end it (kill -9 7)"
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: has_ended(keeper))
    assert f"kill {pid}" not in report()[0]
