"""Numbers that are NaN or infinite are noticed while a checkpoint is written.

One such number at a time, wherever it may lie, in whatever format; and numbers that
are as near to one as can be.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from checkpoints import manifest_in
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP, _core
from zshard.ranks.agreement import bytes_of

BLOCK = 1 << 20
FORMATS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def new_file(tmp_path):
    return _core.File.create(str(tmp_path / "file"), 0)


def near_misses(dtype, count):
    """Numbers of all kinds, none of them NaN or infinite."""
    facts = torch.finfo(dtype)
    kinds = [0.0, -0.0, facts.max, facts.min, facts.tiny, facts.smallest_normal / 2, 1.0, -3.5]
    return torch.tensor(kinds, dtype=dtype).repeat(-(-count // len(kinds)))[:count]


@pytest.mark.parametrize("code", FORMATS)
def test_one_number_anywhere(tmp_path, code):
    dtype = FORMATS[code]
    item = dtype.itemsize
    count = 5 * BLOCK // 2 // item + 3  # blocks and pieces end in it, and the end is odd
    good, values = near_misses(dtype, count), near_misses(dtype, count)
    offset = BLOCK - 8 * item
    edges = [8, 8 + (256 << 10) // item, 8 + BLOCK // item, 8 + 2 * BLOCK // item, count]
    places = {0, count // 2, *(each - 1 for each in edges), *(each for each in edges[:-1])}
    with new_file(tmp_path) as file:
        strange = []
        rows = [(offset, bytes_of(good), code)]
        right = file.write(rows, BLOCK, strange)
        assert strange == [] and right == file.write([row[:2] for row in rows], BLOCK)
        for number, place in enumerate(sorted(places)):
            values[place] = (float("nan"), float("inf"), -float("inf"))[number % 3]
            rows = [(0, b"1234"), (offset, bytes_of(values), code), (0, bytes_of(good[:4]), code)]
            file.write(rows, BLOCK, strange := [])
            assert strange == [1], place
            file.write([row[:2] for row in rows], BLOCK, strange := [])  # nobody has asked
            assert strange == [], place
            values[place] = good[place]


@pytest.mark.parametrize("code", FORMATS)
def test_memory_of_any_address(tmp_path, code):
    item = FORMATS[code].itemsize
    room = bytearray(100 * item + 1)
    view = memoryview(room)[1:]
    with new_file(tmp_path) as file:
        for place in range(100):
            one = torch.tensor([float("nan")], dtype=FORMATS[code])
            view[place * item : (place + 1) * item] = bytes_of(one)
            file.write([(0, view, code)], BLOCK, strange := [])
            assert strange == [0]
            view[place * item : (place + 1) * item] = bytes(item)
        file.write([(0, view, code)], BLOCK, strange := [])
        assert strange == []


@pytest.mark.parametrize(
    "ranges, block, error, text",
    [
        ([(0, b"12345678", "F8")], 8, ValueError, "'F8' is not a number format: expected 'BF16'"),
        ([(0, b"12345678", 4)], 8, ValueError, "4 is not a number format"),
        ([(2, b"12345678", "F32")], 8, ValueError, "8 bytes at offset 2 in blocks"),
        ([(0, b"123456", "F32")], 8, ValueError, "6 bytes at offset 0 in blocks"),
        ([(0, b"12345678", "F64")], 12, ValueError, "in blocks of 12"),
        ([(0, b"12345678", "F64", 1)], 8, TypeError, r"a range must be a tuple \(offset, memory\)"),
    ],
)
def test_what_is_refused(tmp_path, ranges, block, error, text):
    with new_file(tmp_path) as file:
        with pytest.raises(error, match=text):
            file.write([(0, b"12345678"), *ranges], block, [])
        assert file.size == 0
        with pytest.raises(TypeError, match="list"):
            file.write([], block, ())
        with pytest.raises(TypeError, match="a range must be a tuple"):
            file.read([(0, bytearray(8), "F32")])


def warned(path, dtype, saved_as, spoiled):
    """The warnings of a save of large parameters, where the last rank has spoiled its last number
    of the last parameter ("model"), or of its state ("optimizer")."""
    layers = (nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(3))
    model = FSDP(nn.Sequential(*layers))
    optimizer = zshard.AdamW(model.parameters())
    model(torch.randn(4, 256, dtype=dtype)).sum().backward()
    optimizer.step()
    last = list(model.parameters())[-1]
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        if dist.get_rank() == dist.get_world_size() - 1:
            values = {"model": last, "optimizer": optimizer.state[last]["exp_avg"]}.get(spoiled)
            if values is not None:
                zshard.to_local(values).view(-1)[-1] = float("inf")
        warnings.simplefilter("always")
        zshard.save(path, model, optimizer, dtype=saved_as, overwrite=True)
    return [str(each.message) for each in told]


@ranks(2)
def test_what_a_save_says(pool, tmp_path):
    rows = [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float16)]
    for dtype, saved_as in rows:
        for spoiled in ("model", "optimizer", "nothing"):
            first, *others = pool.run(warned, str(tmp_path / "saved"), dtype, saved_as, spoiled)
            assert others == [[]]
            assert len(first) == (spoiled == "model"), first
            for text in first:
                assert "has NaN or infinite values in '2.weight'" in text
            assert manifest_in(tmp_path / "saved").finite == (spoiled != "model")


@pytest.mark.parametrize("width", [4, 64])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_copied_on_its_way(tmp_path, width, place):
    """Small tensors, and those that are laid out in another order."""
    model = nn.Conv2d(width, width, 3).to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zshard.save(tmp_path / "good", model)
    with torch.no_grad():
        model.weight[place, place, place, place] = float("nan")
    assert not model.weight.is_contiguous()
    with pytest.warns(UserWarning, match="NaN or infinite values in 'weight'"):
        zshard.save(tmp_path / "bad", model)
    assert manifest_in(tmp_path / "good").finite and not manifest_in(tmp_path / "bad").finite
