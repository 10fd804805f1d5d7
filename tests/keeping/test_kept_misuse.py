"""Misuse of zshard.Keep: an error that names the remedy, or a correct result."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_training import Run, kept_run, kept_step, train
from nursery import fork_ranks
from rows import all_refused, all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import Keep
from zshard.extras.keeping.client import VARIABLE, Keeper

MISSING = NotImplementedError

# --- what cannot be kept --------------------------------------------------------------------------


@on_ranks(2, fresh=True)
def test_what_cannot_be_kept_is_named(token):
    os.environ[VARIABLE] = token
    run = Run({})
    model, params, own = run.model, list(run.model.parameters()), run.optimizer
    other, plain, extra = zshard.FSDP(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    two = [zshard.AdamW(params[:2]), zshard.SGD(params[2:], lr=1)]
    sgd, muon = torch.optim.SGD, zshard.Muon([{"params": params, "use_muon": False}])
    no_module = "got SGD without the module that it steps: pass that module"
    rows: dict[str, tuple[Any, type[Exception], str]] = {
        "no model": (lambda: Keep(plain, own), TypeError, "expects an FSDP(...) model, got Linear"),
        "of torch": (lambda: Keep(model, sgd(params)), MISSING, "AdamW, Adam or SGD of zshard"),
        "Muon": (lambda: Keep(model, muon), MISSING, "muon.Muon"),
        "a number": (lambda: Keep(model, own, 7), TypeError, "a int, which has no state_dict()"),
        "averages": (
            lambda: zshard.EMA(model, 0.9),
            MISSING,
            "a kept run cannot restore averages",
        ),
        "more": (
            lambda: Keep(model, zshard.AdamW([*params, extra])),
            ValueError,
            "parameter 8 of the optimizer, of shape (3,)",
        ),
        "of another model": (
            lambda: Keep(model, zshard.AdamW([*params, *other.parameters()])),
            ValueError,
            "steps 'weight', which is not in the model that Keep() was given",
        ),
        "two optimizers": (
            lambda: Keep(model, *two),
            MISSING,
            "got a second one, SGD: give all parameters to one",
        ),
        "no module": (lambda: Keep(model, own, sgd(plain.parameters())), ValueError, no_module),
        "two models": (lambda: Keep(model, own, other), MISSING, "but got a second one"),
    }
    all_refused(rows)
    model.optimizer_in_backward(own)
    text = message_of(lambda: Keep(model, own))
    assert "optimizer_in_backward()" in text and "remove()" in text


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2, fresh=True)
def test_a_run_without_a_keeper(late):
    os.environ.pop(VARIABLE, None)
    run = Run({})
    if late:
        os.environ[VARIABLE] = "0" * 32
    text = message_of(lambda: Keep(run.model, run.optimizer), RuntimeError)
    assert text.startswith("this run has no keeper") and "--keep" in text


@on_ranks(1, fresh=True)
def test_a_single_rank(token):
    os.environ[VARIABLE] = token
    model = zshard.FSDP(nn.Linear(2, 2))
    text = message_of(lambda: Keep(model, zshard.AdamW(model.parameters())))
    assert "needs two ranks or more" in text


# --- calls in the wrong place ---------------------------------------------------------------------

AFTER_IT = "run forwards and state_dict() after it"
BLOCK: dict[str, tuple[Any, str]] = {  # the block's action, and the message
    "forward": (lambda run, kept: run.loss(1), AFTER_IT),
    "state_dict": (lambda run, kept: run.model.state_dict(), AFTER_IT),
    "optimizer's state_dict": (lambda run, kept: run.optimizer.state_dict(), AFTER_IT),
    "second step": (
        lambda run, kept: run.optimizer.step(),
        "step() was called twice in one commit()",
    ),
    "zero_grad": (lambda run, kept: run.optimizer.zero_grad(), "call zero_grad() after the block"),
    "zero_grad in place": (
        lambda run, kept: run.optimizer.zero_grad(set_to_none=False),
        "call zero_grad() after the block",
    ),
    "nested": (lambda run, kept: kept.commit({}).__enter__(), "commit() within commit()"),
    "exception": (lambda run, kept: 1 / 0, "division by zero"),
}


@on_ranks(2, fresh=True)
def test_in_the_block(token):
    """The weights are as before, and the run continues."""
    run, kept = kept_run(token)
    kept_step(run, kept)
    with all_rows() as row:
        for name, (act, words) in BLOCK.items():
            with row(name):
                before = run.digest(buffers=False)
                with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
                    kept_step(run, kept, 0, lambda act=act: act(run, kept))
                assert words in str(caught.value)
                assert run.digest(buffers=False) == before
                run.optimizer.zero_grad()
                kept_step(run, kept)
                assert run.digest(buffers=False) != before


@on_ranks(2, fresh=True)
def test_gradients_may_be_read_in_the_block(token):
    """Clipping leaves a factor for the step; a script that reads .grad in the block has it applied
    before."""
    digests = []
    for reads in (False, True):
        run, kept = kept_run(token)
        run.loss(0).backward()
        run.model.clip_grad_norm_(0.01)
        torch.manual_seed(0)
        with kept.commit({}):
            run.optimizer.step()
            if reads:
                zshard.full_tensor(next(iter(run.model.parameters())).grad)
        digests.append(run.digest())
        kept.close()
    assert digests[0] == digests[1]


@on_ranks(2, fresh=True)
def test_calls_out_of_order(token):
    os.environ[VARIABLE] = token
    run = Run({})
    kept = Keep(run.model, run.optimizer)
    assert "commit() before recover()" in message_of(lambda: kept.commit({}), RuntimeError)
    kept.recover({})
    assert "recover() was called before" in message_of(lambda: kept.recover({}), RuntimeError)
    text = message_of(lambda: kept.commit({"f": lambda: 0}).__enter__(), TypeError)
    assert "commit() takes plain values" in text


class Unpicklable:
    """Something that a script steps, whose state cannot be pickled for now."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "8 bit", "rounding"])
