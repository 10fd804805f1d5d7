"""pytest's rewriting of asserts where pytest does not bring it: in ranks, and for these helpers.

A failing assert shows the values that it compared only in a module that pytest has
rewritten. It rewrites the tests that it imports itself; a rank imports them anew, so it installs the
same hook, which finds what the parent has rewritten in __pycache__ and hence costs nothing. The
hook is private to pytest: where it is another, or none, asserts are plain.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LINES = 30  # of a comparison in a rank's message; spawn.py cuts the whole at its beginning

# What the hook asks a config: all at pytest's defaults, as making a real one would import it all.
SETTINGS = {"python_files": ["test_*.py"], "assertion_text_diff_style": "ndiff"}


def rewrite_helpers() -> None:
    """Has the modules beside this one rewritten when they are imported."""
    import pytest

    helpers = {path.stem for path in Path(__file__).parent.glob("*.py")}
    pytest.register_assert_rewrite(*sorted(helpers - sys.modules.keys()))


def rewrite_in_ranks() -> None:
    """Has the tests and helpers rewritten that this process, which is not pytest's, will import."""
    with contextlib.suppress(Exception):  # another pytest: a test notices, others pass without
        _install_hook()
        rewrite_helpers()


def _install_hook() -> None:
    from _pytest.assertion import rewrite, util

    config: Any = SimpleNamespace(
        getini=SETTINGS.get,
        get_verbosity=lambda kind=None: 0,
        get_terminal_writer=lambda: SimpleNamespace(_highlight=lambda source, lexer="": source),
        pluginmanager=SimpleNamespace(has_plugin=lambda name: False),
        stash={rewrite.assertstate_key: SimpleNamespace(trace=lambda text: None)},
    )

    def compared(op: str, left: object, right: object) -> str | None:
        """The difference in detail, in the form in which the rewritten code wants it."""
        with contextlib.suppress(Exception):
            from _pytest.assertion import pytest_assertrepr_compare

            lines = list(pytest_assertrepr_compare(config, op, left, right) or ())
            if len(lines) > LINES:
                lines[LINES:] = [f"... {len(lines) - LINES} more lines"]
            return (
                "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None
            )
        return None

    sys.meta_path.insert(0, rewrite.AssertionRewritingHook(config))
    util._reprcompare = compared
