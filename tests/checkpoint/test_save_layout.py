"""The bytes and files that each rank writes (zshard/checkpoint/save_plan.py), without any model; and a
script's own state (extra=) as JSON (zshard/checkpoint/script_state.py).
"""

from __future__ import annotations

import collections
import enum
import itertools
import json
import math
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial

import numpy
import pytest
import torch
from compare import assert_same
from hypothesis import given
from hypothesis import strategies as st
from models import Mlp, wrapped
from optim_states import FULL
from rows import all_refused, all_rows
from safetensors import deserialize
from spawn import on_ranks
from torch import nn
from torch.optim import lr_scheduler

import zshard
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
def some_entries(draw):
    """Tensors of any shapes, in the dtypes above."""
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    pairs = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6))
    return [Entry(f"t{i}", *pair) for i, pair in enumerate(pairs)]


@given(some_entries(), st.integers(1, 4000))
def test_files_are_valid_and_not_too_large(entries, limit):
    files = save_plan.lay_out(entries, "some", limit, {"other": "t0"})
    names = []
    for i, file in enumerate(files):
        data = file.header + bytes(file.size - len(file.header))
        assert len(file.header) % save_plan.ALIGN == 0
        found = dict(deserialize(data))
        sizes = {item.name: len(found[item.name]["data"]) for item, _ in file.places}
        assert len(sizes) == len(found)
        assert sum(sizes.values()) <= limit or len(sizes) == 1 or not max(sizes.values())
        number = f"-{i + 1:05}-of-{len(files):05}" if len(files) > 1 else ""
        assert file.name == f"some{number}.safetensors"
        notes = json.loads(file.header[8:])["__metadata__"]
        assert notes == {"format": "pt"} | ({"other": "t0"} if "t0" in sizes else {})
        for item, offset in file.places:
            assert offset % item.dtype.itemsize == 0
        names += sizes
    assert sorted(names) == [item.name for item in entries]
    told = json.loads(save_plan.index_of(files))
    assert told["weight_map"] == {i.name: file.name for file in files for i, _ in file.places}
    assert told["metadata"]["total_size"] == sum(f.size - len(f.header) for f in files)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_replicas_write_equal_shares(world):
    values = [torch.empty(n, dtype=DTYPES[n % 4]) for n in (3, 700, 41, 1)]
    entries = [Entry(f"t{i}", each.shape, each.dtype, each) for i, each in enumerate(values)]
    files = save_plan.lay_out(entries, "some", 2000)
    written = []
    for rank in range(world):
        pieces = save_plan.pieces_of(files, lambda _, rank=rank: (0, world, rank, -1))
        written.append(sum((p.end - p.begin) * p.dtype.itemsize for p in pieces))
    assert sum(written) == sum(each.nbytes for each in values)
    assert max(written) - min(written) <= 2 * 8  # an entry at either end


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


def test_sizes():
    size_of = lambda text: parse_size("max_shard_size", text, base=1000)  # noqa: E731
    for text, size in {
        **{5: 5, "5": 5, "5GB": 5 * 10**9, "200 MiB": 200 * 2**20},
        **{"1.5kb": 1500, " 1TiB ": 2**40},
    }.items():
        assert size_of(text) == size
    values = ["", "GB", "5XB", "-5GB", "0", 0, -1, "5 GB more", "1e3"]
    kinds = [None, 1.5, True, b"5GB"]
    said = "max_shard_size must be a positive number"
    table = {f"{v!r}": (partial(size_of, v), ValueError, said) for v in values}
    all_refused(table | {f"{v!r}": (partial(size_of, v), TypeError, said) for v in kinds})


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


def test_bytes_not_written_exactly_once_are_an_error():
    rows = cut(DATA, [5, 100, BLOCK + 7])
    for changed in (rows[1:], rows[:-1], rows[:2] + rows[3:], [*rows, rows[1]]):
        with pytest.raises(RuntimeError, match=r"byte \d+ of 'x' was not written exactly once"):
            FileRecord.of("x", len(DATA), changed)


# --- extra: types come back exactly, or are refused at the save, by name ------------------------------


_keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers()), st.none())
_leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.frozensets(st.integers(), max_size=3), st.sets(st.text(), max_size=3)),
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


