"""The build with AddressSanitizer and UndefinedBehaviorSanitizer, and how Python runs with it.

    python tests/lib/sanitized.py -m pytest $PWD/tests/files/test_files.py       # as `make sanitize` does
    python tests/lib/sanitized.py --fuzzing $PWD/tests/checkpoint/fuzz_checkpoint.py  # as `make fuzz` does

The sanitized package is in build/sanitize and found through PYTHONPATH, so the usual build stays
unchanged. Python is not sanitized, so the runtime is preloaded; while fuzzing, its small objects
come from malloc, so that accesses behind each of them are detected.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys

from c_compile import BUILDS, ROOT, C, compile_c

SANITIZED = ROOT / "build" / "sanitize"


def compilers_file(compiler: str, name: str) -> str:
    """Return the path of one of the compiler's own libraries; FileNotFoundError if it has none."""
    words = [*shlex.split(compiler), f"-print-file-name={name}"]
    path = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        raise FileNotFoundError(f"{compiler} has no {name}, which sanitized programs need: use gcc")
    return path


def build() -> dict[str, str]:
    """Build the sanitized package, which takes minutes the first time; return the environment
    variables for Python. FileNotFoundError without a runtime, RuntimeError with the compiler's
    output."""
    # libstdc++ too: the runtime wraps its throw.
    runtime = [compilers_file("cc", "libasan.so"), compilers_file("c++", "libstdc++.so.6")]
    words = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(SANITIZED)]
    env = {**os.environ, "ZSHARD_SANITIZE": "1"}
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "sanitize.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test worker may be building
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
    asked = os.environ.get("ASAN_OPTIONS", "")
    return {
        "ZSHARD_SANITIZE": "1",
        "PYTHONPATH": str(SANITIZED),
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": f"detect_leaks=0:{asked}",  # Python and torch keep much until the process ends
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def build_to_fuzz() -> dict[str, str]:
    """The same for a fuzzer, atheris, whose libFuzzer then receives the coverage."""
    env = build()
    library = SANITIZED / "coverage_to_libfuzzer.so"
    made = library.with_suffix(f".{os.getpid()}")  # another process may be fuzzing with the old one
    compile_c(made, [C / "coverage_to_libfuzzer.c"], BUILDS["release"], ("-shared", "-ldl"))
    made.replace(library)
    return {
        **env,
        "LD_PRELOAD": f"{library} {env['LD_PRELOAD']}",
        # Freed memory is kept for a while, to detect uses: little enough that libFuzzer does not
        # complain.
        "ASAN_OPTIONS": f"verify_asan_link_order=0:quarantine_size_mb=64:{env['ASAN_OPTIONS']}",
        "UBSAN_OPTIONS": f"abort_on_error=1:{env['UBSAN_OPTIONS']}",  # libFuzzer keeps the input then
        "PYTHONMALLOC": "malloc",
    }


def main() -> None:
    """Become Python with these arguments, in build/sanitize: elsewhere -m would find the usual
    build."""
    fuzzing = sys.argv[1:2] == ["--fuzzing"]
    env = build_to_fuzz() if fuzzing else build()
    os.chdir(SANITIZED)
    os.execve(sys.executable, [sys.executable, *sys.argv[1 + fuzzing :]], {**os.environ, **env})


if __name__ == "__main__":
    main()