@on_ranks(2, fresh=True)
def test_a_commit_that_fails_changes_nothing(token, optimizer):
    """A run in which the first two commits fail ends as one in which none does."""
    os.environ[VARIABLE] = token
    digests = []
    for fails in (True, False):
        run, other = Run({"optimizer": optimizer}), Unpicklable()
        kept = Keep(run.model, run.optimizer, other)
        kept.recover({})
        torch.manual_seed(0)
        for number in range(4):
            run.loss(number).backward()
            other.state = {"f": lambda: 0} if fails and number == 0 else {}
            if fails and number < 2:
                words = "in the block" if number else "Keep() takes plain values"
                with pytest.raises((TypeError, ValueError)) as caught, kept.commit({}):
                    run.optimizer.step()
                    if number:
                        raise ValueError("in the block")
                assert words in str(caught.value)
            other.state = {}
            with kept.commit({}):
                run.optimizer.step()
            run.optimizer.zero_grad()
        digests.append(run.digest())
        kept.close()
    assert digests[0] == digests[1]


def on_one_rank(token: str, what: str) -> str:
    run, kept = kept_run(token)
    kept_step(run, kept)
    run.loss(0).backward()
    if dist.get_rank() == 1 and what == "no commit":
        return message_of(lambda: run.loss(1).backward(), zshard.DivergenceError)
    if dist.get_rank() == 1 and what == "an exception":
        raise ValueError("rank 1 has a problem")

    def commit() -> None:
        with kept.commit({}):
            run.optimizer.step()

    kind = zshard.DivergenceError if what == "no commit" else zshard.PeerError
    text = message_of(commit, kind)
    assert "the last commit() failed on the way" in message_of(commit)
    return text


@pytest.mark.parametrize("what", ["no commit", "an exception"])
def test_what_one_rank_does_alone(token: str, what: str) -> None:
    first, second = fork_ranks(on_one_rank, 2, token, what)
    assert first.returncode == 0, first.stderr
    assert second.returncode == (what == "an exception"), second.stderr
    assert what == "no commit" or "rank 1 has a problem" in first.value


# --- restarts that do not fit ---------------------------------------------------------------------


def some_steps(token: str, folder: str = "") -> str:
    """Two steps of a run that then ends without an error, as if it were killed."""
    run, kept = kept_run(token)
    for step in range(2):
        kept_step(run, kept, step)
    if folder:
        zshard.save(folder, run.model, run.optimizer, step=2, extra={"step": 2})
    return run.digest()


