"""GPUs and NCCL where there are none: the environment in which zshard takes its way over CUDA.

A model on the CPU is trained as if that were a GPU (as_gpu/fake_gpu.py), by the
stand-ins for libcuda (fake_cuda.py) and libnccl (c/fake_nccl.c). Both work late and on threads of
their own, and their GPUs compute as the CPU does, so the CPU's bits come out only if every wait is
where it has to be.

    python tests/lib/stand_ins.py python train.py    # runs a program so
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
from spawn import _python_path

_SOURCE = C / "fake_nccl.c"
_STARTUP = Path(__file__).resolve().parent / "as_gpu"
fake_gpu.install()  # whoever imports this may set the environment later


@functools.cache
def nccl_library(old: bool = False) -> Path:
    """The path of the stand-in for libnccl.so.2, in a folder where ranks that use it can meet.

    old: 2.21.5, without what came later, in place of 2.28.9.
    """
    folder = Path(tempfile.mkdtemp(prefix="zshard-nccl-"))
    flags = [*BUILDS["release"], *(["-DFAKE_NCCL_OLD"] if old else [])]
    return compile_c(folder / "libnccl.so.2", [_SOURCE], flags, ("-shared", "-ldl", "-lm"))


def environment(backend: str = "c10d", late: int = 200) -> dict[str, str]:
    """What to set.

    backend: what carries bytes between GPUs, "nccl" or "c10d". late: microseconds by which work on
    side streams is put off.
    """
    found = {
        "ZSHARD_CUDA_LIB": str(fake_cuda.library()),
        "ZSHARD_CUDA_ON_HOST": "1",
        "ZSHARD_BACKEND": backend,
        "FAKE_CUDA_DELAY_US": str(late),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_STARTUP), _python_path()])),
    }
    if backend == "nccl":
        library = nccl_library()
        found |= {"ZSHARD_NCCL_LIB": str(library), "FAKE_NCCL_DIR": str(library.parent)}
        found["FAKE_NCCL_DELAY_US"] = str(late)
    return found


def with_stand_ins(backend: str = "c10d", late: int = 200) -> dict[str, str]:
    """This process's environment with that."""
    return {**os.environ, **environment(backend, late)}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], with_stand_ins())
