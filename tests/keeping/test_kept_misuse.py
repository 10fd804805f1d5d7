"""What scripts do wrong with zshard.Keep: each is an error that names the remedy, or right."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_training import Run, kept_run, message_of, train
from nursery import fork_ranks
from torch import nn

import zshard
from zshard.extras.keeping.client import VARIABLE, Keeper

# --- what cannot be kept --------------------------------------------------------------------------


def cannot_be_kept(token: str) -> list[str]:
    os.environ[VARIABLE] = token
    run = Run({})
    model, params = run.model, list(run.model.parameters())
    extra = nn.Parameter(torch.zeros(3))
    other = zshard.FSDP(nn.Linear(2, 2))
    plain = nn.Linear(2, 2)
    found = [
        lambda: zshard.Keep(nn.Linear(2, 2), run.optimizer),
        lambda: zshard.Keep(model, torch.optim.AdamW(params)),
        lambda: zshard.Keep(model, zshard.Muon([{"params": params, "use_muon": False}])),
        lambda: zshard.Keep(model, zshard.AdamW([*params, extra])),
        lambda: zshard.Keep(model, run.optimizer, 7),
        lambda: zshard.EMA(model, 0.9),
        lambda: zshard.Keep(model, zshard.AdamW([*params, *other.parameters()])),
        lambda: zshard.Keep(model, zshard.AdamW(params[:2]), zshard.SGD(params[2:], lr=1)),
        lambda: zshard.Keep(model, run.optimizer, torch.optim.SGD(plain.parameters(), lr=1)),
        lambda: zshard.Keep(model, run.optimizer, other),
    ]
    texts = [message_of(call) for call in found]
    model.optimizer_in_backward(run.optimizer)
    return [*texts, message_of(lambda: zshard.Keep(model, run.optimizer))]


def test_what_cannot_be_kept_is_named(keeper: Keeper) -> None:
    for result in fork_ranks(cannot_be_kept, 2, keeper.token, check=True):
        plain, torchs, muon, extra, number, average, *beside, in_backward = result.value
        assert plain == "TypeError: Keep() expects an FSDP(...) model, got Linear"
        assert "a kept run needs AdamW, Adam or SGD of zshard" in torchs
        assert "torch.optim.adamw.AdamW" in torchs and "muon.Muon" in muon
        assert extra.startswith("ValueError: parameter 8 of the optimizer, of shape (3,)")
        assert "got a int, which has no state_dict()" in number
        assert average.startswith("NotImplementedError: a kept run cannot restore averages")
        for text, words in zip(beside, BESIDE, strict=True):
            assert words in text
        assert "optimizer_in_backward()" in in_backward and "remove()" in in_backward


BESIDE = (
    "steps 'weight', which is not in the model that Keep() was given",
    "keeps one optimizer of shards, but got a second one, SGD: give all parameters to one",
    "got SGD without the module that it steps: pass that module",
    "keeps one FSDP(...) model, but got a second one",
)


def without_keeper(when: str) -> str:
    if when == "late":
        run = Run({})
        os.environ[VARIABLE] = "0" * 32
    else:
        os.environ.pop(VARIABLE, None)
        run = Run({})
    return message_of(lambda: zshard.Keep(run.model, run.optimizer))


@pytest.mark.parametrize("when", ["never", "late"])
def test_a_run_without_a_keeper(when: str) -> None:
    for result in fork_ranks(without_keeper, 2, when, check=True):
        assert result.value.startswith("RuntimeError: this run has no keeper")
        assert "--keep" in result.value


def alone(token: str) -> str:
    os.environ[VARIABLE] = token
    model = zshard.FSDP(nn.Linear(2, 2))
    return message_of(lambda: zshard.Keep(model, zshard.AdamW(model.parameters())))


def test_a_single_rank(keeper: Keeper) -> None:
    (result,) = fork_ranks(alone, 1, keeper.token, check=True)
    assert "needs two ranks or more" in result.value


# --- calls in the wrong place ---------------------------------------------------------------------


def in_the_block(token: str) -> dict[str, tuple[str, bool, bool]]:
    """Return for each act the error, whether weights are as before, and whether the run continues
    after it."""
    run, kept = kept_run(token)

    def step(act: Any = None) -> None:
        run.loss(0).backward()
        with kept.commit({"step": 1}):
            run.optimizer.step()
            if act is not None:
                act()
        run.optimizer.zero_grad()

    acts = {
        "forward": lambda: run.loss(1),
        "state_dict": run.model.state_dict,
        "optimizer's state_dict": run.optimizer.state_dict,
        "second step": run.optimizer.step,
        "zero_grad": run.optimizer.zero_grad,
        "zero_grad in place": lambda: run.optimizer.zero_grad(set_to_none=False),
        "nested": lambda: kept.commit({"step": 1}).__enter__(),
        "exception": lambda: 1 / 0,
    }
    step()
    found = {}
    for what, act in acts.items():
        before = run.digest(buffers=False)
        text = message_of(lambda: step(act))  # noqa: B023
        same = run.digest(buffers=False) == before
        run.optimizer.zero_grad()
        step()
        found[what] = text, same, run.digest(buffers=False) != before
    return found


BLOCK = {
    "forward": "run forwards and state_dict() after it",
    "state_dict": "run forwards and state_dict() after it",
    "optimizer's state_dict": "run forwards and state_dict() after it",
    "second step": "step() was called twice in one commit()",
    "zero_grad": "call zero_grad() after the block",
    "zero_grad in place": "call zero_grad() after the block",
    "nested": "commit() within commit()",
    "exception": "division by zero",
}


def test_in_the_block(keeper: Keeper) -> None:
    for result in fork_ranks(in_the_block, 2, keeper.token, check=True):
        wrong = {
            what: found
            for what, found in result.value.items()
            if BLOCK[what] not in found[0] or found[1:] != (True, True)
        }
        assert (wrong, len(result.value)) == ({}, len(BLOCK))


def reads_gradients(token: str) -> tuple[str, str]:
    """Clipping leaves a factor for the step; a script that reads .grad in the block has it applied
    before."""
    digests = []
    for reads in (False, True):
        os.environ[VARIABLE] = token
        run = Run({})
        kept = zshard.Keep(run.model, run.optimizer)
        kept.recover({})
        run.loss(0).backward()
        run.model.clip_grad_norm_(0.01)
        torch.manual_seed(0)
        with kept.commit({}):
            run.optimizer.step()
            if reads:
                zshard.full_tensor(next(iter(run.model.parameters())).grad)
        digests.append(run.digest())
        kept.close()
    return digests[0], digests[1]


def test_gradients_may_be_read_in_the_block(keeper: Keeper) -> None:
    for result in fork_ranks(reads_gradients, 2, keeper.token, check=True):
        first, second = result.value
        assert first == second


def out_of_order(token: str) -> list[str]:
    os.environ[VARIABLE] = token
    run = Run({})
    kept = zshard.Keep(run.model, run.optimizer)
    found = [message_of(lambda: kept.commit({}).__enter__())]
    kept.recover({})
    found.append(message_of(lambda: kept.recover({})))
    found.append(message_of(lambda: kept.commit({"f": lambda: 0}).__enter__()))
    return found


def test_calls_out_of_order(keeper: Keeper) -> None:
    for result in fork_ranks(out_of_order, 2, keeper.token, check=True):
        early, twice, values = result.value
        assert "commit() before recover()" in early
        assert "recover() was called before" in twice
        assert values.startswith("TypeError: commit() takes plain values")


class Unpicklable:
    """Something that a script steps, whose state cannot be pickled for now."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def failing(token: str, optimizer: str, what: str) -> list[tuple[list[str], str]]:
    """Return the errors and the weights of a run in which the first two commits fail, and of one in
    which none does."""
    found = []
    for fails in (True, False):
        os.environ[VARIABLE] = token
        run, other = Run({"optimizer": optimizer}), Unpicklable()
        kept = zshard.Keep(run.model, run.optimizer, other)
        kept.recover({})
        torch.manual_seed(0)
        texts = []
        for number in range(4):
            run.loss(number).backward()
            if fails and number < 2:
                texts.append(message_of(lambda: stepped(run, kept, other, what)))  # noqa: B023
            stepped(run, kept, other, "")
            run.optimizer.zero_grad()
        found.append((texts, run.digest()))
        kept.close()
    return found


