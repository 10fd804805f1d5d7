"""Builds zshard._core: C by cc, the ATen shim by c++, one link against the torch that is installed.

An object is remade when its command line, its source or a header that it includes
has changed, and never otherwise: the shim costs 20 s and a gigabyte, a C file under a second.
(setuptools' build_ext remakes all in sequence, with one set of flags; torch's compiles C as C++.)

ZSHARD_DEBUG=1 (-O0, assertions on), ZSHARD_SANITIZE=1 (ASan and UBSan, see `make sanitize`) and
ZSHARD_COVERAGE=1 (gcov) choose another build. Objects of each choice, Python and torch lie apart
under build/: switching costs a link. With ZSHARD_WERROR=1, as in CI, warnings are errors (a newer
compiler's must not break users' builds). CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS as usual; they win.

CUDA kernels (cuda/) take nvcc a minute or two, so they are compiled only where they are wanted:

    ZSHARD_CUDA=1    compile them; an error where there is no nvcc
    ZSHARD_CUDA=0    leave them out
    not set          as the last build in this folder did; without one, if nvcc and a GPU are found

`make build CUDA=1` sets ZSHARD_CUDA=1. nvcc is looked for in CUDA_HOME, CUDA_PATH, PATH and
/usr/local/cuda. The kernels are one image that _core carries as bytes: nothing links CUDA, and the
rest of the build is the same. build/cuda/choice keeps the choice until `make clean`.
"""

import fcntl
import filecmp
import glob
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, SetupError

RELEASE = ["-O3", "-DNDEBUG"]
VARIANTS = {
    "debug": ["-O0", "-g"],
    # Lines are what a report needs; torch's headers with all of -g compile twice as long.
    "sanitize": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "coverage": ["-O0", "-g", "--coverage"],
}
# Same bits on every machine: the compiler may vectorise, but not fuse a multiply with an add that
# the source keeps apart. (The last two let it vectorise sqrtf and casts, and change no value.)
COMMON = ["-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
COMMON += ["-fno-math-errno", "-fno-trapping-math"]
STRICT = os.environ.get("ZSHARD_WERROR") == "1"
C = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", *["-Werror"] * STRICT]
# A function is static or has a header.
C += ["-Wmissing-prototypes", "-Wstrict-prototypes"]
CXX = ["-std=c++20", "-Wall", "-Wextra"]  # torch itself is C++20 from 2.12 on; 2.11 accepts it
# IEEE arithmetic as the C loops have it: no fused multiply-adds but those that are written out.
NVCC = ["-std=c++17", "-O3", "-fmad=false", "--threads=0", *["-Werror", "all-warnings"] * STRICT]
NVCC += ["-Wno-deprecated-gpu-targets"]  # a later nvcc will say that of sm_80
GPUS = ("80", "90", "100")  # compute capabilities; later ones run the PTX for the first
GPU_FILES = (  # one of them exists where NVIDIA's driver has a GPU
    "/dev/nvidiactl",  # a host, or a container that was given a GPU
    "/proc/driver/nvidia/gpus/*",  # a host where nothing has opened the GPU since it booted
    "/usr/lib/wsl/lib/libcuda.so.1",  # WSL 2
)
KERNELS = Path("cuda", "kernels.cu")
IMAGES = Path("build", "cuda")
HOW_TO_GET_CUDA = "`make build CUDA=1` or `ZSHARD_CUDA=1 pip install --no-build-isolation .`"
CSRC = Path("csrc")
NOTE = "_built_with.py"
BUILT_WITH = '''"""The torch that this build of zshard was compiled against. Written by setup.py."""

TORCH = "{version}"
'''
TORCH_LIBS = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]


def find_torch():
    """(folder, version) of the installed torch; SetupError if there is none or it is too old."""
    fix = "pip install 'torch>=2.11', then pip install --no-build-isolation ."
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SetupError(f"zshard compiles against torch, which {sys.executable} lacks: {fix}")
    home = Path(spec.origin).parent
    version = runpy.run_path(str(home / "version.py"))["__version__"]
    if tuple(map(int, version.split(".")[:2])) < (2, 11):
        raise SetupError(f"torch {version} in {home} is too old for zshard: {fix}")
    return home, version


