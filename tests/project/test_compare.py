"""What failing comparisons of tensors say (tests/lib/compare.py)."""

import pytest
import torch
from compare import assert_same, differences

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


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
)
def test_every_bit_counts(dtype):
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.ones(7).to(dtype)
    bits = value.clone().view(integer)
    bits[3] += 1
    (text,) = differences(bits.view(dtype), value)
    assert text.startswith("1 of 7 elements differ, the first at [3]: ")
    assert differences(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_a_nan_equals_one_only_where_the_test_says_so():
    one, other = torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])
    assert differences(one, one) == [
        "1 of 2 elements differ, the first at [1]: nan, not nan; by up to nan"
    ]
    assert differences(one, other, nans=True) == []
    assert differences(one, other.neg(), nans=True) != []  # another NaN
    assert differences({"a": one}, {"a": torch.tensor([1.0, 2.0])}, nans=True) != []
    assert differences(torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)])) != []


def test_a_failing_comparison_says_what_was_compared():
    with pytest.raises(AssertionError) as caught:
        assert_same({"weight": WRONG, "bias": grid()}, {"weight": grid()}, "the state")
    assert str(caught.value) == f"the state differs:\n    only ours has bias\n    weight: {TEXT}"
    assert_same({"weight": grid()}, {"weight": grid()}, "the state")
    many = {str(i): i for i in range(100)}
    with pytest.raises(AssertionError, match="and 88 more"):
        assert_same(many, dict.fromkeys(many, -1), "the state")
