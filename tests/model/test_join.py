"""model.join(loader): a loop over uneven numbers of batches ends on all ranks in one step.

What remains equals a DDP run over as many batches as the shortest loader has. What one rank does
otherwise (its loader raises, it leaves the loop, it exits) is an error on the others, and no hang.
"""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from groups import own_group, passing_groups
from models import COMBINATIONS, ddp, loss_of, make
from nursery import fork_ranks
from scenarios import Stack, floats, message_of
from spawn import on_ranks, ranks
from torch.distributed.algorithms import Join
from torch.utils.data import DataLoader, Dataset

import zshard
from zshard import FSDP

FEW = [("full_shard", "shm"), ("full_shard", "c10d")]


def built(combination, **options):
    strategy, transport = combination
    options = {"process_group": own_group(), "timeout": 60, **options}
    return FSDP(make(Stack), strategy=strategy, transport=transport, **options)


def batches(n):
    return (floats(dist.get_rank(), step) for step in range(n))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def learn(model, optimizer, loader):
    count = 0
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        count += 1
    return count


def accumulate(model, optimizer, loader):
    """A loader may end within no_sync(); what is accumulated there is the same on all ranks."""
    count = 0
    for batch in loader:
        with contextlib.nullcontext() if count % 3 == 2 else model.no_sync():
            loss_of(model(batch)).backward()
        if count % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        count += 1
    return count


# --- equal to DDP ---------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("counts", [(5, 3), (0, 4), (2, 2)])
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("loop", [learn, accumulate])
@on_ranks(2)
@passing_groups()
def test_join_equals_ddp_on_the_shortest_loader(loop, combination, counts):
    """Train DDP on the fewest batches that a rank has, and then a model on all, twice."""
    least = min(counts)
    reference = ddp(make(Stack), process_group=own_group())
    theirs = adamw(reference)
    model = built(combination)
    ours = adamw(model)
    for _ in range(2):
        loop(reference, theirs, batches(least))
        assert loop(model, ours, model.join(batches(counts[dist.get_rank()]))) == least
    assert_same(model.state_dict(), reference.module.state_dict(), "the model")
    states = [optimizer.state_dict()["state"] for optimizer in (ours, theirs)]
    assert_same({n: states[0][n] for n in states[1]}, states[1], "the optimizer")


@passing_groups()
def train_three(combination, counts):
    model = built(combination)
    optimizer = adamw(model)
    count = learn(model, optimizer, model.join(batches(counts[dist.get_rank()])))
    return count, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("combination", FEW, ids="-".join)
@ranks(3)
def test_three_ranks(pool, combination):
    """gloo adds three ranks' gradients in another order, so the reference is zshard's."""
    uneven = pool.run(train_three, combination, (2, 5, 3))
    for ours, theirs in zip(uneven, pool.run(train_three, combination, (2, 2, 2)), strict=True):
        assert ours[0] == 2 and differences(ours[1], theirs[1]) == []


# --- loaders --------------------------------------------------------------------------------------


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return floats(dist.get_rank(), i)[0]


@pytest.mark.parametrize("combination", FEW, ids="-".join)
@on_ranks(2)
@passing_groups()
def test_any_iterable(combination):
    rank = dist.get_rank()
    model = built(combination)
    optimizer = adamw(model)
    loader = DataLoader(Numbers((7, 4)[rank]), batch_size=2)
    joined = model.join(loader)
    for _ in range(2):  # a loader can be iterated again
        assert learn(model, optimizer, joined) == 2
    endless = map(floats, itertools.repeat(rank))
    assert learn(model, optimizer, model.join(endless if rank == 0 else [floats(1)] * 3)) == 3
    generator = batches((3, 1)[rank])
    assert learn(model, optimizer, model.join(generator)) == 1
    assert len(list(generator)) == 1 - rank, "of what is dropped, one batch at most was taken"
    nested = 0
    for batch in model.join(loader):  # evaluation within training
        learn(model, optimizer, [batch])
        with torch.no_grad():
            nested += sum(1 for _ in map(model, model.join(batches(2 + rank))))
    assert nested == 4


@on_ranks(1)
def test_one_rank():
    model = FSDP(make(Stack), timeout=60)
    assert learn(model, adamw(model), model.join(batches(3))) == 3
    with pytest.raises(ValueError, match="boom"):
        list(model.join(raising(1)))


