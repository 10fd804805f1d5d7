"""In a rank, before its program starts: its cores, its memory's NUMA node, its OMP_NUM_THREADS.

All three outlive exec, so a bare interpreter sets them and becomes what torchrun
would have started: no thread of torch is there yet, and signals, exit codes and tracebacks are the
program's own. This module imports nothing of zshard, which would import torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, MutableMapping

# (set_mempolicy, get_mempolicy): numbers of the system calls
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236), "riscv64": (237, 236), "ppc64le": (261, 260)}
_PREFERRED, _INTERLEAVE = 1, 3
_BITS = 64

System = Callable[..., int]  # (number of a system call, *arguments) -> result; raises OSError


def system_call(number: int, *arguments: object) -> int:
    """Make a system call. Raises OSError."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def place_memory(nodes: Iterable[int], system: System = system_call) -> None:
    """Have this process, and what it starts, allocate on a NUMA node while that has free memory,
    or on several in turn. Raises OSError."""
    import ctypes

    wanted = sorted(nodes)
    words = wanted[-1] // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    for node in wanted:
        mask[node // _BITS] |= 1 << node % _BITS
    mode = _PREFERRED if len(wanted) == 1 else _INTERLEAVE
    system(_numbers()[0], mode, mask, words * _BITS + 1)  # the kernel reads a bit less


def has_memory_policy(system: System = system_call) -> bool:
    """Return whether a policy other than the kernel's own is set, by numactl say. Raises OSError if
    the kernel has none, or a container forbids them."""
    import ctypes

    mode = ctypes.c_int()
    system(_numbers()[1], ctypes.byref(mode), None, 0, None, 0)
    return mode.value != 0


def _numbers() -> tuple[int, int]:
    numbers = _CALLS.get(os.uname().machine)
    if numbers is None:
        raise OSError(f"not known for {os.uname().machine}")
    return numbers


def bind(
    cpus: Iterable[int],
    threads: int,
    nodes: Iterable[int],
    environ: MutableMapping[str, str],
    system: System = system_call,
) -> None:
    """Apply a rank's share (see shares.py) to this process; threads: 0 leaves OMP_NUM_THREADS.

    What the kernel refuses is left as it is: the launcher has looked, and said so once.
    """
    if threads:
        environ["OMP_NUM_THREADS"] = str(threads)
    with contextlib.suppress(OSError):
        if cpus:
            os.sched_setaffinity(0, cpus)
    with contextlib.suppress(OSError):
        if nodes:
            place_memory(nodes, system)


def start(rank: int, head: list[str], shares: list[tuple[list[int], int, list[int]]]) -> None:
    """Bind this process as that rank of its host, and become the program `head` + sys.argv[1:]."""
    for each in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # what Python has changed
        if each != signal.SIGINT or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    bind(*shares[rank], os.environ)
    command = [*head, *sys.argv[1:]]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"python -m zshard run: cannot start {command[0]!r}: {error.strerror}")
