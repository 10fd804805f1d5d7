"""FSDP1's functions and attributes by name: state dict types, optimizer state, queries about units.

Arguments of FSDP() are in tests/wrap/test_api.py, scripts in test_fsdp1_scripts.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from compare import assert_same
from models import TRANSPORTS, Mlp, make
from rows import all_refused, all_rows
from scenarios import Stack, floats, loss_of, message_of
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import zshard
from zshard import FSDP, DistributedDataParallel, fully_shard

FULL, SHARDED = zshard.StateDictType.FULL_STATE_DICT, zshard.StateDictType.SHARDED_STATE_DICT


# --- state dict types -------------------------------------------------------------------------------


def test_state_dict_type_stays_until_the_next_call():
    model = FSDP(make(Stack), auto_wrap_policy={nn.Linear})
    before = FSDP.get_state_dict_type(model)
    assert before.state_dict_type == FULL == torchs.StateDictType.FULL_STATE_DICT
    assert not before.state_dict_config.rank0_only
    assert before.state_dict_config.offload_to_cpu is False
    config = zshard.ShardedStateDictConfig(offload_to_cpu=True)
    assert FSDP.set_state_dict_type(model, SHARDED, config) == before
    now = FSDP.get_state_dict_type(model)
    assert now.state_dict_type == SHARDED and now.state_dict_config is config
    with FSDP.state_dict_type(model, FULL):
        assert FSDP.get_state_dict_type(model) == before
    assert FSDP.get_state_dict_type(model) == now
    configs = before.state_dict_config, before.optim_state_dict_config
    FSDP.set_state_dict_type(model, before.state_dict_type, *configs)
    assert FSDP.get_state_dict_type(model) == before


def test_torch_types_and_configs_are_returned_as_passed():
    model = FSDP(make(Mlp))
    kind = torchs.StateDictType.SHARDED_STATE_DICT
    config = torchs.ShardedOptimStateDictConfig(offload_to_cpu=False)
    FSDP.set_state_dict_type(model, kind, optim_state_dict_config=config)
    now = FSDP.get_state_dict_type(model)
    assert now.state_dict_type is kind and now.optim_state_dict_config is config
    for one, other in ((kind, SHARDED), (SHARDED, kind)):  # each names another class
        assert one == other
    assert kind != FULL
    assert hash(kind) == hash(SHARDED) and {SHARDED: 1}[kind] == 1


def test_invalid_types_are_named_and_change_nothing():
    model = FSDP(make(Stack), auto_wrap_policy={nn.Linear})
    change = functools.partial(FSDP.set_state_dict_type, model)
    wrong, full = zshard.ShardedStateDictConfig(), zshard.FullStateDictConfig()
    rows = {
        "a config": (lambda: change(FULL, wrong), TypeError, "FullStateDictConfig"),
        "of optimizers": (lambda: change(FULL, None, full), TypeError, "optim_state_dict_config"),
        "a type": (lambda: change("half"), ValueError, "state_dict_type must be one of"),
    }
    all_refused(rows)
    assert FSDP.get_state_dict_type(model).state_dict_type == FULL
    FSDP.set_state_dict_type(FSDP.fsdp_modules(model)[1], SHARDED)
    text = message_of(lambda: FSDP.get_state_dict_type(model), RuntimeError)
    assert "has another state dict type" in text and "set_state_dict_type() on the root" in text
    assert FSDP.get_state_dict_type(nn.Linear(1, 1)).state_dict_type == FULL  # without units


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_set_type_determines_the_state_dicts(transport):
    model = FSDP(make(Stack), transport=transport)
    full = model.state_dict()
    FSDP.set_state_dict_type(model, FULL, zshard.FullStateDictConfig(rank0_only=True))
    alone = model.state_dict()
    assert len(alone) == (len(full) if dist.get_rank() == 0 else 0)
    FSDP.set_state_dict_type(model, SHARDED)
    assert_same(model.state_dict(), full, "the state")


# --- missing names --------------------------------------------------------------------------------------


ROWS = (Path(__file__).resolve().parents[2] / "docs" / "torch_names.md").read_text()
MISSING = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", ROWS, re.MULTILINE)))


def test_missing_torch_names_point_to_the_docs():
    models = [wrap(make(Mlp)) for wrap in (FSDP, DistributedDataParallel, fully_shard)]
    with all_rows() as row:
        for name, model in itertools.product(MISSING, models):
            with row(name, type(model).__name__):
                assert not hasattr(model, name)
                with pytest.raises(AttributeError, match=r"docs/torch_names\.md") as caught:
                    getattr(model, name)
                assert repr(name) in str(caught.value)


def test_page_has_every_public_name_that_only_torch_has():
    model = FSDP(make(Mlp))
    classes = (torchs.FullyShardedDataParallel, torchs.FSDPModule)
    for cls in (*classes, nn.parallel.DistributedDataParallel):
        public = [name for name in dir(cls) if not name.startswith("_")]
        assert {name for name in public if not hasattr(model, name)} <= set(MISSING)


@pytest.mark.parametrize("dtype", ["param_dtype", "reduce_dtype"])
def test_full_precision_in_eval_mode_is_refused(monkeypatch, dtype):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    precision = torchs.MixedPrecision(**{dtype: torch.bfloat16})
    with pytest.raises(
        NotImplementedError, match=r"unset it.*model.state_dict\(\)|model.state_dict\(\).*unset it"
    ):
        FSDP(make(Mlp), mixed_precision=precision)
    FSDP(make(Mlp))  # nothing is rounded: the variable has no effect


# --- attributes -----------------------------------------------------------------------------------------


class Owner(nn.Module):
    """A module that defines some of the names itself: as an attribute, a property, a child, a
    parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.rank = 8
        self.reducer = nn.Linear(3, 3)
        self.dim = nn.Parameter(torch.ones(3))
        self.register_buffer("logger", torch.zeros(2))

    @property
    def world_size(self):
        return "mine"

    def forward(self, x):
        return self.reducer(x) * self.dim