@on_ranks(2)
def test_any_number_of_ranks():
    """A step takes all micro-batches of the ranks; the loop around it ends alike."""
    model = FSDP(make(Stack), timeout=60, deterministic="any-world", micro_batches=4)
    optimizer = zshard.AdamW(model.parameters())
    count = 0
    for batch in model.join(batches(3 + dist.get_rank())):
        for _ in model.micro_batches(count):
            loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    assert count == 3


@on_ranks(2)
def test_stepped_in_backward():
    model = FSDP(make(Stack), timeout=60)
    count = 0
    model.optimizer_in_backward(zshard.AdamW(model.parameters()))
    for batch in model.join(batches(3 - dist.get_rank())):
        loss_of(model(batch)).backward()
        count += 1
    assert count == 2


# --- errors ---------------------------------------------------------------------------------------


def raising(n):
    yield from batches(n)
    raise ValueError("boom")


class Unreadable:
    def __iter__(self):
        raise FileNotFoundError("no such file: 'x'")


@pytest.mark.parametrize("at", [-1, 0, 2])
@pytest.mark.parametrize("combination", FEW, ids="-".join)
@on_ranks(2)
@passing_groups()
def test_loader_that_raises_on_one_rank(combination, at):
    """Also where the other rank's loader ends in the same step; afterwards the ranks train on."""
    model, raises = built(combination), dist.get_rank() == 1
    optimizer = adamw(model)
    loader = batches(at if at >= 0 else 2)
    if raises:
        loader = raising(at) if at >= 0 else Unreadable()
    text = message_of(lambda: learn(model, optimizer, model.join(loader)), (ValueError, OSError))
    expected = "boom" if at >= 0 else "no such file: 'x'"
    assert text == (expected if raises else f"rank 1: {expected}")
    assert learn(model, optimizer, model.join(batches(2))) == 2


def leave(transport, how):
    """Rank 1 leaves the loop by itself, and reaches a collective or its end."""
    dist.init_process_group("gloo")
    model = built(("full_shard", transport), process_group=dist.group.WORLD, timeout=20)
    optimizer = adamw(model)
    with contextlib.suppress(KeyError):
        for step, batch in enumerate(model.join(batches(4))):
            learn(model, optimizer, [batch])
            if (dist.get_rank(), step) == (1, 1):
                if how == "exits":
                    os._exit(0)
                if how == "raises":
                    raise KeyError("x")
                break
    learn(model, optimizer, [floats(0)])
    return "trained on"


@pytest.mark.parametrize("how", ["breaks", "raises", "exits"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_rank_that_leaves_the_loop(transport, how):
    first, second = fork_ranks(leave, 2, transport, how, check=False)
    text = first.stderr
    if how == "exits":
        assert "PeerError" in text and "join()" in text
    else:
        assert "DivergenceError" in text and "join()" in text and "forward" in text
        assert "DivergenceError" in second.stderr


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom")


@contextlib.contextmanager
def failing(model):
    hook = model.blocks[0].register_forward_hook(lambda m, args, out: Bad.apply(out))
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("combination", FEW, ids="-".join)
@on_ranks(2)
@passing_groups()
def test_caught_exception_skips_one_step(combination):
    """Rank 1's second backward raises; the next batch ends it, for which the other rank may wait."""
    model = built(combination)
    optimizer = adamw(model)
    texts = []
    for step, batch in enumerate(model.join(batches(3 + dist.get_rank()))):
        fails = (dist.get_rank(), step) == (1, 1)
        try:
            with failing(model) if fails else contextlib.nullcontext():
                loss_of(model(batch)).backward()
            optimizer.step()
        except (ValueError, RuntimeError) as error:
            texts.append(f"{step} {type(error).__name__}: {error}")
        optimizer.zero_grad()
    (text,) = texts
    if dist.get_rank():
        assert text == "1 ValueError: boom"
    else:
        assert text.startswith("1 DivergenceError: ") and "rank 1 abandoned its backward" in text


@on_ranks(2)
def test_misuse_names_the_remedy():
    model = built(FEW[0])
    optimizer = adamw(model)
    for call in (
        lambda: model.join(),
        lambda: model.join(optimizer),
        lambda: model.join(optimizer, torch.amp.GradScaler("cpu")),
        lambda: model.join([], optimizer),
        lambda: model.join(enable=False),
        lambda: model.join([], throw_on_early_termination=True),
    ):
        assert "`for batch in model.join(loader)`" in message_of(call, TypeError)
    said = message_of(lambda: FSDP.join(make(Stack), []), TypeError)
    assert said == "join() expects a sharded model, got Stack: call FSDP()"
    assert "docs/torch_names.md" in message_of(lambda: Join([model]), AttributeError)
