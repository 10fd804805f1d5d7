"""The fake of libcuda.so.1 (see tests/c/fake_cuda.h), compiled on demand.

    monkeypatch.setenv("ZSHARD_CUDA_LIB", str(fake_cuda.library()))

It contains the kernels of cuda/, compiled for the host, so it computes the same as a GPU. Device
memory is host memory, and side streams are threads that can be delayed. It is compiled once per
machine, in a temporary folder whose name is a digest of its sources. Environment variables
(FAKE_CUDA_*) control it and are read in each call.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import tempfile
from pathlib import Path

import c_sources
from c_compile import ARITHMETIC, ROOT, run_compiler

SOURCES = sorted((ROOT / "tests" / "c").glob("fake_cuda*.c*"))
HEADERS = [*(ROOT / "tests" / "c").glob("fake_*.h*"), *c_sources.HEADERS]
KERNELS = sorted((ROOT / "cuda").iterdir())
COMMON = ["-g", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
COMMON += [*ARITHMETIC, *c_sources.INCLUDES, f"-I{ROOT / 'tests' / 'c'}"]
# nvcc's pragmas are for nvcc; an unaligned 16-byte access is an error on a GPU.
CXX = ["-std=c++17", "-O2", "-Wno-unknown-pragmas", "-fsanitize=alignment"]
CXX += ["-fsanitize-undefined-trap-on-error"]
C = ["-std=c11", "-O1", "-Wshadow", "-Wconversion"]


@functools.cache
def library() -> Path:
    """Return the path of the library."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES, *HEADERS, *KERNELS, Path(__file__)]):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"zshard-fakes-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"libcuda-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    facts = Path("/proc/cpuinfo")  # without an fmaf instruction, libm's is correct and slow
    fused = ["-mfma"] if facts.exists() and " fma " in facts.read_text() else []
    cc, cxx = (
        shlex.split(os.environ.get(name, name.lower().replace("xx", "++")))
        for name in ("CC", "CXX")
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = []
        for source in SOURCES:
            made = f"{scratch}/{source.name}.o"
            compiler = [*cxx, *CXX, *fused] if source.suffix == ".cpp" else [*cc, *C]
            run_compiler([*compiler, *COMMON, "-c", str(source), "-o", made])
            objects.append(made)
        whole = f"{scratch}/whole.so"
        run_compiler([*cxx, "-shared", "-pthread", "-Wl,-z,defs", *objects, "-o", whole])
        os.replace(whole, target)  # another process may have compiled the same library meanwhile
    return target


def knows(kernel: str) -> bool:
    """Return whether the library contains this kernel."""
    return kernel.encode() + b"\0" in library().read_bytes()