def test_module_keeps_its_own_names():
    model = FSDP(Owner())
    assert model.rank == 8 and model.world_size == "mine" and model.logger.shape == (2,)
    assert isinstance(model.reducer, nn.Linear) and isinstance(model.dim, nn.Parameter)
    model.rank = 3
    assert model.rank == 3 and model.module.rank == 3
    assert "no_such_name" in message_of(lambda: model.no_such_name, AttributeError)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_attributes(name, transport):
    strategy = zshard.ShardingStrategy[name]
    options = {"sharding_strategy": strategy, "transport": transport}
    model = FSDP(make(Stack), auto_wrap_policy={nn.Linear}, **options)
    unit = FSDP.fsdp_modules(model)[1]
    for each in (model, unit):
        assert each.sharding_strategy == strategy == torchs.ShardingStrategy[name]
        assert (each.rank, each.world_size) == (dist.get_rank(), 2)
        assert dist.get_world_size(each.process_group) == 2
    if strategy is zshard.ShardingStrategy.FULL_SHARD:
        model.set_reshard_after_forward(False)
        assert unit.sharding_strategy is zshard.ShardingStrategy.SHARD_GRAD_OP


def test_attributes_without_options():
    model = FSDP(make(Mlp))
    assert (model.rank, model.world_size, model.process_group) == (0, 1, None)


# --- units with process groups of their own -------------------------------------------------------------


