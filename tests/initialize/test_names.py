"""`import zshard as deepspeed`: the names that scripts call, and the engine's answers to them.

Queries return values from the script's own config; compile() compiles the model, not the engine's
own counting.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from engines import LR, batch, config, engine_of, loss_of, model, train
from models import TRANSPORTS, Mlp
from own_names import refuse
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import deepspeed
from zshard._removed import ELSEWHERE

UNKNOWN = ("xyzzy", "PipelineModule", "init_inference")


def test_names_are_imported_lazily() -> None:
    code = (
        "import sys, zshard\n"
        "assert 'zshard.deepspeed' not in sys.modules, 'imported with zshard'\n"
        "assert zshard.initialize is zshard.deepspeed.initialize\n"
        "assert not hasattr(zshard, 'xyzzy')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in deepspeed.__all__:
        assert getattr(zshard, name) is getattr(deepspeed, name)


def test_unknown_names_point_to_the_docs_or_a_replacement() -> None:
    unknown = {name: f"no attribute '{name}': docs/deepspeed.md lists" for name in UNKNOWN}
    instead = {name: f"zshard has no '{name}': use {text}" for name, text in ELSEWHERE.items()}
    with all_rows() as row:
        for name, text in {**unknown, **instead}.items():
            with row(name):
                assert text in message_of(
                    lambda name=name: getattr(deepspeed, name), AttributeError
                )
        for name, text in instead.items():
            with row(name, "of zshard"):
                assert message_of(lambda name=name: getattr(zshard, name), AttributeError) == text


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The file of a config."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config(steps_per_print=2)))
    return str(file)


@on_ranks(2)
def test_script_with_arguments_groups_and_a_scheduler_trains(path):
    """With args, as in DeepSpeed's tutorials."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = zshard.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
    zshard.init_distributed()
    zshard.init_distributed(dist_backend="gloo", verbose=False)
    module = model()
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    engine, optimizer, loader, scheduler = zshard.initialize(
        args=args,
        model=module,
        model_parameters=[{"params": decayed, "weight_decay": 0.1}, {"params": others}],
        training_data=torch.utils.data.TensorDataset(torch.randn(24, 7), torch.randn(24, 3)),
        lr_scheduler=lambda each: torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5),
    )
    for inputs, targets in loader:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
    assert engine.module is module and engine.optimizer is optimizer and len(loader) == 3
    assert isinstance(engine, nn.Module) and engine.first is module.first, "the model's attributes"
    assert len({*map(id, engine.parameters())}) == 5
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert args.local_rank == engine.local_rank == engine.global_rank == dist.get_rank()
    assert (engine.device.type, engine.world_size, engine.global_steps) == ("cpu", 2, 3)
    assert engine.get_mom() == [(0.9, 0.999)] * 2
    assert scheduler.get_last_lr() == engine.get_lr() == [LR / 8] * 2


@on_ranks(2)
def test_three_ways_to_pass_an_optimizer():
    """An instance, a function, and an optimizer whose gradients have another loss scale."""
    losses = []
    for kind in ("config", "instance", "function"):
        module = model()
        adamw = functools.partial(zshard.AdamW, lr=LR, weight_decay=0.0)
        optimizer = {"config": None, "instance": adamw(module.parameters()), "function": adamw}[
            kind
        ]
        losses.append(train(engine_of(model=module, optimizer=optimizer), 4))
    half = engine_of(config(fp16={"enabled": True, "initial_scale_power": 4}))
    train(half, 1)
    assert half.optimizer.cur_scale == half.cur_scale == 16.0 and not half.optimizer.overflow
    assert losses[0] == losses[1] == losses[2]


@on_ranks(2)
def test_cast_model_gets_float32_copies():
    """A script casts the model itself, as DeepSpeed's do."""
    engine = engine_of(config(bf16={"enabled": True}), model=model().bfloat16())
    for step in range(3):
        inputs, targets = batch(step)
        engine.backward(loss_of(engine(inputs.bfloat16()), targets))
        engine.step()
    assert {p.dtype for p in engine.parameters()} == {torch.float32}


@on_ranks(2)
def test_autocast_surrounds_the_forward():
    engine = engine_of(config(torch_autocast={"enabled": True}))
    inputs = batch(0)[0]
    assert engine(inputs).dtype is torch.bfloat16
    assert engine.module(inputs).dtype is torch.float32
    assert train(engine, 3)[-1] > 0


