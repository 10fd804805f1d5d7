"""The compiler, for tests that build programs and libraries of csrc/ and tests/c/.

    compile_c(target, [PROGRAM, *sources("status.c", "shm*.c")], BUILDS["sanitized"])

An object's name is a digest of all that goes into it, and the object stays under build/, so a file
that several programs need is compiled once per build, whichever test, process or run comes first.
`python tests/lib/c_compile.py` compiles what most need on all cores, before the tests (`make test`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from c_sources import HEADERS, INCLUDES, SHM, TURNS, sources

ROOT = Path(__file__).resolve().parents[2]
C = ROOT / "tests" / "c"
NO_LOOPS = C / "no_loops.c"
OBJECTS = ROOT / "build" / "tests"
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-pthread"]
STRICT += ["-Wmissing-prototypes", "-Wstrict-prototypes"]
ARITHMETIC = ["-fno-math-errno", "-ffp-contract=off"]  # the extension's
BUILDS = {
    "release": ["-O3"],
    "plain": ["-O1"],  # a sixth of the time
    "sanitized": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    # Detects races between the threads of one process, not between processes.
    "threads": ["-O1", "-g1", "-fsanitize=thread"],
}


def compile_c(
    target: Path, sources: list[Path], flags: list[str], link: tuple[str, ...] = ("-ldl", "-lm")
) -> Path:
    """Compile `sources` as strictly as the extension and link them to `target`: a program or, with
    "-shared" in `link`, a library. Return `target`. Objects among the sources are only linked."""
    objects = [path if path.suffix == ".o" else _object(path, flags) for path in sources]
    run_compiler([*_compiler(), "-pthread", *flags, *map(str, objects), *link, "-o", str(target)])
    return target


def program_environment(**more: str) -> dict[str, str]:
    """Return the variables for running a compiled program: this process's, and `more`."""
    env = {**os.environ, **more}
    env.pop("LD_PRELOAD", None)  # a sanitized program stops under another runtime (`make sanitize`)
    # Without use_tls, since it crashes on the thread-locals of libraries that are loaded late.
    env["LSAN_OPTIONS"] = f"suppressions={C / 'not_leaks.txt'}:print_suppressions=0:use_tls=0"
    return env


def skip_without_thread_sanitizer() -> None:
    """Some kernels assign addresses that gcc's runtime does not support."""
    if not _thread_sanitizer_runs():
        pytest.skip("gcc's thread sanitizer does not run on this kernel")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


def _object(source: Path, flags: list[str]) -> Path:
    """Return the object of `source`; compile it if necessary."""
    command = [*_compiler(), *STRICT, *ARITHMETIC, "-fPIC", *flags, *INCLUDES, "-c"]
    words = "\0".join(command).encode()
    key = hashlib.sha256(words + _headers() + source.read_bytes()).hexdigest()[:24]
    made = OBJECTS / f"{source.stem}-{key}.o"
    # Sources outside the repository may include files whose changes are not detected.
    if not (made.exists() and source.is_relative_to(ROOT)):
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OBJECTS) as scratch:
            run_compiler([*command, str(source), "-o", f"{scratch}/made.o"])
            os.replace(f"{scratch}/made.o", made)  # another process may have compiled the same
    return made


@functools.cache
def _headers() -> bytes:
    """Return a digest of all files that a source may include, also in the assembler."""
    digest = hashlib.sha256()
    for path in (*HEADERS, *sorted(C.glob("*.h*")), *sorted((ROOT / "cuda").iterdir())):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _thread_sanitizer_runs() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source, probe = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text("int main(void) { return 0; }\n")
        command = [*_compiler(), "-fsanitize=thread", str(source), "-o", str(probe)]
        done = subprocess.run(command, capture_output=True)
        return done.returncode == 0 and subprocess.run([str(probe)]).returncode == 0


def compile_all() -> None:
    """Compile what takes longest, and what several programs are made of; a test says what does not
    compile."""
    cuda = sources("cuda_driver.c", "cuda_kernels.c", "cuda_update.c", "device_cpu.c", "simd.c")
    cuda += [C / "serial_parallel_for.c", C / "test_cuda_driver.c"]
    more = sources(
        "c10d_*.c", "comm_c10d.c", "nccl_*.c", "layout.c", "arena.c", "traffic.c", *TURNS
    )
    several = {
        "plain": [
            *cuda,
            *sources("optim_cpu.c", "optim_compact.c", "optim_lanes.c", "memory.c", "status.c"),
        ],
        "sanitized": [*cuda, *C.glob("test_*.c"), NO_LOOPS, *sources(*SHM), *more],
    }
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        for build, files in several.items():
            for source in files:
                cores.submit(_object, source, BUILDS[build])


if __name__ == "__main__":
    compile_all()
