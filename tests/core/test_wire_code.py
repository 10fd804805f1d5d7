"""wire_code.c: numbers in bfloat16 and in blocks of int8, beside the same arithmetic in numpy and torch.

All comparisons are exact: numpy's float32 arithmetic gives the same bits.
"""

import ctypes
import subprocess

import numpy as np
import pytest
import torch
from c_sources import sources

EXACT, BF16, INT8 = range(3)
BLOCK, LEVELS = 256, np.float32(127)
SIZES = (0, 1, 2, 255, 256, 257, 1000, 4096 + 31)
POINTER = ctypes.POINTER(ctypes.c_float)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    (source,) = [each for each in sources("wire_code.c") if str(each).endswith("wire_code.c")]
    library = tmp_path_factory.mktemp("wire") / "wire.so"
    root = str(source).partition("/comm/")[0]
    flags = [
        "-std=c11",
        "-O3",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
    ]
    subprocess.run(["gcc", *flags, f"-I{root}", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.zs_wire_bytes.restype = ctypes.c_size_t
    loaded.zs_wire_bytes.argtypes = [ctypes.c_int, ctypes.c_int64]
    loaded.zs_wire_encode.argtypes = [
        ctypes.c_int,
        POINTER,
        ctypes.c_int64,
        POINTER,
        ctypes.c_void_p,
    ]
    loaded.zs_wire_decode.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, POINTER]
    return loaded


def pointer(array):
    return array.ctypes.data_as(POINTER)


def through(core, wire, values, residual=None, shift=0):
    """The code's numbers; the code lies `shift` bytes off, and nothing around it may change."""
    size = core.zs_wire_bytes(wire, values.size)
    memory = np.full(size + 16, 0xAB, np.uint8)
    out = np.full(values.size + 1, 7, np.float32)
    kept = None if residual is None else pointer(residual)
    at = memory.ctypes.data + shift
    core.zs_wire_encode(wire, pointer(values), values.size, kept, at)
    core.zs_wire_decode(wire, at, values.size, pointer(out))
    assert (memory[:shift] == 0xAB).all(), "written before the code"
    assert (memory[shift + size :] == 0xAB).all(), "written behind the code"
    assert out[-1] == 7, "written behind the numbers"
    return out[:-1]


def model_of_int8(values):
    out = np.empty_like(values)
    for at in range(0, values.size, BLOCK):
        block = values[at : at + BLOCK]
        scale = np.abs(block).max() / LEVELS
        levels = np.rint(block / scale) if scale > 0 else np.zeros_like(block)
        out[at : at + BLOCK] = levels.clip(-LEVELS, LEVELS) * scale
    return out


def model_of_bf16(values):
    return torch.from_numpy(values.copy()).bfloat16().float().numpy()


MODELS = {EXACT: np.copy, BF16: model_of_bf16, INT8: model_of_int8}


def numbers(size, seed=0):
    random = np.random.default_rng(seed)
    spread = np.exp2(random.integers(-20, 20, size))
    return (random.standard_normal(size) * spread).astype(np.float32)


@pytest.mark.parametrize("wire", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_codes_match_the_reference(core, wire, size):
    values = numbers(size)
    expected = MODELS[wire](values)
    for shift in (0, 1, 3):
        np.testing.assert_array_equal(through(core, wire, values, shift=shift), expected)


def test_sizes(core):
    assert [core.zs_wire_bytes(EXACT, n) for n in (0, 1, 257)] == [0, 4, 1028]
    assert [core.zs_wire_bytes(BF16, n) for n in (0, 1, 257)] == [0, 2, 514]
    assert [core.zs_wire_bytes(INT8, n) for n in (0, 1, 256, 257)] == [0, 5, 260, 265]


def test_error_of_int8_is_at_most_half_a_level(core):
    values = numbers(5000, 1)
    lost = np.abs(through(core, INT8, values) - values)
    for at in range(0, values.size, BLOCK):
        level = np.abs(values[at : at + BLOCK]).max().astype(np.float64) / 127
        assert lost[at : at + BLOCK].max() <= level * 0.50001


def test_ties_go_to_even(core):
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)  # a scale of 1
    assert through(core, INT8, values).tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_numbers_that_are_not_finite(core, bad, at):
    values, residual = numbers(700, 2), np.zeros(700, np.float32)
    expected, values[at] = through(core, INT8, values), bad
    out = through(core, INT8, values, residual)
    block = slice(at // BLOCK * BLOCK, (at // BLOCK + 1) * BLOCK)
    assert np.isnan(out[block]).all()
    out[block] = expected[block]
    np.testing.assert_array_equal(out, expected)  # and no other block has changed
    assert np.isfinite(residual).all()
    assert not residual[block].any()
    other = np.zeros(700, np.float32)
    np.testing.assert_array_equal(through(core, BF16, values, other)[at], np.float32(bad))
    assert np.isfinite(other).all()


@pytest.mark.parametrize("size", [np.finfo(np.float32).max, 1e-45, 1e-44, 1e-38, 3e-43, 0.0])
def test_largest_and_smallest_numbers(core, size):
    values = np.array([size, -size, size / 2, 0, -0.0], np.float32)
    out = through(core, INT8, values)
    assert np.isfinite(out).all()
    assert (np.abs(out) <= np.abs(values).max() * np.float64(1.0001)).all()
    if size >= 1e-38:
        assert out[0] == -out[1] == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("wire", [BF16, INT8])
def test_residual_is_the_rounding_error(core, wire):
    values, residual = numbers(1000, 3), np.zeros(1000, np.float32)
    for _ in range(3):
        sums = values + residual
        out = through(core, wire, values, residual)
        np.testing.assert_array_equal(out, MODELS[wire](sums))
        np.testing.assert_array_equal(residual, sums - out)


def test_error_feedback_sends_small_values_eventually(core):
    """127 hides 0.1 in each step alone; over 100 steps its sum comes."""
    values = np.array([127, 0.1], np.float32)
    residual, total, without = np.zeros(2, np.float32), 0.0, 0.0
    for _ in range(100):
        total += through(core, INT8, values, residual)[1]
        without += through(core, INT8, values)[1]
    assert without == 0
    assert abs(total - 10) <= 1


def test_exact_code_is_lossless(core):
    values, residual = numbers(600, 4), np.zeros(600, np.float32)
    np.testing.assert_array_equal(through(core, EXACT, values, residual), values)
    assert not residual.any()
