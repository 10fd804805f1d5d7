"""A failing assert on a rank, or in a helper, shows what it compared (tests/lib/asserts.py)."""

import re
import sys

import pytest
import torch
from asserts import rewrite_in_ranks
from compare import assert_same
from nursery import fork_ranks
from spawn import RankFailure, run_ranks


def compares(what):
    """Fails on a rank, as a function of a test does that asserts; or tells who loaded a helper."""
    if what == "lists":
        assert sorted([3, 1, 2]) == [1, 2, 4]
    if what == "tensors":
        assert_same([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 3.0])], "the output")
    import scripts

    return type(scripts.__loader__).__name__


SAID = {
    "lists": r"assert \[1, 2, 3\] == \[1, 2, 4\]\n(.|\n)*At index 2 diff: 3 != 4",
    "tensors": re.escape(
        "the output differs:\n    [0]: 1 of 2 elements differ, the first at [1]: 2.0, not 3.0"
    ),
}


@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("start", [run_ranks, fork_ranks])
def test_a_failing_assert_on_a_rank_shows_the_values(start, what):
    with pytest.raises(RankFailure, match=f"rank 0 of 1 (.|\n)*{SAID[what]}"):
        start(compares, 1, what, check=True)


def test_asserts_of_helpers_are_rewritten_here_and_on_ranks(pool2):
    assert [compares(""), *pool2.run(compares, "")] == ["AssertionRewritingHook"] * 3


def test_asserts_are_plain_with_another_pytest(monkeypatch):
    from _pytest.assertion import rewrite, util

    before = list(sys.meta_path), util._reprcompare
    monkeypatch.delattr(rewrite, "AssertionRewritingHook")
    rewrite_in_ranks()
    assert (list(sys.meta_path), util._reprcompare) == before
