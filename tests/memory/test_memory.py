"""Memory of a rank: 1/W of parameters, gradients and optimizer state, and a bounded rest.

The bytes that units, tensors and the kernel report must agree. test_predict.py compares them with
predictions. Gradients take memory from backward until a script drops them, in any way.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, Nested, Net, loss_of, make, train, wrapped
from scenario import Scenario
from scenarios import units_of
from spawn import on_ranks, run_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.wrap import always_wrap_policy, size_based_auto_wrap_policy

MIB = 1 << 20
PARAM_ALIGN = 128  # bytes from one parameter's start to the next are a multiple of it
SHARD_ALIGN = {"shm": 4096, "c10d": 128}  # and so are the bytes of a shard


def storages(tensors):
    """Return the bytes under tensors, counting each storage once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2, 3)
def test_rank_holds_its_share(combination):
    full = sum(p.numel() * p.itemsize for p in make(CASES["net"].make).parameters())
    training = Scenario("net", combination).sharded(2)
    model, held = training.model, training.model.memory()
    params = list(model.parameters())
    grads = [p.grad for p in params]
    state = [training.optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    padding = len(params) * PARAM_ALIGN + len(units_of(model)) * SHARD_ALIGN[combination[1]]
    share = full / dist.get_world_size() + padding
    for tensors, times in ((params, 1), (grads, 1), (state, 2)):
        own = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        assert sum(gathered(own)) == times * full, "each element is on one rank"
        assert own <= times * share
    assert storages(params) == held["shards"] <= share
    assert storages(grads) == held["grads"] <= share


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[0] != "no_shard"])
@on_ranks(2)
def test_reading_gradient_storage_allocates_nothing(combination, holds):
    """Python's object of a storage stays without references, and holds nothing then."""
    case, training = CASES["net"], Scenario("net", combination, "torch.SGD").sharded(1)
    model = training.model
    before = model.memory()["grads"]
    storages = [param.grad.untyped_storage() for param in model.parameters()]
    content = bytes(storages[0])
    del storages[1 if holds else 0 :]
    for step in range(3):
        model.zero_grad()
        loss_of(model(case.batch(step + 1, dist.get_rank()))).backward()
    assert (model.memory()["grads"] > before) == holds
    assert all(bytes(storage) == content for storage in storages)


def check_buffers(combination, width):
    """Fail if slots and buckets take more than those of the root's unit and the largest others."""
    strategy, transport = combination
    model = wrapped(lambda: Net(width, 5), combination, auto_wrap_policy={Nested, nn.Embedding})
    train(model, CASES["net"], torch.optim.SGD(model.parameters(), 0.1), dist.get_rank())
    page = SHARD_ALIGN[transport]
    root, *others = [{kind: size + page for kind, size in u.bytes.items()} for u in units_of(model)]
    largest = {kind: max(unit[kind] for unit in others) for kind in root}
    held = model.memory()
    if strategy != "shard_grad_op":  # it keeps all units unsharded from forward to backward
        assert held["slots"] <= root["full"] + 2 * largest["full"]
    # All ranks pass on no_shard's sums: one more, where every rank would otherwise wait for
    # every other (see bucket.h).
    most = 3 if strategy == "no_shard" else 2
    assert 0 < held["buckets"] <= root["bucket"] + most * largest["bucket"]
    gathers = transport == "c10d" and strategy not in ("no_shard", "zero1")
    assert (held["slots"] > 0) == gathers


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_at_most_two_full_buffers_and_buckets(combination):
    check_buffers(combination, 33)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2, fresh=True)
