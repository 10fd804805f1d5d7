"""Optimizers on shards are judged by what they do: the slice of the whole's step, or ShardError."""

import timeit

import pytest
import torch
from guarded import equal_to_slice, sharded_parameter, slice_of
from torch import nn

import zshard
from zshard import ShardError, ShardTensor, _optim_guard

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENTWISE += ("RMSprop", "Rprop", "SGD")
WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
HAVE_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
SHAPES = ((7, 5), (11,), (3, 2, 4))


def wholes(seed):
    torch.manual_seed(seed)
    return [torch.randn(shape) for shape in SHAPES]


class LARS(torch.optim.Optimizer):
    """With a norm, as people write it."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.1 * float(p.norm() / p.grad.norm()))


class Renamed(LARS):
    """Nobody sees by its name what it does."""


class Lambda(torch.optim.Optimizer):
    """Elementwise, and unknown."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum.sign(), alpha=0.1)


def step_twice(make, params, grads):
    """The optimizer after two steps with these gradients."""
    optimizer = make(params)
    for _ in range(2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return optimizer


def both(make):
    """(params, optimizer) of whole parameters and of shards, after the same two steps."""
    plain = [nn.Parameter(w.clone()) for w in wholes(0)]
    shards = [sharded_parameter(w) for w in wholes(0)]
    grads = wholes(1)
    mine = [slice_of(g, p._zshard_part) for g, p in zip(grads, shards, strict=True)]
    return (plain, step_twice(make, plain, grads)), (shards, step_twice(make, shards, mine))


def cases():
    for name in ELEMENTWISE:
        for way in WAYS:
            if "fused" not in way or name in HAVE_FUSED:
                yield pytest.param(name, way, id=f"{name} {way}")


@pytest.mark.parametrize(("name", "way"), cases())
def test_torchs_elementwise_ones_step_slices_bit_for_bit(name, way):
    make = getattr(torch.optim, name)
    (plain, own), (shards, theirs) = both(lambda params: make(params, lr=0.1, **way))
    for whole, shard in zip(plain, shards, strict=True):
        assert equal_to_slice(shard, whole)
        for key, value in own.state[whole].items():
            if isinstance(value, torch.Tensor) and value.shape == whole.shape:
                assert type(theirs.state[shard][key]) is ShardTensor
                assert equal_to_slice(theirs.state[shard][key], value)


@pytest.mark.parametrize("cls", [zshard.AdamW, zshard.Adam, zshard.SGD])
def test_zshards_own_step_slices(cls):
    (plain, _), (shards, _) = both(lambda params: cls(params, lr=0.1))
    assert all(equal_to_slice(s, w) for s, w in zip(shards, plain, strict=True))


def test_one_of_the_users_own_that_is_elementwise():
    (plain, _), (shards, _) = both(Lambda)
    assert all(equal_to_slice(s, w) for s, w in zip(shards, plain, strict=True))


def refused():
    yield torch.optim.Adafactor
    yield torch.optim.LBFGS
    yield LARS
    yield Renamed
    if hasattr(torch.optim, "Muon"):
        yield lambda params: torch.optim.Muon([p for p in params if p.ndim == 2])


@pytest.mark.parametrize("make", refused())
def test_others_raise_and_change_no_parameter(make):
    shards = [sharded_parameter(w) for w in wholes(0)]
    for shard, grad in zip(shards, wholes(1), strict=True):
        shard.grad = slice_of(grad, shard._zshard_part)
    with pytest.raises(ShardError, match="called on a shard.*of 'weight'"):
        make(shards).step(lambda: torch.tensor(0.0))
    assert all(equal_to_slice(s, w) for s, w in zip(shards, wholes(0), strict=True))


@pytest.mark.parametrize("make", refused())
def test_whole_parameters_pass_everything(make):
    params = [nn.Parameter(w) for w in wholes(0)]
    for param, grad in zip(params, wholes(1), strict=True):
        param.grad = grad
    make(params).step(lambda: torch.tensor(0.0))


def test_kernels_that_the_guard_cannot_see_are_refused_by_name(monkeypatch):
    """apex.optimizers.FusedLAMB gets the tensors in C++."""
    shard = sharded_parameter(torch.randn(6, 4))
    monkeypatch.setattr(_optim_guard._core, "is_shard", lambda p: p is shard)
    fused = type("FusedLAMB", (torch.optim.SGD,), {"__module__": "apex.optimizers.fused_lamb"})
    with pytest.raises(ShardError, match=r"^FusedLAMB scales updates by norms.*no_shard"):
        fused([shard], lr=0.1).step()
    fused([nn.Parameter(torch.ones(2))], lr=0.1).step()


def test_costs_microseconds():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1)) for _ in range(1000)])
    seconds = min(timeit.repeat(lambda: _optim_guard._before_step(optimizer, (), {}), number=1000))
    assert seconds / 1000 < 10e-6
