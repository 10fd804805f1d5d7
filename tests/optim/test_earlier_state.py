"""Optimizers that have state when their parameters are sharded: from a snapshot that a script loads
before it wraps the model, or from steps of the plain model.

The reference is a plain model, trained on all ranks' batches, that is never wrapped.
"""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import own_group, passing_groups
from models import COMBINATIONS, loss_of, make, make_optimizer
from scenarios import Wide, floats, message_of
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.optim import shared_state

OPTIMIZERS = ["torch.AdamW", "zshard.AdamW", "torch.SGD", "zshard.SGD", "torch.Adagrad"]


def plain_steps(model, optimizer, steps):
    world = dist.get_world_size()
    for i in steps:
        optimizer.zero_grad()
        sum(loss_of(model(floats(rank, i))) for rank in range(world)).div(world).backward()
        optimizer.step()


def own_steps(model, optimizer, steps):
    for i in steps:
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), i))).backward()
        optimizer.step()


def state_of(optimizer):
    return {f"{i}": own for i, own in optimizer.state_dict()["state"].items()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_state_from_before_sharding(combination, name, loads):
    strategy, transport = combination
    plain = make(Wide)
    theirs = make_optimizer(name, plain)
    plain_steps(plain, theirs, range(3))
    if loads:  # as a resuming script
        model = make(Wide, seed=2)
        optimizer = make_optimizer(name, model)
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        model = make(Wide)
        optimizer = make_optimizer(name, model)
        plain_steps(model, optimizer, range(3))
    FSDP(model, own_group(), strategy=strategy, transport=transport)
    found = differences(state_of(optimizer), state_of(theirs))  # before a step
    plain_steps(plain, theirs, range(3, 6))
    own_steps(model, optimizer, range(3, 6))
    found += differences(model.state_dict(), plain.state_dict())
    assert found + differences(state_of(optimizer), state_of(theirs)) == []


def by_layers():
    """fully_shard() layer by layer; a float64 state of a float32 parameter keeps its dtype."""
    plain, model = make(Wide), make(Wide)
    theirs, optimizer = (make_optimizer("torch.AdamW", each) for each in (plain, model))
    plain_steps(plain, theirs, range(2))
    plain_steps(model, optimizer, range(2))
    for each in (theirs, optimizer):
        for own in each.state.values():
            own["of its own"] = own["exp_avg"].double()
    for layer in (model.first, model.second):
        zshard.fully_shard(layer)
    zshard.fully_shard(model)
    return differences(state_of(optimizer), state_of(theirs))


@ranks(2, 3)
def test_state_from_before_fully_shard(pool):
    assert pool.run(by_layers) == [[]] * pool.world


# --- reads before the first step, or as the first thing after other ways to get state -------------


class Several(nn.Module):
    """Models that one optimizer steps. Each is sharded by itself."""

    def __init__(self, n):
        super().__init__()
        self.parts = nn.ModuleList(Wide() for _ in range(n))

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], 1)


KINDS = {
    "torch.AdamW": torch.optim.AdamW,
    "torch.SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "zshard.AdamW": zshard.AdamW,
    "zshard.AdamW8bit": zshard.AdamW8bit,
}


class Training:
    """Models with one optimizer, which has two param groups."""

    def __init__(self, name, n, seed=1):
        self.name, self.n = name, n
        self.model = make(lambda: Several(n), seed)
        params = list(self.model.parameters())
        matrices, rest = (
            [p for p in params if (p.dim() > 1) is is_one] for is_one in (True, False)
        )
        groups = [{"params": matrices}, {"params": rest, "lr": 0.02}]
        self.optimizer = KINDS[name](groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)

    def load(self, other, model=True, optimizer=True):
        if model:
            self.model.load_state_dict(copy.deepcopy(other.model.state_dict()))
        if optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def shard(self, settings, by_layers=False):
        for part in self.model.parts:
            for each in (part.first, part.second) if by_layers else (part,):
                FSDP(each, auto_wrap_policy=None, **settings)

    def plain_steps(self, steps):
        plain_steps(self.model, self.optimizer, steps)

    def own_steps(self, steps):
        own_steps(self.model, self.optimizer, steps)


def loaded_before(name, n, plain, settings):
    made = Training(name, n, seed=2)
    made.load(plain)
    made.shard(settings)
    return made


def stepped_before(name, n, plain, settings):
    made = Training(name, n)
    made.plain_steps(range(2))
    made.shard(settings)
    return made


def loaded_after(name, n, plain, settings):
    made = Training(name, n, seed=2)
    made.load(plain, optimizer=False)
    made.shard(settings)
    made.load(plain, model=False)
    return made


def stepped_after(name, n, plain, settings):
    made = Training(name, n)
    made.shard(settings)
    made.own_steps(range(2))
    return made


