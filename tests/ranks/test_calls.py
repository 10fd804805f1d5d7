"""One rank alone in a collective call, or ranks in different ones: an error that names each rank's
call and the remedy, never another call's bytes.

On both transports, no matter what the other ranks run meanwhile: another call to zshard, training,
or a collective of the script's own, which zshard does not see; failures within a call, and two
threads.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from groups import own_group
from models import TRANSPORTS, make
from nursery import fork_ranks
from rows import all_refused, all_rows
from scenarios import Stack, Wide, built, floats, loss_of, transport_of
from spawn import on_ranks

import zshard
from zshard import FSDP
from zshard.ranks import stalls
from zshard.state import source

both = pytest.mark.parametrize("transport", TRANSPORTS)


def model_of(transport, **options):
    return FSDP(make(Wide), transport=transport, **options)


def backward(model, number):
    loss_of(model(floats(number))).backward()


CALLS = {  # of (model, optimizer, folder), and its name in an error
    "a forward": (lambda model, *_: model(floats(0)), "torch.no_grad()"),
    "an evaluation": (torch.no_grad()(lambda model, *_: model(floats(0))), "all-gathering param"),
    "state_dict()": (lambda model, *_: model.state_dict(), "state_dict()"),
    "an optimizer's": (lambda model, optimizer, _: optimizer.state_dict(), "state_dict()"),
    "save()": (lambda model, _, folder: zshard.save(folder, model), "save()"),
    "full_tensor()": (
        lambda model, *_: zshard.full_tensor(next(model.parameters()).grad),
        "full_tensor()",
    ),
    "clip_grad_norm_()": (lambda model, *_: model.clip_grad_norm_(1.0), "clip_grad_norm_()"),
    "named_norms()": (lambda model, *_: zshard.named_norms(model), "named_norms()"),
}

# --- the others are in a collective of the script's own -------------------------------------------


def lone(name, transport, folder):
    """Return (the error's kind and text, seconds until it) of the last rank, which is alone."""
    stalls._EVERY = 0.1  # answers sooner
    model = model_of(transport, timeout=2.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    backward(model, dist.get_rank())
    optimizer.step()
    start = time.monotonic()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            CALLS[name][0](model, optimizer, folder)
        dist.barrier()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


LONE = [("a forward", "shm"), *((name, "c10d") for name in list(CALLS)[:5])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("call", "transport"), LONE)
def test_error_reports_that_other_ranks_are_elsewhere(tmp_path, call, transport, world):
    result = fork_ranks(lone, world, call, transport, str(tmp_path / "saved"))[-1]
    assert result.value is not None, result.stderr
    kind, text, seconds = result.value
    assert kind == "PeerTimeoutError" and 1.9 < seconds < 20
    assert CALLS[call][1] in text
    for rank in range(world - 1):
        assert re.search(rf"rank {rank}( \(pid \d+\))? is not in a zshard collective", text), text
    if transport == "c10d" and call != "a forward":
        assert "call it on all of them" in text and "transport='shm'" in text
    assert "has been waiting" not in result.stderr  # the error replaced it


# --- the others are in other calls, or have ended -------------------------------------------------


@both
@pytest.mark.parametrize(
    ("call", "other"), [*((call, "") for call in list(CALLS)[4:]), ("named_norms()", "save()")]
)
@pytest.mark.sampled(3)
@on_ranks(2)
def test_error_names_the_call_of_a_lone_rank(transport, call, other, tmp_path):
    """If all ranks catch the error, a model that they create later works."""
    group = own_group()
    model = model_of(transport, process_group=group)
    backward(model, dist.get_rank())
    with pytest.raises(zshard.DivergenceError) as caught:
        if dist.get_rank() == 0 or other:
            CALLS[call if dist.get_rank() == 0 else other][0](model, None, tmp_path)
        else:
            backward(model, 1)
    words = str(caught.value)
    assert CALLS[call][1] in words and "on all ranks" in words and other in words
    model = model_of(transport, process_group=group)
    backward(model, dist.get_rank())
    torch.optim.SGD(model.parameters(), 0.1).step()
    zshard.save(tmp_path / "later", model)


def runs_longer(transport):
    """The last rank has one batch more than the other."""
    model = model_of(transport)
    for i in range(2 + dist.get_rank()):
        backward(model, i)


@both
def test_error_of_uneven_batches_names_join(transport):
    result = fork_ranks(runs_longer, 2, transport)[1]
    assert "PeerError" in result.stderr and "model.join(loader)" in result.stderr


@both
@on_ranks(2)
def test_caught_wrapping_failure_does_not_affect_later_models(transport):
    group, model = own_group(), make(Wide)
    model.register_buffer("expanded", torch.full((1,), float(dist.get_rank())).expand(5))
    with pytest.raises(RuntimeError, match="single memory location"):
        FSDP(model, transport=transport, process_group=group)
    backward(FSDP(make(Wide), transport=transport, process_group=group), 0)


# --- different calls ------------------------------------------------------------------------------


def calls_of(model, folder):
    """Return the calls that begin with an exchange, by their names in errors."""
    optimizer = zshard.AdamW(model.parameters())
    model(floats(0)).square().sum().backward()
    optimizer.step()
    ema = zshard.EMA(model, 0.9)
    state = model.state_dict()
    zshard.save(folder / "x", model, overwrite=True)
    calls = {
        "save()": lambda: zshard.save(folder / "y", model),
        "join()": lambda: list(model.join([])),
        "load()": lambda: zshard.load(folder / "x", model),
        "summon_full_params()": FSDP.summon_full_params(model, with_grads=True).__enter__,
        "load_state_dict()": lambda: zshard.load_state_dict(model, state),
        "ema.swapped()": ema.swapped().__enter__,
        "clip_grad_norm_()": lambda: model.clip_grad_norm_(1.0),
        "named_norms()": lambda: zshard.named_norms(model),
    }
    if transport_of(model) != "shm":
        calls["export()"] = lambda: list(zshard.export(model))
    return calls


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(3)
def test_ranks_in_three_calls(transport, tmp_path):
    """Each rank is in another call than the next."""
    combination = ("full_shard", transport)
    names = list(calls_of(built(combination, Stack, timeout=10), tmp_path))
    with all_rows() as row:
        for i in range(len(names)):
            name = names[(i + dist.get_rank()) % len(names)]
            calls = calls_of(built(combination, Stack, timeout=10), tmp_path)
            with row(name):
                with pytest.raises(zshard.DivergenceError) as caught:
                    calls[name]()
                text = str(caught.value).partition("\n")[0]
                assert name in text and f"rank {dist.get_world_size()}" not in text


# --- a failure within a body that communicates ----------------------------------------------------


@contextlib.contextmanager
def rank_1_fails_with_chunk(n):
    """Context manager in which rank 1 fails with the n-th chunk that it would receive."""
    usual, received = source.ChunkMemory.of, []

    def of(*arguments):
        received.append(arguments)
        if dist.get_rank() == 1 and len(received) == n:
            raise MemoryError("planted")
        return usual(*arguments)

    source.ChunkMemory.of = of
    try:
        yield
    finally:
        source.ChunkMemory.of = usual


def load_from_rank_0(model, state, value):
    state = {name: torch.full_like(each, value) for name, each in state.items()}
    zshard.load_state_dict(model, state if dist.get_rank() == 0 else None, from_rank0=True)


def one_tensor():
    return torch.nn.Linear(4, 4, bias=False)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("build", "chunk"), [(Stack, 1), (Stack, 2), (one_tensor, 1)])
@on_ranks(2, 3)
def test_failure_in_a_body_that_communicates_is_reported(transport, build, chunk):
    """Rank 1 fails in a load; then a load of other values is right, or says why it cannot be."""
    model = built(("full_shard", transport), build, timeout=10)
    state = model.state_dict()
    with rank_1_fails_with_chunk(chunk), pytest.raises(Exception) as caught:
        load_from_rank_0(model, state, 1.0)
    message = f"{type(caught.value).__name__}: {caught.value}".partition("\n")[0]
    if dist.get_rank() == 1:
        assert message == "MemoryError: planted"
    else:
        assert message.startswith("DivergenceError: ") and "ranks diverged" in message
        assert "rank 1 raised MemoryError: planted" in message
    try:
        load_from_rank_0(model, state, 2.0)
    except zshard.DivergenceError as error:
        # Ranks over shm that wait for each other cannot continue; all others can.
        assert transport == "shm" and build is Stack and "waiting for each other" in str(error)
    else:
        assert all(bool((each == 2.0).all()) for each in model.state_dict().values())


# --- two threads ----------------------------------------------------------------------------------


def two_threads(transport, apart):
    """Train two models in two threads, started in another order on each rank; return their
    errors."""
    dist.init_process_group("gloo")
    rank, errors = dist.get_rank(), []
    groups = [dist.new_group() if apart else None for _ in range(2)]
    options = {"timeout": 30 if apart else 1.5}
    models = [
        built(("full_shard", transport), Stack, process_group=group, **options) for group in groups
    ]
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
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=train, args=((i + rank) % 2,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return errors


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_threads(transport, apart):
    """With a group each they are right; over one group they fail, without ending the process."""
    known = ("RuntimeError: two threads", "DivergenceError", "Peer")  # or too late
    for result in fork_ranks(two_threads, 2, transport, apart, check=True):
        assert not apart or result.value == []
        assert [text for text in result.value if not text.startswith(known)] == []


# --- names ----------------------------------------------------------------------------------------


def test_private_transports_are_unknown():
    def wrap(name):
        return lambda: FSDP(torch.nn.Linear(2, 2), transport=name)

    names = ("flat", "beside", "_flat", "self", "tcp")
    all_refused({name: (wrap(name), ValueError, f"'c10d', got '{name}'") for name in names})