def test_buckets_shrink_after_a_larger_model(strategy):
    dist.init_process_group("gloo")
    check_buffers((strategy, "shm"), 131)
    gc.collect()
    check_buffers((strategy, "shm"), 33)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_nothing_is_allocated_after_the_second_step(combination):
    """Return memory() after each of ten steps, with scheduled and skipped submodules."""
    model = wrapped(Net, combination)
    case, optimizer = CASES["net"], zshard.AdamW(model.parameters())
    seen = []
    for step in range(10):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model(case.batch(step, dist.get_rank()))).backward()
        if step % 3 == 0:
            with torch.no_grad():
                model(case.batch(step, dist.get_rank()))
        optimizer.step()
        seen.append(model.memory())
    assert seen[2:] == [seen[1]] * len(seen[2:])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_models_share_transport_buffers(transport):
    first, second = (Scenario("net", ("full_shard", transport)).sharded().go(2) for _ in range(2))
    held = [training.model.memory()["transport"] for training in (first, second)]
    assert held[0] == held[1] > 0
    if transport == "c10d":  # sent and received
        assert held[0] >= 2 * max(unit.bytes["bucket"] for unit in units_of(first.model))


# --- when gradients take memory ---------------------------------------------------------------------------


def four_layers():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


def one_by_one(model):
    for param in reversed(list(model.parameters())):
        param.grad = None


def deleted(model):
    for param in model.parameters():
        del param.grad


ZEROING = {
    "model": lambda model: model.zero_grad(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "one by one": one_by_one,
    "deleted": deleted,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ZEROING)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_gradients_take_memory_from_backward_to_zero_grad(combination, how):
    model = wrapped(four_layers, combination, auto_wrap_policy={nn.Linear})
    size = model.memory("predicted")["grads"]
    held = size if combination[0] != "no_shard" else 0  # full gradients belong to the script
    x = torch.randn(8, 256)
    assert model.memory()["grads"] == 0
    loss_of(model(x)).backward()
    assert model.memory()["grads"] == held
    expected = [p.grad.clone() for p in model.parameters()]
    ZEROING[how](model)
    assert model.memory()["grads"] == 0
    loss = loss_of(model(x))
    assert model.memory()["grads"] == 0
    loss.backward()
    assert model.memory()["grads"] == held
    assert model.memory("peak")["grads"] == model.memory("predicted")["grads"] == size
    assert_same([p.grad for p in model.parameters()], expected, "the gradients")


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("shard_grad_op", "c10d")])
@on_ranks(2)
def test_gradients_that_a_script_keeps_go_with_its_last_reference(combination):
    model = wrapped(four_layers, combination, auto_wrap_policy={nn.Linear})
    size = model.memory("predicted")["grads"]
    loss_of(model(torch.randn(8, 256))).backward()
    kept = [p.grad for p in model.parameters()]
    expected = [zshard.to_local(grad).clone() for grad in kept]
    for _ in range(2):
        model.zero_grad()
        loss_of(model(torch.randn(8, 256))).backward()
        assert model.memory()["grads"] == 2 * size
    assert_same(kept, expected, "the kept gradients")
    del kept
    model.zero_grad()
    assert model.memory()["grads"] == 0


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_gradients_zeroed_in_place_keep_their_memory(combination):
    model, twin = (
        wrapped(four_layers, combination, auto_wrap_policy={nn.Linear}) for _ in range(2)
    )
    inputs = torch.randn(2, 8, 256)
    addresses = []
    for x in inputs:
        model.zero_grad(set_to_none=False)
        loss_of(model(x)).backward()
        addresses.append([zshard.to_local(p.grad).data_ptr() for p in model.parameters()])
    assert addresses[0] == addresses[1]
    loss_of(twin(inputs[1])).backward()
    assert_same(*([p.grad for p in each.parameters()] for each in (model, twin)), "the gradients")


# --- the kernel's view ---------------------------------------------------------------------------


def held_bytes():
    """Return this process's share of memory that belongs to no file: PSS divides shared pages among
    processes, so windows into peers are not counted twice."""
    gc.collect()
    return rollup("Pss_(?:Anon|Shmem)")


