"""One rank alone in a collective call: the error names the call and the remedy.

On both transports, whatever the other rank does meanwhile; if all ranks catch the error, a model
that they create later works.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from groups import own_group, passing_groups
from models import make
from nursery import fork_ranks
from scenarios import Wide, floats, loss_of
from spawn import on_ranks

import zshard
from zshard import FSDP
from zshard.ranks import groups, stalls

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


@passing_groups()
def alone(transport, call, other, folder):
    """Return a rank's error where rank 0 makes one call and rank 1 another; both then create, train
    and save a model."""
    group = own_group()
    model = FSDP(make(Wide), transport=transport, process_group=group)
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
    model = FSDP(make(Wide), transport=transport, process_group=group)
    loss_of(model(floats(dist.get_rank()))).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    zshard.save(f"{folder}/later", model)
    return words


@both
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.sampled(3)
def test_error_names_the_call_of_a_lone_rank(pool2, transport, call, tmp_path):
    for words in pool2.run(alone, transport, call, None, str(tmp_path)):
        assert CALLS[call] in words and "on all ranks" in words


@both
def test_different_calls_are_distinguished(pool2, transport, tmp_path):
    for words in pool2.run(alone, transport, takes_norms, clips, str(tmp_path)):
        assert "named_norms()" in words and "clip_grad_norm_()" in words


def runs_longer(transport):
    """The last rank has one batch more than the other."""
    model = FSDP(make(Wide), transport=transport)
    for i in range(2 + dist.get_rank()):
        loss_of(model(floats(i))).backward()


@both
def test_error_of_uneven_batches_names_join(transport):
    result = fork_ranks(runs_longer, 2, transport)[1]
    assert "PeerError" in result.stderr and "model.join(loader)" in result.stderr


def generates(transport):
    """Rank 0 runs a forward with gradients while the other is in a barrier of the script's."""
    stalls._EVERY = 0.1  # answers sooner
    model = FSDP(make(Wide), transport=transport, timeout=2)
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


@both
@on_ranks(2)
@passing_groups()
def test_caught_wrapping_failure_does_not_affect_later_models(transport):
    group, model = own_group(), make(Wide)
    model.register_buffer("expanded", torch.full((1,), float(dist.get_rank())).expand(5))
    with pytest.raises(RuntimeError, match="single memory location"):
        FSDP(model, transport=transport, process_group=group)
    model = FSDP(make(Wide), transport=transport, process_group=group)
    loss_of(model(floats(0))).backward()


def no_group(rank):
    import warnings

    groups._say_alone.cache_clear()  # pytest's process, from which it is forked, may have said it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(make(Wide))
    found = [str(each.message) for each in caught if "trains alone" in str(each.message)]
    assert len(found) == 1 and "init_process_group()" in found[0], found


def test_spawned_process_without_a_group_warns():
    context = mp.start_processes(no_group, nprocs=1, join=False, start_method="fork")
    assert context.join(60)
