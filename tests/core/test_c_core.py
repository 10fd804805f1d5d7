"""The torch-free parts of the C core: unit tests in C, and the layout.

tests/c/test_core.c has status, memory and arena; test_log.c the log's records; test_schedule.c plays
both autograd and the engine for csrc/schedule/. They need only libc, so the compiler alone builds
them, plain and sanitized.
The layout is loaded through ctypes and tested against its contract, on sizes from hypothesis: a cut
at the wrong element would only show as slightly wrong training.
"""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from c_compile import BUILDS, NO_LOOPS, C, compile_c, program_environment
from c_sources import CSRC, sources

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

PROGRAMS = {
    "test_core": [NO_LOOPS, *sources("status.c", "memory.c", "device.c", "arena.c", "layout.c")],
    "test_log": sources("log.c", "status.c"),
    "test_schedule": [*sorted((CSRC / "schedule").glob("*.c")), *sources("status.c")],
}
TEST = re.compile(r"\bTEST\((\w+)\)")
NAMES = [(name, test) for name in PROGRAMS for test in TEST.findall((C / f"{name}.c").read_text())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("core")


@pytest.mark.parametrize(
    "build", ["sanitized", pytest.param("release", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(("name", "test"), NAMES)
def test_in_c(folder: Path, name: str, test: str, build: str) -> None:
    program = folder / f"{name}_{build}"
    if not program.exists():
        compile_c(program, [C / f"{name}.c", *PROGRAMS[name]], BUILDS[build])
    command, env = [program, test], program_environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{test}: ok\n"


# --- properties of the layout --------------------------------------------------------------------

VALUE_ERROR = 1  # ZS_ERR_VALUE


class Layout(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("offsets", ctypes.POINTER(ctypes.c_int64)),
        ("numels", ctypes.POINTER(ctypes.c_int64)),
        ("shard_numel", ctypes.c_int64),
        ("itemsize", ctypes.c_size_t),
        ("world", ctypes.c_int),
    )


class Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_int64), ("numel", ctypes.c_int64))


class Library:
    """layout.c through ctypes, with the types of layout.h."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        layout = ctypes.POINTER(Layout)
        self.new = self._lib.zs_layout_new
        self.new.argtypes = [
            *(ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_size_t, layout),
        ]
        self.free = self._lib.zs_layout_free
        self.free.argtypes, self.free.restype = [layout], None
        self.owned = self._lib.zs_layout_owned
        self.in_shard = self._lib.zs_layout_in_shard
        for function in (self.owned, self.in_shard):
            function.argtypes = [layout, ctypes.c_int64, ctypes.c_int]
            function.restype = Range
        self.shard_bytes = self._lib.zs_layout_shard_bytes
        self.full_bytes = self._lib.zs_layout_full_bytes
        for function in (self.shard_bytes, self.full_bytes):
            function.argtypes, function.restype = [layout], ctypes.c_size_t
        self.clear_error = self._lib.zs_clear_error
        self.clear_error.restype = None

    def make(self, numels: list[int], itemsize: int, world: int, align: int) -> Layout:
        """A layout that must come about; give it to `free`."""
        layout = Layout()
        array = (ctypes.c_int64 * len(numels))(*numels)
        assert self.new(array, len(numels), itemsize, world, align, layout) == 0
        return layout


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    files = sources("status.c", "layout.c")
    target = tmp_path_factory.mktemp("layout") / "liblayout.so"
    return Library(compile_c(target, files, BUILDS["release"], ("-shared",)))


@given(
    # Mostly sizes around the boundaries of 64 bytes and of pages; empty parameters are common.
    numels=st.lists(st.one_of(st.integers(0, 70), st.integers(0, 5000)), max_size=12),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    world=st.integers(1, 9),
    align=st.sampled_from([64, 128, 4096]),
)
def test_layout(library: Library, numels: list[int], itemsize: int, world: int, align: int) -> None:
    layout = library.make(numels, itemsize, world, align)
    check_offsets(layout, numels, itemsize)
    check_shards(library, layout, numels, align)
    check_owners(library, layout, numels)
    library.free(layout)


def check_offsets(layout: Layout, numels: list[int], itemsize: int) -> None:
    """Parameters are aligned and do not overlap."""
    end = 0
    for i, numel in enumerate(numels):
        offset = layout.offsets[i]
        assert offset * itemsize % 64 == 0 and offset % 32 == 0
        assert end <= offset and (offset - end) * itemsize < max(64, 32 * itemsize)  # and close
        end = offset + numel
    assert layout.shard_numel * layout.world >= end


def check_shards(library: Library, layout: Layout, numels: list[int], align: int) -> None:
    """Shards are equal, aligned and minimal."""
    itemsize, world, shard = layout.itemsize, layout.world, library.shard_bytes(layout)
    assert shard == layout.shard_numel * itemsize and shard % align == 0
    assert layout.shard_numel % 32 == 0
    assert library.full_bytes(layout) == world * shard
    ends = (layout.offsets[i] + max(numel, 1) for i, numel in enumerate(numels))
    end = max(ends, default=0) * itemsize  # parameters of no element have memory as well
    step = max(64, 32 * itemsize)
    padded = -(-end // step) * step
    assert shard == 0 or (shard - max(align, step)) * world < padded


def check_owners(library: Library, layout: Layout, numels: list[int]) -> None:
    """Each element has one owner."""
    cut, world = layout.shard_numel, layout.world
    full = np.zeros(world * cut, np.int64)
    params = []
    for i, numel in enumerate(numels):  # every element is another number
        params.append(1 + sum(numels[:i]) + np.arange(numel))
        full[layout.offsets[i] : layout.offsets[i] + numel] = params[i]
    shards = [full[rank * cut : (rank + 1) * cut] for rank in range(world)]
    for i, param in enumerate(params):
        parts = []
        for rank in range(world):
            owned, place = library.owned(layout, i, rank), library.in_shard(layout, i, rank)
            assert owned.numel == place.numel
            assert 0 <= owned.begin <= owned.begin + owned.numel <= len(param)
            assert 0 <= place.begin <= place.begin + place.numel <= cut
            mine = param[owned.begin : owned.begin + owned.numel]
            assert (mine == shards[rank][place.begin : place.begin + place.numel]).all()
            parts.append(mine)
        assert (np.concatenate(parts) == param).all()  # in rank order: nothing missing, none twice


@given(
    numels=st.lists(st.integers(0, 2**62), min_size=1, max_size=4),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    world=st.integers(1, 1024),
)
def test_huge_sizes(library: Library, numels: list[int], itemsize: int, world: int) -> None:
    layout = Layout()
    array = (ctypes.c_int64 * len(numels))(*numels)
    library.clear_error()
    status = library.new(array, len(numels), itemsize, world, 4096, layout)
    wanted = sum(numels) * itemsize
    if status == 0:
        assert wanted <= library.full_bytes(layout) <= wanted + 512 * len(numels) + 4096 * world
        library.free(layout)
    else:
        assert status == VALUE_ERROR and not layout.offsets
        assert wanted > 2**60  # an exabyte; nothing that exists is refused
