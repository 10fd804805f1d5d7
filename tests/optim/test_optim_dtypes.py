"""Optimizers that keep state in their own dtype, as AnyPrecisionAdamW does, in checkpoints.

Such an optimizer gets back exactly the state that it had, so training continues bit-identically;
torch's load_state_dict() would have cast it to the parameters' dtype.
"""

from __future__ import annotations

import pytest
import torch
from compare import differences
from models import CASES, make, train
from optim_states import FULL, rank, wrap
from spawn import on_ranks

import zshard


class Halved(torch.optim.Optimizer):
    """SGD with bfloat16 momentum."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "momentum_dtype": torch.bfloat16})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["buffer"] = torch.zeros_like(param, dtype=group["momentum_dtype"])
                state["step"] += 1
                state["buffer"].mul_(0.9).add_(param.grad)
                param.add_(state["buffer"], alpha=-group["lr"])


def built(combination, seed):
    model = make(CASES["net"].make, seed) if combination is None else wrap("net", combination, seed)
    return model, Halved(model.parameters())


def save_and_resume(folder, combination):
    """Return the state's dtypes, and what differs at the end between an uninterrupted and a resumed
    run."""
    model, optimizer = built(combination, 1)
    train(model, CASES["net"], optimizer, rank(), 2)
    zshard.save(folder / "x", model, optimizer)
    other, theirs = built(combination, 2)
    zshard.load(folder / "x", other, theirs)
    kinds = {own["buffer"].dtype for own in theirs.state.values()}
    for each, own in ((model, optimizer), (other, theirs)):
        train(each, CASES["net"], own, rank(), 2)
    wrong = differences(other.state_dict(), model.state_dict())
    return kinds, theirs.param_groups[0]["momentum_dtype"], wrong


@pytest.mark.filterwarnings("ignore:.*is updating sharded parameters")
@pytest.mark.parametrize("combination", [FULL, ("zero1", "c10d")], ids=str)
def test_state_keeps_its_dtype(pool2, combination, tmp_path):
    expected = {torch.bfloat16}, torch.bfloat16, []
    assert pool2.run(save_and_resume, tmp_path, combination) == [expected] * 2


def test_plain_model(tmp_path):
    assert save_and_resume(tmp_path, None) == ({torch.bfloat16}, torch.bfloat16, [])


@on_ranks(2)
def test_parameters_of_a_different_dtype(tmp_path):
    model, optimizer = built(FULL, 1)
    train(model, CASES["net"], optimizer, rank(), 1)
    zshard.save(tmp_path / "x", model, optimizer)
    other = zshard.FSDP(make(CASES["net"].make, 2).double())
    theirs = Halved(other.parameters())
    with pytest.raises(RuntimeError, match=r"has dtype torch\.bfloat16, expected torch\.float64"):
        zshard.load(tmp_path / "x", other, theirs)
    assert len(theirs.state) == 0
