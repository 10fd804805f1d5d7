"""One optimizer step over many runs: which of them share a launch, and that each gets the CPU's bits.

As in test_cuda_updates.py, which steps one run at a time, the kernels are those of cuda/ compiled
for the host, or a real GPU's (test_gpu.py). The fake's log shows the launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import fake_cuda
import gpu_log
import pytest
import torch
from cuda_kernels import (
    ADAM,
    KERNELS,
    SGD,
    Address,
    Cuda,
    Hyper,
    Run,
    compile_kernels,
    places,
    pointer,
    same_bits,
    some,
)
from loops import DTYPES
from torch import Tensor

pytestmark = pytest.mark.needs_fma
FULL_TABLE = 46
PLAIN_FORM, WIDE, CODED = range(3)
FORMS = {  # dtype, form, 8 more bits of a parameter, kernels
    "float32": (torch.float32, PLAIN_FORM, False, "zs_step_{}_f32"),
    "float32 moments": (torch.bfloat16, WIDE, False, "zs_compact_{}"),
    "8-bit moments": (torch.float32, CODED, False, "zs_compact_{}"),
    "8-bit moments and more bits": (torch.bfloat16, CODED, True, "zs_compact_{}"),
}


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cuda]:
    path = compile_kernels(tmp_path_factory.mktemp("kernels") / "kernels.so")
    with pytest.MonkeyPatch.context() as patch:
        if KERNELS != "gpu":
            patch.setenv("ZSHARD_CUDA_LIB", str(fake_cuda.library()))
        yield Cuda(path)


class Group:
    """Runs of one optimizer, and the same ones for the CPU."""

    def __init__(self, cuda: Cuda, rule: int, **options: float) -> None:
        self.cuda, self.rule = cuda, rule
        plain = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        self.hyper = Hyper(**{**plain, **options}, seed=77, round=12)
        self.faces: list[ctypes.Array[ctypes.c_char]] = []
        self.made: dict[float, int] = {}  # step -> address of its constants
        self.low: list[bool] = []
        self.ours: list[list[Tensor]] = []
        self.theirs: list[list[Tensor]] = []

    def add(
        self,
        numel: int,
        dtype: torch.dtype = torch.float32,
        step: float = 3,
        form: int = PLAIN_FORM,
        number: int | None = None,
        low: bool = False,
    ) -> None:
        """Add a run. `number`: of its first element, and it is rounded stochastically. `low`: has
        8 more bits of each parameter."""
        lib, face = self.cuda.lib, ctypes.create_string_buffer(self.cuda.lib.zs_face_job_bytes())
        self.hyper.dithered = number is not None and form == PLAIN_FORM
        given = ctypes.byref(self.hyper), self.rule, ctypes.c_double(step), ctypes.c_bool(False)
        lib.zs_face_make(face, *given)
        run, seed = lib.zs_face_run(face).contents, len(self.faces)
        run.numel, run.dtype, run.form, run.number = numel, DTYPES[dtype], form, number or 0
        run.constants = self.made.setdefault(step, run.constants)
        self.faces.append(face)
        self.low.append(low)
        self.ours.append(tensors(numel, dtype, form, seed))
        self.theirs.append([t.clone() for t in self.ours[-1]])

    def point(self, index: int, arrays: Sequence[Tensor], at: Address) -> Run:
        run: Run = self.cuda.lib.zs_face_run(self.faces[index]).contents
        run.param, run.grad = map(at, arrays[:2])
        for state in range(2 if self.rule == ADAM else 1):
            run.state[state] = at(arrays[2 + state])
            if run.form == CODED:
                run.state[3 + state] = at(arrays[4 + state])
        run.state[5] = at(arrays[6]) if self.low[index] else None
        return run

    def step(self) -> None:
        job = self.cuda.lib.zs_face_update(self.faces[0]).contents
        with places(*(t for arrays in self.ours for t in arrays)) as at:
            runs = [self.point(i, arrays, at) for i, arrays in enumerate(self.ours)]
            job.runs, job.n_runs = (Run * len(runs))(*runs), len(runs)
            self.cuda.finish(self.cuda.lib.zs_cuda_update(ctypes.byref(job), None))
        for i, arrays in enumerate(self.theirs):
            self.point(i, arrays, pointer)
            self.cuda.lib.zs_face_step_on_cpu(self.faces[i])


def tensors(numel: int, dtype: torch.dtype, form: int, seed: int) -> list[Tensor]:
    """Param, grad, two moments, two scales, lower bits."""
    moment = torch.float32 if form == WIDE else dtype
    made = [some(numel, dtype if i < 2 else moment, 10 * seed + i) for i in range(4)]
    made[3].abs_()
    if form == CODED:
        made[2:] = [torch.randint(0, 255, (numel,)).byte() for _ in range(2)]
    scales = [torch.randint(90, 130, (-(-numel // 32),)).byte() for _ in range(2)]
    return [*made, *scales, torch.randint(-128, 128, (numel,), dtype=torch.int8)]


def assert_launches(group: Group, folder: Path, kernels: list[str]) -> None:
    """Step with these launches (only the fake has a log), and compare with the CPU."""
    gpu_log.start(str(folder), 0)
    try:
        group.step()
    finally:
        gpu_log.stop()
    if KERNELS != "gpu":
        lines = gpu_log.read(folder / "calls.0")
        assert [it["kernel"] for call, it in lines if call == "cuLaunchKernel"] == kernels
    for i, (ours, theirs) in enumerate(zip(group.ours, group.theirs, strict=True)):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True)), i


@pytest.mark.parametrize(("rule", "name"), [(ADAM, "adam"), (SGD, "momentum")])
@pytest.mark.parametrize("form", FORMS)
def test_many_tensors_are_one_launch(
    cuda: Cuda, tmp_path: Path, form: str, rule: int, name: str
) -> None:
    """Of all lengths: of no pack and no group, of a block, of several blocks."""
    group = Group(cuda, rule, momentum=0.9)
    dtype, how, low, kernel = FORMS[form]
    for i in range(FULL_TABLE):
        numel = (1, 3, 31, 1024, 1025, 4 * 256 * 4, 9001)[i % 7]
        group.add(numel, dtype, form=how, low=low)
    assert_launches(group, tmp_path, [kernel.format(name)])


def test_full_table_is_launched(cuda: Cuda, tmp_path: Path) -> None:
    group = Group(cuda, ADAM)
    for i in range(256):
        group.add(200 + i)
    assert_launches(group, tmp_path, ["zs_step_adam_f32"] * 6)


def test_unlike_runs_are_sorted_into_launches(cuda: Cuda, tmp_path: Path) -> None:
    group = Group(cuda, ADAM)
    for i in range(5):
        group.add(100 + i)
        group.add(300 + i, torch.bfloat16)
        group.add(77 + i, step=1000)  # was frozen, or is new
        group.add(300 + i, torch.bfloat16, number=5000 * i)
    names = ["f32", "bf16", "f32", "dithered"]
    assert_launches(group, tmp_path, [f"zs_step_adam_{name}" for name in names])


def test_launch_has_one_upper_half_of_numbers(cuda: Cuda, tmp_path: Path) -> None:
    """What a kernel knows of an element's number is the lower half."""
    group = Group(cuda, ADAM)
    for number in (0, 2**32 - 50, 2**32 + 50, 2**31 - 1, 7):  # the second and fourth are cut in two
        group.add(100, torch.bfloat16, number=number)
    assert_launches(group, tmp_path, ["zs_step_adam_dithered"] * 3)


def test_groups_of_late_numbers(cuda: Cuda, tmp_path: Path) -> None:
    group = Group(cuda, ADAM)
    group.add(1000, form=CODED, number=2**31 - 64)
    group.add(1000, torch.bfloat16, form=CODED, number=2**32 - 640)
    assert_launches(group, tmp_path, ["zs_compact_adam"] * 2)


def test_pieces_need_not_be_aligned_together(cuda: Cuda, tmp_path: Path) -> None:
    group = Group(cuda, ADAM)
    for offset in range(4):
        group.add(5000)
        for i in range(4):  # gradients are aligned otherwise
            begin = offset if i == 1 else 3
            group.ours[-1][i] = torch.cat([torch.zeros(begin), group.ours[-1][i]])[begin:]
    assert_launches(group, tmp_path, ["zs_step_adam_f32"])
