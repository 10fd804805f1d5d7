"""Misuse of zshard.initialize(): each mistake is an error with a remedy, or works.

A test makes the mistake on two ranks, reads the message, and then trains on: the refused call has
changed nothing.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
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
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks

import zshard

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "c10d"])
STAGES = pytest.mark.parametrize("stage", range(4))


def backward(engine: Any, step: int = 0) -> None:
    inputs, targets = batch(step)
    engine.backward(loss_of(engine(inputs), targets))


# --- in the training loop -------------------------------------------------------------------------


@STAGES
@TRANSPORTS
@on_ranks(2)
def test_step_requires_a_backward(stage, transport):
    engine = engine_of(config(zero_optimization={"stage": stage}), transport)
    missing = r"step\(\) was called without engine.backward\(loss\).*instead of loss.backward\(\)"
    with pytest.raises(RuntimeError, match=missing):
        engine.step()
    loss_of(engine(batch(0)[0]), batch(0)[1]).backward()  # as without an engine
    with pytest.raises(RuntimeError, match=missing):
        engine.step()
    engine.zero_grad()
    backward(engine)
    engine.step()
    with pytest.raises(RuntimeError, match=missing):
        engine.step()
    theirs = Theirs(Meaning(stage))
    theirs.train(3)
    train(engine, 2, start=1)
    assert states_apart(engine, theirs) == 0.0
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 24)


@STAGES
@TRANSPORTS
@on_ranks(2)
def test_two_backwards_add_up_or_a_step_was_forgotten(stage, transport):
    """With one micro-batch per step, gradients add up; with more, step() was forgotten."""
    engine, single = (
        engine_of(config(zero_optimization={"stage": stage}), transport) for _ in range(2)
    )
    inputs, targets = batch(0)
    output = engine(inputs)
    engine.backward(loss_of(output, targets), retain_graph=True)
    engine.backward(loss_of(output, targets))
    engine.step()
    single.backward(2 * loss_of(single(inputs), targets))
    single.step()
    torch.testing.assert_close(engine.module.state_dict(), single.module.state_dict())
    accumulates = config(zero_optimization={"stage": stage}, gradient_accumulation_steps=2)
    engine = engine_of(accumulates, transport)
    backward(engine)
    message = message_of(lambda: engine(inputs))
    assert "engine.step() was not called after engine.backward()" in message
    assert "gradient_accumulation_steps=2" in message
    engine.step()
    train(engine, 1, start=1)
    assert engine.global_steps == 1


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
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.backward(loss_of(engine(inputs), targets))
    hook.remove()
    assert "without engine.backward" in message_of(engine.step)
    for step in range(6):
        with torch.no_grad():
            engine.eval()
            engine(inputs)
            engine.train()
        train(engine, 1, start=step)
    assert states_apart(engine, theirs) < 1e-6
    assert engine.global_steps == 2


@pytest.mark.parametrize("half", [{}, {"fp16": {"enabled": True}}])
@TRANSPORTS
@on_ranks(2)
def test_failed_step_is_dropped(half, transport):
    """The optimizer's step raises on all ranks at the end of a round."""
    rounds = config(gradient_accumulation_steps=3, **half)
    engine, other = engine_of(rounds, transport), engine_of(rounds, transport)
    train(engine, 2)
    with mock.patch.object(engine.optimizer, "step", side_effect=MemoryError("on purpose")):
        message_of(lambda: train(engine, 1, start=2), MemoryError)
    assert not engine.is_gradient_accumulation_boundary() and engine.global_steps == 0
    assert train(engine, 6) == train(other, 6)
    assert_same(engine.module.state_dict(), other.module.state_dict(), "the state")
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
    wrong = {"(4, 3)": output, "float": 1.0, "()": output.detach().mean(), "NoneType": None}
    for kind, value in wrong.items():
        message = message_of(lambda value=value: engine.backward(value), TypeError)
        assert "engine.backward() expects a scalar loss" in message and kind in message
    train(engine, 1)


@TRANSPORTS
@on_ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(transport):
    half = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 1000}
    engine = engine_of(config(fp16=half, gradient_clipping=1.0), transport)
    first = engine.module.state_dict()
    inputs, targets = batch(0)
    if engine.global_rank == 1:
        inputs, targets = inputs * 1e4, targets + 1e5
    engine.backward(loss_of(engine(inputs), targets) * 1e6)
    engine.step()
    assert (engine.skipped_steps, engine.was_step_applied(), engine.cur_scale) == (1, False, 2**16)
    assert_same(engine.module.state_dict(), first, "the state")
    least = engine_of(config(fp16={**half, "initial_scale_power": 0}), transport)
    least.backward(loss_of(least(inputs), targets) * float("inf"))
    with pytest.raises(OverflowError, match="overflow at the least loss scale, 1"):
        least.step()
    assert "without engine.backward" in message_of(least.step), "the step has ended"


