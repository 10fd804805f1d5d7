"""Shared code of the GPU tests: where ranks run, tolerances, a model and its training.

A test is a function that ranks run on "their device". That is the GPU, if there is one (otherwise
the test is skipped), and also the host with fakes of CUDA's driver and NCCL (stand_ins.py), so the
tests themselves are checked on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stand_ins
import torch
import torch.distributed as dist
from models import Block, Case, loss_of, make
from nursery import fork_ranks
from spawn import RankPool, run_test
from tasks import RankResult
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision

GPU, FAKE = ("gpu",), ("stand-in",)
KINDS = (*GPU, *FAKE)
FP32 = {"rel": 1e-5, "abs": 1e-6}  # the same kernels on the same values; atomics may reorder sums
BF16 = {"rel": 1e-2, "abs": 1e-3}  # 8 bits of mantissa, and other rounding between operators
ADAM = {"rel": 1e-4, "abs": 2e-4}  # lr = 0.01: a gradient's rounding error matters in a step
BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BACKENDS = ("c10d", "nccl")
EXACT = {"rel": 0.0, "abs": 0.0}
Hosts = Callable[[int], RankPool]
TOGETHER = [(kind, world, by) for kind in KINDS for world in (2, 4) for by in BACKENDS]
"""Ranks that share a device: its kind, their number, and the backend between them."""
together = pytest.mark.parametrize(("kind", "world", "backend"), TOGETHER)


@functools.cache
def why_no_gpu() -> str:
    """Return why models on GPUs do not train here; "" if they do."""
    found = zshard.available_features()
    missing = (found["missing"].get(name) for name in ("driver", "torch_cuda", "kernels"))
    return "" if found["gpu"] else "; ".join(filter(None, missing)) or "there is no GPU"


def environment(kind: str, backend: str = "c10d") -> dict[str, str | None]:
    """Return the environment of ranks on that kind of device; skips the test if there is none."""
    if kind == "gpu" and why_no_gpu():
        pytest.skip(why_no_gpu())
    if kind == "gpu" and backend == "nccl" and not zshard.available_features()["nccl"]:
        pytest.skip(zshard.available_features()["missing"]["nccl"])
    return {} if kind == "gpu" else dict(stand_ins.environment(backend))


Start = Callable[..., RankPool]


@contextlib.contextmanager
def standing_ranks() -> Iterator[Start]:
    """Yield a function that starts standing ranks by kind of device, world size and, for fakes,
    backend; they end with the context."""
    made: dict[tuple[str, int, str], RankPool] = {}

    def pool(kind: str, world: int = 1, backend: str = "c10d") -> RankPool:
        key = kind, world, backend if kind == "stand-in" else ""
        if key not in made:
            made[key] = RankPool(world, environment(kind, backend))
        return made[key]

    yield pool
    for each in made.values():
        each.close(patience=5.0)


def on_device(
    world: int = 1, backend: str = "c10d", fresh: bool = False, kinds: tuple[str, ...] = KINDS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on each of `world` ranks that share a device, once for each of `kinds`.

    If it takes `kind`, `world` or `backend` itself, that is a parameter of the test. Put other
    marks above this one. fresh: on newly forked ranks, where nothing is initialised.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(start: Start, kind: str, **values: Any) -> None:
            __tracebackhide__ = True
            values = {"kind": kind, "world": world, "backend": backend, **values}
            place = kind, values["world"], values["backend"]
            arguments = [values[name] for name in own]
            if fresh:
                run_fresh(*place, test, *arguments)
            else:
                run_test(start(*place), test, arguments)

        names = dict.fromkeys(["start", "kind", *own])
        every = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        test.body_on_ranks = body  # type: ignore[attr-defined]
        return test if "kind" in own else pytest.mark.parametrize("kind", kinds)(test)

    return decorate


def compare(
    start: Start,
    hosts: Hosts,
    place: tuple[str, int, str],
    task: Any,
    *args: Any,
    near: dict[str, float] = ADAM,
) -> list[dict[str, Tensor]]:
    """Compare the dict of tensors that task(backend, *args) returns on each rank with the same on the
    host, where the backend is None: by bits over the fakes; return those on the device."""
    kind, world, backend = place
    ours = start(*place).run(task, backend, *args)
    for mine, theirs in zip(ours, hosts(world).run(task, None, *args), strict=True):
        assert far(mine, theirs, EXACT if kind == "stand-in" else near) == []
    return ours


def run_fresh(
    kind: str, world: int, backend: str, fn: Any, *args: Any, check: bool = True
) -> list[RankResult]:
    """fn(*args) on fresh ranks that share a device of that kind."""
    env = {name: value for name, value in environment(kind, backend).items() if value is not None}
    return fork_ranks(fn, world, *args, env=env, timeout=120, check=check)


def on_fakes(fn: Any, world: int, *args: Any, backend: str = "nccl", **env: str) -> list[Any]:
    """Return what fn(*args) returns on each of `world` fresh ranks over the fakes."""
    whole = {**stand_ins.environment(backend), **env}
    return [result.value for result in fork_ranks(fn, world, *args, env=whole, check=True)]


# --- shared code of ranks --------------------------------------------------------------------------


def is_real() -> bool:
    return os.environ.get("ZSHARD_CUDA_ON_HOST") != "1"


def device() -> torch.device:
    """Return the device of this rank's tensors, which is the current one from then on: its own GPU,
    if there are enough."""
    if not is_real():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if have_own_gpus() else 0)
    return torch.device("cuda", torch.cuda.current_device())


def have_own_gpus() -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()


def let_nccl_share_a_gpu(rank: int) -> None:
    """NCCL refuses two ranks of a host on one GPU; ranks that seem to be of two hosts go over
    sockets."""
    if is_real() and have_own_gpus():
        return
    os.environ["NCCL_HOSTID"] = f"zshard-test-{rank}"
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_NET="Socket")


class Deep(nn.Module):
    """Blocks of one width, recomputed in backward if `checkpointed`."""

    def __init__(self, width: int = 24, depth: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


DEEP = Case(Deep, lambda generator: torch.randn(6, 24, generator=generator))


def plain(case: Case = DEEP) -> Any:
    """Return the case's model on the device."""
    return make(case.make).to(device())


