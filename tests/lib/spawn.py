"""Run tests on several ranks: a standing pool (`on_ranks`, `RankPool`), or fresh ones (`run_ranks`).

The parent hosts the rendezvous store and only passes on its port, as torchrun's agent does, so that
no port is guessed and concurrent tests cannot interfere. Fresh ranks are plain subprocesses; those
of a pool are forked by the nursery. Every run has a hard limit; the first rank that fails ends the
run, and its output is the assertion's message. This file is also the entry point of fresh ranks.

    @on_ranks(2, 3)  # on each rank of a pool of 2, then of 3; torch.distributed (gloo) is up there
    def test_mean(tmp_path):  # its fixtures and parameters are sent to the ranks
        assert mean(1.0) == 1.0

    @ranks(2)  # what compares the ranks
    def test_all_have_one_mean(pool):
        assert len(set(pool.run(mean, 1.0))) == 1  # a module-level function; its value comes back

    def test_dies():  # fresh processes, nothing initialised: for crashes, environments, start-up
        results = run_ranks(mean, 2, 1.0, check=False)
"""

import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from asserts import rewrite_in_ranks
from nursery import connect, end_with_parent, fork_ranks, show_stacks_when_asked, start_nursery
from tasks import TAIL, RankFailure, RankResult, answer, call_of, python_path, task_of

GRACE = 2.0  # seconds for the other ranks to end after one failed
LEAVE = 10.0  # seconds from a rank's answer to its process's exit
START = 100.0  # seconds for the nursery to import torch on a loaded machine


def ranks(*worlds: Any) -> pytest.MarkDecorator:
    """Run a test once per world size (an int, or a pytest.param of one), with the session's pool of
    that size as argument `pool`."""
    return pytest.mark.parametrize("pool", worlds, indirect=True, ids=lambda world: f"{world}ranks")


