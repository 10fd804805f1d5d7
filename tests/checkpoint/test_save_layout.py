"""The bytes and files that each rank writes (zshard/checkpoint/save_plan.py), and a script's own
state as JSON (zshard/checkpoint/script_state.py); without any model.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import random
from collections import Counter

import numpy
import pytest
import torch
from compare import assert_same
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from zshard import _core
from zshard.checkpoint import save_plan
from zshard.checkpoint.manifest import BLOCK, FileRecord
from zshard.checkpoint.safetensors import CODES
from zshard.checkpoint.script_state import decode, encode, rng_state, set_rng_state
from zshard.checkpoint.write import joined
from zshard.options import parse_size
from zshard.units.shards import Entry

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


@st.composite
def worlds(draw):
    """Return (entries and shares of each rank, limit): tensors of rank 0, of all ranks, or sharded
    over groups of ranks, with `copies` ranks for each shard."""
    parts, copies = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    world = [([], {}) for _ in range(parts * copies)]
    for i in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["0", "all", "cut"]))
        values = torch.empty(shape, dtype=dtype)
        numel = values.numel()
        cuts = sorted(draw(st.integers(0, numel)) for _ in range(parts - 1))
        bounds = [0, *cuts, numel]
        for rank, (entries, shares) in enumerate(world):
            part, copy = rank % parts, rank // parts
            own, share = values, (0, 1, 0, -2) if rank == 0 else None
            if kind == "all":
                share = 0, len(world), rank, -1
            elif kind == "cut":
                own = values.view(-1)[bounds[part] : bounds[part + 1]]
                share = bounds[part], copies, copy, 0
            entries.append(Entry(f"t{i}", shape, dtype, own))
            shares[f"t{i}"] = share
    return world, draw(st.integers(1, 4000))


def planned(rank, limit):
    """Return the files of a rank, and what it writes."""
    entries, shares = rank
    files = save_plan.lay_out(entries, "model", limit)
    return files, save_plan.pieces_of(files, lambda entry: shares[entry.name])


@given(worlds())
def test_every_byte_is_written_once_by_an_owner(case):
    world, limit = case
    files, _ = planned(world[0], limit)
    written = Counter()
    for rank in world:
        own, pieces = planned(rank, limit)
        assert [file[:3] for file in own] == [file[:3] for file in files]
        for piece in pieces:
            offset = next(o for e, o in own[piece.file].places if e.name == piece.name)
            first, size = rank[1][piece.name][0], piece.dtype.itemsize
            assert piece.offset == offset + (first + piece.begin) * size
            assert 0 <= piece.begin < piece.end <= piece.values.numel()
            end = piece.offset + (piece.end - piece.begin) * size
            written.update((piece.file, byte) for byte in range(piece.offset, end))
    for number, file in enumerate(files):
        for byte in range(len(file.header), file.size):
            assert written.pop((number, byte)) == 1
    assert not written


@given(worlds())
def test_replicas_write_equal_shares(case):
    world, limit = case
    totals = []
    for rank in world:
        _, pieces = planned(rank, limit)
        of_all = [piece for piece in pieces if rank[1][piece.name][3] == -1]
        totals.append(sum((p.end - p.begin) * p.dtype.itemsize for p in of_all))
    assert max(totals) - min(totals) <= 2 * 8  # an entry at either end


@given(worlds())
def test_files_are_valid_and_not_too_large(case):
    world, limit = case
    files = save_plan.lay_out(world[0][0], "some", limit, {"other": "t0"})
    names = []
    for i, file in enumerate(files):
        data = file.header + bytes(file.size - len(file.header))
        assert len(file.header) % save_plan.ALIGN == 0
        found = dict(deserialize(data))
        sizes = {item.name: len(found[item.name]["data"]) for item, _ in file.places}
        assert len(sizes) == len(found)
        assert sum(sizes.values()) <= limit or len(sizes) == 1 or not max(sizes.values())
        assert file.name == (
            "some.safetensors"
            if len(files) == 1
            else f"some-{i + 1:05}-of-{len(files):05}.safetensors"
        )
        notes = json.loads(file.header[8:])["__metadata__"]
        assert notes == {"format": "pt"} | ({"other": "t0"} if "t0" in sizes else {})
        for item, offset in file.places:
            assert offset % item.dtype.itemsize == 0
        names += sizes
    assert sorted(names) == sorted(item.name for item in world[0][0])
    told = json.loads(save_plan.index_of(files))
    assert told["weight_map"] == {i.name: file.name for file in files for i, _ in file.places}
    assert told["metadata"]["total_size"] == sum(f.size - len(f.header) for f in files)


def test_files_are_split_as_by_hugging_face():
    items = [Entry(n, (4,), torch.float32) for n in "abcde"]
    items.insert(2, Entry("large", (100,), torch.float32))
    names = [[i.name for i, _ in f.places] for f in save_plan.lay_out(items, "model", 32)]
    assert names == [["a", "b"], ["large"], ["c", "d"], ["e"]]


def test_oversized_header_is_refused(monkeypatch):
    monkeypatch.setattr(save_plan, "HEADER_LIMIT", 5000)
    items = [Entry(f"t{i}", (1,), torch.float32) for i in range(30)]
    with pytest.raises(ValueError, match=r"'model.safetensors' .* a smaller max_shard_size"):
        save_plan.lay_out(items, "model", 1000)
    assert len(save_plan.lay_out(items, "model", 40)) == 3


SIZES = {5: 5, "5": 5, "5GB": 5 * 10**9, "200 MiB": 200 * 2**20, "1.5kb": 1500, " 1TiB ": 2**40}


def size_of(text):
    return parse_size("max_shard_size", text, base=1000)


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text):
    assert size_of(text) == SIZES[text]


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "0", 0, -1, "5 GB more", "1e3"])
def test_invalid_sizes(text):
    with pytest.raises(ValueError, match=r"max_shard_size must be a positive number"):
        size_of(text)


@pytest.mark.parametrize("text", [None, 1.5, True, b"5GB"])
def test_sizes_of_wrong_type(text):
    with pytest.raises(TypeError, match="max_shard_size must be a positive number of bytes"):
        size_of(text)


# --- checksums ------------------------------------------------------------------------------------


def cut(data, cuts):
    """Return (offset, length, checksum) of the bytes between the cuts and the multiples of a
    block."""
    bounds = sorted({0, *cuts, *range(0, len(data), BLOCK), len(data)})
    pairs = itertools.pairwise(bounds)
    return [(a, b - a, _core.crc32c(data[a:b])) for a, b in pairs]


DATA = bytes(range(251)) * (-(-(2 * BLOCK + 1000) // 251))


@given(st.lists(st.integers(1, len(DATA) - 1), max_size=8), st.randoms())
def test_checksums_of_pieces_are_joined(cuts, random):
    rows = cut(DATA, cuts)
    random.shuffle(rows)
    whole = [_core.crc32c(DATA[i : i + BLOCK]) for i in range(0, len(DATA), BLOCK)]
    assert FileRecord.of("x", len(DATA), rows) == (FileRecord(len(DATA), tuple(whole)))
    one, other = joined(rows[::2]), joined(rows[1::2])
    assert len(one) <= len(rows[::2])
    assert FileRecord.of("x", len(DATA), one + other).checksums == tuple(whole)
    assert len(joined(rows)) == len(whole)


@pytest.mark.parametrize(
    "change", [lambda r: r[1:], lambda r: r[:-1], lambda r: r[:2] + r[3:], lambda r: [*r, r[1]]]
)
def test_bytes_not_written_exactly_once_are_an_error(change):
    rows = cut(DATA, [5, 100, BLOCK + 7])
    with pytest.raises(RuntimeError, match=r"byte \d+ of 'x' was not written exactly once"):
        FileRecord.of("x", len(DATA), change(rows))


# --- extra ----------------------------------------------------------------------------------------


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
    """Return whether the values are equal, with NaN equal to NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) or a == b  # a set has no order


