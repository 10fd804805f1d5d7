"""Ranks within milliseconds: forked from one process that has imported torch and zshard.

Imports cost an interpreter seconds. The nursery imports once, does nothing else (no thread, no tensor)
and forks a process for each connection, which forks ranks: all workers of a session share it, so its forks
are as good as new. A rank of `fork_ranks` behaves as a script does: an uncaught exception is printed,
with exit status 1; `sys.exit` and SIGKILL act normally. A standing rank (spawn.py) serves many tests.

    from nursery import fork_ranks

    results = fork_ranks(function, 2, *arguments)  # as run_ranks(..., check=False)
    results = fork_ranks("script.py", 2, *arguments, check=True)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from asserts import rewrite_in_ranks
from tasks import (
    TAIL,
    RankFailure,
    RankResult,
    call_of,
    import_module_of,
    perform,
    python_path,
    task_of,
)

SLACK = 30.0  # seconds that the nursery may take beyond the ranks' limit
ADDRESS = "ZSHARD_TEST_NURSERY"  # the variable by which a session's processes find its nursery


class Nursery:
    """One process of this file; `address` is where it listens.

    entered: the command line that runs one on another host (simulated on this machine).
    """

    def __init__(
        self, entered: Callable[[list[str]], list[str]] = list, interface: str = "lo"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zshard-nursery-")
        self.address = f"{self._folder.name}/socket"
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        quiet["PYTHONPATH"] = python_path()
        with socket.socket(socket.AF_UNIX) as listener:  # connections wait until the imports end
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                entered([sys.executable, "-u", __file__, str(listener.fileno())]),
                env={**os.environ, **quiet},
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def start_nursery() -> str:
    """Start this session's nursery, unless this process or one above it has; return its address."""
    python, _, address = os.environ.get(ADDRESS, "").partition(":")
    if python != sys.executable:
        nursery, owner = Nursery(), os.getpid()
        atexit.register(lambda: nursery.close() if os.getpid() == owner else None)
        address = nursery.address
        os.environ[ADDRESS] = f"{sys.executable}:{address}"
    return address


def connect(address: str, pipes: Sequence[int] = (), **request: Any) -> Connection:
    """Return a connection to a process that the nursery forks, and give it these descriptors.

    request: the arguments of `_attend`.
    """
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address)
        socket.send_fds(own, [b"+"], list(pipes))
        connection = Connection(own.detach())
    connection.send(request)
    return connection


_forking: Connection | None = None  # to the process that forks for this one


def fork_ranks(
    fn_or_path: Any,
    world: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    check: bool = False,
) -> list[RankResult]:
    """Run a module-level function `fn(*args)`, or a script with arguments, on `world` forked ranks.

    timeout: seconds; ranks that still run then are killed, and their returncode is None.
    env: added to the ranks' environment.
    check: raise RankFailure if a rank fails. Without it, check the results.
    """
    global _forking
    from torch.distributed import TCPStore

    if _forking is None:
        _forking = connect(start_nursery())
    # Port 0 and this process as server, as in spawn.py: no other process can take the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins our store instead of creating one
        "TORCHELASTIC_RESTART_COUNT": "0",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory(prefix="zshard-forked-") as folder:
        try:
            task = task_of(fn_or_path, args)
            _forking.send((task, range(world), folder, timeout, variables))
            if not _forking.poll(timeout + SLACK):
                raise TimeoutError("the nursery does not answer")
            codes = _forking.recv()
        except BaseException:  # also KeyboardInterrupt: later answers have no reader
            _forking.close()
            _forking = None
            raise
        results = [result_of(Path(folder), rank, code) for rank, code in enumerate(codes)]
    for result in results if check else ():
        if result.returncode != 0:
            text = f"{result.stdout[-TAIL:]}\n{result.stderr[-TAIL:]}"
            raise RankFailure(
                f"rank {result.rank} of {world} ended with {result.returncode}\n"
                f"--- in {call_of(fn_or_path, args)}\n{text}"
            )
    return results


