"""python -m zshard doctor [--json]: what this machine has (torch, the driver, GPUs, kernels, NCCL,
shared memory), and what is missing.

Each fact comes from the component that training will use, never from a version number, and each
missing one comes with a remedy.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zshard import api
from zshard.api import __version__, note_on
from zshard.extras.run.cores import Host, as_list, read_host

OLDEST_GPU = (8, 0)  # compute capability of the PTX
_FOR_GPUS = ("driver", "torch_cuda", "kernels")
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
    features: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "loops": api.build()[0],
        "kernels": machine["targets"].split(),
        "kernels_cuda": _version(machine["built"]),
        "driver": _version(machine["version"]),
        "gpus": machine["gpus"],
        "nccl": None,
        "shm": True,
        "c10d": dist.is_available() and dist.is_gloo_available(),
    }
    try:
        features["nccl"] = api.nccl_library()[0]
    except (NotImplementedError, OSError, ValueError) as error:
        missing["nccl"] = f"{error}. Without NCCL, ranks on several GPUs use torch's process group"
    try:
        api.Comm.shm(0, 1, 1.0)
    except Exception as error:
        text = (isinstance(error, OSError) and error.strerror) or str(error)
        missing["shm"] = f"{text}: allow memfd_create, pidfd_open and abstract Unix sockets"
        features["shm"] = False
    if machine["problem"]:
        missing["driver"] = machine["problem"]
    if not features["c10d"]:
        missing["c10d"] = "torch was built without gloo: CPU ranks of several hosts cannot train"
    _judge_kernels(machine, missing)
    features["gpu"] = bool(features["gpus"]) and not any(name in missing for name in _FOR_GPUS)
    return {**features, "missing": missing}


def _version(number: int) -> str | None:
    """ "13.0" for 13000; None for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _judge_kernels(machine: dict[str, Any], missing: dict[str, str]) -> None:
    """Report whether this build has kernels that run on this driver and these GPUs, and whether
    torch uses the GPUs that the driver has; without GPUs, torch is not at fault."""
    built, driver = machine["built"], machine["version"]
    old = [gpu for gpu in machine["gpus"] if tuple(gpu["capability"]) < OLDEST_GPU]
    if not built:
        missing["kernels"] = (
            "zshard was built without CUDA kernels: rebuild it: `make build CUDA=1` (needs nvcc)"
        )
    elif driver and driver // 1000 < built // 1000:
        missing["kernels"] = (
            f"the kernels were built with CUDA {_version(built)}, but the driver supports only "
            f"CUDA {_version(driver)}: update the driver, or rebuild zshard"
        )
    elif old:
        capability, least = (".".join(map(str, c)) for c in (old[0]["capability"], OLDEST_GPU))
        missing["kernels"] = f"{old[0]['name']} has compute capability {capability}, not {least}"
    if torch.version.cuda is None:
        missing["torch_cuda"] = (
            f"torch {torch.__version__} is built without CUDA: install a CUDA build "
            "(https://pytorch.org/get-started), then reinstall zshard"
        )
    elif machine["gpus"] and not torch.cuda.is_available():
        missing["torch_cuda"] = (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but sees no GPU: "
            "update the driver, or check CUDA_VISIBLE_DEVICES"
        )


_VARIABLES = ("ZSHARD_", "NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE_DEVICES")  # prefixes


def facts() -> dict[str, Any]:
    """Return what `python -m zshard doctor --json` prints: what available_features() returns, with
    versions, the CPUs, and the environment variables that matter to zshard."""
    host, folder = read_host(), Path(__file__).parents[1]
    note = note_on(folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}")
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "zshard": __version__,
        "folder": str(folder),
        "built": {"torch": note.read_text().split()[0], "variant": api.build()[1]},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": describe(host),
        "cores": host.usable,
        "numa_nodes": host.nodes,
        "bf16": bf16(Path("/proc/cpuinfo").read_text()),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else None,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
        **available_features(),
    }


def report(features: Mapping[str, Any]) -> tuple[str, int]:
    """Return what `python -m zshard doctor` prints of facts(), and its exit status: 1 if a GPU
    cannot be used."""
    missing = features["missing"]
    kernels = f"{' '.join(features['kernels'])} (nvcc {features['kernels_cuda']})"
    gpus = [f"{gpu['name']} ({'.'.join(map(str, gpu['capability']))})" for gpu in features["gpus"]]
    rows = [
        ("zshard", f"{features['zshard']} in {features['folder']}"),
        ("torch", features["torch"]),
        ("CPUs", features["cpus"]),
        ("bf16", features["bf16"]),
        ("CPU loops", features["loops"]),
        ("shm", "yes" if features["shm"] else None),
        ("c10d", "yes (gloo)" if features["c10d"] else None),
        ("torch_cuda", features["torch_cuda"] if "torch_cuda" not in missing else None),
        ("kernels", kernels if features["kernels"] else None),
        ("driver", f"CUDA {features['driver']}" if features["driver"] else None),
        ("GPUs", ", ".join(gpus) or "none"),
        ("nccl", features["nccl"]),
    ]
    lines = [f"Python {features['python']}, {features['system']}"]
    for name, fact in rows:
        lacks = "MISSING" if features["gpus"] or name in ("shm", "c10d") else "for GPUs"
        problem = f"{lacks}: {missing[name]}" if name in missing else None
        lines.append(f"{name:<11} {'. '.join(filter(None, (fact, problem)))}")
    host = "shm on one host, hosts (shm and c10d) on several" if features["shm"] else "c10d"
    cpu = f"CPU training is available; ranks communicate over {host}."
    if not features["c10d"]:
        cpu = "CPU training is available, on a single rank only."
    if features["gpu"]:
        transport = "NCCL" if features["nccl"] else "torch's process group (c10d)"
        gpu = f"GPU training is available; ranks communicate over {transport}."
    else:
        lacks = ", ".join(name for name in _FOR_GPUS if name in missing) or "GPUs"
        gpu = f"GPU training is not available; see below: {lacks}."
    return "\n".join([cpu, gpu, "", *lines]), int(bool(features["gpus"]) and not features["gpu"])


def describe(host: Host) -> str:
    """Describe what `python -m zshard run` divides among ranks."""
    nodes = f"{host.nodes} NUMA node{'s' if host.nodes != 1 else ''}"
    cores = f"{host.usable} core{'s' if host.usable != 1 else ''}"
    quota = f", within a quota of {host.quota:g} CPUs' time" if host.is_throttled else ""
    return f"usable: {cores} of {nodes} (CPUs {as_list(core.cpu for core in host.cores)}{quota})"


def bf16(cpuinfo: str) -> str:
    """Return which of the CPU's instructions for bfloat16 is best."""
    best = next((name for name in _BF16 if name in cpuinfo.split()), None)
    return best or "none: the CPU has no bfloat16 instructions, so bf16 saves memory, not time"
