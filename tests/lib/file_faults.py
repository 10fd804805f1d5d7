"""Faults in zshard's file calls, and a log of them, for tests.

    from file_faults import file_faults, file_log

    file_faults(3, "ENOSPC")  # the third call from now on fails
    ...
    calls = file_faults(0)  # there were so many since; none fails any more
    calls = forked(3, "kill", act)  # in a child that acts with this fault; None: it was killed

zshard has one hook for watching its file calls. The watcher is its own module (c/fs_faults.c),
compiled here, so zshard ships none.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import signal
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from c_compile import BUILDS, OBJECTS, C, compile_c
from c_sources import HEADERS

import zshard  # noqa: F401 (the module below watches its core)

_SOURCE = C / "fs_faults.c"


def _library() -> Path:
    """Return the compiled module; compile it if necessary."""
    read = [path.read_bytes() for path in [_SOURCE, *HEADERS]]
    soabi = sysconfig.get_config_var("SOABI")
    key = hashlib.sha256(b"\0".join([soabi.encode(), *read])).hexdigest()[:24]
    made = OBJECTS / f"_file_faults-{key}.so"
    if not made.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        flags = [*BUILDS["release"], "-isystem", sysconfig.get_path("include")]
        with tempfile.TemporaryDirectory(dir=OBJECTS) as scratch:
            compile_c(Path(scratch, "made.so"), [_SOURCE], flags, ("-shared",))
            os.replace(f"{scratch}/made.so", made)  # another process may have compiled the same
    return made


def _load() -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_file_faults", str(_library()))
    spec = importlib.util.spec_from_file_location("_file_faults", loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_module = _load()
file_faults, file_log = _module.file_faults, _module.file_log


def forked(nth: int, what: str, act: Callable[[], object]) -> int | None:
    """Return how many calls a child made that does `act` with this fault, or None if it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file_faults(nth, what)
            act()
            os.write(writing, str(file_faults(0)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    return int(text)
