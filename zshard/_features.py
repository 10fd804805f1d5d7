"""What is here: torch, the driver, GPUs, kernels, NCCL, shared memory; what is missing for what.

The one idea: each fact is asked of whoever will be asked when a model is trained, never guessed
from versions, and each thing that is missing comes with what to do about it.
"""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import torch
import torch.distributed as dist

from zshard import _core, _nccl

OLDEST_GPU = (8, 0)  # compute capability of the PTX


def features() -> dict[str, Any]:
    """What this machine and this build of zshard have, as a dict of plain values.

    "torch", "torch_cuda": their versions; None where torch is built without CUDA.
    "loops": the instruction set of the CPU's loops, "base", "avx2" or "avx512".
    "kernels", "kernels_cuda": what the CUDA kernels were compiled for, ["sm_90", ...], and by which
        CUDA version, "13.0"; [] and None in a build without.
    "driver": the CUDA version that NVIDIA's driver knows; None.
    "gpus": a dict for each, of name, capability (two ints) and multiprocessors.
    "nccl": its version; None.
    "shm", "c10d": may ranks of one host share memory, and has torch a process group for CPUs?
    "gpu": can models be trained on GPUs?
    "missing": for each of these that is not there, why, and what to do.

    Starts the CUDA driver where there is one, so call it after forks, not before. Raises CudaError
    where the driver has started and then refuses to say what its GPUs are.
    """
    machine = _core.machine()
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
        missing["c10d"] = "this torch has no gloo: ranks on CPUs of several hosts cannot meet"
    _judge_kernels(machine, missing)
    _judge_torch(missing)
    needed = ("driver", "kernels", "torch_cuda")
    found["gpu"] = bool(found["gpus"]) and not any(name in missing for name in needed)
    return {**found, "missing": missing}


def _version(number: int) -> str | None:
    """ "13.0" for 13000; None for 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _nccl_version(missing: dict[str, str]) -> str | None:
    try:
        return _nccl.library()[0]
    except (NotImplementedError, OSError, ValueError) as error:
        missing["nccl"] = f"{error}. Without it several GPUs use torch's process group"
        return None


def _shm(missing: dict[str, str]) -> bool:
    """Can this process do what ranks over shm do: a memory file, a pidfd, an abstract socket?"""
    try:
        os.close(os.memfd_create("zshard-doctor"))
        os.close(os.pidfd_open(os.getpid()))
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(f"\0zshard-doctor-{os.getpid()}")
    except (OSError, AttributeError) as error:
        missing["shm"] = (
            f"{error}: memfd_create, pidfd_open (Linux 5.3) and abstract unix sockets are needed, "
            "which some sandboxes forbid. Ranks of one host then use torch's process group"
        )
        return False
    return True


def _judge_kernels(machine: dict[str, Any], missing: dict[str, str]) -> None:
    """Are there kernels, and do they run on the driver and the GPUs that are here?"""
    built, driver = machine["built"], machine["version"]
    old = [gpu for gpu in machine["gpus"] if tuple(gpu["capability"]) < OLDEST_GPU]
    if not built:
        missing["kernels"] = (
            "zshard was built without CUDA kernels: rebuild it with `make build CUDA=1` or "
            "`ZSHARD_CUDA=1 pip install --no-build-isolation .` (needs nvcc)"
        )
    elif driver and driver // 1000 < built // 1000:
        missing["kernels"] = (
            f"the kernels were built with CUDA {_version(built)}, and the driver knows CUDA "
            f"{_version(driver)}: update the driver, or build zshard with an nvcc {driver // 1000}"
        )
    elif old:
        missing["kernels"] = (
            f"{old[0]['name']} has compute capability {'.'.join(map(str, old[0]['capability']))}; "
            f"the kernels are for {'.'.join(map(str, OLDEST_GPU))} and later"
        )


def _judge_torch(missing: dict[str, str]) -> None:
    if torch.version.cuda is None:
        missing["torch_cuda"] = (
            f"torch {torch.__version__} is built without CUDA: install one that has it (see "
            "https://pytorch.org/get-started), then zshard anew, as it is built against torch"
        )
    elif not torch.cuda.is_available():
        missing["torch_cuda"] = (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but sees no GPU: "
            "the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides them"
        )


def report() -> tuple[str, int]:
    """What `python -m zshard doctor` prints, and its exit status: 1 where a GPU cannot be used."""
    found = features()
    kernels = f"{' '.join(found['kernels'])} (nvcc {found['kernels_cuda']})"
    gpus = [f"{gpu['name']} ({'.'.join(map(str, gpu['capability']))})" for gpu in found["gpus"]]
    facts = [
        ("torch", found["torch"]),
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
    lines += ["", *_what_is_used(found)]
    return "\n".join(lines), int(bool(found["gpus"]) and not found["gpu"])


def _what_is_used(found: dict[str, Any]) -> list[str]:
    """Which way ranks will go, on CPUs and on GPUs."""
    host = "shm on one host, c10d between hosts" if found["shm"] else "c10d"
    cpu = f"Models on the CPU train; several ranks meet over {host}."
    if not found["c10d"]:
        cpu = "Models on the CPU train, on one rank only."
    if found["gpu"]:
        transport = "NCCL" if found["nccl"] else "torch's process group (c10d)"
        gpu = f"Models on GPUs train; several ranks meet over {transport}."
    else:
        first = [name for name in ("driver", "torch_cuda", "kernels") if name in found["missing"]]
        gpu = f"Models on GPUs do not train here; see above: {', '.join(first) or 'GPUs'}."
    return [cpu, gpu]
