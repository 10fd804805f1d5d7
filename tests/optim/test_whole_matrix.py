"""zshard.WholeMatrix: optimizers that need full matrices, over shards, against the plain model's."""

import pytest
import torch
from compare import assert_same
from groups import mesh_of
from models import CASES, COMBINATIONS, ddp, make, sharded, train
from nursery import fork_ranks
from optim_states import HYBRID, differ, go_on, wrap
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.units.shards import part_of


class Shampoo(torch.optim.Optimizer):
    """With state of other shapes than the parameter's, and a counter in its param group."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None or p.ndim != 2:
                    continue
                state = self.state[p]
                for key, product in (("left", p.grad @ p.grad.T), ("right", p.grad.T @ p.grad)):
                    state[key] = state.get(key, 0) + product
                left = state["left"].norm() * state["right"].norm()
                p.sub_(p.grad / left.sqrt(), alpha=group["lr"] / group["step"])


class Anchored(torch.optim.Optimizer):
    """Begins from the parameters' values, in its state and beside it, and counts steps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "step": 0})
        self.anchors = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        anchors = iter(self.anchors)
        for group in self.param_groups:
            group["step"] += 1
            for p, anchor in zip(group["params"], anchors, strict=False):
                if p.grad is not None:
                    slow = self.state[p]["slow"]
                    p.sub_(p.grad + 0.1 * (p - anchor), alpha=group["lr"] / group["step"])
                    slow.lerp_(p, 0.5)
                    p.data = slow.clone()


