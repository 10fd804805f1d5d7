"""DistributedDataParallel by name: its arguments, attributes and methods, and its numbers.

join() is in tests/model/test_join.py.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, TRANSPORTS, Mlp, make, train
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, DistributedDataParallel

TORCHS = nn.parallel.DistributedDataParallel

# Arguments that scripts pass; each is valid for any model here.
SPELLINGS = [
    {},
    {"device_ids": [], "output_device": None, "find_unused_parameters": True},
    {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    {"broadcast_buffers": False, "skip_all_reduce_unused_params": True},
    {"lazy_bucket_allocation": True, "init_sync": True, "check_reduction": False},
    {"batched_grad_copy": True, "bucket_cap_mb_list": [1, 2]},
]


def test_arguments_match_ddp():
    theirs = [p for p in inspect.signature(TORCHS.__init__).parameters.values()][1:]
    ours = inspect.signature(DistributedDataParallel.__new__).parameters
    assert list(ours)[1 : len(theirs) + 1] == [p.name for p in theirs]  # newer ones follow
    assert {p.name: ours[p.name].default for p in theirs} == {p.name: p.default for p in theirs}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(9, 9), nn.BatchNorm1d(9), nn.Linear(9, 9)

    def forward(self, x):
        return self.two(self.norm(self.one(x)))


def trained(model, parallel, case):
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    losses = train(parallel, case, optimizer, dist.get_rank())
    return {**model.state_dict(), "losses": losses}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("options", SPELLINGS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "frozen", "tied"])
@on_ranks(2)
def test_training_is_bit_identical_to_ddp(name, options, transport, strategy):
    case = CASES[name]
    model = make(case.make, seed=dist.get_rank())  # rank 0's values count
    known = inspect.signature(TORCHS.__init__).parameters  # torch's newest names, in an older one
    unused = {"find_unused_parameters": True} if case.unused else {}
    shared = {key: value for key, value in {**options, **unused}.items() if key in known}
    theirs = TORCHS(make(case.make, seed=0), **shared)
    ours = DistributedDataParallel(model, **options, strategy=strategy, transport=transport)
    assert ours is model and isinstance(ours, DistributedDataParallel)
    assert type(model.module) is type(theirs.module)
    expected = trained(theirs.module, theirs, case)
    assert_same(trained(model, ours, case), expected, "the training")


@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}], ids=str)
@on_ranks(2)
def test_buffers_are_broadcast_as_in_ddp(options):
    rank = dist.get_rank()
    models = [cls(make(Normed), **options) for cls in (TORCHS, DistributedDataParallel)]
    for model in models:
        for step in range(2):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * rank + step))
            model(x).sum().backward()
    theirs, ours = (dict(model.module.named_buffers()) for model in models)
    assert_same(ours, theirs, "the buffers")


@on_ranks(2)
def test_different_values_without_init_sync_are_an_error():
    with pytest.raises(zshard.DivergenceError, match=r"values|differ"):
        DistributedDataParallel(make(Mlp, seed=dist.get_rank()), init_sync=False)


def test_attributes_match_ddp():
    model = DistributedDataParallel(make(Mlp))
    assert model.device_ids is None and model.device == torch.device("cpu")
    assert model.require_backward_grad_sync
    with model.no_sync():
        assert not model.require_backward_grad_sync
    assert isinstance(FSDP(make(Mlp)), DistributedDataParallel)
    assert not any(isinstance(other, DistributedDataParallel) for other in (make(Mlp), 3))


def test_mistakes_are_named():
    mistakes = {
        "dim=1": ({"dim": 1}, NotImplementedError),
        "output_device=1": ({"output_device": 1}, NotImplementedError),
        "not both": ({"broadcast_buffers": True, "forward_sync_buffers": True}, ValueError),
        "zshard.MixedPrecision": ({"mixed_precision": 3}, NotImplementedError),
        "param_to_hook_all_reduce": ({"param_to_hook_all_reduce": 1}, NotImplementedError),
        "delay_all_reduce_named_params": (
            {"delay_all_reduce_named_params": []},
            NotImplementedError,
        ),
        "one GPU": ({"device_ids": [0, 1]}, ValueError),
        "colour": ({"colour": 1}, TypeError),
        "nn.Module": ({"module": 3}, TypeError),
        "already": ({"module": DistributedDataParallel(make(Mlp))}, ValueError),
    }
    with all_rows() as row:
        for text, (options, kind) in mistakes.items():
            options = {"module": make(Mlp), **options}
            with row(text):
                assert text in message_of(lambda o=options: DistributedDataParallel(**o), kind)
        with row("ignored parameters"):
            model = make(Mlp)
            TORCHS._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
            with pytest.raises(NotImplementedError, match="ignored_states"):
                DistributedDataParallel(model)
