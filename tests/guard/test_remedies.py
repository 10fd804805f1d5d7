"""The remedies in errors work: each is applied on the ranks that got the error, which then
continue. A row has a script's operation, text of the error, and the script with the remedy."""

import copy

import pytest
import torch
from compare import assert_same
from models import COMBINATIONS, make
from rows import all_raise, all_rows
from scenarios import Wide, floats, loss_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, ShardError, fully_shard

EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])
SHARDED_OR_NOT = pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])


def first(model):
    return next(model.parameters())


def norms_as_advised(model):
    assert torch.isfinite(model.clip_grad_norm_(1.0))
    assert all(norm >= 0 for norm in zshard.named_norms(model, grads=True).values())


def penalty_as_advised(model):
    before = [zshard.full_tensor(p.grad) for p in model.parameters()]
    values = [zshard.full_tensor(p) for p in model.parameters()]
    with FSDP.summon_full_params(model):
        loss = sum((p * p).sum() for p in model.parameters())
    loss.backward()
    for p, grad, value in zip(model.parameters(), before, values, strict=True):
        torch.testing.assert_close(zshard.full_tensor(p.grad), grad + 2 * value)


def total_norm_as_advised(model):
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    zshard.named_norms(model)


def transpose(model):
    return first(model).T


def block_forward(model):
    return model.first.forward(torch.ones(1, model.first.in_features))


def in_full(action):
    def advised(model):
        with FSDP.summon_full_params(model):
            action(model)

    return advised


SHARD_ERRORS = {
    "isfinite": (
        lambda model: torch.isfinite(first(model).grad).all(),
        "clip_grad_norm_() returns",
        norms_as_advised,
    ),
    "mean": (
        lambda model: first(model).mean(),
        "zshard.full_tensor(t.detach())",
        lambda model: zshard.full_tensor(first(model).detach()).mean(),
    ),
    "penalty": (
        lambda model: sum(p.abs().sum() for p in model.parameters()),
        "For a term of the loss",
        penalty_as_advised,
    ),
    "transpose": (transpose, "FSDP.summon_full_params(model)", in_full(transpose)),
    "forward": (block_forward, "register_forward_method", in_full(block_forward)),
    "total norm": (
        lambda model: nn.utils.get_total_norm(model.parameters()),
        "p.grad for p in model.parameters()",
        total_norm_as_advised,
    ),
}


@on_ranks(2)
def test_remedies_of_shard_errors_work():
    model = FSDP(make(Wide))
    loss_of(model(floats(0))).backward()
    with all_rows() as row:
        for name, (misdeed, words, advised) in SHARD_ERRORS.items():
            with row(name):
                with pytest.raises(ShardError) as caught:
                    misdeed(model)
                assert words in str(caught.value)
                advised(model)


class Scaled(nn.Module):
    """As CLIP: the loss multiplies the forward's result by a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x)


@EACH_WAY
@SHARDED_OR_NOT
@on_ranks(2)
def test_a_scale_that_the_loss_uses_trains_by_the_first_remedy(strategy, transport):
    plain = make(Scaled)
    model = FSDP(make(Scaled), strategy=strategy, transport=transport)
    for each in (plain, model):
        out = each(torch.ones(2, 8))
        # Over c10d the last unit of a forward stays unsharded until the backward, so this is right.
        if each is model and (strategy, transport) == ("full_shard", "shm"):
            with pytest.raises(ShardError) as caught:
                out * model.scale.exp()
            text = str(caught.value)
            assert text.index("within `with FSDP.summon") < text.index("zshard.full_tensor(")
        with FSDP.summon_full_params(model):
            loss = (out * each.scale.exp()).sum()
        loss.backward()
    assert zshard.full_tensor(model.scale.grad).equal(plain.scale.grad)


class Momentum(nn.Module):
    """Moves one layer towards another in its forward, as momentum encoders do. (In ways that are
    right: training/test_forward_writes.py.)"""

    def __init__(self):
        super().__init__()
        self.slow, self.fast = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.slow.weight.data = self.slow.weight * 0.9 + self.fast.weight.data * 0.1
        return self.slow(self.fast(x))


@EACH_WAY
@on_ranks(2)
def test_writes_in_a_forward_use_data_of_all_or_of_none(transport):
    model = FSDP(make(Momentum), transport=transport)
    with pytest.raises(ShardError, match=r"use `\.data` of all parameters.*or of none"):
        model(torch.ones(2, 8))


class Tied(nn.Module):
    """An output layer that uses the embedding's weight; `weight` returns it."""

    def __init__(self, weight):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(self.layer(self.emb(x)), self.weight(self))


def grads_of(model):
    """Return full gradients of one backward."""
    model(torch.arange(4)).square().sum().backward()
    grads = zshard.whole_named_parameters(model, grads=True)
    return {name: grad for name, grad in grads if grad is not None}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", [*COMBINATIONS, ("full_shard", "auto")])
