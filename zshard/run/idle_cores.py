"""A warning where ranks leave cores idle because torchrun has set OMP_NUM_THREADS to 1.

torchrun sets it where its own environment has none, so the environment that torchrun
was started with, which the kernel keeps in /proc, tells whether the user has chosen the 1.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

import torch

from zshard._errors import stacklevel
from zshard.run.cgroups import ROOT
from zshard.run.topology import read_topology

_VARIABLE = "OMP_NUM_THREADS"


@functools.cache  # once
def warn_of_idle_cores() -> None:
    """Warn on the first rank of a host if torchrun's OMP_NUM_THREADS=1 leaves cores idle."""
    if os.environ.get("LOCAL_RANK") != "0" or not is_torchruns_choice(os.getppid()):
        return
    ranks, threads = int(os.environ["LOCAL_WORLD_SIZE"]), torch.get_num_threads()
    affinity = os.sched_getaffinity(0)
    if ranks * (threads + 1) > len(affinity):  # cheap, and what most runs meet
        return
    text = idle_cores(ranks, threads, read_topology(affinity=affinity).usable)
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel())


def idle_cores(ranks: int, threads: int, cores: int) -> str:
    """Return the warning for so many ranks of this host, with so many threads each, that may use so
    many physical cores; "" if no rank could have another thread."""
    if cores // ranks <= threads:
        return ""
    each = f"{threads} thread{'s' if threads > 1 else ''} each"
    return (
        f"cores are idle: the {ranks} ranks of this host may use {cores} physical cores, but "
        f"compute on {each}, because torchrun sets {_VARIABLE}=1 where it is unset. Start the "
        f"script with `python -m zshard run -n {ranks}` in place of torchrun, or set "
        f"{_VARIABLE}={cores // ranks}; {_VARIABLE}=1 keeps one thread and silences this warning"
    )


def is_torchruns_choice(parent: int, root: Path = ROOT) -> bool:
    """Return whether OMP_NUM_THREADS=1 comes from torchrun, which is this process's parent."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get(_VARIABLE) != "1":
        return False
    try:
        started_with = (root / f"proc/{parent}/environ").read_bytes()
    except OSError:
        return False
    return not any(each.startswith(f"{_VARIABLE}=".encode()) for each in started_with.split(b"\0"))
