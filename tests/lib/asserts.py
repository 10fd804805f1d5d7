"""pytest's assertion rewriting where pytest does not provide it: in ranks, and for these helpers.

A failing assert shows the compared values only in a module that pytest has rewritten. pytest
rewrites the tests that it imports itself; a rank imports them again, so it installs the same hook,
which finds the parent's rewritten code in __pycache__ and hence costs nothing. The hook is private
to pytest: with a different hook, or none, asserts are plain.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LINES = 30  # of a comparison in a rank's message; spawn.py truncates the beginning

# The hook's queries of a config: all at pytest's defaults, since creating a real one would import
# it all.
SETTINGS = {"python_files": ["test_*.py"], "assertion_text_diff_style": "ndiff"}


def rewrite_helpers() -> None:
    """Rewrite the helpers, here and next to the tests that share them, when they are imported."""
    import pytest

    helpers = {path.stem for path in Path(__file__).parents[1].glob("*/[!t]*.py")}
    pytest.register_assert_rewrite(*sorted(helpers - sys.modules.keys()))


def rewrite_in_ranks() -> None:
    """Rewrite the tests and helpers that this process, which is not pytest's, will import."""
    with contextlib.suppress(Exception):  # another pytest: one test notices, others pass without
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
        """Return the difference in detail, in the form that the rewritten code expects."""
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
