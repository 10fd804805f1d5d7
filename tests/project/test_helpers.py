"""The helpers of the tests: asserts on ranks show values, comparisons are bitwise, samples have each value.

See tests/lib: asserts.py, compare.py, sampling.py, shards.py, rows.py.
"""

import json
import os
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import shards
import torch
from compare import assert_same, differences
from rows import all_rows
from spawn import on_ranks

pytest_plugins = ["pytester"]

# --- asserts and tests on ranks -------------------------------------------------------------------


@on_ranks(2)
def test_body_runs_on_each_rank(tmp_path):
    other = 1 - int(os.environ["RANK"])
    (tmp_path / os.environ["RANK"]).touch()
    torch.distributed.barrier()
    assert (tmp_path / str(other)).exists()


ON_RANKS = """
import os
from spawn import on_ranks

@on_ranks(2)
def test_ranks():
    rank = int(os.environ["RANK"])
    assert rank != 1
"""


def test_failed_assert_is_shown_at_its_own_line(project):
    project.makepyfile(test_on=ON_RANKS)
    lines = [">       assert rank != 1", "E*rank 1 of 2 failed", "test_on.py:7: RankFailure"]
    project.runpytest("--whole").stdout.fnmatch_lines(lines)


# --- comparisons ----------------------------------------------------------------------------------


def test_differences_are_named():
    one = torch.arange(12.0).reshape(3, 4)
    other = one.clone()
    other[1, 2], other[2, 0] = 6.25, 5.0
    text = "2 of 12 elements differ, the first at [1, 2]: 6.25, not 6.0; by up to 3"
    with all_rows() as row:
        for ours, theirs, expected in (
            (one, one, []),
            ([one, {"x": [other]}], [one, {"x": [one]}], [f"[1]/x[0]: {text}"]),
            ((one for _ in range(2)), [one], ["2 entries, not 1"]),
            ({"a": 1, "b": 2}, {"b": 3}, ["b: 2, not 3", "only ours has a"]),
            (one, one.double(), ["float32 [3, 4], not float64 [3, 4]"]),
            (one, None, ["float32 [3, 4], not None"]),
            (torch.ones(0, 3), torch.ones(0, 3), []),
        ):
            with row(expected):
                assert differences(ours, theirs) == expected
    with pytest.raises(AssertionError, match=r"^the state differs:\n +only ours has b\n +w: 2"):
        assert_same({"w": other, "b": one}, {"w": one}, "the state")


def test_comparison_is_bitwise():
    for dtype, bits in ((torch.float64, torch.int64), (torch.bfloat16, torch.int16)):
        value = torch.ones(7, dtype=dtype)
        other = value.clone().view(bits)
        other[3] += 1
        assert len(differences(other.view(dtype), value)) == 1
    assert differences(torch.tensor([-0.0]), torch.tensor([0.0]))
    nan = torch.tensor([float("nan")])
    assert differences(nan, nan) and not differences(nan, nan.clone(), nans=True)
    assert differences(nan, nan.neg(), nans=True)  # another NaN


# --- which cases run ------------------------------------------------------------------------------

TESTS = """
import pytest
import sys
from nursery import fork_ranks

@pytest.mark.sampled(4)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_many(a, b):
    pass

@pytest.mark.parametrize("a", range(3))
def test_all(a):
    pass

def started(a):
    return fork_ranks

@pytest.mark.parametrize("a", range(3))
def test_on_ranks(a):
    started(a)

@pytest.mark.parametrize("a", range(3))
def test_of_a_program(a):
    [sys.executable]

@pytest.mark.thorough
def test_of_minutes():
    pass
"""


@pytest.fixture
def project(pytester):
    """A folder of tests with this one's conftest."""
    tests = Path(__file__).parents[1]
    markers = "markers =\n    sampled(n): n\n    thorough: minutes\n"
    pytester.makeini(f"[pytest]\npythonpath = {tests / 'lib'}\n{markers}")
    shutil.copy(tests / "conftest.py", pytester.path)
    return pytester


@pytest.fixture
def cases(project):
    """Return the names of the cases that options choose, and what pytest says last."""
    project.makepyfile(TESTS)

    def collected(*options):
        done = project.runpytest("--collect-only", "-q", *options)
        return [line.split("::")[1] for line in done.outlines if "::" in line], done.outlines

    return collected


def test_sample_has_each_value_and_whole_has_all_cases(cases):
    short, output = cases()
    many = [line for line in short if "test_many" in line]
    assert len(many) == 4 and len(short) == 4 + 3 + 1 + 3
    values = [line.split("[")[1][:-1].split("-") for line in many]
    assert {a for a, _ in values} == {b for _, b in values} == set("0123")
    assert "11 of 26 cases in this run" in output
    whole, output = cases("--whole")
    assert len(whole) == 16 + 3 + 3 + 3 + 1 and set(short) < set(whole)
    assert "26 of 26 cases in this run" in output
    assert {line.split("[")[0] for line in cases("--quick")[0]} == {"test_many", "test_all"}
    parts = [cases("--shard", f"{k}/3")[0] for k in (1, 2, 3)]
    assert all(parts) and sorted(chain(*parts)) == sorted(whole)


def test_only_a_whole_shard_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(shards, "RECORD", tmp_path / "shards.json")
    shard = shards.Shard("7/9")
    shard.notes = tmp_path / "notes"
    shard.note("a", "passed")
    shard.note("b", "failed")

    def end(status=pytest.ExitCode.TESTS_FAILED, **chosen):
        options = {"keyword": "", "markexpr": "", "maxfail": 0, "args": ["tests"]} | chosen
        config = SimpleNamespace(option=SimpleNamespace(**options), args=options["args"])
        shard.pytest_sessionfinish(SimpleNamespace(config=config), status)
        return shards.RECORD.exists()

    partial = ({"keyword": "name"}, {"markexpr": "not slow"}, {"maxfail": 1}, {"args": ["tests/a"]})
    assert not any(end(**chosen) for chosen in partial) and not end(pytest.ExitCode.INTERRUPTED)
    assert end()
    record = json.loads(shards.RECORD.read_text())["7/9"]
    assert record["passed"] == 1 and record["failed"] == ["b"]


# --- rows -----------------------------------------------------------------------------------------


def test_all_rows_that_fail_are_reported():
    with pytest.raises(pytest.fail.Exception) as caught, all_rows() as row:
        for number in range(30):
            with row(number, "even"):
                assert number % 2 == 0
        with row("no error"), pytest.raises(ValueError):
            pass
        with row("skipped"):
            pytest.skip("a row cannot")
    text = str(caught.value)
    assert text.startswith("17 of 32 rows failed") and "1-even: " in text
    assert text.endswith(
        "and 7 more: 21-even, 23-even, 25-even, 27-even, 29-even, no error, skipped"
    )
    assert "test_helpers.py" in text and "assert number % 2 == 0" in text


def test_table_without_rows_fails_and_a_timeout_ends_it():
    with pytest.raises(pytest.fail.Exception, match="no rows"), all_rows():
        pass
    with pytest.raises(pytest.fail.Exception, match="Timeout"), all_rows() as row:
        with row("slow"):
            pytest.fail("Timeout (>2.0s) from pytest-timeout.")
        raise AssertionError("the next row began")