def stepped(run: Run, kept: zshard.Keep, other: Unpicklable, fails: str) -> None:
    other.state = {"f": lambda: 0} if fails == "state" else {}
    with kept.commit({}):
        run.optimizer.step()
        if fails == "body":
            raise ValueError("in the block")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["body", "state"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "8 bit", "rounding"])
def test_a_commit_that_fails_changes_nothing(keeper: Keeper, optimizer: str, what: str) -> None:
    for result in fork_ranks(failing, 2, keeper.token, optimizer, what, check=True):
        (texts, digest), (_, expected) = result.value
        words = "in the block" if what == "body" else "TypeError: Keep() takes plain values"
        assert len(texts) == 2 and all(words in text for text in texts)
        assert digest == expected


def on_one_rank(token: str, what: str) -> str:
    run, kept = kept_run(token)

    def step() -> None:
        run.loss(0).backward()
        with kept.commit({}):
            run.optimizer.step()
        run.optimizer.zero_grad()

    step()
    run.loss(0).backward()
    if dist.get_rank() == 1 and what == "no commit":
        return message_of(lambda: run.loss(1).backward())
    if dist.get_rank() == 1 and what == "an exception":
        raise ValueError("rank 1 has a problem")

    def commit() -> None:
        with kept.commit({}):
            run.optimizer.step()

    text = message_of(commit)
    assert "the last commit() failed on the way" in message_of(commit)
    return text


@pytest.mark.parametrize("what", ["no commit", "an exception"])
def test_what_one_rank_does_alone(keeper: Keeper, what: str) -> None:
    first, second = fork_ranks(on_one_rank, 2, keeper.token, what)
    if what == "an exception":
        assert second.returncode == 1
        assert first.value.startswith("PeerError") and "rank 1 has a problem" in first.value
    else:
        assert first.value.startswith("DivergenceError")
        assert second.value.startswith("DivergenceError")


