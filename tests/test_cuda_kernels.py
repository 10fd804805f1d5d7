"""The CUDA kernels against the CPU's loops, bit for bit; on any machine.

The one idea: cuda_kernels.c launches through the stand-in for libcuda (fake_cuda.py), whose kernels
are those of cuda/ compiled for the host, so what is compared is the real launch code and the real
arithmetic. All arrays come from the middle of larger ones that must not change outside, at places
where a GPU could and could not use its 16-byte accesses.

test_gpu.py runs this file again with ZSHARD_TEST_KERNELS=gpu: the kernels that nvcc made, launched
by the real driver on copies in the GPU's memory; =copies has the stand-in work on such copies, so
that what makes them is tested as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fake_cuda
import pytest
import torch
from test_c_core import ROOT, compile_c
from test_device import DTYPES, Cast, Device, Numbers, Sum, numbers, source_dtype
from torch import Tensor

import zshard

SOURCES = ["cuda_driver.c", "cuda_kernels.c", "device_cpu.c", "optim_cpu.c", "simd.c", "memory.c"]
SOURCES += ["status.c"]
FLAGS = ["-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off", "-O2", "-ldl", "-lm"]
KERNELS = os.environ.get("ZSHARD_TEST_KERNELS", "")  # "", "copies" or "gpu"
LENGTHS = [0, 1, 7, 8, 9, 40, 1027, 4099]
ADAM, SGD = 0, 1


class Hyper(ctypes.Structure):
    """zs_hyper."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "weight_decay", "beta1", "beta2", "eps")),
        *((name, ctypes.c_double) for name in ("momentum", "dampening")),
        *((name, ctypes.c_bool) for name in ("decoupled", "amsgrad", "nesterov", "maximize")),
        ("dithered", ctypes.c_bool),
        ("seed", ctypes.c_uint64),
        ("round", ctypes.c_uint64),
    )


