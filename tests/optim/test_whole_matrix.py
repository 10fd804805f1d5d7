"""Optimizers that need full matrices, over shards, against the plain model's: zshard.WholeMatrix,
and what zshard.Muon shares with it (hybrid strategies, state dicts, checkpoints)."""

import functools

import pytest
import torch
from compare import assert_same
from groups import hosts_of, mesh_of
from models import CASES, COMBINATIONS, make
from nursery import fork_ranks
from optim_states import HYBRID, differ
from scenario import Scenario, sharded
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers.matrices import hidden_matrices
from zshard.units.shards import part_of

EACH_WAY = pytest.mark.parametrize("transport", ["shm", "c10d"])


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
    """Begins from the parameters' values, inside and outside of its state, and counts steps."""

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
    "Anchored": Anchored,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "Shampoo": Shampoo,
}


def whole(kind, model):
    """Return WholeMatrix of a sharded model, and the class itself of a plain one."""
    params = [p for p in model.parameters() if kind != "Muon" or p.ndim == 2]
    cls = CLASSES[kind]
    if isinstance(model, FSDP):
        return zshard.WholeMatrix(cls, params, lr=0.05)
    return cls(params, lr=0.05)


def same_as_ddp(name, combination, kind):
    ours, theirs = Scenario(name, combination, functools.partial(whole, kind), steps=4).same()
    assert differ(ours.optimizer.state_dict(), theirs.optimizer.state_dict()) == []


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", ["wide", "mlp", "tied", "frozen", "unused"])
@on_ranks(2)
def test_bit_identical_to_ddp(name, combination):
    same_as_ddp(name, combination, "Adafactor")


@pytest.mark.parametrize("combination", COMBINATIONS[:4], ids="-".join)
@pytest.mark.parametrize("kind", ["Muon", "Shampoo", "Anchored"])
@on_ranks(2)
def test_with_other_optimizers(combination, kind):
    """Of these sizes DDP's gradients are aligned in memory, on which products depend."""
    same_as_ddp("wide", combination, kind)


class Mixed(nn.Module):
    """A part that is sharded, and one that the script ignores and gives the same gradients."""

    def __init__(self):
        super().__init__()
        self.inside, self.beside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.beside(self.inside(x))


@pytest.mark.sampled(3)
@EACH_WAY
@pytest.mark.parametrize("kind", ["Shampoo", "Anchored"])
@pytest.mark.parametrize("active", ["both", "inside", "beside"])
@on_ranks(2)
def test_parameters_of_two_kinds_take_one_step(transport, kind, active):
    plain, module = make(Mixed), make(Mixed)
    model = FSDP(module, ignored_modules=[module.beside], transport=transport)
    optimizers = [whole(kind, plain), whole(kind, model)]
    for each in (plain, model):
        each.inside.requires_grad_(active != "beside")
        each.beside.requires_grad_(active != "inside")
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.full((2, 6), 1.0 + step)).square().sum().backward()
            optimizer.step()
    assert_same(model.state_dict(), plain.state_dict(), kind)
    assert differ(optimizers[1].state_dict(), optimizers[0].state_dict()) == []


