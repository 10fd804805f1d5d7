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
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236, "ppc64le": 260}
_PREFERRED, _INTERLEAVE = 1, 3


def _call(numbers: dict[str, int], *arguments: object) -> None:
    """Make the system call with this machine's number for it. Raises OSError."""
    number = numbers.get(os.uname().machine)
    if number is None:
        raise OSError(f"memory policies are not known for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    if libc.syscall(ctypes.c_long(number), *words) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def may_place_memory() -> bool:
    """Return whether the kernel accepts memory policies and none is set, for example by numactl."""
    mode = ctypes.c_int()
    with contextlib.suppress(OSError):  # a container may forbid it
        _call(_GET_MEMPOLICY, ctypes.byref(mode), None, 0, None, 0)
        return mode.value == 0
    return False


def place_memory(nodes: list[int]) -> None:
    """Allocate on a NUMA node while it has free memory, or on several in turn. Raises OSError."""
    bits = 64 * (max(nodes) // 64 + 1)
    mask = sum(1 << node for node in nodes).to_bytes(bits // 8, sys.byteorder)
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    _call(_SET_MEMPOLICY, mode, mask, bits + 1)  # the kernel reads one bit less


def start() -> None:
    """Bind this process as that rank of its host, and become the program in sys.argv."""
    head, shares = json.loads(os.environ.pop(VARIABLE))
    cpus, nodes = shares[int(os.environ["LOCAL_RANK"])]
    with contextlib.suppress(OSError):  # the cores may be offline
        os.sched_setaffinity(0, cpus)
    with contextlib.suppress(OSError):
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
