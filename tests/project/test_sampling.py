"""Which cases of sampled tests are left to `thorough`: see sampling.py."""

from __future__ import annotations

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.sampled(4)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_many(a, b):
    pass

@pytest.mark.parametrize("a", range(3))
def test_all(a):
    pass
"""

CONFTEST = """
import pytest
from sampling import leave_to_thorough

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    leave_to_thorough(items)
"""

INI = """
[pytest]
markers =
    sampled(n): see sampling.py
    thorough: the rest
"""


def collected(pytester, *args):
    done = pytester.runpytest("--collect-only", "-q", "-p", "no:randomly", *args)
    return [line for line in done.outlines if "::" in line]


def test_a_sample_has_each_value_and_thorough_the_rest(pytester):
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    short = collected(pytester, "-m", "not thorough")
    rest = collected(pytester, "-m", "thorough")
    many = [line for line in short if "test_many" in line]
    assert len(many) == 4 and len(rest) == 12 and len(short) == 7
    values = [line.split("[")[1][:-1].split("-") for line in many]
    assert {a for a, _ in values} == {b for _, b in values} == set("0123")
    assert not set(short) & set(rest)
    assert collected(pytester, "-m", "not thorough") == short
