"""Units with their own process group (experts) within a model: norms, memory and the summary.

Such a unit is a separate model. A sum over a model's ranks has no single value for it and the rest,
so it is refused; counts of bytes on this rank include both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import passing_groups
from models import TRANSPORTS, make
from scenarios import floats, loss_of, message_of, units_of
from spawn import on_ranks
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
    """Return this rank's group of so many neighbors."""
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
    """Return its parameters: shared by all, and of experts."""
    named = list(model.named_parameters())
    return [p for n, p in named if "experts" not in n], [p for n, p in named if "experts" in n]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, 4)
@passing_groups()
def test_norm_across_experts_and_shared_parameters_is_refused(transport, strategy):
    size = dist.get_world_size() // 2
    model = sharded(transport, strategy, size)
    loss_of(model(floats(dist.get_rank(), 3))).backward()
    shared, own = parted(model)
    grads = [p.grad for p in model.parameters()]
    for order in (grads, grads[::-1], [p.grad for p in [*shared[:1], *own[:1]]]):
        said = message_of(lambda order=order: total_norm(order), NotImplementedError)
        assert "process group" in said and "once for the parameters of each" in said, said
    if strategy == "no_shard":  # unsharded, but not the same on each rank
        message_of(lambda: total_norm(model.parameters()), NotImplementedError)
    norms = [float(total_norm([p.grad for p in each])) for each in (shared, own)]
    squares = [n * n for n in zshard.named_norms(model, grads=True).values()]
    assert sum(n * n for n in norms) == pytest.approx(sum(squares))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, norms)
    assert len({shared for shared, _ in everyone}) == 1
    for rank, (_, theirs) in enumerate(everyone):
        assert (theirs == everyone[0][1]) == (rank < size)


# --- memory and the summary -------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, 4)
@passing_groups()
def test_memory_and_summary_count_experts(transport, strategy):
    size = dist.get_world_size() // 2
    model = sharded(transport, strategy, size)
    predicted = model.memory("predicted")
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
        optimizer.step()
    now, alone = model.memory(), [each.memory() for each in model.experts]
    assert sum(p.numel() * 8 for p in model.parameters()) <= now["optimizer"]
    units = units_of(model)
    assert now["shards"] == sum(unit.bytes["shard"] for unit in units), "experts' are there"
    full = strategy == "no_shard"  # then they are the script's
    assert now["grads"] == (0 if full else sum(unit.bytes["grad"] for unit in units))
    assert alone[0]["transport"] == alone[1]["transport"] <= now["transport"]
    for memory in (now, predicted, model.memory("peak")):
        assert list(memory) == list(now)
        parts = [v for name, v in memory.items() if name not in ("total", "offloaded")]
        assert memory["total"] == sum(parts)
    same = now.keys() - {"transport", "total", "optimizer"} - ({"grads"} if full else set())
    assert {part: predicted[part] for part in same} == {part: now[part] for part in same}
    root, *experts, _, total = model.summary().splitlines()[3:8]
    assert root.split()[-1] == strategy
    assert [line.endswith(f"{strategy} over {size} rank(s)") for line in experts] == [True] * 2
    assert total.split()[:3] == ["3", "units", "360"]
    assert total.endswith((f"{now['shards'] / 1024:.1f} KiB", f"{now['shards']} B"))


@on_ranks(2)
@passing_groups()
def test_memory_check_excludes_existing_experts():
    own, model = groups_of(1), nn.Sequential(nn.Linear(8, 8), nn.Linear(1024, 1024))
    model[1] = FSDP(model[1], process_group=own)
    FSDP(model, memory_limit="3MiB", auto_wrap_policy=None)
    with pytest.raises(MemoryError):
        FSDP(nn.Sequential(nn.Linear(1024, 1024)), memory_limit="3MiB")


def test_predict_memory_refuses_a_model_with_sharded_modules() -> None:
    model = make(Experts)
    model.experts[0] = FSDP(model.experts[0])
    with pytest.raises(ValueError, match=r"'experts.0' is sharded already.*before the first FSDP"):
        zshard.predict_memory(model, 2)
