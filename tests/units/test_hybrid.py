"""Hybrid strategies: sharded within groups of ranks, with one replica of the model per group."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of, on_hosts
from models import make, wrapped
from rows import all_refused
from scenario import Scenario
from scenarios import (
    Stack,
    forward_backward,
    mean_grads,
    near,
    whole_grads,
)
from scripts import SCENARIOS
from spawn import on_ranks, ranks

from zshard import FSDP

HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2")
TRANSPORTS = ("shm", "c10d")


def scenario_of(name, strategy, transport, **options):
    return Scenario(name, (strategy, transport), "torch.SGD", options=options)


def check_against_other_strategies(name, strategy, transport, shape):
    """Bit-identical to no_shard over all ranks, and close to DDP."""
    seed = 1 + dist.get_rank()
    other = scenario_of(name, "no_shard", transport)
    ours = scenario_of(name, strategy, transport, device_mesh=mesh_of(*shape)).sharded(4, seed)
    assert_same(ours.state(), other.sharded(4, seed).state(), f"{strategy} on a mesh of {shape}")
    torch.testing.assert_close(ours.state(), other.ddp(4, seed).state(), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", HYBRIDS)
@pytest.mark.parametrize("name", ["mlp", "net", "odds"])
@on_ranks(4)
def test_two_by_two_is_bit_identical_to_other_strategies(name, strategy, transport):
    check_against_other_strategies(name, strategy, transport, (2, 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", HYBRIDS)
@on_ranks(2, 3)
def test_mesh_of_one_row_or_column(strategy, transport):
    world = dist.get_world_size()
    for shape in ((world, 1), (1, world)):
        check_against_other_strategies("net", strategy, transport, shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", [run for run, _ in SCENARIOS])
@on_ranks(4)
def test_gradients_are_near_the_mean_in_all_scenarios(run):
    expected = mean_grads(Stack, run)
    for combination in itertools.product((*HYBRIDS, "hybrid_full"), TRANSPORTS):
        model = wrapped(Stack, combination, device_mesh=mesh_of(2, 2))
        run(model, dist.get_rank())
        ours = {name: near(grad, expected[name]) for name, grad in whole_grads(model).items()}
        assert_same(ours, expected, f"{combination}: the gradients")


@on_ranks(4)
def test_memory_depends_on_the_shard_group():
    held = []
    for shape in ((2, 2), (4, 1)):
        layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
        model = FSDP(layers, strategy="hybrid_shard", transport="shm", device_mesh=mesh_of(*shape))
        held.append(model.memory()["shards"])
        assert f"{shape[0]} replicas of {shape[1]} rank(s) each" in model.summary()
    assert 0.45 < held[0] / held[1] < 0.6


@ranks(4)
def test_norm_counts_each_gradient_once(pool):
    first, *others = pool.run(clipped, "hybrid_shard", (2, 2))
    assert set(others) == {first}
    assert first == pytest.approx(pool.run(clipped, "full_shard", None)[0], rel=1e-6)


def clipped(strategy, shape):
    model = FSDP(make(Stack), strategy=strategy, device_mesh=mesh_of(*shape) if shape else None)
    forward_backward(model, dist.get_rank())
    return float(model.clip_grad_norm_(1.0))


def pair_of_groups():
    """Return the groups of a mesh of two by two, as in FSDP1."""
    shard, _ = dist.new_subgroups(2)
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return shard, columns[dist.get_rank() % 2]


@on_ranks(4)
def test_shm_within_hosts_and_c10d_between():
    """Shm makes copies, c10d sums."""
    with on_hosts(2):
        hybrid = scenario_of("net", "hybrid_shard", None, process_group=pair_of_groups())
        ours = hybrid.sharded(4)
        head = ours.model.summary().splitlines()[0]
        assert "transport hosts; 2 replicas of 2 rank(s) each, transport shm" in head
        theirs = scenario_of("net", "full_shard", "c10d").sharded(4)
        assert_same(ours.state(), theirs.state(), "training")


@pytest.mark.parametrize(("size", "replicas"), [(2, 2), (4, 0), (1, 4)])
@on_ranks(4)
def test_default_is_one_replica_per_host(size, replicas):
    usual = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        head = wrapped(Stack, ("hybrid_shard", None)).summary().splitlines()[0]
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = usual
    text = f"{replicas} replicas of {size} rank(s) each"
    assert text in head if replicas else "replicas" not in head


@on_ranks(2)
def test_invalid_meshes_are_refused():
    world, mesh = dist.group.WORLD, mesh_of(2, 1)
    table = {
        "one group": ((world, "hybrid_shard"), {}, ValueError, "two groups"),
        "a pair for another strategy": (((world, world), "full_shard"), {}, ValueError, "hybrid"),
        "a group twice": (((world, world), "hybrid_shard"), {}, ValueError, "a mesh"),
        "a number": (((world, 3), "hybrid_shard"), {}, TypeError, "pair"),
        "a mesh for another strategy": ((), {"device_mesh": mesh}, ValueError, "hybrid"),
        "both": ((world,), {"device_mesh": mesh}, ValueError, "not both"),
    }
    all_refused(
        {
            name: (lambda args=args, options=options: FSDP(make(Stack), *args, **options), *error)
            for name, (args, options, *error) in table.items()
        }
    )
