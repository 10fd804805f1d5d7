"""What benchmarks/gpu.py trains and by which library, and the device that all of it is on.

The one idea: "the device" is the GPU, or the host where stand-ins play CUDA's driver
(ZSHARD_CUDA_ON_HOST=1), so that the same program runs anywhere. Sides compute in bfloat16 and keep
float32 parameters, each in its library's own way, and start from the same values.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zshard
from benchmarks.models import WORKLOADS, Batch, Workload, gpt
from benchmarks.sides import SEED, Side

BF16 = torch.bfloat16

# --------------------------------------------------------------------------------------
# The device


def is_stand_in() -> bool:
    """Do stand-ins play the GPU?"""
    return os.environ.get("ZSHARD_CUDA_ON_HOST") == "1"


def what_is_missing() -> str:
    """Why nothing here can run; "" where it can."""
    if is_stand_in():
        return ""
    found = zshard.features()
    if found["gpu"]:
        return ""
    names = ("driver", "torch_cuda", "kernels")
    reasons = [f"{name}: {found['missing'][name]}" for name in names if name in found["missing"]]
    return "\n".join(reasons) or "there is no GPU"


def device() -> torch.device:
    """Where models and batches are."""
    return torch.device("cpu") if is_stand_in() else torch.device("cuda", 0)


def backend(ranks: int) -> str:
    """The process group's: one rank has NCCL for the libraries that want it; several ranks on one
    GPU may not."""
    return "gloo" if is_stand_in() or ranks > 1 else "cpu:gloo,cuda:nccl"


def synchronize() -> None:
    """Wait until the device has done all that it was given."""
    if not is_stand_in():
        torch.cuda.synchronize()


def warm_up() -> None:
    """Have cuBLAS take its workspaces from torch's allocator, so that no side is charged for
    them: one for each thread that computes, in each precision's way."""
    for dtype in (torch.float32, BF16):
        x = torch.randn(64, 64, device=device(), dtype=dtype, requires_grad=True)
        torch.addmm(x, x, x).sum().backward()  # type: ignore[no-untyped-call]
    synchronize()


def forget() -> None:
    """Give back what deleted models had."""
    gc.collect()
    if not is_stand_in():
        torch.cuda.empty_cache()


def describe() -> dict[str, Any]:
    """What the numbers were measured on."""
    found = zshard.features()
    gpu = {} if is_stand_in() else torch.cuda.get_device_properties(0)
    return {
        "part": "device",
        "stand_in": is_stand_in(),
        "gpu": "none: stand-ins on the host" if is_stand_in() else gpu.name,
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
    "tiny": (TINY, {"small": 1, "large": 4}),
}
"""Name -> sizes of the model, and rows in a batch. tiny is for quick runs."""


def workload_of(model: str, batch: str) -> Workload:
    """KeyError for a model or batch that SIZES has not."""
    sizes, rows = SIZES[model]
    return gpt(model, rows=rows[batch], **sizes)


def batches_of(workload: Workload, count: int) -> list[Batch]:
    """The same batches for every side, on the device."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    drawn = [workload.batch(generator) for _ in range(count)]
    return [(x.to(device()), y.to(device())) for x, y in drawn]


# --------------------------------------------------------------------------------------
# Sides


@dataclass
class GpuSide(Side):
    """A side that computes in bfloat16 by autocast where the library does not see to it."""

    autocast: bool = False

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast(device().type, BF16, enabled=self.autocast):
            return self.workload.loss(self.module, batch)


class Masters(torch.optim.AdamW):
    """Mixed precision by hand: casts a float32 module to bfloat16, and is a fused AdamW on the
    float32 values that it had."""

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


def _fsdp2(module: nn.Module, workload: Workload) -> Parts:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for child in module.modules():
        if type(child) in workload.units:
            fully_shard(child, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module, _adamw(module, workload.lr)


def _zshard(module: nn.Module, workload: Workload) -> Parts:
    policy = zshard.MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    wrapped: Any = zshard.FSDP(module, auto_wrap_policy=set(workload.units), mixed_precision=policy)
    return wrapped, zshard.AdamW(wrapped.parameters(), lr=workload.lr)


BASE, BY_HAND, PEER, OURS = "plain", "plain-by-hand", "fsdp2", "zshard"
SIDES: dict[str, tuple[Wrap, bool]] = {
    BASE: (_plain, True),
    BY_HAND: (_by_hand, False),
    "ddp": (_ddp, True),
    PEER: (_fsdp2, False),
    OURS: (_zshard, False),
}
"""Name -> how it is wrapped, and whether autocast makes it compute in bfloat16."""


def compile_blocks(module: nn.Module, units: Iterable[type[nn.Module]]) -> None:
    """Compile each unit in place, by inductor on a GPU."""
    torch._dynamo.config.recompile_limit = 64  # one code object serves all sides' blocks
    for child in module.modules():
        if type(child) in set(units):
            child.compile(backend="aot_eager" if is_stand_in() else "inductor")


def build(name: str, workload: Workload, compiled: bool = False) -> GpuSide:
    """The side called `name`, on the device, with the same values as all others. KeyError for an
    unknown name."""
    wrap, autocast = SIDES[name]
    torch.manual_seed(SEED)
    with torch.device(device()):
        module = workload.build()
    if compiled:
        compile_blocks(module, workload.units)
    module, optimizer = wrap(module, workload)
    return GpuSide(name, workload, module, optimizer, autocast)


def build_tiny(name: str) -> GpuSide:
    """A side of the host-time model, in float32 where nothing else is its way, without optimizer;
    "compute" is the plain module."""
    workload = WORKLOADS["tiny32"]
    torch.manual_seed(SEED)
    with torch.device(device()):
        module = workload.build()
    if name != "compute":
        module, _ = SIDES[name][0](module, workload)
    return GpuSide(name, workload, module, None)
