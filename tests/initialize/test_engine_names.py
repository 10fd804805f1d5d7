"""What the engine answers under DeepSpeed's names; any other name is an AttributeError.

What a script asks is answered from the config that the script itself wrote; compile()
and destroy() act on the model and not on the engine's own counting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import LR, batch, config, engine_of, loss_of, model, train
from models import TRANSPORTS
from scenarios import message_of
from spawn import RankPool, ranks

import zshard


def answers() -> Any:
    given = config(
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        torch_autocast={"enabled": True},
        wall_clock_breakdown=False,
    )
    engine = engine_of(given)
    params = engine.optimizer_params()
    assert (engine.optimizer_name(), params["lr"]) == ("AdamW", LR)
    assert engine.scheduler_name() == "WarmupLR"
    assert engine.scheduler_params() == {"warmup_num_steps": 5}
    assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.bfloat16
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert engine.is_map_style_dataset([1]) and not engine.is_map_style_dataset(3)
    assert not engine.is_iterable_style_dataset([1])
    assert (
        engine.get_batch_info()
        == (8, 4, 1)
        == (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
    )
    assert engine.gradient_clipping() == 0.0 and engine.steps_per_print() is None
    assert not engine.dynamic_loss_scale() and engine.loss_scale() == 0.0
    assert not engine.dataloader_drop_last() and not engine.wall_clock_breakdown()
    assert engine.zero_optimization() and engine.zero_optimization_partition_weights()
    assert engine.zero_optimization_partition_gradients() and not engine.fp16_enabled()
    assert engine.get_data_parallel_rank() == dist.get_rank() and engine.dp_world_size == 2
    assert engine.training_dataloader is None and engine.lr_scheduler is not None
    plain = engine_of(config(optimizer=None), model=model())
    assert plain.optimizer_name() is plain.optimizer_params() is plain.scheduler_params() is None
    assert not plain.torch_autocast_enabled() and plain.torch_autocast_dtype() is None
    own = engine_of(config(optimizer=None), optimizer=lambda ps: zshard.SGD(ps, lr=LR))
    assert own.optimizer_name() == "SGD"
    half = engine_of(config(bf16={"enabled": True}))
    return half.get_data_types() == (torch.bfloat16, torch.float32) and half.bfloat16_enabled()


@ranks(2)
def test_answers(pool: RankPool) -> None:
    assert pool.run(answers) == [True, True]


def state_dicts(folder: str) -> Any:
    engine, other = engine_of(), engine_of(config(zero_optimization={"stage": 1}))
    train(engine, 2)
    checkpoint = {"module": engine.module_state_dict()}
    other.load_module_state_dict(checkpoint, fetch_z3_params=True)
    assert other.load_module_state_dict(checkpoint["module"]).missing_keys == []
    assert "custom_load_fn" in message_of(
        lambda: other.load_module_state_dict(checkpoint, custom_load_fn=len), NotImplementedError
    )
    assert engine.save_fp16_model(folder, "old.bin")
    saved = torch.load(f"{folder}/old.bin", weights_only=True)
    found = other.module_state_dict()
    return all(
        bool((found[name] == value).all() and (saved[name] == value).all())
        for name, value in checkpoint["module"].items()
    )


@ranks(2)
def test_state_dicts_go_through_older_names(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(state_dicts, str(tmp_path)) == [True, True]


@pytest.fixture
def alone(group_ends: None) -> Any:
    """An engine of one process, which needs no launcher."""
    return engine_of()


@pytest.mark.parametrize("name", ["aio_config", "flops_profiler", "_private"])
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
    assert not engine.is_compiled
    for each in (
        lambda: engine.compile(schedule=[(0, [])]),
        lambda: engine.compile(compiled_autograd_enabled=True),
    ):
        assert "leave it out" in message_of(each, NotImplementedError)
    message_of(lambda: engine.compile(compile_kwargs={"colour": 1}), TypeError)
    assert not engine.is_compiled, "a call that raises compiles nothing"
    engine.compile(backend=backend, compile_kwargs={"dynamic": False, "backend": "ignored"})
    engine.compile(backend="unknown")  # does nothing
    assert engine.is_compiled and engine._compiled_call_impl is None
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


# --- destroy ------------------------------------------------------------------------------------------


def destroyed(transport: str, stage: int, folder: str) -> Any:
    given = config(gradient_accumulation_steps=2, zero_optimization={"stage": stage})
    engine = engine_of(given, transport)
    train(engine, 3)  # in the middle of a round
    inputs, targets = batch(0)
    loss = loss_of(engine(inputs), targets)
    before = engine.module_state_dict()
    for _ in range(2):
        engine.destroy()
    assert engine.optimizer is engine.lr_scheduler is engine.training_dataloader is None
    assert all(param.grad is None for param in engine.parameters())
    for call in (
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine(inputs),
        engine.compile,
        lambda: engine.save_checkpoint(folder),
        lambda: engine.load_checkpoint(folder),
    ):
        assert "after engine.destroy(): use engine.module" in message_of(call, RuntimeError)
    after = engine.module_state_dict()
    assert all(bool((after[name] == value).all()) for name, value in before.items())
    engine.eval()
    with torch.no_grad():
        assert engine(inputs).shape == targets.shape
    return train(engine_of(given, transport), 3)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_destroy_ends_the_engine_and_not_the_model(
    pool: RankPool, transport: str, stage: int, tmp_path: Path
) -> None:
    one, other = pool.run(destroyed, transport, stage, str(tmp_path))
    assert len(one) == len(other) == 3