def rollup(name):
    """Return the bytes of all this process's mappings that the kernel counts under that name."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)))


WIDTH, DEPTH = 1024, 10  # 4 MiB a layer
HUGE_PAGE = 2 * MIB


def measured(combination):
    """Return bytes: {"added": by the model and three steps, "more": by seven more, "layer": of one,
    and memory()'s values for the first two}."""
    gc.freeze()  # a collection need not scan all of torch
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory is returned at once
    x = torch.randn(8, WIDTH)

    def steps(model, number):
        for _ in range(number):
            model.zero_grad()
            loss_of(model(x)).backward()

    build = nn.Sequential
    steps(FSDP(build(nn.Linear(WIDTH, WIDTH)), transport=combination[1]), 2)  # warms libraries up
    dist.barrier()
    before = held_bytes()
    model = wrapped(
        lambda: build(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))),
        combination,
        auto_wrap_policy={nn.Linear},
    )
    steps(model, 3)
    dist.barrier()
    given = 0
    if combination[0] == "no_shard":  # full gradients belong to the script
        given = sum(param.grad.nbytes for param in model.parameters())
    after, told = held_bytes(), model.memory()["total"] + given
    dist.barrier()
    steps(model, 7)
    dist.barrier()
    later = held_bytes()
    dist.barrier()
    return {
        "added": after - before,
        "more": later - after,
        "layer": units_of(model)[1].bytes["full"],
        "told": told,
        "told more": model.memory()["total"] + given - told,
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "combination",
    [
        combination
        if combination in (("full_shard", "shm"), ("shard_grad_op", "c10d"))
        else pytest.param(combination, marks=pytest.mark.thorough)
        for combination in COMBINATIONS
    ],
)
def test_memory_matches_the_kernels_count(combination):
    """In separate processes: earlier models' leftovers in malloc and gloo are not counted."""
    strategy, transport = combination
    for held in (result.value for result in run_ranks(measured, 2, combination)):
        layers = 2 * DEPTH / (1 if strategy == "no_shard" else 2)  # parameters and gradients
        rest = 4  # full buffers and buckets of two units
        if transport == "c10d":
            rest += 4  # send and receive buffers of the two in flight
            # Unsharded from forward to backward, or between steps too.
            rest += DEPTH if strategy in ("shard_grad_op", "zero1") else 0
        text = ", ".join(f"{key}: {value / MIB:.1f} MiB" for key, value in held.items())
        assert 0.9 * layers * held["layer"] <= held["added"], text
        noise = 2 * MIB + HUGE_PAGE  # the page that the gradients end in
        assert held["added"] + held["more"] <= (layers + rest) * held["layer"] + noise, text
        assert held["added"] <= held["told"] + noise, text
        # When a second bucket, or an existing area of c10d's, is first touched is a matter of
        # timing.
        assert held["more"] <= held["told more"] + held["layer"] + MIB, text


BIG = functools.partial(size_based_auto_wrap_policy, min_num_params=100)


def used_and_dropped(transport, policy):
    """Return weak references to a model and its submodules."""
    options = {"auto_wrap_policy": policy}
    training = Scenario("net", ("full_shard", transport), "torch.SGD", options=options).sharded(1)
    model = training.model
    model.load_state_dict(model.state_dict())
    return list(map(weakref.ref, (model, model.head, model.head.weight)))


@pytest.mark.parametrize("policy", ["auto", None, {nn.Embedding}, BIG, always_wrap_policy])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_dropped_model_is_freed_at_once(transport, policy):
    """Without a garbage collection."""
    used_and_dropped(transport, policy)  # torch's first optimizer leaves a cycle
    gc.disable()
    try:
        assert [each() for each in used_and_dropped(transport, policy)] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_hook_that_refers_to_the_model_does_not_leak_it(transport):
    """Return whether a model is freed whose parameter has a hook that holds the model."""
    case = CASES["net"]
    model = wrapped(case.make, ("full_shard", transport), auto_wrap_policy="auto")
    model.head.weight.register_hook(lambda grad, held=model: None)
    train(model, case, torch.optim.SGD(model.parameters(), 0.1), dist.get_rank(), steps=1)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
