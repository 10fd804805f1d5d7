"""Nothing grows: over hundreds of steps, over many models, or when a loss outlives its model.

Everything that could leak has a counter that must not grow: reference counts, objects known to the
garbage collector, bytes that malloc has allocated (mallinfo2, exact: a leak of one pointer per step
shows), open descriptors, mappings. Resident memory is noisy and only checks that large allocations
are freed. Each test runs on fresh ranks and warms up first, for caches of Python and torch.
"""

import contextlib
import functools
import gc
import os
import sys
import weakref
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from heap import heap_bytes
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

STEPS = 500
WINDOWS = 5  # of a run
# Bytes: half of malloc's smallest allocation; over gloo, whose threads have their own caches,
# less than one smallest allocation for each of a step's dozens of collectives.
PER_STEP = {"auto": 16, "shm": 16, "c10d": 96}
COUNTS = 1024  # bytes of malloc's that the counters of a window, which are kept, may take
# Objects: over shm a rank has the last optimizer's state until it sees that its peers have dropped
# theirs (optim/shared_state.py). The count at a given time depends on their pace.
HELD = 85
MB = 1 << 20


def resident_bytes():
    """Return this process's resident memory, private and shared, without files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def descriptors():
    """Open files by kind: sockets, memory files of zshard, pidfds, ..."""
    kinds = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kinds[
                os.readlink(f"/proc/self/fd/{name}").split(":[")[0].removesuffix(" (deleted)")
            ] += 1
    return kinds


def count(**watched):
    """Return all counters; `watched` are objects whose references are counted."""
    gc.collect()
    return {
        **{f"references to {name}": sys.getrefcount(thing) for name, thing in watched.items()},
        "objects": len(gc.get_objects()),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "heap": heap_bytes(),
        "resident": resident_bytes(),
        **descriptors(),
    }


def growth(before, after):
    """Return {counter: growth} of the counters that have grown."""
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: number for name, number in more.items() if number > 0}


def settle():
    """Call this first on each rank: it removes things that would hide leaks, or take long."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # otherwise torch keeps the last 2,000 collectives
    gc.freeze()  # a collection need not scan all of torch, a hundred times