@on_ranks(1, 2)
def test_full_tensor_in_a_forward_is_refused_where_it_would_drop_a_gradient(combination):
    """The parameter itself gives the plain model's gradients, and values are constants."""
    strategy, transport = combination

    def wrapped(weight):
        policy = {nn.Embedding, nn.Linear}
        return FSDP(Tied(weight), strategy=strategy, transport=transport, auto_wrap_policy=policy)

    for refused in (
        lambda model: zshard.full_tensor(model.emb.weight),
        lambda model: dict(zshard.whole_named_parameters(model))["emb.weight"],
    ):
        model = wrapped(refused)
        said = "full tensor of 'emb.weight'.* no gradient .*parameter itself"
        for _ in range(2):
            with pytest.raises(ShardError, match=said):
                model(torch.arange(4))
        model.weight = lambda model: model.emb.weight
        assert_same(grads_of(model), grads_of(Tied(model.weight)), "the remedy's gradients")
        zshard.full_tensor(model.emb.weight)
        zshard.full_tensor(model.emb.weight.grad)
    for value in (
        torch.no_grad()(lambda model: zshard.full_tensor(model.emb.weight)),
        lambda model: zshard.full_tensor(model.emb.weight.detach()),
    ):
        constant = grads_of(Tied(lambda model: model.emb.weight.detach()))
        assert_same(grads_of(wrapped(value)), constant, "gradients beside a constant")


def resize(embedding, rows):
    """As transformers' resize_token_embeddings() does."""
    larger = nn.Embedding(rows, embedding.embedding_dim)
    larger.weight.data.zero_()
    larger.weight.data[: len(embedding.weight)] = embedding.weight.data[:]
    embedding.weight.data = larger.weight.data


@on_ranks(2)
def test_a_sharded_layer_is_resized_before_it_is_sharded():
    def plain():
        return make(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)))

    model = FSDP(plain())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ShardError, match=r"Resize layers before FSDP\(\.\.\.\)"):
        resize(model[0], 9)
    with pytest.raises(RuntimeError, match="or resize the model before FSDP"):
        in_full(lambda model: resize(model[0], 9))(model)
    # Nothing is half changed: all units are shards again, and the next step is right.
    assert_same(model.state_dict(), before, "the model")
    model(torch.tensor([1])).sum().backward()
    larger = plain()
    larger.load_state_dict(model.state_dict())
    resize(larger[0], 9)
    FSDP(larger)(torch.tensor([8])).sum().backward()


class Encoder(nn.Sequential):
    def encode(self, x):
        return nn.functional.linear(x, self[0].weight)


@on_ranks(2)
def test_remedy_for_other_methods_works():
    model = FSDP(Encoder(nn.Linear(8, 8)), auto_wrap_policy=None)
    with pytest.raises(ShardError, match="register_forward_method"):
        model.encode(torch.ones(2, 8))
    zshard.register_forward_method(model, "encode")
    model.encode(torch.ones(2, 8)).sum().backward()
    assert (zshard.full_tensor(model[0].weight.grad) == 2.0).all()


@on_ranks(2)
def test_full_matrix_optimizer_is_refused():
    def muon(strategy):
        model = FSDP(nn.Sequential(nn.Linear(8, 8, bias=False)), strategy=strategy)
        model(torch.ones(2, 8)).sum().backward()
        torch.optim.Muon(model.parameters()).step()

    with pytest.raises(ShardError, match=r'elementwise one.*"no_shard"') as caught:
        muon("full_shard")
    assert str(caught.value).count("elementwise one") == 1
    muon("no_shard")


@on_ranks(2)
def test_shared_module_is_sharded_first():
    def built():
        shared = nn.Linear(8, 8)
        return nn.Sequential(*(nn.Sequential(shared, nn.Linear(8, 8)) for _ in range(2)))

    model = built()
    fully_shard(model[0])
    with pytest.raises(ValueError, match="the module that both share first"):
        fully_shard(model[1])
    model = built()
    for part in (model[0][0], model[0], model[1], model):
        fully_shard(part)
    for each in (model, FSDP(built())):
        each(torch.ones(2, 8)).sum().backward()


class Equal(nn.Linear):
    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


def test_modules_that_cannot_be_sharded_are_refused_by_name():
    equal = nn.Sequential(Equal(4, 4), Equal(4, 4))
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    sharded = FSDP(nn.Linear(2, 2))
    said = "module '1' compares equal to another one"
    all_raise(ValueError, {said: lambda: FSDP(equal, auto_wrap_policy=None)})
    all_raise(ValueError, {said: lambda: FSDP(equal, auto_wrap_policy={Equal})})
    all_raise(ValueError, {"'1.weight' is in a TorchScript module": lambda: FSDP(scripted)})
    all_raise(TypeError, {"use copy.deepcopy(model)": lambda: copy.copy(sharded)})
    FSDP(scripted, ignored_modules=[scripted[1]])(torch.ones(1, 4)).sum().backward()
    assert copy.deepcopy(sharded).weight.equal(sharded.weight)


def test_subclass_registration_skips_sharded_classes():
    seen = []

    class Base(nn.Linear):
        def __init_subclass__(cls, *, tag):
            super().__init_subclass__()
            seen.append((cls.__name__, tag))

    class Model(Base, tag="model"):
        pass

    model = FSDP(Model(4, 4))
    assert seen == [("Model", "model")]

    class Derived(type(model), tag="derived"):
        pass

    assert seen == [("Model", "model"), ("Derived", "derived")]


@on_ranks(2)
def test_dtensors_and_meshes_for_tensor_parallelism_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, parallel = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
    parallelize_module(parallel, mesh["tp"], {"0": ColwiseParallel()})
    all_raise(ValueError, {"no tensor parallelism": lambda: FSDP(model, device_mesh=mesh)})
    said = "'0.weight' is a DTensor"
    all_raise(NotImplementedError, {said: lambda: FSDP(parallel)})
    all_raise(NotImplementedError, {said: lambda: fully_shard(parallel)})
    model = FSDP(model, device_mesh=mesh["tp"])
    model(torch.ones(1, 8)).sum().backward()