@given(_values)
def test_state_round_trips_through_json(value):
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
    back.fill_(1)  # the caller owns it


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_tensors_of_every_file_dtype(dtype):
    value = torch.arange(2).to(dtype)
    back = decode(json.loads(json.dumps(encode(value))))
    assert back.dtype == dtype
    assert_same(back.view(torch.uint8), value.view(torch.uint8), "what comes back")


def test_dtype_values():
    value = {"momentum_dtype": torch.bfloat16, "of": [torch.float8_e4m3fn, torch.complex128]}
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_conjugate_and_negative_views():
    value = torch.tensor([1 + 2j, 3 - 4j])
    back = decode(json.loads(json.dumps(encode({"conj": value.conj(), "neg": value.conj().imag}))))
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j] and back["neg"].tolist() == [-2, 4]


def test_numpy_arrays_and_numbers():
    value = {
        "a": numpy.arange(6, dtype=">i4").reshape(2, 3),
        "n": numpy.float32(0.5),
        "i": numpy.int64(7),
    }
    back = decode(json.loads(json.dumps(encode(value))))
    assert numpy.array_equal(back["a"], value["a"]) and back["a"].dtype == value["a"].dtype
    assert back["n"] == 0.5 and back["i"] == 7 and type(back["i"]) is numpy.int64


def test_state_of_schedulers():
    """MultiStepLR has a Counter with integer keys."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    state = scheduler.state_dict()
    back = decode(json.loads(json.dumps(encode(state))))
    assert back == {**state, "milestones": dict(state["milestones"])}
    assert isinstance(state["milestones"], collections.Counter)


@pytest.mark.parametrize(
    "value", [torch.nn.Linear(1, 1), object(), lambda: 0, {"x": [1, print]}, 1j]
)
def test_error_names_the_unsupported_entry(value):
    with pytest.raises(TypeError, match=r"^cannot save extra(\['x'\]\[1\])?: unsupported type"):
        encode(value)


def test_large_values_are_refused():
    with pytest.raises(ValueError, match=r"extra\['big'\] has 16777217 bytes.*buffer of the model"):
        encode({"big": bytes(2**24 + 1)})
    assert decode(json.loads(json.dumps(encode([2**8191, -(2**8191)])))) == [2**8191, -(2**8191)]
    with pytest.raises(ValueError, match=r"extra\['big'\] is an integer of 8193 bits"):
        encode({"big": 2**8192})


def test_error_names_the_array_dtype():
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
def test_foreign_json_is_refused(told):
    with pytest.raises(ValueError):
        decode({"here": [told]})


def test_random_numbers_resume():
    state = decode(json.loads(json.dumps(encode(rng_state()))))
    wanted = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    torch.rand(5), random.random(), numpy.random.rand()
    set_rng_state(state)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == wanted


def test_unknown_random_state():
    with pytest.raises(ValueError, match="unexpected key 'jax'"):
        set_rng_state({"jax": 1})


def test_floats_that_json_lacks():
    back = decode(json.loads(json.dumps(encode([math.inf, -math.inf, math.nan]), allow_nan=False)))
    assert back[:2] == [math.inf, -math.inf] and math.isnan(back[2])
