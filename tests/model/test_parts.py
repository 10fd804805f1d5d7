"""Parts of a sharded model that a script calls by themselves, as generate() does with an encoder.

A part that is no unit may use weights of a unit above it. They have to be whole then:
an embedding looks up in a slice without a word.
"""

from __future__ import annotations

import pytest
import torch
from models import COMBINATIONS, Block, loss_of, make
from torch import nn

from zshard import FSDP


def part_by_itself(combination):
    """How far a part is off that is called by itself and uses the root's weights, (without, with
    gradients): an embedding so large that each rank has a slice that it could look up in."""
    plain, ids = make(Translator), torch.arange(6).reshape(2, 3)
    model = FSDP(make(Translator), strategy=combination[0], transport=combination[1])
    with torch.no_grad():
        first = (model.encoder(ids) - plain.encoder(ids)).abs().max().item()
    second = (model.encoder(ids) - plain.encoder(ids)).abs().max().item()
    loss_of(model(ids)).backward()
    return first, second


class Translator(nn.Module):
    """An encoder whose embedding is the head's weight, and whose blocks are units."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3000, 9)
            self.blocks = nn.ModuleList(Block(9) for _ in range(3))
            self.norm = nn.LayerNorm(9)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x + torch.zeros(9))  # which spreads a column of width 1
            return self.norm(x)

    def __init__(self):
        super().__init__()
        self.encoder = Translator.Encoder()
        self.head = nn.Linear(9, 3000, bias=False)
        self.head.weight = self.encoder.embed.weight

    def forward(self, ids):
        return self.head(self.encoder(ids))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda both: " ".join(both))
def test_a_part_called_by_itself_has_whole_weights(pool2, combination):
    assert pool2.run(part_by_itself, combination) == [(0.0, 0.0)] * 2