def wrapped_again(name, n, plain, settings):
    """Inner modules are sharded and stepped, and then the models that they are part of."""
    made = Training(name, n)
    made.shard(settings, by_layers=True)
    made.own_steps(range(2))
    made.shard(settings)
    return made


def copied(name, n, plain, settings):
    made = stepped_after(name, n, plain, settings)
    made.model, made.optimizer = copy.deepcopy((made.model, made.optimizer))
    return made


WAYS = [loaded_before, stepped_before, loaded_after, stepped_after, wrapped_again, copied]


def by_number(named):
    names = [name for group in named["param_groups"] for name in group["params"]]
    return {i: named["state"][name] for i, name in enumerate(names)}


def in_file(made, folder):
    file = io.BytesIO()
    torch.save(made.optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)["state"]


def reloaded(made, folder):
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    return made.optimizer.state_dict()["state"]


def on_rank_0(made, folder):
    """The others only send their shards."""
    named = zshard.optim_state_dict(made.model, made.optimizer, rank0_only=True)
    assert bool(named) is (dist.get_rank() == 0)
    return by_number(named) if named else None


def saved(made, folder):
    zshard.save(f"{folder}/checkpoint", made.model, made.optimizer)
    plain = Training(made.name, made.n, seed=3)
    zshard.load(f"{folder}/checkpoint", plain.model, plain.optimizer)
    return state_by_number(plain, folder)


def state_by_number(made, folder):
    return made.optimizer.state_dict()["state"]


def with_names(made, folder):
    return by_number(zshard.optim_state_dict(made.model, made.optimizer))


def twice(made, folder):
    state_by_number(made, folder)
    return with_names(made, folder)


def of_a_copy(made, folder):
    """The copy has no model, so of sharded state it has shards (test_optim_state.py)."""
    return copy.deepcopy(made.optimizer).state_dict()["state"]


LONE = [state_by_number, with_names, in_file, twice, of_a_copy]
TOGETHER = [*LONE, on_rank_0, reloaded, saved]


@passing_groups()
def reads(combination, name, way, n, folder):
    """Return what differs from the plain models': the state as the first read finds it, on rank 0
    alone and on all ranks, and, of two ranks, what two more steps make of it."""
    strategy, transport = combination
    settings = {"process_group": own_group(), "strategy": strategy, "transport": transport}
    is_lone = (transport == "shm" and way is not copied) or strategy == "no_shard"
    found = []
    for read, alone in [*((r, True) for r in LONE if is_lone), *((r, False) for r in TOGETHER)]:
        if read is of_a_copy and way not in (loaded_before, stepped_before):
            continue
        plain = Training(name, n)
        plain.plain_steps(range(2))
        made = way(name, n, plain, {**settings, "timeout": 20})
        state = read(made, folder) if not alone or dist.get_rank() == 0 else None
        wrong = [] if state is None else differences(state, state_by_number(plain, folder))
        plain.plain_steps(range(2, 4))
        made.own_steps(range(2, 4))
        ours, theirs = ([m.model.state_dict(), state_by_number(m, folder)] for m in (made, plain))
        if dist.get_world_size() == 2:  # else the plain model adds the ranks in another order
            wrong += differences(ours, theirs)
        found += [f"{read.__name__}, {'alone' if alone else 'together'}: {each}" for each in wrong]
    return found


@ranks(2)
@pytest.mark.sampled(7)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_reads_before_the_next_step(pool, tmp_path, combination, name, way, n):
    assert pool.run(reads, combination, name, way, n, str(tmp_path)) == [[], []]


@ranks(3)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [loaded_before, stepped_before, loaded_after])
@pytest.mark.parametrize("name", ["torch.AdamW", "zshard.AdamW"])
def test_reads_before_the_first_step(pool, tmp_path, name, way):
    assert pool.run(reads, ("full_shard", "shm"), name, way, 1, str(tmp_path)) == [[], [], []]


@passing_groups()
def reads_a_copy_alone():
    """Return the error, and what differs after its remedy."""
    settings = {"process_group": own_group(), "timeout": 20}
    made = copied("torch.AdamW", 1, None, settings)
    known, shared_state._LATE = shared_state._LATE, 0.0
    text = message_of(made.optimizer.state_dict) if dist.get_rank() == 0 else ""
    shared_state._LATE = known
    dist.barrier()
    plain = Training("torch.AdamW", 1)
    plain.plain_steps(range(2))
    return text, differences(state_by_number(made, ""), state_by_number(plain, ""))


def test_rank_0_reads_a_copy_that_no_rank_has_stepped(pool2):
    (text, wrong), (_, others) = pool2.run(reads_a_copy_alone)
    assert "or it is a copy: call state_dict() on all ranks" in text
    assert (wrong, others) == ([], [])
