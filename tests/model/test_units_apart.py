"""Units with a process group of their own (experts) within a model: norms, memory and the summary.

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
from scenarios import floats, loss_of, message_of
from spawn import RankPool, on_ranks
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


@passing_groups()
def norms(transport: str, strategy: str, size: int) -> Any:
    model = sharded(transport, strategy, size)
    loss_of(model(floats(dist.get_rank(), 3))).backward()
    shared, own = parted(model)
    grads = [p.grad for p in model.parameters()]
    for order in (grads, grads[::-1], [p.grad for p in [*shared[:1], *own[:1]]]):
        said = message_of(lambda order=order: total_norm(order), NotImplementedError)
        assert "process group" in said and "once for the parameters of each" in said, said
    if strategy == "no_shard":  # unsharded, but not the same on each rank
        message_of(lambda: total_norm(model.parameters()), NotImplementedError)
    found = [float(total_norm([p.grad for p in each])) for each in (shared, own)]
    squares = [n * n for n in zshard.named_norms(model, grads=True).values()]
    assert sum(n * n for n in found) == pytest.approx(sum(squares))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_norm_across_experts_and_shared_parameters_is_refused(
    pool2: RankPool, transport: str, strategy: str
) -> None:
    (shared, own), (other_shared, other) = pool2.run(norms, transport, strategy, 1)
    assert shared == other_shared and own != other


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_norm_across_experts_of_pairs_is_refused(pool4: RankPool, transport: str) -> None:
    found = pool4.run(norms, transport, "full_shard", 2)
    assert len({shared for shared, _ in found}) == 1
    assert found[0] == found[1] and found[2] == found[3] != found[1]


# --- memory and the summary -------------------------------------------------------------------------


@passing_groups()
def bytes_held(transport: str, strategy: str, size: int) -> Any:
    """Return memory() of the model and of its submodules, after a step and before it."""
    model = sharded(transport, strategy, size)
    predicted = model.memory("predicted")
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(floats(dist.get_rank(), step))).backward()
        optimizer.step()
    now, alone = model.memory(), [each.memory() for each in model.experts]
    shared, own = parted(model)
    assert sum(p.numel() * 8 for p in [*shared, *own]) <= now["optimizer"]
    units = [each._zshard_state.unit for each in FSDP.fsdp_modules(model)]
    assert now["shards"] == sum(unit.bytes["shard"] for unit in units), "experts' are there"
    full = strategy == "no_shard"  # then they are the script's
    assert now["grads"] == (0 if full else sum(unit.bytes["grad"] for unit in units))
    assert alone[0]["transport"] == alone[1]["transport"] <= now["transport"]
    for found in (now, predicted, model.memory("peak")):
        assert list(found) == list(now)
        parts = [v for name, v in found.items() if name not in ("total", "offloaded")]
        assert found["total"] == sum(parts)
    same = now.keys() - {"transport", "total", "optimizer"} - ({"grads"} if full else set())
    assert {part: predicted[part] for part in same} == {part: now[part] for part in same}
    lines = model.summary().splitlines()
    return now["shards"], lines[3:6], lines[7]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_and_summary_count_experts(pool2: RankPool, transport: str, strategy: str) -> None:
    for shards, (root, *experts), total in pool2.run(bytes_held, transport, strategy, 1):
        assert root.split()[-1] == strategy
        assert [line.endswith(f"{strategy} over 1 rank(s)") for line in experts] == [True] * 2
        assert total.split()[:3] == ["3", "units", "360"]
        assert total.endswith(f"{shards / 1024:.1f} KiB")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_counts_experts_of_pairs(pool4: RankPool, transport: str) -> None:
    for _, (_, *experts), _ in pool4.run(bytes_held, transport, "full_shard", 2):
        assert all(line.endswith("full_shard over 2 rank(s)") for line in experts)


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