@on_ranks(2)
def test_bf16_skips_nonfinite_steps():
    engine = engine_of(config(bf16={"enabled": True}))
    inputs, targets = batch(0)
    engine.backward(loss_of(engine(inputs), targets) * float("nan"))
    engine.step()
    assert engine.skipped_steps == 1
    assert all(bool(value.isfinite().all()) for value in engine.module.state_dict().values())


@on_ranks(2)
def test_batch_size_changes_between_steps_only():
    engine = engine_of(config(gradient_accumulation_steps=2))
    train(engine, 1)
    with pytest.raises(RuntimeError, match="after 1 of 2 micro-batches"):
        engine.set_train_batch_size(8)
    train(engine, 1, start=1)
    with pytest.raises(ValueError, match="train_batch_size=12 is not a multiple of 8"):
        engine.set_train_batch_size(12)
    engine.set_train_batch_size(8)
    train(engine, 1, start=2)
    assert (engine.global_steps, engine.train_batch_size()) == (2, 8)
    assert engine.gradient_accumulation_steps() == 1


@on_ranks(2)
def test_no_sync_refuses_to_step():
    engine = engine_of()
    with engine.no_sync():
        backward(engine)
        assert "was called within engine.no_sync()" in message_of(engine.step, RuntimeError)
        assert "not reentrant" in message_of(lambda: engine.no_sync().__enter__())
    assert "no_sync()" in message_of(engine.step, RuntimeError)


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
    plain, other = model(), model()
    good = zshard.initialize(model=plain, config=config())[0]
    foreign = torch.optim.SGD(other.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(foreign, 1)
    no_optimizer = config(optimizer=None, scheduler={"type": "WarmupLR"})
    low = {"model": model().bfloat16(), "config": summing_in("fp32")}
    rows: dict[str, dict[str, Any]] = {
        "already sharded": {"model": plain},
        "already sharded: call zshard.initialize() once": {"model": good},
        "DistributedDataParallel": {"model": torch.nn.parallel.DistributedDataParallel(model())},
        "expects model=": {"model": None},
        "got no DeepSpeed config": {"config": None},
        "got config and config_params": {"config_params": config()},
        "omit mpu=": {"mpu": object()},
        "not a parameter of the model": {"optimizer": foreign},
        "model_parameters has a tensor": {"model_parameters": other.parameters()},
        "must be parameters or param groups": {"model_parameters": other},
        "schedules another optimizer": {"lr_scheduler": schedule},
        "a scheduler needs an optimizer": {"config": no_optimizer},
        "must be a torch Dataset": {"training_data": iter([])},
        "must return a torch optimizer": {"optimizer": lambda params: None},
        "must be a torch optimizer or a function": {"optimizer": "AdamW"},
        "there is no DeepSpeed config 'no.json'": {"config": "no.json"},
        "is torch.bfloat16, but parameter 'first.weight' sums": {"config": summing_in("bf16")},
        "is torch.float32, but parameter 'first.weight' sums": low,
    }
    with all_rows() as row:
        for text, arguments in rows.items():
            arguments = {"model": model(), "config": config(), **arguments}
            with row(text):
                assert text in message_of(lambda values=arguments: zshard.initialize(**values))


@on_ranks(2)
def test_refused_model_can_be_initialized_again():
    """A refused config has not sharded the model: it trains with a valid one."""
    module = model()
    nowhere = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/proc/no"}}
    rows = {
        "'Lamb'": {"optimizer": {"type": "Lamb", "params": {"lr": LR}}},
        "learning_rate": {"optimizer": {"type": "AdamW", "params": {"learning_rate": LR}}},
        "warmup": {"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
        "set 'nvme_path' in the DeepSpeed config": {"zero_optimization": nowhere},
    }
    for text, changes in rows.items():
        message = message_of(lambda values=changes: engine_of(config(**values), model=module))
        assert text in message and "already sharded" not in message, message
    assert "Dataset" in message_of(lambda: engine_of(model=module, training_data=3))
    train(engine_of(model=module), 1)


@on_ranks(2)
def test_engine_without_optimizer_only_computes():
    engine, *others = zshard.initialize(model=model(), config=config(optimizer=None))
    assert others == [None, None, None]
    output = engine(batch(0)[0])
    for call in (lambda: engine.backward(output.sum()), engine.step):
        assert "needs an optimizer: add 'optimizer'" in message_of(call)
    output.sum().backward()


@on_ranks(2)
def test_configs_that_differ_between_ranks_are_an_error():
    clips = 1.0 + dist.get_rank()
    with pytest.raises(zshard.DivergenceError) as caught:
        engine_of(config(gradient_clipping=clips))
    assert "the DeepSpeed configs differ between ranks" in str(caught.value)
    assert "'gradient_clipping' is 1.0 on rank 0, but 2.0 on rank 1" in str(caught.value)


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
