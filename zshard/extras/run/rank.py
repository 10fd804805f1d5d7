"""Before a rank's program starts: bind the rank to its cores, and its memory to their NUMA nodes.

Both survive exec, so a bare interpreter sets them and becomes what torchrun would have started: no
thread of torch exists yet, and signals, exit codes and tracebacks are the program's own. This file
imports nothing from zshard, which would import torch.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys

VARIABLE = "ZSHARD_RUN"  # the shares, from the launcher, as JSON
_MEMPOLICY = {"x86_64": (239, 238), "aarch64": (236, 237)}  # system calls: get, set
_PREFERRED, _INTERLEAVE = 1, 3


def place_memory(nodes: list[int]) -> None:
    """Allocate on a NUMA node while it has free memory, or on several in turn. A memory policy that
    is set already, for example by numactl, is kept; a container may forbid any."""
    syscall, long, mode = ctypes.CDLL(None).syscall, ctypes.c_long, ctypes.c_int()
    get, set_ = _MEMPOLICY.get(os.uname().machine, (0, 0))
    if not get or syscall(long(get), ctypes.byref(mode), None, long(0), None, long(0)):
        return
    if mode.value != 0:
        return
    bits = 64 * (max(nodes) // 64 + 1)
    mask = sum(1 << node for node in nodes).to_bytes(bits // 8, sys.byteorder)
    wanted = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    syscall(long(set_), long(wanted), mask, long(bits + 1))  # the kernel reads one bit less


def start() -> None:
    """Bind this process as that rank of its host, and become the program in sys.argv."""
    head, shares = json.loads(os.environ.pop(VARIABLE))
    cpus, nodes = shares[int(os.environ["LOCAL_RANK"])]
    with contextlib.suppress(OSError):  # the cores may be offline
        os.sched_setaffinity(0, cpus)
    if nodes:
        place_memory(nodes)
    for each in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec would keep that
        signal.signal(each, signal.SIG_DFL)
    command = [*head, *sys.argv[1:]]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"python -m zshard run: cannot start {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    start()
