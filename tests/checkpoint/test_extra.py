"""What a script keeps beside tensors: as JSON and back (zshard/checkpoint/script_state.py)."""

from __future__ import annotations

import collections
import json
import math
import random

import numpy
import pytest
import torch
from compare import assert_same
from hypothesis import given
from hypothesis import strategies as st

from zshard.checkpoint.safetensors import CODES
from zshard.checkpoint.script_state import decode, encode, rng_state, set_rng_state

_keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers()), st.none())
_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.frozensets(st.integers(), max_size=3),
    st.sets(st.text(), max_size=3),
)
_values = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a, b):
    """Equal in values, NaN included."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) or a == b  # a set has no order


@given(_values)
def test_comes_back_through_json(value):
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(json.loads(text))
    assert type(back) is type(value)
    assert same(back, value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype, shape):
    value = (torch.randn(shape) * 4).to(dtype)
    back = decode(json.loads(json.dumps(encode(value))))
    assert_same(back, value, "what comes back")
    back.fill_(1)  # it is the caller's


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_tensors_of_every_dtype_that_a_file_can_have(dtype):
    value = torch.arange(2).to(dtype)
    back = decode(json.loads(json.dumps(encode(value))))
    assert back.dtype == dtype
    assert_same(back.view(torch.uint8), value.view(torch.uint8), "what comes back")


def test_dtypes_themselves():
    value = {"momentum_dtype": torch.bfloat16, "of": [torch.float8_e4m3fn, torch.complex128]}
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_views_that_say_how_to_read_their_memory():
    value = torch.tensor([1 + 2j, 3 - 4j])
    back = decode(json.loads(json.dumps(encode({"conj": value.conj(), "neg": value.conj().imag}))))
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j] and back["neg"].tolist() == [-2, 4]


def test_arrays_and_numbers_of_numpy():
    value = {
        "a": numpy.arange(6, dtype=">i4").reshape(2, 3),
        "n": numpy.float32(0.5),
        "i": numpy.int64(7),
    }
    back = decode(json.loads(json.dumps(encode(value))))
    assert numpy.array_equal(back["a"], value["a"]) and back["a"].dtype == value["a"].dtype
    assert back["n"] == 0.5 and back["i"] == 7 and type(back["i"]) is int


def test_state_of_schedulers():
    """MultiStepLR has a Counter with whole numbers as keys."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    state = scheduler.state_dict()
    back = decode(json.loads(json.dumps(encode(state))))
    assert back == {**state, "milestones": dict(state["milestones"])}
    assert isinstance(state["milestones"], collections.Counter)


@pytest.mark.parametrize(
    "value", [torch.nn.Linear(1, 1), object(), lambda: 0, {"x": [1, print]}, 1j]
)
def test_names_what_it_cannot_keep(value):
    with pytest.raises(TypeError, match=r"^cannot save extra(\['x'\]\[1\])?: unsupported type"):
        encode(value)


def test_refuses_what_is_large():
    with pytest.raises(ValueError, match=r"extra\['big'\] has 16777217 bytes.*buffer of the model"):
        encode({"big": bytes(2**24 + 1)})
    assert decode(json.loads(json.dumps(encode([2**8191, -(2**8191)])))) == [2**8191, -(2**8191)]
    with pytest.raises(ValueError, match=r"extra\['big'\] is an integer of 8193 bits"):
        encode({"big": 2**8192})


def test_says_of_what_an_array_is():
    with pytest.raises(TypeError, match=r"extra\['names'\]: unsupported type ndarray of <U1;"):
        encode({"names": numpy.array(["a"])})


@pytest.mark.parametrize(
    "told",
    [
        {"$object": 1},
        {"$tuple": [1], "more": 2},
        {"$tuple": 3},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[{"a": 1}, 2]]},
        {"$bytes": "%%%"},
        {"$bytes": 5},
        {"$tensor": {"dtype": "qint8", "shape": [1], "data": "AA=="}},
        {"$tensor": {"dtype": "int8", "shape": [2], "data": "AA=="}},
        {"$tensor": {"dtype": "int16", "shape": [1], "data": "AA=="}},
        {"$tensor": {"dtype": "int8", "shape": [-7], "data": ""}},
        {"$array": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$float": "ten"},
        {"$dtype": "qint8"},
        {"$dtype": ["float32"]},
    ],
)
def test_refuses_what_it_cannot_have_written(told):
    with pytest.raises(ValueError):
        decode({"here": [told]})


def test_random_numbers_go_on_where_they_were():
    state = decode(json.loads(json.dumps(encode(rng_state()))))
    wanted = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    torch.rand(5), random.random(), numpy.random.rand()
    set_rng_state(state)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == wanted


def test_random_state_of_something_else():
    with pytest.raises(ValueError, match="unexpected key 'jax'"):
        set_rng_state({"jax": 1})


def test_floats_that_json_has_not():
    back = decode(json.loads(json.dumps(encode([math.inf, -math.inf, math.nan]), allow_nan=False)))
    assert back[:2] == [math.inf, -math.inf] and math.isnan(back[2])
