"""Nothing but the optimizer's step within commit() changes a kept model: what else would is refused
before it has changed anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_training import kept_run, kept_step
from models import TRANSPORTS
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard

OUTSIDE = "a step outside of commit() would be repeated by a restart"
ELSEWHERE = "outside of its steps: do it before kept.recover(...)"


@on_ranks(2, fresh=True)
def test_commit_without_with(token):
    run, kept = kept_run(token)
    words = "commit() without `with` commits nothing: write `with kept.commit(...):`"
    acts = {
        "step": run.optimizer.step,
        "forward": lambda: run.loss(1),
        "commit": lambda: kept.commit({"step": 2}),
        "state_dict": kept.state_dict,
        "close": kept.close,
    }
    with all_rows() as row:
        for name, act in acts.items():
            with row(name):
                run.loss(0).backward()
                kept.commit({"step": 1})
                assert words in message_of(act, RuntimeError)
                run.optimizer.zero_grad()
                if name == "close":
                    text = message_of(lambda: kept_step(run, kept), RuntimeError)
                    assert "commit() after close()" in text
                else:
                    kept_step(run, kept)


def acts_of(run: Any, kept: Any, other: Any, folder: str) -> dict[str, tuple[Any, str]]:
    """Return writes of scripts to a kept model, and the errors' texts."""
    model, params, state = run.model, list(run.model.parameters()), run.model.state_dict()
    zshard.save(folder, model, run.optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    others = zshard.SGD(other.parameters(), lr=1.0)

    def in_block(act: Callable[[], Any]) -> Callable[[], None]:
        def act_in_block() -> None:
            with kept.commit({"step": 9}):
                act()

        return act_in_block

    @torch.no_grad()
    def assign() -> None:
        params[0].data = torch.zeros_like(params[0])

    @torch.no_grad()
    def in_place() -> None:
        params[0].mul_(2)

    @torch.no_grad()
    def foreach() -> None:
        torch._foreach_mul_(params, 2.0)

    another = "SGD steps a kept model, but Keep() was given another"
    own_load = run.optimizer.load_state_dict
    return {
        "step": (run.optimizer.step, OUTSIDE),
        "scaler": (lambda: scaler.step(run.optimizer), OUTSIDE),
        "another optimizer": (torch.optim.SGD(params, lr=1.0).step, another),
        "another in the block": (in_block(zshard.SGD(params, lr=1.0).step), another),
        "another model": (others.step, "FSDP(...) model that zshard.Keep() was not given"),
        "another Keep": (lambda: zshard.Keep(other, others), "this process has a Keep() already"),
        "load_state_dict": (lambda: model.load_state_dict(state), ELSEWHERE),
        "load": (lambda: zshard.load(folder, model, run.optimizer), ELSEWHERE),
        "optimizer's load": (lambda: own_load(run.optimizer.state_dict()), ELSEWHERE),
        "in place": (in_place, ELSEWHERE),
        "in place in the block": (in_block(in_place), ELSEWHERE),
        "data": (lambda: params[0].data.zero_(), ELSEWHERE),
        "assignment": (assign, ELSEWHERE),
        "foreach": (foreach, ELSEWHERE),
        "init": (lambda: nn.init.normal_(params[0]), ELSEWHERE),
        "summon": (zshard.FSDP.summon_full_params(model).__enter__, ELSEWHERE),
        "apply": (lambda: model.apply(lambda _: None), ELSEWHERE),
        "in backward": (lambda: model.optimizer_in_backward(run.optimizer), ELSEWHERE),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, fresh=True)
def test_outside_of_steps(token, tmp_path, transport):
    run, kept = kept_run(token, transport=transport)
    other, state = zshard.FSDP(nn.Linear(2, 2)), run.model.state_dict()
    acts = acts_of(run, kept, other, str(tmp_path / "saved"))
    other(torch.ones(2, 2)).sum().backward()
    run.loss(5).backward()
    before = run.digest(buffers=False)
    with all_rows() as row:
        for name, (act, words) in acts.items():
            with row(name):
                assert words in message_of(act, RuntimeError)
                assert run.digest(buffers=False) == before
    with kept.commit({"step": 1}):
        run.optimizer.step()
    assert run.digest(buffers=False) != before
    kept.close()
    run.optimizer.step()
    run.model.load_state_dict(state)
