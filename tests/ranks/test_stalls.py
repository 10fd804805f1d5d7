"""One rank alone in a collective call: the error names the call and the remedy.

On both transports, whatever the other ranks do meanwhile: another call to zshard, training, or a
collective of the script's own, which zshard does not see.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import TRANSPORTS, make
from nursery import fork_ranks
from scenarios import Wide, floats, loss_of
from spawn import on_ranks

import zshard
from zshard import FSDP
from zshard.ranks import stalls

both = pytest.mark.parametrize("transport", TRANSPORTS)


def model_of(transport, **options):
    return FSDP(make(Wide), transport=transport, **options)


def backward(model, number):
    loss_of(model(floats(number))).backward()


def evaluates(model, optimizer, folder):
    with torch.no_grad():
        model(floats(0))


def sums_up(model, optimizer, folder):
    model.state_dict()


def looks_at_the_optimizer(model, optimizer, folder):
    optimizer.state_dict()


def saves(model, optimizer, folder):
    zshard.save(folder, model)


def looks_at_a_gradient(model, optimizer, folder):
    zshard.full_tensor(next(model.parameters()).grad)


def clips(model, optimizer, folder):
    model.clip_grad_norm_(1.0)


def takes_norms(model, optimizer, folder):
    zshard.named_norms(model)


NAMES = {
    evaluates: "all-gathering parameters",
    sums_up: "state_dict()",
    looks_at_the_optimizer: "state_dict()",
    saves: "save()",
    looks_at_a_gradient: "full_tensor()",
    clips: "clip_grad_norm_()",
    takes_norms: "named_norms()",
}

# --- the others are in a collective of the script's own -------------------------------------------


def lone(call, folder):
    """Return (the kind and text of the error, seconds until it) of the last rank, which is alone."""
    stalls._EVERY = 0.1  # answers sooner
    model = model_of("c10d", timeout=2.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    backward(model, dist.get_rank())
    optimizer.step()
    start = time.monotonic()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            call(model, optimizer, folder)
        dist.barrier()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call", [evaluates, sums_up, looks_at_the_optimizer, saves])
def test_error_reports_that_other_ranks_are_elsewhere(tmp_path, call, world):
    result = fork_ranks(lone, world, call, str(tmp_path / "saved"))[-1]
    assert result.value is not None, result.stderr
    kind, text, seconds = result.value
    assert kind == "PeerTimeoutError" and 1.9 < seconds < 20
    assert NAMES[call] in text
    for rank in range(world - 1):
        assert f"rank {rank} is not in a zshard collective" in text
    assert "call it on all of them" in text and "transport='shm'" in text
    assert "has been waiting" not in result.stderr  # the error replaced it


def late():
    """A rank that is only late, and has been asked why: no line, no error."""
    stalls._EVERY = 0.1  # answers sooner
    model = model_of("c10d", timeout=4)
    if os.environ["RANK"] == "1":
        time.sleep(1.5)
    backward(model, 0)
    return True


def test_late_rank_is_waited_for():
    for result in fork_ranks(late, 2):
        assert result.value is True, result.stderr
        assert "zshard:" not in result.stderr


def generates(transport):
    """Rank 0 runs a forward with gradients while the other is in a barrier of the script's."""
    stalls._EVERY = 0.1  # answers sooner
    model = model_of(transport, timeout=2)
    backward(model, 0)
    torch.optim.SGD(model.parameters(), 0.1).step()
    try:
        if dist.get_rank() == 0:
            model(floats(0))
        dist.barrier()
    except zshard.PeerTimeoutError as error:
        return str(error)
    return ""


@both
def test_error_of_a_lone_forward_names_no_grad(transport):
    words = fork_ranks(generates, 2, transport)[0].value
    assert "torch.no_grad()" in words
    assert "not in a zshard collective" in words


# --- the others are in other calls, or have ended -------------------------------------------------


@both
@pytest.mark.parametrize(
    ("call", "other"), [*((call, None) for call in list(NAMES)[3:]), (takes_norms, clips)]
)
@pytest.mark.sampled(3)
@on_ranks(2)
@passing_groups()
def test_error_names_the_call_of_a_lone_rank(transport, call, other, tmp_path):
    """If all ranks catch the error, a model that they create later works."""
    group = own_group()
    model = model_of(transport, process_group=group)
    backward(model, dist.get_rank())
    with pytest.raises(zshard.DivergenceError) as caught:
        if dist.get_rank() == 0:
            call(model, None, tmp_path)
        elif other is not None:
            other(model, None, tmp_path)
        else:
            backward(model, 1)
    words = str(caught.value)
    assert NAMES[call] in words and "on all ranks" in words
    assert other is None or NAMES[other] in words
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
@passing_groups()
def test_caught_wrapping_failure_does_not_affect_later_models(transport):
    group, model = own_group(), make(Wide)
    model.register_buffer("expanded", torch.full((1,), float(dist.get_rank())).expand(5))
    with pytest.raises(RuntimeError, match="single memory location"):
        FSDP(model, transport=transport, process_group=group)
    backward(FSDP(make(Wide), transport=transport, process_group=group), 0)
