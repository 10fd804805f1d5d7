"""Which of torch's three implementations of Adam zshard's equals: each claim of
zshard/optim/__init__.py.

One step from equal states, so that a difference comes from that step. A tensor's tail is its last
numel % 16 elements (float32 in AVX-512's vectors; 8 in AVX2's): torch's fused loop steps them one
by one, in code for which the compiler has chosen different multiply-adds.
"""

import copy

import pytest
import torch
from compare import assert_same
from models import Case
from scenario import Scenario
from spawn import on_ranks
from torch import nn

import zshard

WIDEST = 16  # float32 elements of the widest vector
SIZES = [*range(1, 50), 64, 1000, 1001, 4099, 70001]
OPTIONS = [{}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}]
CLASSES = [(zshard.AdamW, torch.optim.AdamW), (zshard.Adam, torch.optim.Adam)]


EACH_CLASS = pytest.mark.parametrize(("ours", "torchs"), CLASSES, ids=["AdamW", "Adam"])
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=str)


def one_step_from_the_same(ours, torchs, size, options, **way):
    """Return (parameter, state) of both after a step from the state that `ours` has after three.

    way: torch's implementation, as an argument."""
    random = torch.Generator().manual_seed(size)
    mine = nn.Parameter(torch.randn(size, generator=random))
    optimizer = ours([mine], lr=1e-2, **options)
    for _ in range(3):
        mine.grad = torch.randn(size, generator=random)
        optimizer.step()
    other = nn.Parameter(mine.detach().clone())
    theirs = torchs([other], lr=1e-2, **way, **options)
    state = copy.deepcopy(optimizer.state_dict()["state"])  # else both would step the same moments
    theirs.load_state_dict({**theirs.state_dict(), "state": state})
    mine.grad = torch.randn(size, generator=random)
    other.grad = mine.grad.clone()
    optimizer.step()
    theirs.step()
    names = [name for name in optimizer.state[mine] if name != "step"]
    return [
        (param.detach(), {name: each.state[param][name] for name in names})
        for param, each in ((mine, optimizer), (other, theirs))
    ]


@EACH_OPTION
@EACH_CLASS
def test_all_but_the_tail_is_bit_identical_to_torchs_fused_step(ours, torchs, options):
    """Most elements of tails are equal; their moments never differ by more than a few roundings."""
    differ = total = 0
    for size in SIZES:
        (p, state), (q, other) = one_step_from_the_same(ours, torchs, size, options, fused=True)
        body = size - size % WIDEST
        assert_same(p[:body], q[:body], f"the parameter of {size}")
        torch.testing.assert_close(p[body:], q[body:], rtol=3e-7, atol=3e-8)
        for name, value in state.items():
            assert_same(value[:body], other[name][:body], f"{name} of {size}")
            torch.testing.assert_close(value[body:], other[name][body:], rtol=1e-6, atol=1e-9)
        differ += int((p[body:] != q[body:]).sum())
        total += size - body
    assert differ <= total // 4


@pytest.mark.parametrize("foreach", [True, False])
@EACH_OPTION
@EACH_CLASS
def test_unfused_steps_have_equal_moments_and_close_parameters(ours, torchs, options, foreach):
    for size in SIZES:
        way = {"foreach": foreach, "fused": False}
        (p, state), (q, other) = one_step_from_the_same(ours, torchs, size, options, **way)
        for name, value in state.items():
            assert_same(value, other[name], f"{name} of {size}")
        largest = torch.stack([p.abs(), q.abs()]).amax(0).clamp(min=1e-2)
        assert ((p - q).abs() <= 3e-7 * largest).all(), size


@on_ranks(2)
def test_model_without_tails_is_bit_identical_to_ddp_fused():
    case = Case(
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)),
        lambda generator: torch.randn(8, 32, generator=generator),
    )

    def optimizer(model):
        if isinstance(model, zshard.FSDP):
            return zshard.AdamW(model.parameters(), lr=1e-2)
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    Scenario(case, optimizer=optimizer, steps=6).same()
