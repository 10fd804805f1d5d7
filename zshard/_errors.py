"""Errors that Python code raises, and its warnings.

This module imports nothing of zshard, so that any other module can raise and catch these errors.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence


class CheckpointError(ValueError):
    """A checkpoint is damaged, unfinished or invalid; the message names the file and, where
    possible, the tensor."""


class ShardError(RuntimeError):
    """An operation needs the full tensor but got this rank's shard of it. The message names the
    parameter and what to write."""


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless the argument `name` is one of these values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def did_you_mean(given: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """Return the end of an error that names what `given` may be a slip of; "" if nothing is like
    it. likeness: difflib's ratio."""
    names, given = {name.lower(): name for name in names}, given.lower()
    near = difflib.get_close_matches(given, names, 3, likeness)
    if not near:
        return ""

    def rank(name: str) -> tuple[float, bool]:
        ratio = difflib.SequenceMatcher(None, name, given).ratio()
        return ratio, name[:1] == given[:1]  # of two that are as near

    return f": did you mean '{names[max(near, key=rank)]}'?"


_PACKAGE = os.path.dirname(__file__) + os.sep


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the script's own line, where Python finds it: in 3.12 and later."""
    if sys.version_info >= (3, 12):
        warnings.warn(text, category, skip_file_prefixes=(_PACKAGE,))
    else:
        warnings.warn(text, category, stacklevel=3)
