"""Run test functions on several ranks: fresh ones (`run_ranks`) or a standing pool (`RankPool`).

The parent hosts the rendezvous store and only passes on its port, as torchrun's agent does, so that
no port is guessed and concurrent tests cannot interfere. Fresh ranks are plain subprocesses; those
of a pool are forks of one that has imported torch and zshard. Every run has a hard limit; the first
rank that fails ends the run, and its output is the assertion's message. This file is also the
ranks' entry point (`_main`).

    from spawn import ranks, run_ranks

    def mean(x):  # a module-level function: each rank imports this module and calls it
        ...
        return value  # pickled back

    @ranks(2, 3)  # a pool of 2, then one of 3; torch.distributed (gloo) is up in its ranks
    def test_mean(pool):
        assert pool.run(mean, 1.0) == [1.0] * pool.world

    def test_dies():  # fresh processes, nothing initialised: for crashes, environments, start-up
        results = run_ranks(mean, 2, 1.0, check=False)
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import inspect
import itertools
import os
import pickle
import reprlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from asserts import rewrite_in_ranks

GRACE = 2.0  # seconds for the other ranks to end by themselves after one failed
LEAVE = 10.0  # seconds from a rank's answer to its process's exit
TAIL = 4000  # characters of a rank's output that a message shows
_tasks = itertools.count()  # of a pool's rank


class RankFailure(AssertionError):
    """A rank raised, died or did not return in time; the message has its output."""


@dataclass(frozen=True)
class RankResult:
    """How one rank of `run_ranks` ended; `returncode` is None if it was killed at the time
    limit."""

    rank: int
    returncode: int | None
    stdout: str
    stderr: str
    value: Any  # what the function returned; None for a script or a rank that failed


def ranks(*worlds: Any) -> pytest.MarkDecorator:
    """Run a test once per world size (an int, or a pytest.param of one), with the session's pool of
    that size as argument `pool`."""
    return pytest.mark.parametrize("pool", worlds, indirect=True, ids=lambda world: f"{world}ranks")


# --- the parent's side ---------------------------------------------------------------------------


def _python_path() -> str:
    """Return a PYTHONPATH that makes ranks import the same zshard as this process."""
    old = os.environ.get("PYTHONPATH", "")
    spec = importlib.util.find_spec("zshard")
    if spec is None or spec.origin is None or "site-packages" in spec.origin:
        return old
    return os.pathsep.join(filter(None, [str(Path(spec.origin).parent.parent), old]))


class _ForkedRank:
    """A rank that `parent` forks, with the necessary part of Popen's interface.

    The parent writes its pid and exit status to files: this path, with ".pid" for ".code".
    """

    def __init__(self, parent: "subprocess.Popen[bytes]", told: Path) -> None:
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
    """`world` processes of this file, their torchrun-like environment and output files."""

    def __init__(self, world: int, mode: str, env: dict[str, str | None] | None = None) -> None:
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
            "PYTHONPATH": _python_path(),
        }
        merged = {**os.environ, **common, **(env or {})}
        self.env = {name: str(value) for name, value in merged.items() if value is not None}
        pairs = [socket.socketpair() for _ in range(world)]
        self.pipes = [Connection(ours.detach()) for ours, _ in pairs]
        start = self._fork if mode == "pool" else self._spawn
        self.processes = start([theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()

    def _spawn(self, pipes: list[int]) -> "list[_Process]":
        """Start a fresh interpreter for each rank."""
        made: list[_Process] = []
        for rank, pipe in enumerate(pipes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ZSHARD_TEST_PIPES": str(pipe)}
            made.append(self._start("once", rank, [pipe], {**self.env, **own}))
        return made

    def _fork(self, pipes: list[int]) -> "list[_Process]":
        """Start one interpreter, which imports torch and zshard and then forks all ranks: see
        `_fork_ranks`."""
        listed = ",".join(map(str, pipes))
        env = {**self.env, "ZSHARD_TEST_PIPES": listed, "ZSHARD_TEST_FOLDER": self.folder.name}
        for rank in range(self.world):
            for what in ("out", "err"):
                self.path(rank, what).touch()
        parent = self._start("pool", 0, pipes, env)
        return [_ForkedRank(parent, self.path(rank, "code")) for rank in range(self.world)]

    def _start(
        self, mode: str, rank: int, pipes: list[int], env: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        with self.path(rank, "out").open("wb") as out, self.path(rank, "err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-u", __file__, mode],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=pipes,
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
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.folder.cleanup()


def _task(fn_or_path: Any, args: tuple[Any, ...]) -> bytes:
    """Return a module-level function (by its module's file) or a script, with its arguments, as
    bytes."""
    if callable(fn_or_path):
        name = fn_or_path.__qualname__
        if "<" in name:
            raise TypeError(f"{name}: ranks can only import functions at module level")
        what = (
            "call",
            inspect.getsourcefile(inspect.unwrap(fn_or_path)),
            fn_or_path.__module__,
            name,
        )
    else:
        what = ("script", str(Path(fn_or_path).resolve()), "", "")
    return pickle.dumps((*what, pickle.dumps(args)))


def call_of(fn_or_path: Any, args: tuple[Any, ...]) -> str:
    """Describe the ranks' call, for messages: many tests run one function with various
    arguments."""
    name = getattr(fn_or_path, "__qualname__", fn_or_path)
    return f"{name}({', '.join(map(reprlib.repr, args))})"


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
    task = _task(fn_or_path, args)
    group = _Ranks(world, "once", env)
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
        task = _task(fn, args)
        if self._group is None:
            self._group = _Ranks(self.world, "pool", self.env)
        group = self._group
        starts = {
            what: [group.path(rank, what).stat().st_size for rank in range(self.world)]
            for what in ("out", "err")
        }
        try:
            group.send(task)
            answers, reason, first = _collect(group, timeout, stop_early=True)
            if reason:
                raise _failure(group, first, reason, starts, call_of(fn, args))
            return [answers[rank][1] for rank in range(self.world)]
        except BaseException:  # also KeyboardInterrupt and pytest-timeout: the ranks are mid-task
            self.close()
            raise

    def close(self, patience: float = 0.0) -> None:
        """End the ranks, giving them `patience` s to exit; the next `run` starts new ones."""
        if self._group is not None:
            self._group.end(patience)
            self._group = None


# --- the ranks' side -----------------------------------------------------------------------------


def find_modules_beside(file: str) -> None:
    """Let this process import the modules beside `file`, and each module of tests: arguments may
    name functions of a module other than the task's."""
    tests = Path(__file__).resolve().parents[1]
    for folder in [str(Path(file).parent), *(str(path) for path in tests.iterdir())]:
        if folder not in sys.path and Path(folder).is_dir():
            sys.path.insert(0, folder)


def _perform(task: bytes) -> Any:
    """Run the task of `_task`; a script runs as __main__ with its arguments in sys.argv."""
    kind, file, module, name, packed = pickle.loads(task)
    find_modules_beside(file)
    args = pickle.loads(packed)  # only now: they may name functions of a test's module
    if kind == "script":
        sys.argv = [file, *map(str, args)]
        runpy.run_path(file, run_name="__main__")
        return None
    return getattr(importlib.import_module(module), name)(*args)


def _answer(pipe: Connection, task: bytes) -> int:
    """Perform `task`, send (ok, value), return an exit status; a traceback goes to stderr."""
    status = 0
    try:
        reply = pickle.dumps((True, _perform(task)))
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        reply = pickle.dumps((status == 0, None))
    except BaseException:
        traceback.print_exc()
        status, reply = 1, pickle.dumps((False, None))
    sys.stdout.flush()
    pipe.send_bytes(reply)
    return status


def _serve(pipe: Connection) -> None:
    """Run a pool rank: initialize the process group once, then run tasks until the parent hangs
    up."""
    import gc

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            dist.destroy_process_group()
            return
        torch.manual_seed(0)
        known, groups = len(sys.modules), set(dist.distributed_c10d._world.pg_map)
        _answer(pipe, task)
        gc.collect()  # free one test's models and their shared memory before the next one
        _end_groups_but(groups)
        if len(sys.modules) > known:
            gc.freeze()  # else each collection scans all of torch again, for a tenth of a second


def _end_groups_but(known: set[Any]) -> None:
    """End the process groups that a task has created and left, once all ranks have finished it."""
    import datetime

    import torch.distributed as dist
    from groups import end_groups_but

    if not dist.is_initialized() or not known <= set(dist.distributed_c10d._world.pg_map):
        return  # the task has destroyed the pool's own group
    store, task = dist.distributed_c10d._get_default_store(), next(_tasks)
    if store.add(f"tests/through with {task}", 1) == dist.get_world_size():
        store.set(f"tests/all through with {task}", "")
    try:
        store.wait([f"tests/all through with {task}"], datetime.timedelta(seconds=20))
    except RuntimeError:  # a rank is stuck or dead: the pool ends
        return
    end_groups_but(known)


def _fork_ranks(pipes: list[int], folder: Path) -> int | None:
    """Fork a rank for each pipe. In a rank, return its number; in the parent, None when all have
    ended.

    Imports cost a rank seconds, and are the same for all: this process imports, does nothing else
    (no thread, no tensor), and forks.
    """
    import gc

    import torch._dynamo  # noqa: F401 - the first optimizer of a process would import it

    import zshard  # noqa: F401

    gc.freeze()
    running = {}
    for rank, pipe in enumerate(pipes):
        pid = os.fork()
        if not pid:
            _become(rank, [other for other in pipes if other != pipe], folder)
            return rank
        running[pid] = rank
        _write_number(folder / f"rank{rank}.pid", pid)
    for pipe in pipes:
        os.close(pipe)
    while running:
        pid, status = os.wait()
        _write_number(folder / f"rank{running.pop(pid)}.code", os.waitstatus_to_exitcode(status))
    return None


def _become(rank: int, others: list[int], folder: Path) -> None:
    """Turn this forked process into a rank: its group, its output, its environment."""
    os.setsid()
    for pipe in others:
        os.close(pipe)
    for descriptor, what in ((1, "out"), (2, "err")):
        with open(folder / f"rank{rank}.{what}", "ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


def _write_number(path: Path, number: int) -> None:
    """Write a number to a file atomically."""
    made = path.with_suffix(path.suffix + ".part")
    made.write_text(str(number))
    made.replace(path)


def _main(mode: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans if pytest is killed
    pipes = [int(pipe) for pipe in os.environ.pop("ZSHARD_TEST_PIPES").split(",")]
    rewrite_in_ranks()
    rank: int | None = 0
    if mode == "pool":
        rank = _fork_ranks(pipes, Path(os.environ.pop("ZSHARD_TEST_FOLDER")))
        if rank is None:
            return
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a fork does not inherit it
    faulthandler.enable(all_threads=True)  # a crash writes the threads' stacks to stderr
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(pipes[rank])
    os.register_at_fork(after_in_child=pipe.close)  # else a forked worker hides this rank's death
    if mode == "pool":
        _serve(pipe)
    else:
        sys.exit(_answer(pipe, pipe.recv_bytes()))


if __name__ == "__main__":
    _main(sys.argv[1])
