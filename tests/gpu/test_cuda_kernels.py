"""The CUDA kernels against the CPU's loops, bit for bit; on any machine.

cuda_kernels.c launches through the fake of libcuda (fake_cuda.py), whose kernels
are those of cuda/ compiled for the host, so the test compares the real launch code and the real
arithmetic. All arrays come from the middle of larger ones that must not change outside, at places
where a GPU could and could not use its 16-byte accesses.

test_gpu.py runs these tests again with ZSHARD_TEST_KERNELS=gpu: the kernels that nvcc made, launched
by the real driver on copies in the GPU's memory; =copies has the fake work on such copies, so
that what makes them is tested as well.
"""

from __future__ import annotations

import functools
import math
import operator
from itertools import product

import pytest
import torch
from cuda_kernels import LENGTHS, SPECIAL, Cuda, Place, same_bits, some
from loops import DTYPES, Device
from torch import Tensor

# --- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_bit_identical_to_the_cpu(cuda: Cuda, cpu: Device, dtype: torch.dtype) -> None:
    wrong = []
    for to in DTYPES:
        for seed, (world, n) in enumerate(product((1, 2, 3, 4, 5, 8), LENGTHS), 1):
            add, offset = seed % 2 == 0, (0, 8, 3, 1)[seed % 4]
            sources = [Place(some(n, dtype, 100 * seed + r), offset) for r in range(world)]
            given: list[Tensor | None] = [place.values for place in sources]
            if seed % 3 == 0:
                given[seed % world] = None
            before = some(n, to, seed)
            ours, theirs = Place(before, offset), before.clone()
            cuda.sum(given, ours.values, 1 / 3, add)
            cpu.sum(given, theirs, 1 / 3, add)
            if not (same_bits(ours.values, theirs) and ours.untouched_around()):
                wrong.append((to, world, n, add, offset))
    assert wrong == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_into_one_of_its_sources(cuda: Cuda, cpu: Device, dtype: torch.dtype) -> None:
    for n in LENGTHS:
        mine = [some(n, dtype, r) for r in range(5)]
        theirs = [t.clone() for t in mine]
        cuda.sum(mine, mine[2], 0.2, False)
        cpu.sum(theirs, theirs[2], 0.2, False)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert same_bits(a, b), (n, i)


def test_sum_of_differently_aligned_arrays(cuda: Cuda, cpu: Device) -> None:
    sources = [Place(some(1000, torch.bfloat16, r), r) for r in range(4)]
    ours, theirs = torch.zeros(1000), torch.zeros(1000)
    cuda.sum([place.values for place in sources], ours, 0.25, False)
    cpu.sum([place.values for place in sources], theirs, 0.25, False)
    assert same_bits(ours, theirs)


def test_sum_of_more_sources_than_kernel_arguments(cuda: Cuda, cpu: Device) -> None:
    world, n = 300, 41
    for stride in (48, 41):  # elements: the second lets no two sources be aligned together
        whole = some(world * stride, torch.bfloat16, 5, special=False)
        sources = [whole[r * stride : r * stride + n] for r in range(world)]
        ours, theirs = torch.zeros(n), torch.zeros(n)
        cuda.sum(sources, ours, 1 / world, False)
        cpu.sum(sources, theirs, 1 / world, False)
        assert same_bits(ours, theirs)
    apart = [*sources[:-1], sources[-1].clone()]
    with pytest.raises(AssertionError, match="equally spaced in memory, and that of rank 299"):
        cuda.sum(apart, ours, 1.0, False)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("absent", ["first", "some", "all but one", "all"])
def test_absent_sources_count_as_zeros(cuda: Cuda, cpu: Device, absent: str) -> None:
    world, n, stride = 300, 41, 48
    gone = {"first": {0}, "some": {1, 63, 64, 200, 299}, "all": set(range(world))}
    gone["all but one"] = gone["all"] - {130}
    whole = some(world * stride, torch.bfloat16, 6, special=False)
    places = [whole[r * stride : r * stride + n] for r in range(world)]
    sources = [None if r in gone[absent] else place for r, place in enumerate(places)]
    for add in (False, True):
        ours, theirs = torch.full((n,), 0.3), torch.full((n,), 0.3)
        cuda.sum(sources, ours, 1 / 3, add)
        cpu.sum(sources, theirs, 1 / 3, add)
        assert same_bits(ours, theirs), add


def test_sum_of_too_many_sources_is_refused(cuda: Cuda) -> None:
    most = 128 * 64
    one = some(3, torch.float32, 8)
    with pytest.raises(AssertionError, match=f"cannot sum {most + 1} sources .*: at most {most}"):
        cuda.sum([one] * (most + 1), one.clone(), 1.0, False)