def required_torch():
    """What an installed zshard requires: the torch it is built with, up to its patch version.

    Torch's C++ interface changes between minor versions (zshard/_torch_check.py).
    """
    try:
        major, minor = find_torch()[1].split(".")[:2]
    except SetupError as error:
        sys.exit(f"error: {error}")  # not yet within setup(), which would print it like this
    return f"torch=={major}.{minor}.*"


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
    """Makes `target` by `command` (without -o) unless it is up to date: was it made?

    CompileError on failure.
    """
    words = shlex.join([*command, "-o", str(target)])
    record = target.with_name(f"{target.name}.cmd")
    if up_to_date(target, record, words, inputs):
        return False
    line = f"{command[0]} {target.stem}"
    # One write, as others print too. A terminal shows the newest line only.
    print(f"\r\033[K{line}" if sys.stdout.isatty() else f"{line}\n", end="", flush=True)
    started = time.time_ns()
    done = subprocess.run(shlex.split(words), text=True, stdout=-1, stderr=subprocess.STDOUT)
    if done.stdout:
        print(f"\r\033[K{done.stdout}" if sys.stdout.isatty() else done.stdout, end="", flush=True)
    if done.returncode:
        raise CompileError(f"exit status {done.returncode} from: {words}")
    os.utime(target, ns=(started, started))  # an input edited while the compiler ran is newer
    record.write_text(words)
    return True


