"""A table in one test: all rows run, and all that fail are reported, by name.

    with all_rows() as row:
        for name, text in TABLE.items():
            with row(name):
                assert shown(name) == text

    all_refused({"a negative rate": (lambda: zshard.SGD(params, lr=-1), ValueError, "lr must be")})
    all_raise(ValueError, {"lr must be": lambda: zshard.SGD(params, lr=-1)})

For rows that take milliseconds: a separate case, which pytest makes, names and reports, costs as
much.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest

SHOWN = 10  # rows that a message describes; it names all


@contextlib.contextmanager
def all_rows() -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """Give a function that makes a row's block, by any values that name the row; at the end, fail if a row
    has failed, or if there was none."""
    __tracebackhide__ = True
    names: list[str] = []
    failed: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def row(*values: Any) -> Iterator[None]:
        name = "-".join(map(str, values))
        names.append(name)
        try:
            yield
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            if "from pytest-timeout" in str(error):  # whose clock has been stopped
                raise
            failed.append((name, _described(error)))

    yield row
    if failed:
        texts = [": ".join(each) for each in failed]
        more = [name for name, _ in failed[SHOWN:]]
        rest = [f"and {len(more)} more: {', '.join(more)}"] if more else []
        count = f"{len(failed)} of {len(names)} rows failed"
        pytest.fail("\n\n".join([count, *texts[:SHOWN], *rest]), pytrace=False)
    if not names:
        pytest.fail("the table has no rows")


def all_refused(table: Mapping[str, tuple[Callable[[], Any], type[BaseException], str]]) -> None:
    """Fail unless each row's call raises that kind of error, with that text somewhere in its message."""
    __tracebackhide__ = True
    with all_rows() as row:
        for name, (call, kind, text) in table.items():
            with row(name):
                with pytest.raises(kind) as caught:
                    call()
                assert text in str(caught.value), str(caught.value)


def all_raise(kind: type[BaseException], calls: Mapping[str, Callable[[], Any]]) -> None:
    """Fail unless each call raises that kind of error, with its key in the message."""
    __tracebackhide__ = True
    all_refused({text: (call, kind, text) for text, call in calls.items()})


def _described(error: BaseException) -> str:
    """Return where in the test an exception was raised, or passed, and its text."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # after the row's own
    tests = [frame for frame in frames if "/tests/" in frame.filename] or frames
    lines = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in tests]
    return "\n    ".join(["".join(traceback.format_exception_only(error)).strip(), *lines])
