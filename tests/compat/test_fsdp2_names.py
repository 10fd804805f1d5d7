"""fully_shard() and FSDP2's names: their arguments, and the errors for unsupported ones.

test_fully_shard.py trains with them. A method that only chooses between equivalent ways is called
in the middle of training, which must stay bit-identical to DDP.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from compare import differences
from models import COMBINATIONS, TRANSPORTS, Mlp, ddp, make
from nursery import fork_ranks
from scenarios import (
    Stack,
    floats,
    forward_backward,
    loss_of,
    message_of,
    over,
    stack,
    units_of,
    whole,
    whole_grads,
)
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, FSDPModule, fully_shard

BOOLS = {
    "set_keep_unsharded_storage": "keep",
    "set_manual_backward_finalization": "enabled",
    "set_is_last_backward": "is_last_backward",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_backward": "reshard_after_backward",
}


def test_isinstance_finds_sharded_modules():
    model = stack()
    assert isinstance(model, FSDPModule) and isinstance(model.blocks[0], FSDPModule)
    assert not isinstance(model.blocks[0].module, FSDPModule)
    units = [each for each in model.modules() if isinstance(each, FSDPModule)]
    assert units == FSDP.fsdp_modules(model)


def test_method_signatures_match_torch():
    shared = [name for name in vars(torchs.FSDPModule) if hasattr(FSDP, name)]
    names = [name for name in shared if not name.startswith("__") and name != "_apply"]
    checked = []
    for name in names:
        theirs = inspect.signature(getattr(torchs.FSDPModule, name)).parameters
        ours = inspect.signature(getattr(FSDP, name)).parameters
        assert [(p.name, p.kind) for p in ours.values()] == [
            (p.name, p.kind) for p in theirs.values()
        ], name
        defaults = {p.name: p.default for p in theirs.values()}
        assert {p.name: p.default for p in ours.values()} == defaults, name
        checked.append(name)
    assert len(checked) >= 10, checked


@pytest.mark.parametrize(("name", "argument"), BOOLS.items())
def test_switches_require_a_bool(name, argument):
    model = stack()
    for value in (True, False):
        getattr(model, name)(value)
        getattr(model, name)(**{argument: value})
    assert f"{argument} must be a bool, got 1" in message_of(
        lambda: getattr(model, name)(1), TypeError
    )


def test_no_parameter_is_a_flat_one():
    assert not any(isinstance(each, zshard.FlatParameter) for each in stack().parameters())


# --- arguments and refusals of fully_shard() ----------------------------------------------------------


def test_single_rank():
    model = stack()
    expected, ours = make(Stack), model
    assert ours.unshard() is None and model.blocks[0].unshard(async_op=True).wait() is None
    for net in (expected, ours):
        forward_backward(net, 0)
        torch.optim.SGD(net.parameters(), lr=0.1).step()  # held or not: it is unsharded anyway
    ours.reshard()
    assert differences(ours.state_dict(), expected.state_dict()) == []
    ours.set_gradient_divide_factor(1.0)
    with pytest.raises(NotImplementedError, match="scale the loss"):
        ours.set_gradient_divide_factor(2.0)


def ignoring():
    model = make(Mlp)
    alone = model.first.weight
    fully_shard(model, ignored_params={alone})
    assert model.third.weight.shape != (3, 401)
    return tuple(alone.shape)


def test_ignored_params_stay_unchanged(pool2):
    assert pool2.run(ignoring) == [(13, 7)] * 2


def test_policies_without_effect_are_accepted():
    for casts in (None, zshard.MixedPrecisionPolicy(), torchs.MixedPrecisionPolicy()):
        for offload in (None, zshard.OffloadPolicy(), torchs.CPUOffloadPolicy()):
            fully_shard(make(Mlp), mp_policy=casts, offload_policy=offload)


class Mesh3:
    ndim, device_type = 3, "cpu"

    def get_group(self):
        raise AssertionError("its dimensions come first")


class MeshOnDevice(Mesh3):
    ndim, device_type = 1, "xpu"


MISTAKES = [
    (lambda: fully_shard(3), TypeError, "nn.Module, got int"),
    (lambda: fully_shard([make(Mlp), 3]), TypeError, "got int"),
    (lambda: fully_shard(nn.ModuleList([make(Mlp)])), ValueError, "ModuleList has no forward"),
    (lambda: fully_shard(fully_shard(make(Mlp))), ValueError, "already"),
    (lambda: fully_shard(make(Mlp), reshard_after_forward="yes"), TypeError, "got 'yes'"),
    (lambda: fully_shard(make(Mlp), mesh=3), TypeError, "DeviceMesh, got int"),
    (lambda: fully_shard(make(Mlp), mesh=Mesh3()), ValueError, "3 dimensions"),
    (lambda: fully_shard(make(Mlp), mesh=MeshOnDevice()), NotImplementedError, "'xpu'"),
    (lambda: fully_shard(make(Mlp), mp_policy=3), TypeError, "mixed_precision"),
    (lambda: fully_shard(make(Mlp), offload_policy=3), TypeError, "offload_policy"),
    (lambda: fully_shard(make(Mlp), ignored_params=[3]), TypeError, "ignored_params.*int"),
    (lambda: stack().set_reshard_after_forward(1), TypeError, "bool, got 1"),
    (lambda: FSDP(make(Mlp), strategy="no_shard").set_reshard_after_forward(False), ValueError, "no_shard"),
    (lambda: stack().set_gradient_divide_factor(0), ValueError, "positive"),
    (lambda: stack().set_gradient_divide_factor(float("inf")), ValueError, "positive"),
    (lambda: stack().set_gradient_divide_factor("2"), TypeError, "real number"),
    (lambda: stack().set_is_last_backward(None), TypeError, "bool"),
    (lambda: stack().set_modules_to_forward_prefetch([nn.Linear(1, 1)]), TypeError, "got a Linear"),
    (lambda: stack().set_modules_to_backward_prefetch(stack()), TypeError, "must be a list of sharded modules"),
    (lambda: fully_shard(make(Mlp), shard_placement_fn=len), NotImplementedError, "shard_placement_fn"),
    (lambda: fully_shard(make(Mlp), dp_mesh_dims=zshard.DataParallelMeshDims("dp")), NotImplementedError, "mesh="),
    (lambda: zshard.FlatParameter(torch.ones(2)), TypeError, "original parameters"),
    (lambda: setattr(units_of(stack())[0], "strategy", "no_shard"), ValueError, "cannot change"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "kind", "match"), MISTAKES, ids=[m for *_, m in MISTAKES])
def test_mistakes_are_named(action, kind, match):
    with pytest.raises(kind, match=match):
        action()


@on_ranks(2)
def test_divide_factor_of_a_replicated_unit_is_refused():
    model = FSDP(make(Mlp), strategy="no_shard")
    model.set_gradient_divide_factor(2.0)
    message = message_of(lambda: model.set_gradient_divide_factor(1.0), NotImplementedError)
    assert "not sharded" in message


# --- torch's own wrappers around zshard's model -------------------------------------------------------


@pytest.mark.parametrize(("strategy", "transport"), COMBINATIONS)
@on_ranks(2)
def test_torchs_wrappers_refuse_a_wrapped_model(strategy, transport):
    """Return the errors of torch's wrappers, and what they have changed."""
    from torch.distributed._composable import replicate as ddps
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = FSDP(make(Stack), strategy=strategy, transport=transport)
    before, on_cpu = whole(model), {"device_id": torch.device("cpu")}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    twice = [lambda: torchs.fully_shard(model, mesh=mesh)] * 2
    blocks = list(model.blocks)
    attempts = [*twice, lambda: replicate(model, mesh=mesh), lambda: ddps(model)]
    attempts.append(lambda: torchs.fully_shard(blocks, mesh=mesh))
    errors = [message_of(attempt, TypeError) for attempt in attempts]
    forward_backward(model, dist.get_rank())
    rest = []
    if strategy != "no_shard":  # otherwise torch gets full parameters
        part, outer = next(blocks[0].children()), nn.Sequential(model)
        for attempt in (
            lambda: torchs.fully_shard(part, mesh=mesh),
            lambda: torchs.fully_shard(outer, mesh=mesh),
            lambda: torchs.FullyShardedDataParallel(model, **on_cpu),
            lambda: torchs.FullyShardedDataParallel(outer, use_orig_params=True, **on_cpu),
        ):
            rest.append(message_of(attempt, zshard.ShardError))
    wrong = differences(whole(model), before)
    assert wrong == []
    for text in errors:
        assert "() cannot wrap a model that zshard has wrapped" in text and "remove it" in text
    for text in rest:
        assert "remove that call" in text and "Muon" not in text


