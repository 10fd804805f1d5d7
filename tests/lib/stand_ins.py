"""Fake GPUs and NCCL: the environment in which zshard runs its CUDA code without a GPU.

A model on the CPU trains as if on a GPU (as_gpu/fake_gpu.py), with fakes of libcuda (fake_cuda.py)
and libnccl (c/fake_nccl.c). Both delay their work and run it on their own threads, and their
GPUs compute as the CPU does, so results are bit-identical to the CPU's only if every wait is in the
right place.

    python tests/lib/stand_ins.py python train.py    # runs a program like that
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

import fake_cuda
from as_gpu import fake_gpu
from c_compile import BUILDS, C, compile_c
from tasks import python_path

_SOURCE = C / "fake_nccl.c"
_STARTUP = Path(__file__).resolve().parent / "as_gpu"
fake_gpu.install()  # importing code may set the environment later


@functools.cache
def nccl_library(old: bool = False) -> Path:
    """Return the path of the fake libnccl.so.2, in a folder where ranks that use it can connect.

    old: fake version 2.21.5, without later features, instead of 2.28.9.
    """
    folder = Path(tempfile.mkdtemp(prefix="zshard-nccl-"))
    flags = [*BUILDS["release"], *(["-DFAKE_NCCL_OLD"] if old else [])]
    return compile_c(folder / "libnccl.so.2", [_SOURCE], flags, ("-shared", "-ldl", "-lm"))


def environment(backend: str = "c10d", late: int = 200) -> dict[str, str]:
    """Return the variables to set.

    backend: the transport between GPUs, "nccl" or "c10d". late: delay of work on side streams, in
    microseconds.
    """
    found = {
        "ZSHARD_CUDA_LIB": str(fake_cuda.library()),
        "ZSHARD_CUDA_ON_HOST": "1",
        "ZSHARD_BACKEND": backend,
        "FAKE_CUDA_DELAY_US": str(late),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTUP), python_path()])),
    }
    if backend == "nccl":
        library = nccl_library()
        found |= {"ZSHARD_NCCL_LIB": str(library), "FAKE_NCCL_DIR": str(library.parent)}
        found["FAKE_NCCL_DELAY_US"] = str(late)
    return found


def with_stand_ins(backend: str = "c10d", late: int = 200) -> dict[str, str]:
    """Return this process's environment with those variables."""
    return {**os.environ, **environment(backend, late)}


if __name__ == "__main__":
    chosen = os.environ.get("ZSHARD_BACKEND", "c10d")
    os.execvpe(sys.argv[1], sys.argv[1:], with_stand_ins(chosen))
