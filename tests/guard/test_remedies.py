"""The remedies in errors work: each is applied on the ranks that got the error, which then
continue.

A table: a script's operation, text of the error, and the script with the remedy.
"""

from __future__ import annotations

import copy

import pytest
import torch
from models import make
from scenarios import Wide, floats, loss_of
from spawn import on_ranks, ranks
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


class Scaled(nn.Module):
    """As CLIP: the loss multiplies what the forward returns by a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_scale_that_the_loss_uses_trains_by_the_first_remedy(strategy, transport):
    plain = make(Scaled)
    model = FSDP(make(Scaled), strategy=strategy, transport=transport)
    for each in (plain, model):
        out = each(torch.ones(2, 8))
        # Over c10d the last unit of a forward stays unsharded until the backward, so this is right.
        if each is model and (strategy, transport) == ("full_shard", "shm"):
            with pytest.raises(zshard.ShardError) as caught:
                out * model.scale.exp()
            text = str(caught.value)
            assert text.index("within `with FSDP.summon") < text.index("zshard.full_tensor(")
        with FSDP.summon_full_params(model):
            loss = (out * each.scale.exp()).sum()
        loss.backward()
    assert zshard.full_tensor(model.scale.grad).equal(plain.scale.grad)


class Momentum(nn.Module):
    """Moves one layer towards another in its forward, as momentum encoders do."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast, self.way = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        slow, fast = self.slow.weight, self.fast.weight
        with torch.no_grad():
            if self.way == "mixed":
                slow.data = slow * 0.9 + fast.data * 0.1
            elif self.way == "all data":
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            else:
                slow.copy_(slow * 0.9 + fast * 0.1)
        return self.slow(self.fast(x))


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_writes_in_a_forward_use_data_of_all_or_of_none(strategy, transport):
    plain = make(Momentum)
    model = FSDP(make(Momentum), strategy=strategy, transport=transport)
    if strategy != "no_shard":
        model.way = "mixed"
        with pytest.raises(zshard.ShardError, match=r"use `\.data` of all parameters.*or of none"):
            model(torch.ones(2, 8))
    for way in ("all data", "no data"):
        for each in (plain, model):
            each.way = way
            each(torch.ones(2, 8)).sum().backward()
    found = model.state_dict()
    assert [
        name for name, value in plain.state_dict().items() if not value.equal(found[name])
    ] == []


def resize(embedding, rows):
    """As transformers' resize_token_embeddings() does."""
    larger = nn.Embedding(rows, embedding.embedding_dim)
    larger.weight.data.zero_()
    larger.weight.data[: len(embedding.weight)] = embedding.weight.data[:]
    embedding.weight.data = larger.weight.data


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_a_sharded_layer_is_resized_before_it_is_sharded(transport):
    model = FSDP(make(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(zshard.ShardError, match=r"Resize layers before FSDP\(\.\.\.\)"):
        resize(model[0], 9)
    with (
        pytest.raises(RuntimeError, match="or resize the model before FSDP"),
        FSDP.summon_full_params(model),
    ):
        resize(model[0], 9)
    # Nothing is half changed: all units are shards again, and the next step is right.
    assert [name for name, v in model.state_dict().items() if not v.equal(before[name])] == []
    model(torch.tensor([1])).sum().backward()
    larger = make(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)))
    larger.load_state_dict(model.state_dict())
    resize(larger[0], 9)
    FSDP(larger)(torch.tensor([8])).sum().backward()
    assert True


def test_a_shallow_copy_is_refused_by_its_name():
    model = FSDP(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"copy\.copy\(\).*use copy\.deepcopy\(model\)"):
        copy.copy(model)
    assert copy.deepcopy(model).weight.equal(model.weight)


@on_ranks(2)
def test_remedies_of_shard_errors_work():
    model = trained()
    for misdeed, words, advised in SHARD_ERRORS:
        with pytest.raises(zshard.ShardError) as caught:
            misdeed(model)
        assert words in str(caught.value), misdeed.__name__
        advised(model)
    assert [] == []


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x):
        return self.block(x)

    def encode(self, x):
        return torch.nn.functional.linear(x, self.block.weight)


@on_ranks(2)
def test_remedy_for_other_methods_works():
    model = FSDP(Encoder(), auto_wrap_policy=None)
    with pytest.raises(zshard.ShardError, match="register_forward_method"):
        model.encode(torch.ones(2, 8))
    zshard.register_forward_method(model, "encode")
    model.encode(torch.ones(2, 8)).sum().backward()
    assert zshard.full_tensor(model.block.weight.grad).tolist() == torch.full((8, 8), 2.0).tolist()


def muon(strategy):
    model = FSDP(nn.Sequential(nn.Linear(8, 8, bias=False)), strategy=strategy)
    model(torch.ones(2, 8)).sum().backward()
    torch.optim.Muon(model.parameters()).step()


@on_ranks(2)
def test_full_matrix_optimizer_is_refused():
    with pytest.raises(zshard.ShardError, match=r'elementwise one.*"no_shard"') as caught:
        muon("full_shard")
    assert str(caught.value).count("elementwise one") == 1
    muon("no_shard")
    assert True


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
    with pytest.raises(ValueError, match="the module that both share first"):
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


@on_ranks(2)
def test_dtensors_and_meshes_for_tensor_parallelism_are_refused():
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
    assert True
