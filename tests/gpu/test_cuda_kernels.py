"""The CUDA kernels against the CPU's loops, bit for bit; on any machine.

cuda_kernels.c launches through the stand-in for libcuda (fake_cuda.py), whose kernels
are those of cuda/ compiled for the host, so what is compared is the real launch code and the real
arithmetic. All arrays come from the middle of larger ones that must not change outside, at places
where a GPU could and could not use its 16-byte accesses.

test_gpu.py runs this file again with ZSHARD_TEST_KERNELS=gpu: the kernels that nvcc made, launched
by the real driver on copies in the GPU's memory; =copies has the stand-in work on such copies, so
that what makes them is tested as well.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import fake_cuda
import pytest
import torch
from cuda_kernels import (
    ADAM,
    KERNELS,
    SGD,
    Address,
    Cuda,
    Hyper,
    Live,
    Place,
    compile_kernels,
    places,
    pointer,
    same_bits,
    some,
)
from loops import DTYPES, Device, numbers
from torch import Tensor

LENGTHS = [0, 1, 7, 8, 9, 40, 1027, 4099]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(tmp_path_factory.mktemp("kernels") / "kernels.so")


@pytest.fixture(scope="module")
def loaded(compiled: Path) -> Cuda:
    if KERNELS == "gpu":
        return Cuda(compiled)
    before = os.environ.get("ZSHARD_CUDA_LIB")
    os.environ["ZSHARD_CUDA_LIB"] = str(fake_cuda.library())
    try:
        return Cuda(compiled)
    finally:
        os.environ.pop("ZSHARD_CUDA_LIB")
        os.environ.update({} if before is None else {"ZSHARD_CUDA_LIB": before})


@pytest.fixture(params=["default", "side"])
def cuda(loaded: Cuda, request: pytest.FixtureRequest) -> Cuda:
    """The kernels, in torch's stream and in one of our own."""
    loaded.stream = None
    if request.param == "side":
        stream = ctypes.c_void_p()
        loaded.ok(loaded.lib.zs_face_side_stream(ctypes.byref(stream)))
        loaded.stream = stream.value
    return loaded


@pytest.fixture(scope="module")
def cpu(compiled: Path) -> Device:
    return Device(compiled)


# --- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_bit_identical_to_the_cpu(
    cuda: Cuda, cpu: Device, dtype: torch.dtype, to: torch.dtype
) -> None:
    seed = 0
    for world in (1, 2, 3, 4, 5, 8):
        for n in LENGTHS:
            seed += 1
            add, offset = seed % 2 == 0, (0, 8, 3, 1)[seed % 4]
            sources = [Place(some(n, dtype, 100 * seed + r), offset) for r in range(world)]
            given: list[Tensor | None] = [place.values for place in sources]
            if seed % 3 == 0:
                given[seed % world] = None
            before = some(n, to, seed)
            ours, theirs = Place(before, offset), before.clone()
            cuda.sum(given, ours.values, 1 / 3, add)
            cpu.sum(given, theirs, 1 / 3, add)
            assert same_bits(ours.values, theirs), (world, n, add, offset)
            assert ours.untouched_around()


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


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_and_add_match_torch(cuda: Cuda, dtype: torch.dtype, to: torch.dtype) -> None:
    for seed, n in enumerate(LENGTHS):
        for offset, other in ((0, 0), (3, 3), (1, 2)):
            src, before = Place(some(n, dtype, seed), other), some(n, to, seed + 99)
            dst = Place(before, offset)
            cuda.cast(dst.values, src.values)
            assert same_bits(dst.values, src.values.to(to)) and dst.untouched_around()
            dst.values.copy_(before)
            cuda.cast(dst.values, src.values, add=True)
            assert same_bits(dst.values, before.clone().add_(src.values)) and dst.untouched_around()


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


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_does_not_depend_on_alignment(
    cuda: Cuda, cpu: Device, dtype: torch.dtype, p: float
) -> None:
    for n in [*LENGTHS, 70_001]:
        values = some(n, dtype, n, special=False)
        found = {cuda.norm(Place(values, offset).values, p) for offset in (0, 1, 8, 13)}
        assert len(found) == 1
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


