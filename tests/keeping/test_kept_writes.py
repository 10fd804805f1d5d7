"""Nothing but the optimizer's step within commit() changes a kept model: what else would is refused
before it has changed anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kept_training import kept_run, message_of
from nursery import fork_ranks
from rows import all_rows
from torch import nn

import zshard
from zshard.extras.keeping.client import Keeper


def without_with(token: str) -> dict[str, tuple[str, str]]:
    """Return for each act the error after commit() without `with`, and of what follows with it."""
    run, kept = kept_run(token)

    def step() -> None:
        run.loss(0).backward()
        with kept.commit({"step": 1}):
            run.optimizer.step()
        run.optimizer.zero_grad()

    acts = {
        "step first": run.optimizer.step,
        "step": run.optimizer.step,
        "forward": lambda: run.loss(1),
        "commit": lambda: kept.commit({"step": 2}),
        "state_dict": kept.state_dict,
        "close": kept.close,
    }
    found = {}
    for then, act in acts.items():
        run.loss(0).backward()
        if then != "step first":
            kept.commit({"step": 1})
        text = message_of(act)
        run.optimizer.zero_grad()
        found[then] = text, message_of(step)
    return found


def test_commit_without_with(keeper: Keeper) -> None:
    words = "commit() without `with` commits nothing: write `with kept.commit(...):`"
    for result in fork_ranks(without_with, 2, keeper.token, check=True):
        with all_rows() as row:
            for then, (text, after) in result.value.items():
                with row(then):
                    expected = "a step outside of commit()" if then == "step first" else words
                    assert expected in text
                    assert ("commit() after close()" if then == "close" else "nothing") in after


def outside_of_steps(token: str, folder: str, transport: str) -> dict[str, tuple[str, bool]]:
    """Return the error of each act, and whether weights stay as they are."""
    run, kept = kept_run(token, transport=transport)
    model, params = run.model, list(run.model.parameters())
    other, state = zshard.FSDP(nn.Linear(2, 2)), run.model.state_dict()
    zshard.save(folder, model, run.optimizer)
    for each in (model, other):
        each(*([torch.ones(2, 2)] if each is other else [torch.ones(4, 16), True])).sum().backward()

    def in_block(act: Any) -> Any:
        def act_in_block() -> None:
            with kept.commit({"step": 9}):
                act()

        return act_in_block

    @torch.no_grad()
    def assign() -> None:
        params[0].data = torch.zeros_like(params[0])

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    acts: dict[str, Any] = {
        "step": run.optimizer.step,
        "scaler": lambda: scaler.step(run.optimizer),
        "another optimizer": torch.optim.SGD(params, lr=1.0).step,
        "another in the block": in_block(zshard.SGD(params, lr=1.0).step),
        "another model": zshard.SGD(other.parameters(), lr=1.0).step,
        "another Keep": lambda: zshard.Keep(other, zshard.SGD(other.parameters(), lr=1.0)),
        "load_state_dict": lambda: model.load_state_dict(state),
        "load": lambda: zshard.load(folder, model, run.optimizer),
        "optimizer's load": lambda: run.optimizer.load_state_dict(run.optimizer.state_dict()),
        "in place": torch.no_grad()(lambda: params[0].mul_(2)),
        "in place in the block": in_block(torch.no_grad()(lambda: params[0].mul_(2))),
        "data": lambda: params[0].data.zero_(),
        "assignment": assign,
        "foreach": torch.no_grad()(lambda: torch._foreach_mul_(params, 2.0)),
        "init": lambda: nn.init.normal_(params[0]),
        "summon": lambda: zshard.FSDP.summon_full_params(model).__enter__(),
        "apply": lambda: model.apply(lambda _: None),
        "in backward": lambda: model.optimizer_in_backward(run.optimizer),
    }
    found = {}
    before = run.digest()
    for name, act in acts.items():
        text = message_of(act)
        found[name] = text, run.digest() == before
    with kept.commit({"step": 1}):
        run.optimizer.step()
    found["commit"] = "nothing", run.digest() != before
    kept.close()
    run.optimizer.step()
    model.load_state_dict(state)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_outside_of_steps(keeper: Keeper, tmp_path: Path, transport: str) -> None:
    for result in fork_ranks(
        outside_of_steps, 2, keeper.token, str(tmp_path / "saved"), transport, check=True
    ):
        found = result.value
        assert all(same for _, same in found.values()), found
        for name, (text, _) in found.items():
            assert text.startswith(OUTSIDE.get(name, "RuntimeError: ")), (name, text)
            repeats = "outside of its steps: do it before kept.recover(...)" in text
            assert repeats == (name not in OUTSIDE), (name, text)


OUTSIDE = {
    "step": "RuntimeError: a step outside of commit() would be repeated by a restart",
    "scaler": "RuntimeError: a step outside of commit() would be repeated by a restart",
    "another optimizer": "RuntimeError: SGD steps a kept model, but Keep() was given another",
    "another in the block": "RuntimeError: SGD steps a kept model, but Keep() was given another",
    "another model": "RuntimeError: SGD trains an FSDP(...) model that zshard.Keep() was not given",
    "another Keep": "RuntimeError: this process has a Keep() already",
    "commit": "nothing",
}
