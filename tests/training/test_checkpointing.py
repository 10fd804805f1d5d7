"""Activation checkpointing in all the places where models use it: the gradients stay the same.

A way is a forward that recomputes some stretch of a model; whichever it is, and of
either kind (reentrant or not), the gradients have to be those of the plain model.
(Failures within a recomputation: walk.py.)
"""

from __future__ import annotations

import functools

import pytest
import torch
from models import loss_of, wrapped
from recomputed import (
    KINDS,
    WAYS,
    Half,
    Stack,
    around_parts_of_the_root,
    around_stretches,
    around_units,
    around_units_and_a_weight_of_the_root,
    leaf,
    nested,
    once_again_and_once_not,
    units_thrice,
    units_twice,
    within_and_around_units,
    within_units,
)
from scenarios import check_mean_grads, forward_backward, units_of
from scripts import accumulate, forward_without_backward, retain_graph, two_forwards_one_backward
from spawn import on_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

# The recomputation of a reentrant checkpoint has its own backward. A weight with uses in several of
# them has several gradients, each reduced separately, while the plain model adds them up first.
TWICE = (
    units_twice,
    units_thrice,
    once_again_and_once_not,
    around_units_and_a_weight_of_the_root,
    around_parts_of_the_root,
)


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_gradients_of_one_step(way, reentrant):
    exact = not (reentrant and way in TWICE)
    check_mean_grads(functools.partial(Stack, way, reentrant), forward_backward, exact)


RUNS = [accumulate, two_forwards_one_backward, forward_without_backward, retain_graph]


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("way", [nested, within_and_around_units])
@on_ranks(2)
def test_gradients_of_several_passes(way, run, reentrant):
    check_mean_grads(functools.partial(Stack, way, reentrant), run, False)


# --- checkpoints by the script, and torch's other ways to ask for them ----------------------------

Plain = functools.partial(Stack, within_units, None)  # without checkpoints inside


def around_the_model_and_the_loss(reentrant, model, rank):
    checkpoint(lambda x: loss_of(model(x)), leaf(rank), use_reentrant=reentrant).backward()


def around_the_model_twice_in_one_backward(reentrant, model, rank):
    outputs = [checkpoint(model, leaf(rank, s), use_reentrant=reentrant) for s in range(2)]
    sum(map(loss_of, outputs)).backward()
    loss_of(checkpoint(model, leaf(rank, 2), use_reentrant=reentrant)).backward()


def around_blocks_called_by_themselves(reentrant, model, rank):
    x = leaf(rank)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    loss_of(x).backward()


def around_a_sequence_of_blocks(reentrant, model, rank):
    output = checkpoint_sequential(list(model.blocks), 2, leaf(rank), use_reentrant=reentrant)
    loss_of(output).backward()


def apply_wrappers(model, reentrant):
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Half)
    )
    return model


def wrappers_around(reentrant, model, rank):
    forward_backward(apply_wrappers(model, reentrant), rank)


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize(
    "run",
    [
        around_the_model_and_the_loss,
        around_the_model_twice_in_one_backward,
        around_blocks_called_by_themselves,
        around_a_sequence_of_blocks,
        wrappers_around,
    ],
)
@on_ranks(2)
def test_checkpoints_around_the_model(run, reentrant):
    check_mean_grads(Plain, functools.partial(run, reentrant), run is wrappers_around)


@KINDS
@on_ranks(2)
def test_checkpoint_wrappers_before_wrapping(reentrant):
    check_mean_grads(lambda: apply_wrappers(Plain(), reentrant), forward_backward, True)


def keep_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model, rank):
    x = leaf(rank)
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    loss_of(model.head(x)).backward()


def without_early_stop(model, rank):
    with set_checkpoint_early_stop(False):
        forward_backward(model, rank)


def offloaded(model, rank):
    """Backward's input is copied away in forward, with the parameters' bytes of that time."""
    with torch.autograd.graph.save_on_cpu():
        forward_backward(model, rank)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("run", "way"),
    [
        (selective, within_units),
        (without_early_stop, around_units),
        (without_early_stop, nested),
        (without_early_stop, within_units),
        (offloaded, around_units),
        (offloaded, within_units),
    ],
)
@on_ranks(2)
def test_other_ways_to_save_and_recompute(run, way):
    check_mean_grads(Plain if run is selective else lambda: Stack(way, False), run, True)


class Dropping(Stack):
    """Blocks with dropout: it has to be the same when they are recomputed."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.3, self.training))

    def run(self, x, begin=0, end=4):
        for block in self.blocks[begin:end]:
            x = F.dropout(block(x), 0.3, self.training)
        return x


def seeded_step(model, rank):
    torch.manual_seed(10 + rank)
    forward_backward(model, rank)


@KINDS
@on_ranks(2)
def test_dropout_is_recomputed_identically(reentrant):
    check_mean_grads(lambda: Dropping(around_stretches, reentrant), seeded_step, True)


@KINDS
@pytest.mark.parametrize("way", [around_units, nested, within_and_around_units])
@on_ranks(2)
def test_recomputed_units_are_resharded(way, reentrant):
    """No unit is full when the backward is over."""
    for combination in (("full_shard", "shm"), ("shard_grad_op", "c10d")):
        model = wrapped(functools.partial(Stack, way, reentrant), combination)
        accumulate(model, 0)
        units = units_of(model)
        assert len(units) >= 4 and not any(unit.is_full for unit in units), combination
