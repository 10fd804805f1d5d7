"""The CUDA kernels of the optimizers against the CPU's loops, bit for bit; on any machine.

How they are launched: see test_cuda_kernels.py.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cuda_kernels import (
    ADAM,
    KERNELS,
    LENGTHS,
    SGD,
    Address,
    Cuda,
    Hyper,
    Live,
    Place,
    places,
    pointer,
    same_bits,
    some,
)
from loops import DTYPES
from rows import all_rows
from torch import Tensor

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
def test_update_is_bit_identical_to_the_cpu(cuda: Cuda) -> None:
    with all_rows() as row:
        for variant, kind, n, offset in itertools.product(VARIANTS, KINDS, LENGTHS, (0, 8, 3)):
            with row(variant, kind, n, offset):
                check_update(cuda, variant, *kind, n, offset)


def check_update(
    cuda: Cuda, variant: str, dtype: torch.dtype, dithered: bool, n: int, offset: int
) -> None:
    stepper = Stepper(cuda, variant, dithered, first=offset == 8)
    theirs = tensors_for(stepper, n, dtype, special=True)
    ours = [Place(t, offset) for t in theirs]
    number = 2**33 - n // 2  # the upper half changes on the way
    stepper.lay([place.values for place in ours], number)
    stepper.step()
    stepper.lay(theirs, number)
    stepper.step_on_cpu()
    for place, expected in zip(ours, theirs, strict=True):
        assert same_bits(place.values, expected)
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
def test_update_by_groups_is_bit_identical_to_the_cpu(cuda: Cuda) -> None:
    params = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    variants = ["adamw", "adam-from-grad", "sgd-decay", "momentum"]
    with all_rows() as row:
        for (dtype, low), form, variant in itertools.product(params, [WIDE, CODED], variants):
            moments = "8-bit moments" if form == CODED else "float32 moments"
            with row(dtype, "low bits" if low else "alone", moments, variant):
                check_update_by_groups(cuda, dtype, low, form, variant)


def check_update_by_groups(
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
def test_constants_made_on_the_device_match_the_hosts(cuda: Cuda) -> None:
    with all_rows() as row:
        for variant, dtype in itertools.product(VARIANTS, DTYPES):
            with row(variant, dtype):
                check_constants(cuda, variant, dtype)


def check_constants(cuda: Cuda, variant: str, dtype: torch.dtype) -> None:
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
