"""Ranks in different public calls, a failure within one that communicates, and two threads: errors
that name what each rank was in, never another call's bytes."""

from __future__ import annotations

import contextlib
import mmap
import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import TRANSPORTS, make
from nursery import fork_ranks
from scenarios import Stack, floats, transport_of
from spawn import ranks

import zshard
from zshard import FSDP
from zshard.ranks import agreement
from zshard.state import source
from zshard.units.units import state_of


def built(transport, build=Stack, **options):
    """Return a model on transports of its own: a test may leave them broken."""
    given = {"process_group": own_group(), "transport": transport, "timeout": 10, **options}
    return FSDP(make(build), **given)


# --- different calls ------------------------------------------------------------------------------


def summoned(model):
    with FSDP.summon_full_params(model, with_grads=True):
        pass


def swapped(ema):
    with ema.swapped():
        pass


def calls_of(model, folder):
    """Return the calls that begin with an exchange, by their names in errors."""
    optimizer = zshard.AdamW(model.parameters())
    model(floats(0)).square().sum().backward()
    optimizer.step()
    ema = zshard.EMA(model, 0.9)
    state = model.state_dict()
    zshard.save(folder / "x", model, overwrite=True)
    made = {
        "save()": lambda: zshard.save(folder / "y", model),
        "join()": lambda: list(model.join([])),
        "load()": lambda: zshard.load(folder / "x", model),
        "summon_full_params()": lambda: summoned(model),
        "load_state_dict()": lambda: zshard.load_state_dict(model, state),
        "ema.swapped()": lambda: swapped(ema),
        "clip_grad_norm_()": lambda: model.clip_grad_norm_(1.0),
        "named_norms()": lambda: zshard.named_norms(model),
    }
    if transport_of(model) != "shm":
        made["export()"] = lambda: list(zshard.export(model))
    return made


@passing_groups()
def in_different_calls(transport, folder):
    """Return what is wrong with the errors of ranks that are each in another call than the next."""
    names, found = list(calls_of(built(transport), folder)), []
    for i in range(len(names)):
        calls = calls_of(built(transport), folder)
        mine, *others = (names[(i + dist.get_rank() + k) % len(names)] for k in range(3))
        try:
            calls[mine]()
            found.append(f"{mine}: no error beside {others}")
        except zshard.DivergenceError as error:
            text = str(error).partition("\n")[0]
            if mine not in text:
                found.append(f"{mine} is not in: {text}")
            if f"rank {dist.get_world_size()}" in text:
                found.append(f"no such rank: {text}")
    return found


@ranks(3)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_in_three_calls(pool, transport, tmp_path):
    assert pool.run(in_different_calls, transport, tmp_path) == [[]] * pool.world


# --- a failure within a body that communicates ----------------------------------------------------


class Fails:
    """Rank 1 fails with the n-th chunk that it would receive."""

    def __init__(self, n):
        self.left = n if dist.get_rank() == 1 else -1

    def __enter__(self):
        self.inner = source.ChunkMemory.of
        source.ChunkMemory.of = lambda *given: self.of(*given)
        return self

    def __exit__(self, *_):
        source.ChunkMemory.of = self.inner

    def of(self, *given):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("planted")
        return self.inner(*given)


def load_from_rank_0(model, state, value):
    state = {name: torch.full_like(each, value) for name, each in state.items()}
    zshard.load_state_dict(model, state if dist.get_rank() == 0 else None, from_rank0=True)


def one_tensor():
    return torch.nn.Linear(4, 4, bias=False)


@passing_groups()
def failing_body(transport, build, chunk):
    """Return the error of a load in which rank 1 fails; then what a load of other values gives, or
    why none is possible."""
    model = built(transport, build)
    state, message = model.state_dict(), ""
    with Fails(chunk):
        try:
            load_from_rank_0(model, state, 1.0)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        load_from_rank_0(model, state, 2.0)
    except zshard.DivergenceError as error:
        return message, str(error).partition("\n")[0]
    return message, [n for n, each in model.state_dict().items() if not bool((each == 2.0).all())]


@ranks(2, 3)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("build", "chunk"), [(Stack, 1), (Stack, 2), (one_tensor, 1)])
def test_failure_in_a_body_that_communicates_is_reported(pool, transport, build, chunk):
    for rank, (message, then) in enumerate(pool.run(failing_body, transport, build, chunk)):
        if rank == 1:
            assert message == "MemoryError: planted"
        else:
            assert message.startswith("DivergenceError: ") and "ranks diverged" in message
            assert "rank 1 raised MemoryError: planted" in message
        # Ranks over shm that wait for each other cannot continue; all others can.
        stuck = transport == "shm" and build is Stack and "waiting for each other" in then
        assert then == [] or stuck


# --- memory ---------------------------------------------------------------------------------------


def short_of_memory(transport):
    """Return what ranks get of an exchange for which rank 1 cannot allocate, and of the next."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    comm = state_of(FSDP(torch.nn.Linear(8, 8), transport=transport)).comms.all
    found = []
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 16), before[1]))
    with agreement.PublicCall("save()"):
        try:
            comm.exchange(bytes([65 + rank]) * 4096)
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    resource.setrlimit(resource.RLIMIT_AS, before)
    if rank == 1:  # which continues as if nothing had failed
        with agreement.PublicCall("load()"), contextlib.suppress(zshard.DivergenceError):
            comm.exchange(b"other")
    with agreement.PublicCall("save()"):
        return [*found, comm.exchange(bytes([97 + rank]))]


def test_rank_without_memory_for_an_exchange():
    results = [each.value for each in fork_ranks(short_of_memory, 2, "c10d", check=True)]
    assert results[1][0].startswith("MemoryError: ")
    assert results[0][0].startswith("DivergenceError: ranks diverged: rank 0 was in save(), but ")
    assert [each[1] for each in results] == [[b"a", b"b"]] * 2


# --- two threads ----------------------------------------------------------------------------------


def two_threads(transport, apart):
    """Train two models in two threads, started in another order on each rank; return their
    errors."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    groups = [dist.new_group() if apart else None for _ in range(2)]
    limit = 30 if apart else 1.5
    models = [built(transport, process_group=group, timeout=limit) for group in groups]
    together = threading.Barrier(2)

    def train(i):
        optimizer = torch.optim.SGD(models[i].parameters(), lr=0.1)
        together.wait()
        try:
            for step in range(10):
                optimizer.zero_grad()
                models[i](floats(rank, step)).square().mean().backward()
                optimizer.step()
        except Exception as error:
            found[i] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=train, args=((i + rank) % 2,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_threads_over_one_group(transport):
    for result in fork_ranks(two_threads, 2, transport, False):
        assert result.returncode == 0, result  # nothing has aborted the process
        for text in result.value.values():
            known = ("RuntimeError: two threads", "DivergenceError", "Peer")  # or too late
            assert text.startswith(known), text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_threads_with_a_group_each(transport):
    results = fork_ranks(two_threads, 2, transport, True, check=True)
    assert [each.value for each in results] == [{}, {}]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flat", "beside", "_flat", "self", "tcp"])
def test_private_transports_are_unknown(name):
    with pytest.raises(ValueError, match=f"one of 'auto', 'shm', .*, got '{name}'"):
        FSDP(torch.nn.Linear(2, 2), transport=name)
