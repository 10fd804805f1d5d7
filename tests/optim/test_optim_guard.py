"""Optimizers on shards are judged by their operations: the shard of the full step, or
ShardError."""

import pytest
import torch
from compare import assert_same
from guarded import equal_to_shard, part_like, part_of, same, shard_of, sharded_parameter
from torch import nn

import zshard
from zshard import ShardError, ShardTensor
from zshard.optim import hooks

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENTWISE += ("RMSprop", "Rprop", "SGD")
WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
HAVE_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
SHAPES = ((7, 5), (11,), (3, 2, 4))


def wholes(seed):
    torch.manual_seed(seed)
    return [torch.randn(shape) for shape in SHAPES]


class LARS(torch.optim.Optimizer):
    """With a norm, in the usual implementation; its name says nothing to the guard."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.1 * float(p.norm() / p.grad.norm()))


class Lambda(torch.optim.Optimizer):
    """Elementwise, and unknown."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum.sign(), alpha=0.1)


def step_twice(make, params, grads):
    """Return the optimizer after two steps with these gradients."""
    optimizer = make(params)
    for _ in range(2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return optimizer


def three(make):
    """Return (params, optimizer) for full parameters, for their shards, and for plain tensors with
    the shards' elements, after the same two steps."""
    whole = [nn.Parameter(w.clone()) for w in wholes(0)]
    shards = [sharded_parameter(w) for w in wholes(0)]
    plain = [nn.Parameter(shard.to_local().clone()) for shard in shards]
    grads = wholes(1)
    mine = [shard_of(g, p._zshard_part) for g, p in zip(grads, shards, strict=True)]
    local = [grad.to_local() for grad in mine]
    pairs = ((whole, grads), (shards, mine), (plain, local))
    return [(params, step_twice(make, params, their)) for params, their in pairs]


def check_equal(shard, whole, plain):
    """Compare bit for bit with the plain elements; with the full ones except for the last bit,
    where torch's kernels depend on an element's place in the tensor."""
    assert same(shard, plain)
    torch.testing.assert_close(shard.to_local(), part_of(shard).of(whole.detach()))


CASES = [
    pytest.param(name, way, id=f"{name} {way}")
    for name in ELEMENTWISE
    for way in WAYS
    if "fused" not in way or name in HAVE_FUSED
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_torchs_elementwise_optimizers_step_shards_bit_identically(name, way):
    make = getattr(torch.optim, name)
    by_params = three(lambda params: make(params, lr=0.1, **way))
    optimizers = [optimizer for _, optimizer in by_params]
    for each in zip(*(params for params, _ in by_params), strict=True):
        whole, shard, plain = each
        check_equal(shard, whole, plain)
        states = [o.state[param] for o, param in zip(optimizers, each, strict=True)]
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor) and value.shape == whole.shape:
                assert type(states[1][key]) is ShardTensor
                check_equal(states[1][key], value, states[2][key])


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_state_that_a_script_has_read_before_the_first_step_is_guarded(name):
    shard = sharded_parameter(torch.randn(6, 4))
    optimizer = getattr(torch.optim, name)([shard])
    optimizer.state["a script's"] = 1
    assert optimizer.state[shard] == {}
    shard.grad = shard_of(torch.randn(6, 4), shard._zshard_part)
    optimizer.step()
    tensors = [v for v in optimizer.state[shard].values() if v.shape == shard.shape]
    assert tensors and all(type(value) is ShardTensor for value in tensors)


@pytest.mark.parametrize("cls", [zshard.AdamW, zshard.Adam, zshard.SGD, Lambda])
def test_zshards_and_custom_elementwise_optimizers(cls):
    results = [params for params, _ in three(lambda params: cls(params, lr=0.1))]
    for whole, shard, plain in zip(*results, strict=True):
        check_equal(shard, whole, plain)
        assert cls is not Lambda or equal_to_shard(shard, whole)


def test_closure_is_guarded_within_the_step():
    """The step itself runs on plain tensors, but the user's closure does not."""
    shard = sharded_parameter(torch.randn(6, 4))
    shard.grad = shard_of(torch.randn(6, 4), shard._zshard_part)
    with pytest.raises(ShardError):
        torch.optim.SGD([shard], lr=0.1).step(lambda: shard.norm())


def muon(params):
    return torch.optim.Muon([p for p in params if p.ndim == 2])


REFUSED = [torch.optim.Adafactor, torch.optim.LBFGS, LARS, muon]


@pytest.mark.parametrize("make", REFUSED)
def test_other_optimizers_raise_and_change_nothing(make):
    shards = [sharded_parameter(w) for w in wholes(0)]
    for shard, grad in zip(shards, wholes(1), strict=True):
        shard.grad = shard_of(grad, shard._zshard_part)
    with pytest.raises(ShardError, match=r"called on a shard.*of 'weight'"):
        make(shards).step(lambda: torch.tensor(0.0))
    for shard, whole in zip(shards, wholes(0), strict=True):
        assert_same(shard, shard._zshard_part.of(whole), "the shard")


def test_unguarded_kernels_are_refused_by_name(monkeypatch):
    """apex.optimizers.FusedLAMB gets the tensors in C++."""
    shard = sharded_parameter(torch.randn(6, 4))
    monkeypatch.setattr(hooks._core, "is_shard", lambda p: p is shard)
    fused = type("FusedLAMB", (torch.optim.SGD,), {"__module__": "apex.optimizers.fused_lamb"})
    with pytest.raises(ShardError, match=r"FusedLAMB scales updates by norms.*no_shard"):
        fused([shard], lr=0.1).step()
    fused([nn.Parameter(torch.ones(2))], lr=0.1).step()


def test_scalar_state_stays_unsharded():
    shard = sharded_parameter(torch.tensor(2.0))
    shard.grad = shard_of(torch.tensor(1.0), shard._zshard_part)
    optimizer = torch.optim.NAdam([shard], lr=0.1)
    optimizer.step()
    assert optimizer.state[shard]["step"].item() == 1.0
    assert optimizer.state[shard]["mu_product"].item() < 1.0


def test_new_zeros_state_is_sharded():
    for numel in (5, 6, 7):
        whole = torch.randn(6, 3)
        part = part_like(whole, numel=numel)
        shard = shard_of(whole, part)
        state = shard.new_zeros(shard.shape)
        assert type(state) is ShardTensor
        assert same(state.add_(shard), shard)


def test_where_with_a_condition_alone_is_refused():
    with pytest.raises(ShardError, match="where"):
        torch.where(sharded_parameter(torch.randn(6, 4)).detach() > 0)
