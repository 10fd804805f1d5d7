"""What the engine answers under DeepSpeed's names; any other name is an AttributeError.

What a script asks is answered from the config that the script itself wrote; compile() compiles the
model and not the engine's own counting.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import batch, config, engine_of, model, train
from models import TRANSPORTS
from scenarios import message_of
from spawn import RankPool, ranks


def answers() -> Any:
    given = config(
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, gradient_clipping=0.5
    )
    engine = engine_of(given)
    assert engine.train_batch_size() == 8 and engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 1 and engine.gradient_clipping() == 0.5
    assert engine.zero_optimization_stage() == 3 and engine.loss_scale() == 0.0
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.global_rank == dist.get_rank() and engine.dp_world_size == 2
    assert engine.training_dataloader is None and engine.lr_scheduler is not None
    half = engine_of(config(bf16={"enabled": True}))
    return half.bfloat16_enabled() and not half.fp16_enabled()


@ranks(2)
def test_answers(pool: RankPool) -> None:
    assert pool.run(answers) == [True, True]


@pytest.fixture
def alone(group_ends: None) -> Any:
    """An engine of one process, which needs no launcher."""
    return engine_of()


@pytest.mark.parametrize("name", ["scheduler_name", "destroy", "_private"])
def test_a_name_that_it_lacks_points_to_the_page_that_lists_those_it_has(
    alone: Any, name: str
) -> None:
    assert not hasattr(alone, name)
    text = message_of(lambda: getattr(alone, name), AttributeError)
    assert repr(name) in text and "docs/deepspeed.md" in text


@pytest.mark.usefixtures("group_ends")
def test_a_models_own_attribute_comes_first() -> None:
    module = model()
    module.losses = [3]
    assert engine_of(model=module).losses == [3]


# --- compile ------------------------------------------------------------------------------------------


def compiled(transport: str, stage: int, backend: str) -> Any:
    steps = 2
    given = config(gradient_accumulation_steps=steps, zero_optimization={"stage": stage})
    plain, engine = engine_of(given, transport), engine_of(given, transport)
    engine.compile(backend=backend, dynamic=False)
    assert engine.module._compiled_call_impl is not None and engine._compiled_call_impl is None
    found = [train(each, 5) for each in (plain, engine)]
    engine.eval()
    with torch.no_grad():
        engine(batch(0)[0])
    assert (engine.global_steps, engine.micro_steps) == (5 // steps, 5)
    assert list(engine.module.state_dict()) == list(plain.module.state_dict())
    torch.testing.assert_close(*found)
    return found[0] == found[1]


@ranks(2)
@pytest.mark.parametrize(("stage", "backend"), [(3, "eager"), (2, "aot_eager"), (0, "eager")])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_compile_compiles_the_model(
    pool: RankPool, transport: str, stage: int, backend: str
) -> None:
    assert pool.run(compiled, transport, stage, backend) == [True, True]