class Run(ctypes.Structure):
    """zs_run."""

    _fields_ = (
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("state", ctypes.c_void_p * 3),
        ("constants", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("number", ctypes.c_uint64),
        ("dtype", ctypes.c_int),
        ("dithered", ctypes.c_bool),
    )


class Update(ctypes.Structure):
    """zs_cuda_update_job."""

    _fields_ = (
        ("rule", ctypes.c_int),
        ("full", ctypes.c_bool),
        ("run", ctypes.POINTER(Run)),
        ("low", ctypes.c_void_p),
        ("low_dtype", ctypes.c_int),
        ("grad_factor", ctypes.c_void_p),
        ("found_inf", ctypes.c_void_p),
    )


class Norm(ctypes.Structure):
    """zs_cuda_norm_job."""

    _fields_ = (
        ("x", Numbers),
        ("p", ctypes.c_double),
        ("result", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


NORM_SCRATCH = (1 << 17) + (1 << 11) + (1 << 5)


Address = Callable[[Tensor | None], int | None]


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@contextlib.contextmanager
def places(*tensors: Tensor | None) -> Iterator[Address]:
    """Where kernels find these tensors: in the tensors, or in copies that are brought back at the
    end.

    Copies are of whole storages, at the same places within 64 bytes, so that an array is aligned
    there as it is here, and what is written beside it is seen.
    """
    if not KERNELS:
        yield pointer
        return
    device = "cuda" if KERNELS == "gpu" else "cpu"
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    for storage in (t.untyped_storage() for t in tensors if t is not None):
        begin = storage.data_ptr()
        if begin not in copies:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            room = torch.empty(here.numel() + 64, dtype=torch.uint8, device=device)
            skip = (begin - room.data_ptr()) % 64
            there = room[skip : skip + here.numel()]
            there.copy_(here)
            copies[begin] = here, there
    if KERNELS == "gpu":
        torch.cuda.synchronize()  # side streams do not wait for torch's

    def address(x: Tensor | None) -> int | None:
        if x is None:
            return None
        begin = x.untyped_storage().data_ptr()
        return x.data_ptr() - begin + copies[begin][1].data_ptr()

    try:
        yield address
    finally:
        for here, there in copies.values():
            here.copy_(there)


def numbers_at(at: Address, x: Tensor) -> Numbers:
    found = numbers(x)
    found.data = at(x)
    return found


class Cuda:
    """cuda_kernels.h on tensors, in the default stream or a side stream."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.zs_last_message.restype = ctypes.c_char_p
        self.lib.zs_face_run.restype = ctypes.POINTER(Run)
        self.lib.zs_face_update.restype = ctypes.POINTER(Update)
        self.stream: int | None = None
        self.ok(self.lib.zs_cuda_enter(0))

    def ok(self, status: int) -> None:
        message = self.lib.zs_last_message().decode()
        self.lib.zs_clear_error()
        assert status == 0, message

    def finish(self, status: int) -> None:
        self.ok(status)
        self.ok(self.lib.zs_face_wait(ctypes.c_void_p(self.stream)))

    def sum(self, sources: Sequence[Tensor | None], dst: Tensor, scale: float, add: bool) -> None:
        dtypes = DTYPES[source_dtype(sources, dst)], DTYPES[dst.dtype]
        with places(*sources, dst) as at:
            array = (ctypes.c_void_p * len(sources))(*map(at, sources))
            job = Sum(array, len(sources), at(dst), dst.numel(), *dtypes, scale, add)
            self.finish(self.lib.zs_cuda_sum(ctypes.byref(job), ctypes.c_void_p(self.stream)))

    def cast(self, dst: Tensor, src: Tensor, add: bool = False) -> None:
        dtypes = DTYPES[dst.dtype], DTYPES[src.dtype]
        stream = ctypes.c_void_p(self.stream)
        with places(dst, src) as at:
            job = Cast(at(dst), at(src), src.numel(), *dtypes)
            self.finish(self.lib.zs_cuda_cast(ctypes.byref(job), ctypes.c_bool(add), stream))

    def scale(self, x: Tensor, factor: float, device_factor: Tensor | None = None) -> None:
        stream = ctypes.c_void_p(self.stream)
        with places(x, device_factor) as at:
            job, there = numbers_at(at, x), ctypes.c_void_p(at(device_factor))
            number = ctypes.c_double(factor)
            self.finish(self.lib.zs_cuda_scale(ctypes.byref(job), number, there, stream))

    def norm(self, x: Tensor, p: float) -> float:
        result, scratch = torch.full((1,), 7.0).double(), torch.empty(NORM_SCRATCH).double()
        scratch.fill_(math.nan)
        with places(x, result, scratch) as at:
            job = Norm(numbers_at(at, x), p, at(result), at(scratch))
            self.finish(self.lib.zs_cuda_norm(ctypes.byref(job), ctypes.c_void_p(self.stream)))
        return float(result)

    def norm_join(self, values: Tensor, p: float) -> float:
        result = torch.full((1,), 7.0).double()
        n, stream = ctypes.c_int64(values.numel()), ctypes.c_void_p(self.stream)
        with places(values, result) as at:
            whence, to = ctypes.c_void_p(at(values)), ctypes.c_void_p(at(result))
            power = ctypes.c_double(p)
            self.finish(self.lib.zs_cuda_norm_join(whence, n, power, to, stream))
        return float(result)

    def differs(self, a: Tensor, b: Tensor) -> int:
        flag = torch.zeros(1, dtype=torch.int32)
        n, stream = ctypes.c_size_t(a.numel()), ctypes.c_void_p(self.stream)
        with places(a, b, flag) as at:
            three = [ctypes.c_void_p(at(t)) for t in (a, b, flag)]
            self.finish(self.lib.zs_cuda_differs(*three[:2], n, three[2], stream))
        return int(flag)


def image_flags() -> list[str]:
    """What has cuda_image.c bring the kernels that setup.py had nvcc make."""
    if KERNELS != "gpu":
        return []
    facts = zshard._core.machine()
    assert facts["built"], "this build of zshard has no kernels"
    fatbin = ROOT / "build" / "cuda" / "kernels.fatbin"
    words = {"FATBIN": f'"{fatbin}"', "TARGETS": f'"{facts["targets"]}"', "VERSION": facts["built"]}
    return [f"-DZS_CUDA_{name}={value}" for name, value in words.items()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [ROOT / "csrc" / name for name in SOURCES]
    sources += [ROOT / "csrc" / "cuda_image.c"] * (KERNELS == "gpu")
    sources += [ROOT / "tests" / "c" / name for name in ("cuda_face.c", "serial_parallel_for.c")]
    target = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return compile_c(target, sources, [*FLAGS, *image_flags()])


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


# --- numbers to compute with -----------------------------------------------------------------------

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -6e-8, 65519.9, 65520.0, 3e38, 1e-40]
PADDING = 32  # elements around an array


class Place:
    """An array `offset` elements into a larger one that is aligned, and whether that stayed."""

    def __init__(self, values: Tensor, offset: int) -> None:
        n = values.numel()
        whole = torch.full((n + 2 * PADDING + 64,), 3.0, dtype=values.dtype)
        skip = -whole.data_ptr() % 64 // whole.element_size()
        self.whole, self.begin, self.end = whole, skip + offset, skip + offset + n
        self.values = whole[self.begin : self.end]
        self.values.copy_(values)

    def untouched_around(self) -> bool:
        return bool((self.whole[: self.begin] == 3).all() and (self.whole[self.end :] == 3).all())


def some(n: int, dtype: torch.dtype, seed: int, special: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    values *= 10 ** torch.randint(-4, 4, (n,), generator=generator).double()
    if special and n >= len(SPECIAL):
        where = torch.randperm(n, generator=generator)[: len(SPECIAL)]
        values[where] = torch.tensor(SPECIAL, dtype=torch.float64)
    return values.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but a NaN is a NaN: its other bits differ from machine to machine."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan() & b.isnan()
    return bool(((a.view(integer) == b.view(integer)) | nan).all())


# --- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_has_the_bits_of_the_cpu(
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
        assert all(map(same_bits, mine, theirs))


def test_sum_of_arrays_that_are_aligned_differently(cuda: Cuda, cpu: Device) -> None:
    sources = [Place(some(1000, torch.bfloat16, r), r) for r in range(4)]
    ours, theirs = torch.zeros(1000), torch.zeros(1000)
    cuda.sum([place.values for place in sources], ours, 0.25, False)
    cpu.sum([place.values for place in sources], theirs, 0.25, False)
    assert same_bits(ours, theirs)


def test_sum_over_more_ranks_than_addresses(cuda: Cuda, cpu: Device) -> None:
    world, n = 300, 41
    for stride in (48, 41):  # elements: the second lets no two sources be aligned together
        whole = some(world * stride, torch.bfloat16, 5, special=False)
        sources = [whole[r * stride : r * stride + n] for r in range(world)]
        ours, theirs = torch.zeros(n), torch.zeros(n)
        cuda.sum(sources, ours, 1 / world, False)
        cpu.sum(sources, theirs, 1 / world, False)
        assert same_bits(ours, theirs)
    apart = [*sources[:-1], sources[-1].clone()]
    with pytest.raises(AssertionError, match="have to lie at equal distances, and rank 299's"):
        cuda.sum(apart, ours, 1.0, False)
    assert same_bits(ours, theirs)


# --- casts, scaling, norms, comparing ----------------------------------------------------------------


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_and_add_are_those_of_torch(cuda: Cuda, dtype: torch.dtype, to: torch.dtype) -> None:
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
def test_scale_has_the_bits_of_the_cpu(cuda: Cuda, cpu: Device, dtype: torch.dtype) -> None:
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
def test_norm_agrees_and_does_not_depend_on_the_place(
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


def test_norm_of_more_than_all_threads_take_at_once(cuda: Cuda) -> None:
    x = torch.ones((1 << 22) + 4321, dtype=torch.bfloat16)
    x[-1] = 2.0
    assert cuda.norm(x, 2.0) == x.numel() + 3
    assert cuda.norm(x, math.inf) == 2.0


def test_norms_are_joined_in_order(cuda: Cuda) -> None:
    values = some(1000, torch.float64, 3, special=False).abs()
    assert cuda.norm_join(values, 2.0) == sum(values.tolist())  # one after the other, as here
    assert cuda.norm_join(values, math.inf) == values.max()
    assert cuda.norm_join(values[:0], 1.0) == 0.0
    with pytest.raises(AssertionError, match="p = 1, 2 or inf, not 3"):
        cuda.norm_join(values, 3.0)


def test_differs_finds_any_byte(cuda: Cuda) -> None:
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
        self.face = ctypes.create_string_buffer(cuda.lib.zs_face_job_bytes())
        step, new = ctypes.c_double(3), ctypes.c_bool(first)
        cuda.lib.zs_face_make(self.face, ctypes.byref(hyper), self.rule, step, new)
        self.run = cuda.lib.zs_face_run(self.face).contents
        self.job = cuda.lib.zs_face_update(self.face).contents
        self.states = 2 + self.job.full if self.rule == ADAM else int(self.job.full)
        self.tensors: Sequence[Tensor] = ()
        self.low: Tensor | None = None
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
        with places(*self.tensors, self.low, *self.scalars) as at:
            self.point(at)
            self.job.low = at(self.low)
            self.job.low_dtype = 0 if self.low is None else DTYPES[self.low.dtype]
            self.job.grad_factor, self.job.found_inf = map(at, self.scalars)
            self.cuda.finish(self.cuda.lib.zs_cuda_update(ctypes.byref(self.job), stream))

    def step_on_cpu(self) -> None:
        self.point(pointer)
        self.cuda.lib.zs_face_step_on_cpu(self.face)


def tensors_for(stepper: Stepper, n: int, dtype: torch.dtype, special: bool) -> list[Tensor]:
    """Param, grad and states with values that such tensors have: second moments are not negative."""
    made = [
        some(n, dtype, seed, special=special and seed < 2) for seed in range(2 + stepper.states)
    ]
    return [t.abs() if stepper.rule == ADAM and i > 2 else t for i, t in enumerate(made)]


@needs_fma
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "dithered"), KINDS, ids=str)
def test_update_has_the_bits_of_the_cpu(
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


@needs_fma
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dtype", "dithered"), KINDS, ids=str)
def test_update_leaves_a_copy_and_takes_scalars_from_the_device(
    cuda: Cuda, dtype: torch.dtype, dithered: bool, low: torch.dtype
) -> None:
    for variant in ("adamw", "momentum"):
        for offset, low_offset in ((0, 0), (3, 3), (0, 1)):
            stepper = Stepper(cuda, variant, dithered)
            theirs = tensors_for(stepper, 999, dtype, special=False)
            theirs[1][theirs[1].abs() < 1e-3] = 0  # so that a quarter is exact in float16 too
            ours = [Place(t, offset) for t in theirs]
            copy = Place(torch.zeros(999, dtype=low), low_offset)
            factor, found_inf = torch.tensor([0.25]), torch.tensor([1.0])
            stepper.low, stepper.scalars = copy.values, (factor, found_inf)

            stepper.lay([place.values for place in ours])
            stepper.step()  # an infinity was found: nothing happens
            assert all(same_bits(p.values, t) for p, t in zip(ours, theirs, strict=True))
            assert copy.values.count_nonzero() == 0

            found_inf.zero_()
            stepper.step()
            theirs[1] *= 0.25
            stepper.lay(theirs)
            stepper.step_on_cpu()
            for i in range(len(theirs)):
                assert i == 1 or same_bits(ours[i].values, theirs[i]), (variant, i)
            assert same_bits(copy.values, theirs[0].to(low)) and copy.untouched_around()


def test_factor_is_not_rounded_to_the_gradients_dtype(cuda: Cuda) -> None:
    stepper = Stepper(cuda, "sgd")
    grad = torch.full((9,), 1.0, dtype=torch.bfloat16)
    param, factor = torch.zeros(9, dtype=torch.bfloat16), torch.tensor([1 / 3])
    stepper.scalars = factor, None
    stepper.lay([param, grad])
    stepper.step()
    assert same_bits(param, torch.full((9,), -0.01 / 3).bfloat16())
    assert (grad == 1).all()


def test_late_side_stream_is_waited_for(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
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
