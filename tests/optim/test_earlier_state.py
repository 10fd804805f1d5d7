"""Optimizers that have state when their parameters are sharded: from a snapshot that a script loads
before it wraps the model, or from steps of the plain model.

The reference is a plain model, trained on all ranks' batches, that is never wrapped.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import COMBINATIONS, loss_of, make
from scenarios import Wide, floats, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.optim import shared_state

# --- steps ----------------------------------------------------------------------------------------


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


@on_ranks(2, 3)
def test_state_from_before_fully_shard():
    """fully_shard() layer by layer; a float64 state of a float32 parameter keeps its dtype."""
    plain, model = make(Wide), make(Wide)
    states = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        plain_steps(each, optimizer, range(2))
        for own in optimizer.state.values():
            own["of its own"] = own["exp_avg"].double()
        for part in (each.first, each.second, each) if each is model else ():
            zshard.fully_shard(part)
        states.append(optimizer.state_dict()["state"])
    assert_same(states[1], states[0], "the state")


# --- reads before the first step, or as the first thing after other ways to get state -------------


class Several(nn.Module):
    """Models that one optimizer steps. Each is sharded separately."""

    def __init__(self, n):
        super().__init__()
        self.parts = nn.ModuleList(Wide() for _ in range(n))

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], 1)


KINDS = {
    "torch.AdamW": torch.optim.AdamW,
    "torch.SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "torch.Adagrad": torch.optim.Adagrad,
    "zshard.AdamW": zshard.AdamW,
    "zshard.SGD": functools.partial(zshard.SGD, momentum=0.9),
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

    def plain_steps(self, steps=range(2)):
        plain_steps(self.model, self.optimizer, steps)

    def own_steps(self, steps=range(2)):
        own_steps(self.model, self.optimizer, steps)

    def shard(self, settings, by_layers=False):
        for part in self.model.parts:
            for each in (part.first, part.second) if by_layers else (part,):
                FSDP(each, auto_wrap_policy=None, **settings)

    def copy(self):
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))


def load_into(ours, theirs):
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))


# Acts on a training, the plain one after two steps, and options of FSDP().
ACTS = {
    "load model": lambda ours, plain, settings: load_into(ours.model, plain.model),
    "load optimizer": lambda ours, plain, settings: load_into(ours.optimizer, plain.optimizer),
    "plain steps": lambda ours, plain, settings: ours.plain_steps(),
    "steps": lambda ours, plain, settings: ours.own_steps(),
    "shard": lambda ours, plain, settings: ours.shard(settings),
    "shard layers": lambda ours, plain, settings: ours.shard(settings, by_layers=True),
    "copy": lambda ours, plain, settings: ours.copy(),
}
WAYS = {
    "loaded before": ("load model", "load optimizer", "shard"),
    "stepped before": ("plain steps", "shard"),
    "loaded after": ("load model", "shard", "load optimizer"),
    "stepped after": ("shard", "steps"),
    "wrapped again": ("shard layers", "steps", "shard"),  # and then the module that contains them
    "copied": ("shard", "steps", "copy"),
}


def by_way(way, name, n, plain, settings):
    """Return a training that has got state in a way."""
    ours = Training(name, n, seed=2 if "load model" in WAYS[way] else 1)
    for act in WAYS[way]:
        ACTS[act](ours, plain, settings)
    return ours


def by_number(named):
    names = [name for group in named["param_groups"] for name in group["params"]]
    return {i: named["state"][name] for i, name in enumerate(names)}


def reloaded(ours, folder):
    ours.optimizer.load_state_dict(ours.optimizer.state_dict())
    return ours.optimizer.state_dict()["state"]


def on_rank_0(ours, folder):
    """The others only send their shards."""
    named = zshard.optim_state_dict(ours.model, ours.optimizer, rank0_only=True)
    assert bool(named) is (dist.get_rank() == 0)
    return by_number(named) if named else None


def saved(ours, folder):
    zshard.save(f"{folder}/checkpoint", ours.model, ours.optimizer)
    plain = Training(ours.name, ours.n, seed=3)
    zshard.load(f"{folder}/checkpoint", plain.model, plain.optimizer)
    return state_by_number(plain, folder)


def state_by_number(ours, folder):
    return ours.optimizer.state_dict()["state"]


def with_names(ours, folder):
    return by_number(zshard.optim_state_dict(ours.model, ours.optimizer))


def of_a_copy(ours, folder):
    """The copy has no model, so of sharded state it has shards (test_optim_state.py)."""
    return copy.deepcopy(ours.optimizer).state_dict()["state"]


LONE = {
    "numbers": state_by_number,
    "names": with_names,
    "twice": lambda ours, folder: (state_by_number(ours, folder), with_names(ours, folder))[1],
    "of a copy": of_a_copy,
}
TOGETHER = {**LONE, "on rank 0": on_rank_0, "reloaded": reloaded, "saved": saved}


@passing_groups()
def read_in_each_way(combination, name, way, n, folder):
    """The state as the first read finds it, on rank 0 alone and on all ranks, and what two more
    steps make of it, are the plain models'."""
    strategy, transport = combination
    settings = {"process_group": own_group(), "strategy": strategy, "transport": transport}
    is_lone = (transport == "shm" and way != "copied") or strategy == "no_shard"
    for what, alone in [*((r, True) for r in LONE if is_lone), *((r, False) for r in TOGETHER)]:
        if what == "of a copy" and way not in ("loaded before", "stepped before"):
            continue
        plain = Training(name, n)
        plain.plain_steps()
        ours = by_way(way, name, n, plain, {**settings, "timeout": 20})
        state = TOGETHER[what](ours, folder) if not alone or dist.get_rank() == 0 else None
        what = f"{what}, {'alone' if alone else 'together'}"
        if state is not None:
            assert_same(state, state_by_number(plain, folder), what)
        plain.plain_steps(range(2, 4))
        ours.own_steps(range(2, 4))
        states = [[m.model.state_dict(), state_by_number(m, folder)] for m in (ours, plain)]
        if dist.get_world_size() == 2:  # else the plain model adds the ranks in another order
            assert_same(*states, f"after {what}, the training")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_reads_before_the_next_step(tmp_path, combination, name, way, n):
    read_in_each_way(combination, name, way, n, str(tmp_path))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["loaded before", "stepped before", "loaded after"])
@pytest.mark.parametrize("name", ["torch.AdamW", "zshard.AdamW"])
@on_ranks(3)
def test_reads_before_the_first_step(tmp_path, name, way):
    read_in_each_way(("full_shard", "shm"), name, way, 1, str(tmp_path))


@on_ranks(2)
@passing_groups()
def test_rank_0_reads_a_copy_that_no_rank_has_stepped():
    ours = by_way("copied", "torch.AdamW", 1, None, {"process_group": own_group(), "timeout": 20})
    known, shared_state._LATE = shared_state._LATE, 0.0
    if dist.get_rank() == 0:
        text = message_of(ours.optimizer.state_dict)
        assert "or it is a copy: call state_dict() on all ranks" in text
    shared_state._LATE = known
    dist.barrier()
    plain = Training("torch.AdamW", 1)
    plain.plain_steps()
    assert_same(state_by_number(ours, ""), state_by_number(plain, ""), "the state")
