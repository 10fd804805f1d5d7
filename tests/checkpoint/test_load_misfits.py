"""zshard.load of good checkpoints into what they do not fit: models, optimizers, arguments.

What does not fit is found before anything is changed, on all ranks, in torch's words
where torch has some.
"""

from __future__ import annotations

import pytest
import torch
from damage import check, good_one, model_and_optimizer, state_of
from guarded import same
from models import make_optimizer, wrapped
from optim_states import FULL, differ, rank
from scenarios import Stack, forward_backward, message_of
from torch import nn

import zshard
from zshard import DivergenceError


@pytest.fixture(scope="module")
def good(pools, tmp_path_factory):
    """A checkpoint of two ranks, not to be changed."""
    return good_one(pools, tmp_path_factory.mktemp("good"))


# --- what does not fit ----------------------------------------------------------------------------


class Other(Stack):
    """Another head, and one block less."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(9, 3)
        del self.blocks[2]


def of_other(path):
    model = wrapped(Other, FULL)
    optimizer = make_optimizer("zshard.AdamW", model)
    forward_backward(model, rank())
    optimizer.step()
    zshard.save(path, model, optimizer)


def test_another_model(pool2, tmp_path):
    pool2.run(of_other, str(tmp_path / "x"))
    words = [
        "size mismatch for head.weight",
        'Missing key(s) in state_dict: "blocks.2.norm.weight"',
    ]
    check(pool2, tmp_path / "x", words, kind=RuntimeError)
    loose = {"strict": False}
    check(pool2, tmp_path / "x", words[0], kind=RuntimeError, options=loose)


def strange_optimizer(path, what):
    model, optimizer = model_and_optimizer()
    params = list(model.parameters())
    if what == "class":
        optimizer = zshard.SGD(params, lr=0.1, momentum=0.9)
    elif what == "parts":
        optimizer = zshard.AdamW(params[1:])
    elif what == "groups":
        optimizer = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    elif what == "stranger":
        optimizer = zshard.AdamW([*params, nn.Parameter(torch.ones(3))])
    elif what == "dtype":
        optimizer = zshard.AdamW(wrapped(lambda: Stack().bfloat16(), FULL).parameters())
    before = state_of(model, optimizer)
    said = message_of(lambda: zshard.load(path, model, optimizer), (RuntimeError, ValueError))
    return said, differ(state_of(model, optimizer), before)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("class", "the checkpoint has the state of zshard.optim.AdamW, but the optimizer is SGD"),
        ("parts", "the optimizer has no parameter 'blocks.0.norm.weight'"),
        ("groups", "it has 1 param groups, but the optimizer has 2"),
        ("stranger", "has a parameter of shape (3,), which the model lacks"),
        ("dtype", "which the model lacks"),
    ],
)
def test_another_optimizer(pool2, good, what, words):
    for said, changed in pool2.run(strange_optimizer, str(good), what):
        assert words in said and changed == []


def another_class(path):
    """strict=False takes it, as load_state_dict() would."""
    model, _ = model_and_optimizer()
    optimizer = torch.optim.Adam(list(model.parameters()))
    said = message_of(lambda: zshard.load(path, model, optimizer), RuntimeError)
    zshard.load(path, model, optimizer, strict=False)
    return said, "exp_avg" in optimizer.state[next(model.parameters())]


def test_another_class_of_the_same_state(pool2, good):
    for said, has in pool2.run(another_class, str(good)):
        assert "the optimizer is Adam; pass strict=False" in said and has


def refusing(path, rank_of_error):
    """A hook on the optimizer that raises on one rank, when it has loaded: all get back what they
    had, and can go on."""
    model, optimizer = model_and_optimizer()
    optimizer.step()  # so that values and options are others than in the checkpoint
    optimizer.param_groups[0]["lr"] = 3.0
    before = state_of(model, optimizer)
    usual = type(optimizer).__setstate__

    def set_state(self, state):
        usual(self, state)
        if "param_groups" in state and rank() == rank_of_error:
            raise NotImplementedError("not with these options")

    type(optimizer).__setstate__ = set_state
    try:
        said = message_of(lambda: zshard.load(path, model, optimizer), NotImplementedError)
    finally:
        type(optimizer).__setstate__ = usual
    changed = differ(state_of(model, optimizer), before)
    moments = optimizer.state[next(model.parameters())]["exp_avg"]
    other, seen = moments.clone(), []
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[next(model.parameters())]["exp_avg"].clone())
    )
    zshard.load(path, model, optimizer)
    after = optimizer.state[next(model.parameters())]["exp_avg"]
    changes = not same(after, other) or after.numel() == 0  # rank 1 may have none of it
    seen = [same(each, after) and changes for each in seen]
    forward_backward(model, rank())
    optimizer.step()
    return said, changed, seen


def test_an_optimizer_that_refuses_on_one_rank(pool2, good):
    for said, changed, seen in pool2.run(refusing, str(good), 1):
        assert "not with these options" in said and changed == []
        assert seen == [True], "post hooks see the values"


def strange_arguments(path):
    model, _ = model_and_optimizer()
    return [
        message_of(lambda: zshard.load(path, "model"), TypeError),
        message_of(lambda: zshard.load(path, model, "optimizer"), TypeError),
        message_of(lambda: zshard.load(3, model), TypeError),
    ]


def other_arguments(path):
    """Ranks that ask for different things, and go on."""
    model, optimizer = model_and_optimizer()
    one = rank() == 1
    said = [
        message_of(lambda: zshard.load(path, model, optimizer if one else None), DivergenceError),
        message_of(lambda: zshard.load(path, model, verify=one), DivergenceError),
        message_of(lambda: zshard.load(path, model, optimizer if one else 3), TypeError),
    ]
    zshard.load(path, model, optimizer)
    return said


def test_ranks_that_ask_for_different_things(pool2, good):
    for first, second, third in pool2.run(other_arguments, str(good)):
        assert "load(optimizer=) is NoneType on rank 0, but AdamW on rank 1" in first
        assert "load(verify=) is False on rank 0, but True on rank 1" in second
        assert "optimizer must be a torch.optim.Optimizer, got int" in third


def test_wrong_arguments(pool2, good):
    for first, second, third in pool2.run(strange_arguments, str(good)):
        assert "model must be an nn.Module, got str" in first
        assert "optimizer must be a torch.optim.Optimizer, got str" in second
        assert "not int" in third