# --- optimizers --------------------------------------------------------------------------------------

PLAIN = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
VARIANTS = {
    "adamw": (ADAM, {"decoupled": True}),
    "adam": (ADAM, {"weight_decay": 0.01, "maximize": True}),
    "adam-from-grad": (ADAM, {"beta1": 0.3, "weight_decay": 0.0}),
    "amsgrad": (ADAM, {"amsgrad": True, "decoupled": True}),
    "sgd": (SGD, {"weight_decay": 0.0}),
    "sgd-decay": (SGD, {"maximize": True}),
    "momentum": (SGD, {"momentum": 0.9, "dampening": 0.25}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
}
KINDS = [(dtype, False) for dtype in DTYPES] + [(torch.bfloat16, True)]

needs_fma = pytest.mark.skipif(
    platform.machine() == "x86_64" and " avx2 " not in Path("/proc/cpuinfo").read_text(),
    reason="a GPU has FMA, and this machine's loops have not: their bits are others",
)


class Stepper:
    """One run with all that an update can have, for the GPU and for the CPU."""

    def __init__(self, cuda: Cuda, variant: str, dithered: bool = False, first: bool = False):
        self.cuda, (self.rule, more) = cuda, VARIANTS[variant]
        hyper = Hyper(**{**PLAIN, **more}, dithered=dithered, seed=77, round=12)
        self.hyper = hyper
        self.face = ctypes.create_string_buffer(cuda.lib.zs_face_job_bytes())
        step, new = ctypes.c_double(3), ctypes.c_bool(first)
        cuda.lib.zs_face_make(self.face, ctypes.byref(hyper), self.rule, step, new)
        self.run = cuda.lib.zs_face_run(self.face).contents
        self.job = cuda.lib.zs_face_update(self.face).contents
        self.states = 2 + self.job.full if self.rule == ADAM else int(self.job.full)
        self.tensors: Sequence[Tensor] = ()
        self.scalars: tuple[Tensor | None, Tensor | None] = (None, None)  # grad_factor, found_inf

    def lay(self, tensors: Sequence[Tensor], number: int = 0) -> None:
        """Param, grad, states."""
        self.tensors = tensors
        self.run.numel, self.run.dtype = tensors[0].numel(), DTYPES[tensors[0].dtype]
        self.run.number = number

    def point(self, at: Address) -> None:
        self.run.param, self.run.grad = map(at, self.tensors[:2])
        for s in range(self.states):
            self.run.state[s] = at(self.tensors[2 + s])

    def step(self) -> None:
        stream = ctypes.c_void_p(self.cuda.stream)
        with places(*self.tensors, *self.scalars) as at:
            self.point(at)
            self.job.grad_factor, self.job.found_inf = map(at, self.scalars)
            self.cuda.finish(self.cuda.lib.zs_cuda_update(ctypes.byref(self.job), stream))

    def make_live(self, room: Tensor, lr: Tensor, found: Tensor, steps: Sequence[Tensor]) -> None:
        """Has the constants made on the device, from `lr` and `steps`, which are counted up."""
        live = Live(pointer(lr), DTYPES[lr.dtype], None, pointer(found), pointer(room))
        self.hyper.lr = 77.0  # which is not to be used
        given, stream = ctypes.byref(self.hyper), ctypes.c_void_p(self.cuda.stream)
        array = (ctypes.c_void_p * len(steps))(*map(pointer, steps))
        make, n = self.cuda.lib.zs_face_make_live, ctypes.c_int64(len(steps))
        self.cuda.finish(make(self.face, given, ctypes.byref(live), array, n, stream))
        self.scalars = None, found

    def step_on_cpu(self) -> None:
        self.point(pointer)
        self.cuda.lib.zs_face_step_on_cpu(self.face)


def tensors_for(stepper: Stepper, n: int, dtype: torch.dtype, special: bool) -> list[Tensor]:
    """Param, grad and states with values that such tensors have: second moments are not negative."""
    made = [
        some(n, dtype, seed, special=special and seed < 2) for seed in range(2 + stepper.states)
    ]
    return [t.abs() if stepper.rule == ADAM and i > 2 else t for i, t in enumerate(made)]


@pytest.mark.needs_fma
@needs_fma
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "dithered"), KINDS, ids=str)
def test_update_is_bit_identical_to_the_cpu(
    cuda: Cuda, variant: str, dtype: torch.dtype, dithered: bool
) -> None:
    for n in LENGTHS:
        for offset in (0, 8, 3):
            stepper = Stepper(cuda, variant, dithered, first=offset == 8)
            theirs = tensors_for(stepper, n, dtype, special=True)
            ours = [Place(t, offset) for t in theirs]
            number = 2**33 - n // 2  # the upper half changes on the way
            stepper.lay([place.values for place in ours], number)
            stepper.step()
            stepper.lay(theirs, number)
            stepper.step_on_cpu()
            for place, expected in zip(ours, theirs, strict=True):
                assert same_bits(place.values, expected), (n, offset)
                assert place.untouched_around()


