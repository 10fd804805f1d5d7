"""summon_full_params(with_grads=True): full gradients to read and to write.

Inside, `.grad` equals the result of whole_grads() from the ranks' shards; outside, the shards are
those of what was written inside.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from guarded import same
from models import CASES, COMBINATIONS, differences, loss_of, make, sharded, wrapped
from scenarios import Stack, floats, forward_backward, message_of, whole_grads
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
    """Return what differs inside from the full gradients, and afterwards; on rank 0 alone, too."""
    case, model = CASES[name], sharded(name, combination)
    loss_of(model(case.batch(0, dist.get_rank()))).backward()
    loss_of(model(case.batch(1, dist.get_rank()))).backward()
    expected = present(whole_grads(model))
    slices = {
        name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None
    }
    with FSDP.summon_full_params(model, with_grads=True):
        inside = grads_of(model)
        with FSDP.summon_full_params(model, with_grads=True):
            nested = grads_of(model)
    with model.summon_full_params(writeback=False, rank0_only=True, with_grads=True):
        at_0 = grads_of(model)
    kept = [n for n, p in model.named_parameters() if n in slices and p.grad is not slices[n][0]]
    as_before = all(same(grad, value) for grad, value in slices.values())
    wrong = differences(inside, expected) + differences(nested, expected)
    if dist.get_rank() == 0:
        wrong += differences(at_0, expected)
    assert wrong == []
    assert kept == []
    assert as_before
    assert differences(present(whole_grads(model)), expected) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2, 3)
def test_captured_gradient_is_full_on_all_ranks(combination):
    """Gradients that a script keeps are plain full tensors, also where this rank has all of them."""
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    expected = whole_grads(model)
    with FSDP.summon_full_params(model, with_grads=True):
        kept = {name: param.grad for name, param in model.named_parameters()}
        sums = {name: grad.sum() for name, grad in kept.items()}  # refused on a shard
    assert {type(grad) for grad in kept.values()} == {torch.Tensor}
    assert_same(kept, expected, "the gradients")
    assert_same(sums, {name: grad.sum() for name, grad in expected.items()}, "their sums")
    after = {type(param.grad).__name__ for param in model.parameters()}
    assert after == ({"Tensor"} if combination[0] == "no_shard" else {"ShardTensor"})


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
    """Return what differs after a step with what was written inside from the expected result."""
    model = wrapped(Stack, combination, mixed_precision=precision)
    optimizer = zshard.SGD(model.parameters(), 0.1)
    forward_backward(model, dist.get_rank())
    expected, before = whole_grads(model), copy.deepcopy(model.state_dict())
    with FSDP.summon_full_params(model, writeback=writeback, with_grads=True):
        for name, param in model.named_parameters():
            if name == "head.bias":
                param.grad = None
            elif name == "head.weight":
                param.grad = torch.full_like(param, 3.0)
            else:
                param.grad.mul_(2)
    if writeback:
        expected = {name: grad * 2 for name, grad in expected.items()}
        expected["head.weight"] = torch.full_like(expected["head.weight"], 3.0)
        expected["head.bias"] = None
    found = whole_grads(model)
    wrong = differences(present(found), present(expected))
    optimizer.step()
    for name, grad in present(expected).items():
        before[name] = before[name].add(grad, alpha=-0.1)
    near = {n: bool((v - before[n]).abs().max() < 1e-6) for n, v in model.state_dict().items()}
    optimizer.zero_grad()
    forward_backward(model, dist.get_rank())
    assert wrong == []
    assert [n for n, is_near in near.items() if not is_near] == []
    assert found.keys() == whole_grads(model).keys()


@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_gradients_on_some_ranks(combination):
    """A rank that dropped its shards counts as zero; a gradient that is created inside stays."""
    model, rank = wrapped(Stack, combination), dist.get_rank()
    forward_backward(model, rank)
    expected = whole_grads(model)
    info = zshard.shard_info(model.head.weight)
    if rank == 1:
        model.head.weight.grad = None
    spans = [None, None]
    dist.all_gather_object(spans, (info["begin"], info["numel"]))
    begin, numel = spans[1]
    expected["head.weight"].view(-1)[begin : begin + numel] = 0
    with FSDP.summon_full_params(model, with_grads=True):
        wrong = differences(grads_of(model), expected)
    model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        none = [name for name, param in model.named_parameters() if param.grad is not None]
        model.head.weight.grad = torch.ones_like(model.head.weight)
    ours = present(whole_grads(model))
    assert wrong == []
    assert none == []
    assert [(name, bool((grad == 1).all())) for name, grad in ours.items()] == [
        ("head.weight", True)
    ]


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_no_sync_gradients_stay_local(combination):
    """In no_sync() a .grad is full and local to its rank: it stays so, and writes to it are
    kept."""
    model, plain = wrapped(Stack, combination), make(Stack)
    rank = dist.get_rank()
    with model.no_sync():
        loss_of(model(floats(rank))).backward()
    loss_of(plain(floats(rank))).backward()
    expected = {name: param.grad.clone() for name, param in plain.named_parameters()}
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        inside = differences(grads_of(model), expected)
        for param in model.parameters():
            param.grad.mul_(5)
    after = differences(grads_of(model), expected)
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad.mul_(2)
    doubled = {name: grad * 2 for name, grad in expected.items()}
    assert inside == []
    assert after == []
    assert differences(grads_of(model), doubled) == []


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


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_error_inside(combination):
    model = wrapped(Stack, combination)
    forward_backward(model, dist.get_rank())
    expected = whole_grads(model)
    inside = FSDP.summon_full_params(model, writeback=False, with_grads=True)
    with pytest.raises(ValueError), inside:
        for param in model.parameters():
            param.grad.zero_()
        raise ValueError("stumbled")
    assert_same(whole_grads(model), expected, "the gradients")


@pytest.mark.parametrize("combination", SHARDED)
@on_ranks(2)
def test_gradients_of_parameters_that_are_unsharded_already_are_refused(combination):
    """What torch would not let back in at the end: their shards."""
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
