"""What the CUDA build of torch installs beside it: libnccl's functions and its answers without a device, and cuda.h.

The real library is called in a process of its own, so that an abort or a hang is a failing test.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import test_cuda_driver
from c_sources import sources
from test_nccl import nccl_package

HEADER = next(iter(sources("nccl_lib.c"))).with_name("nccl_lib.h").read_text()
NAMES = re.findall(r"^    X\([^,]+, (\w+),", HEADER, re.MULTILINE)

# Numbers of ncclResult_t, as nccl_lib.h has them.
ASK = """
import ctypes, json, sys
nccl = ctypes.CDLL(sys.argv[1])
version, state, pointer = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
none, zero = ctypes.c_void_p(), ctypes.c_size_t()
print(json.dumps({
    "missing": [name for name in sys.argv[2:] if not hasattr(nccl, "nccl" + name)],
    "GetVersion": nccl.ncclGetVersion(ctypes.byref(version)),
    "version": version.value,
    "GetUniqueId": nccl.ncclGetUniqueId(ctypes.create_string_buffer(128)),
    "MemAlloc": nccl.ncclMemAlloc(ctypes.byref(pointer), ctypes.c_size_t(4096)),
    "group": [nccl.ncclGroupStart(), nccl.ncclGroupEnd()],
    "CommGetAsyncError": nccl.ncclCommGetAsyncError(none, ctypes.byref(state)),
    "AllGather": nccl.ncclAllGather(none, none, zero, 0, none, none),
    "Broadcast": nccl.ncclBroadcast(none, none, zero, 7, 0, none, none),
    "Send": nccl.ncclSend(none, zero, 7, 0, none, none),
    "nothing": [nccl.ncclCommFinalize(none), nccl.ncclCommDestroy(none), nccl.ncclCommAbort(none)],
    "MemFree": nccl.ncclMemFree(none),
}))
"""


def test_real_nccl_has_all_functions_and_fails_without_a_gpu() -> None:
    assert len(NAMES) == 14
    library = nccl_package() / "lib" / "libnccl.so.2"
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(library), *NAMES],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    version = said.pop("version")
    assert version >= 21400
    invalid = dict.fromkeys(("CommGetAsyncError", "AllGather", "Broadcast", "Send"), 4)
    succeed = {
        "missing": [],
        "GetVersion": 0,
        "GetUniqueId": 0,
        "group": [0, 0],
        "nothing": [0, 0, 0],
    }
    assert said == {**succeed, "MemAlloc": 1, "MemFree": 1, **invalid}


def test_declarations_match_cuda_h_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    home = next((p for p in [home, nccl_package().parent / "cu13"] if p.exists()), home)
    if not (home / "include" / "cudaTypedefs.h").exists():
        pytest.skip(f"no cudaTypedefs.h in {home} (torch's CUDA wheel installs it)")
    monkeypatch.setenv("CUDA_HOME", str(home))
    test_cuda_driver.test_declarations_match_cuda_h(tmp_path)
