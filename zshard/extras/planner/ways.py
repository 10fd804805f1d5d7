"""A user's choices for a run, and the ranks that they apply to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from zshard.api import MixedPrecision, Offload, Wire
from zshard.extras.planner.gpus import Device, Network

PRECISIONS = ("bf16", "fp32", "fp8")


class Cluster(NamedTuple):
    """The hardware: one rank per GPU.

    transport: between all ranks: "nccl", "shm" or "c10d". reduces_by_ring: gradients are reduced by
    NCCL's rings, as torch's FSDP does, and not as zshard does.
    """

    device: Device
    ranks: int
    network: Network
    transport: str = "nccl"
    reduces_by_ring: bool = False

    def world(self, group: int) -> tuple[int, int, str, str, int]:
        """Return the ranks that a dry run assumes, with shard groups of that size."""
        kind, per_host = self.transport, self.network.per_host
        equal = self.ranks > per_host and self.ranks % per_host == 0
        return self.ranks, group, kind, kind, per_host if equal else 0


class Way(NamedTuple):
    """A user's choices.

    strategy: as for FSDP. group: ranks that a hybrid strategy shards over; 0: those of a host.
    precision: "fp32"; "bf16": computes, gathers and reduces in it, state in float32; "fp8": the
    same with matmuls in fp8. checkpointing: of activations: "", "selective", "alternate" or "full".
    micro_batch: samples of a rank. accumulate: micro-batches in a step. compiled: by torch.compile.
    attention: "flash", or "triton" for Triton's of 2023. optimizer: as for predict_memory().
    offload: what it means on the ranks' device. wire: as for FSDP.
    """

    strategy: str = "full_shard"
    group: int = 0
    precision: str = "bf16"
    checkpointing: str = ""
    micro_batch: int = 1
    accumulate: int = 1
    compiled: bool = False
    attention: str = "flash"
    optimizer: str | int | None = "adamw"
    offload: Offload | None = None
    wire: Wire = Wire()


def arguments_of(way: Way) -> dict[str, Any]:
    """Return the arguments of FSDP(...) that a way stands for."""
    low = None if way.precision == "fp32" else MixedPrecision(param_dtype=torch.bfloat16)
    options: dict[str, Any] = {"strategy": way.strategy, "mixed_precision": low, "wire": way.wire}
    return options | {"device": "cuda", "offload": way.offload, "keep_gathered": False}
