"""The transports from Python: the same bytes and errors over shm, over gloo, and over hosts.

test_c_comm.py tests transports in C. Here they interact with torch: process groups by name,
exceptions, dispatch modes, groups of some of the ranks, and the choice between them. ZSHARD_HOST
simulates hosts on one machine; c10d sums in the same order on the same hosts, so it must give the
same bits.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from groups import PATIENCE, case_of, comm_of_all, hosts_of, passing_groups
from models import CASES, TRANSPORTS, loss_of, make
from scenario import Scenario, Training
from scenarios import Stack, forward_backward, message_of
from spawn import RankPool, on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

import zshard
from zshard import FSDP, _core
from zshard.ranks.meeting import ranks_per_host

both = pytest.mark.parametrize("transport", TRANSPORTS)

# --- received data -------------------------------------------------------------------------------


class Deny(TorchDispatchMode):
    """A mode that refuses every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was dispatched")


@both
@on_ranks(2, 3)
def test_exchange(transport):
    """Dispatch modes do not see it."""
    comm, world = comm_of_all(transport), dist.get_world_size()
    assert (comm.transport, comm.rank, comm.world) == (transport, dist.get_rank(), world)
    for size in (0, 1, 63, 64, 4096):
        with Deny():
            received = comm.exchange(bytes([comm.rank + 1]) * size)
        assert received == [bytes([rank + 1]) * size for rank in range(world)]


@both
@pytest.mark.parametrize("numel", [0, 1, 700_001])
@on_ranks(2, 3)
def test_broadcast(transport, numel):
    comm = comm_of_all(transport)
    for root in range(dist.get_world_size()):
        wanted = torch.randn(numel, generator=torch.Generator().manual_seed(root))
        tensor = wanted.clone() if comm.rank == root else torch.zeros(numel)
        with Deny():
            comm.broadcast(tensor, root)
        assert differences(tensor, wanted) == []


@both
@on_ranks(2)
def test_invalid_arguments_leave_the_transport_usable(transport):
    comm = comm_of_all(transport)
    with pytest.raises(ValueError, match="4097 bytes"):
        comm.exchange(bytes(4097))
    with pytest.raises(ValueError, match="out of range"):
        comm.broadcast(torch.zeros(1), comm.world)
    with pytest.raises(ValueError, match="contiguous"):
        comm.broadcast(torch.zeros(4, 4).t(), 0)
    comm.exchange(b"still in step")
    with pytest.raises(RuntimeError, match="no such group"):
        _core.Comm.c10d("no such group", 0, 2, 1.0)


# --- the same training over both ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["net", "dtypes"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2, 3)
def test_transports_are_bit_identical(strategy, name):
    scenario = Scenario(name, optimizer="torch.AdamW", steps=5)
    ways = [(strategy, transport) for transport in TRANSPORTS]
    states = [scenario.but(way=way).sharded(None).state() for way in ways]
    assert_same(*states, "over shm, from that over c10d,")


# --- groups of some of the ranks ------------------------------------------------------------------


def norm_on(group: Any, transport: str = "c10d") -> float:
    """Return the norm of the gradients of a model over ranks of `group`."""
    model = FSDP(make(Stack), process_group=group, transport=transport)
    forward_backward(model, dist.get_rank())
    return float(model.clip_grad_norm_(1.0))


def norm_on_a_pair(*others: list[int]) -> "float | None":
    """Return the norm on ranks 0 and 1, which may also be in other groups; None on other ranks."""
    with passing_groups():
        pair = dist.new_group([0, 1], timeout=PATIENCE)
        for each in others:
            dist.new_group(each, timeout=PATIENCE)
        norm = norm_on(pair) if dist.get_rank() < 2 else None
    dist.barrier()
    return norm


def test_ranks_may_be_in_different_groups(pool3: RankPool) -> None:
    first, second, outside = pool3.run(norm_on_a_pair, [0, 2], [0], timeout=60)
    assert first == second > 0 and outside is None


@on_ranks(3)
def test_groups_may_have_been_destroyed():
    """Each round's groups are destroyed: the next would have their names, by torch's count."""
    norms = [norm_on_a_pair() for _ in range(5)]
    assert norms == [norms[0]] * 5 and (norms[0] is None) == (dist.get_rank() == 2)


@pytest.mark.parametrize(("transport", "own"), [("shm", 0), ("c10d", 1)])
@on_ranks(2)
def test_internal_groups_end_with_the_scripts_groups(transport, own):
    """Those of the last one exist until zshard checks again."""
    known = set(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        group = dist.new_group()
        norm_on(group, transport=transport)
        dist.barrier()
        dist.destroy_process_group(group)
    assert len(set(dist.distributed_c10d._world.pg_map) - known) == own


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


LOW = zshard.MixedPrecision(torch.bfloat16)
TRAININGS = {
    "full_shard": (SCENARIO, {}),
    "no_shard": (SCENARIO.but(way=("no_shard",)), {}),
    "zero1": (SCENARIO.but(way=("zero1",)), {}),
    "in bf16": (SCENARIO, {"mixed_precision": LOW}),
    "zero1 in bf16": (SCENARIO.but(way=("zero1",)), {"mixed_precision": LOW}),
    # Each rank casts at any time: memory that a host's ranks share would hold another unit's.
    "copies": (SCENARIO.but(model="net", way=("no_shard",)), {"mixed_precision": LOW}),
    **{name: (SCENARIO.but(model=name), {}) for name in ("net", "tied", "unused", "frozen")},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRAININGS)
@on_ranks(4)
def test_bit_identical_to_c10d(name):
    scenario, options = TRAININGS[name]
    check(scenario, 2, 2, **options)


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
