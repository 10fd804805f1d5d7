"""`init_distributed` of DeepSpeed: torch.distributed's process group, created once."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from zshard.ranks.groups import check_launcher, make_default_group


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    **arguments: Any,
) -> None:
    """Initialize torch.distributed if the script has not. Collective.

    Without a launcher (torchrun sets RANK and WORLD_SIZE), the world size is 1.

    Args:
        dist_backend: the backend. Default: None, "nccl" where there is a GPU, else "gloo".
        timeout: that of collectives. Default: None, torch's.
        init_method: torch's. Default: None, the environment variables.
        dist_init_required: False: raise RuntimeError if torch.distributed is not initialized.
        arguments: DeepSpeed's other arguments: rank and world_size are passed on, and the rest
            (auto_mpi_discovery, distributed_port, verbose, config) has no effect.
    """
    known = {"rank", "world_size", "auto_mpi_discovery", "distributed_port", "verbose", "config"}
    for name in arguments.keys() - known:
        raise TypeError(f"init_distributed() got an unexpected argument '{name}'")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() "
            "first, or omit dist_init_required=False"
        )
    given: dict[str, Any] = {
        name: arguments[name] for name in ("rank", "world_size") if arguments.get(name, -1) >= 0
    }
    if timeout is not None:
        given["timeout"] = timeout
    if init_method is not None:
        given["init_method"] = init_method
    elif "RANK" not in os.environ and not given.get("world_size"):
        check_launcher()
        given |= {"store": HashStore(), "rank": 0, "world_size": 1}
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    make_default_group(backend, **given)