class Sizes(nn.Module):
    """The last layer costs more than the others together."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n, bias=False) for n in (10, 9, 40))

    def forward(self, x):
        return sum(each(x[:, : each.in_features]).square().sum() for each in self.layers)


@EACH_WAY
@on_ranks(2)
def test_a_later_group_leaves_the_state_where_it_is(transport):
    plain, module = make(Sizes), make(Sizes)
    model = FSDP(module, transport=transport)
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
    assert_same(model.state_dict(), plain.state_dict(), transport)
    assert differ(optimizers[1].state_dict(), optimizers[0].state_dict()) == []


# --- what WholeMatrix and Muon share --------------------------------------------------------------

EIGHT = {"lr": 0.01, "bits": 8, "min_8bit_size": 64}
OPTIMIZERS = {
    "Adafactor": functools.partial(whole, "Adafactor"),
    "Shampoo": functools.partial(whole, "Shampoo"),
    "Muon": lambda model: zshard.Muon(model, lr=0.05),
    "Muon of 8 bits": lambda model: zshard.Muon(model, lr=0.05, adamw=EIGHT),
}
EACH_KIND = pytest.mark.parametrize("kind", OPTIMIZERS)


def over(kind, *way, **options):
    return Scenario("wide", way, OPTIMIZERS[kind], options=options)


def agree(ours, theirs):
    assert_same(ours.state(), theirs.state(), "the model")
    assert not differ(ours.optimizer.state_dict(), theirs.optimizer.state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", HYBRID)
@EACH_KIND
@on_ranks(4)
def test_hybrid_agrees(kind, way):
    agree(over(kind, *way).sharded(3), over(kind, "full_shard", "c10d").sharded(3))


@on_ranks(4)
def test_hosts_agree_with_c10d():
    with hosts_of(2, 2) as group:
        options = {"process_group": group, "timeout": 60}
        ways = [("full_shard", transport) for transport in ("hosts", "c10d")]
        agree(*(over("Muon of 8 bits", *way, **options).sharded(3) for way in ways))


def over_two_transports():
    """Of all ranks shm, of those that have shards c10d."""
    over("Adafactor", "full_shard", "shm").sharded(3)
    mesh, kind = mesh_of(2, 2), ("hybrid_shard", "c10d")
    FSDP(nn.Linear(4, 4), device_mesh=mesh, strategy=kind[0], transport=kind[1])
    values = over("Adafactor", *HYBRID[0]).sharded(3).state()
    part = part_of(next(sharded("wide", HYBRID[0]).parameters()))
    return part.comm.transport, part.shards.transport, values


def over_one_transport():
    return over("Adafactor", *HYBRID[0]).sharded(3).state()


def test_shards_over_another_transport_than_the_step():
    theirs = fork_ranks(over_one_transport, 4, check=True)
    for ours, expected in zip(fork_ranks(over_two_transports, 4, check=True), theirs, strict=True):
        assert ours.value[:2] == ("shm", "c10d")
        assert_same(ours.value[2], expected.value, "the model")


def shapes_on_this_rank(kind):
    optimizer = over(kind, "full_shard", "shm").sharded(1).optimizer
    if kind == "Adafactor":
        return [tuple(p.shape) for p in optimizer._inner.state]
    buffers = [state.get("momentum_buffer") for state in optimizer.state.values()]
    return sum(each.numel() for each in buffers if each is not None)


def test_each_state_is_on_one_rank(pool3):
    model = CASES["wide"].make()
    shapes = pool3.run(shapes_on_this_rank, "Adafactor")
    held = [shape for own in shapes for shape in own]
    assert all(shapes) and sorted(held) == sorted(tuple(p.shape) for p in model.parameters())
    total = sum(p.numel() for p in model.parameters() if id(p) in hidden_matrices(model))
    numels = pool3.run(shapes_on_this_rank, "Muon")
    assert sum(numels) == total and max(numels) < total / 2


def saves(path, kind, transport):
    training = over(kind, "full_shard", transport).sharded(3)
    zshard.save(path, training.model, training.optimizer)
    by_name = zshard.optim_state_dict(training.model, training.optimizer, rank0_only=True)
    return training.optimizer.state_dict(), by_name


def loads(path, kind, transport, how, state, by_name):
    training = over(kind, "full_shard", transport).sharded(seed=2)
    model, optimizer = training.model, training.optimizer
    for group in optimizer.param_groups:
        group["lr"] = 0.9
    if how == "file":
        zshard.load(path, model, optimizer)
    elif how == "dict":
        optimizer.load_state_dict(state)
    else:
        known = by_name if torch.distributed.get_rank() == 0 else None
        zshard.load_optim_state_dict(model, optimizer, known, from_rank0=True)
    loaded = optimizer.state_dict()
    training.go(1)
    return loaded


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("transport", "later"), [("shm", "c10d"), ("c10d", "shm")])
@EACH_KIND
@pytest.mark.parametrize("how", ["file", "dict", "rank 0"])
def test_saved_at_2_ranks_loads_at_3(pool2, pool3, tmp_path, kind, transport, later, how):
    path = str(tmp_path / "there")
    (saved, by_name), *_ = pool2.run(saves, path, kind, transport)
    for loaded in pool3.run(loads, path, kind, later, how, saved, by_name):
        assert not differ(loaded, saved)
        assert loaded["param_groups"] == saved["param_groups"]
    plain = Scenario("wide", optimizer=OPTIMIZERS[kind]).plain().optimizer
    plain.load_state_dict(saved)
    assert not differ(plain.state_dict(), saved)


@pytest.mark.sampled(3)
@EACH_WAY
@EACH_KIND
@on_ranks(2)
def test_a_loaded_run_continues_with_the_bits_of_an_uninterrupted_one(kind, transport, tmp_path):
    ours, again = (over(kind, "full_shard", transport).sharded(seed=seed) for seed in (1, 2))
    ours.go(2)
    zshard.save(tmp_path / "there", ours.model, ours.optimizer)
    zshard.load(tmp_path / "there", again.model, again.optimizer)
    again.losses += ours.losses
    agree(again.go(2), ours.go(2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Muon", "Muon of 8 bits"])
@on_ranks(2)
def test_optimizer_that_is_older_than_the_model_and_state_on_a_disk(kind, tmp_path):
    """The plain model makes the first step, on the same batch everywhere."""
    trainings = []
    for options in ({}, {"strategy": "no_shard"}, {"offload": str(tmp_path)}):
        training = Scenario("wide", optimizer=OPTIMIZERS[kind]).plain(1)
        FSDP(training.model, auto_wrap_policy=CASES["wide"].policy, **options)
        training.rank = torch.distributed.get_rank()
        trainings.append(training.go(2))
    for each in trainings[1:]:
        agree(each, trainings[0])


def test_unsharded_model_and_its_state():
    plain, mine = ([nn.Parameter(torch.ones(4, 3)) for _ in range(2)] for _ in range(2))
    optimizers = [torch.optim.Adafactor(plain), zshard.WholeMatrix(torch.optim.Adafactor, mine)]
    for params, optimizer in zip((plain, mine), optimizers, strict=True):
        params[0].grad = torch.arange(12.0).view(4, 3)
        optimizer.step()
    assert_same(mine, plain, "the parameters")
    assert not differ(optimizers[1].state_dict(), optimizers[0].state_dict())


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