def on_ranks(
    *worlds: Any, fresh: bool = False, **forks: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on each rank of the session's pool of that size, once per world size.

    Its fixtures and parameters are pickled. An assert that fails on a rank fails at its own line.
    Put other marks above this one.

    fresh: on newly forked ranks, where nothing is initialised. forks: fork_ranks()'s env, timeout,
    ...
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(pool: RankPool, **arguments: Any) -> None:
            __tracebackhide__ = True
            values = [arguments[parameter.name] for parameter in own]
            if fresh:
                fork_ranks(test, pool.world, *values, check=True, **forks)
            else:
                run_test(pool, test, values)

        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([pool, *own])  # type: ignore[attr-defined]
        test.body_on_ranks = body  # type: ignore[attr-defined]
        return ranks(*worlds)(test)

    return decorate


def run_test(pool: "RankPool", test: Any, values: list[Any]) -> None:
    """Run a decorated test on a pool's ranks; an assert that fails there fails at its own line."""
    __tracebackhide__ = True
    try:
        pool.run(test, *values)
    except RankFailure as failure:
        _raise_at_its_line(failure)


def _raise_at_its_line(failure: RankFailure) -> None:
    """Raise `failure` as if from the line of the test that failed on a rank, for pytest to show."""
    __tracebackhide__ = True
    if failure.line is None:
        raise failure
    file, line, text = failure.line
    code = compile("\n" * (line - 1) + "raise failure", file, "exec").replace(co_name="on a rank")
    failure.args = (f"{text}\n{failure.args[0]}",)
    exec(code, {"failure": failure.with_traceback(None)})


# --- the parent's side ---------------------------------------------------------------------------


class _Parent:
    """The process that has forked the ranks of a pool: see nursery.py."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        if not connection.poll(START):
            raise TimeoutError("the nursery does not answer")
        self.pid: int = connection.recv()

    def poll(self) -> int | None:
        """Return None while it runs."""
        return -signal.SIGKILL if self._connection.poll(0) else None

    def close(self) -> None:
        self._connection.close()


class _ForkedRank:
    """A rank that `parent` forks, with the necessary part of Popen's interface.

    The parent writes its pid and exit status to files: this path, with ".pid" for ".code".
    """

    def __init__(self, parent: _Parent, told: Path) -> None:
        self._parent, self._told = parent, told

    @property
    def pid(self) -> int:
        """Return the rank's process, which leads a group; the parent's while there is no rank
        yet."""
        return self._number(".pid") or self._parent.pid

    def _number(self, suffix: str) -> int | None:
        try:
            return int(self._told.with_suffix(suffix).read_text())
        except FileNotFoundError:
            return None

    def poll(self) -> int | None:
        """Return the exit status; that of the parent, without which ranks end, if it wrote none."""
        parents = self._parent.poll()
        code = self._number(".code")
        return parents if code is None else code

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


_Process: TypeAlias = "subprocess.Popen[bytes] | _ForkedRank"


class _Ranks:
    """`world` processes, their torchrun-like environment and output files."""

    def __init__(self, world: int, standing: bool, env: dict[str, str | None] | None) -> None:
        from torch.distributed import TCPStore

        self.world = world
        self.folder = tempfile.TemporaryDirectory(prefix="zshard-ranks-")
        # Port 0 and this process as server: the kernel picks the port, and no other process can
        # take it.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins our store, it makes none
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(),
        }
        merged = {**os.environ, **common, **(env or {})}
        self.env = {name: str(value) for name, value in merged.items() if value is not None}
        pairs = [socket.socketpair() for _ in range(world)]
        self.pipes = [Connection(ours.detach()) for ours, _ in pairs]
        self._parent: _Parent | None = None
        start = self._fork if standing else self._spawn
        self.processes = start([theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def _spawn(self, pipes: list[int]) -> "list[_Process]":
        """Start a fresh interpreter for each rank."""
        made: list[_Process] = []
        for rank, pipe in enumerate(pipes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            made.append(self._start(rank, pipe, {**self.env, **own}))
        return made

    def _fork(self, pipes: list[int]) -> "list[_Process]":
        """Let the nursery fork all ranks."""
        for rank in range(self.world):
            for what in ("out", "err"):
                self.path(rank, what).touch()
        request = {"env": self.env, "folder": self.folder.name}
        self._parent = _Parent(connect(start_nursery(), pipes, **request))
        return [_ForkedRank(self._parent, self.path(rank, "code")) for rank in range(self.world)]

    def _start(self, rank: int, pipe: int, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        with self.path(rank, "out").open("wb") as out, self.path(rank, "err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-u", __file__, str(pipe)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[pipe],
                start_new_session=True,  # so that a rank's subprocesses end with it
            )

    def send(self, task: bytes) -> None:
        """Send every rank its task; `_collect` notices ranks that are already dead."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(task)

    def path(self, rank: int, what: str) -> Path:
        """Return the path of the output of `rank`; `what` is "out" or "err"."""
        return Path(self.folder.name, f"rank{rank}.{what}")

    def output(self, rank: int, what: str, start: int = 0) -> str:
        """Return the output of `rank` from byte `start` on."""
        return self.path(rank, what).read_bytes()[start:].decode(errors="replace")

    def show_stacks(self) -> None:
        """Make each living rank write its Python stacks to its stderr (see `_main`)."""
        living = [process for process in self.processes if process.poll() is None]
        for process in living:
            process.send_signal(signal.SIGUSR1)
        if living:
            time.sleep(0.3)

    def end(self, patience: float = 0.0) -> None:
        """Hang up; after `patience` s kill what still runs, including subprocesses."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + patience
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # it has left none behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._parent is not None:
            self._parent.close()
        self.folder.cleanup()


def _failure(
    group: _Ranks, first: int, reason: str, starts: dict[str, list[int]], call: str
) -> RankFailure:
    """Return the exception for rank `first`: its output since `starts`, and the end of the
    others'."""
    if "no answer" in reason:
        group.show_stacks()
    lines = [f"rank {first} of {group.world} {reason}", f"--- in {call}"]
    for what in ("out", "err"):
        text = group.output(first, what, starts[what][first]).strip()
        if text:
            lines += [f"--- rank {first} std{what}", text[-TAIL:]]
    for rank in range(group.world):
        text = group.output(rank, "err", starts["err"][rank]).strip()
        if rank != first and text:
            lines += [f"--- rank {rank} stderr, its end", text[-TAIL // 4 :]]
    return RankFailure("\n".join(lines))


def _collect(group: _Ranks, timeout: float, stop_early: bool) -> tuple[dict[int, Any], str, int]:
    """Wait for one answer per rank; return ({rank: (ok, value)}, what went wrong or "", rank of
    that).

    A rank that dies without an answer has none. With `stop_early`, the others get GRACE seconds
    after the first failure; without, all have until `timeout`.
    """
    answers: dict[int, Any] = {}
    reason, first = "", 0
    waiting = dict(zip(group.pipes, range(group.world), strict=True))
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            if not reason:
                first = min(waiting.values())
                reason = f"gave no answer within {timeout:g} s"
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
                wrong = "" if answers[rank][0] else "failed"
            except (EOFError, ConnectionResetError):
                wrong = f"died with exit status {group.processes[rank].wait()}"
            if wrong and not reason:
                reason, first = wrong, rank
                if stop_early:
                    deadline = min(deadline, time.monotonic() + GRACE)
    return answers, reason, first


def run_ranks(
    fn_or_path: Any,
    world: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str | None] | None = None,
    check: bool = True,
) -> list[RankResult]:
    """Run a module-level function `fn(*args)`, or a script with arguments, on fresh ranks.

    timeout: seconds, start-up included (torch's import costs about 2); what runs then is killed.
    env: added to the environment; None removes a variable.
    check: raise RankFailure as soon as a rank fails. Without it, all ranks run to their end or the
        limit; check the results.
    """
    task = task_of(fn_or_path, args)
    group = _Ranks(world, False, env)
    try:
        group.send(task)
        answers, reason, first = _collect(group, timeout, stop_early=check)
        results = []
        for rank in range(world):
            results.append(_result(group, rank, answers.get(rank), wait=not (check and reason)))
            if not reason and results[rank].returncode != 0:
                reason, first = f"returned, but then ended with {results[rank].returncode}", rank
        if check and reason:
            starts = {"out": [0] * world, "err": [0] * world}
            raise _failure(group, first, reason, starts, call_of(fn_or_path, args))
        return results
    finally:
        group.end()


def _result(group: _Ranks, rank: int, answer: Any, wait: bool) -> RankResult:
    """Return how `rank` ended, given its (ok, value); one that has answered is about to exit:
    `wait`."""
    try:
        code = group.processes[rank].wait(LEAVE if answer and wait else 0)
    except subprocess.TimeoutExpired:
        code = None
    ok, value = answer or (False, None)
    out, err = group.output(rank, "out"), group.output(rank, "err")
    return RankResult(rank, code, out, err, value if ok else None)


class RankPool:
    """Ranks that stay alive and run many functions, with torch.distributed (gloo) initialised once.

    They start at the first `run`, and again after a failed one: a rank that missed a collective
    cannot serve the next test. `env` is added to their environment.
    """

    def __init__(self, world: int, env: dict[str, str | None] | None = None) -> None:
        self.world = world
        self.env = env
        self._group: _Ranks | None = None

    def run(self, fn: Any, *args: Any, timeout: float = 120) -> list[Any]:
        """Return [fn(*args) of rank 0, 1, ...]; RankFailure if one raises, dies or takes over
        `timeout` s.

        Each call starts with torch.manual_seed(0) on every rank.
        """
        task = task_of(fn, args)
        if self._group is None:
            self._group = _Ranks(self.world, True, self.env)
        group = self._group
        starts = {
            what: [group.path(rank, what).stat().st_size for rank in range(self.world)]
            for what in ("out", "err")
        }
        try:
            group.send(task)
            answers, reason, first = _collect(group, timeout, stop_early=True)
            if reason:
                failure = _failure(group, first, reason, starts, call_of(fn, args))
                failure.line = answers.get(first, (False, None))[1]
                raise failure
            return [answers[rank][1] for rank in range(self.world)]
        except BaseException:  # also KeyboardInterrupt and pytest-timeout: the ranks are mid-task
            self.close()
            raise

    def hang_up(self) -> None:
        """Let the ranks exit."""
        for pipe in self._group.pipes if self._group is not None else ():
            pipe.close()

    def close(self, patience: float = 0.0) -> None:
        """End the ranks, giving them `patience` s to exit; the next `run` starts new ones."""
        if self._group is not None:
            self._group.end(patience)
            self._group = None


# --- the ranks' side -----------------------------------------------------------------------------


def _main(descriptor: int) -> int:
    """Run a fresh rank's only task."""
    end_with_parent()
    rewrite_in_ranks()
    show_stacks_when_asked()
    pipe = Connection(descriptor)
    os.register_at_fork(after_in_child=pipe.close)  # else a forked worker hides this rank's death
    return answer(pipe, pipe.recv_bytes())


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
