"""transport="hosts": the same results as c10d over the same hosts, whatever ranks do.

ZSHARD_HOST simulates hosts on one machine. c10d sums in the same order on the same hosts, so both
transports must be bit-identical after every kind of step.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import case_of, hosts_of
from models import CASES, loss_of
from scenario import Scenario, Training
from scenarios import message_of
from spawn import on_ranks

import zshard
from zshard import FSDP
from zshard.ranks.meeting import ranks_per_host

BOTH = ("hosts", "c10d")
SCENARIO = Scenario("mlp", optimizer="torch.AdamW", clip=1.0, micro_batches=2)


def trainings(scenario, sizes, act=Training.go, **options):
    """Train over each transport, on hosts with so many ranks each; return the states."""
    states = []
    with hosts_of(*sizes) as group:
        for transport in BOTH:
            given = {"process_group": group, "timeout": 60, **options}
            way = (scenario.way[0], transport)
            training = scenario.but(way=way, options=given).sharded()
            act(training)
            assert f"transport {transport}" in training.model.summary()
            states.append(training.state())
    return states


def check(scenario, *sizes, **options):
    """Fail unless both transports give the same losses and weights."""
    assert_same(*trainings(scenario, sizes, **options), "over hosts, compared with c10d,")


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "zero1"])
@on_ranks(4)
def test_bit_identical_to_c10d(strategy, low):
    precision = zshard.MixedPrecision(low) if low else None
    check(SCENARIO.but(way=(strategy,)), 2, 2, mixed_precision=precision)


@pytest.mark.parametrize("name", ["net", "tied", "unused", "frozen"])
@on_ranks(4)
def test_models_of_all_kinds(name):
    check(SCENARIO.but(model=name), 2, 2)


@on_ranks(4)
def test_replicated_copies_are_private_to_each_rank():
    """Each rank casts at any time: memory that a host's ranks share would hold another unit's."""
    low = zshard.MixedPrecision(torch.bfloat16)
    check(SCENARIO.but(model="net", way=("no_shard",)), 2, 2, mixed_precision=low)


@on_ranks(2, 4)
def test_hosts_with_one_rank_each():
    """Each rank sends its turns to one host, or three."""
    check(SCENARIO, *[1] * dist.get_world_size())


@on_ranks(6)
def test_several_hosts_with_several_ranks():
    """The first ranks of hosts carry the turns between some of these, the second ranks between
    others."""
    check(SCENARIO, 2, 2, 2)


def evaluate_alone(training):
    """One rank evaluates while the others continue to train."""
    if dist.get_rank() == training.step < 3:
        with torch.no_grad():
            training.model(CASES["mlp"].batch(9, 0))


@on_ranks(4)
def test_rank_evaluates_alone_while_others_train():
    """Ranks that have other units in the host's shared slots serve its gathers."""
    states = []
    with hosts_of(2, 2) as group:
        for after in (Scenario.after, evaluate_alone):
            options = {"process_group": group, "timeout": 60}
            scenario = SCENARIO.but(way=("full_shard", "hosts"), after=after, options=options)
            states.append(scenario.sharded(None).state())
    assert_same(*states, "with and without evaluations")


def fail_twice(training):
    """Rank 3 abandons two of five steps: its backward raises during rounds."""
    model, rank, ends = training.model, dist.get_rank(), []
    fails = False

    def raises(gradient):
        if fails:
            raise ValueError("planted")

    model.second.register_forward_hook(lambda *each: each[-1].register_hook(raises) and None)
    for step in range(5):
        fails = rank == 3 and step in (1, 3)
        ends.append("")
        try:
            training.backward()
            training.optimizer.step()
        except (ValueError, zshard.DivergenceError) as error:
            ends[-1] = type(error).__name__
        training.optimizer.zero_grad()
    error = "ValueError" if rank == 3 else "DivergenceError"
    assert ends == ["", error, "", error, ""]


@on_ranks(4)
def test_failed_backward_on_one_rank_is_reported_once():
    """Rounds that were announced before the failure was known are over as well."""
    scenario = Scenario("mlp", optimizer="torch.SGD")
    assert_same(*trainings(scenario, (2, 2), fail_twice), "after failures")


def step_in_backward(training):
    training.model.optimizer_in_backward(zshard.AdamW(training.model.parameters(), lr=0.1))
    for _ in range(3):
        training.backward()


@on_ranks(4)
def test_lent_gradients_are_private_to_each_rank():
    scenario = Scenario("net", optimizer="torch.SGD")
    assert_same(*trainings(scenario, (2, 2), step_in_backward), "with steps in backward")


@on_ranks(4)
def test_writes_to_full_parameters_are_private_to_each_rank():
    """Each rank writes different values, and reads its own once all have written."""
    rank = dist.get_rank()
    with hosts_of(2, 2) as group:
        model = case_of(group, "net", transport="hosts")
        with FSDP.summon_full_params(model), torch.no_grad():
            written = [
                (parameter, torch.arange(parameter.numel()).view_as(parameter) + 0.25 * rank)
                for parameter in model.parameters()
            ]
            for parameter, values in written:
                parameter.copy_(values)
            dist.barrier(group)
            assert written
            assert all(torch.equal(parameter, values) for parameter, values in written)


@on_ranks(4)
def test_slots_of_a_host_are_counted_once():
    case, slots = CASES["net"], []
    with hosts_of(2, 2) as group:
        model = case_of(group, "net", transport="hosts")
        for step in range(2):
            loss_of(model(case.batch(step, dist.get_rank()))).backward()
            slots.append(model.memory()["slots"])
        alone = case_of(group, "net", transport="c10d").memory()["slots"]
    assert slots[0] == slots[1]
    assert slots[0] <= alone / 2 + 4096 * 8


# --- where it is not possible ---------------------------------------------------------------------


@on_ranks(4)
def test_hosts_that_differ_use_c10d():
    with hosts_of(3, 1) as group, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = case_of(group, "mlp", transport="auto").summary().splitlines()[0]
    texts = [str(each.message) for each in caught if "hosts" in str(each.message)]
    assert "transport c10d" in head
    assert len(texts) == (dist.get_rank() == 0)
    assert all("same number of ranks" in each for each in texts)


@pytest.mark.parametrize(
    ("sizes", "reason"), [((4,), "all ranks are on one host"), ((1, 3), "same number of ranks")]
)
@on_ranks(4)
def test_explicit_hosts_transport_where_unavailable(sizes, reason):
    with hosts_of(*sizes) as group:
        text = message_of(lambda: case_of(group, "mlp", transport="hosts"), RuntimeError)
    assert reason in text and "Pass 'auto'" in text


def test_ranks_per_host():
    counts = {"aabb": 2, "ab": 1, "aaaa": 0, "aab": 0, "abab": 0, "aabbaa": 0, "a": 0}
    assert {hosts: ranks_per_host(hosts) for hosts in counts} == counts
