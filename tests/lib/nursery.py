"""Ranks within milliseconds: forked from one process that has imported torch and zshard.

Imports cost an interpreter seconds. The nursery imports once, does nothing else (no thread, no tensor)
and forks a process for each connection, which forks ranks: all workers of a session share it, so its forks
are as good as new. A rank of `fork_ranks` behaves as a script does: an uncaught exception is printed,
with exit status 1; `sys.exit` and SIGKILL act normally. A standing rank (spawn.py) serves many tests.

    from nursery import fork_ranks

    results = fork_ranks(function, 2, *arguments)  # as run_ranks(..., check=False)
    results = fork_ranks("script.py", 2, *arguments, check=True)
    done = forked_python("-m", "zshard", "run", "script.py", cwd=folder)  # as subprocess.run
    subprocess.Popen([python(), "-c", "import torch"])  # looks like sys.executable
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
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
ADDRESS = "ZSHARD_TEST_NURSERY"  # the variable that names a session's nursery


class Nursery:
    """One process of this file; `address` is where it listens."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zshard-nursery-")
        self.address = f"{self._folder.name}/socket"
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        quiet["PYTHONPATH"] = python_path()
        with socket.socket(socket.AF_UNIX) as listener:  # connections wait until the imports end
            listener.bind(self.address)
            listener.listen(64)
            self._write_python()
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(listener.fileno())],
                env={**os.environ, **quiet},
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def _write_python(self) -> None:
        """Make the program of `python()`."""
        lib = str(Path(__file__).parent)
        program = Path(self._folder.name, "python")
        program.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.append({lib!r})\n"
            f"import forked_python\nforked_python.main({self.address!r})\n"
        )
        program.chmod(0o700)

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


def python() -> str:
    """Return a program that runs like sys.executable, in a fork of the nursery: -c, -m or a script.

    Torch and zshard are imported in no time, with the nursery's environment at import. The
    program's process is not that of the command, nor its child.
    """
    return str(Path(start_nursery()).with_name("python"))


