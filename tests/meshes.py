"""Device meshes for tests: one of each shape per process, since process groups are never freed."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@functools.cache
def mesh_of(replicate: int, shard: int) -> DeviceMesh:
    """The mesh of all ranks of that shape; collective when it is first asked for."""
    return dist.init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
