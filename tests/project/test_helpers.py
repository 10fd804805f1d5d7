"""The helpers of the tests: ranks notice every failure, asserts show values, comparisons and samples.

See tests/lib: spawn.py, asserts.py, compare.py, sampling.py.
"""

import os
import re
import signal
import sys
import time

import pytest
import torch
from asserts import rewrite_in_ranks
from compare import assert_same, differences
from nursery import fork_ranks
from spawn import RankFailure, RankPool, ranks, run_ranks

pytest_plugins = ["pytester"]

# --- ranks ----------------------------------------------------------------------------------------


def rank_and_sum(start):
    """This rank's number, and the sum of all ranks' (start + rank) over torch.distributed."""
    import torch.distributed as dist

    standing = dist.is_initialized()
    if not standing:
        dist.init_process_group("gloo")
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    result = dist.get_rank(), int(total)
    if not standing:  # else torch's threads may need Python after its end, and abort (1 in 50)
        dist.destroy_process_group()
    return result


def seed_and_pid():
    return float(torch.rand(1)), os.getpid()


def variables():
    return os.environ.get("ZSHARD_TEST_OLD"), os.environ.get("ZSHARD_TEST_NEW")


def fail_on(rank, how):
    print("a word on stdout")
    if int(os.environ["RANK"]) != rank:
        return "fine"
    if how == "raise":
        raise ValueError("planted")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
    if how == "late":
        import atexit

        atexit.register(os._exit, 7)
    return "fine"


@ranks(1, 2, 3)
def test_pool_runs_collectives_in_rank_order(pool):
    expected = 10 * pool.world + sum(range(pool.world))
    assert pool.run(rank_and_sum, 10) == [(rank, expected) for rank in range(pool.world)]


def test_pool_keeps_its_ranks_and_seeds_each_call(pool2):
    first, second = pool2.run(seed_and_pid), pool2.run(seed_and_pid)
    assert first == second
    assert first[0][0] == first[1][0] and first[0][1] != first[1][1]


def test_fresh_ranks_rendezvous_and_return_values():
    results = run_ranks(rank_and_sum, 2, 5)
    assert [result.value for result in results] == [(0, 11), (1, 11)]
    assert [(result.rank, result.returncode) for result in results] == [(0, 0), (1, 0)]


def test_environment_is_added_and_removed(monkeypatch):
    monkeypatch.setenv("ZSHARD_TEST_OLD", "old")
    changed = {"ZSHARD_TEST_OLD": None, "ZSHARD_TEST_NEW": "new"}
    (result,) = run_ranks(variables, 1, env=changed)
    assert result.value == (None, "new")


def test_script_on_ranks_gets_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:], __name__)\n")
    assert [result.stdout for result in run_ranks(script, 2, "a", 7)] == [
        "0 ['a', '7'] __main__\n",
        "1 ['a', '7'] __main__\n",
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "reason", "code"),
    [
        ("raise", "rank 1 of 2 failed\n(.|\n)*ValueError: planted", 1),
        ("exit", "rank 1 of 2 failed\n(.|\n)*a word on stdout", 3),
        ("kill", "rank 1 of 2 died with exit status -9", -9),
        ("late", "rank 1 of 2 returned, but then ended with 7", 7),
    ],
)
def test_failing_rank_is_reported(how, reason, code):
    with pytest.raises(RankFailure, match=reason):
        run_ranks(fail_on, 2, 1, how)
    results = run_ranks(fail_on, 2, 1, how, check=False)
    assert [result.returncode for result in results] == [0, code]
    assert results[0].value == "fine"


def test_hanging_rank_is_killed_and_shows_its_stack():
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 .* no answer within 3 s(.|\n)*in fail_on"):
        run_ranks(fail_on, 2, 1, "hang", timeout=3)
    assert time.monotonic() - started < 10
    assert run_ranks(fail_on, 2, 1, "hang", timeout=3, check=False)[1].returncode is None


@pytest.mark.thorough
def test_pool_restarts_after_a_failure():
    pool = RankPool(2)
    try:
        pids = {pid for _, pid in pool.run(seed_and_pid)}
        for how, reason in (("raise", "ValueError: planted"), ("kill", "died with exit status -9")):
            with pytest.raises(RankFailure, match=f"rank 1 of 2 (.|\n)*{reason}"):
                pool.run(fail_on, 1, how)
            fresh = {pid for _, pid in pool.run(seed_and_pid)}
            assert not pids & fresh
            pids |= fresh
        with pytest.raises(RankFailure, match="no answer within 1 s"):
            pool.run(fail_on, 1, "hang", timeout=1)
    finally:
        pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_local_functions_are_refused():
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda: None, 1)


# --- asserts --------------------------------------------------------------------------------------


def compares(what):
    """Fails on a rank, as a function of a test does that asserts; or tells who loaded a helper."""
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


# --- samples ---------------------------------------------------------------------------------------

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


@pytest.mark.thorough
def test_sample_has_each_value_and_thorough_the_rest(pytester):
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