def forked_python(
    *words: Any,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run `python()` with these arguments. env: added to the environment, in which OMP_NUM_THREADS is 1."""
    return subprocess.run(
        [python(), *map(str, words)],
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


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
    until: int | None = None,
    alone: bool = False,
) -> list[RankResult]:
    """Run a module-level function `fn(*args)`, or a script with arguments, on `world` forked ranks.

    timeout: seconds; ranks that still run then are killed, and their returncode is None.
    env: added to the ranks' environment.
    check: raise RankFailure if a rank fails. Without it, check the results.
    until: kill the others once this rank has ended.
    alone: fork a process that has imported no other test's module: for decisions that a process
    makes once.
    """
    global _forking
    from torch.distributed import TCPStore

    if alone and _forking is not None:
        _forking.close()
        _forking = None
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
            _forking.send((task, range(world), folder, timeout, variables, until))
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
    """Return a forked rank's result in `folder`."""
    texts = [(folder / f"{rank}.{what}").read_text(errors="replace") for what in ("out", "err")]
    made = folder / f"{rank}.value"
    value = pickle.loads(made.read_bytes()) if made.exists() and code == 0 else None
    return RankResult(rank, code, *texts, value)


# --- the nursery's side ---------------------------------------------------------------------------


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends: no orphans if pytest is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; a fork does not inherit it


def show_stacks_when_asked() -> None:
    """Write all threads' stacks to stderr at a crash, and at SIGUSR1."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _listen(listener: socket.socket) -> None:
    """Fork a process for each connection; returns in the process that has done its work."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    while True:
        own, _ = listener.accept()
        if os.fork():
            own.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        listener.close()
        os.setsid()
        try:
            _, pipes, _, _ = socket.recv_fds(own, 1, 64)
            connection = Connection(own.detach())
            request = connection.recv()
        except EOFError:  # the client has exited
            return
        _attend(connection, pipes, **request)
        return


def _attend(
    connection: Connection,
    pipes: list[int],
    env: dict[str, str] | None = None,
    folder: str = "",
    words: list[str] | None = None,
    spaces: Sequence[str] = (),
) -> None:
    """Fork ranks when asked to, or standing ranks at once, one for each of `pipes`, or a Python; returns
    in each process that is done.

    env: the environment. folder: where standing ranks write their output, or where Python runs. words:
    Python's arguments. spaces: files of the namespaces of the host (simulated on this machine) that ranks
    are on.
    """
    _enter(spaces)
    if env is None:
        _fork_when_asked(connection)
        return
    import standing

    standing.become(env)
    if words is not None:
        os.chdir(folder)
        _fork_python(connection, pipes, words)
    else:
        standing.fork_ranks(connection, pipes, Path(folder))


def _fork_python(client: Connection, files: list[int], words: list[str]) -> None:
    """Fork a Python, send its pid, and wait for its end; without its client, kill it. Returns in it."""
    pid = os.fork()
    if not pid:
        os.setsid()
        end_with_parent()
        client.close()
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
        os.closerange(3, 4096)
        _run_as_python(words)
        return
    client.send(pid)
    for file in files:
        os.close(file)
    end = os.pidfd_open(pid)
    if client in wait([client, end]):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.send(code)
    os._exit(0)


def _run_as_python(words: list[str]) -> None:
    """Run what Python runs with these arguments, as __main__."""
    while words[0] == "-u":
        words = words[1:]
    what, *rest = words
    kept, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    if what == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif what == "-m":
        sys.argv, sys.path[:0] = ["-m", *rest[1:]], [os.getcwd()]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what.startswith("-"):
        sys.exit(f"a forked Python has no option {what}")
    else:
        sys.argv, sys.path[:0] = words, [str(Path(what).resolve().parent)]
        runpy.run_path(what, run_name="__main__")
    del kept


def _enter(spaces: Sequence[str]) -> None:
    """Give this process, and those that it forks, these namespaces."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.getcwd()
    descriptors = [os.open(path, os.O_RDONLY) for path in spaces]  # before /proc is another
    for descriptor in descriptors:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    os.chdir(here)


def _fork_when_asked(pipe: Connection) -> None:
    while True:
        try:
            task, ranks, folder, timeout, variables, until = pipe.recv()
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
        pipe.send(_codes(pids, timeout, pipe, None if until is None else pids[until]))


def _fork_rank(
    task: bytes, rank: int, local: int, folder: str, variables: dict[str, str]
) -> int | None:
    """Fork a rank: return its pid here; None in the rank, once it is done."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # so that a rank's subprocesses end with it
    end_with_parent()
    for descriptor, what in ((1, "out"), (2, "err")):
        with open(Path(folder, f"{rank}.{what}"), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(local))
    value = perform(task)
    Path(folder, f"{rank}.value").write_bytes(pickle.dumps(value))
    return None


def _codes(
    pids: list[int], timeout: float, client: Connection, leader: int | None
) -> list[int | None]:
    """Return the ranks' exit codes; after `timeout` s, or without a client, kill those that still
    run. Kill them at once when `leader` has ended."""
    codes: dict[int, int | None] = {}
    ends = {os.pidfd_open(pid): pid for pid in pids}
    deadline = time.monotonic() + timeout
    while ends:
        ready = wait([client, *ends], max(0.0, deadline - time.monotonic()))
        late = not ready or client in ready
        for end in list(ends) if late else ready:
            pid = ends.pop(end)
            _kill_with_children(pid)  # of one that has ended, its remains
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[pid] = None if late else code
            os.close(end)
            for other in ends.values() if pid == leader else ():
                _kill_with_children(other)
    return [codes[pid] for pid in pids]


def _kill_with_children(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _leave_before_torch() -> None:
    """Let processes exit where C would begin with torch's registries: that takes a fifth of a second."""
    libc = ctypes.CDLL(None)
    libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)  # later modules come first


_libraries: dict[str, Any] = {}  # modules by name


def _keep_libraries() -> None:
    """At exit, Python takes the modules of zshard and the tests apart, but not torch's."""
    increase = ctypes.pythonapi.Py_IncRef
    increase.argtypes = [ctypes.py_object]
    increase(_libraries)
    for name in _libraries:
        sys.modules.pop(name, None)


if __name__ == "__main__":
    atexit.register(_keep_libraries)  # the first is called last
    gc.disable()
    import torch._dynamo  # the first optimizer of a process would import it
    import torch.distributed.run  # noqa: F401 - a forked launcher would

    _leave_before_torch()
    own = {*sys.builtin_module_names, "__main__"}
    _libraries |= {name: module for name, module in sys.modules.items() if name not in own}
    import zshard  # noqa: F401

    end_with_parent()
    # A job in the background starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rewrite_in_ranks()
    gc.freeze()
    gc.enable()
    _listen(socket.socket(fileno=int(sys.argv[1])))
