"""One rank alone in a collective call: the error names the call and the remedy.

On both transports, whatever the other rank does meanwhile; if all ranks catch the error, a model
that they create later works.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import make
from nursery import fork_ranks
from scenarios import Wide, floats, loss_of

import zshard
from zshard import FSDP

both = pytest.mark.parametrize("transport", ["shm", "c10d"])


def saves(model, folder):
    zshard.save(folder, model)


def looks_at_a_gradient(model, folder):
    zshard.full_tensor(next(model.parameters()).grad)


def clips(model, folder):
    model.clip_grad_norm_(1.0)


def takes_norms(model, folder):
    zshard.named_norms(model)


CALLS = {
    saves: "save()",
    looks_at_a_gradient: "full_tensor()",
    clips: "clip_grad_norm_()",
    takes_norms: "named_norms()",
}


def alone(transport, call, other, folder):
    """Return a rank's error where rank 0 makes one call and rank 1 another; both then create, train
    and save a model."""
    model = FSDP(make(Wide), transport=transport)
    loss_of(model(floats(dist.get_rank()))).backward()
    try:
        if dist.get_rank() == 0:
            call(model, folder)
        elif other is not None:
            other(model, folder)
        else:
            loss_of(model(floats(1))).backward()
    except zshard.DivergenceError as error:
        words = str(error)
    model = FSDP(make(Wide), transport=transport)
    loss_of(model(floats(dist.get_rank()))).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    zshard.save(f"{folder}/later", model)
    return words


@both
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.sampled(3)
def test_error_names_the_call_of_a_lone_rank(transport, call, tmp_path):
    ranks = fork_ranks(alone, 2, transport, call, None, str(tmp_path), check=True)
    for each in ranks:
        assert CALLS[call] in each.value and "on all ranks" in each.value


@both
def test_different_calls_are_distinguished(transport, tmp_path):
    ranks = fork_ranks(alone, 2, transport, takes_norms, clips, str(tmp_path), check=True)
    for each in ranks:
        assert "named_norms()" in each.value and "clip_grad_norm_()" in each.value


def runs_longer(transport):
    """The last rank has one batch more than the other."""
    model = FSDP(make(Wide), transport=transport)
    for i in range(2 + dist.get_rank()):
        loss_of(model(floats(i))).backward()


@both
def test_error_of_uneven_batches_names_join(transport):
    result = fork_ranks(runs_longer, 2, transport)[1]
    assert "PeerError" in result.stderr and "model.join(optimizer)" in result.stderr


def generates(transport):
    """Rank 0 runs a forward with gradients while the other is in a barrier of the script's."""
    model = FSDP(make(Wide), transport=transport, timeout=4)
    loss_of(model(floats(0))).backward()
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


def expanded(transport):
    model = make(Wide)
    model.register_buffer("expanded", torch.zeros(1).expand(5))
    with pytest.raises(RuntimeError, match="single memory location"):
        FSDP(model, transport=transport)
    model = FSDP(make(Wide), transport=transport)
    loss_of(model(floats(0))).backward()
    return True


@both
def test_caught_wrapping_failure_does_not_affect_later_models(transport):
    values = [each.value for each in fork_ranks(expanded, 2, transport, check=True)]
    assert values == [True, True]


def no_group(rank):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(make(Wide))
    found = [str(each.message) for each in caught if "trains alone" in str(each.message)]
    assert len(found) == 1 and "init_process_group()" in found[0], found


def test_spawned_process_without_a_group_warns():
    context = mp.spawn(no_group, nprocs=1, join=False)
    assert context.join(60), sys.version
