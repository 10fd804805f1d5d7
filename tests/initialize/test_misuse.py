"""Misuse of zshard.initialize(): each mistake is an error with a remedy, or works.

A test makes the mistake on two ranks, reads the message, and then trains on: the refused call has
changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import (
    LR,
    Meaning,
    Theirs,
    batch,
    config,
    engine_of,
    loss_of,
    model,
    states_apart,
    train,
)
from nursery import fork_ranks
from spawn import RankPool, on_ranks, ranks

import zshard

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "c10d"])
STAGES = pytest.mark.parametrize("stage", range(4))


def raised(call: Callable[[], Any]) -> str:
    """Return the type and message of what a call raises; "" if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def backward(engine: Any, step: int = 0) -> None:
    inputs, targets = batch(step)
    engine.backward(loss_of(engine(inputs), targets))


# --- in the training loop -------------------------------------------------------------------------


@STAGES
@TRANSPORTS
@on_ranks(2)
def test_step_requires_a_backward(stage, transport):
    engine = engine_of(config(zero_optimization={"stage": stage}), transport)
    found = [raised(engine.step)]
    loss_of(engine(batch(0)[0]), batch(0)[1]).backward()  # as without an engine
    found.append(raised(engine.step))
    engine.zero_grad()
    backward(engine)
    engine.step()
    found.append(raised(engine.step))
    theirs = Theirs(Meaning(stage))
    theirs.train(1)
    train(engine, 2, start=1)
    theirs.train(2, start=1)
    assert states_apart(engine, theirs) == 0.0
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 24)
    for each in found:
        assert "RuntimeError: engine.step() was called without engine.backward(loss)" in each
        assert "instead of loss.backward()" in each


@STAGES
@TRANSPORTS
@on_ranks(2)
def test_two_backwards_add_up_or_a_step_was_forgotten(stage, transport):
    """With one micro-batch per step, gradients add up; with more, step() was forgotten."""
    engine = engine_of(config(zero_optimization={"stage": stage}), transport)
    inputs, targets = batch(0)
    output = engine(inputs)
    engine.backward(loss_of(output, targets), retain_graph=True)
    engine.backward(loss_of(output, targets))
    engine.step()
    single = engine_of(config(zero_optimization={"stage": stage}), transport)
    single.backward(2 * loss_of(single(inputs), targets))
    single.step()
    ours, other = engine.module.state_dict(), single.module.state_dict()
    assert max(float((ours[name] - other[name]).abs().max()) for name in ours) < 1e-6
    accumulates = config(zero_optimization={"stage": stage}, gradient_accumulation_steps=2)
    engine = engine_of(accumulates, transport)
    backward(engine)
    found = [raised(lambda: engine(inputs))]
    engine.step()
    backward(engine, 1)
    engine.step()
    assert engine.global_steps == 1
    (message,) = found
    assert "engine.step() was not called after engine.backward()" in message
    assert "gradient_accumulation_steps=2" in message


def _fail(module: Any, *grads: Any) -> None:
    if isinstance(module, torch.nn.Linear):
        raise RuntimeError("on purpose")


@STAGES
@TRANSPORTS
@on_ranks(2)
def test_failed_backward_is_dropped_on_all_ranks(stage, transport):
    """All ranks fail in the second backward of three, catch the error and restart the round."""
    rounds = config(zero_optimization={"stage": stage}, gradient_accumulation_steps=3)
    engine = engine_of(rounds, transport)
    theirs = Theirs(Meaning(stage, rounds=3))
    theirs.train(6)
    train(engine, 1)
    inputs, targets = batch(90)
    hook = torch.nn.modules.module.register_module_full_backward_hook(_fail)
    message = raised(lambda: engine.backward(loss_of(engine(inputs), targets)))
    hook.remove()
    assert "RuntimeError: on purpose" in message, message
    assert "without engine.backward" in raised(engine.step)
    for step in range(6):
        with torch.no_grad():
            engine.eval()
            engine(inputs)
            engine.train()
        train(engine, 1, start=step)
    assert states_apart(engine, theirs) < 1e-6
    assert engine.global_steps == 2


def _fail_step(*_: Any) -> None:
    raise MemoryError("on purpose")


@pytest.mark.parametrize("dtype", ["", "fp16"])
@TRANSPORTS
@on_ranks(2)
def test_failed_step_is_dropped(dtype, transport):
    """The optimizer's step raises on all ranks at the end of a round."""
    rounds = config(gradient_accumulation_steps=3)
    if dtype:
        rounds[dtype] = {"enabled": True}
    engine, other = engine_of(rounds, transport), engine_of(rounds, transport)
    train(engine, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.optimizer, "step", _fail_step)
        assert "MemoryError: on purpose" in raised(lambda: train(engine, 1, start=2))
    assert not engine.is_gradient_accumulation_boundary() and engine.global_steps == 0
    assert train(engine, 6) == train(other, 6)
    for ours, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(zshard.to_local(ours), zshard.to_local(theirs))
    assert engine.global_steps == 2


