"""The models, sides and device of benchmarks/gpu.py.

The device is the GPU, or the host with a fake CUDA driver (tests/lib/stand_ins.py), so the same
program runs anywhere. All sides compute in bfloat16 with float32 parameters, each with its
library's own means, and start from the same values.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import zshard
from benchmarks.models import WORKLOADS, Batch, Workload, gpt
from benchmarks.sides import SEED, Side
from zshard.ranks import devices

BF16 = torch.bfloat16

# --------------------------------------------------------------------------------------
# The device


def is_stand_in() -> bool:
    """Return whether the GPU is fake."""
    return devices.device_of_cpu() != devices.CPU


def what_is_missing() -> str:
    """Return why these benchmarks cannot run here; "" if they can."""
    if is_stand_in():
        return ""
    found = zshard.available_features()
    if found["gpu"]:
        return ""
    names = ("driver", "torch_cuda", "kernels")
    reasons = [f"{name}: {found['missing'][name]}" for name in names if name in found["missing"]]
    return "\n".join(reasons) or "no GPU found"


def device() -> torch.device:
    """Return the device of models and batches."""
    return torch.device("cpu") if is_stand_in() else torch.device("cuda", _index())


def _index() -> int:
    """Return this rank's GPU: one of its own if there are enough on this host, otherwise 0."""
    return int(os.environ.get("LOCAL_RANK", 0)) if have_own_gpus() else 0


def have_own_gpus() -> bool:
    """Return whether each rank of this host has a GPU of its own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()


def backend() -> str:
    """Return the process group's backend: NCCL, or gloo for ranks that share a GPU, which NCCL does
    not support."""
    return "cpu:gloo,cuda:nccl" if have_own_gpus() and not is_stand_in() else "gloo"


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if not is_stand_in():
        torch.cuda.synchronize()


def warm_up() -> None:
    """Make cuBLAS allocate its workspaces, one per computing thread and precision, so that no side
    is charged for them."""
    for dtype in (torch.float32, BF16):
        x = torch.randn(64, 64, device=device(), dtype=dtype, requires_grad=True)
        torch.addmm(x, x, x).sum().backward()  # type: ignore[no-untyped-call]
    synchronize()


def forget() -> None:
    """Free the memory of deleted models."""
    gc.collect()
    if not is_stand_in():
        torch.cuda.empty_cache()


def describe() -> dict[str, Any]:
    """Return the record of the GPU and its software."""
    found = zshard.available_features()
    gpu = {} if is_stand_in() else torch.cuda.get_device_properties(0)
    return {
        "part": "device",
        "stand_in": is_stand_in(),
        "gpu": "none: fake GPU on the host" if is_stand_in() else gpu.name,
        "gpus": 0 if is_stand_in() else torch.cuda.device_count(),
        "memory_bytes": None if is_stand_in() else gpu.total_memory,
        **{name: found[name] for name in ("torch_cuda", "driver", "nccl", "kernels")},
    }


# --------------------------------------------------------------------------------------
# Models

GPT2 = {"seq": 1024, "vocabulary": 50304, "tied": True}
TINY = {"layers": 2, "width": 64, "seq": 32, "vocabulary": 256, "tied": True}
SIZES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "gpt125m": ({"layers": 12, "width": 768, **GPT2}, {"small": 1, "large": 32}),
    "gpt1.5b": ({"layers": 48, "width": 1600, **GPT2}, {"small": 1, "large": 8}),
    "gpt125m-4096": ({"layers": 12, "width": 768, **GPT2, "seq": 4096}, {"small": 1, "large": 8}),
    "tiny": (TINY, {"small": 1, "large": 4}),
}
"""Name -> model sizes, and rows per batch. tiny is for quick runs."""


def workload_of(model: str, batch: str) -> Workload:
    """Return the workload. Raises KeyError for a model or batch that SIZES lacks."""
    sizes, rows = SIZES[model]
    return gpt(model, rows=rows[batch], **sizes)


def batches_of(workload: Workload, count: int) -> list[Batch]:
    """Return `count` batches on the device, the same for every side."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    drawn = [workload.batch(generator) for _ in range(count)]
    return [(x.to(device()), y.to(device())) for x, y in drawn]


# --------------------------------------------------------------------------------------
# Sides


@dataclass
class GpuSide(Side):
    """A side that computes in bfloat16, with autocast if its library has no mixed precision."""

    autocast: bool = False

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast(device().type, BF16, enabled=self.autocast):
            return self.workload.loss(self.module, batch)


