"""The CUDA driver: the search for it, its signatures, its errors; in C, on any machine.

tests/c/test_cuda_driver.c runs one test in a process, in an environment that makes
the fake of libcuda (fake_cuda.py) old, empty, or failing at the n-th call of a function. Our
declarations are compared with NVIDIA's cuda.h if there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
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
# Calls that name an error or a version must not fail; they have their own test below.
NEVER_FAIL = ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"]
CUDA_ERROR, MEMORY_ERROR = (
    [line.split()[0] for line in re.findall(r"ZS_(?:OK|ERR_\w+)\b.*", text)].index(name)
    for text in [source("status.h").read_text().split("} zs_status;")[0].replace(",", " ")]
    for name in ("ZS_ERR_CUDA", "ZS_ERR_MEMORY")
)


Run = Callable[..., str]


def compiled(folder: Path, build: str) -> Run:
    """Return a function that runs a test of the program and returns its output; it must succeed."""
    ours = [C / name for name in ("fake_image.c", "serial_parallel_for.c")]
    path = compile_c(folder / build, [PROGRAM, *ours, *sources(*SOURCES)], BUILDS[build])

    def run(name: str, **env: str) -> str:
        whole = program_environment(**{"ZSHARD_CUDA_LIB": str(fake_cuda.library()), **env})
        done = subprocess.run(
            [str(path), name], capture_output=True, text=True, timeout=60, env=whole
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{name}: ok\n")
        return done.stdout.removesuffix(f"{name}: ok\n").strip()

    return run


@pytest.fixture(
    scope="module",
    params=["sanitized", pytest.param("release", marks=pytest.mark.thorough)],
)
def each_build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("driver"), request.param)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("driver"), "plain")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that is no driver."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "empty.c").write_text("int zs_nothing;\n")
    return str(compile_c(folder / "empty.so", [folder / "empty.c"], [], ("-shared",)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
def test_in_c(each_build: Run, name: str) -> None:
    each_build(name, **SETTINGS.get(name, {}))


# --- finding it ----------------------------------------------------------------------------------


FOUND = "found=1 version=13000 devices=1 status=0 words="
SAID = {  # of a driver, or its absence: parts of the message
    "usual": ({}, [FOUND]),
    "two GPUs": (
        {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_VERSION": "12040"},
        ["found=1 version=12040 devices=2 status=0 words="],
    ),
    "missing": (
        {"ZSHARD_CUDA_LIB": "/no/libcuda.so.1"},
        [
            f"found=0 version=0 devices=0 status={CUDA_ERROR} words=CUDA driver not",
            "/no/libcuda.so.1",
            "unset ZSHARD_CUDA_LIB",
        ],
    ),
    "no driver": ({"ZSHARD_CUDA_LIB": "empty"}, ["found=0 version=0", "lacks cuGetProcAddress_v2"]),
    "old": (
        {"FAKE_CUDA_VERSION": "11080"},
        ["(CUDA 11.8) is too old: upgrade to driver 525 (CUDA 12.0) or newer"],
    ),
    "no GPU": (
        {"FAKE_CUDA_DEVICES": "0"},
        [
            "found=1 version=13000 devices=0",
            "cannot initialize",
            "check that nvidia-smi lists a GPU",
        ],
    ),
    "broken": ({"FAKE_CUDA_FAIL": "cuInit:1:803"}, ["CUDA_ERROR_FAKE_803 (803): fake error 803"]),
}


def test_driver_is_found_or_the_remedy_is_named(program: Run, empty: str) -> None:
    optional = re.search(r"ZS_CU_OPTIONAL_CALLS.*", API)[0]  # type: ignore[index]
    missing = {
        name: [FOUND] if name in optional else [f"is too old, it lacks {name}: upgrade"]
        for name in CALLS
    }
    table = SAID | {name: ({"FAKE_CUDA_MISSING": name}, words) for name, words in missing.items()}
    with all_rows() as row:
        for name, (env, words) in table.items():
            with row(name):
                env = {key: empty if value == "empty" else value for key, value in env.items()}
                said = program("say", **env)
                assert [word for word in words if word not in said] == [], said
                assert FOUND not in words or said == FOUND


@pytest.mark.sampled(1)
@pytest.mark.parametrize("library", ["/no/such/libcuda.so.1", "empty", ""])
def test_import_with_a_broken_driver(library: str, empty: str) -> None:
    env = {**os.environ, "ZSHARD_CUDA_LIB": empty if library == "empty" else library}
    done = subprocess.run([sys.executable, "-c", "import zshard"], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()


# --- errors --------------------------------------------------------------------------------------


def test_failing_call_is_named_with_the_drivers_message(program: Run) -> None:
    with all_rows() as row:
        for call in CALLS:
            if call not in NEVER_FAIL:
                with row(call):
                    check_failing_call(program, call)


def check_failing_call(program: Run, call: str) -> None:
    said = program("work", FAKE_CUDA_FAIL=f"{call}:1:999")
    status, words = said.split(" ", 1)
    assert int(status) == CUDA_ERROR and "CUDA_ERROR_FAKE_999 (999): fake error 999" in words
    names = {"cuLaunchKernel": "zs_scale_f32", "cuLibraryGetKernel": "zs_sum_f32_f32"}
    starts = call in ("cuInit", "cuDeviceGetCount")
    assert "initialize" in words if starts else words.startswith(f"{names.get(call, call)}: ")
    if not starts:
        said = program("work", FAKE_CUDA_FAIL=f"{call}:1:2")
        assert int(said.split()[0]) == MEMORY_ERROR and "the GPU is out of memory" in said


def test_unsupported_image_names_the_remedy(program: Run) -> None:
    for code in (209, 222):
        said = program("work", FAKE_CUDA_FAIL=f"cuLibraryLoadData:1:{code}")
        assert "(sm_90, built with CUDA 13.0) do not support this GPU" in said
        assert "or its driver (CUDA 13.0)" in said
        assert "update the driver, or rebuild zshard with an nvcc of the driver's" in said
    assert "zshard was built without CUDA kernels" in program("work", NO_IMAGE="1")


def test_no_call_follows_a_broken_context(program: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    name = "spoiled_context_refuses_all"
    program(name, FAKE_CUDA_LOG=str(log), **SETTINGS[name])
    assert log.read_text().splitlines()[-1].startswith("cuStreamSynchronize")


def test_primary_context_is_retained_once(program: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program("threads_share_the_primary_context", FAKE_CUDA_LOG=str(log))
    called = [line.split()[0] for line in log.read_text().splitlines()]
    assert called.count("cuDevicePrimaryCtxRetain") == 1 and called.count("cuCtxSetCurrent") == 3


# --- declarations --------------------------------------------------------------------------------


def cuda_include() -> Path:
    """The folder of cuda.h: next to the nvcc that setup.py would find, or of torch's CUDA
    wheels."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes.append(f"{sysconfig.get_path('purelib')}/nvidia/cu13")
    for home in filter(None, homes):
        if (Path(home) / "include" / "cudaTypedefs.h").exists():
            return Path(home) / "include"
    pytest.skip("no cuda.h here to compare with")


def test_declarations_match_cuda_h(tmp_path: Path) -> None:
    """The compiler's output for cuda_api.h, compared with NVIDIA's."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc, whose extensions the check needs")
    names = re.findall(r"\bZS_CU_([A-Z_0-9]+) = ", API)
    assert len(names) > 30
    lines = [
        f"ERROR({name.removeprefix('ERROR_')});" if name.startswith("ERROR_") else f"VALUE({name});"
        for name in names
        if name != "SUCCESS"
    ]
    lines.append('_Static_assert((int)ZS_CU_SUCCESS == (int)CUDA_SUCCESS, "");')
    (tmp_path / "cuda_api.h").write_text(API)
    (tmp_path / "check_cuda_values.h").write_text("\n".join(lines))
    shutil.copy(C / "check_cuda_api.c", tmp_path)
    command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{tmp_path}"]
    command += ["-isystem", str(cuda_include()), str(tmp_path / "check_cuda_api.c")]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