def grown_over(act, times, at_ends=lambda: None, **watched):
    """Return the counters that have grown in each of the windows of so many calls of `act`, and
    their smallest growth; for objects, the total growth. `at_ends` is called at the end of each
    window.

    A leak grows in every window. Caches of Python and torch fill once, at any step.
    """
    at_ends()
    counts = [count(**watched)]
    for _ in range(WINDOWS):
        for _ in range(times // WINDOWS):
            act()
        at_ends()
        counts.append(count(**watched))
    windows = [growth(*pair) for pair in pairwise(counts)]
    least = {name: min(window.get(name, 0) for window in windows) for name in windows[0]}
    least["objects"] = counts[-1]["objects"] - counts[0]["objects"]
    return {name: number for name, number in least.items() if number > 0}


def check(grown, **limits):
    """Fail if more has grown than `limits`, for noise that does not depend on the number of steps, and
    the counters themselves."""
    limits = {"mappings": 10 // WINDOWS, **limits}  # malloc's
    beyond = {name: more for name, more in grown.items() if more >= limits.get(name, 0)}
    assert not beyond, grown


def make_model(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.ReLU(), nn.Linear(width, width)))


def wrap(model, transport, strategy="full_shard"):
    return FSDP(model, strategy=strategy, auto_wrap_policy={nn.Linear}, transport=transport)


# --- hundreds of steps -----------------------------------------------------------------------------


class Stumble(nn.Module):
    """Raises on request, below a unit's forward."""

    on = False

    def forward(self, x):
        if self.on:
            raise ValueError("stumbled")
        return x


def all_paths(model, optimizer, x):
    """One step with other common operations: clipping, an evaluation, a failing forward."""
    loss = model(x).square().sum() + model(x).sum()
    loss.backward(retain_graph=True)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    model[2].on = True
    with pytest.raises(ValueError, match="stumbled"):
        model(x)
    model[2].on = False


def run_steps(transport, strategy):
    """Return the growth over hundreds of steps."""
    settle()
    model = make_model()
    model.append(Stumble())
    model = wrap(model, transport, strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
    step = functools.partial(all_paths, model, optimizer, torch.ones(2, 8))
    hooks = [*model[0]._forward_pre_hooks.values(), *model[0]._forward_hooks.values()]
    watched = {
        "model": model,
        "submodule": model[0],
        "parameter": model[0].weight,
        "unit": model[0]._zshard_state.unit,
        "optimizer": optimizer,
        **{f"hook {i}": hook for i, hook in enumerate(hooks)},
    }
    for _ in range(30):
        step()
    return grown_over(step, STEPS, model.state_dict, **watched)


OTHERS = [
    pytest.param(2, "shm", kind, marks=pytest.mark.thorough)
    for kind in ("shard_grad_op", "no_shard")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world", "transport", "strategy"),
    [(1, "auto", "full_shard"), (2, "shm", "full_shard"), (2, "c10d", "full_shard"), *OTHERS],
)
def test_steps_leak_nothing(world, transport, strategy):
    heap = PER_STEP[transport] * STEPS // WINDOWS + COUNTS
    for result in fork_ranks(run_steps, world, transport, strategy, timeout=120):
        check(result.value, heap=heap, resident=2 * MB // WINDOWS, objects=30)


# --- created and freed models ---------------------------------------------------------------------

WIDE = 512  # two units of a megabyte each
MODELS = 30


def train_and_drop(transport, loss_outlives):
    """Train a model for a step, and drop it; a loss and a parameter of it may be left, and are used."""
    model = wrap(make_model(WIDE), transport)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, WIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = model(torch.ones(2, WIDE)).sum() if loss_outlives else None
    bias = model[1][1].bias
    name = (zshard.shard_info(bias) or {"name": "1.1.bias"})["name"]
    dropped = [weakref.ref(model), weakref.ref(bias)]
    del model, optimizer
    gc.collect()
    assert dropped[0]() is None and name == "1.1.bias"
    if loss is not None:
        loss.backward()
        assert (zshard.to_local(bias.grad) == 2.0).all()
    del loss, bias
    gc.collect()
    assert dropped[1]() is None


def make_and_drop_models(transport):
    """Return the growth over many models."""
    settle()

    def two():
        for loss_outlives in (False, True):
            train_and_drop(transport, loss_outlives)

    for _ in range(3):
        two()
    return grown_over(two, MODELS // 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "transport"), [(1, "auto"), (2, "shm"), (2, "c10d")])
def test_dropped_models_are_freed(world, transport):
    limits = {
        "resident": MODELS * MB // WINDOWS,  # a leak: twice that
        "heap": MODELS * 1536 // WINDOWS + COUNTS,
        "objects": 20 + (HELD if transport == "shm" else 0),
    }
    for result in fork_ranks(make_and_drop_models, world, transport, timeout=120, check=True):
        check(result.value, **limits)


# --- created and destroyed process groups ---------------------------------------------------------


def make_and_drop_groups(groups):
    """Return the growth after models on their own process groups, which were destroyed."""
    settle()
    dist.init_process_group("gloo")
    counts = []
    for number in range(groups + 2):
        group = dist.new_group([0, 1])
        model = FSDP(make_model(), group, transport="shm")
        model(torch.ones(2, 8)).sum().backward()
        del model
        gc.collect()
        dist.destroy_process_group(group)
        del group
        if number in (1, groups + 1):
            FSDP(make_model(), transport="shm")  # the next transport cleans up dead ones
            dist.barrier()
            counts.append(count())
            dist.barrier()
    return growth(*counts)


def test_dropped_groups_free_descriptors_and_mappings():
    """A leak grows with each of five groups. A rank has the last model's memory until it sees that its
    peers have dropped theirs."""
    for result in fork_ranks(make_and_drop_groups, 2, 5):
        grown = result.value
        ours = {name for name in grown if "memfd:zshard-" in name or "pidfd" in name}
        assert all(grown[name] < 5 for name in ours), grown
        assert grown.get("mappings", 0) < 20, grown
