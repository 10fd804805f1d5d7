"""device_cpu.c against torch: sums in rank order, norms, scaling; every dtype and instruction set.

The file needs nothing of torch but zs_parallel_for, so its object in the extension
(and one with UndefinedBehaviorSanitizer) can be linked alone and called on a tensor's memory. The oracle is
the contract of device.h, one rounding after the other, in torch.
"""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from c_compile import BUILDS, C, compile_c
from c_sources import built, sources
from loops import DTYPES, Device, source_dtype
from rows import all_rows
from torch import Tensor

from zshard import _core

SOURCES = ("device_cpu.c", "simd.c", "memory.c", "status.c")
BESIDE = [C / "serial_parallel_for.c", C / "shown_loops.c"]
UNDEFINED = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
FLAGS = {"base": BUILDS["release"], "avx2": BUILDS["release"], "avx512": BUILDS["release"]}
FLAGS["sanitized"] = UNDEFINED  # and no more: Python, which loads it, is not sanitized
LENGTHS = [0, 1, 31, 32, 1023, 1024, 1025, 100_003]
NORMS = [1.0, 2.0, math.inf]


@pytest.fixture(scope="module", params=FLAGS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Device:
    """A library for each instruction set: the choice is made once per library."""
    target = tmp_path_factory.mktemp("device") / f"device_{request.param}.so"
    found = sources if request.param == "sanitized" else built
    compile_c(target, [*BESIDE, *found(*SOURCES)], FLAGS[request.param], ("-shared", "-lm"))
    made = Device(target, "shown_")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_ISA", request.param)
        made.scale(torch.ones(1), 1.0)  # makes the choice
    return made


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def expected_sum(sources: Sequence[Tensor | None], dst: Tensor, scale: float, add: bool) -> Tensor:
    total = None
    for source in sources:
        plain = torch.zeros_like(dst) if source is None else source
        term = plain.to(wide(dst.dtype, source_dtype(sources, dst)))
        if add:
            term = term + dst.to(term.dtype)
        term = term * torch.tensor(scale, dtype=term.dtype)
        total = term if total is None else total + term
    assert total is not None
    return total.to(dst.dtype)


@pytest.mark.parametrize("hosts", [2, 9, 4096, 4097, 9000])
def test_sum_host_by_host(device: Device, hosts: int) -> None:
    """Of any number of hosts, also of more than there is room for on a small stack."""
    torch.manual_seed(hosts)
    numel = 1025 if hosts < 10 else 33
    few = [torch.randn(numel).bfloat16() for _ in range(7)]
    sources = [few[r % 7] for r in range(2 * hosts)]
    parts = [few[r % 7].float() + few[(r + 1) % 7].float() for r in range(0, 2 * hosts, 2)]
    dst = torch.randn(numel)
    want = expected_sum(parts, dst, 0.25, False)
    device.sum(sources, dst, 0.25, False, per_host=2)
    assert torch.equal(dst, want)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_in_rank_order(device: Device, dtype: torch.dtype, to: torch.dtype) -> None:
    """Absent sources count as zeros."""
    torch.manual_seed(0)
    worlds, both = [1, 2, 3, 4, 5, 8, 11], [False, True]
    for world, numel, add, some in itertools.product(worlds, LENGTHS, both, both):
        sources: list[Tensor | None] = [torch.randn(numel).to(dtype) for _ in range(world)]
        if some and world > 1:
            sources[world // 2 :: 3] = [None] * len(sources[world // 2 :: 3])
        dst = torch.randn(numel).to(to)
        want = expected_sum(sources, dst, 1 / 3, add)
        device.sum(sources, dst, 1 / 3, add)
        assert torch.equal(dst, want), (world, numel, add, some)


def test_cast(device: Device) -> None:
    torch.manual_seed(0)
    special = torch.tensor(
        [0.0, -0.0, 1e-41, 65520.0, 1e30, math.inf, -math.inf, math.nan, 1 + 2**-9]
    )
    with all_rows() as row:
        for dtype, to, numel in itertools.product(DTYPES, DTYPES, LENGTHS):
            with row(dtype, to, numel):
                src = torch.cat([torch.randn(numel), special]).to(dtype)
                dst = torch.full_like(src, 7, dtype=to)
                device.cast(dst, src)
                want = src.to(torch.float32).to(to) if to.itemsize == 2 else src.to(to)
                assert torch.equal(dst.nan_to_num(nan=-5.0), want.nan_to_num(nan=-5.0))


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_sum_into_one_of_its_sources(device: Device, world: int) -> None:
    for into in range(world):
        sources = [torch.randn(70_001) for _ in range(world)]
        want = expected_sum(sources, sources[into], 0.5, False)
        device.sum(sources, sources[into], 0.5, False)
        assert torch.equal(sources[into], want)


def test_sum_keeps_the_sign_of_zero(device: Device) -> None:
    for world in (2, 6):
        dst = torch.ones(40)
        device.sum([torch.full((40,), -0.0) for _ in range(world)], dst, 0.5, False)
        assert torch.equal(dst.signbit(), torch.ones(40, dtype=torch.bool))


def test_norm(device: Device) -> None:
    with all_rows() as row:
        for dtype, p, numel in itertools.product(DTYPES, NORMS, LENGTHS):
            with row(dtype, p, numel):
                x = torch.randn(numel).to(dtype)
                exact = x.double().abs()
                want = exact.max() if numel and p == math.inf else exact.pow(min(p, 9)).sum()
                assert device.norm(x, p) == pytest.approx(float(want), rel=1e-12)


def test_norm_of_nan_and_inf(device: Device) -> None:
    with all_rows() as row:
        for dtype, p, at in itertools.product(DTYPES, NORMS, (0, 31, 32, 1024, 5000, 100_002)):
            with row(dtype, p, at):
                x = torch.randn(100_003).to(dtype)
                x[at] = -math.inf
                assert device.norm(x, p) == math.inf
                x[at] = math.nan
                assert math.isnan(device.norm(x, p))


def test_scale(device: Device) -> None:
    with all_rows() as row:
        for dtype, numel in itertools.product(DTYPES, LENGTHS):
            with row(dtype, numel):
                x = torch.randn(numel).to(dtype)
                want = (x.to(wide(dtype)) * torch.tensor(0.37, dtype=wide(dtype))).to(dtype)
                device.scale(x, 0.37)
                assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_to_16_bits_matches_torch(device: Device, dtype: torch.dtype) -> None:
    """All numbers stay as they are. Sums of two fall between two numbers, on ties, below the smallest
    and above the largest."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for step in (0, 1, 77, 4099):
        dst = torch.empty_like(every)
        other = every.roll(step).contiguous()
        device.sum([every, other], dst, 0.5, False)
        want = (every.float() * 0.5 + other.float() * 0.5).to(dtype)
        numbers = ~want.isnan()
        assert torch.equal(dst.isnan(), want.isnan())
        assert torch.equal(dst.view(torch.int16)[numbers], want.view(torch.int16)[numbers])


@pytest.mark.parametrize(
    "name", ["gpu", "cuda", "cuda:", "cuda:0x", "cuda:0/hosts", "cuda:4294967296"]
)
def test_invalid_device_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown device '{name}'"):
        _core.Comm.alone(name)
