"""Units that not all ranks run, or not in the same order: bit-identical to DDP over every
transport.

Each rank draws at random which units it runs in a step, so any two places of a forward and a
backward can coincide on two ranks.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of, own_group, passing_groups
from models import COMBINATIONS, ddp, loss_of, make
from scenarios import WIDTH, check_mean_grads, floats, message_of
from spawn import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

DEPTH, STEPS = 5, 4
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
OVER_C10D = [c for c in SHARDED if c[1] == "c10d"]


class Paths(nn.Module):
    """Layers; each call runs those of `path` in that order. The root has its own weight."""

    def __init__(self, how="plain"):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.how = how

    def forward(self, x, path):
        for i in path:
            if self.how == "plain":
                x = torch.tanh(self.layers[i](x))
            else:
                x = torch.tanh(checkpoint(self.layers[i], x, use_reentrant=False))
        return x * self.scale


def path_of(rank, step):
    """Return some of the layers, most often in order, sometimes one of them twice."""
    draw = random.Random(1000 * step + rank)
    path = [i for i in range(DEPTH) if draw.random() < 0.6]
    if draw.random() < 0.3:
        draw.shuffle(path)
    return path * 2 if draw.random() < 0.2 else path


def output_of(model, step):
    rank = dist.get_rank()
    return model(floats(rank, step), path_of(rank, step))


# --- scenarios ------------------------------------------------------------------------------------


def usual(model, step):
    loss_of(output_of(model, step)).backward()


def accumulating(model, step):
    with model.no_sync():
        loss_of(output_of(model, step + 70)).backward()
    loss_of(output_of(model, step)).backward()


def evaluating(model, step):
    """Ranks evaluate different units, and one evaluates more often."""
    with torch.no_grad():
        for i in range(1 + dist.get_rank()):
            output_of(model, step + 90 + i)
    usual(model, step)


def raising(model, step):
    """A rank abandons a forward in the middle, and runs another one."""
    rank = dist.get_rank()
    if rank == step % dist.get_world_size():
        with contextlib.suppress(IndexError):
            model(floats(rank, step), [0, 2, DEPTH])
    usual(model, step)


OPTIONS = {
    "default": {},
    "far ahead": {"forward_prefetch": True, "limit_all_gathers": False},
    "no prefetch": {"backward_prefetch": None},
    "after a block": {"backward_prefetch": "backward_post"},
}


def trained(model, parallel, run):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        run(parallel, step)
        optimizer.step()
    return model.state_dict()


def wrapped(combination, how="plain", seed=1, **options):
    if not options.keys() & {"device_mesh", "process_group"}:
        options["process_group"] = own_group()
    options = {"timeout": 20, "auto_wrap_policy": {nn.Linear}, **options}
    model = make(lambda: Paths(how), seed)
    return FSDP(model, strategy=combination[0], transport=combination[1], **options)


@passing_groups()
def check_training(combination, run, how="plain", **options):
    plain = make(lambda: Paths(how))
    expected = trained(plain, ddp(plain, find_unused_parameters=True), run)
    model = wrapped(combination, how, **options)
    assert_same(trained(model, model, run), expected, f"training under {combination}")


# With zero1 over c10d, all ranks begin each forward together.
RUNS_UNDER = [
    (run, combination)
    for run in (usual, accumulating, evaluating, raising)
    for combination in SHARDED
    if combination != ("zero1", "c10d") or run in (usual, accumulating)
]


@pytest.mark.parametrize(("run", "combination"), RUNS_UNDER)
@on_ranks(2)
def test_training_is_bit_identical_to_ddp(run, combination):
    check_training(combination, run)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", ["plain", "checkpointed"])
@pytest.mark.parametrize("combination", OVER_C10D, ids=str)
@on_ranks(2)
def test_prefetch_and_regathering(combination, how, options):
    check_training(combination, usual, how, **OPTIONS[options])


def run_path(model, rank):
    loss_of(model(floats(rank), path_of(rank, 0))).backward()


def run_two_paths(model, rank):
    outputs = [model(floats(rank, step), path_of(rank, step)) for step in (1, 2)]
    sum(loss_of(output) for output in outputs).backward()


def run_nothing_but_on_rank_0(model, rank):
    loss_of(model(floats(rank), range(DEPTH) if rank == 0 else [])).backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", [run_path, run_two_paths, run_nothing_but_on_rank_0])
@on_ranks(2, 3)
def test_gradients_are_the_mean_of_the_ranks(run):
    exact = run is not run_two_paths and dist.get_world_size() == 2
    check_mean_grads(Paths, run, exact, SHARDED, {nn.Linear})


# --- related features -----------------------------------------------------------------------------


@pytest.mark.parametrize("combination", OVER_C10D, ids=str)
@on_ranks(2)
@passing_groups()
def test_steps_in_backward(combination):
    """They give what steps after it give."""
    states = []
    for early in (False, True):
        model = wrapped(combination)
        optimizer = zshard.SGD(model.parameters(), lr=0.1)
        if early:
            model.optimizer_in_backward(optimizer)
        for step in range(STEPS):
            usual(model, step)
            if not early:
                optimizer.step()
                optimizer.zero_grad()
        states.append(model.state_dict())
    assert_same(*states, "training")


@pytest.mark.parametrize("combination", OVER_C10D[:2], ids=str)
@on_ranks(2)
@passing_groups()
def test_low_precision(combination):
    """The result is the one over shm."""
    policy, states = zshard.MixedPrecision(param_dtype=torch.bfloat16), []
    for transport in ("shm", combination[1]):
        model = wrapped((combination[0], transport), mixed_precision=policy)
        states.append(trained(model, model, evaluating))
    assert_same(*states, "training")


def train_two(models, called):
    """Train two models, one fed by the other."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    rank = dist.get_rank()
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = called[0](floats(rank, step), path_of(rank, step))
        loss_of(called[1](x, path_of(rank, step + 30))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [model.state_dict() for model in models]


@pytest.mark.parametrize("combination", OVER_C10D, ids=str)
@on_ranks(2)
@passing_groups()
def test_interleaved_models_are_correct_or_an_error(combination):
    """A backward of two models has no single order of rounds where ranks skip units of both."""
    plain = [make(Paths), make(Paths, seed=2)]
    expected = train_two(plain, [ddp(model, find_unused_parameters=True) for model in plain])
    group, text = own_group(), ""
    models = [wrapped(combination, seed=seed, process_group=group) for seed in (1, 2)]
    try:
        assert_same(train_two(models, models), expected, "training")
    except zshard.DivergenceError as error:
        text = str(error)
        assert "model 1 (Paths)" in text and "model 2 (Paths)" in text
    failed = [None] * dist.get_world_size()
    dist.all_gather_object(failed, bool(text))
    assert len(set(failed)) == 1


@pytest.mark.parametrize("combination", SHARDED, ids=str)
@on_ranks(2, 3)
@passing_groups()
def test_state_dict_right_after_a_forward(combination):
    """Even of different units."""
    model = wrapped(combination)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    usual(model, 0)
    optimizer.step()
    expected = model.state_dict()
    with torch.no_grad():
        output_of(model, 1)
    assert_same(model.state_dict(), expected, "the state")


# --- errors ---------------------------------------------------------------------------------------


@on_ranks(2)
@passing_groups()
def test_parameters_of_another_step_are_an_error_at_once():
    """Rank 1 has stepped, and rank 0 evaluates with more units."""
    model, rank = wrapped(("full_shard", "c10d"), timeout=60), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    usual(model, 0)
    with torch.no_grad():
        model(floats(0), [0])  # all together: otherwise ranks would not be equally far
    start = time.monotonic()

    def train_further():
        if rank == 1:
            optimizer.step()
        with torch.no_grad():
            model(floats(rank), [0, 1] if rank == 0 else [0])
        loss_of(model(floats(rank), [0])).backward()

    text = message_of(train_further, zshard.DivergenceError)
    assert "rank 0 has made 0 optimizer steps, but rank 1 has made 1" in text
    assert time.monotonic() - start < 20


@on_ranks(2)
@passing_groups()
def test_error_names_the_models():
    """Rank 0 runs a backward of a model, and rank 1 of its copy."""
    model = wrapped(("full_shard", "c10d"))
    twin = copy.deepcopy(model)
    text = message_of(lambda: usual([model, twin][dist.get_rank()], 0), zshard.DivergenceError)
    assert "model 1 (Paths)" in text and "model 2 (Paths)" in text


@on_ranks(4, fresh=True)
def test_skipped_unit_with_a_hybrid_strategy_is_an_error():
    """Gathers run in the shard group and rounds in the world: neither learns of the other. A rank
    may learn that another has failed first."""
    model = wrapped(("hybrid_shard", "c10d"), device_mesh=mesh_of(2, 2), timeout=1)
    path = [0] if dist.get_rank() == 1 else range(DEPTH)
    with pytest.raises(zshard.PeerError):
        loss_of(model(floats(0), path)).backward()
