"""summon_full_params(with_grads=True): full gradients to read and to write.

Inside, `.grad` equals the result of whole_grads() from the ranks' shards; outside, the shards are
those of the gradients written inside.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from guarded import same
from models import CASES, COMBINATIONS, differences, loss_of, make, wrapped
from scenario import sharded
from scenarios import WIDTH, Stack, forward_backward, message_of, whole_grads
from spawn import on_ranks

import zshard
from zshard import FSDP, MixedPrecision

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
LOW = MixedPrecision(param_dtype=torch.bfloat16)


def grads_of(model):
    """Return copies of the gradients as they are now, by name, without those that are None."""
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def present(grads):
    return {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen", "unused", "dtypes"])
@on_ranks(2, 3)
def test_gradients_are_full_inside(name, combination):
    """Those that a script keeps are plain full tensors, also where this rank has all of them."""
    case, model = CASES[name], sharded(name, combination)
    for step in range(2):
        loss_of(model(case.batch(step, dist.get_rank()))).backward()
    expected = present(whole_grads(model))
    slices = present({name: p.grad for name, p in model.named_parameters()})
    values = {name: grad.clone() for name, grad in slices.items()}
    with FSDP.summon_full_params(model, with_grads=True):
        kept = present({name: p.grad for name, p in model.named_parameters()})
        sums = {name: grad.sum() for name, grad in kept.items()}  # refused on a shard
        inside = grads_of(model)
        with FSDP.summon_full_params(model, with_grads=True):
            assert_same(grads_of(model), expected, "gradients of a context inside")
    with model.summon_full_params(writeback=False, rank0_only=True, with_grads=True):
        on_rank_0 = grads_of(model)
    assert {type(grad) for grad in kept.values()} == {torch.Tensor}
    assert_same(inside, expected, "the gradients")
    assert_same(kept, expected, "the gradients afterwards")
    assert_same(sums, {name: grad.sum() for name, grad in expected.items()}, "their sums")
    if dist.get_rank() == 0:
        assert_same(on_rank_0, expected, "the gradients of rank 0")
    after = dict(model.named_parameters())
    assert [name for name, grad in slices.items() if after[name].grad is not grad] == []
    assert all(same(slices[name], value) for name, value in values.items())
    assert_same(present(whole_grads(model)), expected, "the shards")


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@on_ranks(4)
def test_shard_groups(strategy):
    model = FSDP(make(Stack), strategy=strategy, transport="c10d", device_mesh=mesh_of(2, 2))
    forward_backward(model, dist.get_rank())
    expected = whole_grads(model)
    with FSDP.summon_full_params(model, with_grads=True):
        assert_same(grads_of(model), expected, "the gradients")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", [None, LOW])
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_writes_are_kept_or_discarded(combination, writeback, precision):
    """And a step uses kept writes; others are discarded, also by an exception."""
    model = wrapped(Stack, combination, mixed_precision=precision)
    optimizer = zshard.SGD(model.parameters(), 0.1)
    forward_backward(model, dist.get_rank())
    expected, before = whole_grads(model), copy.deepcopy(model.state_dict())
    full = FSDP.summon_full_params(model, writeback=writeback, with_grads=True)
    with contextlib.suppress(LookupError), full:
        for name, param in model.named_parameters():
            if name == "head.bias":
                param.grad = None
            elif name == "head.weight":
                param.grad = torch.full_like(param, 3.0)
            else:
                param.grad.mul_(2)
        if not writeback:
            raise LookupError("stumbled")
    if writeback:
        expected = {name: grad * 2 for name, grad in expected.items()}
        expected["head.weight"].fill_(3.0)
        expected["head.bias"] = None
    assert_same(present(whole_grads(model)), present(expected), "the gradients")
    optimizer.step()
    for name, grad in present(expected).items():
        before[name] = before[name].add(grad, alpha=-0.1)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=1e-6)
    optimizer.zero_grad()
    forward_backward(model, dist.get_rank())
    assert None not in whole_grads(model).values()


@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_gradients_on_some_ranks(combination):
    """A rank that dropped its shards counts as zero; a gradient that is created inside stays."""
    model, rank = wrapped(Stack, combination), dist.get_rank()
    forward_backward(model, rank)
    expected = whole_grads(model)
    spans = [None, None]
    dist.all_gather_object(spans, zshard.shard_info(model.head.weight))
    begin, numel = spans[1]["begin"], spans[1]["numel"]
    expected["head.weight"].view(-1)[begin : begin + numel] = 0
    if rank == 1:
        model.head.weight.grad = None
    with FSDP.summon_full_params(model, with_grads=True):
        assert_same(grads_of(model), expected, "the gradients")
    model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        assert grads_of(model) == {}
        model.head.weight.grad = torch.ones_like(model.head.weight)
    ones = {"head.weight": torch.ones(2, WIDTH)}
    assert_same(present(whole_grads(model)), ones, "the gradients")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_no_sync_gradients_stay_local(combination):
    """In no_sync() a .grad is full and local to its rank: it stays so, and writes to it are kept."""
    model, plain = wrapped(Stack, combination), make(Stack)
    with model.no_sync():
        forward_backward(model, dist.get_rank())
    forward_backward(plain, dist.get_rank())
    expected = grads_of(plain)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert_same(grads_of(model), expected, "the gradients")
        for param in model.parameters():
            param.grad.mul_(5)
    assert_same(grads_of(model), expected, "the gradients afterwards")
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad.mul_(2)
    assert_same(grads_of(model), {name: grad * 2 for name, grad in expected.items()}, "the writes")


@on_ranks(2)
def test_local_gradients_on_one_rank_are_refused():
    """One rank keeps its gradients, by its own setting, and the other has dropped its."""
    model = wrapped(Stack, ("full_shard", "shm"))
    with model.no_sync():
        forward_backward(model, dist.get_rank())
    if dist.get_rank() == 1:
        model.zero_grad()
    before = grads_of(model)
    with pytest.raises(RuntimeError, match="some ranks, but not all, have an unreduced gradient"):
        enter(model)
    assert_same(grads_of(model), before, "the gradients")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_a_first_gradient_is_discarded(combination):
    model = wrapped(Stack, combination)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
    assert grads_of(model) == {}


@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_gradients_of_parameters_that_are_unsharded_already_are_refused(combination):
    """At the end, torch would not accept their shards."""
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    own = grads_of(model)
    for unit in model, model.blocks[1]:
        with FSDP.summon_full_params(model):
            text = message_of(functools.partial(enter, unit), RuntimeError)
        assert "pass with_grads=True to the first" in text
        unit.unshard()
        assert "call reshard() before" in message_of(functools.partial(enter, unit), RuntimeError)
        unit.reshard()
    assert differences(grads_of(model), own) == []
    with FSDP.summon_full_params(model, with_grads=True):
        pass
    assert differences(grads_of(model), own) == []


def enter(module):
    with FSDP.summon_full_params(module, with_grads=True):
        pass
