"""Activation checkpointing in all the places where models have it: the gradients stay the same.

A way is a forward that recomputes some stretch of a model; whichever it is, and of
either kind (reentrant or not), the gradients have to be those of the plain model.
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
from scenarios import check_mean_grads, message_of
from spawn import ranks
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


def one_step(model, rank):
    loss_of(model(leaf(rank))).backward()


def three_steps(model, rank):
    for step in range(3):
        loss_of(model(leaf(rank, step))).backward()


def two_losses_at_once(model, rank):
    (loss_of(model(leaf(rank))) + loss_of(model(leaf(rank, 1)))).backward()


def a_forward_that_nobody_uses(model, rank):
    kept = model(leaf(rank, 1))
    loss_of(model(leaf(rank))).backward()
    del kept
    with torch.no_grad():
        model(leaf(rank, 2))
    loss_of(model(leaf(rank, 3))).backward()


def graph_kept(model, rank):
    loss = loss_of(model(leaf(rank)))
    loss.backward(retain_graph=True)
    loss.backward()


# What a reentrant checkpoint recomputes has a backward of its own. A weight with uses in several of
# them has several gradients, each reduced by itself, where the plain model adds them up first.
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
def test_gradients_of_one_step(pool2, way, reentrant):
    exact = not (reentrant and way in TWICE)
    build = functools.partial(Stack, way, reentrant)
    pool2.run(check_mean_grads, build, one_step, exact)


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize(
    "run", [three_steps, two_losses_at_once, a_forward_that_nobody_uses, graph_kept]
)
@pytest.mark.parametrize("way", [nested, within_and_around_units])
def test_gradients_of_several_passes(pool2, way, run, reentrant):
    pool2.run(check_mean_grads, functools.partial(Stack, way, reentrant), run, False)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@KINDS
@ranks(3)
def test_gradients_on_three_ranks(pool, reentrant):
    build = functools.partial(Stack, nested, reentrant)
    pool.run(check_mean_grads, build, three_steps, False)


# --- checkpoints around the model, by the script ---------------------------------------------------

Plain = functools.partial(Stack, within_units, None)  # recomputes nothing by itself


def around_the_model(reentrant, model, rank):
    for step in range(2):
        loss_of(checkpoint(model, leaf(rank, step), use_reentrant=reentrant)).backward()


def around_the_model_and_the_loss(reentrant, model, rank):
    def loss(x):
        return loss_of(model(x))

    checkpoint(loss, leaf(rank), use_reentrant=reentrant).backward()


def around_the_model_twice_in_one_backward(reentrant, model, rank):
    outputs = [checkpoint(model, leaf(rank, s), use_reentrant=reentrant) for s in range(2)]
    sum(map(loss_of, outputs)).backward()


def around_blocks_called_by_themselves(reentrant, model, rank):
    x = leaf(rank)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    loss_of(x).backward()


def around_a_sequence_of_blocks(reentrant, model, rank):
    loss_of(
        checkpoint_sequential(list(model.blocks), 2, leaf(rank), use_reentrant=reentrant)
    ).backward()


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize(
    "run",
    [
        around_the_model,
        around_the_model_and_the_loss,
        around_the_model_twice_in_one_backward,
        around_blocks_called_by_themselves,
        around_a_sequence_of_blocks,
    ],
)
def test_checkpoints_around_the_model(pool2, run, reentrant):
    pool2.run(check_mean_grads, Plain, functools.partial(run, reentrant), False)


# --- torch's other ways to ask for it ---------------------------------------------------------------


def apply_wrappers(model, reentrant):
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Half)
    )
    return model


def wrappers_within(reentrant):
    return apply_wrappers(Plain(), reentrant)


def wrappers_around(reentrant, model, rank):
    one_step(apply_wrappers(model, reentrant), rank)


@KINDS
def test_checkpoint_wrappers_before_wrapping(pool2, reentrant):
    build = functools.partial(wrappers_within, reentrant)
    pool2.run(check_mean_grads, build, one_step, True)


@KINDS
def test_checkpoint_wrappers_after_wrapping(pool2, reentrant):
    run = functools.partial(wrappers_around, reentrant)
    pool2.run(check_mean_grads, Plain, run, True)


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
        one_step(model, rank)


def offloaded(model, rank):
    """What backward needs is copied away in forward: with the parameters' bytes of then."""
    with torch.autograd.graph.save_on_cpu():
        one_step(model, rank)


def test_selective_checkpoints(pool2):
    pool2.run(check_mean_grads, Plain, selective, True)


@pytest.mark.parametrize("way", [around_units, nested, within_units])
def test_recomputation_without_early_stop(pool2, way):
    build = functools.partial(Stack, way, False)
    pool2.run(check_mean_grads, build, without_early_stop, True)


@pytest.mark.parametrize("way", [around_units, within_units])
def test_save_on_cpu(pool2, way):
    build = functools.partial(Stack, way, False)
    pool2.run(check_mean_grads, build, offloaded, True)


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
    one_step(model, rank)


@KINDS
def test_dropout_is_recomputed_identically(pool2, reentrant):
    build = functools.partial(Dropping, around_stretches, reentrant)
    pool2.run(check_mean_grads, build, seeded_step, True)


# --- what a failure within a recomputation leaves ---------------------------------------------------


class Failing(Stack):
    """Its second block fails when it is recomputed, as often as `failures` says."""

    failures = 0

    def part(self, x, number):
        if number == 1 and torch._C._current_graph_task_id() != -1 and self.failures:
            self.failures -= 1
            raise ArithmeticError("recomputed badly")
        return self.blocks[number](x)


def around_parts_by_number(model, x):
    for number in range(4):
        x = model.again(model.part, x, number)
    return x


def fail_then_go_on(model, rank):
    if hasattr(model, "clip_grad_norm_"):  # the plain model shows what comes of the last step alone
        model.failures = 1
        loss = loss_of(model(leaf(rank, 1)))
        assert "recomputed badly" in message_of(loss.backward, ArithmeticError)
        model.zero_grad()
    one_step(model, rank)


@KINDS
def test_training_continues_after_a_failed_recomputation(pool2, reentrant):
    build = functools.partial(Failing, around_parts_by_number, reentrant)
    pool2.run(check_mean_grads, build, fail_then_go_on, True)


# --- memory ----------------------------------------------------------------------------------------


def units_full_after(way, reentrant, combination):
    """How many units are still whole when the backward is over."""
    model = wrapped(functools.partial(Stack, way, reentrant), combination)
    three_steps(model, 0)
    modules = type(model).fsdp_modules(model)
    return len(modules), sum(module._zshard_state.unit.is_full for module in modules)


@KINDS
@pytest.mark.parametrize("way", [around_units, nested, within_and_around_units])
def test_recomputed_units_are_resharded(pool2, way, reentrant):
    for combination in (("full_shard", "shm"), ("shard_grad_op", "c10d")):
        for count, full in pool2.run(units_full_after, way, reentrant, combination):
            assert (count >= 4, full) == (True, 0), combination