class Masters(torch.optim.AdamW):
    """Mixed precision by hand: casts a float32 module to bfloat16 and runs fused AdamW on float32
    master weights."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.low = list(module.parameters())
        self.masters = [nn.Parameter(param.detach()) for param in self.low]
        super().__init__(self.masters, lr=lr, fused=True)
        module.bfloat16()  # the same parameter objects, with data of their own from now on

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for low, master in zip(self.low, self.masters, strict=True):
            master.grad = None if low.grad is None else low.grad.float()
        super().step(closure)
        torch._foreach_copy_(self.low, self.masters)
        for master in self.masters:
            master.grad = None


def _adamw(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=lr, fused=True)


Parts = tuple[nn.Module, Any]
Wrap = Callable[[nn.Module, Workload], Parts]


def _plain(module: nn.Module, workload: Workload) -> Parts:
    return module, _adamw(module, workload.lr)


def _by_hand(module: nn.Module, workload: Workload) -> Parts:
    return module, Masters(module, workload.lr)


def _ddp(module: nn.Module, workload: Workload) -> Parts:
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return wrapped, _adamw(wrapped, workload.lr)


def _fsdp2(module: nn.Module, workload: Workload, **options: Any) -> Parts:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, **options)
    for child in module.modules():
        if type(child) in workload.units:
            shard(child)
    shard(module)
    return module, _adamw(module, workload.lr)


def _fsdp2_offload(module: nn.Module, workload: Workload) -> Parts:
    """The step is on the host, so it may have all cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    policy = CPUOffloadPolicy(pin_memory=not is_stand_in())
    return _fsdp2(module, workload, offload_policy=policy)


def _zshard(module: nn.Module, workload: Workload, **options: Any) -> Parts:
    policy = zshard.MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    wrapped: Any = zshard.FSDP(
        module, auto_wrap_policy=set(workload.units), mixed_precision=policy, **options
    )
    return wrapped, zshard.AdamW(wrapped.parameters(), lr=workload.lr)


def _ours(**options: Any) -> tuple[Wrap, bool]:
    return functools.partial(_zshard, **options), False


BASE, BY_HAND, DDP, PEER, OURS = "plain", "plain-by-hand", "ddp", "fsdp2", "zshard"
SIDES: dict[str, tuple[Wrap, bool]] = {
    BASE: (_plain, True),
    BY_HAND: (_by_hand, False),
    DDP: (_ddp, True),
    PEER: (_fsdp2, False),
    OURS: (_zshard, False),
    "zshard-no_shard": _ours(strategy="no_shard"),
    "zshard-c10d": _ours(transport="c10d"),
    "zshard-hybrid": _ours(strategy="hybrid_full"),
    "fsdp2-offload": (_fsdp2_offload, False),
    "zshard-offload": _ours(offload=zshard.Offload(grads=True)),
}
"""Name -> how to wrap the module, and whether to compute under autocast."""

USUAL = (BASE, BY_HAND, DDP, PEER, OURS)
"""The sides that are compared unless others are asked for."""


MODES = ("eager", "compiled", "recomputed")
"""compiled: each unit is; recomputed: activation checkpointing of each unit."""


def compile_blocks(module: nn.Module, units: Iterable[type[nn.Module]]) -> None:
    """Compile each unit in place, with inductor on a real GPU."""
    torch._dynamo.config.recompile_limit = 64  # one code object serves all sides' blocks
    for child in module.modules():
        if type(child) in set(units):
            child.compile(backend="aot_eager" if is_stand_in() else "inductor")


def build(name: str, workload: Workload, mode: str = "eager") -> GpuSide:
    """Build the side `name` on the device, from a fixed seed. mode: one of MODES.

    Raises KeyError for an unknown name.
    """
    wrap, autocast = SIDES[name]
    torch.manual_seed(SEED)
    with torch.device(device()):
        module = workload.build()
    if mode == "compiled":
        compile_blocks(module, workload.units)
    elif mode == "recomputed":
        units = tuple(workload.units)
        apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, units))
    module, optimizer = wrap(module, workload)
    return GpuSide(name, workload, module, optimizer, autocast)


def build_tiny(name: str) -> GpuSide:
    """Build a side of the host-time model, without optimizer and in float32 unless the side has its
    own precision; "compute" is the plain module."""
    workload = WORKLOADS["tiny32"]
    torch.manual_seed(SEED)
    with torch.device(device()):
        module = workload.build()
    if name != "compute":
        module, _ = SIDES[name][0](module, workload)
    return GpuSide(name, workload, module, None)