class Experts(nn.Module):
    """Each rank has its own expert, between layers that all ranks share."""

    def __init__(self):
        super().__init__()
        self.first, self.expert, self.last = (nn.Linear(9, 9) for _ in range(3))

    def forward(self, x):
        return self.last(self.expert(torch.tanh(self.first(x))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_experts_per_rank_in_a_shared_model(transport, strategy):
    """As a plain model whose gradients are averaged by hand, except the expert's."""
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    plain, model = make(Experts), make(Experts)
    for each in (plain, model):
        with torch.no_grad():
            each.expert.weight.mul_(rank + 1)
    model.expert = FSDP(model.expert, process_group=alone, transport=transport, strategy=strategy)
    model = FSDP(model, transport=transport, strategy=strategy, auto_wrap_policy=None)
    assert model.expert.process_group is alone and model.expert.world_size == 1
    assert model.world_size == 2
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            if step == 1:
                with model.no_sync():
                    loss_of(each(floats(rank, 10))).backward()
            loss_of(each(floats(rank, step))).backward()
            if each is plain:
                for name, param in each.named_parameters():
                    if "expert" not in name:
                        dist.all_reduce(param.grad)
                        param.grad.div_(2)
            optimizer.step()
    with FSDP.summon_full_params(model, writeback=False):
        parameters = dict(model.named_parameters())
        assert_same(parameters, dict(plain.named_parameters()), "the parameters")
    optimizers[1].zero_grad()
    loss_of(model(floats(rank))).backward()
    clip, group = torch.nn.utils.clip_grad_norm_, (NotImplementedError, "process group")
    calls = {
        "clip": lambda: model.clip_grad_norm_(1.0),
        "torch's clip": lambda: clip(model.parameters(), 1e-9),
        "copy": lambda: copy.deepcopy(model),
    }
    all_refused({name: (call, *group) for name, call in calls.items()})
    model.expert.clip_grad_norm_(1e-3)
    clip([param for name, param in model.named_parameters() if "expert" not in name], 1e-3)
    assert_same(model.state_dict(), plain.state_dict(), "the state")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_experts_shared_by_pairs_of_ranks(transport):
    """Two ranks share each of two experts; gloo sums four ranks in another order."""
    rank = dist.get_rank()
    pairs = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    plain, model = make(Experts), make(Experts)
    for each in (plain, model):
        with torch.no_grad():
            each.expert.weight.mul_(rank // 2 + 1)
    model.expert = FSDP(model.expert, process_group=pairs[rank // 2], transport=transport)
    model = FSDP(model, transport=transport, auto_wrap_policy=None)
    assert (model.expert.rank, model.expert.world_size, model.world_size) == (rank % 2, 2, 4)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(each(floats(rank, step))).backward()
            for name, param in each.named_parameters() if each is plain else ():
                group, ranks = (pairs[rank // 2], 2) if "expert" in name else (None, 4)
                dist.all_reduce(param.grad, group=group)
                param.grad.div_(ranks)
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    with pytest.raises(ValueError, match="different ranks"):
        zshard.save("/nowhere", model)


# --- mixed precision ------------------------------------------------------------------------------------


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x, extra):
        self.seen += [x.dtype, extra.dtype]
        return self.inner(x) + extra.to(x.dtype)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unit = nn.Linear(4, 4), Seen()

    def forward(self, x):
        return self.unit(self.first(x), torch.ones(4))  # created inside: not cast yet


@pytest.mark.parametrize(("casts", "expected"), [(False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("by_hand", [True, False])
def test_inner_units_cast_arguments_only_on_request(by_hand, casts, expected):
    precision = zshard.MixedPrecision(torch.bfloat16, cast_forward_inputs=casts)
    model = make(Outer)
    if by_hand:
        model.unit = FSDP(model.unit, mixed_precision=precision, auto_wrap_policy=None)
        seen = model.unit.seen
        model.unit(torch.ones(4), torch.ones(4))  # so far it is the root, which casts
        assert seen == [torch.bfloat16] * 2
        seen.clear()
    model = FSDP(model, mixed_precision=precision, auto_wrap_policy=None if by_hand else {Seen})
    model(torch.ones(2, 4)).sum().backward()
    assert model.unit.seen == [torch.bfloat16, expected]


# --- the gradient scaler ----------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_sharded_grad_scaler(transport):
    """One rank has an infinite loss in the second step, which all ranks skip; the scale equals
    FSDP1's."""
    rank, runs = dist.get_rank(), []
    scalers = [
        zshard.ShardedGradScaler("cpu", 1024.0, 0.25, 4.0, 1),
        zshard.GradScaler("cpu", 1024.0, 4.0, 0.25, 1),
    ]
    for scaler in scalers:
        model = FSDP(make(Stack), transport=transport)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model(floats(rank, step)))
            scaler.scale(loss * float("inf") if step == 1 and rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024.0 * 4 * 0.25 * 4
        runs.append(model.state_dict())
    assert_same(*runs, "the state")
    torchs_own = ShardedGradScaler("cpu")
    torchs_own.scale(loss_of(model(floats(rank)))).backward()
    with pytest.raises(zshard.ShardError, match="ShardedGradScaler from zshard"):
        torchs_own.step(optimizer)


def test_sharded_grad_scaler_has_torchs_arguments():
    ours, theirs = (
        dict(inspect.signature(kind.__init__).parameters)
        for kind in (zshard.ShardedGradScaler, ShardedGradScaler)
    )
    assert list(ours) == list(theirs)
    ours.pop("process_group")
    assert {name: theirs[name].default for name in ours} == {n: p.default for n, p in ours.items()}