@on_ranks(2)
def test_torchs_fully_shard_ignores_a_wrapped_model():
    """Return what differs if torch wraps a module around a model of zshard, and ignores that."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plain = nn.Sequential(nn.Linear(9, 9), make(Stack))
    outer = copy.deepcopy(plain)
    inner = FSDP(outer[1])
    torchs.fully_shard(outer, mesh=mesh, ignored_params=set(inner.parameters()))
    for each in (outer, plain):
        loss_of(each(floats(0))).backward()
    expected = {name: param.grad for name, param in plain[1].named_parameters()}
    assert differences(whole_grads(inner), expected) == []


# --- training -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_training_with_all_switches_is_bit_identical_to_ddp(transport):
    """Return what differs from DDP if each step calls the methods as a script for accumulation
    would."""
    rank = dist.get_rank()
    plain = make(Stack)
    reference = ddp(plain)
    with over(transport):
        model = stack()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(4):
        last = step % 2 == 1
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_requires_all_reduce(last, recurse=True)
        model.set_reshard_after_backward(last, recurse=step == 1)
        model.set_gradient_divide_factor(2.0)
        model.set_keep_unsharded_storage(True, recurse=step == 1)
        model.set_manual_backward_finalization(step > 1)
        model.unshard(async_op=True).wait()
        model.reshard()
        reference.require_backward_grad_sync = last
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            loss_of(each(floats(rank, step))).backward()
            if last:
                if each is model:
                    assert model.finalize_backward() is None
                    model.finalize_backward(async_op=True).wait()
                optimizer.step()
                optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model(floats(rank, 0))).backward()
    assert "outside of no_sync()" in message_of(model.finalize_backward, RuntimeError)
    assert differences(model.state_dict(), plain.state_dict()) == []


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, x):
        return self.layer(x)

    def encode(self, x):
        return self.layer(x) + self.layer.weight.sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_register_fsdp_forward_method(transport):
    plain = make(Encoder)
    zshard.register_fsdp_forward_method(
        plain, "encode"
    )  # not sharded: nothing happens, as in torch
    assert "encode" not in vars(plain)
    with over(transport):
        model = fully_shard(copy.deepcopy(plain))
    zshard.register_fsdp_forward_method(model, "encode")
    for net in (plain, model):
        loss_of(net.encode(floats(0))).backward()
    ours = {"grad": zshard.full_tensor(model.layer.weight.grad)}
    assert differences(ours, {"grad": plain.layer.weight.grad}) == []


# --- names imported from torch ---------------------------------------------------------------------------

BOTH = """
import torch
from torch.distributed.fsdp import FSDPModule
import zshard

model = zshard.fully_shard(torch.nn.Linear(2, 2))
assert not isinstance(model, FSDPModule) and isinstance(model, zshard.FSDPModule)
torchs = torch.distributed.fsdp
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
theirs = torchs.fully_shard(torch.nn.Linear(2, 2), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
assert isinstance(theirs, FSDPModule) and theirs.weight.full_tensor().shape == (2, 2)
assert theirs.weight.device_mesh.size() == 1 and theirs.weight.placements
print("right")
"""


def test_torchs_fully_shard_works_beside_zshards(tmp_path):
    (tmp_path / "both.py").write_text(BOTH)
    (done,) = fork_ranks(tmp_path / "both.py", 1, check=True)
    assert done.stdout == "right\n"
