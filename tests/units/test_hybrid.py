"""Hybrid strategies: sharded within groups of ranks, with one replica of the model per group."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from groups import mesh_of, on_hosts, trained, wrap
from models import CASES, ddp, differences, make, train, wrapped
from scenarios import (
    Stack,
    all_grads,
    forward_backward,
    mean_grads,
    message_of,
    near,
    whole_grads,
    wrong_grads,
)
from scripts import SCENARIOS
from spawn import on_ranks, ranks

import zshard
from zshard import FSDP

HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2")
TRANSPORTS = ("shm", "c10d")


def compare(name, strategy, transport, shape):
    """Return (what differs in bits from no_shard over all ranks, largest difference of a parameter
    from DDP, summed over its elements)."""
    case = CASES[name]
    plain = make(case.make, seed=1 + dist.get_rank())
    _, expected = trained_by_ddp(plain, case)
    losses, state = trained(wrap(name, "no_shard", transport=transport), name)
    model = wrap(name, strategy, transport=transport, device_mesh=mesh_of(*shape))
    ours_losses, ours = trained(model, name)
    wrong = differences(ours, state) + ([] if losses == ours_losses else ["losses"])
    gaps = [(ours[key] - value).abs().sum().item() for key, value in expected.items()]
    return wrong, max(gaps)


def trained_by_ddp(plain, case):
    parallel = ddp(plain, find_unused_parameters=case.unused)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    return train(parallel, case, optimizer, dist.get_rank()), plain.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", HYBRIDS)
@pytest.mark.parametrize("name", ["mlp", "net", "odds"])
def test_two_by_two_is_bit_identical_to_other_strategies(pool4, name, strategy, transport):
    for wrong, gap in pool4.run(compare, name, strategy, transport, (2, 2)):
        assert wrong == [] and gap < 1e-5


@pytest.mark.sampled(2)
@ranks(2, 3)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_mesh_of_one_row_or_column(pool, strategy, transport):
    for shape in ((pool.world, 1), (1, pool.world)):
        for wrong, gap in pool.run(compare, "net", strategy, transport, shape):
            assert wrong == [] and gap < 1e-5, shape


def wrong_on_a_mesh(build, run, shape):
    """Return {(strategy, transport): gradients that are not near the mean of the ranks'}."""
    expected = mean_grads(build, run)
    found = {}
    for combination in itertools.product((*HYBRIDS, "hybrid_full"), TRANSPORTS):
        model = wrapped(build, combination, device_mesh=mesh_of(*shape))
        run(model, dist.get_rank())
        ours = {name: near(grad, expected[name]) for name, grad in whole_grads(model).items()}
        found[combination] = wrong_grads(ours, expected)
    return {combination: wrong for combination, wrong in found.items() if wrong}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", [run for run, _ in SCENARIOS])
def test_gradients_are_the_mean_in_all_scenarios(pool4, run):
    assert pool4.run(wrong_on_a_mesh, Stack, run, (2, 2)) == [{}] * 4


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("run", [run for run, _ in SCENARIOS])
def test_gradients_are_the_mean_on_one_row_or_column(pool2, run, shape):
    assert pool2.run(wrong_on_a_mesh, Stack, run, shape) == [{}] * 2


def bytes_held(shape):
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    model = FSDP(model, strategy="hybrid_shard", transport="shm", device_mesh=mesh_of(*shape))
    return model.memory()["shards"], model.summary().splitlines()[0]


def test_memory_depends_on_the_shard_group(pool4):
    (held, head), *_ = pool4.run(bytes_held, (2, 2))
    (whole, _), *_ = pool4.run(bytes_held, (4, 1))
    assert 0.45 < held / whole < 0.6
    assert "rank 0 of 4" in head and "2 replicas of 2 rank(s) each" in head


@on_ranks(4)
def test_pair_of_groups_acts_as_a_mesh():
    """The same mesh as a pair of groups, as in FSDP1."""
    shard, _ = dist.new_subgroups(2)
    rank = dist.get_rank()
    for column in ([0, 2], [1, 3]):
        group = dist.new_group(column)
        if rank in column:
            replicate = group
    model = wrap("net", "hybrid_shard", process_group=(shard, replicate))
    mesh = wrap("net", "hybrid_shard", device_mesh=mesh_of(2, 2))
    assert differences(trained(model, "net")[1], trained(mesh, "net")[1]) == []


def clipped(strategy, shape):
    model = FSDP(make(Stack), strategy=strategy, device_mesh=mesh_of(*shape) if shape else None)
    forward_backward(model, dist.get_rank())
    return float(model.clip_grad_norm_(1.0))


def test_norm_counts_each_gradient_once(pool4):
    first, *others = pool4.run(clipped, "hybrid_shard", (2, 2))
    assert set(others) == {first}
    assert first == pytest.approx(pool4.run(clipped, "full_shard", None)[0], rel=1e-6)


def copies_within_hosts():
    """Shm makes copies, c10d sums."""
    with on_hosts(2):
        shard, _ = dist.new_subgroups(2)
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = wrap("net", "hybrid_shard", process_group=(shard, columns[dist.get_rank() % 2]))
        head = model.summary().splitlines()[0]
        other = wrap("net", "full_shard", transport="c10d")
        return head, differences(trained(model, "net")[1], trained(other, "net")[1])


def test_shm_within_hosts_and_c10d_between(pool4):
    for head, wrong in pool4.run(copies_within_hosts):
        assert wrong == []
        assert "transport hosts; 2 replicas of 2 rank(s) each, transport shm" in head


def by_local_world_size(size):
    usual = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        return wrap("mlp", "hybrid_shard").summary().splitlines()[0]
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = usual


def test_default_is_one_replica_per_host(pool4):
    assert "2 replicas of 2 rank(s) each" in pool4.run(by_local_world_size, 2)[0]
    assert "copies" not in pool4.run(by_local_world_size, 4)[0]
    assert "4 replicas of 1 rank(s) each" in pool4.run(by_local_world_size, 1)[0]


def mistakes():
    world = dist.group.WORLD
    mesh = mesh_of(2, 1)
    return [
        message_of(lambda: FSDP(make(Stack), world, "hybrid_shard"), ValueError),
        message_of(lambda: FSDP(make(Stack), (world, world), "full_shard"), ValueError),
        message_of(lambda: FSDP(make(Stack), (world, world), "hybrid_shard"), ValueError),
        message_of(lambda: FSDP(make(Stack), (world, 3), "hybrid_shard"), TypeError),
        message_of(lambda: FSDP(make(Stack), device_mesh=mesh), ValueError),
        message_of(lambda: FSDP(make(Stack), world, device_mesh=mesh), ValueError),
    ]


def test_invalid_meshes_are_refused(pool2):
    expected = ["two groups", "hybrid", "a mesh", "pair", "hybrid", "not both"]
    for messages in pool2.run(mistakes):
        for word, message in zip(expected, messages, strict=True):
            assert word in message


@on_ranks(2)
def test_one_dimensional_mesh_is_sharded_over():
    mesh = dist.init_device_mesh("cpu", (2,))
    model = FSDP(make(Stack), device_mesh=mesh)
    forward_backward(model, dist.get_rank())
    other = FSDP(make(Stack))
    forward_backward(other, dist.get_rank())
    assert differences(all_grads(model), all_grads(other)) == []


def test_strategies_within_a_shard_group():
    strategy = zshard.ShardingStrategy.HYBRID_SHARD
    assert strategy.is_hybrid and strategy.in_group is zshard.ShardingStrategy.FULL_SHARD
    assert not zshard.ShardingStrategy.NO_SHARD.is_hybrid