# --- casts, scaling, norms, comparing ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_and_add_match_torch(cuda: Cuda, dtype: torch.dtype) -> None:
    wrong = []
    places = ((0, 0), (3, 3), (1, 2))
    for to, (seed, n), (offset, other) in product(DTYPES, enumerate(LENGTHS), places):
        src, before = Place(some(n, dtype, seed), other), some(n, to, seed + 99)
        sums = before.clone().add_(src.values)
        for add, expected in ((False, src.values.to(to)), (True, sums)):
            dst = Place(before, offset)
            cuda.cast(dst.values, src.values, add=add)
            if not (same_bits(dst.values, expected) and dst.untouched_around()):
                wrong.append((to, n, offset, other, add))
    assert wrong == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_bit_identical_to_the_cpu(cuda: Cuda, cpu: Device, dtype: torch.dtype) -> None:
    for seed, n in enumerate(LENGTHS):
        for offset in (0, 5):
            theirs = some(n, dtype, seed)
            ours, again = Place(theirs, offset), Place(theirs, offset)
            cuda.scale(ours.values, 1 / 7)
            cuda.scale(again.values, 99.0, torch.tensor([0.375]))
            device, theirs = theirs.clone(), theirs
            cpu.scale(theirs, 1 / 7)
            cpu.scale(device, 0.375)
            assert same_bits(ours.values, theirs) and ours.untouched_around()
            assert same_bits(again.values, device) and again.untouched_around()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_does_not_depend_on_alignment(cuda: Cuda, cpu: Device, dtype: torch.dtype) -> None:
    for p, n in product((1.0, 2.0, math.inf), [*LENGTHS, 70_001]):
        values = some(n, dtype, n, special=False)
        found = {cuda.norm(Place(values, offset).values, p) for offset in (0, 1, 8, 13)}
        assert len(found) == 1, (p, n)
        assert found.pop() == pytest.approx(cpu.norm(values, p), rel=1e-13)
        for odd in (math.inf, math.nan):
            if n:
                values[n // 2] = odd
                assert str(cuda.norm(values, p)) == str(odd)


def test_norm_of_more_elements_than_threads(cuda: Cuda) -> None:
    x = torch.ones((1 << 22) + 4321, dtype=torch.bfloat16)
    x[-1] = 2.0
    assert cuda.norm(x, 2.0) == x.numel() + 3
    assert cuda.norm(x, math.inf) == 2.0


def test_norms_are_joined_in_order(cuda: Cuda) -> None:
    values = some(1000, torch.float64, 3, special=False).abs()
    one_after_the_other = functools.reduce(operator.add, values.tolist())  # sum() compensates
    assert cuda.norm_join(values, 2.0) == one_after_the_other
    assert cuda.norm_join(values, math.inf) == values.max()
    assert cuda.norm_join(values[:0], 1.0) == 0.0
    with pytest.raises(AssertionError, match="p must be 1, 2 or inf, got 3"):
        cuda.norm_join(values, 3.0)


def test_differs_finds_each_byte(cuda: Cuda) -> None:
    generator = torch.Generator().manual_seed(1)
    for n in (0, 1, 15, 16, 17, 100, 5001):
        for offset, other in ((0, 0), (3, 3), (0, 1)):
            values = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
            a, b = Place(values, offset), Place(values, other)
            assert cuda.differs(a.values, b.values) == 0
            for at in {0, n // 2, n - 1} if n else ():
                b.values[at] ^= 1
                assert cuda.differs(a.values, b.values) == 1, (n, at)
                b.values[at] ^= 1


def test_codes_and_residuals_of_the_wire_match_torch(cuda: Cuda) -> None:
    """cuda/wire.cuh"""
    rows = [(torch.tensor(SPECIAL), torch.zeros(len(SPECIAL)))]
    for numel in (1, 7, 31, 256, 1000, 4096 + 33):
        lost = torch.zeros(numel + 1)
        for step in range(4):
            values = some(numel + 1, torch.float32, 10 * numel + step)
            rows += [(values[skip:], lost[skip:]) for skip in (0, 1)]  # the ends of packs
    for values, lost in rows:  # the residual is updated
        sums = values + lost
        expected = sums.bfloat16()
        left = sums - expected.float()
        codes = torch.full((values.numel() + 1,), 3, dtype=torch.bfloat16)
        cuda.encode(values, lost, codes[:-1])
        assert same_bits(codes[:-1], expected) and codes[-1] == 3
        assert same_bits(lost, torch.where(left.isfinite(), left, 0.0))
