"""Which of torch's three implementations of Adam zshard's equals: each claim of
zshard/optim/__init__.py.

One step from equal states, so that a difference comes from that step. A tensor's tail is its last
numel % 16 elements (float32 in AVX-512's vectors; 8 in AVX2's): torch's fused loop steps them one
by one, in code for which the compiler has chosen different multiply-adds.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from models import ddp, loss_of, make
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

WIDEST = 16  # float32 elements of the widest vector
SIZES = [*range(1, 50), 64, 1000, 1001, 4099, 70001]
WAYS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single tensor": {"foreach": False, "fused": False},
}
OPTIONS = [{}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}]
CLASSES = [(zshard.AdamW, torch.optim.AdamW), (zshard.Adam, torch.optim.Adam)]


def one_step_from_the_same(ours, theirs, size, options):
    """Return (parameter, state) of both after a step from the state that `ours` has after three."""
    random = torch.Generator().manual_seed(size)
    mine = nn.Parameter(torch.randn(size, generator=random))
    optimizer = ours([mine], lr=1e-2, **options)
    for _ in range(3):
        mine.grad = torch.randn(size, generator=random)
        optimizer.step()
    other = nn.Parameter(mine.detach().clone())
    torchs = theirs([other])
    state = copy.deepcopy(optimizer.state_dict()["state"])  # else both would step the same moments
    torchs.load_state_dict({**torchs.state_dict(), "state": state})
    mine.grad = torch.randn(size, generator=random)
    other.grad = mine.grad.clone()
    optimizer.step()
    torchs.step()
    names = [name for name in optimizer.state[mine] if name != "step"]
    return [
        (param.detach(), {name: each.state[param][name] for name in names})
        for param, each in ((mine, optimizer), (other, torchs))
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("ours", "torchs"), CLASSES, ids=["AdamW", "Adam"])
def test_all_but_the_tail_is_bit_identical_to_torchs_fused_step(ours, torchs, options):
    for size in SIZES:
        (p, state), (q, other) = one_step_from_the_same(
            ours, lambda each: torchs(each, lr=1e-2, fused=True, **options), size, options
        )
        body = size - size % WIDEST
        assert_same(p[:body], q[:body], f"the parameter of {size}")
        for name, value in state.items():
            assert_same(value[:body], other[name][:body], f"{name} of {size}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("ours", "torchs"), CLASSES, ids=["AdamW", "Adam"])
def test_tail_differs_in_the_last_bits(ours, torchs, options):
    """Most elements of tails are equal; their moments never differ by more than a few roundings."""
    differ = total = 0
    for size in range(1, WIDEST):
        (p, state), (q, other) = one_step_from_the_same(
            ours, lambda each: torchs(each, lr=1e-2, fused=True, **options), size, options
        )
        torch.testing.assert_close(p, q, rtol=3e-7, atol=3e-8)
        for name, value in state.items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-9, msg=name)
        differ += int((p != q).sum())
        total += size
    assert differ <= total // 4


@pytest.mark.parametrize("way", ["foreach", "single tensor"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("ours", "torchs"), CLASSES, ids=["AdamW", "Adam"])
def test_unfused_steps_have_equal_moments_and_close_parameters(ours, torchs, options, way):
    for size in SIZES:
        (p, state), (q, other) = one_step_from_the_same(
            ours, lambda each: torchs(each, lr=1e-2, **WAYS[way], **options), size, options
        )
        for name, value in state.items():
            assert_same(value, other[name], f"{name} of {size}")
        largest = torch.stack([p.abs(), q.abs()]).amax(0).clamp(min=1e-2)
        assert ((p - q).abs() <= 3e-7 * largest).all(), size


def mlp(width):
    return lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def trained(model, optimizer, width):
    for step in range(6):
        x = torch.randn(
            8, width, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()


@on_ranks(2)
def test_model_without_tails_is_bit_identical_to_ddp_fused():
    """Return what differs after six steps from DDP with torch's fused AdamW, and the largest
    difference."""
    width = 32
    plain, model = make(mlp(width)), FSDP(make(mlp(width)))
    parallel = ddp(plain)
    trained(parallel, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), width)
    trained(model, zshard.AdamW(model.parameters(), lr=1e-2), width)
    ours, theirs = model.state_dict(), plain.state_dict()
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    assert differences(ours, theirs) == []
    assert largest == 0.0
