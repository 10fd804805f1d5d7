"""The transports from Python: the same bytes and errors over shm and over gloo.

test_c_comm.py tests transports in C. Here they interact with torch: process groups by name,
exceptions, dispatch modes, and the choice between the two.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import comm_of_all
from nursery import fork_ranks
from spawn import RankPool, on_ranks, ranks
from torch.utils._python_dispatch import TorchDispatchMode

both = pytest.mark.parametrize("transport", ["shm", "c10d"])


def connect(transport: str, timeout: float | None = None) -> Any:
    """This rank's transport over all ranks."""
    return comm_of_all(transport, timeout)


# --- received data -------------------------------------------------------------------------------


def exchange(transport: str) -> list[list[bytes]]:
    comm = connect(transport)
    assert (comm.transport, comm.rank, comm.world) == (
        transport,
        dist.get_rank(),
        dist.get_world_size(),
    )
    sizes = [0, 1, 63, 64, 4096]
    return [comm.exchange(bytes([comm.rank + 1]) * size) for size in sizes]


@both
@ranks(2, 3)
def test_exchange(pool: RankPool, transport: str) -> None:
    wanted = [
        [bytes([rank + 1]) * size for rank in range(pool.world)] for size in (0, 1, 63, 64, 4096)
    ]
    assert pool.run(exchange, transport) == [wanted] * pool.world


def broadcast(transport: str, numel: int, root: int) -> list[str]:
    comm = connect(transport)
    wanted = torch.randn(numel, generator=torch.Generator().manual_seed(root))
    tensor = wanted.clone() if comm.rank == root else torch.zeros(numel)
    comm.broadcast(tensor, root)
    return differences(tensor, wanted)


@both
@pytest.mark.parametrize("numel", [0, 1, 700_001])
@ranks(2, 3)
def test_broadcast(pool: RankPool, transport: str, numel: int) -> None:
    for root in range(pool.world):
        assert pool.run(broadcast, transport, numel, root) == [[]] * pool.world


@both
@on_ranks(2)
def test_invalid_arguments_leave_the_transport_usable(transport):
    comm = connect(transport)
    with pytest.raises(ValueError, match="4097 bytes"):
        comm.exchange(bytes(4097))
    with pytest.raises(ValueError, match="out of range"):
        comm.broadcast(torch.zeros(1), comm.world)
    with pytest.raises(ValueError, match="contiguous"):
        comm.broadcast(torch.zeros(4, 4).t(), 0)
    comm.exchange(b"still in step")


class Deny(TorchDispatchMode):
    """A mode that refuses every operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was dispatched")


def exchange_under_a_mode(transport: str) -> list[bytes]:
    comm = connect(transport)
    tensor = torch.zeros(8)
    with Deny():
        comm.broadcast(tensor, 0)
        return comm.exchange(b"x")


@both
def test_dispatch_modes_do_not_see_messages(pool2: RankPool, transport: str) -> None:
    assert pool2.run(exchange_under_a_mode, transport) == [[b"x", b"x"]] * 2


@on_ranks(2)
def test_unknown_group():
    from zshard import _core

    with pytest.raises(RuntimeError, match="no such group"):
        _core.Comm.c10d("no such group", 0, 2, 1.0)


# --- missing peers -------------------------------------------------------------------------------


def wait_in_vain(transport: str, fault: str) -> tuple[str, str, float]:
    """Rank 1 fails as `fault` describes; return rank 0's error, and the time until it."""
    comm = connect(transport, timeout=1.5 if fault == "late" else 60.0)
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
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


def outcome(transport: str, fault: str) -> tuple[str, str, float]:
    result = fork_ranks(wait_in_vain, 2, transport, fault, until=0)[0]
    assert result.value is not None, result.stderr
    return result.value


@both
def test_dead_peer_is_an_error_soon(transport: str) -> None:
    kind, words, seconds = outcome(transport, "dies")
    assert kind == "PeerError" and seconds < 5
    assert words.startswith("rank 1 (pid ") and "rank 0 was" in words


@both
def test_error_quotes_a_failed_peer(transport: str) -> None:
    kind, words, seconds = outcome(transport, "gives up")
    assert kind == "PeerError" and seconds < 5
    assert "rank 1" in words and "failed: LookupError: batch 7 is gone" in words


@both
def test_late_peer_is_a_timeout(transport: str) -> None:
    kind, words, seconds = outcome(transport, "late")
    assert kind == "PeerTimeoutError" and 1.4 < seconds < 30
    assert ("rank 1 to all-gather message" if transport == "shm" else "all-gathering") in words


def interrupted(transport: str) -> bool:
    """Ctrl-C reaches a rank that waits in C."""
    import signal

    comm = connect(transport)
    comm.exchange(b"all are there")
    if comm.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            comm.exchange(b"in vain")
        return time.monotonic() - start < 2
    time.sleep(60)
    return True


@both
def test_waiting_can_be_interrupted(transport: str) -> None:
    first = fork_ranks(interrupted, 2, transport, until=0)[0]
    assert first.value is True, first.stderr


# --- the same training over both ------------------------------------------------------------------


def losses(transport: str, strategy: str, dtype: str) -> list[float]:
    """Return the losses of a few steps of a small model; every rank has its own batches."""
    from zshard import FSDP

    torch.manual_seed(0)
    layers: list[Callable] = []
    for width in (24, 40, 16):
        layers += [torch.nn.LazyLinear(width), torch.nn.GELU(), torch.nn.LayerNorm(width)]
    model = torch.nn.Sequential(*layers)
    model(torch.zeros(2, 12))
    model = FSDP(model.to(getattr(torch, dtype)), strategy=strategy, transport=transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(100 + dist.get_rank())
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (
            model(torch.randn(4, 12, generator=source).to(getattr(torch, dtype)))
            .float()
            .pow(2)
            .mean()
        )
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