def same(ours, theirs):
    """Return whether two values have the same types and contents, in the same order; NaN equals NaN."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        pairs = zip(ours.items(), theirs.items(), strict=True)
        attributes = [getattr(each, "default_factory", None) for each in (ours, theirs)]
        is_same = len(ours) == len(theirs) and all(same(*pair) for pair in pairs)
        return is_same and attributes[0] is attributes[1]
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, torch.Tensor):
        assert_same(ours, theirs, "the tensor", nans=True)
        return ours.requires_grad == theirs.requires_grad
    if isinstance(ours, numpy.ndarray):
        return numpy.array_equal(ours, theirs) and ours.dtype == theirs.dtype
    return repr(ours) == repr(theirs) or ours == theirs  # a set has no order


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@given(_values)
def test_state_round_trips_through_json(value):
    assert same(through_json(value), value)


PAIR = collections.namedtuple("Pair", "x y")
SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1)
FIRST = lr_scheduler.MultiStepLR(SGD, [3, 5])  # has a Counter
SCHEDULER = lr_scheduler.SequentialLR(SGD, [FIRST, lr_scheduler.LinearLR(SGD)], milestones=[3])
TYPES = {
    "counter": Counter({2: 1, "a": 3}),
    "ordered": OrderedDict(b=1, a=[OrderedDict()]),
    "of lists": defaultdict(list, {(1, 2): [3]}),
    "of nothing": defaultdict(None, {"a": 1}),
    "deque": deque([1, (2,)], maxlen=3),
    "size": torch.Size([2, 3]),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    "np.float32": numpy.float32(0.1),
    "np.float64": numpy.float64(0.1),
    "np.longdouble": numpy.longdouble("0.1"),
    "np.int64": numpy.int64(-3),
    "np.bool": numpy.bool_(True),
    "array": numpy.arange(6, dtype=">i4").reshape(2, 3),
    "keys": {numpy.int64(1): 2, float("inf"): 3, None: 4},
    "bytes": [b"a", bytearray(b"b")],
    "sets": ({1, 2}, frozenset({"a"})),
    "floats that JSON lacks": [math.inf, -math.inf, math.nan],
    "dtypes": [torch.bfloat16, torch.float8_e4m3fn, torch.complex128],
    "large integers": [2**8191, -(2**8191)],
    "scheduler": SCHEDULER.state_dict(),
    "tensors": [
        (torch.randn(n) * 4).to(each) for each in CODES for n in ((), (3,), (0, 2), (2, 3))
    ],
}


def test_types_come_back_exactly(tmp_path):
    model = nn.Linear(2, 2)
    with all_rows() as row:
        for what, value in TYPES.items():
            with row(what):
                zshard.save(tmp_path / "x", model, extra={"it": [value]}, overwrite=True)
                found = zshard.load(tmp_path / "x", model)["it"][0]
                assert same(found, value), found
    values = torch.tensor([1 + 2j, 3 - 4j])
    back = through_json({"conj": values.conj(), "neg": values.conj().imag})
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j] and back["neg"].tolist() == [-2, 4]
    back["conj"].fill_(1)  # the caller owns it


REFUSED = {
    "a named tuple": (PAIR(1, 2), "Pair"),
    "a masked array": (numpy.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
    "a defaultdict of a function": (defaultdict(lambda: 1), "defaultdict"),
    "an enum": (enum.IntEnum("Color", "RED").RED, "Color"),
    "a string of NumPy": (numpy.str_("a"), "str_"),
    "an array of strings": (numpy.array(["a"]), "unsupported type ndarray of <U1;"),
    "a dict of a class": (type("Own", (dict,), {})(a=1), "Own"),
    "a view of a dict": (types.MappingProxyType({"a": 1}), "mappingproxy"),
    "a list of a class": (type("Rows", (list,), {})([1]), "Rows"),
    "a tensor of a class": (torch.ones(2).as_subclass(type("My", (torch.Tensor,), {})), "My"),
    "complex": (1j, "complex"),
    "a module": (nn.Linear(1, 1), "unsupported type Linear"),
    "a function in a list": ({"x": [1, print]}, "['x'][1]: unsupported type"),
}
LARGE = {
    "extra['it'][0] has 16777217 bytes": bytes(2**24 + 1),
    "extra['it'][0] is an integer of 8193 bits": 2**8192,
}


def test_types_that_would_not_are_refused(tmp_path):
    def save(value):
        return lambda: zshard.save(tmp_path / "x", nn.Linear(2, 2), extra={"it": [value]})

    table = {what: (save(value), TypeError, name) for what, (value, name) in REFUSED.items()}
    table |= {
        f"{what}'s place": (call, kind, "extra['it'][0]") for what, (call, kind, _) in table.items()
    }
    all_refused(table | {text: (save(value), ValueError, text) for text, value in LARGE.items()})
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_shards_in_extra_are_refused(tmp_path):
    model = wrapped(Mlp, FULL)
    for value in (model.first.weight, model.first.weight.detach() * 2):
        with pytest.raises(TypeError, match=r"extra\['it'\].*full_tensor\(\)"):
            zshard.save(tmp_path / "x", model, extra={"it": value})


FOREIGN = [
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
]


def test_foreign_json_is_refused():
    all_refused(
        {f"{each}": (partial(decode, {"here": [each]}), ValueError, "") for each in FOREIGN}
    )


def test_random_numbers_resume():
    state = through_json(rng_state())
    wanted = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    torch.rand(5), random.random(), numpy.random.rand()
    set_rng_state(state)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == wanted
    with pytest.raises(ValueError, match="unexpected key 'jax'"):
        set_rng_state({"jax": 1})