def restarted(token: str, folder: str, options: dict[str, Any]) -> tuple[str, Any, str]:
    """Return the error of recover(), the step at which the run begins, and its weights' digest."""
    os.environ[VARIABLE] = token
    run = Run(options)
    others = [run.scheduler] if options.get("others") else []
    if options.get("buffer"):
        run.model.register_buffer("scale", torch.zeros(2))
    where = {"checkpoints": folder or None, "name": options.get("name", "")}
    kept = Keep(run.model, run.optimizer, *others, **where)
    try:
        start = kept.recover({"step": 0})["step"]
    except Exception as error:
        return str(error), None, ""
    return "nothing", start, run.digest()


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"width": 32}, "the kept state has the parameter 'body.0.bias (64,)"),
    ({"optimizer": "momentum"}, "the kept state has the optimizer 'AdamW [8]"),
    ({"optimizer": "two groups"}, "the kept state has the optimizer 'AdamW [8]"),
    ({"others": True}, "the kept state has the list of others '[]', but this script has '["),
    ({"buffer": True}, "the kept state has the buffer 'nothing', but this script has 'scale"),
    ({"strategy": "zero1"}, "nothing"),
]


def test_another_script_is_refused(token: str) -> None:
    """That leaves the kept memory to the right one."""
    fork_ranks(some_steps, 2, token, check=True)
    with all_rows() as row:
        for options, words in UNFIT:
            with row(options):
                for result in fork_ranks(restarted, 2, token, "", options, check=True):
                    text, start, _ = result.value
                    assert words in text
                    assert start == (2 if words == "nothing" else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("worlds", [(2, 3), (3, 2)])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_another_number_of_ranks(
    token: str, tmp_path: Path, with_checkpoint: bool, worlds: tuple[int, int]
) -> None:
    folder = str(tmp_path / "runs") if with_checkpoint else ""
    saved = fork_ranks(some_steps, worlds[0], token, folder, check=True)
    for result in fork_ranks(restarted, worlds[1], token, folder, {}, check=True):
        text, start, digest = result.value
        assert text == "nothing" and start == (2 if with_checkpoint else 0)
        assert (digest == saved[0].value) == with_checkpoint
        assert ("no rank's memory" in result.stderr) == (result.rank == 0)


def test_a_checkpoint_without_the_state_of_others(keeper: Keeper, tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    fork_ranks(some_steps, 2, keeper.token, folder, check=True)
    for name in keeper.list():
        keeper.drop(name)
    for result in fork_ranks(restarted, 2, keeper.token, folder, {"others": True}, check=True):
        text, start, _ = result.value
        assert start is None
        assert "lacks the state of the StepLR" in text and "extra=kept.state_dict()" in text


def test_a_name_finds_its_memory(token: str) -> None:
    fork_ranks(some_steps, 2, token, check=True)
    for name, expected in (("another one", 0), ("0", 2), ("", 2)):
        results = fork_ranks(restarted, 2, token, "", {"name": name}, check=True)
        assert [result.value[:2] for result in results] == [("nothing", expected)] * 2


def one_after_the_other(token: str, killed: bool) -> list[int]:
    """Return where two kept runs of a process begin."""
    began = []
    for number in range(2):
        run, kept = kept_run(token)
        began.append(kept.state_dict()["script"]["step"])
        for step in range(began[-1], 4):
            if killed and (number, step, dist.get_rank()) == (1, 2, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            kept_step(run, kept, step)
        kept.close()
    return began


def test_each_keep_of_a_process_finds_its_own_memory(token: str) -> None:
    """The first is closed when a rank is killed in the second."""
    fork_ranks(one_after_the_other, 2, token, True)
    for result in fork_ranks(one_after_the_other, 2, token, False, check=True):
        assert result.value == [0, 2]


def test_a_keeper_that_was_killed(keeper: Keeper, tmp_path: Path) -> None:
    keeper.end()
    for result in fork_ranks(train, 2, keeper.token, str(tmp_path), {}, None):
        assert result.returncode == 1
        assert "KeeperError: no keeper answers under this token" in result.stderr
