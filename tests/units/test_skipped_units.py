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
from groups import mesh_of, own_group, passing_groups
from models import COMBINATIONS, ddp, differences, loss_of, make
from nursery import fork_ranks
from scenarios import message_of, wrong_in
from spawn import ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

WIDTH, DEPTH, STEPS = 9, 5, 4
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
OVER_C10D = [c for c in SHARDED if c[1] == "c10d"]


class Paths(nn.Module):
    """Layers; each call runs those of `path` in that order. The root has a weight of its own."""

    def __init__(self, how: str = "plain") -> None:
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


def path_of(rank: int, step: int) -> list[int]:
    """Return some of the layers, most often in order, sometimes one of them twice."""
    draw = random.Random(1000 * step + rank)
    path = [i for i in range(DEPTH) if draw.random() < 0.6]
    if draw.random() < 0.3:
        draw.shuffle(path)
    return path * 2 if draw.random() < 0.2 else path


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def output_of(model, step):
    rank = dist.get_rank()
    return model(batch(rank, step), path_of(rank, step))


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
    if dist.get_rank() == step % dist.get_world_size():
        rank = dist.get_rank()
        with contextlib.suppress(IndexError):
            model(batch(rank, step), [0, 2, DEPTH])
    usual(model, step)


RUNS = [usual, accumulating, evaluating, raising]
MEETS = [evaluating, raising]  # with zero1 over c10d, all ranks begin each forward together
OPTIONS: dict[str, dict] = {
    "default": {},
    "far ahead": {"forward_prefetch": True, "limit_all_gathers": False},
    "no prefetch": {"backward_prefetch": None},
}


def trained(model, parallel, run):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        run(parallel, step)
        optimizer.step()
    return model.state_dict()


def wrapped(combination, how="plain", timeout=20, **options):
    strategy, transport = combination
    return FSDP(
        make(lambda: Paths(how)),
        process_group=own_group(),
        strategy=strategy,
        transport=transport,
        timeout=timeout,
        auto_wrap_policy={nn.Linear},
        **options,
    )


@passing_groups()
def compare(combination, run, how, options):
    plain = make(lambda: Paths(how))
    expected = trained(plain, ddp(plain, find_unused_parameters=True), run)
    model = wrapped(combination, how, **options)
    return differences(trained(model, model, run), expected)


@pytest.mark.parametrize("combination", SHARDED, ids=str)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_training_is_bit_identical_to_ddp(pool2, combination, run):
    if combination == ("zero1", "c10d") and run in MEETS:
        pytest.skip("a forward of all ranks")
    assert pool2.run(compare, combination, run, "plain", {}) == [[], []]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", ["plain", "checkpointed"])
@pytest.mark.parametrize("combination", OVER_C10D, ids=str)
def test_prefetch_and_regathering(pool2, combination, how, options):
    assert pool2.run(compare, combination, usual, how, OPTIONS[options]) == [[], []]


def run_path(model, rank, step=0):
    loss_of(model(batch(rank, step), path_of(rank, step))).backward()


def run_two_paths(model, rank):
    outputs = [model(batch(rank, step), path_of(rank, step)) for step in (1, 2)]
    sum(loss_of(output) for output in outputs).backward()


def run_nothing_but_on_rank_0(model, rank):
    loss_of(model(batch(rank, 0), range(DEPTH) if rank == 0 else [])).backward()


@pytest.mark.sampled(2)
@ranks(2, 3)
@pytest.mark.parametrize("run", [run_path, run_two_paths, run_nothing_but_on_rank_0])
def test_gradients_are_the_mean_of_the_ranks(pool, run):
    exact = run is not run_two_paths and pool.world == 2
    assert pool.run(wrong_in, Paths, run, exact, SHARDED, {nn.Linear}) == [{}] * pool.world


# --- related features -------------------------------------------------------------------------------


@passing_groups()
def stepped_in_backward(combination):
    """Return what differs between steps in backward and after it."""
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
    return differences(*states)


@pytest.mark.parametrize("combination", OVER_C10D, ids=str)
def test_steps_in_backward(pool2, combination):
    assert pool2.run(stepped_in_backward, combination) == [[], []]


@passing_groups()
def in_low_precision(combination):
    """Return what differs from the same over shm."""
    states = []
    policy = zshard.MixedPrecision(param_dtype=torch.bfloat16)
    for transport in ("shm", combination[1]):
        model = wrapped((combination[0], transport), mixed_precision=policy)
        states.append(trained(model, model, evaluating))
    return differences(*states)