def wrap(case: Case = DEEP, **options: Any) -> Any:
    """Return the case's model on the device, wrapped."""
    options.setdefault("auto_wrap_policy", case.policy)
    return FSDP(plain(case), **options)


def adamw(model: nn.Module) -> Any:
    return zshard.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module, library: Any = zshard) -> Any:
    return library.SGD(model.parameters(), lr=0.05, momentum=0.9)


Trained = tuple[list[float], dict[str, Tensor]]


def trained(model: nn.Module, optimizer: Any, case: Case = DEEP, **how: int) -> Trained:
    """Return (losses, parameters on the host) after some steps of `train`."""
    return train(model, optimizer, case, **how), on_host(model.state_dict())


def assert_near(ours: Trained, theirs: Trained, near: dict[str, float]) -> None:
    assert ours[0] == pytest.approx(theirs[0], **near)
    assert far(ours[1], theirs[1], near) == []


def train(
    model: nn.Module, optimizer: Any, case: Case = DEEP, steps: int = 4, rank: int = 0
) -> list[float]:
    """Return the loss of each step."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(case.batch(step, rank).to(device())))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def over(backend: str | None, any_order: bool = False) -> Any:
    """Return the transport of ranks that share a GPU over `backend`; None: of ranks on the host.

    any_order: ranks may run different units.
    """
    if backend == "nccl":
        let_nccl_share_a_gpu(dist.get_rank())
        if any_order:
            return zshard.NcclOptions(any_order=True)
    return backend if backend is not None and is_real() else "shm"


def sharded(case: Case, backend: str | None, any_order: bool = False, **options: Any) -> Any:
    """Return (the case's model over `backend`, its device), as in `over`."""
    there = torch.device("cpu") if backend is None else device()
    options = {"auto_wrap_policy": case.policy, "timeout": 60, **options}
    seed = options.pop("seed", 1)
    model = make(case.make, seed).to(there)
    return FSDP(model, transport=over(backend, any_order), **options), there


def on_host(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def full_state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return full parameters and the optimizer's full tensors, by name, on the host."""
    state = on_host(model.state_dict())
    for number, entries in optimizer.state_dict()["state"].items():
        state |= on_host({f"{number} {key}": torch.as_tensor(v) for key, v in entries.items()})
    return state


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor], near: dict[str, float]) -> list[str]:
    """Return what differs by more than `near` allows, element by element, or in names."""
    found = [f"only one has {name}" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = (side[name].detach().to("cpu", torch.float64) for side in (ours, theirs))
        if not torch.allclose(a, b, rtol=near["rel"], atol=near["abs"]):
            found.append(f"{name}: by {float((a - b).abs().max()):.3g}")
    return found