def fails_on_one_rank(where: str, transport: str) -> None:
    engine = engine_of(config(gradient_clipping=1.0), transport)
    train(engine, 1)
    inputs, targets = batch(1)
    loss = loss_of(engine(inputs), targets)
    if where == "backward" and engine.global_rank == 1:
        raise ValueError("on purpose")
    engine.backward(loss)
    if where == "step" and engine.global_rank == 1:
        raise ValueError("on purpose")
    engine.step()
    train(engine, 2)


@TRANSPORTS
@pytest.mark.parametrize("where", ["backward", "step"])
def test_failure_on_one_rank_is_named_on_the_other(where: str, transport: str) -> None:
    first, second = fork_ranks(fails_on_one_rank, 2, where, transport, timeout=60)
    assert "on purpose" in second.stderr and second.returncode == 1
    assert first.returncode == 1
    assert "PeerError" in first.stderr or "DivergenceError" in first.stderr, first.stderr


def one_rank_forgets_to_step(transport: str) -> None:
    options = {"stage": 2, "compute_grad_norm": False}
    engine = engine_of(config(zero_optimization=options), transport)
    backward(engine)
    if engine.global_rank == 0:
        engine.step()
    train(engine, 2)


@TRANSPORTS
def test_step_on_one_rank_only_is_an_error_on_both(transport: str) -> None:
    """In fresh processes: ranks that are out of step stay so."""
    for result in fork_ranks(one_rank_forgets_to_step, 2, transport, timeout=60):
        assert result.returncode == 1
        assert "DivergenceError" in result.stderr or "PeerError" in result.stderr, result.stderr


@on_ranks(2)
def test_backward_requires_a_scalar_with_a_graph():
    engine = engine_of()
    output = engine(batch(0)[0])
    values = (output, 1.0, output.detach().mean(), None)
    found = [raised(lambda value=value: engine.backward(value)) for value in values]
    train(engine, 1)
    for message, kind in zip(found, ("(4, 3)", "float", "()", "NoneType"), strict=True):
        assert "TypeError: engine.backward() expects a scalar loss" in message
        assert kind in message


@TRANSPORTS
@on_ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(transport):
    half = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 1000}
    engine = engine_of(config(fp16=half, gradient_clipping=1.0), transport)
    first = engine.module.state_dict()
    inputs, targets = batch(0)
    if engine.global_rank == 1:
        inputs = inputs * 1e4
        targets = targets + 1e5
    engine.backward(loss_of(engine(inputs), targets) * 1e6)
    engine.step()
    skipped = engine.skipped_steps, engine.was_step_applied(), engine.cur_scale
    same = all(
        torch.equal(first[name], value) for name, value in engine.module.state_dict().items()
    )
    least = engine_of(config(fp16={**half, "initial_scale_power": 0}), transport)
    least.backward(loss_of(least(inputs), targets) * float("inf"))
    skipped, applied, scale, same, message, again = (
        *skipped,
        same,
        raised(least.step),
        raised(least.step),
    )
    assert (skipped, applied, scale, same) == (1, False, 2.0**16, True)
    assert "OverflowError: the gradients overflow at the least loss scale, 1" in message
    assert "without engine.backward" in again, "the step has ended"


@on_ranks(2)
def test_bf16_skips_nonfinite_steps():
    engine = engine_of(config(bf16={"enabled": True}))
    inputs, targets = batch(0)
    engine.backward(loss_of(engine(inputs), targets) * float("nan"))
    engine.step()
    finite = all(bool(v.isfinite().all()) for v in engine.module.state_dict().values())
    assert engine.skipped_steps == 1
    assert finite


@on_ranks(2)
def test_batch_size_changes_between_steps_only():
    engine = engine_of(config(gradient_accumulation_steps=2))
    train(engine, 1)
    found = [raised(lambda: engine.set_train_batch_size(8))]
    train(engine, 1, start=1)
    found.append(raised(lambda: engine.set_train_batch_size(12)))
    engine.set_train_batch_size(8)
    train(engine, 1, start=2)
    assert (engine.global_steps, engine.train_batch_size()) == (2, 8)
    assert engine.gradient_accumulation_steps() == 1
    middle, wrong = found
    assert "RuntimeError" in middle and "after 1 of 2 micro-batches" in middle
    assert "ValueError: train_batch_size=12 is not a multiple of 8" in wrong


@on_ranks(2)
def test_no_sync_refuses_to_step():
    engine = engine_of()
    found = []
    with engine.no_sync():
        backward(engine)
        found += [raised(engine.step), raised(lambda: engine.no_sync().__enter__())]
    found.append(raised(engine.step))
    within, nested, unreduced = found
    assert "RuntimeError: engine.step() was called within engine.no_sync()" in within
    assert "not reentrant" in nested
    assert "no_sync()" in unreduced and "RuntimeError" in unreduced


# --- in initialize() ------------------------------------------------------------------------------


def summing_in(dtype: str, **changes: Any) -> dict[str, Any]:
    return config(data_types={"grad_accum_dtype": dtype}, **changes)


