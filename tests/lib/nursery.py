"""Fresh ranks within milliseconds: forked from a process that has imported torch and zshard.

`run_ranks` of spawn.py starts interpreters, whose imports cost each rank seconds; tests that end
ranks badly need dozens of them. Here one process, the nursery, imports once and does nothing else
(no thread, no tensor), so its forks are as good as new. A rank behaves as a script does: an
uncaught exception is printed, with exit status 1; `sys.exit` and SIGKILL act normally.

    from nursery import fork_ranks

    results = fork_ranks(function, 2, *arguments)  # as run_ranks(..., check=False)
    results = fork_ranks("script.py", 2, *arguments, check=True)
"""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asserts import rewrite_in_ranks
from spawn import (
    TAIL,
    RankFailure,
    RankResult,
    _perform,
    _python_path,
    _task,
    call_of,
    find_modules_beside,
)

SLACK = 30.0  # seconds that the nursery may take beyond the ranks' limit


class _Nursery:
    """The parent's end: one subprocess of this file, started on first use.

    entered: the command line that runs one on another host (simulated on this machine).
    """

    def __init__(
        self, entered: Callable[[list[str]], list[str]] = list, interface: str = "lo"
    ) -> None:
        ours, theirs = socket.socketpair()
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        quiet["PYTHONPATH"] = _python_path()
        self.process = subprocess.Popen(
            entered([sys.executable, "-u", __file__, str(theirs.fileno())]),
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pipe = Connection(ours.detach())

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


_nursery: _Nursery | None = None


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
    global _nursery
    from torch.distributed import TCPStore

    if _nursery is None:
        _nursery = _Nursery()
        atexit.register(_nursery.close)
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
            _nursery.pipe.send((_task(fn_or_path, args), range(world), folder, timeout, variables))
            if not _nursery.pipe.poll(timeout + SLACK):
                raise TimeoutError("the nursery does not answer")
            codes = _nursery.pipe.recv()
        except BaseException:  # also KeyboardInterrupt: later answers have no reader
            _nursery.close()
            _nursery = None
            raise
        results = [_result(Path(folder), rank, code) for rank, code in enumerate(codes)]
    for result in results if check else ():
        if result.returncode != 0:
            text = f"{result.stdout[-TAIL:]}\n{result.stderr[-TAIL:]}"
            raise RankFailure(
                f"rank {result.rank} of {world} ended with {result.returncode}\n"
                f"--- in {call_of(fn_or_path, args)}\n{text}"
            )
    return results


def _result(folder: Path, rank: int, code: int | None) -> RankResult:
    texts = [(folder / f"{rank}.{what}").read_text(errors="replace") for what in ("out", "err")]
    answer = folder / f"{rank}.value"
    value = pickle.loads(answer.read_bytes()) if answer.exists() and code == 0 else None
    return RankResult(rank, code, *texts, value)


# --- the nursery's side ---------------------------------------------------------------------------


def _fork_rank(
    task: bytes, rank: int, local: int, folder: str, variables: dict[str, str]
) -> int | None:
    """Fork a rank: return its pid here; None in the rank, once it is done."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # so that a rank's subprocesses end with it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans if pytest is killed
    for descriptor, what in ((1, "out"), (2, "err")):
        with open(Path(folder, f"{rank}.{what}"), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(local))
    value = _perform(task)
    Path(folder, f"{rank}.value").write_bytes(pickle.dumps(value))
    return None


def _wait(pids: list[int], timeout: float) -> list[int | None]:
    """Return the ranks' exit codes; after `timeout` s kill those that still run."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() < deadline:
            time.sleep(0.005)
        else:
            for late in set(pids) - set(codes):
                os.killpg(late, signal.SIGKILL)
                os.waitpid(late, 0)
                codes[late] = None
    return [codes[pid] for pid in pids]


def _serve(pipe: Connection) -> None:
    """Fork ranks until the parent hangs up; also returns in each rank that is done."""
    while True:
        try:
            task, ranks, folder, timeout, variables = pipe.recv()
        except EOFError:
            return
        _, file, module, _, _ = pickle.loads(task)
        if module:  # a function's module, imported here for all later ranks
            find_modules_beside(file)
            importlib.import_module(module)
        gc.freeze()  # so that a rank's exit does not scan all of torch: most of a second
        pids: list[int] = []
        for local, rank in enumerate(ranks):
            pid = _fork_rank(task, rank, local, folder, variables)
            if pid is None:
                return
            pids.append(pid)
        pipe.send(_wait(pids, timeout))


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401 - the first optimizer of a process would import it

    import zshard  # noqa: F401

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    rewrite_in_ranks()
    _serve(Connection(int(sys.argv[1])))