def result_of(folder: Path, rank: int, code: int | None) -> RankResult:
    """Return what a forked rank left in `folder`."""
    texts = [(folder / f"{rank}.{what}").read_text(errors="replace") for what in ("out", "err")]
    made = folder / f"{rank}.value"
    value = pickle.loads(made.read_bytes()) if made.exists() and code == 0 else None
    return RankResult(rank, code, *texts, value)


# --- the nursery's side ---------------------------------------------------------------------------


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends: no orphans if pytest is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; a fork does not inherit it


_imported: dict[str, types.ModuleType] = {}  # by the nursery


def _keep_imports() -> None:
    """At a rank's end, tear down what it has imported itself, not all of torch.

    With `_end_after_python` it takes 0.1 s, in place of 0.4 s.
    """
    for name, module in _imported.items():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        sys.modules.pop(name, None)


def _end_after_python() -> None:
    """Let this process end once Python has: without the destructors of torch's static objects."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called with the status, before what was registered earlier


def _listen(listener: socket.socket) -> None:
    """Fork a process for each connection; returns in the process that has done its work."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        own, _ = listener.accept()
        if os.fork():
            own.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        listener.close()
        os.setsid()
        with contextlib.suppress(EOFError):  # whoever connected is gone
            _, pipes, _, _ = socket.recv_fds(own, 1, 64)
            connection = Connection(own.detach())
            _attend(connection, pipes, **connection.recv())
        return


def _attend(
    connection: Connection,
    pipes: list[int],
    env: dict[str, str] | None = None,
    folder: str = "",
    first: bytes = b"",
) -> None:
    """Fork ranks when asked to, or standing ranks at once, one for each of `pipes`; returns in each
    rank that is done.

    env: the standing ranks' environment. folder: where they write their output. first: their first
    task.
    """
    if env is None:
        _fork_when_asked(connection)
        return
    import standing

    standing.become(env)
    with contextlib.suppress(Exception):  # the ranks will say so
        import_module_of(first)  # once, for all ranks
        gc.freeze()
    standing.fork_ranks(connection, pipes, Path(folder))


def _fork_when_asked(pipe: Connection) -> None:
    while True:
        try:
            task, ranks, folder, timeout, variables = pipe.recv()
        except EOFError:
            return
        import_module_of(task)  # here, for all later ranks
        gc.freeze()  # so that a rank's exit does not scan all of torch: most of a second
        pids: list[int] = []
        for local, rank in enumerate(ranks):
            pid = _fork_rank(task, rank, local, folder, variables)
            if pid is None:
                return
            pids.append(pid)
        pipe.send(_codes(pids, timeout, pipe))


def _fork_rank(
    task: bytes, rank: int, local: int, folder: str, variables: dict[str, str]
) -> int | None:
    """Fork a rank: return its pid here; None in the rank, once it is done."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # so that a rank's subprocesses end with it
    end_with_parent()
    _end_after_python()
    for descriptor, what in ((1, "out"), (2, "err")):
        with open(Path(folder, f"{rank}.{what}"), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(local))
    value = perform(task)
    Path(folder, f"{rank}.value").write_bytes(pickle.dumps(value))
    return None


def _codes(pids: list[int], timeout: float, client: Connection) -> list[int | None]:
    """Return the ranks' exit codes; after `timeout` s, or without a client, kill those that still
    run."""
    codes: dict[int, int | None] = {}
    ends = {os.pidfd_open(pid): pid for pid in pids}
    deadline = time.monotonic() + timeout
    while ends:
        ready = wait([client, *ends], max(0.0, deadline - time.monotonic()))
        late = not ready or client in ready
        for end in list(ends) if late else ready:
            pid = ends.pop(end)
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[pid] = None if late else code
            os.close(end)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    atexit.register(_keep_imports)  # first, so that it runs last

    import torch._dynamo  # noqa: F401 - the first optimizer of a process would import it

    import zshard  # noqa: F401

    end_with_parent()
    rewrite_in_ranks()
    gc.freeze()
    kept = sys.modules.keys() - {"__main__", "builtins", "sys"}
    _imported.update((name, sys.modules[name]) for name in kept)
    _listen(socket.socket(fileno=int(sys.argv[1])))
