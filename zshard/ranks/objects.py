"""Gather objects of all ranks before they have a transport.

Torch's all_gather_object() reads what it received by NumPy, which torch itself does
not require; two collectives of tensors need only torch.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard.ranks.agreement import bytes_of


def gather_objects(mine: Any, group: Any) -> list[Any]:
    """Return the object of each rank of `group`, of any size, in rank order. Collective."""
    device = distributed_c10d._get_object_coll_device(group)  # a GPU if the group has only NCCL
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    world = dist.get_world_size(group)
    lengths = _gather(torch.tensor([len(data)], device=device), world, group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data.to(device)
    gathered = [each.cpu() for each in _gather(padded, world, group)]
    return [
        pickle.loads(bytes_of(each)[: int(length)])
        for each, length in zip(gathered, lengths, strict=True)
    ]


def _gather(tensor: torch.Tensor, world: int, group: Any) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(gathered, tensor, group=group)
    return gathered
