"""Functions from published DeepSpeed scripts that save weights: full ones, at all stages.

They check a parameter for `ds_id`, and gather it if it has one. They return the plain model's
weights; a shard cannot be written.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from compare import assert_same
from engines import config, engine_of, model
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import Tensor, nn

import zshard
from zshard import zero

STAGES = (0, 1, 2, 3)


def of_llava(named: Any) -> dict[str, Tensor]:
    """maybe_zero_3() of LLaVA, FastChat and Qwen."""

    def maybe_zero_3(param: Any) -> Tensor:
        if hasattr(param, "ds_id"):
            assert param.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
            with zero.GatheredParameters([param]):
                assert param.ds_status == zero.ZeroParamStatus.AVAILABLE
                found: Tensor = param.data.detach().cpu().clone()
            return found
        plain: Tensor = param.detach().cpu().clone()
        return plain

    return {name: maybe_zero_3(param) for name, param in named}


def of_deepspeed_chat(named: Any) -> dict[str, Tensor]:
    """save_zero_three_model() of DeepSpeed-Chat, with a clone() for ranks on CPUs."""
    found = {}
    for name, param in named:
        if hasattr(param, "ds_id"):
            fetched = [p for p in [param] if p.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE]
            with zero.GatheredParameters(fetched, enabled=True):
                found[name] = param.data.cpu().clone()
        else:
            found[name] = param.cpu()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("save", [of_llava, of_deepspeed_chat])
@on_ranks(2)
def test_published_functions_save_full_weights(save, stage, transport):
    module = engine_of(config(zero_optimization={"stage": stage}), transport=transport).module
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    for _ in range(2):
        file = io.BytesIO()
        torch.save(save(module.named_parameters()), file)
        file.seek(0)
        assert_same(torch.load(file), expected, "the file")
    copied = copy.deepcopy(module)  # such as an average of weights
    assert_same(save(copied.named_parameters()), expected, "the copy")
    params, plain = list(module.parameters()), list(model().parameters())
    assert [getattr(p, "ds_numel", p.numel()) for p in params] == [p.numel() for p in plain]
    assert [tuple(getattr(p, "ds_shape", p.shape)) for p in params] == [p.shape for p in plain]
    ids = [p.ds_id for p in params if hasattr(p, "ds_id")]
    assert len(set(ids)) == len(ids) == (len(plain) if stage else 0)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_uncopied_gathered_values_are_an_error(transport):
    """On a GPU .cpu() copies; here it is the parameter's memory, which is freed on resharding."""
    engine = engine_of(transport=transport)
    weight = engine.module.first.weight
    with zero.GatheredParameters([weight]):
        kept = weight.data.cpu()
    text = message_of(lambda: torch.save(kept, io.BytesIO()), RuntimeError)
    assert "unit 'first' are sharded" in text and "clone() what you keep" in text


# --- functions that would write a shard -----------------------------------------------------------


def to_safetensors(tensor: Tensor) -> None:
    pytest.importorskip("safetensors").torch.save({"weight": tensor})


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "pickle": pickle.dumps,
    "torch.save": lambda tensor: torch.save({"weight": tensor}, io.BytesIO()),
    "another process": ForkingPickler.dumps,
    "safetensors": to_safetensors,
}
SHARDS: dict[str, Callable[[nn.Parameter], Any]] = {
    "parameter": lambda param: param,
    "detach()": lambda param: param.detach().cpu().clone(),
    ".data": lambda param: param.data,
    ".grad": lambda param: param.grad,
    "computed": lambda param: param.detach().bfloat16() * 2,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1"])
@on_ranks(2)
def test_shards_are_not_written(strategy, transport):
    sharded: Any = zshard.FSDP(model(), strategy=strategy, transport=transport)
    sharded(torch.ones(2, 7)).sum().backward()
    param = sharded.first.weight
    with all_rows() as row:
        for (how, write), (what, of) in itertools.product(WRITERS.items(), SHARDS.items()):
            with row(what, "by", how):
                text = message_of(lambda write=write, of=of: write(of(param)), zshard.ShardError)
                assert "shard of 'first.weight'" in text and "model.state_dict()" in text
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1, momentum=0.9)
    optimizer.step()
    with pytest.raises(zshard.ShardError, match=r"shard of 'first.weight'"):
        torch.save(optimizer, io.BytesIO())
    for each in (zshard.to_local(param), zshard.full_tensor(param), sharded.state_dict()):
        pickle.dumps(each)
    with zshard.FSDP.summon_full_params(sharded):
        assert pickle.loads(pickle.dumps(param)).shape == (13, 7)
    copy.deepcopy((param, param.grad, sharded, optimizer))
    pickle.dumps(model())
