"""The build: what the extension exports and links, and what setup.py remakes when.

What setup.py does is tried on a copy of it with a small project: three C files and a C++ file that
includes nothing of torch, so that a whole build takes a second.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from c_sources import DEFINED, release_objects, source, symbols, symbols_by_source

from zshard._built import digest, note_on

ROOT = Path(__file__).resolve().parents[2]

PROJECT = {
    "zshard/__init__.py": "",
    "csrc/base/answer.h": "int zs_answer(void);\nint zs_plus(int a);\n",
    "csrc/base/answer.c": '#include "base/answer.h"\nint zs_answer(void) { return zs_plus(41); }\n',
    "csrc/base/lone/alone.c": "int zs_alone(void);\nint zs_alone(void) { return 0; }\n",
    "csrc/shim/plus.cpp": 'extern "C" {\n#include "base/answer.h"\nint zs_plus(int a) { return a + 1; }\n}\n',
    "csrc/python/py_module.c": """\
#include <Python.h>
#include "base/answer.h"
static PyObject *answer(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    return PyLong_FromLong(zs_answer());
}
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_core", .m_methods = methods};
PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }
""",
}


# Would change the builds below; `make sanitize` sets some of them.
FLAGS = {"CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "LD_PRELOAD", "PYTHONPATH"} | {
    *(f"ZSHARD_{variant}" for variant in ("DEBUG", "SANITIZE", "CUDA", "WERROR", "LOCAL_VERSION")),
    *("CUDA", "CUDA_HOME", "CUDA_PATH"),
}


class Project:
    """A copy of setup.py and pyproject.toml with the sources above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in PROJECT.items():
            self.write(name, text)
        for name in ("setup.py", "pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        (folder / "tools").mkdir()
        for name in ("build_backend.py", "cuda_image.py"):
            shutil.copy(ROOT / "tools" / name, folder / "tools")
        for name in ("zshard/_version.py", "zshard/_built.py"):
            self.write(name, (ROOT / name).read_text())
        self.write("README.md", "A project for tests.\n")

    def write(self, name: str, text: str) -> None:
        """Makes or replaces a file; with another text, or it would not count as an edit."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs Python with `words` in the project's folder."""
        plain = {name: value for name, value in os.environ.items() if name not in FLAGS}
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**plain, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def build(self, **env: str) -> set[str]:
        """Builds in place; returns what was remade."""
        done = self.run("setup.py", "-q", "build_ext", "--inplace", **env)
        assert done.returncode == 0, done.stdout
        made = [line.split() for line in done.stdout.splitlines()]
        return {words[-1] for words in made if words[1:2] in (["cc"], ["c++"])}

    def answer(self) -> str:
        """What the built extension answers, in a process of its own."""
        return self.run("-c", "import zshard._core as c; print(c.answer())").stdout.strip()


EVERYTHING = {"answer.c", "alone.c", "plus.cpp", "py_module.c", "_core"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_only_changed_files_are_rebuilt(project: Project) -> None:
    assert project.build() == EVERYTHING
    assert project.answer() == "42"
    assert project.build() == set()
    project.write("csrc/base/answer.c", PROJECT["csrc/base/answer.c"].replace("41", "42"))
    assert project.build() == {"answer.c", "_core"}
    assert project.answer() == "43"
    project.write("csrc/base/answer.h", PROJECT["csrc/base/answer.h"] + "/* edited */\n")
    assert project.build() == {"answer.c", "plus.cpp", "py_module.c", "_core"}
    assert project.build(CXXFLAGS="-DEDITED") == {"plus.cpp", "_core"}
    assert project.build(LDFLAGS="-s") == {"plus.cpp", "_core"}


def test_wheel_leaves_the_extension_in_the_clone(project: Project) -> None:
    """Python finds the sources before the installed package, so a plain install builds them, too."""
    done = project.run("setup.py", "-q", "bdist_wheel")
    assert done.returncode == 0, done.stdout
    assert project.answer() == "42"
    note = note_on(project.folder / f"zshard/_core{sysconfig.get_config_var('EXT_SUFFIX')}")
    assert note.read_text().split() == [torch.__version__, digest(project.folder)]
    done = project.run("setup.py", "-q", "build", "--build-lib", "apart")  # of no package: apart
    (apart,) = project.folder.glob("apart/zshard/*.built")
    assert apart.read_text().split() == [torch.__version__]
    before = digest(project.folder)
    project.write("csrc/base/answer.h", PROJECT["csrc/base/answer.h"] + "/* edited */\n")
    assert digest(project.folder) != before


@pytest.mark.thorough
def test_failed_compile_names_the_command_and_is_retried(project: Project) -> None:
    project.build()
    project.write(
        "csrc/base/lone/alone.c", "int zs_alone(void);\nint zs_alone(void) { return unknown; }\n"
    )
    for _ in range(2):
        done = project.run("setup.py", "-q", "build_ext", "--inplace")
        assert done.returncode == 1
        assert "csrc/base/lone/alone.c:2" in done.stdout and "unknown" in done.stdout
        assert "-Wextra" in done.stdout and "Traceback" not in done.stdout
    project.write("csrc/base/lone/alone.c", PROJECT["csrc/base/lone/alone.c"])
    assert project.build() == {"alone.c", "_core"}
    assert project.build(ZSHARD_DEBUG="1") == EVERYTHING
    assert project.build(ZSHARD_DEBUG="0") == set() and project.answer() == "42"
    project.write("csrc/base/lone/alone.c", "int zs_alone(void) { return 0; }\n")
    done = project.run("setup.py", "-q", "build_ext", "--inplace", ZSHARD_WERROR="1")
    assert done.returncode == 1 and "-Werror=missing-prototypes" in done.stdout


def test_missing_or_old_torch_is_refused(project: Project) -> None:
    project.write("torch/__init__.py", "raise SystemExit('the build must not import torch')\n")
    script = "import runpy, sys; sys.modules['torch'] = None\n"
    script += "sys.argv[0] = 'setup.py'; sys.path.insert(0, '')\n"
    script += "print('torch', runpy.run_path('setup.py')['find_torch']()[1])\n"
    there = script.replace("sys.modules['torch'] = None", "pass")
    for code, version, text in (
        (script, "2.11.0", f"which {sys.executable} lacks"),
        (there, "2.9.1+cu128", "torch 2.9.1+cu128"),
        (there, "2.11.0a0+git1", "torch 2.11.0a0+git1"),
    ):
        project.write("torch/version.py", f"__version__ = {version!r}\n")
        done = project.run("-c", code)
        assert text in done.stdout and done.returncode == int(not version.startswith("2.11.0a"))
        assert ("pip install 'torch>=2.11'" in done.stdout) is bool(done.returncode)


# --- CUDA ----------------------------------------------------------------------------------------

# As nvcc where setup.py asks it something; its image says what it was told to compile.
NVCC = """#!/bin/sh
case "$*" in
--list-gpu-code) echo sm_75 sm_80 sm_90 ;;
--version) echo 'Cuda compilation tools, release 12.6, V12.6.20' ;;
--help) echo ' --compress-mode ' ;;
*)
    if grep -q broken cuda/kernels.cu; then echo 'kernels.cu(1): error: broken'; exit 2; fi
    while [ $# -gt 1 ]; do
        case $1 in -o) target=$2 ;; -MF) deps=$2 ;; -gencode) codes="$codes$2;" ;; esac
        last=$1; shift
    done
    echo "an image for $codes of" $(cat cuda/one.cuh) > "$target"
    printf '%s : cuda/kernels.cu \\\\\n    cuda/one.cuh \\n' "$target" > "$deps" ;;
esac
"""


@pytest.fixture
def cuda_project(project: Project) -> Project:
    """The project with kernels, and an nvcc that CUDA_HOME finds."""
    for name in ("cuda_image.c", "cuda_image.h"):
        project.write(f"csrc/device/{name}", source(name).read_text())
    text = PROJECT["csrc/python/py_module.c"].replace("PyLong_FromLong(zs_answer())", "told()")
    told = """#include "device/cuda_image.h"
static PyObject *told(void)
{
    const char *image = zs_cuda_image();
    return Py_BuildValue("(y#si)", image, (Py_ssize_t)zs_cuda_image_bytes(),
                         zs_cuda_image_targets(), zs_cuda_image_version());
}
static PyObject *answer"""
    text = "#define PY_SSIZE_T_CLEAN\n" + text.replace("static PyObject *answer", told, 1)
    project.write("csrc/python/py_module.c", text)
    project.write("cuda/kernels.cu", "kernels\n")
    project.write("cuda/one.cuh", "one\n")
    (project.folder / "cuda-home" / "bin").mkdir(parents=True)
    project.write("cuda-home/bin/nvcc", NVCC)
    (project.folder / "cuda-home" / "bin" / "nvcc").chmod(0o755)
    return project


def home_of(project: Project) -> dict[str, str]:
    """Where the project's nvcc is, and the wish for its kernels."""
    return {"CUDA_HOME": str(project.folder / "cuda-home"), "ZSHARD_CUDA": "1"}


@pytest.mark.thorough
def test_kernels_are_compiled_into_the_extension(cuda_project: Project) -> None:
    home = home_of(cuda_project)
    done = cuda_project.run("setup.py", "-q", "build_ext", "--inplace", **home)
    assert done.returncode == 0, done.stdout
    codes = "arch=compute_80,code=sm_80;arch=compute_90,code=sm_90;"
    image = f"an image for {codes}arch=compute_80,code=compute_80; of one\\n"
    assert cuda_project.answer() == f"(b'{image}', 'sm_80 sm_90 compute_80', 12060)"
    assert cuda_project.build(**home) == set()
    cuda_project.write("cuda/one.cuh", "two\n")
    assert cuda_project.build(**home) == {"cuda_image.c", "_core"}
    assert "of two" in cuda_project.answer()
    assert "nvcc kernels" in done.stdout
    done = cuda_project.run("setup.py", "-q", "build_ext", "--inplace", **home, ZSHARD_DEBUG="1")
    assert "cc cuda_image.c" in done.stdout and "nvcc" not in done.stdout  # one image for all
    cuda_project.build(**home)
    for _ in range(2):
        assert cuda_project.build(**{**home, "ZSHARD_CUDA": "0"}) == {"cuda_image.c", "_core"}
        assert cuda_project.answer() == "(None, '', 0)"
        assert cuda_project.build(**home) == {"cuda_image.c", "_core"}
    cuda_project.write("cuda/kernels.cu", "broken\n")
    done = cuda_project.run("setup.py", "-q", "build_ext", "--inplace", **home)
    assert done.returncode == 1 and "kernels.cu(1): error: broken" in done.stdout
    assert "ZSHARD_CUDA=0 builds without CUDA" in done.stdout and "Traceback" not in done.stdout


CHOOSE = """
import sys
sys.path.insert(0, "tools")
import cuda_image
cuda_image.GPU_FILES = ({files!r},)
cuda_image.shutil.which = lambda name, path: {nvcc!r}
print(cuda_image.find_nvcc())
"""


def test_kernels_are_compiled_where_they_are_wanted(cuda_project: Project) -> None:
    for wish, nvcc, gpu, chosen in (
        ("", "/nvcc", True, "/nvcc"),
        ("", "/nvcc", False, "None"),
        ("", None, True, "None"),
        ("1", "/nvcc", False, "/nvcc"),
        ("1", None, True, "ZSHARD_CUDA=1 compiles CUDA kernels, but nvcc was not found"),
        ("0", "/nvcc", True, "None"),
    ):
        files = str(cuda_project.folder / ("setup.py" if gpu else "no-gpu"))
        done = cuda_project.run("-c", CHOOSE.format(files=files, nvcc=nvcc), ZSHARD_CUDA=wish)
        assert chosen in done.stdout and done.returncode == int("not found" in chosen)


def test_make_maps_cuda_to_the_builds_variable(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(
        f"include {ROOT / 'Makefile'}\nsaid: ; @echo is=$$ZSHARD_CUDA=\n"
    )

    def said(*words: str, **env: str) -> str:
        plain = {name: value for name, value in os.environ.items() if name not in FLAGS}
        plain = {name: value for name, value in plain.items() if not name.startswith("MAKE")}
        command = ["make", "-s", "-C", str(tmp_path), "said", *words]
        done = subprocess.run(command, env={**plain, **env}, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "is==" in said()
    assert "is=1=" in said("CUDA=1") and "is=1=" in said(CUDA="1") and "is=0=" in said("CUDA=0")
    assert "is==" in said(CUDA="/usr/local/cuda")  # somebody else's variable
    assert "CUDA must be 0 or 1, got 'yes'" in said("CUDA=yes")


# --- the real extension --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core() -> Path:
    """The extension that this session tests."""
    parent = importlib.util.find_spec("zshard")
    spec = importlib.util.find_spec("zshard._core") if parent else None
    assert spec and spec.origin, "zshard._core is not built; run `make test`"
    return Path(spec.origin)


def test_extension_exports_only_its_init_function(core: Path) -> None:
    strong = [name for kind, name in symbols(core, "-D", "--defined-only") if kind in DEFINED]
    assert [name for name in strong if not name.startswith(("_", "__"))] == ["PyInit__core"]


def test_extension_searches_torch_beside_itself_and_where_it_was_built(core: Path) -> None:
    dynamic = subprocess.run(["readelf", "-d", core], text=True, capture_output=True, check=True)
    libraries = Path(torch.__file__).parent / "lib"
    assert f"[$ORIGIN/../torch/lib:{libraries}]" in dynamic.stdout


def test_symbols_start_with_zs() -> None:
    """The names of a process are one big scope. (Those without a header do not compile.)"""
    listed = symbols_by_source()
    names = {name for each in listed.values() for kind, name in each if kind in DEFINED}
    assert "zs_all_finite" in names
    assert [name for name in names if not name.startswith("zs_")] == ["PyInit__core"]


def test_c_core_uses_neither_python_nor_torch() -> None:
    listed = symbols_by_source()
    core = {name: found for name, found in listed.items() if not name.startswith(("py_", "torch_"))}
    assert core, "no C core"
    wrong = [
        f"{source}: {name}"
        for source, found in core.items()
        for kind, name in found
        if kind == "U" and name.startswith(("Py", "_Py", "_Z", "aoti_", "torch_"))
    ]
    assert not wrong, "the C core calls: " + ", ".join(wrong)


def test_arithmetic_is_not_contracted() -> None:
    for path in release_objects().values():
        command = path.with_name(f"{path.name}.cmd").read_text()
        assert "-ffp-contract=off" in command and "-ffast-math" not in command
