"""zshard.keep(): a keeper for a run under plain torchrun, which all ranks of a host find.

Its token is made of the facts that they share: torchrun's agent, which is the process that restarts
them, and its host. Other users can learn these facts, so what protects the keeper is the user that
the kernel names on each connection.
"""

from __future__ import annotations

import os
from pathlib import Path

from zshard.api import warn
from zshard.extras.keeping import KeeperError
from zshard.extras.keeping.client import SECONDS, VARIABLE, Keeper, checked_seconds, start

_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")  # what torchrun gives its ranks


def keep(seconds: float = SECONDS) -> None:
    """Start this run's keeper, one on each host, unless it has one: under `python -m zshard run
    --keep`, after a restart, or because another rank was faster. Call it on all ranks, before
    FSDP(...).

    It lives as long as torchrun's agent, and if that is killed for `seconds` more. With nothing
    held, it ends with the agent.

    Raises:
        RuntimeError: torchrun has not started this process, so nothing would restart it.
        ValueError: seconds is negative or not finite.
        KeeperError: the keeper cannot be started or reached.
    """
    checked_seconds(seconds)
    if os.environ.get(VARIABLE):
        return
    if _RUN[0] not in os.environ:
        raise RuntimeError("zshard.keep() needs torchrun: start the script with zshard run --keep")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        warn("zshard.keep(): torchrun will not restart this run; pass --max-restarts 3")
    pid = _agent()
    # The agent's pid, and what makes that unique over time and containers.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    token = f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{_stat(pid)[19]}"
    try:
        Keeper(token).list()
    except KeeperError:
        start(seconds, pid, token)
    os.environ[VARIABLE] = token


def _agent() -> int:
    """Return torchrun's agent: the nearest ancestor that was not started as a rank of this run. A
    shell or a wrapper between them was."""
    variables = {"=".join((name, os.environ.get(name, ""))).encode() for name in _RUN}
    pid = os.getppid()
    while pid > 1:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(_stat(pid)[1])
        except OSError:
            break
        if not variables <= {*environment}:
            break
        pid = parent
    return pid


def _stat(pid: int) -> list[str]:
    """Return /proc/PID/stat after the name, which may contain anything: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
