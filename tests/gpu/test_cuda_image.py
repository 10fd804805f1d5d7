"""The compiled kernels: registers, spills, wide accesses, exact arithmetic; and their way into
_core.

nvcc's output shows the behavior of the code on a GPU, on any machine that has nvcc: its own table
of resources, the PTX, and the machine code if nvdisasm is installed (pip install
nvidia-cuda-nvdisasm). All of it is made in one go, by setup.py's own flags.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from c_sources import CSRC

import zshard

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ["f32", "f64", "bf16", "f16"]
RULES = ["adam", "amsgrad", "sgd", "momentum"]
KERNELS = {
    *(f"zs_{work}_{a}_{b}" for work in ("sum", "cast") for a in DTYPES for b in DTYPES),
    *(f"zs_{work}_{d}" for work in ("scale", "norm") for d in DTYPES),
    *(f"zs_step_{rule}_{d}" for rule in RULES for d in (*DTYPES, "dithered")),
    *(f"zs_live_{rule}_{d}" for rule in RULES for d in DTYPES),
    *(f"zs_compact_{rule}" for rule in RULES if rule != "amsgrad"),
    "zs_encode",
    *("zs_fold", "zs_differs", "zs_constants"),
}
# Kernels of nearly all steps: four blocks on a multiprocessor, for memory's sake.
MAIN = {name for name in KERNELS if not re.search(r"f64|_f16|amsgrad|live|code_", name)}
# Bytes that the loop over packs loads and stores by accesses of 8 or 16 bytes: a pack is 16 bytes of the widest array.
WIDE = {
    "zs_step_adam_f32": (64, 48),
    "zs_step_adam_bf16": (64, 48),
    "zs_step_adam_dithered": (64, 48),
    "zs_step_momentum_f32": (48, 32),
    "zs_live_adam_f32": (64, 48),
    "zs_live_momentum_bf16": (48, 32),
    "zs_sum_f32_f32": (80, 16),  # four sources and the old value
    "zs_sum_bf16_f32": (48, 16),
    "zs_cast_f32_bf16": (24, 8),
    "zs_scale_bf16": (16, 16),
    "zs_norm_f32": (32, 0),
    "zs_differs": (32, 0),
}


def image_tool() -> Any:
    """tools/cuda_image.py, which setup.py compiles the kernels with."""
    spec = importlib.util.spec_from_file_location("cuda_image", ROOT / "tools" / "cuda_image.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


class Compiled:
    """nvcc's output: its words, PTX, and machine code, by architecture."""

    def __init__(self, folder: Path, words: str) -> None:
        self.words = words
        self.ptx = {path.name: path.read_text() for path in folder.glob("*.ptx")}
        self.cubins = {re.search(r"_(\d+)\.cubin", p.name)[1]: p for p in folder.glob("*.cubin")}  # type: ignore[index]

    def resources(self) -> Iterator[tuple[str, str, int, int]]:
        """(architecture, kernel, registers, bytes spilled or in local memory) of each kernel."""
        pattern = (
            r"entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill"
            r" stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        )
        for match in re.finditer(pattern, self.words, re.DOTALL):
            name, gpu, *local, registers = match.groups()
            yield gpu, name, int(registers), sum(map(int, local))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    if not zshard._core.machine()["targets"]:
        pytest.skip("built without CUDA kernels: make test CUDA=1 (needs nvcc)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_CUDA", "1")
        tool = image_tool()
        try:
            nvcc = tool.find_nvcc()
        except tool.SetupError as error:
            pytest.skip(str(error))
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    gpus = [gpu for gpu in tool.GPUS if f"sm_{gpu}" in listed.split()]
    folder = tmp_path_factory.mktemp("image")
    codes = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in gpus]
    codes += [f"-gencode=arch=compute_{gpus[0]},code=compute_{gpus[0]}"]
    command = [nvcc, *tool.FLAGS, f"-I{CSRC}", *codes]
    command += ["-Xptxas", "-v", "--keep", f"--keep-dir={folder}"]
    command += ["-fatbin", "cuda/kernels.cu", "-o", str(folder / "kernels.fatbin")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return Compiled(folder, done.stdout + done.stderr)


@pytest.mark.thorough
@pytest.mark.slow
def test_kernels_are_complete_and_do_not_spill(compiled: Compiled) -> None:
    found = list(compiled.resources())
    gpus = {gpu for gpu, *_ in found}
    assert gpus and {(gpu, name) for gpu, name, *_ in found} == {
        (gpu, name) for gpu in gpus for name in KERNELS
    }
    assert [row for row in found if row[3] > 0] == []
    assert [row for row in found if row[1] in MAIN and row[2] > 64] == []
    assert [row for row in found if "live" not in row[1] and row[2] > 128] == []
    common = re.compile(r"zs_live_(adam|sgd|momentum)_(f32|bf16)")  # three blocks
    assert [row for row in found if common.match(row[1]) and row[2] > 80] == []


@pytest.mark.thorough
@pytest.mark.slow
def test_arithmetic_is_ieee_and_not_contracted(compiled: Compiled) -> None:
    assert compiled.ptx
    for name, text in compiled.ptx.items():
        done = Counter(re.findall(r"\b(\w+)\.([a-z.]*)f(?:32|64)\s", text))
        floating = {key: n for key, n in done.items() if key[0] in ("add", "sub", "mul", "div")}
        floating |= {key: n for key, n in done.items() if key[0] in ("fma", "sqrt", "rcp", "mad")}
        assert floating and {rounding for _, rounding in floating} == {"rn."}, (name, floating)
        assert "ftz" not in text and "approx" not in text
        for kernel in re.split(r"\.entry ", text)[1:]:  # fma is written out in the rules alone
            written = ("zs_step_", "zs_live_", "zs_constants")
            assert "fma.rn" not in kernel or kernel.startswith(written)


def nvdisasm() -> str:
    """The path of NVIDIA's disassembler, from PATH or from its package."""
    spec = importlib.util.find_spec("nvidia") if importlib.util.find_spec("nvidia") else None
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [str(path) for place in places for path in Path(place).glob("*/bin/nvdisasm")]
    path = shutil.which("nvdisasm") or next(iter(found), None)
    return path or pytest.skip("no nvdisasm here: pip install nvidia-cuda-nvdisasm")


@pytest.mark.thorough
@pytest.mark.slow
def test_packs_are_moved_in_wide_accesses(compiled: Compiled) -> None:
    tool = nvdisasm()
    for gpu, cubin in compiled.cubins.items():
        text = subprocess.run([tool, str(cubin)], capture_output=True, text=True, check=True).stdout
        parts = re.split(r"\n\.text\.(\w+):\n", text)
        code = dict(zip(parts[1::2], parts[2::2], strict=True))
        assert set(code) == KERNELS
        for name, text in code.items():
            assert not re.search(r"\b(LDL|STL)\b", text), (gpu, name)
        for name, (loads, stores) in WIDE.items():  # a loop that was unrolled has more
            assert wide(code[name], "LDG") >= loads, (gpu, name)
            assert wide(code[name], "STG") >= stores, (gpu, name)


def wide(code: str, operation: str) -> int:
    """Bytes of all accesses of 8 bytes or more."""
    found = re.findall(rf"\b{operation}\.E[.A-Z0-9]*\.(64|128|256)\b", code)
    return sum(int(bits) // 8 for bits in found)


def test_extension_contains_the_built_image() -> None:
    spec = importlib.util.find_spec("zshard._core")
    assert spec is not None and spec.origin is not None
    if not zshard._core.machine()["targets"]:
        pytest.skip("built without CUDA kernels: make test CUDA=1 (needs nvcc)")
    if ROOT not in Path(spec.origin).parents:
        pytest.skip("this zshard was built elsewhere")
    image = (ROOT / "build" / "cuda" / "kernels.fatbin").read_bytes()
    assert image.startswith(bytes.fromhex("50ed55ba"))  # checked by a driver and the fake
    assert image in Path(spec.origin).read_bytes()
    for name in KERNELS:
        assert fake_cuda.knows(name), name
