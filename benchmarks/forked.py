"""Many ranks forked of one process that has imported torch: what benchmarks of many ranks share.

An import of torch per rank takes longer than what is measured. Ranks meet over a
store of the process that started them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def counter() -> Path:
    """Return the compiled futex_count.c."""
    target = HERE.parent / "build" / "futex_count.so"
    target.parent.mkdir(exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-O2", "-shared", "-fPIC", str(HERE / "futex_count.c"), "-ldl"]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def environment(port: int, world: int, ranks_per_host: int) -> dict[str, str]:
    """Return the environment of a process that forks `world` ranks. port: of the store."""
    return {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store of who started it
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(counter()),
    }


def fork_ranks(run: Callable[[int], None]) -> None:
    """Fork the ranks, each of which calls run(rank), and exit with 1 if one of them fails."""
    pids = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            status = 1
            try:
                run(rank)
                status = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        pids.append(pid)
    while pids:
        pid, code = os.wait()
        pids.remove(pid)
        for other in pids if code else ():  # they would wait for it
            os.kill(other, signal.SIGTERM)
        if code:
            sys.exit(1)


def futex_calls() -> list[int]:
    """Return how often zshard has asked to sleep and to wake in this process."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    return [int(library.futex_waits()), int(library.futex_wakes())]
