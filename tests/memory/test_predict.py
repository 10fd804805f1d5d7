"""memory("now" / "peak" / "predicted"), and predict_memory() of a model that is not wrapped.

Three ways to the same number: a prediction without a process group, that of the wrapped model, and
the model's actual bytes must be equal, byte for byte.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from groups import mesh_of
from models import CASES, COMBINATIONS, Block, Net, loss_of, make, train, wrapped
from rows import all_refused
from scenario import Scenario
from spawn import on_ranks

import zshard
from zshard import FSDP, predict_memory

BF16 = zshard.MixedPrecision(torch.bfloat16)
PARTS = {
    *["shards", "kept", "grads", "slots", "buckets", "transport", "offloaded", "optimizer", "total"]
}


def on_meta(name):
    with torch.device("meta"):
        return CASES[name].make()


def predicted_of(name, combination, options, **more):
    """predict_memory() of a case on the meta device."""
    strategy, transport = combination
    model, world = on_meta(name), dist.get_world_size()
    return predict_memory(model, world, strategy=strategy, transport=transport, **options, **more)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["mlp", "net", "tied", "conv", "frozen", "odds", "one unit"])
@on_ranks(2, 3)
def test_predictions_equal_actual_memory(name, combination, precision):
    """Of the model on the meta device, of the wrapped one, and its bytes after two steps; then of
    micro-batches within no_sync()."""
    case = CASES[name]
    options = {"auto_wrap_policy": case.policy, "mixed_precision": precision}
    model = wrapped(case.make, combination, **options)
    predicted = model.memory("predicted")
    if dist.get_rank() == 0:
        assert predicted_of(name, combination, options) == predicted
    train(model, case, torch.optim.SGD(model.parameters(), 0.1), dist.get_rank(), steps=2)
    held = model.memory("peak")
    for part in PARTS - {"transport", "optimizer", "total"}:
        assert held[part] == predicted[part], part
    model.zero_grad()
    batch, size = case.batch(0, dist.get_rank()), predicted["grads"]
    with model.no_sync():
        loss_of(model(batch)).backward()
        within = model.memory()["grads"]
    loss_of(model(batch)).backward()
    after, predicted = model.memory()["grads"], model.memory("predicted")
    if dist.get_rank() == 0:
        assert predicted_of(name, combination, options, no_sync=True) == predicted
    if combination[0] == "no_shard":  # full gradients belong to the script
        within, after = size, size
    assert within == model.memory("peak")["grads"] == predicted["grads"] >= after == size


@on_ranks(2)
def test_micro_batches_take_memory_beside_offloaded_gradients(tmp_path):
    offload = zshard.Offload(directory=str(tmp_path), grads=True)
    how = {"offload": offload, "mixed_precision": BF16}
    model = wrapped(CASES["net"].make, ("full_shard", "shm"), **how)
    batch = CASES["net"].batch(0, dist.get_rank())
    with model.no_sync():
        loss_of(model(batch)).backward()
        within = model.memory()["grads"]
    loss_of(model(batch)).backward()
    assert within == model.memory("peak")["grads"] == model.memory("predicted")["grads"] > 0
    assert model.memory()["grads"] == 0


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
@on_ranks(4)
def test_predictions_of_hybrids(strategy):
    """Over shm, a prediction has all ranks of a host in one copy."""
    case = CASES["net"]
    options = {"transport": "c10d", "auto_wrap_policy": case.policy, "strategy": strategy}
    model = FSDP(make(case.make), device_mesh=mesh_of(2, 2), **options)
    if dist.get_rank() == 0:
        predicted = predict_memory(on_meta("net"), 4, local_world_size=2, **options)
        assert predicted == model.memory("predicted")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2, fresh=True)
def test_transport_memory(transport):
    """The transport's own memory, and the total with the optimizer's state."""
    dist.init_process_group("gloo")
    policy = {"auto_wrap_policy": CASES["net"].policy}
    predicted = predict_memory(on_meta("net"), 2, transport=transport, **policy)
    training = Scenario("net", ("full_shard", transport)).sharded(4)
    held = training.model.memory()
    assert predicted["transport"] == held["transport"] > 0
    steps = 4 * len(list(CASES["net"].make().parameters()))  # Adam counts steps in a tensor
    assert dist.get_rank() or predicted["optimizer"] == held["optimizer"] - steps


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_peaks(transport):
    """A script keeps units unsharded, or keeps gradients local."""
    case, rank = CASES["net"], dist.get_rank()
    model = wrapped(case.make, ("full_shard", transport), auto_wrap_policy=case.policy)
    before = model.memory("peak")
    with FSDP.summon_full_params(model):
        held = model.memory()
    after_holds = model.memory("peak")
    with model.no_sync():
        loss_of(model(case.batch(0, rank))).backward()
    local = model.memory()
    model.zero_grad()
    loss_of(model(case.batch(0, rank))).backward()
    now = model.memory()
    peak = model.memory("peak")
    assert before["slots"] < held["slots"] <= after_holds["slots"]
    assert after_holds["total"] >= held["total"]
    assert now["grads"] < local["grads"] <= peak["grads"]
    assert peak["total"] >= max(local["total"], held["total"])
    for part in PARTS:
        assert peak[part] >= now[part], part


@pytest.mark.parametrize(
    ("name", "in_backward"),
    [
        ("zshard.AdamW", False),
        ("zshard.AdamW", True),
        ("torch.AdamW", False),
        ("torch.Adagrad", False),
    ],
)
@on_ranks(2)
def test_optimizer_memory(name, in_backward):
    training = Scenario("net", optimizer=name).sharded()
    model = training.model
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    assert [model.memory(what)["optimizer"] for what in ("now", "predicted")] == [0, 2 * size]
    if in_backward:
        model.optimizer_in_backward(training.optimizer)
    training.go(1)
    held = {model.memory(what)["optimizer"] for what in ("now", "predicted", "peak")}
    least = size if name.endswith("Adagrad") else 2 * size
    assert len(held) == 1 and least <= held.pop() <= least + 4 * len(list(model.parameters()))


def test_summary_shows_memory():
    model = FSDP(make(Net), auto_wrap_policy={Block})
    table = model.summary().split("\n\n")[1].splitlines()
    assert table[0].split() == ["memory,", "MiB", "predicted", "now", "peak"]
    assert [line.split()[0] for line in table if line[:1].isalpha()] == [
        "memory,",
        "shards",
        "optimizer",
        "total",
    ]


def test_arguments():
    model, plain = FSDP(make(Net)), make(Net)
    assert (
        set(model.memory()) == set(model.memory("peak")) == set(model.memory("predicted")) == PARTS
    )

    def refused(words, *args, **options):
        return lambda: predict_memory(*(args or (plain, 4)), **options), ValueError, words

    all_refused(
        {
            "moment": (lambda: model.memory("later"), ValueError, "'now', 'peak', 'predicted'"),
            "optimizer": refused("number of state tensors", optimizer="lamb"),
            "transport": refused("must be one of 'auto', 'shm', 'hosts', 'c10d'", transport="tcp"),
            "strategy": refused("unknown strategy", strategy="zero4"),
            "hosts": refused("on one host", transport="shm", local_world_size=1),
            "odd hosts": refused("not a multiple", local_world_size=3),
            "no ranks": refused("must be a positive integer", plain, 0),
            "a sharded model": refused("already wrapped", model, 2),
        }
    )


@pytest.mark.parametrize(("name", "moments"), [("adamw8bit", 2), ("SGD8bit", 1)])
def test_prediction_of_eight_bit_state(name, moments):
    plain = torch.nn.Linear(4096, 2)
    told = predict_memory(plain, 2, transport="c10d", optimizer=name)
    own = 4128  # of 8224 elements with padding, half, in groups of 32; rank 1 has the bias
    assert told["optimizer"] == moments * (own + own // 32)


@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("name", ["net", "tied", "attention"])
@on_ranks(2)
def test_prediction_of_muon(name, combination, precision):
    case = CASES[name]
    options = {"auto_wrap_policy": case.policy, "mixed_precision": precision}
    predicted = predicted_of(name, combination, options, optimizer="muon")["optimizer"]
    model = wrapped(case.make, combination, **options)
    optimizer = zshard.Muon(model)
    train(model, case, optimizer, dist.get_rank(), steps=1)
    states = [state for state in optimizer.state.values() if state]
    tensors = [value for state in states for key, value in state.items() if key != "step"]
    held = sum(value.numel() * value.itemsize for value in tensors)
    assert model.memory()["optimizer"] == held + 4 * sum("step" in state for state in states)
    assert dist.get_rank() or predicted == held


def test_prediction_by_hand():
    """One unit of 1000 fp32 elements over 4 ranks, by hand."""
    plain = torch.nn.Linear(1000, 1, bias=False)
    told = predict_memory(plain, 4, transport="c10d", optimizer=1)
    post = 4 * (1024 + 128)  # a shard and a tail for each rank
    assert told == {
        "shards": 1024,  # 250 elements, rounded up to 64 bytes
        "kept": 0,
        "grads": 1024,
        "slots": 4096,
        "buckets": 4096,
        "transport": 2 * post + 5 * 280,  # sent and received, and the message before them
        "offloaded": 0,
        "optimizer": 1024,
        "total": told["total"],
    }
    assert told["total"] == sum(told[part] for part in PARTS - {"total", "offloaded"})
    assert {tuple(p.shape) for p in plain.parameters()} == {(1, 1000)}


def test_one_rank_needs_one_bucket():
    """A round of one rank ends at once: all units of a size take turns in one bucket."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
    model = FSDP(layers, mixed_precision=BF16, auto_wrap_policy={torch.nn.Linear})
    model(torch.ones(2, 64)).float().sum().backward()
    for what in ("predicted", "peak"):
        assert model.memory(what)["buckets"] == 4 * 64 * 64
