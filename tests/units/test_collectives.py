"""The number of collectives per step, and when gathers start.

Over c10d each collective is a torch operation that the profiler records. (Over shm there are none.)
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from models import Parts
from rows import all_refused
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from zshard import FSDP

UNITS = 4
WIDTH = 64


def rooted():
    """Blocks, and parameters of the root's own: as many units as the stack below."""
    run = lambda model, x: model.blocks(x) * model.scale[:WIDTH]  # noqa: E731
    blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS - 1)])
    return Parts(run, blocks=blocks, scale=nn.Parameter(torch.ones(2048)))


def stack():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])


def wrap(build, strategy="full_shard", **options):
    torch.manual_seed(0)
    options.setdefault("transport", "c10d")
    return FSDP(build(), strategy=strategy, auto_wrap_policy={nn.Linear}, **options)


def batch():
    torch.manual_seed(1 + dist.get_rank())
    return torch.randn(3, WIDTH)


def step(model, x):
    model(x).square().sum().backward()


@pytest.mark.parametrize("build", [stack, rooted])
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("full_shard", (UNITS, UNITS - 1, UNITS)),
        ("shard_grad_op", (UNITS, 0, UNITS)),
        ("zero1", (0, 0, UNITS)),  # nothing has changed since the first step
    ],
)
@on_ranks(2, 3)
def test_collectives_of_a_step(build, strategy, expected):
    """Gathers in forward, gathers in backward, and exchanges of gradients, in a later step."""
    model, x = wrap(build, strategy), batch()
    step(model, x)
    with Collectives() as forward:
        loss = model(x).sum()
    with Collectives() as backward:
        loss.backward()
    assert forward.scatters == 0
    assert (forward.gathers, backward.gathers, backward.scatters) == expected


@on_ranks(2)
def test_no_sync_reduces_nothing():
    model, x = wrap(stack), batch()
    step(model, x)
    with Collectives() as seen, model.no_sync():
        step(model, x)
    with Collectives() as after:
        step(model, x)
    assert seen.gathers == 2 * UNITS - 1
    assert seen.scatters == 0
    assert after.scatters == UNITS


# --- when gathers start ---------------------------------------------------------------------------

LINEAR = "aten::addmm"  # of a block's forward
BACKWARD = "AddmmBackward0"  # of its backward


HAND = ((1, 2, 3), (1, 0))  # what the first unit prefetches in forward, the last in backward
ALONE = {"backward_prefetch": None}


@pytest.mark.parametrize(
    ("options", "by_hand", "forward", "backward"),
    [
        ({}, None, "GGfGfGff", "GbGbGbb"),
        (ALONE, None, "GfGfGfGf", "bGbGbGb"),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, None, "GfGfGfGf", "bGbGbGb"),
        ({"forward_prefetch": True}, None, "GGfGfGff", "GbGbGbb"),
        ({"forward_prefetch": True, "limit_all_gathers": False}, None, "GGGfGfff", "GGbGbbb"),
        (ALONE, HAND, "GGGGffff", "GGbGbbb"),
    ],
)
@pytest.mark.sampled(3)
@on_ranks(2)
def test_prefetch_settings_determine_when_gathers_start(options, by_hand, forward, backward):
    """The order of gathers (G) and computations (f, b) in forward and in backward."""
    model, x = wrap(stack, **options), batch()
    if by_hand is not None:
        model[0].set_modules_to_forward_prefetch([model[i] for i in by_hand[0]])
        model[3].set_modules_to_backward_prefetch([model[i] for i in by_hand[1]])
    step(model, x)
    with Collectives(LINEAR) as first:
        loss = model(x).sum()
    with Collectives(BACKWARD) as second:
        loss.backward()
    short = {LINEAR: "f", BACKWARD: "b", "gather": "G"}
    order = ["".join(short.get(name, "") for name in seen.order) for seen in (first, second)]
    assert order == [forward, backward]


SLOT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a block's full buffer
FAR = {"forward_prefetch": True, "limit_all_gathers": False, "backward_prefetch": None}


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        (ALONE, 0),
        ({}, 1),
        ({"forward_prefetch": True}, 1),
        (FAR, 2),
        ({"backward_prefetch": "backward_post"}, 0),
    ],
)
@on_ranks(2)
def test_prefetch_is_limited(options, ahead):
    """After training, so many blocks ahead have a full buffer. (Results: test_skipped_units.py.)"""
    model = wrap(stack, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        step(model, batch())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch())
    assert model.memory()["slots"] == (1 + ahead) * SLOT


@on_ranks(2)
def test_mistakes_are_named():
    model, other = wrap(stack), wrap(stack)
    of_another = lambda: model[0].set_modules_to_forward_prefetch([other[0]])  # noqa: E731
    a_word = lambda: wrap(stack, backward_prefetch="soon")  # noqa: E731
    all_refused(
        {
            "another model's": (of_another, ValueError, "different models"),
            "a word": (a_word, ValueError, "'soon'"),
        }
    )