CLASSES = {
    "Anchored": (Anchored, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Muon": (torch.optim.Muon, {"lr": 0.05}),
    "Shampoo": (Shampoo, {"lr": 0.05}),
}


def chosen(model, kind):
    return [p for p in model.parameters() if kind != "Muon" or p.ndim == 2]


def built(model, kind):
    cls, options = CLASSES[kind]
    return zshard.WholeMatrix(cls, chosen(model, kind), **options)


def full(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def compares(name, combination, kind):
    case, rank = CASES[name], torch.distributed.get_rank()
    model = sharded(name, combination)
    optimizer = built(model, kind)
    losses = train(model, case, optimizer, rank)
    plain = make(case.make)
    cls, options = CLASSES[kind]
    theirs = cls(chosen(plain, kind), **options)
    expected = train(ddp(plain, find_unused_parameters=case.unused), case, theirs, rank)
    assert losses == expected
    assert_same(full(model), full(plain), f"{name} with {kind}")
    assert differ(optimizer.state_dict(), theirs.state_dict()) == []


@ranks(2)
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", ["wide", "mlp", "tied", "frozen", "unused"])
def test_bit_identical_to_ddp(pool, name, combination):
    pool.run(compares, name, combination, "Adafactor")


@ranks(2)
@pytest.mark.parametrize("combination", COMBINATIONS[:4], ids="-".join)
@pytest.mark.parametrize("kind", ["Muon", "Shampoo", "Anchored"])
def test_with_other_optimizers(pool, combination, kind):
    """Of these sizes DDP's gradients are aligned in memory, on which products depend."""
    pool.run(compares, "wide", combination, kind)


def values_after(combination):
    model = wrap("wide", combination)
    train(model, CASES["wide"], built(model, "Adafactor"), torch.distributed.get_rank())
    return full(model)


class Mixed(nn.Module):
    """A part that is sharded, and one that the script ignores and gives the same gradients."""

    def __init__(self):
        super().__init__()
        self.inside, self.beside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.beside(self.inside(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("kind", ["Shampoo", "Anchored"])
@pytest.mark.parametrize("active", ["both", "inside", "beside"])
@on_ranks(2)
def test_parameters_of_two_kinds_take_one_step(transport, kind, active):
    plain = make(Mixed)
    module = make(Mixed)
    model = zshard.FSDP(module, ignored_modules=[module.beside], transport=transport)
    optimizers = []
    cls, options = CLASSES[kind]
    for each in (plain, model):
        given = [{"params": each.parameters()}]
        optimizers.append(
            cls(given, **options) if each is plain else zshard.WholeMatrix(cls, given, **options)
        )
        each.inside.requires_grad_(active != "beside")
        each.beside.requires_grad_(active != "inside")
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.full((2, 6), 1.0 + step)).square().sum().backward()
            optimizer.step()
    assert_same(full(model), full(plain), kind)
    assert differ(optimizers[1].state_dict(), optimizers[0].state_dict()) == []


class Sizes(nn.Module):
    """The last layer costs more than the others together."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n, bias=False) for n in (10, 9, 40))

    def forward(self, x):
        return sum(each(x[:, : each.in_features]).square().sum() for each in self.layers)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_a_later_group_leaves_the_state_where_it_is(transport):
    plain, module = make(Sizes), make(Sizes)
    model = zshard.FSDP(module, transport=transport)
    cls, options = torch.optim.AdamW, {"lr": 0.1}
    first = [each.layers[:2].parameters() for each in (plain, module)]
    optimizers = [cls(first[0], **options), zshard.WholeMatrix(cls, first[1], **options)]
    for step in range(4):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            if step == 2:
                optimizer.add_param_group({"params": each.layers[2].parameters()})
            each(torch.full((2, 40), 1.0 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full(model), full(plain), transport)
    assert differ(optimizers[1].state_dict(), optimizers[0].state_dict()) == []


@pytest.mark.parametrize("combination", HYBRID)
def test_hybrid_agrees(pool4, combination):
    ours = pool4.run(values_after, combination)
    theirs = pool4.run(values_after, ("full_shard", "c10d"))
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b, "the model")


def over_two_transports():
    """Of all ranks shm, of those that have shards c10d."""
    values_after(("full_shard", "shm"))
    mesh, kind = mesh_of(2, 2), ("hybrid_shard", "c10d")
    FSDP(nn.Linear(4, 4), device_mesh=mesh, strategy=kind[0], transport=kind[1])
    values = values_after(HYBRID[0])
    part = part_of(next(wrap("wide", HYBRID[0]).parameters()))
    return part.comm.transport, part.shards.transport, values


def test_shards_over_another_transport_than_the_step():
    theirs = [result.value for result in fork_ranks(values_after, 4, HYBRID[0], check=True)]
    for found, expected in zip(fork_ranks(over_two_transports, 4, check=True), theirs, strict=True):
        assert found.value[:2] == ("shm", "c10d")
        assert_same(found.value[2], expected, "the model")


def owned():
    model = sharded("wide", ("full_shard", "shm"))
    optimizer = built(model, "Adafactor")
    train(model, CASES["wide"], optimizer, 0, steps=1)
    return [tuple(p.shape) for p in optimizer._inner.state]


def test_each_state_is_on_one_rank(pool3):
    held = pool3.run(owned)
    assert sorted(shape for shapes in held for shape in shapes) == sorted(
        tuple(p.shape) for p in CASES["wide"].make().parameters()
    )
    assert all(held)


def saves(path, kind):
    model = sharded("wide", ("full_shard", "shm"))
    optimizer = built(model, kind)
    train(model, CASES["wide"], optimizer, 0)
    zshard.save(path, model, optimizer)
    by_name = zshard.optim_state_dict(model, optimizer, rank0_only=True)
    return optimizer.state_dict(), by_name, go_on("wide", model, optimizer)["model"]


def loads(path, kind, way, by_name):
    model = sharded("wide", ("full_shard", "c10d"), seed=2)
    optimizer = built(model, kind)
    zshard.load(path, model, optimizer)
    if way == "state dict":
        state = optimizer.state_dict()
        optimizer = built(model, kind)
        optimizer.load_state_dict(state)
    if way == "rank 0":
        optimizer = built(model, kind)
        state = by_name if torch.distributed.get_rank() == 0 else None
        zshard.load_optim_state_dict(model, optimizer, state, from_rank0=True)
    return optimizer.state_dict()


@pytest.mark.parametrize("kind", ["Adafactor", "Shampoo"])
@pytest.mark.parametrize("way", ["file", "state dict", "rank 0"])
def test_saved_at_2_ranks_loads_at_3(pool2, pool3, tmp_path, kind, way):
    path = str(tmp_path / "there")
    (saved, by_name, _), *_ = pool2.run(saves, path, kind)
    for found in pool3.run(loads, path, kind, way, by_name):
        assert not differ(found, saved)


def resumes(path, kind):
    model = sharded("wide", ("full_shard", "shm"), seed=2)
    optimizer = built(model, kind)
    zshard.load(path, model, optimizer)
    return go_on("wide", model, optimizer)["model"]


def test_resumed_run_continues(pool2, tmp_path):
    path = str(tmp_path / "there")
    first = pool2.run(saves, path, "Adafactor")
    for (_, _, expected), found in zip(first, pool2.run(resumes, path, "Adafactor"), strict=True):
        assert_same(found, expected, "the model")


def test_unsharded_model_and_its_state():
    plain = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    mine = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizers = [torch.optim.Adafactor(plain), zshard.WholeMatrix(torch.optim.Adafactor, mine)]
    for params, optimizer in zip((plain, mine), optimizers, strict=True):
        params[0].grad = torch.arange(12.0).view(4, 3)
        optimizer.step()
    assert_same(mine, plain, "the parameters")
    assert not differ(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(TypeError, match="LBFGS needs a closure"):
        zshard.WholeMatrix(torch.optim.LBFGS, [nn.Parameter(torch.ones(2))])


# --- param groups ---------------------------------------------------------------------------------


class Strict(torch.optim.SGD):
    def add_param_group(self, param_group):
        if param_group.get("lr") == 7:
            raise ValueError("lr is 7")
        super().add_param_group(param_group)


def parameters(*sizes):
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def step(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


def test_a_group_that_the_optimizer_refuses_is_not_there():
    first, second = parameters(4, 5)
    optimizer = zshard.WholeMatrix(Strict, [first], lr=0.5)
    with pytest.raises(ValueError, match="lr is 7"):
        optimizer.add_param_group({"params": [second], "lr": 7})
    step(optimizer)
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    step(optimizer)
    assert first[0].item() == 0.0 and second[0].item() == 0.75


def test_named_groups_may_be_added_after_a_load():
    first, second = parameters(4, 5)
    optimizer = zshard.WholeMatrix(torch.optim.SGD, [("first", first)], lr=0.5, momentum=0.9)
    step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [("second", second)]})
    step(optimizer)
    assert [group["param_names"] for group in optimizer.param_groups] == [["first"], ["second"]]
    assert second[0].item() == 0.5


@pytest.mark.parametrize("change", ["removed", "group removed", "replaced"])
def test_parameters_that_were_removed_or_replaced_are_refused_with_the_remedy(change):
    first, second, other = parameters(4, 5, 4)
    optimizer = zshard.WholeMatrix(torch.optim.SGD, [{"params": [first]}, {"params": [second]}])
    step(optimizer)
    if change == "removed":
        del optimizer.param_groups[0]["params"][0]
    elif change == "group removed":
        del optimizer.param_groups[0]
    else:
        optimizer.param_groups[0]["params"][0] = other
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"make another WholeMatrix\(\)"):
            call()
