"""Builds zshard._core: C by cc, the ATen shim by c++, one link against the torch that is installed.

The one idea: an object is remade when its command line, its source or a header that it includes
has changed, and never otherwise: the shim costs 20 s and a gigabyte, a C file under a second.
(setuptools' build_ext remakes all in sequence, with one set of flags; torch's compiles C as C++.)

ZSHARD_DEBUG=1 (-O0, assertions on), ZSHARD_SANITIZE=1 (ASan and UBSan, see `make sanitize`) and
ZSHARD_COVERAGE=1 (gcov) choose another build. Objects of each choice, Python and torch lie apart
under build/: switching costs a link. CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS as usual; they win.
"""

import fcntl
import importlib.util
import os
import runpy
import shlex
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

RELEASE = ["-O3", "-DNDEBUG"]
VARIANTS = {
    "debug": ["-O0", "-g"],
    "sanitize": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "coverage": ["-O0", "-g", "--coverage"],
}
# Same bits on every machine: the compiler may vectorise, but not fuse a multiply with an add that
# the source keeps apart. (The last two let it vectorise sqrtf and casts, and change no value.)
COMMON = ["-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
COMMON += ["-fno-math-errno", "-fno-trapping-math"]
C = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
CXX = ["-std=c++20", "-Wall", "-Wextra"]  # torch itself is C++20 from 2.12 on; 2.11 accepts it
TORCH_LIBS = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]


def find_torch():
    """(folder, version) of the installed torch; SetupError if there is none or it is too old."""
    fix = "pip install 'torch>=2.11', then pip install --no-build-isolation zshard (or .)"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SetupError(f"zshard is built against the torch it will run with; none here. {fix}")
    home = Path(spec.origin).parent
    version = runpy.run_path(str(home / "version.py"))["__version__"]
    if tuple(map(int, version.split(".")[:2])) < (2, 11):
        raise SetupError(f"torch {version} in {home} is too old for zshard. {fix}")
    return home, version


def threads_flag(compiler):
    """What lets at::parallel_for, a header, use torch's threads; without, it silently runs on one.

    Only compiled with it, not linked: GNU's calls find the OpenMP library that torch has loaded. A
    second one would have threads of its own. Other compilers call functions that it may not have.
    """
    said = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return ["-fopenmp"] if "Free Software Foundation" in said.stdout else []


def up_to_date(target, record, words, inputs):
    """Was `target` made by the command `words`, as `record` has it, after all `inputs` changed?"""
    try:
        newest = max(Path(name).stat().st_mtime_ns for name in inputs)
        return record.read_text() == words and newest < target.stat().st_mtime_ns
    except FileNotFoundError:  # never made, or an input is gone
        return False


def make(target, command, inputs):
    """Makes `target` by `command` (without -o) unless it is up to date; CompileError on failure."""
    words = shlex.join([*command, "-o", str(target)])
    record = target.with_name(f"{target.name}.cmd")
    if up_to_date(target, record, words, inputs):
        return
    print(f"{command[0]} {target.stem}\n", end="", flush=True)  # one write: others print too
    started = time.time_ns()
    done = subprocess.run(shlex.split(words), text=True, stdout=-1, stderr=subprocess.STDOUT)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise CompileError(f"exit status {done.returncode} from: {words}")
    os.utime(target, ns=(started, started))  # an input edited while the compiler ran is newer
    record.write_text(words)


class BuildCore(build_ext):
    """Compiles each source by the recipe for its suffix, in parallel, and links the objects."""

    def build_extension(self, ext):
        torch, version = find_torch()
        on = [name for name in VARIANTS if os.environ.get(f"ZSHARD_{name.upper()}", "0") != "0"]
        tags = [sysconfig.get_config_var("SOABI"), f"torch{version}", *(on or ["release"])]
        folder = Path("build", "-".join(["objects", *tags]))
        folder.mkdir(parents=True, exist_ok=True)
        flags = COMMON + (RELEASE if not on else [word for name in on for word in VARIANTS[name]])
        tools = {"CC": "cc", "CXX": "c++", "CFLAGS": "", "CXXFLAGS": "", "LDFLAGS": ""}
        env = {name: shlex.split(os.environ.get(name, usual)) for name, usual in tools.items()}
        threads = threads_flag(env["CXX"])
        python = ["-isystem", sysconfig.get_path("include")]
        aten = [f"-isystem{torch}/include", f"-isystem{torch}/include/torch/csrc/api/include"]
        recipes = {
            ".c": [*env["CC"], *C, *flags, *python, *env["CFLAGS"]],
            ".cpp": [*env["CXX"], *CXX, *threads, *flags, *python, *aten, *env["CXXFLAGS"]],
        }

        def compile_one(source):
            target, deps = folder / f"{source.name}.o", folder / f"{source.name}.d"
            known = deps.read_text().replace("\\\n", " ") if deps.exists() else f": {deps}"
            command = [*recipes[source.suffix], "-MMD", "-MF", str(deps), "-c", str(source)]
            make(target, command, shlex.split(known)[1:])
            return str(target)

        with (folder / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second `make` in another terminal waits
            sources = sorted(map(Path, ext.sources), key=lambda path: path.suffix != ".cpp")
            objects = list(pool.map(compile_one, sources))  # the slow ones start first
            where = [f"-L{torch}/lib", f"-Wl,-rpath,$ORIGIN/../torch/lib:{torch}/lib"]
            link = [*env["CXX"], "-shared", *flags, *objects, *TORCH_LIBS, *where, *env["LDFLAGS"]]
            make(folder / "_core.so", link, objects)
            target = self.get_ext_fullpath(ext.name)
            self.mkpath(str(Path(target).parent))
            self.force = True  # copy over a newer file too: it may be another variant
            self.copy_file(str(folder / "_core.so"), target)


if __name__ == "__main__":
    found = sorted(str(path) for path in Path("csrc").iterdir() if path.suffix in (".c", ".cpp"))
    setup(ext_modules=[Extension("zshard._core", found)], cmdclass={"build_ext": BuildCore})
