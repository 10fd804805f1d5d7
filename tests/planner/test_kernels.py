"""The computation of a step, by the trace on fake tensors: compared with torch's own counts, on
real models."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zshard.extras.planner.decoder import Dims, decoder_of
from zshard.extras.planner.kernels import trace
from zshard.extras.planner.workloads import decoder

DIMS = Dims(
    layers=2, width=32, heads=4, kv_heads=2, ffn=96, vocab=50, seq=16, gated=True, tied=False
)
GPT = DIMS._replace(kv_heads=4, ffn=128, gated=False, tied=True)


def mlp():
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


CASES = {"mlp": (mlp, (8,)), "conv": (conv, (3, 8, 8))}


def flops(segments, kind="matmul"):
    return sum(k.flops for segment in segments for k in segment.kernels if k.kind == kind)


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_that_torch_counts(name):
    make, shape = CASES[name]
    model = make()
    found = trace(model, [], lambda model: model(torch.ones(6, *shape)).sum())
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(6, *shape)).sum().backward()
    assert flops([*found.forward, *found.backward]) == counter.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_activations_are_those_that_autograd_saves(name):
    make, shape = CASES[name]
    model = make()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    found = trace(model, [], lambda model: model(torch.ones(6, *shape)).sum())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        batch = torch.ones(6, *shape)
        saved[batch.data_ptr()] = batch.untyped_storage()  # the script's, alive in the forward
        loss = model(batch).sum()
    saved[loss.data_ptr()] = loss.untyped_storage()
    counted = sum(storage.nbytes() for storage in saved.values())
    assert found.kept == counted


@pytest.mark.parametrize("raises", [False, True])
def test_a_trace_leaves_the_model_as_it_was(raises):
    model = mlp()
    before = {name: (value, value.clone()) for name, value in model.state_dict().items()}

    def loss(model):
        output = model(torch.ones(2, 8))
        if raises:
            raise KeyError("stop")
        return output.sum()

    with pytest.raises(KeyError) if raises else contextlib.nullcontext():
        trace(model, [model[0]], loss, torch.bfloat16)
    assert not model._forward_pre_hooks and not model[0]._forward_hooks
    for name, value in model.state_dict().items():
        same, values = before[name]
        assert value.data_ptr() == same.data_ptr() and torch.equal(value, values)
    assert all(param.grad is None for param in model.parameters())
    model(torch.ones(2, 8)).sum().backward()


@functools.cache
def traced(dims, kind):
    model = decoder_of(dims, kind)
    tokens = (2, dims.seq)
    return trace(
        model,
        [model, *model.blocks],
        lambda model: model(torch.zeros(tokens, dtype=torch.int64)),
        torch.bfloat16,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["", "selective", "full"])
def test_a_stretched_trace_is_that_of_all_layers(kind):
    whole, few = (traced(GPT._replace(layers=layers), kind) for layers in (5, 3))
    assert few.stretched(2, 1, 3) == whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "layers"), [("", 5), ("selective", 5), ("full", 5), ("alternate", 8), ("alternate", 9)]
)
def test_a_decoder_is_traced_as_all_of_its_layers(kind, layers):
    """Of every second block checkpointed, an even number and an odd one are stretched."""
    dims = DIMS._replace(layers=layers)
    workload = decoder(dims)
    divided = [workload.model, *workload.model.blocks]
    assert workload.traced(divided, 2, kind, torch.bfloat16) == traced(dims, kind)


def test_recomputation_is_no_work_of_the_model():
    kinds = [traced(GPT, kind) for kind in ("", "selective", "alternate", "full")]
    assert len({each.flops for each in kinds}) == 1
    again = [flops(each.backward) - flops(kinds[0].backward) for each in kinds]
    assert again == sorted(set(again))
    assert 2 * again[2] == again[3]


@pytest.mark.parametrize("kind", ["", "full"])
def test_frozen_weights_need_no_gradients(kind):
    """Of a large frozen matrix forward and input's gradient count, of a trained one also its own."""
    whole, adapted = traced(GPT, kind), traced(GPT._replace(lora=2), kind)
    frozen = 2 / 3 * whole.flops
    assert frozen < adapted.flops < 1.2 * frozen


def test_checkpointing_trades_activations_for_flops():
    none, some, full = (traced(GPT, kind) for kind in ("", "selective", "full"))
    assert none.kept > some.kept > full.kept
    assert flops(none.backward) < flops(some.backward) < flops(full.backward)
    assert flops(none.forward) == flops(full.forward)


def test_a_checkpoint_runs_its_part_again():
    model = mlp()
    x = torch.ones(4, 8)
    plain = trace(model, [model], lambda m: m(x * 1).sum())
    again = trace(model, [model], lambda m: checkpoint(m, x * 1, use_reentrant=False).sum())
    assert again.marks == plain.marks == [(0, True), (0, False)]
    # all but the last layer, whose result nothing needs
    more = 2 * 4 * (8 * 32 + 32 * 32)
    assert flops(again.backward) == flops(plain.backward) + more


def test_segments_are_between_the_marks():
    model = mlp()
    found = trace(model, [model[0], model[4]], lambda m: m(torch.ones(2, 8)).sum())
    assert found.marks == [(0, True), (0, False), (1, True), (1, False)]
    per_segment = [flops([segment]) for segment in found.forward]
    assert per_segment == [0, 2 * 2 * 8 * 32, 2 * 2 * 32 * 32, 2 * 2 * 32 * 4, 0]
    backward = [flops([segment]) for segment in found.backward]
    # the first layer's input needs no gradient
    assert backward == [0, per_segment[1], 2 * per_segment[2], 2 * per_segment[3], 0]


def test_causal_attention_counts_half():
    def attend(causal):
        q = nn.Parameter(torch.zeros(1, 2, 64, 16))
        holder = nn.ParameterList([q])

        def loss(m):
            return F.scaled_dot_product_attention(m[0], m[0], m[0], is_causal=causal).sum()

        return flops(trace(holder, [], loss).forward, "attention")

    assert attend(False) == 2 * attend(True) == 2 * 2 * 2 * 64 * 64 * 16
