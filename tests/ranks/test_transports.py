"""The transports from Python: the same bytes and errors over shm and over gloo.

test_c_comm.py tests transports in C. Here they interact with torch: process groups by name,
exceptions, dispatch modes, groups of some of the ranks, and the choice between the two.
"""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import PATIENCE, comm_of_all, passing_groups
from models import TRANSPORTS, make
from nursery import fork_ranks
from scenarios import Stack, forward_backward
from spawn import RankPool, on_ranks, ranks
from torch.utils._python_dispatch import TorchDispatchMode

from zshard import FSDP, _core

both = pytest.mark.parametrize("transport", TRANSPORTS)

# --- received data -------------------------------------------------------------------------------


class Deny(TorchDispatchMode):
    """A mode that refuses every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was dispatched")


@both
@on_ranks(2, 3)
def test_exchange(transport):
    """Dispatch modes do not see it."""
    comm, world = comm_of_all(transport), dist.get_world_size()
    assert (comm.transport, comm.rank, comm.world) == (transport, dist.get_rank(), world)
    for size in (0, 1, 63, 64, 4096):
        with Deny():
            received = comm.exchange(bytes([comm.rank + 1]) * size)
        assert received == [bytes([rank + 1]) * size for rank in range(world)]


@both
@pytest.mark.parametrize("numel", [0, 1, 700_001])
@on_ranks(2, 3)
def test_broadcast(transport, numel):
    comm = comm_of_all(transport)
    for root in range(dist.get_world_size()):
        wanted = torch.randn(numel, generator=torch.Generator().manual_seed(root))
        tensor = wanted.clone() if comm.rank == root else torch.zeros(numel)
        with Deny():
            comm.broadcast(tensor, root)
        assert differences(tensor, wanted) == []


@both
@on_ranks(2)
def test_invalid_arguments_leave_the_transport_usable(transport):
    comm = comm_of_all(transport)
    with pytest.raises(ValueError, match="4097 bytes"):
        comm.exchange(bytes(4097))
    with pytest.raises(ValueError, match="out of range"):
        comm.broadcast(torch.zeros(1), comm.world)
    with pytest.raises(ValueError, match="contiguous"):
        comm.broadcast(torch.zeros(4, 4).t(), 0)
    comm.exchange(b"still in step")
    with pytest.raises(RuntimeError, match="no such group"):
        _core.Comm.c10d("no such group", 0, 2, 1.0)


# --- missing peers -------------------------------------------------------------------------------


def wait_in_vain(transport: str, fault: str) -> tuple[str, str, float, Any]:
    """Rank 1 fails as `fault` describes; return rank 0's error, the time until it, and errno."""
    comm = comm_of_all(transport, timeout=1.5 if fault == "late" else 60.0)
    comm.exchange(b"all are there")
    if comm.rank == 1:
        time.sleep(0.2)
        if fault == "late":
            time.sleep(60.0)
        if fault == "gives up":
            comm.abort("LookupError: batch 7 is gone")
        os._exit(3)
    start = time.monotonic()
    try:
        comm.exchange(b"in vain")
    except RuntimeError as error:
        assert error.args == (str(error),)
        seconds = time.monotonic() - start
        return type(error).__name__, str(error), seconds, getattr(error, "errno", None)
    return "", "", 0.0, None


@both
@pytest.mark.parametrize("fault", ["dies", "gives up", "late"])
def test_missing_peer_is_an_error(transport: str, fault: str) -> None:
    result = fork_ranks(wait_in_vain, 2, transport, fault, until=0)[0]
    assert result.value is not None, result.stderr
    kind, words, seconds, number = result.value
    assert kind == ("PeerTimeoutError" if fault == "late" else "PeerError") and number is None
    if fault == "late":
        assert 1.4 < seconds < 30
        assert ("rank 1 to all-gather message" if transport == "shm" else "all-gathering") in words
        return
    assert seconds < 5
    assert words.startswith("rank 1 (pid ")
    assert ("rank 0 was" if fault == "dies" else "failed: LookupError: batch 7 is gone") in words


# --- the same training over both ------------------------------------------------------------------


def losses(transport: str, strategy: str, dtype: str) -> list[float]:
    """Return the losses of a few steps of a small model; every rank has its own batches."""
    torch.manual_seed(0)
    layers: list[Any] = []
    for width in (24, 40, 16):
        layers += [torch.nn.LazyLinear(width), torch.nn.GELU(), torch.nn.LayerNorm(width)]
    model = torch.nn.Sequential(*layers)
    model(torch.zeros(2, 12))
    kind = getattr(torch, dtype)
    model = FSDP(model.to(kind), strategy=strategy, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(100 + dist.get_rank())
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 12, generator=source).to(kind)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(2, 3)
def test_transports_are_bit_identical(pool: RankPool, strategy: str, dtype: str) -> None:
    shm, c10d = (pool.run(losses, transport, strategy, dtype) for transport in ("shm", "c10d"))
    assert shm == c10d
    for values in shm:
        assert len(set(values)) == 5


# --- groups of some of the ranks ------------------------------------------------------------------


def norm_on(group: Any, transport: str = "c10d") -> float:
    """Return the norm of the gradients of a model over ranks of `group`."""
    model = FSDP(make(Stack), process_group=group, transport=transport)
    forward_backward(model, dist.get_rank())
    return float(model.clip_grad_norm_(1.0))


def norm_on_a_pair(*others: list[int]) -> "float | None":
    """Return the norm on ranks 0 and 1, which may be in other groups, too; None on other ranks."""
    with passing_groups():
        pair = dist.new_group([0, 1], timeout=PATIENCE)
        for each in others:
            dist.new_group(each, timeout=PATIENCE)
        norm = norm_on(pair) if dist.get_rank() < 2 else None
    dist.barrier()
    return norm


def test_ranks_may_be_in_different_groups(pool3: RankPool) -> None:
    first, second, outside = pool3.run(norm_on_a_pair, [0, 2], [0], timeout=60)
    assert first == second > 0 and outside is None


@on_ranks(3)
def test_groups_may_have_been_destroyed():
    """Each round's groups are destroyed: the next would have their names, by torch's count."""
    norms = [norm_on_a_pair() for _ in range(5)]
    assert norms == [norms[0]] * 5 and (norms[0] is None) == (dist.get_rank() == 2)


@pytest.mark.parametrize(("transport", "own"), [("shm", 0), ("c10d", 1)])
@on_ranks(2)
@passing_groups()
def test_internal_groups_end_with_the_scripts_groups(transport, own):
    """Those of the last one exist until zshard checks again."""
    known = set(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        group = dist.new_group()
        norm_on(group, transport=transport)
        dist.barrier()
        dist.destroy_process_group(group)
    assert len(set(dist.distributed_c10d._world.pg_map) - known) == own
