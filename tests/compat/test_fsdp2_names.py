"""fully_shard() and FSDP2's names: their arguments, and the errors for unsupported ones.

test_fully_shard.py trains with them. A method that only chooses between equivalent ways is called
in the middle of training, which must stay bit-identical to DDP.
"""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from compare import assert_same
from models import COMBINATIONS, TRANSPORTS, Mlp, ddp, make
from nursery import fork_ranks
from rows import all_refused, all_rows
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
    assert not any(isinstance(each, zshard.FlatParameter) for each in model.parameters())


def test_method_signatures_match_torch():
    shared = [name for name in vars(torchs.FSDPModule) if hasattr(FSDP, name)]
    names = [name for name in shared if not name.startswith("__") and name != "_apply"]
    assert len(names) >= 10
    for name in names:
        theirs, ours = (
            [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
            for method in (getattr(torchs.FSDPModule, name), getattr(FSDP, name))
        )
        assert ours == theirs, name


def test_switches_require_a_bool():
    model = stack()
    with all_rows() as row:
        for name, argument in BOOLS.items():
            switch = getattr(model, name)
            with row(name):
                for value in (True, False):
                    switch(value)
                    switch(**{argument: value})
                with pytest.raises(TypeError, match=f"{argument} must be a bool, got 1"):
                    switch(1)


# --- arguments and refusals of fully_shard() ----------------------------------------------------------


def test_single_rank():
    plain, model = make(Stack), stack()
    assert model.unshard() is None and model.blocks[0].unshard(async_op=True).wait() is None
    for net in (plain, model):
        forward_backward(net, 0)
        torch.optim.SGD(net.parameters(), lr=0.1).step()  # held or not: it is unsharded anyway
    model.reshard()
    assert_same(model.state_dict(), plain.state_dict(), "the state")
    model.set_gradient_divide_factor(1.0)
    with pytest.raises(NotImplementedError, match="scale the loss"):
        model.set_gradient_divide_factor(2.0)


@on_ranks(2)
def test_ignored_params_stay_unchanged():
    model = make(Mlp)
    fully_shard(model, ignored_params={model.first.weight})
    assert model.third.weight.shape != (3, 401) and model.first.weight.shape == (13, 7)


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


def of(**options):
    """Return a call of fully_shard() with these options."""
    return lambda: fully_shard(make(Mlp), **options)


def test_mistakes_are_named():
    model, dims = stack(), zshard.DataParallelMeshDims("dp")
    replicated, missing = FSDP(make(Mlp), strategy="no_shard"), NotImplementedError
    one, unit = nn.Linear(1, 1), units_of(model)[0]
    rows = [
        (lambda: fully_shard(3), TypeError, "nn.Module, got int"),
        (lambda: fully_shard([make(Mlp), 3]), TypeError, "got int"),
        (lambda: fully_shard(nn.ModuleList([make(Mlp)])), ValueError, "ModuleList has no forward"),
        (lambda: fully_shard(model), ValueError, "already"),
        (of(reshard_after_forward="yes"), TypeError, "got 'yes'"),
        (of(mesh=3), TypeError, "DeviceMesh, got int"),
        (of(mesh=Mesh3()), ValueError, "3 dimensions"),
        (of(mesh=MeshOnDevice()), missing, "'xpu'"),
        (of(mp_policy=3), TypeError, "mixed_precision"),
        (of(offload_policy=3), TypeError, "offload_policy"),
        (of(ignored_params=[3]), TypeError, "ignored_params"),
        (of(shard_placement_fn=len), missing, "shard_placement_fn"),
        (of(dp_mesh_dims=dims), missing, "mesh="),
        (lambda: model.set_reshard_after_forward(1), TypeError, "bool, got 1"),
        (lambda: replicated.set_reshard_after_forward(False), ValueError, "no_shard"),
        (lambda: model.set_gradient_divide_factor(0), ValueError, "positive"),
        (lambda: model.set_gradient_divide_factor(float("inf")), ValueError, "positive"),
        (lambda: model.set_gradient_divide_factor("2"), TypeError, "real number"),
        (lambda: model.set_modules_to_forward_prefetch([one]), TypeError, "got a Linear"),
        (lambda: model.set_modules_to_backward_prefetch(model), TypeError, "must be a list of sha"),
        (lambda: zshard.FlatParameter(torch.ones(2)), TypeError, "original parameters"),
        (lambda: setattr(unit, "strategy", "no_shard"), ValueError, "cannot change"),
    ]
    all_refused({f"{number}: {row[2]}": row for number, row in enumerate(rows)})


@on_ranks(2)
def test_divide_factor_of_a_replicated_unit_is_refused():
    model = FSDP(make(Mlp), strategy="no_shard")
    model.set_gradient_divide_factor(2.0)
    with pytest.raises(NotImplementedError, match="not sharded"):
        model.set_gradient_divide_factor(1.0)


# --- torch's own wrappers around zshard's model -------------------------------------------------------


@pytest.mark.parametrize(("strategy", "transport"), COMBINATIONS)
@on_ranks(2)
def test_torchs_wrappers_refuse_a_wrapped_model(strategy, transport):
    """They change nothing. Some fail at a shard: without shards, torch gets full parameters."""
    from torch.distributed._composable import replicate as ddps
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = FSDP(make(Stack), strategy=strategy, transport=transport)
    before, on_cpu = whole(model), {"device_id": torch.device("cpu")}
    shards = functools.partial(
        torchs.fully_shard, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),))
    )
    mesh, blocks = shards.keywords["mesh"], list(model.blocks)
    wraps = [lambda: shards(model)] * 2 + [lambda: replicate(model, mesh=mesh), lambda: ddps(model)]
    for wrap in (*wraps, lambda: shards(blocks)):
        text = message_of(wrap, TypeError)
        assert "() cannot wrap a model that zshard has wrapped" in text and "remove it" in text
    forward_backward(model, dist.get_rank())
    part, outer = next(blocks[0].children()), nn.Sequential(model)
    fsdp1 = functools.partial(torchs.FullyShardedDataParallel, **on_cpu)
    rest = [lambda: shards(part), lambda: shards(outer), lambda: fsdp1(model)]
    rest.append(lambda: fsdp1(outer, use_orig_params=True))
    for wrap in rest if strategy != "no_shard" else ():
        text = message_of(wrap, zshard.ShardError)
        assert "remove that call" in text and "Muon" not in text
    assert_same(whole(model), before, "the model")


@on_ranks(2)
def test_torchs_fully_shard_ignores_a_wrapped_model():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plain = nn.Sequential(nn.Linear(9, 9), make(Stack))
    outer = copy.deepcopy(plain)
    inner = FSDP(outer[1])
    torchs.fully_shard(outer, mesh=mesh, ignored_params=set(inner.parameters()))
    for each in (outer, plain):
        loss_of(each(floats(0))).backward()
    expected = {name: param.grad for name, param in plain[1].named_parameters()}
    assert_same(whole_grads(inner), expected, "the gradients")


# --- training -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_training_with_all_switches_is_bit_identical_to_ddp(transport):
    """Each step calls the methods as a script for accumulation would."""
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
    assert_same(model.state_dict(), plain.state_dict(), "the state")


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
    zshard.register_fsdp_forward_method(plain, "encode")  # not sharded: nothing happens
    assert "encode" not in vars(plain)
    with over(transport):
        model = fully_shard(copy.deepcopy(plain))
    zshard.register_fsdp_forward_method(model, "encode")
    for net in (plain, model):
        loss_of(net.encode(floats(0))).backward()
    ours = zshard.full_tensor(model.layer.weight.grad)
    assert_same(ours, plain.layer.weight.grad, "the gradient")


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