def find_nvcc():
    """The path of nvcc; None if there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [f"{home}/bin/nvcc" for home in homes if home]
    found = map(shutil.which, [*places, "nvcc", "/usr/local/cuda/bin/nvcc"])
    return next(filter(None, found), None)


def find_gpu():
    """Is there an NVIDIA GPU? Asked of files, as drivers may take seconds to answer."""
    return any(glob.glob(pattern) for pattern in GPU_FILES)


def choose_cuda():
    """(nvcc's path, "") to compile the kernels; (None, why not) to leave them out."""
    wanted, kept = os.environ.get("ZSHARD_CUDA", ""), IMAGES / "choice"
    nvcc, built = find_nvcc(), (IMAGES / "kernels.fatbin").exists()
    if wanted:
        why = "ZSHARD_CUDA=0"
    elif kept.exists():
        wanted, why = kept.read_text().strip(), f"ZSHARD_CUDA=0 earlier, see {kept}"
    elif built:  # a GPU that has gone does not take the kernels along
        wanted, why = "1", ""
    else:
        wanted = "1" if nvcc and find_gpu() else "0"
        why = "no GPU was found" if nvcc else "no nvcc was found"
    if wanted == "0":
        return None, why
    if nvcc is None:
        asked = "ZSHARD_CUDA=1" if os.environ.get("ZSHARD_CUDA") else "this folder's last build"
        raise SetupError(
            f"{asked} compiles CUDA kernels, but nvcc was not found: set CUDA_HOME, or build "
            "without them (`make build CUDA=0`, or ZSHARD_CUDA=0)"
        )
    return nvcc, ""


def keep_choice():
    """Builds that say nothing about CUDA do as this one, which said it."""
    wanted = os.environ.get("ZSHARD_CUDA", "")
    if wanted:
        IMAGES.mkdir(parents=True, exist_ok=True)
        (IMAGES / "choice").write_text("0\n" if wanted == "0" else "1\n")


def ask(*command):
    """What a tool says about itself."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make_image(nvcc, source, folder):
    """Compiles the kernels; the image's path, and the flags that tell cuda_image.c about it."""
    known = set(re.findall(r"sm_(\d+)\b", ask(nvcc, "--list-gpu-code")))
    gpus = [gpu for gpu in GPUS if gpu in known]
    if not gpus:
        raise SetupError(f"{nvcc} supports none of {GPUS}; ZSHARD_CUDA=0 builds without CUDA")
    major, minor = map(int, re.search(r"release (\d+)\.(\d+)", ask(nvcc, "--version")).groups())
    codes = [f"arch=compute_{gpu},code=sm_{gpu}" for gpu in gpus]
    codes += [f"arch=compute_{gpus[0]},code=compute_{gpus[0]}"]
    command = [nvcc, *NVCC, f"-I{CSRC}"]
    command += [word for code in codes for word in ("-gencode", code)]
    if "--compress-mode" in ask(nvcc, "--help"):
        command.append("--compress-mode=size")
    folder.mkdir(parents=True, exist_ok=True)
    target, deps = folder / "kernels.fatbin", folder / "kernels.d"
    if not target.exists() and len(gpus) < len(GPUS):
        left = ", ".join(f"sm_{gpu}" for gpu in GPUS if gpu not in gpus)
        print(f"note: {nvcc} does not support {left}: left out", flush=True)
    command += ["-MMD", "-MF", str(deps), "-fatbin", str(source)]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the folder is for all variants of the build
        try:
            make(target, command, inputs_in(deps))
        except CompileError as error:
            raise CompileError(f"{error}\nZSHARD_CUDA=0 builds without CUDA") from None
    targets = " ".join([*(f"sm_{gpu}" for gpu in gpus), f"compute_{gpus[0]}"])
    facts = {
        "FATBIN": f'"{target}"',
        "TARGETS": f'"{targets}"',
        "VERSION": 1000 * major + 10 * minor,
    }
    return target, [f"-DZS_CUDA_{name}={value}" for name, value in facts.items()]


def inputs_in(deps):
    """The files that a compiler has listed; the list itself, which is not there, if it has not."""
    known = deps.read_text().replace("\\\n", " ") if deps.exists() else f": {deps}"
    return shlex.split(known.partition(": ")[2])


def put(made, target):
    """`target` becomes a copy of `made`, at once: it may be in use, or another variant."""
    if not (target.exists() and filecmp.cmp(made, target, shallow=False)):
        copy = target.with_suffix(".new")
        shutil.copy(made, copy)
        copy.replace(target)


def cores():
    """How many cores this process may use: fewer than the machine has, in many containers."""
    return len(os.sched_getaffinity(0))


def slowest_first(source):
    """Sorts sources so that no long compile is left to the end: C++ with torch's headers first."""
    return source.suffix != ".cpp", -source.stat().st_size


class BuildModules(build_py):
    """Copies the Python files, and removes modules that an earlier build in this folder had."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        present = {Path(name) for name in self.get_outputs(include_bytecode=False)}
        for path in Path(self.build_lib).rglob("*.py*"):
            if path not in present and path.name != NOTE:
                path.unlink()


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
        ours = [f"-iquote{CSRC}"]  # an include names its folder: "unit/unit.h"
        python = ["-isystem", sysconfig.get_path("include")]
        aten = [f"-isystem{torch}/include", f"-isystem{torch}/include/torch/csrc/api/include"]
        recipes = {
            ".c": [*env["CC"], *C, *flags, *ours, *python, *env["CFLAGS"]],
            ".cpp": [*env["CXX"], *CXX, *threads, *flags, *ours, *python, *aten, *env["CXXFLAGS"]],
        }

        def compile_one(source):
            target, deps = folder / f"{source.name}.o", folder / f"{source.name}.d"
            command = [*recipes[source.suffix], "-MMD", "-MF", str(deps), "-c", str(source)]
            inputs = inputs_in(deps)
            if source.name == "cuda_image.c" and image is not None:
                fatbin, facts = image.result()
                command, inputs = command + facts, [*inputs, str(fatbin)]
            make(target, command, inputs)
            return str(target)

        with (folder / "lock").open("w") as lock, ThreadPoolExecutor(cores()) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second `make` in another terminal waits
            nvcc, why_not = choose_cuda() if KERNELS.exists() else (None, "")
            image = None  # begun first, so that it is under way when cuda_image.c asks for it
            if nvcc:
                image = pool.submit(make_image, nvcc, KERNELS, IMAGES)
            sources = sorted(map(Path, ext.sources), key=slowest_first)
            objects = list(pool.map(compile_one, sources))
            where = [f"-L{torch}/lib", f"-Wl,-rpath,$ORIGIN/../torch/lib:{torch}/lib"]
            link = [*env["CXX"], "-shared", *flags, *objects, *TORCH_LIBS, *where, *env["LDFLAGS"]]
            linked = make(folder / "_core.so", link, objects)
            if linked and sys.stdout.isatty():
                print("\r\033[K", end="")
            if linked and why_not:
                print(f"CUDA kernels left out: {why_not}. To get them: {HOW_TO_GET_CUDA}")
            keep_choice()
            target = self.get_ext_fullpath(ext.name)
            self.mkpath(str(Path(target).parent))
            put(folder / "_core.so", Path(target))
            note = folder / NOTE
            note.write_text(BUILT_WITH.format(version=version))
            put(note, Path(target).with_name(NOTE))

    def copy_extensions_to_source(self):
        """Copies what was built to where the sources are, for builds in place."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name)).with_name(NOTE)
            put(built, Path(*ext.name.split(".")[:-1], NOTE))


if __name__ == "__main__":
    found = sorted(str(path) for path in CSRC.rglob("*") if path.suffix in (".c", ".cpp"))
    setup(
        ext_modules=[Extension("zshard._core", found)],
        cmdclass={"build_py": BuildModules, "build_ext": BuildCore},
        install_requires=[required_torch()],
    )
