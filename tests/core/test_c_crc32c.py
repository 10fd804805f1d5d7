"""CRC-32C: the numbers of RFC 3720, of a reference bit by bit, and the same on every machine.

crc32c.c needs nothing but libc, so it is compiled alone and loaded once for each
way it can go, by instruction or by tables; each gets the same questions as the built module.
"""

import ctypes
import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from c_compile import BUILDS, compile_c
from c_sources import sources
from rows import all_rows

from zshard import _core

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import example, given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

Crc = Callable[[bytes, int], int]
SOURCES = sources("crc32c.c", "simd.c")


def load(isa: str, folder: Path) -> Crc:
    """zs_crc32c of a separate library, which has made its choice of instructions."""
    path = compile_c(folder / f"crc32c_{isa}.so", SOURCES, BUILDS["release"], ("-shared",))
    function = ctypes.CDLL(str(path)).zs_crc32c
    function.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
    function.restype = ctypes.c_uint32
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_ISA", isa)
        function(0, b"", 0)
    return lambda data, crc=0: function(crc, data, len(data))


@pytest.fixture(scope="module", params=["base", "avx512", "module"])
def crc(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Crc:
    if request.param == "module":
        return _core.crc32c
    return load(request.param, tmp_path_factory.mktemp("crc32c"))


def one_bit(crc: int) -> int:
    return (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)


@functools.cache
def one_byte(crc: int) -> int:
    for _ in range(8):
        crc = one_bit(crc)
    return crc


def reference(data: bytes, crc: int = 0) -> int:
    """As it is defined, with eight bits at a time remembered."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ one_byte((crc ^ byte) & 255)
    return crc ^ 0xFFFFFFFF


# RFC 3720, B.4, and the check value that all catalogues of CRCs have.
READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
)
VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (READ_COMMAND, 0xD9963A56),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


def test_known_values(crc: Crc) -> None:
    with all_rows() as row:
        for data, expected in VECTORS:
            with row(data):
                assert reference(data) == expected
                assert crc(data, 0) == expected


# Around the ends of the units of work: 8 bytes, three stretches of 512, three of 8192.
SIZES = [n + d for n in (8, 1536, 24576, 26112, 49152) for d in (-1, 0, 1, 7, 9)]


def test_sizes_and_alignments(crc: Crc) -> None:
    with all_rows() as row:
        for size, start in itertools.product(SIZES, [0, 3]):
            with row(size, start):
                data = random.Random(size).randbytes(start + size)[start:]
                assert crc(data, 0) == reference(data)


@given(data=st.binary(max_size=300), crc_before=st.integers(0, 2**32 - 1))
def test_continues_from_any_value(crc: Crc, data: bytes, crc_before: int) -> None:
    assert crc(data, crc_before) == reference(data, crc_before)


@given(a=st.binary(max_size=300), b=st.binary(max_size=300))
@example(a=b"", b=b"")
def test_join(a: bytes, b: bytes) -> None:
    joined = _core.crc32c_join(_core.crc32c(a), _core.crc32c(b), len(b))
    assert joined == _core.crc32c(a + b)


@given(
    a=st.integers(0, 2**32 - 1),
    b=st.integers(0, 2**32 - 1),
    c=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 2**62 - 1), st.integers(0, 2**62)),
)
def test_join_is_associative(a: int, b: int, c: int, sizes: tuple[int, int]) -> None:
    """Of lengths that no test can try: the order of joining does not matter."""
    join = _core.crc32c_join
    left = join(join(a, b, sizes[0]), c, sizes[1])
    assert left == join(a, join(b, c, sizes[1]), sum(sizes))


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"xabcx")[1:4]])
def test_contiguous_buffers(data: bytearray) -> None:
    assert _core.crc32c(data) == reference(b"abc")


MISUSES: list[tuple[Callable[..., int], tuple[object, ...], type[Exception]]] = [
    (_core.crc32c, (), TypeError),
    (_core.crc32c, ("text",), TypeError),
    (_core.crc32c, (None,), TypeError),
    (_core.crc32c, (memoryview(b"abcd")[::2],), BufferError),
    (_core.crc32c, (b"", -1), ValueError),
    (_core.crc32c, (b"", 2**32), ValueError),
    (_core.crc32c, (b"", 1.0), TypeError),
    (_core.crc32c_join, (1, 2), TypeError),
    (_core.crc32c_join, (2**32, 0, 0), ValueError),
    (_core.crc32c_join, (0, -1, 0), ValueError),
    (_core.crc32c_join, (0, 0, -1), ValueError),
    (_core.crc32c_join, (0, 0, 2**63), OverflowError),
]


def test_misuse() -> None:
    with all_rows() as row:
        for call, arguments, error in MISUSES:
            with row(call.__name__, arguments), pytest.raises(error):
                call(*arguments)
