"""NCCL without a GPU: the table, communicators and their monitor over a fake; the choice of
libnccl; the real library's own errors.

tests/c/fake_nccl.c has the ABI and the rules of libnccl, and the ranks are processes of a small C program
(tests/c/test_nccl_comm.c), as in test_c_comm.py. The declarations of nccl_lib.h are compared with a
real nccl.h, and the real library loads where it is installed: without a GPU its error paths are
real.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
from c_compile import (
    BUILDS,
    NO_LOOPS,
    C,
    compile_c,
    program_environment,
    skip_without_thread_sanitizer,
)
from c_sources import SHM, sources
from nursery import fork_ranks

from zshard import _core
from zshard.ranks import nccl

CORE = [NO_LOOPS, *sources(*SHM, "nccl_*.c")]
PROGRAM = [C / name for name in ("test_nccl_comm.c", "nccl_failures.c")]
OLD = "an_old_library_does_without"
FAILING = "a_failing_call_is_an_error_and_no_more"
NAMES = re.findall(r"^    TEST\((\w+), ", PROGRAM[0].read_text(), re.MULTILINE)


class Programs:
    """The test program and the fakes, each compiled in each build when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}

    def library(self, build: str, old: bool = False) -> Path:
        """The fake of libnccl; `old`: 2.21.5 instead of 2.28.9."""
        flags = [*BUILDS[build], *(["-DFAKE_NCCL_OLD"] if old else [])]
        name = f"libfake_nccl{'_old' * old}_{build}.so"
        return self._get(name, [C / "fake_nccl.c"], flags, "-shared")

    def program(self, build: str) -> Path:
        """tests/c/test_nccl_comm.c with the tested sources."""
        return self._get(f"test_nccl_{build}", [*PROGRAM, *CORE], BUILDS[build])

    def _get(self, name: str, sources: list[Path], flags: list[str], *link: str) -> Path:
        if name not in self._made:
            words = (*link, "-ldl", "-lm")
            self._made[name] = compile_c(self.folder / name, sources, flags, words)
        return self._made[name]

    def run(self, build: str, name: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs one test of the program."""
        if build == "threads":
            skip_without_thread_sanitizer()
        library = self.library(build, old=name == OLD or "ZS_TEST_OLD" in env)
        usual = {"ZSHARD_NCCL_LIB": str(library), "FAKE_NCCL_DIR": str(self.folder)}
        usual["ZSHARD_CUDA_LIB"] = str(fake_cuda.library())  # its streams
        usual["TSAN_OPTIONS"] = "halt_on_error=1"
        return subprocess.run(
            [str(self.program(build)), name],
            capture_output=True,
            text=True,
            timeout=120,
            env=program_environment(**{**usual, **env}),
        )

    def check(self, build: str, name: str, **env: str) -> None:
        """Runs one test, which passes for each number of ranks."""
        done = self.run(build, name, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(rf"^{name} +\d ranks  ok", done.stdout, re.MULTILINE)
        assert "fake_nccl" not in done.stderr and "Sanitizer" not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("nccl"))


# --- over the fake --------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "build", ["sanitized", pytest.param("release", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name != FAILING])
def test_in_c(programs: Programs, build: str, name: str) -> None:
    programs.check(build, name)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["calls_and_the_monitors_thread", "work_that_does_not_end_is_broken_off"]
)
def test_threads(programs: Programs, name: str) -> None:
    programs.check("threads", name)


# The failing call, and the exception's word. A call of the second kind fails later, by the
# communicator's state.
CALLS = ["AllGather", "Broadcast", "GroupEnd"]
INIT = ["CommInitRankConfig"]
_NEW = [("FAIL", f"{call}:2:{result}", call) for call in CALLS for result in (1, 3, 4)]
_NEW += [("FAIL", f"{call}:1", call) for call in [*INIT, "GetUniqueId"]]
_NEW += [("FAIL_LATE", f"{call}:2:2", call) for call in CALLS]
_NEW += [("FAIL_LATE", f"{call}:1:2", call) for call in INIT]
_NEW += [("FAIL", f"CommGetAsyncError:{n}:1", "") for n in (1, 5, 40)]
_NEW += [("ASYNC", f"{n}:{result}", "") for n, result in ((1, 6), (4, 2), (9, 1))]
_OLD = [("FAIL", f"{call}:2", call) for call in ("GroupStart", "Send", "Recv", "GroupEnd")]
_OLD += [("FAIL_LATE", "GroupEnd:2:6", "GroupEnd"), ("FAIL", "Broadcast:1:5", "Broadcast")]
FAILURES = [(*each, {}) for each in _NEW] + [(*each, {"ZS_TEST_OLD": "1"}) for each in _OLD]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("how", "what", "call", "env"), FAILURES)
def test_failing_call(
    programs: Programs, how: str, what: str, call: str, env: dict[str, str]
) -> None:
    words = f"nccl{call} failed: " if call else "failed: "
    env = {**env, f"FAKE_NCCL_{how}": what, "ZS_TEST_WORDS": words}
    programs.check("sanitized", FAILING, **env)


@pytest.mark.parametrize("env", [{}, {"FAKE_NCCL_FAIL": "CommFinalize:1"}])
def test_failure_at_exit_is_ignored(programs: Programs, env: dict[str, str]) -> None:
    programs.check("sanitized", FAILING, **env)


def test_kernels_are_on_the_callers_stream(programs: Programs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    programs.check("sanitized", "two_communicators_keep_their_orders", FAKE_NCCL_LOG=str(log))
    streams: dict[str, set[str]] = {}
    for line in log.read_text().splitlines():
        call, *fields = line.split()
        if call in ("AllGather", "Broadcast"):
            streams.setdefault(call, set()).add(dict(f.split("=") for f in fields)["stream"])
    assert len(streams["AllGather"]) == 1 and len(streams["Broadcast"]) == 1
    assert streams["AllGather"] != streams["Broadcast"]


# --- which libnccl is used: each case is a process forked from one that has imported torch ---------


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    link = ("-shared", "-Wl,-soname,libnccl.so.2", "-ldl", "-lm")
    return compile_c(folder / "libnccl.so.2", [C / "fake_nccl.c"], BUILDS["release"], link)


def look(named=None, folder=None, loaded=None, version=None):
    """The result of library(), if ZSHARD_NCCL_LIB is `named`, `folder` is on Python's path,
    `loaded` is loaded, and a fake has that version."""
    os.environ.pop("ZSHARD_NCCL_LIB", None)
    env = {"ZSHARD_NCCL_LIB": named, "FAKE_NCCL_VERSION": version}
    os.environ.update({name: str(value) for name, value in env.items() if value is not None})
    if folder is not None:
        sys.path.insert(0, str(folder))
        sys.modules.pop("nvidia", None)
    if loaded is not None:
        ctypes.CDLL(str(loaded))
    try:
        return nccl.library()
    except NotImplementedError as error:
        return str(error)


def answer(*arguments, fn=look):
    (result,) = fork_ranks(fn, 1, *arguments, check=True)
    return result.value


def copy(fake, folder):
    """A copy of the fake: another library to the linker, with the same name."""
    folder.mkdir(parents=True)
    return Path(shutil.copy(fake, folder / "libnccl.so.2"))


def of_torch():
    """The libnccl that comes with `import torch`, as that of the CUDA build does, or None."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "/libnccl.so" in line), None)


def test_search_order(fake, tmp_path):
    site = tmp_path / "site"
    named, loaded = copy(fake, tmp_path / "named"), copy(fake, tmp_path / "loaded")
    packaged = copy(fake, site / "nvidia" / "nccl" / "lib")
    torchs = answer(fn=of_torch)
    assert answer(None, site)[1] == (torchs or str(packaged))
    assert answer(None, site, loaded)[1] == (torchs or str(loaded))
    assert answer(named, site, loaded, "23007") == ("2.30.7", str(named))


def test_version_numbers(fake):
    for number, text in (("2804", "2.8.4"), ("22105", "2.21.5"), ("23203", "2.32.3")):
        assert answer(fake, None, None, number)[0] == text


def test_missing_library_is_named(tmp_path):
    found = answer()
    if isinstance(found, str):  # a machine without NCCL
        assert "cannot find libnccl.so.2" in found and "ZSHARD_NCCL_LIB" in found
    found = answer(tmp_path / "nothing.so")
    assert "cannot load ZSHARD_NCCL_LIB" in found and "nothing.so" in found
    found = answer("libc.so.6")
    assert "lacks ncclGetVersion" in found and "libc.so.6" in found


def look_twice(fake):
    assert "cannot load ZSHARD_NCCL_LIB" in look("/nowhere/libnccl.so.2")
    return look(fake)


def test_missing_library_is_looked_for_again(fake):
    assert answer(fake, fn=look_twice) == ("2.28.9", str(fake))


def test_invalid_path_is_refused():
    with pytest.raises(ValueError, match="the path of libnccl is 600 bytes"):
        _core.nccl_library("x" * 600)
    with pytest.raises(TypeError):
        _core.nccl_library(3)


def end(fake):
    """End as a script does, here and in a forked child, with the library loaded if there is one."""
    if fake:
        look(fake)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs atexit's functions
    assert os.waitpid(child, 0)[1] == 0
    if fake:
        _core.nccl_abort("nothing is there to abort")


def test_exit_is_quiet(fake):
    usual, ours = (fork_ranks(end, 1, path, check=True)[0] for path in ("", str(fake)))
    # Triton with torch 2.15 on Python 3.13 reports its own leaks.
    assert set(ours.stderr.splitlines()) <= set(usual.stderr.splitlines())


# --- the real thing, where it is installed ---------------------------------------------------------


def nccl_package() -> Path:
    """The folder of Python's nvidia.nccl package; skips where there is none."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no nvidia.nccl here (pip install --no-deps nvidia-nccl-cu13)")
    return Path(next(iter(spec.submodule_search_locations)))


# nccl.h wants types of CUDA's headers, by name only.
CUDA_HEADER = """\
#pragma once
#define CUDART_VERSION 13000
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
"""

# The functions of the table have the types of nccl.h, with its own types in place of ours.
TYPES = """\
#include <stdint.h>
#include <stddef.h>
#include <nccl.h>
#define ZS_NCCL_REAL_TYPES
#define zs_nccl_result ncclResult_t
#define zs_nccl_type ncclDataType_t
#define zs_nccl_handle ncclComm_t
#define zs_nccl_stream cudaStream_t
#define zs_nccl_id ncclUniqueId
#define zs_nccl_config ncclConfig_t
#include "comm/nccl/nccl_lib.h"
#define SAME(result, name, parameters) _Static_assert(                                     \\
    __builtin_types_compatible_p(__typeof__(&nccl##name), __typeof__(((zs_nccl *)0)->name)), #name);
ZS_NCCL_REQUIRED(SAME)
ZS_NCCL_OPTIONAL(SAME)
int main(void) { return 0; }
"""

# Our own types are those in size and place, and the numbers are the same.
NUMBERS = """\
#include <stddef.h>
#include <nccl.h>
#include "comm/nccl/nccl_lib.h"
#define EQUAL(a, b) _Static_assert((long long)(a) == (long long)(b), #a " is not " #b)
#define PLACE(ours, theirs) EQUAL(offsetof(zs_nccl_config, ours), offsetof(ncclConfig_t, theirs)); \\
    _Static_assert(__builtin_types_compatible_p(__typeof__(((zs_nccl_config *)0)->ours),           \\
                                                __typeof__(((ncclConfig_t *)0)->theirs)), #ours)
EQUAL(sizeof(zs_nccl_id), sizeof(ncclUniqueId));
EQUAL(_Alignof(zs_nccl_id), _Alignof(ncclUniqueId));
EQUAL(sizeof(zs_nccl_result), sizeof(ncclResult_t));
EQUAL(sizeof(zs_nccl_type), sizeof(ncclDataType_t));
_Static_assert(sizeof(zs_nccl_config) <= sizeof(ncclConfig_t), "a prefix");
PLACE(size, size); PLACE(magic, magic); PLACE(version, version); PLACE(blocking, blocking);
PLACE(cga_cluster_size, cgaClusterSize); PLACE(min_ctas, minCTAs); PLACE(max_ctas, maxCTAs);
PLACE(net_name, netName); PLACE(split_share, splitShare); PLACE(traffic_class, trafficClass);
PLACE(comm_name, commName); PLACE(collnet_enable, collnetEnable); PLACE(cta_policy, CTAPolicy);
PLACE(shrink_share, shrinkShare); PLACE(nvls_ctas, nvlsCTAs);
EQUAL(ZS_NCCL_SUCCESS, ncclSuccess);
EQUAL(ZS_NCCL_UNHANDLED_CUDA_ERROR, ncclUnhandledCudaError);
EQUAL(ZS_NCCL_SYSTEM_ERROR, ncclSystemError);
EQUAL(ZS_NCCL_INTERNAL_ERROR, ncclInternalError);
EQUAL(ZS_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
EQUAL(ZS_NCCL_INVALID_USAGE, ncclInvalidUsage);
EQUAL(ZS_NCCL_REMOTE_ERROR, ncclRemoteError);
EQUAL(ZS_NCCL_IN_PROGRESS, ncclInProgress);
EQUAL(ZS_NCCL_INT8, ncclInt8);
EQUAL(ZS_NCCL_CONFIG_UNSET, NCCL_CONFIG_UNDEF_INT);
EQUAL(NCCL_CTA_POLICY_EFFICIENCY, 1);
EQUAL(NCCL_UNIQUE_ID_BYTES, 128);
int main(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    return config.magic != ZS_NCCL_CONFIG_MAGIC || config.version < ZS_NCCL_CONFIG_VERSION;
}
"""


@pytest.mark.parametrize("text", [TYPES, NUMBERS], ids=["types", "numbers"])
def test_declarations_match_nccl_h(tmp_path: Path, text: str) -> None:
    headers = nccl_package() / "include"
    if not (headers / "nccl.h").exists():
        pytest.skip(f"no nccl.h in {headers}")
    for name in ("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):
        (tmp_path / name).write_text(CUDA_HEADER)
    (tmp_path / "check.c").write_text(text)
    target = compile_c(
        tmp_path / "check", [tmp_path / "check.c"], [f"-isystem{tmp_path}", f"-isystem{headers}"]
    )
    assert subprocess.run([str(target)], check=False).returncode == 0


REAL = r"""
#include "comm/comm.h"
#include "device/device.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_lib.h"
#include <stdio.h>
int main(void)
{
    const zs_nccl *nccl = NULL;
    zs_nccl_id id;
    zs_comm *alone = NULL;
    zs_nccl_comm *comm = NULL;
    char version[16];
    if (zs_nccl_load(&nccl) != ZS_OK) return printf("%s\n", zs_last_message()), 1;
    zs_nccl_version_text(nccl->version, version, sizeof version);
    printf("%s %d\n", version, nccl->GetUniqueId(&id));
    zs_comm_self_new(zs_device_cpu(), &alone);
    zs_nccl_options options = {.name = "real", .timeout = 20.0};
    printf("%d\n", (int)zs_nccl_comm_new(alone, &options, &comm));
    printf("%s\n", zs_last_message());
    zs_nccl_comm_free(comm);
    zs_comm_release(alone);
    return 0;
}
"""


@pytest.mark.thorough
def test_real_library_fails_without_a_gpu(tmp_path: Path) -> None:
    (library,) = (nccl_package() / "lib").glob("libnccl.so.2")
    (tmp_path / "real.c").write_text(REAL)
    program = compile_c(tmp_path / "real", [tmp_path / "real.c", *CORE], BUILDS["release"])
    env = {**os.environ, "ZSHARD_NCCL_LIB": str(library), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    version, status, *words = done.stdout.splitlines()
    assert re.match(r"2\.\d+\.\d+ [01]$", version)
    assert status != "0", "it made a communicator: is there a GPU that CUDA_VISIBLE_DEVICES hides?"
    # "CUDA driver version is insufficient", "no CUDA-capable device": the library's own words.
    assert "ncclCommInitRankConfig failed: unhandled cuda error" in words[0] and "CUDA" in words[0]
