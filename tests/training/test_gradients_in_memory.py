"""The memory of gradients: what it held before, what a script keeps of it, and none being left."""

from __future__ import annotations

import contextlib
import math
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

SIZES = {"a": 40, "b": 40, "c": 1000}  # no multiples of the layout's alignment


class Three(nn.Module):
    """Parameters that are used as a call says."""

    def __init__(self):
        super().__init__()
        for name, size in SIZES.items():
            setattr(self, name, nn.Parameter(torch.ones(size)))

    def forward(self, names):
        return sum((getattr(self, name) * 2).sum() for name in names)


def dirty_heap(value):
    """Leave `value` in freed memory of the sizes that gradients take."""
    for size in (64, 128, 256, 512, 576, 640, 1024, 1040, 2048):
        _ = [torch.full((size,), value) for _ in range(200)]


@pytest.mark.parametrize("value", [1e10, math.nan])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_norms_do_not_see_what_memory_held_before(transport, value):
    model = FSDP(Three(), transport=transport)

    def renew():
        model.zero_grad()
        dirty_heap(value)

    def check_norm(used):
        """Each gradient is 2 as often as its parameter was used."""
        squares = sum((2 * used.count(name)) ** 2 * size for name, size in SIZES.items())
        norm = float(model.clip_grad_norm_(math.inf))
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)

    model("abc").backward()
    check_norm("abc")  # from now on, sums take squares
    renew()
    used = ""
    for names in ("a", "b", "ab", "abc", "c"):  # each adds to what earlier ones have left
        model(names).backward()
        used += names
        check_norm(used)
    renew()
    model("abc").backward()
    held = [param.grad for param in model.parameters()]
    dirty_heap(value)
    model("abc").backward()  # into new memory, as the script keeps the old
    check_norm("abcabc")
    del held
    renew()
    model("abc").backward()
    saved = [param.grad.clone() for param in model.parameters()]
    renew()
    for param, grad in zip(model.parameters(), saved, strict=True):
        param.grad = grad
    model("abc").backward()
    check_norm("abcabc")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_a_grad_kept_from_a_step_in_backward_is_no_trap(transport):
    model, kept = FSDP(nn.Linear(100, 100), transport=transport), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    handle = model.optimizer_in_backward(zshard.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 100)).sum().backward()
    handle.remove()
    model(torch.ones(2, 100)).sum().backward()
    assert len(kept) == 4
    for param in model.parameters():
        assert (zshard.full_tensor(param.grad) == 2.0).all()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_negated_views_are_read_as_torch_reads_them(transport):
    """A gradient and parameters whose bytes torch negates when it reads them."""
    model = FSDP(nn.Linear(3, 3, bias=False), transport=transport)
    model.load_state_dict({"weight": torch.ones(3, 3)})
    optimizer = zshard.SGD(model.parameters(), lr=0.5)
    weight, twos = model.weight, torch.full((3, 3), 2.0)
    weight.register_hook(torch._neg_view)
    model(torch.ones(2, 3)).sum().backward()  # 2 in each element, and -2 with the hook
    assert torch.equal(zshard.full_tensor(weight.grad), -twos)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], twos)
    with torch.no_grad():
        weight.data = torch._neg_view(zshard.to_local(weight).detach().clone())
        assert torch.equal(model(torch.eye(3)).T.contiguous(), -twos)


@pytest.mark.parametrize("cls", [zshard.SGD, zshard.AdamW])
def test_optimizers_of_plain_models_read_negated_gradients(cls):
    ours, theirs = (nn.Parameter(torch.ones(40)) for _ in range(2))
    for param, kind in ((ours, cls), (theirs, getattr(torch.optim, cls.__name__))):
        param.grad = torch._neg_view(torch.full((40,), 2.0))
        kind([param], lr=0.5).step()
    torch.testing.assert_close(ours, theirs)


class LimitsMemory(torch.autograd.Function):
    """Its first backward leaves the process 4 MiB of address space."""

    on = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if LimitsMemory.on:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
        return grad


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4096, 2048, bias=False)

    def forward(self, x):
        return self.linear(LimitsMemory.apply(x)).sum()


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "rank 1"])
@pytest.mark.parametrize(
    ("transport", "strategy"),
    [("shm", "full_shard"), ("c10d", "full_shard"), ("shm", "no_shard")],
)
@on_ranks(2, fresh=True)
def test_training_continues_after_a_sum_without_memory(transport, strategy, everywhere):
    """Under no_shard all ranks lack what one cannot sum."""
    dist.init_process_group("gloo")
    LimitsMemory.on = everywhere or dist.get_rank() == 1
    lacks = LimitsMemory.on or strategy == "no_shard"
    model = FSDP(Wide(), transport=transport, strategy=strategy, timeout=30)
    for step in range(3):
        with pytest.raises(MemoryError) if lacks and step == 0 else contextlib.nullcontext():
            model(torch.ones(1, 4096, requires_grad=True)).backward()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        LimitsMemory.on = False
        model.zero_grad()
