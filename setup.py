"""Builds zshard._core: C by cc, the ATen shim by c++, one link against the torch that is installed.

An object is remade when its command, its source or a header that it includes has changed: the shim
costs 20 s and a gigabyte. CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS as usual, and

    ZSHARD_DEBUG=1, ZSHARD_SANITIZE=1    other builds; their objects lie apart
    ZSHARD_WERROR=1    warnings are errors, as in CI: a newer compiler must not break users' builds
    ZSHARD_CUDA=1, 0   compile the CUDA kernels, which takes minutes, or not (tools/cuda_image.py)
    ZSHARD_LOCAL_VERSION=1    put torch into the version of a wheel: 0.1.0+torch2.13
"""

import importlib.util
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, "tools")
from cuda_image import compile_image

built = runpy.run_path("zshard/_built.py")
note_on, digest = built["note_on"], built["digest"]

VARIANTS = {
    "release": ["-O3", "-DNDEBUG"],
    "debug": ["-O0", "-g"],
    # -g1: lines are what a report needs; torch's headers with -g compile twice as long
    "sanitize": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
# Same bits on every machine: the compiler may vectorise, but not fuse a multiply with an add that
# the source keeps apart. (The last two let it vectorise sqrtf and casts, and change no value.)
COMMON = ["-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
COMMON += ["-fno-math-errno", "-fno-trapping-math"]
C = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow"]
C += ["-Werror"] * (os.environ.get("ZSHARD_WERROR") == "1")
C += ["-Wmissing-prototypes", "-Wstrict-prototypes"]  # a function is static or has a header
CXX = ["-std=c++20", "-Wall", "-Wextra"]
LIBS = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]


def find_torch():
    """(folder, version) of the installed torch; exits if there is none or it is too old."""
    fix = "pip install 'torch>=2.11', then pip install --no-build-isolation ."
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(f"error: zshard compiles against torch, which {sys.executable} lacks: {fix}")
    home = Path(spec.origin).parent
    version = runpy.run_path(str(home / "version.py"))["__version__"]
    if tuple(map(int, version.split(".")[:2])) < (2, 11):
        sys.exit(f"error: torch {version} in {home} is too old for zshard: {fix}")
    return home, version


def up_to_date(target, record, words, inputs):
    """Was `target` made by the command `words`, as `record` has it, after all inputs changed?"""
    try:
        newest = max(map(os.path.getmtime, inputs))
        return record.read_text() == words and newest < target.stat().st_mtime
    except FileNotFoundError:  # never made, or an input is gone
        return False


def make(target, command, inputs=(), place=""):
    """Makes `target` by `command` (without -o), of inputs and those that its compiler lists in a .d
    file, unless it is up to date. place: where it stands among all targets, as "[3/9] ". Raises
    CompileError."""
    words, record = shlex.join([*command, "-o", str(target)]), Path(f"{target}.cmd")
    listed = target.with_suffix(".d")
    text = listed.read_text().replace("\\\n", " ") if listed.exists() else ""
    if up_to_date(target, record, words, [*inputs, *shlex.split(text.partition(": ")[2])]):
        return
    print(f"{place}{command[0]} {target.stem}\n", end="", flush=True)  # one write: others print too
    done = subprocess.run(shlex.split(words), text=True, stdout=-1, stderr=subprocess.STDOUT)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise CompileError(f"exit status {done.returncode} from: {words}")
    record.write_text(words)


def recipes(torch, flags, env):
    """The commands that compile C and C++."""
    # With GNU's flag, at::parallel_for, a header, uses torch's threads. It is not linked: GNU's
    # calls find the OpenMP library that torch has loaded; other compilers' may not be in that.
    version = subprocess.run([*env["CXX"], "--version"], capture_output=True, text=True).stdout
    openmp = ["-fopenmp"] * ("Free Software Foundation" in version)
    paths = ["-iquotecsrc", "-isystem", sysconfig.get_path("include")]
    aten = [f"-isystem{torch}/include", f"-isystem{torch}/include/torch/csrc/api/include"]
    return {
        ".c": [*env["CC"], *C, *flags, *paths, *env["CFLAGS"]],
        ".cpp": [*env["CXX"], *CXX, *openmp, *flags, *paths, *aten, *env["CXXFLAGS"]],
    }


class BuildCore(build_ext):
    """Beside the extension stands what zshard/_build_check.py compares: the version of torch, and
    in place the digest of the sources, too."""

    def run(self):
        super().run()
        # Python finds the sources in the current folder before what pip installs: with the
        # extension in them too, a clone runs after a plain install.
        if "bdist_wheel" in sys.argv:
            self.copy_extensions_to_source()

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        note = note_on(self.get_ext_filename("zshard._core"))
        version = Path(self.build_lib, note).read_text()
        note.write_text(f"{version}{digest(Path())}\n")

    def build_extension(self, ext):
        torch, version = find_torch()
        on = [each for each in VARIANTS if os.environ.get(f"ZSHARD_{each.upper()}", "0") != "0"]
        on = on or ["release"]
        tags = ["objects", sysconfig.get_config_var("SOABI"), f"torch{version}", *on]
        folder = Path("build", "-".join(tags))
        folder.mkdir(parents=True, exist_ok=True)
        flags = sum((VARIANTS[name] for name in on), COMMON)
        tools = {"CC": "cc", "CXX": "c++", "CFLAGS": "", "CXXFLAGS": "", "LDFLAGS": ""}
        env = {name: shlex.split(os.environ.get(name, usual)) for name, usual in tools.items()}
        commands, image = recipes(torch, flags, env), compile_image(make)

        def compile_one(number, source):
            target = folder / f"{source.name}.o"
            inputs, facts = image if source.name == "cuda_image.c" else ([], [])
            listed = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source)]
            command = [*commands[source.suffix], *listed, *facts]
            make(target, command, [str(source), *inputs], f"[{number}/{total}] ")
            return str(target)

        # C++ with torch's headers first, so that no long compile is left to the end
        sources = sorted(map(Path, ext.sources), key=lambda path: path.suffix != ".cpp")
        total = len(sources) + 1
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, range(1, total), sources))
        where = [f"-L{torch}/lib", f"-Wl,-rpath,$ORIGIN/../torch/lib:{torch}/lib"]
        link = [*env["CXX"], "-shared", *flags, *objects, *LIBS, *where, *env["LDFLAGS"]]
        make(folder / "_core.so", link, objects, f"[{total}/{total}] ")
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        shutil.copy(folder / "_core.so", target)
        note_on(target).write_text(f"{version}\n")


if __name__ == "__main__":
    minor = ".".join(find_torch()[1].split(".")[:2])
    version = runpy.run_path("zshard/_version.py")["__version__"]
    # A wheel is for one minor version of torch, whose C++ interface changes with it. Only wheels of
    # zshard's own index have that in their version: pip expects the sdist's of what it builds.
    needs = "torch>=2.11" if "sdist" in sys.argv else f"torch=={minor}.*"
    local = f"+torch{minor}" if os.environ.get("ZSHARD_LOCAL_VERSION") == "1" else ""
    sources = sorted(Path("csrc").rglob("*.c*"))
    with tempfile.TemporaryDirectory() as scratch:  # not build/lib, which has what others built
        setup(
            version=version if "sdist" in sys.argv else f"{version}{local}",
            install_requires=[needs],
            ext_modules=[Extension("zshard._core", list(map(str, sources)))],
            cmdclass={"build_ext": BuildCore},
            options={"build": {"build_lib": scratch}},
        )
