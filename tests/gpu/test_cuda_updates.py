"""The CUDA kernels of the optimizers against the CPU's loops, bit for bit; on any machine. Many runs
of one optimizer step: which of them share a launch.

How they are launched: see test_cuda_kernels.py. The fake's log shows the launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import gpu_log
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
    Run,
    places,
    pointer,
    same_bits,
    some,
)
from loops import DTYPES
from torch import Tensor

pytestmark = pytest.mark.needs_fma
PLAIN = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
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
PLAIN_FORM, WIDE, CODED = range(3)
# Numbers of zs_run.state where moments are coded.
FIRST_SCALE, SECOND_SCALE, LOW_BITS = 3, 4, 5


def arrays_for(
    n: int, dtype: torch.dtype, form: int = PLAIN_FORM, seed: int = 0, special: bool = True
) -> list[Tensor]:
    """Param, grad, three states, two scales and lower bits, with values that such tensors have:
    second moments are not negative."""
    generator = torch.Generator().manual_seed(seed)
    moment = torch.float32 if form == WIDE else dtype
    made = [some(n, dtype, seed + i, special) for i in range(2)]
    if form == CODED:
        made += [torch.randint(0, 255, (n,), generator=generator).byte() for _ in range(3)]
    else:
        made += [some(n, moment, seed + 2 + i, special=False) for i in range(3)]
        made[3:] = [t.abs() for t in made[3:]]
    groups = (n + 31) // 32
    made += [torch.randint(90, 130, (groups,), generator=generator).byte() for _ in range(2)]
    low = torch.randint(-128, 128, (n,), generator=generator, dtype=torch.int8)
    return [*made, low]


class Step:
    """A step of some runs of one optimizer, for the GPU and for the CPU."""

    def __init__(self, cuda: Cuda, variant: str) -> None:
        self.cuda, (self.rule, more) = cuda, VARIANTS[variant]
        self.hyper = Hyper(**{**PLAIN, **more}, seed=77, round=12)
        self.faces: list[ctypes.Array[ctypes.c_char]] = []
        self.constants: dict[float, int] = {}  # by step, their address
        self.low: list[bool] = []  # whether a run has 8 more bits of each parameter
        self.ours: list[list[Place]] = []
        self.theirs: list[list[Tensor]] = []
        self.scalars: tuple[Tensor | None, Tensor | None] = (None, None)  # grad_factor, found_inf

    def add(
        self,
        arrays: list[Tensor],
        offset: int | Sequence[int] = 0,
        step: float = 3,
        first: bool = False,
        form: int = PLAIN_FORM,
        number: int = 0,
        dithered: bool = False,
        low: bool = False,
    ) -> None:
        """Add a run. offset: of all its arrays, or of each. number: of its first element."""
        lib, face = self.cuda.lib, ctypes.create_string_buffer(self.cuda.lib.zs_face_job_bytes())
        self.hyper.dithered = dithered
        given = ctypes.byref(self.hyper), self.rule, ctypes.c_double(step), ctypes.c_bool(first)
        lib.zs_face_make(face, *given)
        run = lib.zs_face_run(face).contents
        run.numel, run.dtype, run.form = arrays[0].numel(), DTYPES[arrays[0].dtype], form
        run.number = number
        run.constants = self.constants.setdefault(step, run.constants)
        self.faces.append(face)
        self.low.append(low)
        offsets = [offset] * len(arrays) if isinstance(offset, int) else offset
        self.ours.append([Place(*each) for each in zip(arrays, offsets, strict=True)])
        self.theirs.append([array.clone() for array in arrays])

    @property
    def job(self) -> Any:
        return self.cuda.lib.zs_face_update(self.faces[0]).contents

    def point(self, index: int, arrays: Sequence[Tensor], at: Address) -> Any:
        run = self.cuda.lib.zs_face_run(self.faces[index]).contents
        run.param, run.grad = map(at, arrays[:2])
        states = 2 + self.job.full if self.rule == ADAM else int(self.job.full)
        if run.form != PLAIN_FORM:
            states = min(states, 2)
        for state in range(states):
            run.state[state] = at(arrays[2 + state])
        if run.form == CODED:
            run.state[FIRST_SCALE], run.state[SECOND_SCALE] = map(at, arrays[5:7])
        if self.low[index]:
            run.state[LOW_BITS] = at(arrays[7])
        return run

    def on_gpu(self) -> None:
        arrays = [[place.values for place in each] for each in self.ours]
        with places(*(t for each in arrays for t in each), *self.scalars) as at:
            runs = [self.point(i, each, at) for i, each in enumerate(arrays)]
            job = self.job
            job.runs, job.n_runs = (Run * len(runs))(*runs), len(runs)
            job.grad_factor, job.found_inf = map(at, self.scalars)
            self.cuda.call("update", job)

    def on_cpu(self) -> None:
        for i, arrays in enumerate(self.theirs):
            self.point(i, arrays, pointer)
            self.cuda.lib.zs_face_step_on_cpu(self.faces[i])

    def make_live(self, room: Tensor, lr: Tensor, found: Tensor, steps: Sequence[Tensor]) -> None:
        """Has the constants made on the device, from `lr` and `steps`, which are counted up."""
        live = Live(pointer(lr), DTYPES[lr.dtype], None, pointer(found), pointer(room))
        self.hyper.lr = 77.0  # which is not to be used
        given, stream = ctypes.byref(self.hyper), ctypes.c_void_p(self.cuda.stream)
        array = (ctypes.c_void_p * len(steps))(*map(pointer, steps))
        make, n = self.cuda.lib.zs_face_make_live, ctypes.c_int64(len(steps))
        self.cuda.finish(make(self.faces[0], given, ctypes.byref(live), array, n, stream))
        self.scalars = None, found

    def wrong(self) -> list[tuple[int, int]]:
        """Return which array of which run is not the CPU's, or was written around."""
        pairs = [zip(*each, strict=True) for each in zip(self.ours, self.theirs, strict=True)]
        return [
            (run, i)
            for run, pair in enumerate(pairs)
            for i, (place, expected) in enumerate(pair)
            if not (same_bits(place.values, expected) and place.untouched_around())
        ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_update_is_bit_identical_to_the_cpu(cuda: Cuda, variant: str) -> None:
    wrong = {}
    for (dtype, dithered), n, offset in product(KINDS, LENGTHS, (0, 8, 3)):
        step = Step(cuda, variant)
        how = {"number": 2**33 - n // 2, "dithered": dithered}  # the upper half changes on the way
        step.add(arrays_for(n, dtype), offset, first=offset == 8, **how)
        step.on_gpu()
        step.on_cpu()
        wrong[dtype, dithered, n, offset] = step.wrong()
    assert {key: value for key, value in wrong.items() if value} == {}


@pytest.mark.parametrize("variant", ["adamw", "adam-from-grad", "sgd-decay", "momentum"])
@pytest.mark.parametrize("form", [WIDE, CODED], ids=["float32 moments", "8-bit moments"])
def test_update_by_groups_is_bit_identical_to_the_cpu(cuda: Cuda, form: int, variant: str) -> None:
    wrong = {}
    lengths = (1, 31, 32, 33, 1000, 70_000 if variant == "adamw" else 5_000)
    kinds = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    for (dtype, low), n in product(kinds, lengths):
        step, before = Step(cuda, variant), arrays_for(n, dtype, form)
        step.add(before, form=form, number=32 * 77, low=low)
        step.on_gpu()
        step.on_cpu()
        assert n < 1000 or not same_bits(step.ours[0][0].values, before[0])
        wrong[dtype, low, n] = step.wrong()
    assert {key: value for key, value in wrong.items() if value} == {}


@pytest.mark.parametrize(("dtype", "dithered"), KINDS, ids=str)
def test_update_reads_device_scalars(cuda: Cuda, dtype: torch.dtype, dithered: bool) -> None:
    for variant, offset in product(("adamw", "momentum"), (0, 3)):
        step, arrays = Step(cuda, variant), arrays_for(999, dtype, special=False)
        arrays[1][arrays[1].abs() < 1e-3] = 0  # so that a quarter is exact in float16 too
        step.add(arrays, offset, dithered=dithered)
        factor, found_inf = torch.tensor([0.25]), torch.tensor([1.0])
        step.scalars = factor, found_inf
        step.on_gpu()  # an infinity was found: nothing happens
        assert step.wrong() == []
        found_inf.zero_()
        step.on_gpu()
        step.theirs[0][1] *= 0.25
        step.on_cpu()
        assert {i for _, i in step.wrong()} <= {1}, variant


@pytest.mark.skipif(bool(KERNELS), reason="its arrays stay where they are")
@pytest.mark.parametrize("variant", VARIANTS)
def test_constants_made_on_the_device_match_the_hosts(cuda: Cuda, variant: str) -> None:
    runs = ((0, 1), (3, 700))  # more counters than one launch takes
    for dtype, (offset, n_steps) in product(DTYPES, runs):
        step = Step(cuda, variant)
        step.add(arrays_for(1027, dtype), offset, first=offset == 3)  # of step 3, on the host
        room, found = torch.zeros(16, dtype=torch.float64), torch.ones(1)
        lr = torch.tensor(PLAIN["lr"], dtype=torch.float64)
        counters = list(torch.full((n_steps,), 2.0).unbind()) if step.rule == ADAM else []
        step.make_live(room, lr, found, counters)
        step.on_gpu()  # an infinity was found: nothing happens
        assert step.wrong() == [] and {float(each) for each in counters} <= {2.0}
        step.make_live(room, lr, found.zero_(), counters)
        step.on_gpu()
        assert {float(each) for each in counters} <= {3.0}
        step.on_cpu()
        assert step.wrong() == [], (dtype, n_steps)


def test_factor_is_not_rounded_to_the_gradients_dtype(cuda: Cuda) -> None:
    step, arrays = Step(cuda, "sgd"), arrays_for(9, torch.bfloat16)
    arrays[0].zero_()
    arrays[1].fill_(1.0)
    step.add(arrays)
    step.scalars = torch.tensor([1 / 3]), None
    step.on_gpu()
    param, grad, *_ = (place.values for place in step.ours[0])
    assert same_bits(param, torch.full((9,), -0.01 / 3).bfloat16())
    assert (grad == 1).all()


# --- many runs ------------------------------------------------------------------------------------

FULL_TABLE = 46
FORMS = {  # dtype, form, 8 more bits of a parameter, kernels
    "float32": (torch.float32, PLAIN_FORM, False, "zs_step_{}_f32"),
    "float32 moments": (torch.bfloat16, WIDE, False, "zs_compact_{}"),
    "8-bit moments": (torch.float32, CODED, False, "zs_compact_{}"),
    "8-bit moments and more bits": (torch.bfloat16, CODED, True, "zs_compact_{}"),
}


@pytest.fixture
def adam(cuda: Cuda) -> Step:
    return Step(cuda, "adamw")


def assert_launches(step: Step, folder: Path, kernels: list[str]) -> None:
    """Step with these launches (only the fake has a log), and compare with the CPU."""
    log = gpu_log.start(str(folder), 0)
    try:
        step.on_gpu()
    finally:
        gpu_log.stop()
    if KERNELS != "gpu":
        lines = gpu_log.read(log)
        assert [it["kernel"] for call, it in lines if call == "cuLaunchKernel"] == kernels
    step.on_cpu()
    assert step.wrong() == []


@pytest.mark.parametrize(("variant", "name"), [("adamw", "adam"), ("momentum", "momentum")])
@pytest.mark.parametrize("how", FORMS)
def test_many_tensors_are_one_launch(
    cuda: Cuda, tmp_path: Path, how: str, variant: str, name: str
) -> None:
    """Of all lengths: of no pack and no group, of a block, of several blocks."""
    step, (dtype, form, low, kernel) = Step(cuda, variant), FORMS[how]
    for i in range(FULL_TABLE):
        numel = (1, 3, 31, 1024, 1025, 4 * 256 * 4, 9001)[i % 7]
        step.add(arrays_for(numel, dtype, form, 10 * i), form=form, low=low)
    assert_launches(step, tmp_path, [kernel.format(name)])


def test_full_table_is_launched(adam: Step, tmp_path: Path) -> None:
    for i in range(256):
        adam.add(arrays_for(200 + i, torch.float32, seed=10 * i))
    assert_launches(adam, tmp_path, ["zs_step_adam_f32"] * 6)


def test_unlike_runs_are_sorted_into_launches(adam: Step, tmp_path: Path) -> None:
    for i in range(5):
        adam.add(arrays_for(100 + i, torch.float32))
        adam.add(arrays_for(300 + i, torch.bfloat16))
        adam.add(arrays_for(77 + i, torch.float32), step=1000)  # was frozen, or is new
        adam.add(arrays_for(300 + i, torch.bfloat16), number=5000 * i, dithered=True)
    names = ["f32", "bf16", "f32", "dithered"]
    assert_launches(adam, tmp_path, [f"zs_step_adam_{name}" for name in names])


def test_launch_has_one_upper_half_of_numbers(adam: Step, tmp_path: Path) -> None:
    """A kernel only knows the lower half of an element's number."""
    for number in (0, 2**32 - 50, 2**32 + 50, 2**31 - 1, 7):  # the second and fourth are cut in two
        adam.add(arrays_for(100, torch.bfloat16), number=number, dithered=True)
    assert_launches(adam, tmp_path, ["zs_step_adam_dithered"] * 3)


def test_groups_of_late_numbers(adam: Step, tmp_path: Path) -> None:
    for dtype, number in ((torch.float32, 2**31 - 64), (torch.bfloat16, 2**32 - 640)):
        adam.add(arrays_for(1000, dtype, CODED), form=CODED, number=number)
    assert_launches(adam, tmp_path, ["zs_compact_adam"] * 2)


def test_pieces_need_not_be_aligned_together(adam: Step, tmp_path: Path) -> None:
    for offset in range(4):  # gradients are aligned otherwise
        adam.add(arrays_for(5000, torch.float32), [3, offset, *[3] * 6])
    assert_launches(adam, tmp_path, ["zs_step_adam_f32"])
