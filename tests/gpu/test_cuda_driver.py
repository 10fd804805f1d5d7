"""The CUDA driver: how it is found, its signatures, its errors; in C, on any machine.

tests/c/test_cuda_driver.c runs one test in a process, in an environment that makes
the stand-in for libcuda (fake_cuda.py) old, empty, or failing at the n-th call of a function. Our
declarations are held against NVIDIA's cuda.h where there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
from c_compile import BUILDS, C, compile_c, program_environment
from c_sources import source, sources
from rows import all_rows

PROGRAM = C / "test_cuda_driver.c"
SOURCES = ["cuda_driver.c", "cuda_kernels.c", "cuda_update.c", "device_cpu.c", "simd.c"]
SOURCES += ["memory.c", "status.c"]
NAMES = re.findall(r"^    TEST\((\w+)\)", PROGRAM.read_text(), re.MULTILINE)
SETTINGS = {
    "spoiled_context_refuses_all": {"FAKE_CUDA_FAIL": "cuStreamSynchronize:1:700"},
    "out_of_memory_is_told_apart": {"FAKE_CUDA_MEMORY": "1000000"},
    "events_order_streams": {"FAKE_CUDA_DELAY_US": "50000"},
    "host_memory_is_read_at_once_unless_it_is_pinned": {"FAKE_CUDA_DELAY_US": "50000"},
    "launch_waits_for_its_kernel_if_told_to": {"FAKE_CUDA_DELAY_US": "50000", "ZSHARD_SYNC": "1"},
}
API = source("cuda_api.h").read_text()
CALLS = re.findall(r"\bX\((cu\w+), \d+,", API)
# What names an error and a version must not fail itself; it has a test of its own below.
NEVER_FAIL = ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"]
CUDA_ERROR, MEMORY_ERROR = (
    [line.split()[0] for line in re.findall(r"ZS_(?:OK|ERR_\w+)\b.*", text)].index(name)
    for text in [source("status.h").read_text().split("} zs_status;")[0].replace(",", " ")]
    for name in ("ZS_ERR_CUDA", "ZS_ERR_MEMORY")
)


class Program:
    """The test program, compiled in one way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, name: str, **env: str) -> str:
        """What the test printed; it must have succeeded."""
        whole = program_environment(**{"ZSHARD_CUDA_LIB": str(fake_cuda.library()), **env})
        done = subprocess.run(
            [str(self.path), name], capture_output=True, text=True, timeout=60, env=whole
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{name}: ok\n")
        return done.stdout.removesuffix(f"{name}: ok\n").strip()


@pytest.fixture(
    scope="module",
    params=["sanitized", pytest.param("release", marks=pytest.mark.thorough)],
)
def each_build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return made(tmp_path_factory.mktemp("driver"), request.param)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return made(tmp_path_factory.mktemp("driver"), "plain")


def made(folder: Path, build: str) -> Program:
    ours = [C / name for name in ("fake_image.c", "serial_parallel_for.c")]
    return Program(compile_c(folder / build, [PROGRAM, *ours, *sources(*SOURCES)], BUILDS[build]))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
def test_in_c(each_build: Program, name: str) -> None:
    each_build.run(name, **SETTINGS.get(name, {}))


# --- finding it ----------------------------------------------------------------------------------


def test_driver_is_found(program: Program) -> None:
    assert program.run("say") == "found=1 version=13000 devices=1 status=0 words="
    two = program.run("say", FAKE_CUDA_DEVICES="2", FAKE_CUDA_VERSION="12040")
    assert two == "found=1 version=12040 devices=2 status=0 words="


def test_missing_driver_names_the_remedy(program: Program) -> None:
    named = program.run("say", ZSHARD_CUDA_LIB="/no/libcuda.so.1")
    assert named.startswith(
        f"found=0 version=0 devices=0 status={CUDA_ERROR} words=CUDA driver not"
    )
    assert "/no/libcuda.so.1" in named and "unset ZSHARD_CUDA_LIB" in named


def test_library_that_is_no_driver_is_refused(program: Program, tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int zs_nothing;\n")
    empty = compile_c(tmp_path / "empty.so", [tmp_path / "empty.c"], [], ("-shared",))
    said = program.run("say", ZSHARD_CUDA_LIB=str(empty))
    assert said.startswith("found=0 version=0") and "it lacks cuGetProcAddress_v2" in said


def test_driver_without_a_required_call_is_too_old(program: Program) -> None:
    optional = re.search(r"ZS_CU_OPTIONAL_CALLS.*", API)[0]  # type: ignore[index]
    with all_rows() as row:
        for name in CALLS:
            with row(name):
                said = program.run("say", FAKE_CUDA_MISSING=name)
                if name in optional:
                    assert said == "found=1 version=13000 devices=1 status=0 words="
                else:
                    assert said.startswith("found=0")
                    assert f"is too old, it lacks {name}: upgrade" in said


def test_old_driver_and_missing_gpu_have_different_errors(program: Program) -> None:
    old = program.run("say", FAKE_CUDA_VERSION="11080")
    assert "(CUDA 11.8) is too old: upgrade to driver 525 (CUDA 12.0) or newer" in old
    none = program.run("say", FAKE_CUDA_DEVICES="0")
    assert none.startswith("found=1 version=13000 devices=0") and "cannot initialize" in none
    assert "check that nvidia-smi lists a GPU" in none
    broken = program.run("say", FAKE_CUDA_FAIL="cuInit:1:803")
    assert "CUDA_ERROR_FAKE_803 (803): fake error 803" in broken


# --- errors --------------------------------------------------------------------------------------


def test_all_calls_are_made(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert program.run("work", FAKE_CUDA_LOG=str(log)) == "0"
    called = {line.split()[0] for line in log.read_text().splitlines()}
    assert called == set(CALLS) - set(NEVER_FAIL)  # so the next test makes each of them fail


def test_failing_call_is_named_with_the_drivers_message(program: Program) -> None:
    with all_rows() as row:
        for call in CALLS:
            if call not in NEVER_FAIL:
                with row(call):
                    check_failing_call(program, call)


def check_failing_call(program: Program, call: str) -> None:
    said = program.run("work", FAKE_CUDA_FAIL=f"{call}:1:999")
    status, words = said.split(" ", 1)
    assert int(status) == CUDA_ERROR and "CUDA_ERROR_FAKE_999 (999): fake error 999" in words
    names = {"cuLaunchKernel": "zs_scale_f32", "cuLibraryGetKernel": "zs_sum_f32_f32"}
    starts = call in ("cuInit", "cuDeviceGetCount")
    assert "initialize" in words if starts else words.startswith(f"{names.get(call, call)}: ")
    if not starts:
        said = program.run("work", FAKE_CUDA_FAIL=f"{call}:1:2")
        assert int(said.split()[0]) == MEMORY_ERROR and "the GPU is out of memory" in said


def test_unsupported_image_names_the_remedy(program: Program) -> None:
    for code in (209, 222):
        said = program.run("work", FAKE_CUDA_FAIL=f"cuLibraryLoadData:1:{code}")
        assert "(sm_90, built with CUDA 13.0) do not support this GPU" in said
        assert "or its driver (CUDA 13.0)" in said
        assert "update the driver, or rebuild zshard with an nvcc of the driver's" in said
    assert "zshard was built without CUDA kernels" in program.run("work", NO_IMAGE="1")


def test_no_call_follows_a_broken_context(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    name = "spoiled_context_refuses_all"
    program.run(name, FAKE_CUDA_LOG=str(log), **SETTINGS[name])
    assert log.read_text().splitlines()[-1].startswith("cuStreamSynchronize")


def test_primary_context_is_retained_once(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program.run("threads_share_the_primary_context", FAKE_CUDA_LOG=str(log))
    called = [line.split()[0] for line in log.read_text().splitlines()]
    assert called.count("cuDevicePrimaryCtxRetain") == 1 and called.count("cuCtxSetCurrent") == 3


# --- declarations --------------------------------------------------------------------------------


def cuda_include() -> Path:
    """The folder of cuda.h, beside the nvcc that setup.py would find."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        if (Path(home) / "include" / "cudaTypedefs.h").exists():
            return Path(home) / "include"
    pytest.skip("no cuda.h here to compare with")


def check_declarations(folder: Path, api: str) -> str:
    """What the compiler says of cuda_api.h with the text `api`, beside NVIDIA's."""
    (folder / "cuda_api.h").write_text(api)
    names = re.findall(r"\bZS_CU_([A-Z_0-9]+) = ", api)
    assert len(names) > 30
    own = [name for name in names if name != "SUCCESS"]
    lines = [
        f"ERROR({name.removeprefix('ERROR_')});" if name.startswith("ERROR_") else f"VALUE({name});"
        for name in own
    ]
    lines.append('_Static_assert((int)ZS_CU_SUCCESS == (int)CUDA_SUCCESS, "");')
    (folder / "check_cuda_values.h").write_text("\n".join(lines))
    shutil.copy(C / "check_cuda_api.c", folder)
    command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{folder}"]
    command += ["-isystem", str(cuda_include()), str(folder / "check_cuda_api.c")]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_declarations_match_cuda_h(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc, whose extensions the check needs")
    assert check_declarations(tmp_path, API) == ""


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("(zs_cu_ptr *, size_t)", "(zs_cu_ptr *, int)", "cuMemAlloc has another signature"),
        ("ERROR_NOT_READY = 600", "ERROR_NOT_READY = 601", "NOT_READY"),
        ("X(cuMemFree, 3020,", "X(cuMemFree, 3030,", "PFN_cuMemFree_v3030"),
    ],
)
def test_wrong_declarations_are_found(tmp_path: Path, good: str, bad: str, says: str) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc, whose extensions the check needs")
    assert API.count(good) == 1
    assert says in check_declarations(tmp_path, API.replace(good, bad))


# --- the package -----------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("library", ["/no/such/libcuda.so.1", "empty", ""])
def test_import_with_a_broken_driver(library: str, tmp_path: Path) -> None:
    if library == "empty":
        (tmp_path / "empty.c").write_text("int zs_nothing;\n")
        library = str(compile_c(tmp_path / "e.so", [tmp_path / "empty.c"], [], ("-shared",)))
    env = {**os.environ, "ZSHARD_CUDA_LIB": library}
    done = subprocess.run([sys.executable, "-c", "import zshard"], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
