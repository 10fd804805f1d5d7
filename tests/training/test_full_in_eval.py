"""FSDP1's FSDP_USE_FULL_PREC_IN_EVAL=1: a module in eval mode computes in full precision.

The one idea: the script runs under torch's FSDP1 as well, and every output, gradient and buffer has its
bits. What FSDP1 cannot do (a frozen encoder that gets bfloat16) is held against plain modules.

FSDP1 frees full-precision parameters in backward alone where they stay from forward to backward (the
outermost unit's, and with SHARD_GRAD_OP all), so its next evaluation has those of an earlier step. So it runs
with NO_SHARD, or with no parameters in the outermost unit.
"""

from __future__ import annotations

import contextlib
import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from compare import assert_same, differences
from models import COMBINATIONS, STRATEGIES, TRANSPORTS, loss_of, make
from scenarios import WIDTH, floats, message_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision

NAME = "FSDP_USE_FULL_PREC_IN_EVAL"
BF16, FP32 = torch.bfloat16, torch.float32


class Encoder(nn.Module):
    """With a batch norm, which keeps its dtype."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Units one after another, and parameters and a buffer of the outermost one."""

    def __init__(self):
        super().__init__()
        self.encoder, self.second = Encoder(), Encoder()
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.linspace(0.1, 1.7, WIDTH))
        self.seen = {}

    def forward(self, x):
        x = self.second(self.encoder(x)) * self.scale
        self.seen = {
            "x": x.dtype,
            "weight": self.head.weight.dtype,
            "scale": self.scale.dtype,
            "norm": self.encoder.norm.running_mean.dtype,
        }
        return self.head(x)


REFERENCES = {  # torch's strategy, and units that leave no stale parameters with it
    "no_shard": (torchs.ShardingStrategy.NO_SHARD, {Encoder}),
    "full_shard": (torchs.ShardingStrategy.FULL_SHARD, {Encoder, nn.Linear}),
}


@contextlib.contextmanager
def full_in_eval():
    os.environ[NAME] = "1"
    try:
        yield
    finally:
        del os.environ[NAME]


def precision(kind, **changes):
    values = {"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": BF16} | changes
    return kind(**values)


def ours(build=Net, combination=("full_shard", "shm"), units=frozenset({Encoder}), **changes):
    strategy, transport = combination
    with full_in_eval():
        return FSDP(
            make(build),
            strategy=strategy,
            transport=transport,
            auto_wrap_policy=units,
            mixed_precision=precision(MixedPrecision, **changes),
        )


def theirs(strategy, units, **changes):
    with full_in_eval():
        return torchs.FullyShardedDataParallel(
            make(Net),
            sharding_strategy=strategy,
            auto_wrap_policy=torchs.wrap.ModuleWrapPolicy(units),
            mixed_precision=precision(torchs.MixedPrecision, **changes),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )


def is_fsdp1(model):
    return isinstance(model, torchs.FullyShardedDataParallel)


def full_state(model):
    """The state dict, on all ranks; without the buffer, which FSDP1 saves in its earlier dtype."""
    full = contextlib.nullcontext()
    if is_fsdp1(model):
        kind = torchs.StateDictType.FULL_STATE_DICT
        full = torchs.FullyShardedDataParallel.state_dict_type(model, kind)
    with full:
        return {k: v.clone() for k, v in model.state_dict().items() if k != "scale"}


def script(model):
    """Training, evaluation between and within steps, backward in eval mode; all that comes out."""
    rank, found = dist.get_rank(), {}
    net = model.module if is_fsdp1(model) else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def forward(name, batch):
        output = model(floats(rank, batch))
        found[name] = output.detach().clone()
        found.update({f"{name}, {k}": torch.tensor(v.itemsize) for k, v in net.seen.items()})
        return output

    def evaluate(name):
        model.eval()
        with torch.no_grad():
            forward(name, 50)
        model.train()

    def step(name, batch, between=lambda name: None):
        optimizer.zero_grad()
        loss = loss_of(forward(name, batch))
        between(f"within {name}")
        loss.backward()
        optimizer.step()
        return loss

    evaluate("at first")
    step("step 1", 1)
    evaluate("after step 1")
    kept = step("step 2", 2, evaluate)  # its graph lives on, with the gradient nodes of bfloat16
    model.eval()
    step("in eval 1", 3)
    step("in eval 2", 4)
    model.train()
    del kept
    step("step 3", 5)
    evaluate("at last")
    return found | full_state(model)


def runs_as_fsdp1(reference, combinations=COMBINATIONS):
    strategy, units = REFERENCES[reference]
    expected = script(theirs(strategy, units))
    found = {c: differences(script(ours(combination=c, units=units)), expected) for c in combinations}
    return {c: names for c, names in found.items() if names}


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_output_gradient_and_buffer_is_fsdp1s(pool2, reference):
    assert pool2.run(runs_as_fsdp1, reference) == [{}, {}]
