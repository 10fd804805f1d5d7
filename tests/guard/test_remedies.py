"""The remedies in errors work: each is applied on the ranks that got the error, which then
continue.

A table: a script's operation, text of the error, and the script with the remedy.
"""

from __future__ import annotations

import pytest
import torch
from models import make
from scenarios import Wide, floats, loss_of
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP, fully_shard


def trained(strategy="full_shard"):
    model = FSDP(make(Wide), strategy=strategy)
    loss_of(model(floats(0))).backward()
    return model


def isfinite(model):
    torch.isfinite(next(model.parameters()).grad).all()


def isfinite_as_advised(model):
    assert torch.isfinite(model.clip_grad_norm_(1.0))
    assert all(norm >= 0 for norm in zshard.named_norms(model, grads=True).values())


def mean(model):
    next(model.parameters()).mean()


def mean_as_advised(model):
    zshard.full_tensor(next(model.parameters()).detach()).mean()


def penalty(model):
    sum(p.abs().sum() for p in model.parameters())


def penalty_as_advised(model):
    before = [zshard.full_tensor(p.grad) for p in model.parameters()]
    values = [zshard.full_tensor(p) for p in model.parameters()]
    with FSDP.summon_full_params(model):
        loss = sum((p * p).sum() for p in model.parameters())
    loss.backward()
    for p, grad, value in zip(model.parameters(), before, values, strict=True):
        torch.testing.assert_close(zshard.full_tensor(p.grad), grad + 2 * value)


def transpose(model):
    next(model.parameters()).T  # noqa: B018


def transpose_as_advised(model):
    with FSDP.summon_full_params(model):
        next(model.parameters()).T  # noqa: B018


def block_forward(model):
    linear = next(each for each in model.modules() if isinstance(each, nn.Linear))
    linear.forward(torch.ones(1, linear.in_features))


def block_forward_as_advised(model):
    linear = next(each for each in model.modules() if isinstance(each, nn.Linear))
    with FSDP.summon_full_params(model):
        linear.forward(torch.ones(1, linear.in_features))


def total_norm(model):
    torch.nn.utils.get_total_norm(model.parameters())


def total_norm_as_advised(model):
    torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    zshard.named_norms(model)


SHARD_ERRORS = [
    (isfinite, "clip_grad_norm_() returns", isfinite_as_advised),
    (mean, "zshard.full_tensor(t.detach())", mean_as_advised),
    (penalty, "For a term of the loss", penalty_as_advised),
    (transpose, "FSDP.summon_full_params(model)", transpose_as_advised),
    (block_forward, "register_forward_method", block_forward_as_advised),
    (total_norm, "p.grad for p in model.parameters()", total_norm_as_advised),
]


def every_remedy():
    model = trained()
    for misdeed, words, advised in SHARD_ERRORS:
        with pytest.raises(zshard.ShardError) as caught:
            misdeed(model)
        assert words in str(caught.value), misdeed.__name__
        advised(model)
    return []


@ranks(2)
def test_remedies_of_shard_errors_work(pool):
    assert pool.run(every_remedy) == [[]] * pool.world


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x):
        return self.block(x)

    def encode(self, x):
        return torch.nn.functional.linear(x, self.block.weight)


def another_method():
    model = FSDP(Encoder(), auto_wrap_policy=None)
    with pytest.raises(zshard.ShardError, match="register_forward_method"):
        model.encode(torch.ones(2, 8))
    zshard.register_forward_method(model, "encode")
    model.encode(torch.ones(2, 8)).sum().backward()
    return zshard.full_tensor(model.block.weight.grad).tolist() == torch.full((8, 8), 2.0).tolist()


@ranks(2)
def test_remedy_for_other_methods_works(pool):
    assert pool.run(another_method) == [True] * pool.world


def muon(strategy):
    model = FSDP(nn.Sequential(nn.Linear(8, 8, bias=False)), strategy=strategy)
    model(torch.ones(2, 8)).sum().backward()
    torch.optim.Muon(model.parameters()).step()


def steps_matrices():
    with pytest.raises(zshard.ShardError, match=r'elementwise one.*"no_shard"') as caught:
        muon("full_shard")
    assert str(caught.value).count("elementwise one") == 1
    muon("no_shard")
    return True


@ranks(2)
def test_full_matrix_optimizer_is_refused(pool):
    assert pool.run(steps_matrices) == [True] * pool.world


class Around(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(8, 8)

    def forward(self, x):
        return self.own(self.shared(x))


def shared():
    def made():
        part = nn.Linear(8, 8)
        return nn.Sequential(Around(part), Around(part))

    model = made()
    fully_shard(model[0])
    with pytest.raises(ValueError, match="two modules share its module"):
        fully_shard(model[1])
    model = made()
    for part in (model[0].shared, model[0], model[1], model):
        fully_shard(part)
    model(torch.ones(2, 8)).sum().backward()
    model = FSDP(made())
    model(torch.ones(2, 8)).sum().backward()
    return True


@ranks(2)
def test_shared_module_is_sharded_first(pool):
    assert pool.run(shared) == [True] * pool.world


class Equal(nn.Linear):
    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


@pytest.mark.parametrize("policy", [None, {Equal}])
def test_modules_that_compare_equal_are_refused(policy):
    model = nn.Sequential(Equal(4, 4), Equal(4, 4))
    with pytest.raises(ValueError, match="module '1' compares equal to another one"):
        FSDP(model, auto_wrap_policy=policy)


def test_torchscript_submodule_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"parameter '1.weight' is in a TorchScript module"):
        FSDP(model)
    FSDP(model, ignored_modules=[model[1]])(torch.ones(1, 4)).sum().backward()


def test_subclass_registration_skips_sharded_classes():
    seen = []

    class Base(nn.Module):
        def __init_subclass__(cls, *, tag):
            super().__init_subclass__()
            seen.append((cls.__name__, tag))

    class Model(Base, tag="model"):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

    model = FSDP(Model())
    assert seen == [("Model", "model")]

    class Derived(type(model), tag="derived"):
        pass

    assert seen == [("Model", "model"), ("Derived", "derived")]


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="zshard has no tensor parallelism"):
        FSDP(model, device_mesh=mesh)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    for wrap in (FSDP, fully_shard):
        with pytest.raises(NotImplementedError, match=r"'0.weight' is a DTensor.*no tensor par"):
            wrap(model)
    model = FSDP(nn.Sequential(nn.Linear(8, 8)), device_mesh=mesh["tp"])
    model(torch.ones(1, 8)).sum().backward()
    return True


@ranks(2)
def test_dtensors_and_meshes_for_tensor_parallelism_are_refused(pool):
    assert pool.run(tensor_parallel) == [True] * pool.world
