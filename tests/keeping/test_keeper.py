"""The keeper holds what ranks leave, and ends when nothing can resume."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from keeping import (
    connect,
    descriptors_of,
    fork,
    has_ended,
    memory,
    opened_by,
    taken,
    text_of,
    wait_until,
)
from rows import all_refused

from zshard import KeeperError
from zshard.extras.keeping import keeper as process
from zshard.extras.keeping.client import Keeper, start

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
    found = keeper.get("a")
    assert found is not None and found.meta == meta
    assert [text_of(fd) for fd in found.fds] == [b"%d" % i for i in range(350)]
    for fd in found.fds:
        os.close(fd)


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


def test_it_stands_apart_from_the_job(keeper: Keeper) -> None:
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


def test_it_has_no_file(keeper: Keeper) -> None:
    keeper.hold("a", b"", [memory(b"x")])
    kinds = {link.partition(":")[0] for link in descriptors_of(keeper)}
    assert kinds <= {"/dev/null", "anon_inode", "/memfd", "pidfd"}
    assert sum("/memfd:" in link for link in descriptors_of(keeper)) == 1


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


def test_it_ends_with_its_launcher(
    started: Callable[..., Keeper], launcher: subprocess.Popen[bytes]
) -> None:
    keeper = started(launcher.pid)
    keeper.hold("a", b"", [memory(b"kept")])
    with connect(keeper):  # a client that says nothing
        launcher.kill()
        launcher.wait()
        wait_until(lambda: has_ended(keeper))