PLAIN_FORM, WIDE, CODED = range(3)
FIRST_SCALE, SECOND_SCALE, LOW_BITS = 3, 4, 5


def compact_tensors(n: int, dtype: torch.dtype, form: int) -> list[Tensor]:
    """Param, grad, two moments, two scales and low bits, after some steps."""
    moment = {CODED: torch.uint8, WIDE: torch.float32}[form]
    generator = torch.Generator().manual_seed(n)
    param, grad = some(n, dtype, 1, special=True), some(n, dtype, 2, special=True)
    moments = [some(n, torch.float32, 3 + i, special=False).abs() for i in range(2)]
    if form == CODED:
        moments = [torch.randint(0, 255, (n,), generator=generator).to(moment) for _ in range(2)]
    groups = (n + 31) // 32
    scales = [torch.randint(90, 130, (groups,), generator=generator).byte() for _ in range(2)]
    return [param, grad, *moments, *scales, torch.zeros(n, dtype=torch.int8)]


def lay_compact(stepper: Stepper, tensors: Sequence[Tensor], form: int, low: bool) -> None:
    stepper.lay(tensors[:2], number=32 * 77)
    stepper.states, stepper.run.form = 0, form
    first, second, first_scale, second_scale, low_bits = map(pointer, tensors[2:])
    stepper.run.state[0], stepper.run.state[1] = first, second
    if form == CODED:
        stepper.run.state[FIRST_SCALE], stepper.run.state[SECOND_SCALE] = first_scale, second_scale
    if low:
        stepper.run.state[LOW_BITS] = low_bits


