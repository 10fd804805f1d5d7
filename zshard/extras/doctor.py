"""python -m zshard doctor: what this machine has (torch, the driver, GPUs, kernels, NCCL, shared
memory), and what is missing.

Each fact comes from the component that training will use, never from a version number, and each
missing one comes with a remedy.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zshard import api
from zshard.api import __version__
from zshard.extras.keeping.client import KeeperStatus, keepers
from zshard.extras.run.cores import Host, as_list, read_host

OLDEST_GPU = (8, 0)  # compute capability of the PTX
_BF16 = ("amx_bf16", "avx512_bf16", "svebf16", "bf16")  # flags in /proc/cpuinfo, best first


def available_features() -> dict[str, Any]:
    """Return what this machine and this build of zshard support.

    `python -m zshard doctor` prints the same facts. Initializes the CUDA driver if there is one, so
    call it after forking, not before. zshard.available_features is an alias.

    Returns:
        A dict of plain values:

        "torch", "torch_cuda": the versions of torch and of the CUDA it was built with; None for a
            torch without CUDA.
        "loops": the instruction set of the CPU loops: "base", "avx2" or "avx512".
        "kernels", "kernels_cuda": the architectures that the CUDA kernels were compiled for, as
            ["sm_90", ...], and the CUDA version of the compiler, as "13.0"; [] and None in a build
            without kernels.
        "driver": the CUDA version that the NVIDIA driver supports, or None.
        "gpus": a dict for each GPU: "name", "capability" (two ints) and "multiprocessors".
        "nccl": the version of NCCL, or None.
        "shm": whether ranks on one host can use shared memory.
        "c10d": whether torch has a process group for CPUs (gloo).
        "gpu": whether zshard can train on GPUs here.
        "missing": {name: reason and remedy} for each of these that is not available.

    Raises:
        CudaError: the CUDA driver was initialized, but a query of its GPUs failed.
    """
    machine = api.machine()
    missing: dict[str, str] = {}
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "loops": machine["loops"],
        "kernels": machine["targets"].split(),
        "kernels_cuda": _version(machine["built"]),
        "driver": _version(machine["version"]),
        "gpus": machine["gpus"],
        "nccl": _nccl_version(missing),
        "shm": _shm(missing),
        "c10d": dist.is_available() and dist.is_gloo_available(),
    }
    if machine["problem"]:
        missing["driver"] = machine["problem"]
    if not found["c10d"]:
        missing["c10d"] = (
            "this torch was built without gloo: CPU ranks on several hosts cannot communicate"
        )
    _judge_kernels(machine, missing)
    _judge_torch(machine, missing)
    needed = ("driver", "kernels", "torch_cuda")
    found["gpu"] = bool(found["gpus"]) and not any(name in missing for name in needed)
    return {**found, "missing": missing}


def _version(number: int) -> str | None:
    """ "13.0" for 13000; None for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _nccl_version(missing: dict[str, str]) -> str | None:
    try:
        return api.nccl_library()[0]
    except (NotImplementedError, OSError, ValueError) as error:
        missing["nccl"] = f"{error}. Without NCCL, ranks on several GPUs use torch's process group"
        return None


def _shm(missing: dict[str, str]) -> bool:
    """Return whether this process can create what shm needs: memory files, a pidfd, an abstract
    socket."""
    try:
        api.Comm.shm(0, 1, 1.0)
    except Exception as error:
        text = (isinstance(error, OSError) and error.strerror) or str(error)
        missing["shm"] = (
            f"{text}: shm needs memfd_create, pidfd_open (Linux 5.3) and abstract Unix sockets, "
            "which some sandboxes forbid. Without shm, ranks on one host use torch's process group"
        )
        return False
    return True


def _judge_kernels(machine: dict[str, Any], missing: dict[str, str]) -> None:
    """Report whether this build has kernels that run on this driver and these GPUs."""
    built, driver = machine["built"], machine["version"]
    old = [gpu for gpu in machine["gpus"] if tuple(gpu["capability"]) < OLDEST_GPU]
    if not built:
        missing["kernels"] = (
            "zshard was built without CUDA kernels: rebuild it with `make build CUDA=1` or "
            "`ZSHARD_CUDA=1 pip install --no-build-isolation .` (needs nvcc)"
        )
    elif driver and driver // 1000 < built // 1000:
        missing["kernels"] = (
            f"the kernels were built with CUDA {_version(built)}, but the driver supports only "
            f"CUDA {_version(driver)}: update the driver, or rebuild zshard with CUDA "
            f"{driver // 1000}"
        )
    elif old:
        missing["kernels"] = (
            f"{old[0]['name']} has compute capability {'.'.join(map(str, old[0]['capability']))}; "
            f"the kernels need {'.'.join(map(str, OLDEST_GPU))} or later"
        )


