"""examples/metrics.py: its numbers, by a clock of the tests' own, its writers, and what it must not do."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn

import zshard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@contextlib.contextmanager
def made(model=None, tokens=100, **options):
    """A Metrics, a clock that stands still, and what was printed. Its peak is 1 TFLOP/s, and a token
    takes 1 GFLOP."""
    metrics = example("metrics")
    options = {"every": 2, "flops_per_token": 1e9, "peak_tflops": 1.0} | options
    clock, printed = Clock(), io.StringIO()
    with mock.patch.object(metrics, "time", clock), contextlib.redirect_stdout(printed):
        yield metrics.Metrics(model or nn.Linear(2, 2), tokens, **options), clock, printed


def test_numbers_of_a_plain_model():
    tensorboard = SimpleNamespace(rows=[], add_scalar=lambda *row: tensorboard.rows.append(row))
    wandb = mock.Mock(spec=["log", "finish"])
    tensorboard.close = mock.Mock()
    with made(writers=[tensorboard, wandb]) as (metrics, clock, printed):
        clock.now += 50  # the first step sets things up
        assert metrics.step(torch.tensor(3.0)) is None
        clock.now += 0.5
        numbers = metrics.step(torch.tensor(2.5))
        assert numbers == {"loss": 2.5, "seconds/step": 0.5, "tokens/s": 200, "mfu": 0.2}
        clock.now += 1
        assert metrics.step(torch.tensor(2.0)) is None
        clock.now += 3
        other = metrics.step(torch.tensor(1.0))
        assert other == {"loss": 1, "seconds/step": 2, "tokens/s": 50, "mfu": 0.05}
        metrics.close()
    assert printed.getvalue().splitlines() == [
        "step    2  loss 2.5000, 500.0 ms, 200 tokens/s, MFU 20.0 %",
        "step    4  loss 1.0000, 2000.0 ms, 50 tokens/s, MFU 5.0 %",
    ]
    rows = [(name, value, 2) for name, value in numbers.items()]
    assert tensorboard.rows == rows + [(name, value, 4) for name, value in other.items()]
    assert wandb.log.mock_calls == [mock.call(numbers, step=2), mock.call(other, step=4)]
    wandb.finish.assert_called_once_with()
    tensorboard.close.assert_called_once_with()


def test_pauses_and_what_is_not_known_yet():
    with made(every=1) as (metrics, clock, _):
        assert metrics.step() == {}
        clock.now += 1
        with metrics.paused():
            clock.now += 70
            with metrics.paused():  # once, not twice
                clock.now += 70
        with pytest.raises(ZeroDivisionError), metrics.paused():
            clock.now += 70
            raise ZeroDivisionError
        clock.now += 1
        assert metrics.step()["seconds/step"] == 2
        clock.now += 1
        assert metrics.step() == {"seconds/step": 1, "tokens/s": 100, "mfu": 0.1}
        assert metrics.step() == {}  # in no time
        with metrics.paused():
            clock.now += 5
        clock.now += 4
        assert metrics.step(2.5) == {"loss": 2.5, "seconds/step": 4, "tokens/s": 25, "mfu": 0.025}


def test_a_pause_before_the_first_step_and_a_resumed_run():
    with made(every=5) as (metrics, clock, printed):
        metrics.steps = 7  # as of the checkpoint
        with metrics.paused():
            clock.now += 9
        for _ in range(4):
            clock.now += 1
            numbers = metrics.step() or {}
        assert numbers == {} and metrics.steps == 11
        assert printed.getvalue().startswith("step   10  1000.0 ms")


def test_a_loss_is_read_only_for_a_line():
    with made(every=3) as (metrics, clock, _), mock.patch.object(torch, "as_tensor") as read:
        for step in range(1, 7):
            clock.now += 1
            metrics.step(torch.tensor(1.0))
            assert read.call_count == step // 3


def test_a_peak_is_measured_once_and_takes_no_time_of_a_step():
    metrics = example("metrics")
    assert metrics.matmul_tflops(nn.Linear(2, 2)) > 0
    with (
        made(peak_tflops=None, every=1) as (mine, clock, _),
        mock.patch.object(metrics, "matmul_tflops", return_value=2.0) as measured,
    ):
        measured.side_effect = lambda model: setattr(clock, "now", clock.now + 50) or mock.DEFAULT
        for _ in range(3):
            clock.now += 1
            numbers = mine.step()
        assert numbers == {"seconds/step": 1, "tokens/s": 100, "mfu": 0.05}
        measured.assert_called_once_with(mine.model)


def step(model, optimizer, batches=1):
    for _ in range(batches):
        model(torch.ones(2, 8)).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_of_a_sharded_model_with_accumulation():
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    model = zshard.FSDP(plain)
    optimizer = zshard.AdamW(model[0].parameters())
    assert example("metrics").flops_of(model) == 6 * 72 + 4 * 72
    assert example("metrics").flops_of(model, 2, 8, 16) == 10 * 72 + 12 * 2 * 8 * 16
    log = mock.Mock(spec=["log"])
    with made(torch.compile(model), tokens=3 * 100, writers=[log]) as (metrics, clock, printed):
        for _ in range(2):
            step(model, optimizer, 3)
            clock.now += 2
            numbers = metrics.step()
    assert (numbers["seconds/step"], numbers["tokens/s"], numbers["mfu"]) == (2, 300, 0.15)
    assert numbers["grad_norm"] > 0 and numbers["memory/peak/total"] > 0
    assert numbers["seconds/wait"] >= 0
    line = r"step    2  2000.0 ms, 300 tokens/s, MFU 15.0 %, memory 2 MiB, peak 2 MiB, norm .*, wait .* ms\n"
    assert re.fullmatch(line if dist.get_rank() == 0 else "", printed.getvalue())
    assert log.log.call_count == 1 - dist.get_rank()


@on_ranks(2)
def test_one_rank_may_call_it_alone():
    model = zshard.FSDP(nn.Linear(8, 8))
    optimizer = zshard.AdamW(model.parameters())
    mine = example("metrics").Metrics(model, 10, every=1) if dist.get_rank() == 1 else None
    for _ in range(3):
        step(model, optimizer)
        numbers = mine.step(torch.tensor(1.0)) if mine else {"tokens/s": 1.0}
    assert numbers["tokens/s"] > 0


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with made(writers=example("metrics").writers(tensorboard=tmp_path)) as (metrics, clock, _):
        for loss in (4.0, 3.0, 2.0, 1.0):
            clock.now += 1
            metrics.step(torch.tensor(loss))
        metrics.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, 3.0), (4, 1.0)]
    assert [e.value for e in events.Scalars("tokens/s")] == [100, 100]


@on_ranks(2)
def test_train_gpt_sends_them(tmp_path):
    run = mock.Mock(spec=["log", "finish"])
    wandb = ModuleType("wandb")
    wandb.init = mock.Mock(return_value=run)
    flags = "train_gpt --size tiny --batch 1 --steps 4 --warmup 1 --eval-every 2 --eval-sequences 1"
    flags += f" --sample 0 --log-every 2 --wandb mine --peak-tflops 1 --out {tmp_path}"
    with (
        mock.patch.dict(sys.modules, {"wandb": wandb}),
        mock.patch.object(sys, "argv", flags.split()),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as left,
    ):
        runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")
    assert left.value.code == 0
    if dist.get_rank() == 0:
        assert wandb.init.call_args.kwargs["project"] == "mine"
        assert [call.kwargs["step"] for call in run.log.mock_calls] == [2, 4]
        assert {"loss", "tokens/s", "mfu", "grad_norm"} < run.log.call_args.args[0].keys()
        run.finish.assert_called_once_with()
        assert printed.getvalue().count("tokens/s, MFU") == 2
    else:
        assert not wandb.init.called


def test_a_missing_package_is_named():
    with (
        mock.patch.dict(sys.modules, {"wandb": None}),
        pytest.raises(ImportError, match="wandb"),
    ):
        example("metrics").writers(wandb="mine")
