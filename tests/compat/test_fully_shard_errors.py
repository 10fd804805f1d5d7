"""fully_shard(): what it takes, what it refuses with which words, and the signatures of its methods."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed.fsdp as torchs
from models import Mlp, differences, make
from scenarios import Stack, forward_backward, message_of, stack, units_of
from torch import nn

import zshard
from zshard import FSDP, fully_shard


def test_a_world_of_one():
    model = stack()
    expected, ours = make(Stack), model
    assert ours.unshard() is None and model.blocks[0].unshard(async_op=True).wait() is None
    for net in (expected, ours):
        forward_backward(net, 0)
        torch.optim.SGD(net.parameters(), lr=0.1).step()  # held or not: it is whole anyway
    ours.reshard()
    assert differences(ours.state_dict(), expected.state_dict()) == []
    ours.set_gradient_divide_factor(1.0)
    with pytest.raises(NotImplementedError, match="scale the loss"):
        ours.set_gradient_divide_factor(2.0)


def ignoring():
    model = make(Mlp)
    alone = model.first.weight
    fully_shard(model, ignored_params={alone})
    assert model.third.weight.shape != (3, 29)
    return tuple(alone.shape)


def test_ignored_params_are_left_alone(pool2):
    assert pool2.run(ignoring) == [(13, 7)] * 2


def test_policies_that_ask_for_nothing_new_pass():
    for casts in (None, zshard.MixedPrecisionPolicy(), torchs.MixedPrecisionPolicy()):
        for offload in (None, zshard.OffloadPolicy(), torchs.CPUOffloadPolicy()):
            fully_shard(make(Mlp), mp_policy=casts, offload_policy=offload)


LATER = [
    ({"shard_placement_fn": lambda param: None}, "shard_placement_fn"),
]


@pytest.mark.parametrize(("options", "match"), LATER, ids=[match for _, match in LATER])
def test_what_is_still_to_come_is_named(options, match):
    model = make(Mlp)
    with pytest.raises(NotImplementedError, match=match):
        fully_shard(model, **options)
    assert type(model) is Mlp


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
    (lambda: stack().set_modules_to_forward_prefetch([nn.Linear(1, 1)]), TypeError, "Linear is not"),
    (lambda: stack().set_modules_to_backward_prefetch(stack()), TypeError, "got one module"),
    (lambda: setattr(units_of(stack())[0], "strategy", "no_shard"), ValueError, "cannot change"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "kind", "match"), MISTAKES, ids=[m for *_, m in MISTAKES])
def test_mistakes_are_named(action, kind, match):
    with pytest.raises(kind, match=match):
        action()


def factor_of_replicated_units():
    model = FSDP(make(Mlp), strategy="no_shard")
    model.set_gradient_divide_factor(2.0)
    return message_of(lambda: model.set_gradient_divide_factor(1.0), NotImplementedError)


def test_the_factor_of_a_replicated_unit_is_refused(pool2):
    for message in pool2.run(factor_of_replicated_units):
        assert "not sharded" in message


def test_torchs_methods_are_there_with_their_arguments():
    """Those that this version has take what torch's take."""
    for name in (
        *("unshard", "reshard", "set_requires_gradient_sync", "set_reshard_after_forward"),
        *("set_is_last_backward", "set_gradient_divide_factor"),
        *("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
    ):
        ours = list(inspect.signature(getattr(FSDP, name)).parameters)[:2]
        theirs = list(inspect.signature(getattr(torchs.FSDPModule, name)).parameters)[:2]
        assert ours[:1] == theirs[:1] == ["self"] and len(ours) == len(theirs), name
