"""The models, sides and device of benchmarks/gpu.py.

The device is the GPU, or the host with a fake CUDA driver (tests/lib/stand_ins.py), so the same
program runs anywhere. All sides compute in bfloat16 with float32 parameters, each with its
library's own means, and start from the same values.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import zshard
from benchmarks.models import Batch, Workload, gpt
from benchmarks.sides import SEED, Side, by_fsdp2
from zshard.ranks import devices

BF16 = torch.bfloat16


def is_stand_in() -> bool:
    """Return whether the GPU is fake."""
    return devices.device_of_cpu() != devices.CPU


def what_is_missing() -> str:
    """Return why these benchmarks cannot run here; "" if they can."""
    found = zshard.available_features()
    if is_stand_in() or found["gpu"]:
        return ""
    return "\n".join(f"{name}: {why}" for name, why in found["missing"].items())


def device() -> torch.device:
    """Return the device of models and batches."""
    index = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cpu") if is_stand_in() else torch.device("cuda", index)


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
    facts = {name: str(found[name]) for name in ("torch_cuda", "driver", "nccl", "kernels")}
    name = "FAKE GPU ON THE HOST: times and sizes say nothing"
    if not is_stand_in():
        gpu = torch.cuda.get_device_properties(0)
        name = f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    return {"part": "device", "title": "Device", "sides": {name: facts}}


GPT2 = {"seq": 1024, "vocabulary": 50304, "tied": True}
TINY = {"layers": 2, "width": 64, "seq": 32, "vocabulary": 256, "tied": True}
SIZES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "gpt125m": ({"layers": 12, "width": 768, **GPT2}, {"small": 1, "large": 32}),
    "gpt1.5b": ({"layers": 48, "width": 1600, **GPT2}, {"small": 1, "large": 8}),
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


@dataclass
class GpuSide(Side):
    autocast: bool = False  # where the library has no mixed precision

    def forward(self, batch: Batch) -> Tensor:
        with torch.autocast(device().type, BF16, enabled=self.autocast):
            return self.workload.loss(self.module, batch)


class Masters(torch.optim.AdamW):
    """Mixed precision by hand: a bfloat16 module, and fused AdamW on float32 master weights."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.low = list(module.parameters())
        self.masters = [nn.Parameter(param.detach()) for param in self.low]
        super().__init__(self.masters, lr=lr, fused=True)
        module.bfloat16()  # the same parameter objects, with their own data from now on

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for low, master in zip(self.low, self.masters, strict=True):
            master.grad = None if low.grad is None else low.grad.float()
        super().step(closure)
        torch._foreach_copy_(self.low, self.masters)
        for master in self.masters:
            master.grad = None


Parts = tuple[nn.Module, Any]
Wrap = Callable[[nn.Module, Workload], Parts]


def _plain(module: nn.Module, workload: Workload) -> Parts:
    return module, torch.optim.AdamW(module.parameters(), lr=workload.lr, fused=True)


def _ddp(module: nn.Module, workload: Workload) -> Parts:
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    return _plain(wrapped, workload)


def _fsdp2(module: nn.Module, workload: Workload, **options: Any) -> Parts:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    options |= {"device": device().type, "mp_policy": policy, "reshard": None}
    return _plain(by_fsdp2(module, workload.units, **options), workload)


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


BASE, BY_HAND, DDP, PEER, OURS = "plain", "plain-by-hand", "ddp", "fsdp2", "zshard"
SIDES: dict[str, Wrap] = {
    BASE: _plain,
    BY_HAND: lambda module, workload: (module, Masters(module, workload.lr)),
    DDP: _ddp,
    PEER: _fsdp2,
    OURS: _zshard,
    "zshard-no_shard": functools.partial(_zshard, strategy="no_shard"),
    "zshard-c10d": functools.partial(_zshard, transport="c10d"),
    "zshard-hybrid": functools.partial(_zshard, strategy="hybrid_full"),
    "fsdp2-offload": _fsdp2_offload,
    "zshard-offload": functools.partial(_zshard, offload=zshard.Offload(grads=True)),
}
"""Name -> how to wrap the module."""

USUAL = (BASE, BY_HAND, DDP, PEER, OURS)
MODES = ("eager", "compiled")  # each unit


def build(name: str, workload: Workload, mode: str = "eager") -> GpuSide:
    """Build the side `name` on the device, from a fixed seed. mode: one of MODES."""
    torch.manual_seed(SEED)
    with torch.device(device()):
        module = workload.build()
    torch._dynamo.config.recompile_limit = 64  # one code object serves all sides' blocks
    for child in module.modules() if mode == "compiled" else ():
        if type(child) in workload.units:
            child.compile(backend="aot_eager" if is_stand_in() else "inductor")
    module, optimizer = SIDES[name](module, workload)
    return GpuSide(name, workload, module, optimizer, autocast=name in (BASE, DDP))