# --- restarts that do not fit ---------------------------------------------------------------------


def some_steps(token: str, folder: str, options: dict[str, Any]) -> Any:
    """Two steps of a run that then ends without an error, as if it were killed."""
    run, kept = kept_run(token, **options)
    for step in range(2):
        run.loss(step).backward()
        with kept.commit({"step": step + 1}):
            run.optimizer.step()
        run.optimizer.zero_grad()
    if folder:
        zshard.save(folder, run.model, run.optimizer, step=2, extra={"step": 2})
    return run.digest()


def restarted(token: str, folder: str, options: dict[str, Any]) -> tuple[str, Any, str]:
    os.environ[VARIABLE] = token
    run = Run(options)
    others = [run.scheduler] if options.get("others") else []
    if options.get("buffer"):
        run.model.register_buffer("scale", torch.zeros(2))
    kept = zshard.Keep(run.model, run.optimizer, *others, checkpoints=folder or None)
    start: dict[str, Any] = {}
    text = message_of(lambda: start.update(kept.recover({"step": 0})))
    return text, start.get("step"), run.digest()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 32}, "the kept state has the parameter 'body.0.bias (64,)"),
        ({"optimizer": "momentum"}, "the kept state has the optimizer 'AdamW [8]"),
        ({"optimizer": "two groups"}, "the kept state has the optimizer 'AdamW [8]"),
        ({"others": True}, "the kept state has the list of others '[]', but this script has '["),
        ({"buffer": True}, "the kept state has the buffer 'nothing', but this script has 'scale"),
        ({"strategy": "zero1"}, "nothing"),
    ],
)
def test_another_script_is_refused(keeper: Keeper, options: dict[str, Any], words: str) -> None:
    fork_ranks(some_steps, 2, keeper.token, "", {}, check=True)
    for result in fork_ranks(restarted, 2, keeper.token, "", options, check=True):
        text, start, _ = result.value
        assert words in text
        assert start == (2 if words == "nothing" else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("worlds", [(2, 3), (3, 2)])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_another_number_of_ranks(
    keeper: Keeper, tmp_path: Path, with_checkpoint: bool, worlds: tuple[int, int]
) -> None:
    folder = str(tmp_path / "runs") if with_checkpoint else ""
    saved = fork_ranks(some_steps, worlds[0], keeper.token, folder, {}, check=True)
    for result in fork_ranks(restarted, worlds[1], keeper.token, folder, {}, check=True):
        text, start, digest = result.value
        assert text == "nothing" and start == (2 if with_checkpoint else 0)
        assert (digest == saved[0].value) == with_checkpoint
        assert ("no rank's memory" in result.stderr) == (result.rank == 0)


def test_a_checkpoint_without_the_state_of_others(keeper: Keeper, tmp_path: Path) -> None:
    folder = str(tmp_path / "runs")
    fork_ranks(some_steps, 2, keeper.token, folder, {}, check=True)
    for name in keeper.list():
        keeper.drop(name)
    for result in fork_ranks(restarted, 2, keeper.token, folder, {"others": True}, check=True):
        text, start, _ = result.value
        assert start is None
        assert "lacks the state of the StepLR" in text and "extra=kept.state_dict()" in text


def one_after_the_other(token: str, killed: bool) -> list[int]:
    """Return where two kept runs of a process begin."""
    began = []
    for number in range(2):
        run, kept = kept_run(token)
        start = kept.state_dict()["script"]["step"]
        began.append(start)
        for step in range(start, 4):
            if killed and (number, step, dist.get_rank()) == (1, 2, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            run.loss(step).backward()
            with kept.commit({"step": step + 1}):
                run.optimizer.step()
            run.optimizer.zero_grad()
        kept.close()
    return began


def named(token: str, name: str) -> Any:
    os.environ[VARIABLE] = token
    run = Run({})
    return zshard.Keep(run.model, run.optimizer, name=name).recover({"step": 0})["step"]


def test_a_name_finds_its_memory(keeper: Keeper) -> None:
    fork_ranks(some_steps, 2, keeper.token, "", {}, check=True)
    for name, expected in (("another one", 0), ("0", 2), ("", 2)):
        results = fork_ranks(named, 2, keeper.token, name, check=True)
        assert [result.value for result in results] == [expected] * 2


def test_each_keep_of_a_process_finds_its_own_memory(keeper: Keeper) -> None:
    """The first is closed when a rank is killed in the second."""
    fork_ranks(one_after_the_other, 2, keeper.token, True)
    for result in fork_ranks(one_after_the_other, 2, keeper.token, False, check=True):
        assert result.value == [0, 2]


def test_a_keeper_that_was_killed(keeper: Keeper, tmp_path: Path) -> None:
    token = keeper.token
    keeper.end()
    for result in fork_ranks(train, 2, token, str(tmp_path), {}, None):
        assert result.returncode == 1
        assert "KeeperError: no keeper answers under this token" in result.stderr
