"""The program of `nursery.python()`: it looks like a Python, but runs a fork of the nursery.

This process lends its files, arguments, environment and folder, passes signals on, and ends as the fork
does. It imports little: it starts within 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
from typing import Any

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def main(address: str) -> None:
    request = {"env": dict(os.environ), "folder": os.getcwd(), "words": sys.argv[1:]}
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address)
        socket.send_fds(own, [b"+"], [0, 1, 2])
        packed = pickle.dumps(request)
        own.sendall(len(packed).to_bytes(4, "big") + packed)  # as a Connection does
        pid = _received(own)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: _pass_on(pid, number))
        code = _received(own)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _received(own: socket.socket) -> Any:
    """Return a Connection's message; end this process if nothing more comes."""
    length = _bytes(own, 4)
    return pickle.loads(_bytes(own, int.from_bytes(length, "big")))


def _bytes(own: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = own.recv(count - len(found))
        if not more:
            sys.exit("the nursery has exited")
        found += more
    return found
