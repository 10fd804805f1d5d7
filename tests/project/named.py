"""Check that tests named in text (a table of the docs, a list) exist.

A reference is a file, a test function, or one of its parameters as pytest prints it:

    tests/optim/test_clip.py
    tests/optim/test_clip.py::test_power_sum
    tests/training/test_parity.py::test_two_ranks_are_bit_identical_to_ddp[tied]
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def problem_with(reference: str) -> str:
    """Return why `reference` names no test; "" if it does."""
    path, _, rest = reference.partition("::")
    if not (re.fullmatch(r"tests/\w+/test_\w+\.py", path) and (ROOT / path).is_file()):
        return f"{reference}: there is no such file"
    if not rest:
        return ""
    name, _, parameter = rest.rstrip("]").partition("[")
    if name not in _functions(path):
        return f"{reference}: {path} has no test of that name"
    if parameter and parameter not in _parameters(path, name):
        return f"{reference}: {name} has no such parameter"
    return ""


@functools.cache
def _functions(path: str) -> set[str]:
    """Return the names of the tests in a file."""
    body = ast.parse((ROOT / path).read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


@functools.cache
def _parameters(path: str, name: str) -> set[str]:
    """Return all parameter sets of a test, by the names in pytest's output."""
    folder = str((ROOT / path).parent)
    if folder not in sys.path:  # pytest adds those whose tests it runs
        sys.path.append(folder)
    test = getattr(importlib.import_module(Path(path).stem), name)
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return {text for mark in marks for value in mark.args[1] for text in _names(value)}


def _names(value: Any) -> set[str]:
    if hasattr(value, "values") and hasattr(value, "marks"):  # pytest.param
        value = tuple(value.values)
    if isinstance(value, list | tuple):
        return set().union(*map(_names, value))
    return {getattr(value, "__name__", str(value))}