def sums_in(given: Any, dtype: torch.dtype | None = None) -> set[torch.dtype]:
    """Return the dtypes of gradients between micro-batches."""
    engine = engine_of({**given, "gradient_accumulation_steps": 2}, model=model().to(dtype))
    inputs, targets = batch(0)
    engine.backward(loss_of(engine(inputs.to(dtype)), targets))
    return {param.grad.dtype for param in engine.module.parameters()}


@STAGES
@on_ranks(2)
def test_micro_batches_are_summed_in_the_dtype_that_is_asked_for(stage):
    low = torch.bfloat16
    options: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    assert sums_in(summing_in("bf16", **options), low) == {low}
    assert sums_in(summing_in("fp32", **options)) == {torch.float32}
    for half in ("bf16", "fp16"):
        asked = summing_in("fp32", **options, **{half: {"enabled": True}})
        assert sums_in(asked) == sums_in(asked, low) == {torch.float32}


@on_ranks(2)
def test_wrong_calls_are_named():
    def call(**arguments: Any) -> str:
        return raised(
            lambda: zshard.initialize(**{"model": model(), "config": config(), **arguments})
        )

    plain, other = model(), model()
    good = zshard.initialize(model=plain, config=config())[0]
    foreign = torch.optim.SGD(other.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(foreign, 1)
    found = {
        "already sharded": call(model=plain),
        "already sharded: call zshard.initialize() once": call(model=good),
        "DistributedDataParallel": call(model=torch.nn.parallel.DistributedDataParallel(model())),
        "expects model=": call(model=None),
        "got no DeepSpeed config": call(config=None),
        "got config and config_params": call(config_params=config()),
        "omit mpu=": call(mpu=object()),
        "not a parameter of the model": call(optimizer=foreign),
        "model_parameters has a tensor": call(model_parameters=other.parameters()),
        "must be parameters or param groups": call(model_parameters=other),
        "schedules another optimizer": call(lr_scheduler=schedule),
        "a scheduler needs an optimizer": call(
            config=config(optimizer=None, scheduler={"type": "WarmupLR"})
        ),
        "must be a torch Dataset": call(training_data=iter([])),
        "must return a torch optimizer": call(optimizer=lambda params: None),
        "must be a torch optimizer or a function": call(optimizer="AdamW"),
        "there is no DeepSpeed config 'no.json'": call(config="no.json"),
        "is torch.bfloat16, but parameter 'first.weight' sums": call(config=summing_in("bf16")),
        "is torch.float32, but parameter 'first.weight' sums": call(
            model=model().bfloat16(), config=summing_in("fp32")
        ),
    }
    assert {part: message for part, message in found.items() if part not in message} == {}


def again() -> list[str]:
    """A refused config has not sharded the model: it trains with a valid one."""
    module = model()
    found = []
    for wrong in (
        {"optimizer": {"type": "Lamb", "params": {"lr": LR}}},
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": LR}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/proc/no"},
            }
        },
    ):
        found.append(raised(lambda wrong=wrong: engine_of(config(**wrong), model=module)))
    found.append(raised(lambda: engine_of(model=module, training_data=3)))
    train(engine_of(model=module), 1)
    return found


@ranks(2)
def test_refused_model_can_be_initialized_again(pool: RankPool) -> None:
    parts = (
        "'Lamb'",
        "learning_rate",
        "warmup",
        "set 'nvme_path' in the DeepSpeed config",
        "Dataset",
    )
    for found in pool.run(again):
        for part, message in zip(parts, found, strict=True):
            assert part in message and "already sharded" not in message, message


@on_ranks(2)
def test_engine_without_optimizer_only_computes():
    engine, optimizer, loader, scheduler = zshard.initialize(
        model=model(), config=config(optimizer=None)
    )
    assert optimizer is loader is scheduler is None
    output = engine(batch(0)[0])
    found = [raised(lambda: engine.backward(output.sum())), raised(engine.step)]
    output.sum().backward()
    assert all("needs an optimizer: add 'optimizer'" in each for each in found)


@on_ranks(2)
def test_configs_that_differ_between_ranks_are_an_error():
    clips = 1.0 + dist.get_rank()
    message = raised(lambda: engine_of(config(gradient_clipping=clips)))
    assert "DivergenceError: the DeepSpeed configs differ between ranks" in message
    assert "'gradient_clipping' is 1.0 on rank 0, but 2.0 on rank 1" in message


@TRANSPORTS
@on_ranks(2)
def test_two_engines_live_side_by_side(transport):
    """As in RLHF scripts: an actor and a reference model, each with its engine."""
    actor, frozen = engine_of(transport=transport), engine_of(config(optimizer=None), transport)
    theirs = Theirs(Meaning())
    for step in range(3):
        with torch.no_grad():
            frozen(batch(step)[0])
        train(actor, 1, start=step)
    theirs.train(3)
    assert states_apart(actor, theirs) == 0.0
    assert True
