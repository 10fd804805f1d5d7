"""Compiles the CUDA kernels for setup.py: one image for all variants of the build, in build/cuda.

_core carries the image as bytes: nothing links CUDA. nvcc is looked for in CUDA_HOME, CUDA_PATH,
/usr/local/cuda and PATH. Without ZSHARD_CUDA, kernels are compiled where nvcc and a GPU are found.
"""

import glob
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools.errors import CompileError, SetupError

SOURCE, FOLDER = Path("cuda", "kernels.cu"), Path("build", "cuda")
# IEEE arithmetic as in the C loops: no fused multiply-adds but those that are written out.
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "--threads=0", "-Wno-deprecated-gpu-targets"]
FLAGS += ["-Werror", "all-warnings"] * (os.environ.get("ZSHARD_WERROR") == "1")
GPUS = ("80", "90", "100")  # compute capabilities; later ones run the PTX for the first
GPU_FILES = ("/proc/driver/nvidia/gpus/*", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")


def find_nvcc():
    """The nvcc to compile the kernels with, or None to leave them out."""
    wanted = os.environ.get("ZSHARD_CUDA", "")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [f"{home}/bin" for home in homes if home]
    nvcc = shutil.which("nvcc", path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    if wanted == "1" and nvcc is None:
        raise SetupError(
            "ZSHARD_CUDA=1 compiles CUDA kernels, but nvcc was not found: set CUDA_HOME, or build "
            "without them (`make build CUDA=0`, or ZSHARD_CUDA=0)"
        )
    is_wanted = wanted == "1" or (wanted == "" and any(map(glob.glob, GPU_FILES)))
    return nvcc if is_wanted and SOURCE.exists() else None


def said_by(*command):
    """The output of a command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_image(make):
    """The inputs and the flags of cuda_image.c, once the kernels are compiled by setup.py's `make`;
    both are empty if they are left out."""
    nvcc = find_nvcc()
    if nvcc is None:
        return [], []
    known = re.findall(r"sm_(\d+)\b", said_by(nvcc, "--list-gpu-code"))
    gpus = [gpu for gpu in GPUS if gpu in known]
    if not gpus:
        raise SetupError(f"{nvcc} supports none of {GPUS}; ZSHARD_CUDA=0 builds without CUDA")
    major, minor = re.search(r"release (\d+)\.(\d+)", said_by(nvcc, "--version")).groups()
    codes = [*(f"sm_{gpu}" for gpu in gpus), f"compute_{gpus[0]}"]
    target = FOLDER / "kernels.fatbin"
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [nvcc, *FLAGS, "-Icsrc"]
    for code in codes:
        command += ["-gencode", f"arch=compute_{code.partition('_')[2]},code={code}"]
    if "--compress-mode" in said_by(nvcc, "--help"):
        command.append("--compress-mode=size")
    command += ["-MMD", "-MF", str(target.with_suffix(".d")), "-fatbin", str(SOURCE)]
    try:
        make(target, command, [str(SOURCE)])
    except CompileError as error:
        raise CompileError(f"{error}\nZSHARD_CUDA=0 builds without CUDA") from None
    version = 1000 * int(major) + 10 * int(minor)
    facts = {"FATBIN": f'"{target}"', "TARGETS": f'"{" ".join(codes)}"', "VERSION": version}
    return [str(target)], [f"-DZS_CUDA_{name}={value}" for name, value in facts.items()]
