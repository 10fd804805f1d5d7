"""Units with a process group of their own (experts) within a model: norms, memory and the summary.

The one idea: such a unit is a model of its own. What sums over a model's ranks has no one answer
for it and the rest, and must say so; what counts bytes on this rank must count both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import passing_groups
from models import TRANSPORTS, make
from scenarios import floats, loss_of, message_of
from spawn import RankPool
from torch import Tensor, nn

import zshard
from zshard import FSDP

total_norm = torch.nn.utils.get_total_norm
STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


class Experts(nn.Module):
    """Two experts between layers that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 9), nn.Linear(9, 9)
        self.experts = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        for expert in self.experts:
            x = expert(x)
        return self.last(x)


def groups_of(size: int) -> Any:
    """This rank's group of so many neighbours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    made = [dist.new_group([*range(n, n + size)]) for n in range(0, world, size)]
    return made[rank // size]


def sharded(transport: str, strategy: str, size: int) -> Any:
    model, own = make(Experts), groups_of(size)
    with torch.no_grad():
        for expert in model.experts:
            expert.weight.mul_(dist.get_rank() // size + 1)
    how: dict[str, Any] = {"transport": transport, "strategy": strategy}
    for i in range(2):
        model.experts[i] = FSDP(model.experts[i], process_group=own, **how)
    return FSDP(model, auto_wrap_policy=None, **how)


def parted(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Its parameters: shared by all, and of experts."""
    named = list(model.named_parameters())
    return [p for n, p in named if "experts" not in n], [p for n, p in named if "experts" in n]


@passing_groups()
def norms(transport: str, strategy: str, size: int) -> Any:
    model = sharded(transport, strategy, size)
    loss_of(model(floats(dist.get_rank(), 3))).backward()
    shared, own = parted(model)
    grads = [p.grad for p in model.parameters()]
    for order in (grads, grads[::-1], [p.grad for p in [*shared[:1], *own[:1]]]):
        said = message_of(lambda order=order: total_norm(order), NotImplementedError)
        assert "process group" in said and "once for the parameters of each" in said, said
    if strategy == "no_shard":  # the parameters are whole, but not the same on each rank
        message_of(lambda: total_norm(model.parameters()), NotImplementedError)
    found = [float(total_norm([p.grad for p in each])) for each in (shared, own)]
    squares = [n * n for n in zshard.named_norms(model, grads=True).values()]
    assert sum(n * n for n in found) == pytest.approx(sum(squares))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_norm_over_experts_and_the_rest_is_refused(
    pool2: RankPool, transport: str, strategy: str
) -> None:
    (shared, own), (other_shared, other) = pool2.run(norms, transport, strategy, 1)
    assert shared == other_shared and own != other


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_norm_over_experts_of_pairs_of_ranks_is_refused(pool4: RankPool, transport: str) -> None:
    found = pool4.run(norms, transport, "full_shard", 2)
    assert len({shared for shared, _ in found}) == 1
    assert found[0] == found[1] and found[2] == found[3] != found[1]
