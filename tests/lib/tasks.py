"""Tasks for ranks, and their results: a function or a script with its arguments, as bytes.

Both sides are here. spawn.py and nursery.py start the processes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import reprlib
import runpy
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
TAIL = 4000  # characters of a rank's output that a message shows


class RankFailure(AssertionError):
    """A rank raised, died or did not return in time; the message has its output.

    line: the file and line of the test's own module where it raised, and what; None if nowhere.
    """

    line: tuple[str, int, str] | None = None


@dataclass(frozen=True)
class RankResult:
    """The end of one rank; `returncode` is None if it was killed at the time limit."""

    rank: int
    returncode: int | None
    stdout: str
    stderr: str
    value: Any  # the function's result; None for a script or a rank that failed


# --- the parent's side ---------------------------------------------------------------------------


def python_path() -> str:
    """Return a PYTHONPATH that makes ranks import the same zshard as this process."""
    old = os.environ.get("PYTHONPATH", "")
    spec = importlib.util.find_spec("zshard")
    if spec is None or spec.origin is None or "site-packages" in spec.origin:
        return old
    return os.pathsep.join(filter(None, [str(Path(spec.origin).parent.parent), old]))


def task_of(fn_or_path: Any, args: tuple[Any, ...]) -> bytes:
    """Return a module-level function (by its module's file) or a script, with its arguments, as
    bytes."""
    if callable(fn_or_path):
        name = fn_or_path.__qualname__
        if "<" in name:
            raise TypeError(f"{name}: ranks can only import functions at module level")
        file = inspect.getsourcefile(inspect.unwrap(fn_or_path))
        what = ("call", file, fn_or_path.__module__, name)
    else:
        what = ("script", str(Path(fn_or_path).resolve()), "", "")
    return pickle.dumps((*what, pickle.dumps(args)))


def call_of(fn_or_path: Any, args: tuple[Any, ...]) -> str:
    """Describe the ranks' call, for messages: many tests run one function with various
    arguments."""
    name = getattr(fn_or_path, "__qualname__", fn_or_path)
    return f"{name}({', '.join(map(reprlib.repr, args))})"


# --- the ranks' side -----------------------------------------------------------------------------


def find_modules_beside(file: str) -> None:
    """Let this process import the modules next to `file`, and each module of tests: arguments may
    name functions of a module other than the task's."""
    for folder in [str(Path(file).parent), *(str(path) for path in TESTS.iterdir())]:
        if folder not in sys.path and Path(folder).is_dir():
            sys.path.append(folder)  # benchmarks have modules of the same name as tests/lib


def import_module_of(task: bytes) -> None:
    """Import the module of the task's function."""
    _, file, module, _, _ = pickle.loads(task)
    if module:
        find_modules_beside(file)
        importlib.import_module(module)


def perform(task: bytes) -> Any:
    """Run the task; a script runs as __main__ with its arguments in sys.argv. A test that
    `on_ranks` decorates is its own body here."""
    kind, file, module, name, packed = pickle.loads(task)
    find_modules_beside(file)
    args = pickle.loads(packed)  # only now: they may name functions of a test's module
    if kind == "script":
        sys.argv = [file, *map(str, args)]
        runpy.run_path(file, run_name="__main__")
        return None
    function = getattr(importlib.import_module(module), name)
    return getattr(function, "body_on_ranks", function)(*args)


def answer(pipe: Connection, task: bytes) -> int:
    """Perform `task`, send (ok, value), return an exit status; a traceback goes to stderr.

    The value of a failure is RankFailure.line.
    """
    status = 0
    try:
        reply = pickle.dumps((True, perform(task)))
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        reply = pickle.dumps((status == 0, None))
    except BaseException as error:
        traceback.print_exc()
        status, reply = 1, pickle.dumps((False, _line_of(error, pickle.loads(task)[1])))
    sys.stdout.flush()
    pipe.send_bytes(reply)
    return status


def _line_of(error: BaseException, file: str) -> tuple[str, int, str] | None:
    """Return the innermost line of `file` that `error` came through, and its text."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    text = "".join(traceback.format_exception_only(error)).strip()
    return (file, lines[-1] or 0, text) if lines else None
