"""The helpers of the tests: asserts show values, comparisons are bitwise, samples have each value.

See tests/lib: asserts.py, compare.py, sampling.py.
"""

import json
import os
import re
import shutil
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import shards
import torch
from asserts import rewrite_in_ranks
from compare import assert_same, differences
from nursery import fork_ranks
from rows import all_rows
from spawn import RankFailure, on_ranks, run_ranks

pytest_plugins = ["pytester"]

# --- asserts --------------------------------------------------------------------------------------


def compares(what):
    """Fails on a rank, as a function of a test does that asserts; or names who loaded a helper."""
    if what == "lists":
        assert sorted([3, 1, 2]) == [1, 2, 4]
    if what == "tensors":
        assert_same([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 3.0])], "the output")
    import scripts

    return type(scripts.__loader__).__name__


SHOWN = {
    "lists": r"assert \[1, 2, 3\] == \[1, 2, 4\]\n(.|\n)*At index 2 diff: 3 != 4",
    "tensors": re.escape(
        "the output differs:\n    [0]: 1 of 2 elements differ, the first at [1]: 2.0, not 3.0"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", SHOWN)
@pytest.mark.parametrize("start", [run_ranks, fork_ranks])
def test_failing_assert_on_a_rank_shows_the_values(start, what):
    with pytest.raises(RankFailure, match=f"rank 0 of 1 (.|\n)*{SHOWN[what]}"):
        start(compares, 1, what, check=True)


def test_asserts_of_helpers_are_rewritten(pool2):
    assert [compares(""), *pool2.run(compares, "")] == ["AssertionRewritingHook"] * 3


def test_asserts_stay_plain_with_an_unknown_pytest(monkeypatch):
    from _pytest.assertion import rewrite, util

    before = list(sys.meta_path), util._reprcompare
    monkeypatch.delattr(rewrite, "AssertionRewritingHook")
    rewrite_in_ranks()
    assert (list(sys.meta_path), util._reprcompare) == before


# --- tests that run on ranks --------------------------------------------------------------------------


@on_ranks(2)
def test_body_runs_on_each_rank(tmp_path):
    other = 1 - int(os.environ["RANK"])
    (tmp_path / os.environ["RANK"]).touch()
    torch.distributed.barrier()
    assert (tmp_path / str(other)).exists()


ON_RANKS = """
import os
import pytest
from spawn import on_ranks

@pytest.mark.parametrize("wrong", [1, 2])
@on_ranks(2)
def test_ranks(wrong):
    rank = int(os.environ["RANK"])
    assert rank + 1 != wrong
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", [1, 2])
def test_failed_assert_is_shown_at_its_own_line(project, wrong):
    project.makepyfile(test_on=ON_RANKS)
    done = project.runpytest("--whole", "-k", f"[2ranks-{wrong}]")
    done.stdout.fnmatch_lines(
        [
            ">       assert rank + 1 != wrong",
            f"E*rank {wrong - 1} of 2 failed",
            "test_on.py:9: RankFailure",
            "FAILED test_on.py::test_ranks*AssertionError: *",
        ]
    )


# --- comparisons ------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


def other_than(tensor, *changes):
    """A copy with other elements in some places."""
    copy = tensor.clone()
    for place, value in changes:
        copy[place] = value
    return copy


def grid():
    return torch.arange(12.0).reshape(3, 4)


WRONG = other_than(grid(), ((1, 2), 6.25), ((2, 0), 5.0))
TEXT = "2 of 12 elements differ, the first at [1, 2]: 6.25, not 6.0; by up to 3"
TEXT_BACK = "2 of 12 elements differ, the first at [1, 2]: 6.0, not 6.25; by up to 3"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (grid(), grid(), []),
        (WRONG, grid(), [TEXT]),
        ({"a": grid(), "b": WRONG}, {"a": grid(), "b": grid()}, [f"b: {TEXT}"]),
        ([grid(), {"x": [WRONG]}], [grid(), {"x": [grid()]}], [f"[1]/x[0]: {TEXT}"]),
        ((grid() for _ in range(2)), (grid(), WRONG), [f"[1]: {TEXT_BACK}"]),
        ([grid()], [grid(), grid()], ["1 entries, not 2"]),
        ({"a": 1, "b": 2}, {"b": 3, "c": 1}, ["b: 2, not 3", "only ours has a", "only theirs has c"]),
        ({"a": grid(), "b": None}, {"a": None, "b": None}, ["a: float32 [3, 4], not None"]),
        (grid(), grid().reshape(4, 3), ["float32 [3, 4], not float32 [4, 3]"]),
        (grid(), grid().double(), ["float32 [3, 4], not float64 [3, 4]"]),
        (torch.tensor(2.0), torch.tensor(3.0), ["1 of 1 elements differ, the first at []: 2.0, not 3.0; by up to 1"]),
        (torch.tensor([True, False]), torch.tensor([True, True]), ["1 of 2 elements differ, the first at [1]: False, not True; by up to 1"]),
        (torch.tensor([1j, 2j]), torch.tensor([1j, 3j]), ["1 of 2 elements differ, the first at [1]: 2j, not 3j; by up to 1"]),
        (torch.tensor([INF]), torch.tensor([INF]), []),
        (torch.ones(0, 3), torch.ones(0, 3), []),
    ],
)  # fmt: skip
def test_differences_are_named(ours, theirs, expected):
    assert differences(ours, theirs) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
)
def test_comparison_is_bitwise(dtype):
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.ones(7).to(dtype)
    bits = value.clone().view(integer)
    bits[3] += 1
    (text,) = differences(bits.view(dtype), value)
    assert text.startswith("1 of 7 elements differ, the first at [3]: ")
    assert differences(torch.tensor([-0.0]), torch.tensor([0.0]))


@pytest.mark.thorough
def test_nan_equals_nan_only_if_asked_for():
    one, other = torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])
    assert differences(one, one) == [
        "1 of 2 elements differ, the first at [1]: nan, not nan; by up to nan"
    ]
    assert differences(one, other, nans=True) == []
    assert differences(one, other.neg(), nans=True) != []  # another NaN
    assert differences({"a": one}, {"a": torch.tensor([1.0, 2.0])}, nans=True) != []
    assert differences(torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)])) != []


def test_failing_comparison_lists_the_differences():
    with pytest.raises(AssertionError) as caught:
        assert_same({"weight": WRONG, "bias": grid()}, {"weight": grid()}, "the state")
    assert str(caught.value) == f"the state differs:\n    only ours has bias\n    weight: {TEXT}"
    assert_same({"weight": grid()}, {"weight": grid()}, "the state")
    many = {str(i): i for i in range(100)}
    with pytest.raises(AssertionError, match="and 88 more"):
        assert_same(many, dict.fromkeys(many, -1), "the state")


# --- which cases run -------------------------------------------------------------------------------

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
    short, said = cases()
    many = [line for line in short if "test_many" in line]
    assert len(many) == 4 and len(short) == 4 + 3 + 1 + 3
    values = [line.split("[")[1][:-1].split("-") for line in many]
    assert {a for a, _ in values} == {b for _, b in values} == set("0123")
    assert "11 of 26 cases in this run" in said
    assert cases()[0] == short
    whole, said = cases("--whole")
    assert len(whole) == 16 + 3 + 3 + 3 + 1 and set(short) < set(whole)
    assert "26 of 26 cases in this run" in said


def test_sample_does_not_depend_on_what_values_are_called(pytester, cases):
    places = [line.split("[")[1] for line in cases()[0] if "test_many" in line]
    renamed = TESTS.replace('"a", range(4)', '"a", [10, 11, 12, 13]').replace('"b"', '"c"')
    pytester.makepyfile(renamed.replace("test_many(a, b)", "test_many(a, c)"))
    others = [line.split("[")[1] for line in cases()[0] if "test_many" in line]
    assert [each.replace("-1", "-", 1) for each in others] == places


def test_quick_starts_no_ranks_and_no_python(cases):
    names = {line.split("[")[0] for line in cases("--quick")[0]}
    assert names == {"test_many", "test_all"}


def test_shards_are_all_cases_once(cases):
    shards = [cases("--shard", f"{k}/3")[0] for k in (1, 2, 3)]
    assert sorted(chain(*shards)) == sorted(cases("--whole")[0])
    assert all(shards)


@pytest.mark.parametrize(
    ("whole", "chosen"),
    [
        (True, {}),
        (False, {"keyword": "name"}),
        (False, {"markexpr": "not slow"}),
        (False, {"maxfail": 1}),
        (False, {"args": ["tests/core"]}),
        (False, {"status": pytest.ExitCode.INTERRUPTED}),
    ],
    ids=str,
)
def test_only_a_whole_shard_is_recorded(monkeypatch, tmp_path, whole, chosen):
    monkeypatch.setattr(shards, "RECORD", tmp_path / "shards.json")
    shard = shards.Shard("7/9")
    shard.notes = tmp_path / "notes"
    shard.note("a", "passed")
    shard.note("b", "failed")
    facts = {"keyword": "", "markexpr": "", "maxfail": 0, "args": ["tests"]} | chosen
    config = SimpleNamespace(option=SimpleNamespace(**facts), args=facts["args"])
    status = chosen.get("status", pytest.ExitCode.TESTS_FAILED)
    shard.pytest_sessionfinish(SimpleNamespace(config=config), status)
    assert shards.RECORD.exists() == whole
    if whole:
        found = json.loads(shards.RECORD.read_text())["7/9"]
        assert found["passed"] == 1 and found["failed"] == ["b"]


# --- rows -----------------------------------------------------------------------------------------


def test_all_rows_that_fail_are_reported():
    with pytest.raises(pytest.fail.Exception) as caught, all_rows() as row:
        for number in range(30):
            with row(number, "even"):
                assert number % 2 == 0
        with row("no error"), pytest.raises(ValueError):
            pass
    text = str(caught.value)
    assert text.startswith("16 of 31 rows failed") and "1-even: " in text
    assert text.endswith("and 6 more: 21-even, 23-even, 25-even, 27-even, 29-even, no error")
    assert "test_helpers.py" in text and "assert number % 2 == 0" in text


def test_a_skip_in_a_row_is_a_failure_and_a_timeout_ends_the_table():
    failure = pytest.raises(pytest.fail.Exception, match="1 of 1 rows failed")
    with failure, all_rows() as row, row("skipped"):
        pytest.skip("a row cannot")
    with pytest.raises(pytest.fail.Exception, match="Timeout"), all_rows() as row:
        with row("slow"):
            pytest.fail("Timeout (>2.0s) from pytest-timeout.")
        raise AssertionError("the next row began")


def test_table_without_rows_fails():
    with pytest.raises(pytest.fail.Exception, match="no rows"), all_rows():
        pass
