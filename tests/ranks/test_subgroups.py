"""Models on some of the ranks: their groups connect, whatever other groups exist or existed."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from groups import PATIENCE, passing_groups
from models import make
from scenarios import Stack, forward_backward
from spawn import ranks

from zshard import FSDP


def norm_on(group, transport="c10d"):
    """Return the norm of the gradients of a model over ranks of `group`."""
    model = FSDP(make(Stack), process_group=group, transport=transport)
    forward_backward(model, dist.get_rank())
    return float(model.clip_grad_norm_(1.0))


@passing_groups()
def beside_more_groups():
    """Rank 0 is in two groups that rank 1 is not in."""
    pair = dist.new_group([0, 1], timeout=PATIENCE)
    for others in ([0, 2], [0]):
        dist.new_group(others, timeout=PATIENCE)
    return norm_on(pair) if dist.get_rank() < 2 else None


def test_ranks_may_be_in_different_groups(pool3):
    first, second, outside = pool3.run(beside_more_groups, timeout=60)
    assert first == second > 0 and outside is None


def after_destroyed_ones():
    """Each round's groups are destroyed: the next would have their names, by torch's count."""
    found = []
    for _ in range(5):
        with passing_groups():
            pair = dist.new_group([0, 1], timeout=PATIENCE)
            found.append(norm_on(pair) if dist.get_rank() < 2 else None)
        dist.barrier()
    return found


def test_groups_may_have_been_destroyed(pool3):
    first, second, _ = pool3.run(after_destroyed_ones, timeout=60)
    assert first == second == [first[0]] * 5 and first[0] > 0


@passing_groups()
def left_of_three_groups(transport: str) -> int:
    """Return how many groups are left of three that models were trained on."""
    known = set(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        group = dist.new_group()
        norm_on(group, transport=transport)
        dist.barrier()
        dist.destroy_process_group(group)
    return len(set(dist.distributed_c10d._world.pg_map) - known)


@ranks(2)
@pytest.mark.parametrize(("transport", "own"), [("shm", 0), ("c10d", 1)])
def test_internal_groups_end_with_the_scripts_groups(pool, transport, own):
    """Those of the last one exist until zshard checks again."""
    assert pool.run(left_of_three_groups, transport) == [own, own]
