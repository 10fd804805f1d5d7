"""Parameters and modules that are added to a sharded model."""

from __future__ import annotations

import copy

import pytest
import torch
from models import TRANSPORTS, loss_of, make
from scenarios import WIDTH, Stack, message_of
from torch import nn

from zshard import FSDP


def additions(transport):
    """The messages of what is refused, and how many gradients there are after all."""
    model = make(Stack)
    model.extra = nn.Linear(2, 2)
    model = FSDP(model, transport=transport, ignored_modules=[model.extra])
    average = copy.deepcopy(model)
    said = []
    for each in (model, average):
        new = nn.Parameter(torch.ones(3))
        said += [
            message_of(lambda at=each, p=new: setattr(at, "gain", p), ValueError),
            message_of(lambda at=each, p=new: at.head.register_parameter("gain", p), ValueError),
            message_of(lambda at=each: setattr(at, "tail", nn.Linear(WIDTH, 3)), ValueError),
            message_of(lambda at=each: at.blocks.append(nn.Linear(1, 1)), ValueError),
        ]
        each.head.gain = None
        each.head.dropout = nn.Dropout()
        each.head.register_buffer("mean", torch.zeros(1))
        each.head.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
        each.extra.gain = nn.Parameter(torch.ones(1))
        each.again = each.head  # what is of the model already
        del each.again
        loss_of(each(torch.ones(2, WIDTH))).backward()
    counts = [sum(p.grad is not None for p in each.parameters()) for each in (model, average)]
    return said, counts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_each_rank_would_train_alone_is_refused(pool2, transport):
    whole = sum(1 for _ in make(Stack).parameters())
    for said, counts in pool2.run(additions, transport):
        names = ["'gain'", "'gain'", "'tail'", "'3'"] * 2
        for name, message in zip(names, said, strict=True):
            assert name in message and "before wrapping" in message
        assert counts == [whole, whole]


def test_alone_anything_can_be_added():
    model = FSDP(make(Stack))
    model.gain = nn.Parameter(torch.ones(1))
    model.head = nn.Linear(WIDTH, 3)
    (loss_of(model(torch.ones(2, WIDTH))) * model.gain).sum().backward()
    assert model.gain.grad is not None and model.head.weight.grad is not None
