"""The sides: each trains the same workload with a different library, in units of the same size.

build_side() seeds torch, so all sides start from the same parameters. zshard and DeepSpeed are
imported by their own factories only: the other sides run without them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.models import Batch, Workload

SEED = 1234


@dataclass
class Side:
    """A wrapped module and the optimizer that updates it, or None to run no optimizer."""

    name: str
    workload: Workload
    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    def forward(self, batch: Batch) -> Tensor:
        """Return this rank's loss for `batch`, a scalar with its graph."""
        return self.workload.loss(self.module, batch)

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def step(self, batch: Batch, *, zero_grad: bool = True) -> Tensor:
        """Run one full training step on `batch` and return this rank's loss, detached."""
        loss = self.forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
        if zero_grad:
            self.zero_grad()
        return loss.detach()


class DeepSpeedSide(Side):
    """A DeepSpeed engine, which runs backward, the optimizer and zero_grad itself."""

    def step(self, batch: Batch, *, zero_grad: bool = True) -> Tensor:
        engine: Any = self.module
        loss = self.forward(batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()


Parts = tuple[nn.Module, torch.optim.Optimizer | None]
Factory = Callable[[Workload], Parts]


def build_side(name: str, workload: Workload) -> Side:
    """Build a side, from a fixed seed. Collective."""
    torch.manual_seed(SEED)
    module, optimizer = SIDES[name](workload)
    kind = DeepSpeedSide if name in DEEPSPEED else Side
    return kind(name, workload, module, optimizer)


def check_installed(names: Iterable[str]) -> None:
    """Exit with the install command if `names` needs DeepSpeed and it is not installed."""
    wanted = [name for name in names if name in DEEPSPEED]
    if wanted and importlib.util.find_spec("deepspeed") is None:
        raise SystemExit(f"{wanted[0]} requires DeepSpeed, which is not installed: run\n{INSTALL}")


def _fused_adamw(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=lr, fused=True)


def by_fsdp1(module: nn.Module, units: Collection[type[nn.Module]], how: str = "FULL_SHARD") -> Any:
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[how],
        auto_wrap_policy=ModuleWrapPolicy(units),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def by_fsdp2(
    module: nn.Module,
    units: Collection[type[nn.Module]],
    reshard: bool | None = True,
    device: str = "cpu",
    **options: Any,
) -> Any:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, **options)
    for child in module.modules():
        if type(child) in units and child is not module:
            shard(child)
    return shard(module)


def by_zshard(
    module: nn.Module,
    units: Collection[type[nn.Module]],
    strategy: str = "full_shard",
    transport: str = "shm",
    **options: Any,
) -> Any:
    """An explicit transport: the benchmark must not silently measure a fallback. "auto" is for
    several hosts, where a hybrid strategy has one within the hosts and one between them."""
    import zshard

    if "gradients" in options:
        options["wire"] = zshard.Wire(gradients=options.pop("gradients"))
    options["transport"] = transport if dist.get_world_size() > 1 else None
    return zshard.FSDP(module, sharding_strategy=strategy, auto_wrap_policy=set(units), **options)


def _ddp(module: nn.Module, units: Collection[type[nn.Module]], view: bool) -> Any:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=view)


def _trained(wrap: Callable[..., Any], *how: Any) -> Factory:
    """Return a factory of a module that is wrapped in this way, with torch's optimizer."""

    def build(workload: Workload) -> Parts:
        module = wrap(workload.build(), workload.units, *how)
        return module, _fused_adamw(module, workload.lr)

    return build


def _zshard(strategy: str, transport: str, **options: Any) -> Factory:
    def build(workload: Workload) -> Parts:
        import zshard

        module = by_zshard(workload.build(), workload.units, strategy, transport, **options)
        return module, zshard.AdamW(module.parameters(), lr=workload.lr)

    return build


def _deepspeed(stage: int, sized: bool = True) -> Factory:
    def build(workload: Workload) -> Parts:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        module = workload.build()
        units = [child for child in module.modules() if type(child) in workload.units]
        unit = max(sum(p.numel() for p in child.parameters()) for child in units)
        limits = {"reduce_bucket_size": unit}
        if stage == 3:
            limits["stage3_prefetch_bucket_size"] = unit
            limits["stage3_max_live_parameters"] = 2 * unit
            limits["stage3_max_reuse_distance"] = 0
        config = {
            "gradient_clipping": 0.0,  # the default, 1.0, would not compute the same as the others
            "train_micro_batch_size_per_gpu": 1,  # required, and used for its logs only
            "steps_per_print": 2**31,
            "zero_optimization": {"stage": stage, **(limits if sized else {})},
        }
        engine, optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=_fused_adamw(module, workload.lr),
            config=config,
            dist_init_required=False,
        )
        return engine, optimizer

    return build


SIDES: dict[str, Factory] = {
    "compute": lambda workload: (workload.build(), None),
    "local": _trained(lambda module, units: module),
    "ddp": _trained(_ddp, False),
    "ddp-view": _trained(_ddp, True),
    "fsdp1": _trained(by_fsdp1),
    "fsdp1-shard_grad_op": _trained(by_fsdp1, "SHARD_GRAD_OP"),
    "fsdp2": _trained(by_fsdp2),
    "fsdp2-shard_grad_op": _trained(by_fsdp2, False),
}
DEEPSPEED = {f"deepspeed-{stage}": _deepspeed(stage) for stage in (1, 2, 3)}
DEEPSPEED["deepspeed-3-defaults"] = _deepspeed(3, sized=False)
"""DeepSpeed's default limits exceed these models: stage 3 then never frees a gathered parameter."""

INSTALL = (
    "python -m pip install 'setuptools<81' wheel && DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "
    "python -m pip install --no-build-isolation deepspeed==0.19.8"
)

WIRES: dict[str, dict[str, str]] = {
    "bf16": {"wire": "bf16"},
    "bf16-gradients": {"gradients": "bf16"},
}
"""Options of zshard's sides in fewer bytes: of gradients and parameters, or of gradients alone."""

SIDES.update(DEEPSPEED)
for _strategy in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_full"):
    SIDES[f"zshard-{_strategy}-auto"] = _zshard(_strategy, "auto")
    for _wire, _options in WIRES.items():
        SIDES[f"zshard-{_strategy}-auto-{_wire}"] = _zshard(_strategy, "auto", **_options)
    if not _strategy.startswith("hybrid"):
        SIDES[f"zshard-{_strategy}"] = _zshard(_strategy, "shm")
        SIDES[f"zshard-{_strategy}-c10d"] = _zshard(_strategy, "c10d")
KEEPS: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
for _name, _keep in KEEPS.items():
    SIDES[f"zshard-full_shard-auto-keep_{_name}"] = _zshard(
        "full_shard", "auto", keep_gathered=_keep
    )