@on_ranks(2)
def test_loop_may_set_the_boundary():
    """Loops that count micro-batches: step() once per round."""
    rounds = config(gradient_accumulation_steps=2, zero_optimization={"stage": 1})
    counted, by_hand = engine_of(rounds), engine_of(rounds)
    train(counted, 4)
    unmanaged = engine_of({**rounds, "managed_gradient_accumulation": False})
    for engine in (by_hand, unmanaged):
        for step in range(4):
            if engine is by_hand:
                engine.set_gradient_accumulation_boundary(step % 2 == 1)
            inputs, targets = batch(step)
            engine.backward(loss_of(engine(inputs), targets))
            if step % 2:
                engine.step()
        torch.testing.assert_close(engine.module.state_dict(), counted.module.state_dict())
        assert engine.global_steps == counted.global_steps == 2


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_zero_init_and_gathered_parameters(transport):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with zshard.zero.Init(config_dict_or_path=config(), dtype=torch.float32):
            module = model()
    assert "reset_parameters()" in str(caught[0].message)
    assert all(p.is_meta for p in module.parameters())
    engine = engine_of(model=module, transport=transport)
    with zshard.zero.GatheredParameters([module.first.weight], modifier_rank=1):
        assert module.first.weight.shape == (13, 7)
        if dist.get_rank() == 1:
            with torch.no_grad():
                module.first.weight.fill_(3.0)
    weight = engine.module.state_dict()["first.weight"]
    with zshard.zero.GatheredParameters(module.parameters()), torch.no_grad():
        module.second.weight.zero_()  # without a modifier_rank, discarded
    second = engine.module.state_dict()["second.weight"]
    with zshard.zero.GatheredParameters(nn.Linear(2, 2).weight, modifier_rank=0):
        pass
    train(engine, 2)
    assert bool((weight == 3).all())
    assert bool(second.any())


def test_init_distributed_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'backend'"):
        zshard.init_distributed(backend="gloo")
    with pytest.raises(RuntimeError, match="omit dist_init_required=False"):
        zshard.init_distributed(dist_init_required=False)
    with pytest.raises(NotImplementedError, match="build the module within"):
        zshard.zero.Init(module=model())
    module = nn.Linear(2, 2)
    zshard.zero.register_external_parameter(module, module.weight)  # need none
    zshard.zero.unregister_external_parameter(module, module.weight)
    with (
        pytest.warns(UserWarning, match=r"call from_pretrained\(\) outside of it"),
        pytest.raises(RuntimeError, match=r"within zero.Init\(\): call it outside"),
        zshard.zero.Init(),
    ):
        raise RuntimeError("You are using `from_pretrained` with a meta device context manager")
    assert torch.empty(1).device.type == "cpu"


# --- the engine ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_engine_queries():
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    engine = engine_of(config(scheduler=warmup, gradient_clipping=0.5))
    assert engine.train_batch_size() == 8 and engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 1 and engine.gradient_clipping() == 0.5
    assert engine.zero_optimization_stage() == 3 and engine.loss_scale() == 0.0
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert engine.global_rank == dist.get_rank() and engine.dp_world_size == 2
    assert engine.training_dataloader is None and engine.lr_scheduler is not None
    assert engine_of(config(gradient_clipping=None)).gradient_clipping() == 1.0
    half = engine_of(config(bf16={"enabled": True}))
    assert half.bfloat16_enabled() and not half.fp16_enabled()


@pytest.mark.usefixtures("group_ends")
def test_engine_has_the_models_attributes_and_names_the_docs_for_others() -> None:
    module = model()
    module.losses = [3]
    engine = engine_of(model=module)
    assert engine.losses == [3]
    for name in ("scheduler_name", "destroy", "_private"):
        assert not hasattr(engine, name)
        text = message_of(lambda name=name: getattr(engine, name), AttributeError)
        assert repr(name) in text and "docs/deepspeed.md" in text


# --- compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "backend"), [(3, "eager"), (2, "aot_eager"), (0, "eager")])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_compile_compiles_the_model(transport, stage, backend):
    rounds = config(gradient_accumulation_steps=2, zero_optimization={"stage": stage})
    plain, engine = engine_of(rounds, transport), engine_of(rounds, transport)
    engine.compile(backend=backend, dynamic=False)
    assert engine.module._compiled_call_impl is not None and engine._compiled_call_impl is None
    assert train(engine, 5) == train(plain, 5)
    engine.eval()
    with torch.no_grad():
        engine(batch(0)[0])
    assert (engine.global_steps, engine.micro_steps) == (2, 5)
    assert list(engine.module.state_dict()) == list(plain.module.state_dict())


class OwnNames(Mlp):
    """Has FSDP's names itself, which the engine must not read."""


refuse(OwnNames)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_models_own_names_are_its_own(stage, transport):
    rounds = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    runs = []
    for kind in (Mlp, OwnNames):
        torch.manual_seed(5)
        settings = config(zero_optimization={"stage": stage}, **rounds)
        engine = engine_of(settings, transport, model=kind())
        with engine.no_sync():
            engine(batch(9)[0]).sum().backward()
        engine.zero_grad()
        runs.append({"losses": train(engine, 4), **engine.module.state_dict()})
    assert_same(*runs, "the run")