@pytest.mark.parametrize("combination", OVER_C10D[:2], ids=str)
def test_low_precision(pool2, combination):
    assert pool2.run(in_low_precision, combination) == [[], []]


@passing_groups()
def two_models(combination):
    """Return (the error, what differs from DDP) where the training of two models is interleaved."""
    results = []
    for sharded in (False, True):
        models = [make(Paths), make(Paths, seed=2)]
        options = {"process_group": own_group(), "strategy": combination[0], "timeout": 20}
        options |= {"transport": combination[1], "auto_wrap_policy": {nn.Linear}}
        called = [
            FSDP(model, **options) if sharded else ddp(model, find_unused_parameters=True)
            for model in models
        ]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        rank = dist.get_rank()
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            try:
                x = called[0](batch(rank, step), path_of(rank, step))
                loss_of(called[1](x, path_of(rank, step + 30))).backward()
            except zshard.DivergenceError as error:
                return str(error), []
            for optimizer in optimizers:
                optimizer.step()
        results.append([model.state_dict() for model in models])
    pairs = zip(results[1], results[0], strict=True)
    return "", [wrong for a, b in pairs for wrong in differences(a, b)]


@pytest.mark.parametrize("combination", OVER_C10D, ids=str)
def test_interleaved_models_are_correct_or_an_error(pool2, combination):
    """A backward of two models has no single order of rounds where ranks skip units of both."""
    (text, wrong), (other, wrong_there) = pool2.run(two_models, combination)
    assert wrong == wrong_there == [] and bool(text) == bool(other)
    assert not text or all(word in text for word in ("model 1 (Paths)", "model 2 (Paths)"))


@passing_groups()
def then_the_state(combination):
    """Return the state dict of all ranks, right after a forward of different units."""
    model = wrapped(combination)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    usual(model, 0)
    optimizer.step()
    expected = model.state_dict()
    with torch.no_grad():
        output_of(model, 1)
    return differences(model.state_dict(), expected)


@ranks(2, 3)
@pytest.mark.parametrize("combination", SHARDED, ids=str)
def test_state_dict_right_after_a_forward(pool, combination):
    assert pool.run(then_the_state, combination) == [[]] * pool.world


# --- errors -----------------------------------------------------------------------------------------


@passing_groups()
def stepping_while_another_looks():
    """Return (the error, seconds until it) where rank 1 has stepped, and rank 0 evaluates with more
    units."""
    model = wrapped(("full_shard", "c10d"), timeout=60)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    usual(model, 0)
    with torch.no_grad():
        model(batch(0, 0), [0])  # all together: otherwise ranks would not be equally far
    start = time.monotonic()

    def train_further():
        rank = dist.get_rank()
        if rank == 1:
            optimizer.step()
        with torch.no_grad():
            model(batch(rank, 0), [0, 1] if rank == 0 else [0])
        loss_of(model(batch(rank, 0), [0])).backward()

    return message_of(train_further, zshard.DivergenceError), time.monotonic() - start


def test_parameters_of_another_step_are_an_error_at_once(pool2):
    for text, seconds in pool2.run(stepping_while_another_looks):
        assert "rank 0 has made 0 optimizer steps, but rank 1 has made 1" in text
        assert seconds < 20


@passing_groups()
def another_model_each():
    """Return the errors where rank 0 runs a backward of a model, and rank 1 of its copy."""
    model = wrapped(("full_shard", "c10d"))
    twin = copy.deepcopy(model)
    mine = [model, twin][dist.get_rank()]
    return message_of(lambda: usual(mine, 0), zshard.DivergenceError)


def test_error_names_the_models(pool2):
    for text in pool2.run(another_model_each):
        assert "model 1 (Paths)" in text and "model 2 (Paths)" in text


def hybrid():
    """Return the error where the ranks of a shard group run different units."""
    model = FSDP(
        make(Paths),
        device_mesh=mesh_of(2, 2),
        strategy="hybrid_shard",
        transport="c10d",
        timeout=1,
        auto_wrap_policy={nn.Linear},
    )
    try:
        loss_of(model(batch(0, 0), [0] if dist.get_rank() == 1 else range(DEPTH))).backward()
    except zshard.PeerError as error:  # a timeout, or another rank has failed first
        return type(error).__name__, str(error)
    return "", ""


def test_skipped_unit_with_a_hybrid_strategy_is_an_error():
    """Gathers run in the shard group and rounds in the world: neither learns of the other."""
    results = fork_ranks(hybrid, 4)
    for result in results:
        assert result.value and result.value[0], result
    assert any(result.value[0] == "PeerTimeoutError" for result in results)