@pytest.mark.skipif(bool(KERNELS), reason="its arrays stay where they are")
@pytest.mark.parametrize("variant", ["adamw", "adam-from-grad", "sgd-decay", "momentum"])
@pytest.mark.parametrize("form", [WIDE, CODED], ids=["float32 moments", "8-bit moments"])
@pytest.mark.parametrize(
    ("dtype", "low"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_update_by_groups_is_bit_identical_to_the_cpu(
    cuda: Cuda, dtype: torch.dtype, low: bool, form: int, variant: str
) -> None:
    for n in (1, 31, 32, 33, 1000, 70_000):
        stepper = Stepper(cuda, variant)
        ours, theirs = compact_tensors(n, dtype, form), compact_tensors(n, dtype, form)
        lay_compact(stepper, ours, form, low)
        stepper.step()
        lay_compact(stepper, theirs, form, low)
        stepper.step_on_cpu()
        for mine, expected in zip(ours, theirs, strict=True):
            assert same_bits(mine, expected), n
        assert n < 1000 or not same_bits(ours[0], compact_tensors(n, dtype, form)[0])


@pytest.mark.needs_fma
@needs_fma
@pytest.mark.parametrize(("dtype", "dithered"), KINDS, ids=str)
def test_update_reads_device_scalars(cuda: Cuda, dtype: torch.dtype, dithered: bool) -> None:
    for variant in ("adamw", "momentum"):
        for offset in (0, 3):
            stepper = Stepper(cuda, variant, dithered)
            theirs = tensors_for(stepper, 999, dtype, special=False)
            theirs[1][theirs[1].abs() < 1e-3] = 0  # so that a quarter is exact in float16 too
            ours = [Place(t, offset) for t in theirs]
            factor, found_inf = torch.tensor([0.25]), torch.tensor([1.0])
            stepper.scalars = factor, found_inf

            stepper.lay([place.values for place in ours])
            stepper.step()  # an infinity was found: nothing happens
            for i, (place, before) in enumerate(zip(ours, theirs, strict=True)):
                assert same_bits(place.values, before), (variant, i)

            found_inf.zero_()
            stepper.step()
            theirs[1] *= 0.25
            stepper.lay(theirs)
            stepper.step_on_cpu()
            for i in range(len(theirs)):
                assert i == 1 or same_bits(ours[i].values, theirs[i]), (variant, i)


@pytest.mark.needs_fma
@needs_fma
@pytest.mark.skipif(bool(KERNELS), reason="its arrays stay where they are")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_made_on_the_device_match_the_hosts(
    cuda: Cuda, variant: str, dtype: torch.dtype
) -> None:
    for offset, n_steps in ((0, 1), (3, 700)):  # more counters than one launch takes
        stepper = Stepper(cuda, variant, first=offset == 3)  # of step 3, on the host
        theirs = tensors_for(stepper, 1027, dtype, special=True)
        ours = [Place(t, offset) for t in theirs]
        room, found = torch.zeros(16, dtype=torch.float64), torch.ones(1)
        lr = torch.tensor(PLAIN["lr"], dtype=torch.float64)
        steps = list(torch.full((n_steps,), 2.0).unbind()) if stepper.rule == ADAM else []
        stepper.lay([place.values for place in ours])

        stepper.make_live(room, lr, found, steps)
        stepper.step()  # an infinity was found: nothing happens
        for i, (place, before) in enumerate(zip(ours, theirs, strict=True)):
            assert same_bits(place.values, before), (n_steps, offset, i)
        assert {float(step) for step in steps} <= {2.0}

        stepper.make_live(room, lr, found.zero_(), steps)
        stepper.step()
        assert {float(step) for step in steps} <= {3.0}
        stepper.lay(theirs)
        stepper.step_on_cpu()
        for place, expected in zip(ours, theirs, strict=True):
            assert same_bits(place.values, expected), (n_steps, offset)
            assert place.untouched_around()


def test_factor_is_not_rounded_to_the_gradients_dtype(cuda: Cuda) -> None:
    stepper = Stepper(cuda, "sgd")
    grad = torch.full((9,), 1.0, dtype=torch.bfloat16)
    param, factor = torch.zeros(9, dtype=torch.bfloat16), torch.tensor([1 / 3])
    stepper.scalars = factor, None
    stepper.lay([param, grad])
    stepper.step()
    assert same_bits(param, torch.full((9,), -0.01 / 3).bfloat16())
    assert (grad == 1).all()


def test_fake_delays_work_in_side_streams(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in itself: work in a side stream is not done when the call returns."""
    if cuda.stream is None or KERNELS:
        pytest.skip("of the stand-in's side streams, on memory that is the host's")
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "100000")
    x = torch.ones(100)
    job, stream = ctypes.byref(numbers(x)), ctypes.c_void_p(cuda.stream)
    cuda.ok(cuda.lib.zs_cuda_scale(job, ctypes.c_double(2.0), None, stream))
    assert (x == 1).all()
    cuda.ok(cuda.lib.zs_face_wait(stream))
    assert (x == 2).all()