def _judge_torch(machine: dict[str, Any], missing: dict[str, str]) -> None:
    """Report whether torch uses the GPUs that the driver has; without GPUs, torch is not at
    fault."""
    if torch.version.cuda is None:
        missing["torch_cuda"] = (
            f"torch {torch.__version__} is built without CUDA: install a CUDA build (see "
            "https://pytorch.org/get-started), then reinstall zshard, which is built against torch"
        )
    elif machine["gpus"] and not torch.cuda.is_available():
        missing["torch_cuda"] = (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but sees no GPU: "
            "update the driver if it is too old, or check CUDA_VISIBLE_DEVICES"
        )


def report() -> tuple[str, int]:
    """Return what `python -m zshard doctor` prints, and its exit status: 1 if a GPU cannot be
    used."""
    found = available_features()
    kernels = f"{' '.join(found['kernels'])} (nvcc {found['kernels_cuda']})"
    gpus = [f"{gpu['name']} ({'.'.join(map(str, gpu['capability']))})" for gpu in found["gpus"]]
    facts = [
        ("zshard", f"{__version__} in {Path(__file__).parents[1]}"),
        ("torch", found["torch"]),
        ("CPUs", describe(read_host())),
        ("bf16", bf16(Path("/proc/cpuinfo").read_text())),
        ("CPU loops", found["loops"]),
        ("shm", "yes" if found["shm"] else None),
        ("c10d", "yes (gloo)" if found["c10d"] else None),
        ("torch_cuda", found["torch_cuda"] if "torch_cuda" not in found["missing"] else None),
        ("kernels", kernels if found["kernels"] else None),
        ("driver", f"CUDA {found['driver']}" if found["driver"] else None),
        ("GPUs", ", ".join(gpus) or "none"),
        ("nccl", found["nccl"]),
    ]
    lines = [f"Python {platform.python_version()}, {platform.system()} {platform.release()}"]
    for name, fact in facts:
        problem = found["missing"].get(name)
        words = [fact] if fact else []
        words += [f"MISSING: {problem}"] if problem else []
        lines.append(f"{name:<11} {'. '.join(words)}")
    lines += [f"{'keeper':<11} {of_keeper(keeper)}" for keeper in keepers()]
    lines += ["", *_what_is_used(found)]
    return "\n".join(lines), int(bool(found["gpus"]) and not found["gpu"])


def describe(host: Host) -> str:
    """Describe what `python -m zshard run` divides among ranks."""
    nodes, cores = (
        f"{count} {what}{'s' if count != 1 else ''}"
        for count, what in ((host.nodes, "NUMA node"), (host.usable, "core"))
    )
    quota = f", within a quota of {host.quota:g} CPUs' time" if host.is_throttled else ""
    return f"usable: {cores} of {nodes} (CPUs {as_list(core.cpu for core in host.cores)}{quota})"


def bf16(cpuinfo: str) -> str:
    """Return which of the CPU's instructions for bfloat16 is best."""
    best = next((name for name in _BF16 if name in cpuinfo.split()), None)
    return best or "none: the CPU has no bfloat16 instructions, so bf16 saves memory, not time"


def of_keeper(keeper: KeeperStatus | int) -> str:
    """Describe what a keeper holds, and how long it will. keeper: its pid, if it does not
    answer."""
    if isinstance(keeper, int):
        return f"process {keeper} does not answer: end it (kill -9 {keeper})"
    ends = f"ends with process {keeper.launcher}, which started it"
    if keeper.left is not None:
        ends = (
            f"ends in {keeper.left:.0f} s unless its run is resumed (python -m zshard run --keep="
            "TOKEN)"
        )
    return (
        f"process {keeper.pid}, {keeper.age:.0f} s old, holds {keeper.bytes / 2**20:.1f} MiB in "
        f"{sum(held.fds for held in keeper.held.values())} memory file(s), and {ends}; to end it "
        f"now: kill {keeper.pid}"
    )


def _what_is_used(found: dict[str, Any]) -> list[str]:
    """Describe whether training works on CPUs and on GPUs, and the transports of ranks."""
    host = "shm on one host, hosts (shm and c10d) on several" if found["shm"] else "c10d"
    cpu = f"CPU training is available; ranks communicate over {host}."
    if not found["c10d"]:
        cpu = "CPU training is available, on a single rank only."
    if found["gpu"]:
        transport = "NCCL" if found["nccl"] else "torch's process group (c10d)"
        gpu = f"GPU training is available; ranks communicate over {transport}."
    else:
        first = [name for name in ("driver", "torch_cuda", "kernels") if name in found["missing"]]
        gpu = f"GPU training is not available; see above: {', '.join(first) or 'GPUs'}."
    return [cpu, gpu]
