"""Nothing grows: over hundreds of steps, over many models, or when a loss outlives its model.

Everything that could leak has a counter that must not grow: reference counts, objects known to the
garbage collector, bytes that malloc has allocated (mallinfo2, exact: a leak of one pointer per step
shows), open descriptors, mappings. Resident memory is noisy and only checks that large allocations
are freed. Each test runs on fresh ranks and warms up first, for caches of Python and torch.
"""

import functools
import gc
import os
import sys
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
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

WORLDS = [pytest.param(1, "auto", id="alone"), (2, "shm"), (2, "c10d")]
STEPS = 500
WINDOWS = 5  # of a run
# Bytes: half of malloc's smallest allocation; over gloo, whose threads have caches of their own,
# less than one smallest allocation for each of a step's dozens of collectives.
PER_STEP = {"auto": 16, "shm": 16, "c10d": 96}
COUNTS = 1024  # bytes of malloc's that the counters of a window, which are kept, may take
# Objects: over shm a rank has the last optimizer's state until it sees that its peers have dropped
# theirs (optim/shared_state.py). Whether it has it at the time of a count depends on their pace.
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
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        kinds[target.split(":[")[0].removesuffix(" (deleted)")] += 1
    return dict(kinds)


@dataclass
class Counts:
    objects: int
    descriptors: dict[str, int]
    mappings: int
    heap: int
    resident: int
    references: dict[str, int]


def count(**watched):
    """All counters now; `watched` are objects whose references are counted."""
    gc.collect()
    return Counts(
        references={name: sys.getrefcount(thing) for name, thing in watched.items()},
        objects=len(gc.get_objects()),
        descriptors=descriptors(),
        mappings=len(Path("/proc/self/maps").read_text().splitlines()),
        heap=heap_bytes(),
        resident=resident_bytes(),
    )


def growth(before, after):
    """Return {counter: growth} of what has grown; descriptors and references by name."""
    grown = {}
    for name, old in asdict(before).items():
        new = getattr(after, name)
        pairs = {name: (old, new)}
        if isinstance(new, dict):
            pairs = {f"{name}.{key}": (old.get(key, 0), value) for key, value in new.items()}
        grown.update({key: b - a for key, (a, b) in pairs.items() if b > a})
    return grown


def settle():
    """Call this first on each rank: it removes what would hide leaks, or take long."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # otherwise torch keeps the last 2,000 collectives
    gc.freeze()  # a collection need not scan all of torch, a hundred times


def steady_growth(counts):
    """Return what has grown in each window, and by how much at least; of objects, how many more
    there are in the end.

    A leak grows in every window. Caches of Python and torch fill once, at any step.
    """
    windows = [growth(one, two) for one, two in pairwise(counts)]
    least = {name: min(window.get(name, 0) for window in windows) for name in windows[0]}
    least["objects"] = counts[-1].objects - counts[0].objects
    return {name: grown for name, grown in least.items() if grown > 0}


def grown_over(act, times, at_ends=lambda: None, **watched):
    """Return what has grown while `act` was called so many times, in windows; `at_ends` is called at the
    end of each."""
    at_ends()
    counts = [count(**watched)]
    for _ in range(WINDOWS):
        for _ in range(times // WINDOWS):
            act()
        at_ends()
        counts.append(count(**watched))
    return steady_growth(counts)


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
    """Return what has grown over hundreds of steps."""
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
MODELS = 25


def train_and_drop(transport, keep=None):
    """Train a model for a step; return a weak reference to it. `keep` collects what should outlive
    it."""
    model = wrap(make_model(WIDE), transport)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, WIDE)).sum().backward()
    optimizer.step()
    if keep is not None:
        keep.append(model(torch.ones(2, WIDE)).sum())
    return weakref.ref(model)


def make_and_drop_models(transport):
    """Return how many of the models survive the garbage collector, and what has grown."""
    settle()
    references = []

    def one_more():
        references.append(train_and_drop(transport))
        gc.collect()

    for _ in range(5):
        train_and_drop(transport)
    grown = grown_over(one_more, MODELS)
    return sum(reference() is not None for reference in references), grown


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "transport"), WORLDS)
def test_dropped_models_are_freed(world, transport):
    limits = {
        "resident": MODELS * MB // WINDOWS,  # a leak: twice that
        "heap": MODELS * 1024 // WINDOWS + COUNTS,
        "objects": MODELS + 10 + (HELD if transport == "shm" else 0),  # references to the models
    }
    for result in fork_ranks(make_and_drop_models, world, transport, timeout=120):
        alive, grown = result.value
        assert alive == 0
        check(grown, **limits)


def outlive_the_model(transport):
    """Only a loss is left of a model; it is used, then freed. Return facts about that."""
    keep = []
    model = train_and_drop(transport, keep)
    gc.collect()
    loss = keep.pop()
    leaf = loss.grad_fn
    while leaf.next_functions:  # down to the gradient of the last bias
        leaf = next(node for node, _ in leaf.next_functions if node is not None)
    param = leaf.variable
    loss.backward()
    facts = {"model died": model() is None, "gradients": zshard.to_local(param.grad).tolist()}
    facts["name"] = zshard.shard_info(param)["name"] if transport != "auto" else "1.1.bias"
    parameter = weakref.ref(param)
    del loss, leaf, param
    gc.collect()
    facts["parameter died"] = parameter() is None
    return facts


def outlive_models(transport):
    """Return the facts of the last model, and what has grown over all models."""
    settle()
    for _ in range(3):
        facts = outlive_the_model(transport)
    return facts, grown_over(lambda: outlive_the_model(transport), 40)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("world", "transport"), WORLDS)
def test_loss_outlives_its_model_and_then_frees_it(world, transport):
    limits = {
        "resident": 16 * MB // WINDOWS,  # a leak: at least 40 times one
        "heap": 50 * 1024 // WINDOWS + COUNTS,
        "objects": 20 + (HELD if transport == "shm" else 0),
    }
    gradients = []
    for result in fork_ranks(outlive_models, world, transport):
        facts, grown = result.value
        gradients += facts.pop("gradients")
        assert facts == {"model died": True, "parameter died": True, "name": "1.1.bias"}
        check(grown, **limits)
    assert gradients == [4.0] * WIDE


# --- created and destroyed process groups ---------------------------------------------------------


def make_and_drop_groups(groups):
    """Return what has grown after models on process groups of their own, which were destroyed."""
    settle()
    dist.init_process_group("gloo")
    for number in range(groups + 2):
        if number == 2:
            before = count()
        group = dist.new_group([0, 1])
        model = FSDP(make_model(), group, transport="shm")
        model(torch.ones(2, 8)).sum().backward()
        del model
        gc.collect()
        dist.destroy_process_group(group)
        del group
    FSDP(make_model(), transport="shm")  # the next transport cleans up dead ones
    return growth(before, count())


def test_dropped_groups_free_descriptors_and_mappings():
    for result in fork_ranks(make_and_drop_groups, 2, 5):
        grown = result.value
        ours = [name for name in grown if "memfd:zshard-" in name or "pidfd" in name]
        assert not ours, grown
        assert grown.get("mappings", 0) < 20, grown
