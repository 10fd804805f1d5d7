"""Selection of a run's cases: a sample of each test's, by default.

    @pytest.mark.sampled(5)  # five of its cases in each run, which cover the most values

A test on ranks runs one case, unless it says another number: different from test to test, so that each
strategy and transport is used in many tests. Other tests run all. Tests marked `thorough` take
minutes and are left out as well. Cases that are left out are not even made, which would take half a
minute.

    --whole        all cases of all tests
    --shard 3/16   the third sixteenth of them (shards.py)
    --quick        tests that start no ranks and no Python
"""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import types
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ON_RANKS = 1  # cases of a test on ranks, unless it sets another number
LIBRARIES = (sys.base_prefix, sys.prefix, str(ROOT / "zshard"))  # whose code is not looked into
STARTERS = ("fork_ranks", "run_ranks", "RankPool", "start_nursery")
GPU = "tests/gpu/"  # tests of fake GPUs only, and their sources
DRIVEN = ["csrc/device", "csrc/comm/gpu", "csrc/comm/nccl", "cuda", "tests/c", "tests/lib", GPU]
DRIVEN += ["csrc/python/py_cuda.c", "csrc/python/py_nccl.c"]
DRIVEN += [f"zshard/ranks/{name}.py" for name in ("devices", "nccl", "transports")]


def add_options(parser: pytest.Parser) -> None:
    """Add the options above."""
    group = parser.getgroup("zshard")
    group.addoption("--whole", action="store_true", help="all cases, not a sample")
    group.addoption("--shard", metavar="K/N", help="the K-th of N parts of all cases")
    group.addoption("--quick", action="store_true", help="what starts no ranks and no Python")


def runs_all(config: pytest.Config) -> bool:
    """Return whether the run's cases are no sample: all, a part of all, or those that are named."""
    named = any("[" in word for word in config.args)
    return bool(config.option.whole or config.option.shard or named)


# --- cases of one test ------------------------------------------------------------------------------


def keep_a_sample(test: pytest.Metafunc) -> int:
    """Keep a sample of a test's cases before they are made; return how many are left out."""
    cases = test._calls
    usual = [case for case in cases if all(mark.name != "thorough" for mark in case.marks)]
    mark = test.definition.get_closest_marker("sampled")
    on_ranks = _starts_any(test, test._arg2fixturedefs)
    size = int(mark.args[0]) if mark is not None else ON_RANKS if on_ranks else len(cases)
    kept = _sample_of(usual, size, test.definition.nodeid)
    if not kept:  # pytest would make one case without values
        return 0
    left = len(cases) - len(kept)
    cases[:] = kept
    return left


def _sample_of(cases: list[Any], size: int, test: str) -> list[Any]:
    """Choose `size` of the cases of one test: the same each time, for any names of values.

    Greedy: the case whose parameters' values have occurred least is next.
    """
    seen: dict[tuple[str, int], int] = defaultdict(int)
    left = sorted(range(len(cases)), key=lambda place: zlib.crc32(f"{test}:{place}".encode()))
    taken: list[int] = []
    while left and len(taken) < size:
        best = min(left, key=lambda place: sum(seen[each] for each in cases[place].indices.items()))
        left.remove(best)
        taken.append(best)
        for each in cases[best].indices.items():
            seen[each] += 1
    return [cases[place] for place in sorted(taken)]


# --- processes that a test starts -----------------------------------------------------------------


@functools.cache
def starts(function: Any, pythons: bool = False) -> bool:
    """Return whether a test's function reaches what starts ranks by the names in its code, through
    functions of the tests. pythons: or what starts any Python."""
    seen: set[Any] = set()
    left = [function]
    while left:
        function = left.pop()
        if not isinstance(function, types.FunctionType):
            continue
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if code is None or code in seen or code.co_filename.startswith(LIBRARIES):
            continue
        seen.add(code)
        names = _names_in(code)
        if not names.isdisjoint(STARTERS) or (pythons and "executable" in names):
            return True
        for name in names:
            found = function.__globals__.get(name)
            if isinstance(found, types.ModuleType) and _is_of_tests(found):
                left += [value for other in names if (value := vars(found).get(other))]
            left.append(found)
    return False


def _starts_any(test: Any, fixtures: Any, pythons: bool = False) -> bool:
    """Return whether a test, by its function and its fixtures, uses a pool of ranks or starts some."""
    functions = [test.function, *(each.func for found in fixtures.values() for each in found)]
    is_pooled = any(name.startswith("pool") for name in test.fixturenames)
    return is_pooled or any(starts(each, pythons) for each in functions)


def _is_of_tests(module: types.ModuleType) -> bool:
    return not (getattr(module, "__file__", None) or sys.prefix).startswith(LIBRARIES)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the global names and attributes that a function's code uses, inner functions' too."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


# --- whole tests ------------------------------------------------------------------------------------


def is_left_out(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether a collected case is not in this run."""
    if config.option.shard:
        part, parts = map(int, config.option.shard.split("/"))
        return zlib.crc32(item.nodeid.encode()) % parts != part - 1
    if not runs_all(config):
        if item.get_closest_marker("thorough") is not None:
            return True
        if item.nodeid.startswith(GPU) and gpu_unchanged():
            return True
    if not config.option.quick or not isinstance(item, pytest.Function):
        return False
    return _starts_any(item, item._fixtureinfo.name2fixturedefs, pythons=True)


@functools.cache
def gpu_unchanged() -> bool:
    """Return whether this is a branch that changes no source that fake GPUs run."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    base, head = git("merge-base", "HEAD", "main"), git("rev-parse", "HEAD")
    return base not in ("", head) and not git("diff", "--name-only", base, "--", *DRIVEN)
