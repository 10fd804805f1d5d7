"""Gradient norms and clipping over shards: the full model's norm, bit-identical on every rank."""

import math

import pytest
import torch
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import _core

NORMS = [1.0, 2.0, math.inf, 3.0]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 131), nn.ReLU(), nn.LayerNorm(131), nn.Linear(131, 33))


def backward(model, rank, scale=1.0):
    """The same loss for all ranks, so that the average equals one process's result."""
    inputs = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    (model(inputs).square().sum() * scale).backward()


def whole_grads(model):
    return [p.grad.clone() for p in model.parameters()]


def shards_equal(model, expected):
    """Check that this rank's gradients are its shards of `expected`, up to the last few bits."""
    for param, whole in zip(model.parameters(), expected, strict=True):
        info = zshard.shard_info(param)
        part = whole.flatten()
        if info is not None:
            begin = info["begin"]
            part = part[begin : begin + param.numel()]
        torch.testing.assert_close(
            zshard.to_local(param.grad).flatten(), part, rtol=2e-5, atol=1e-7
        )


# --- power_sum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_power_sum(dtype):
    tensors = [torch.randn(n).to(dtype) for n in (0, 1, 33, 100_003)]
    flat = torch.cat(tensors).double()
    assert _core.power_sum(tensors, 2.0) == pytest.approx(float((flat * flat).sum()), rel=1e-12)
    assert _core.power_sum(tensors, 1.0) == pytest.approx(float(flat.abs().sum()), rel=1e-12)
    assert _core.power_sum(tensors, math.inf) == float(flat.abs().max())
    assert _core.power_sum([], 2.0) == 0.0


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_power_sum_propagates_nan_and_inf(p, bad):
    for at in (0, 31, 32, 99):
        tensor = torch.ones(100)
        tensor[at] = bad
        total = _core.power_sum([torch.ones(3), tensor, torch.ones(3)], p)
        assert math.isnan(total) if math.isnan(bad) else total == math.inf


def test_power_sum_is_independent_of_threads():
    tensor = torch.randn(1_000_003)
    before = torch.get_num_threads()
    totals = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        totals.add(_core.power_sum([tensor], 2.0))
    torch.set_num_threads(before)
    assert len(totals) == 1


def test_power_sum_refuses_unsupported_tensors():
    with pytest.raises(TypeError, match="contiguous floating-point tensors"):
        _core.power_sum([torch.ones(4, 4).t()[:2]], 2.0)
    with pytest.raises(TypeError, match="contiguous floating-point tensors"):
        _core.power_sum([torch.ones(4, dtype=torch.int64)], 2.0)
    with pytest.raises(ValueError, match="1, 2 or inf"):
        _core.power_sum([torch.ones(4)], 3.0)


# --- clipping -----------------------------------------------------------------------------------


def test_without_shards_torch_clips():
    params = [nn.Parameter(torch.randn(9)) for _ in range(3)]
    for param in params:
        param.grad = torch.randn(9)
    norm = torch.cat([p.grad for p in params]).norm()
    assert torch.nn.utils.clip_grad_norm_(params, 1e9) == pytest.approx(float(norm))
    assert torch.nn.utils.get_total_norm([p.grad for p in params]) == pytest.approx(float(norm))
    with pytest.raises(RuntimeError, match="non-finite"):
        params[0].grad[0] = math.inf
        torch.nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def clip_and_compare(strategy, norm_type, how):
    """Clip the sharded model one way and a plain one by torch; return the norm's bits."""
    rank = torch.distributed.get_rank()
    plain = make_model()
    backward(plain, rank)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)

    model = zshard.FSDP(make_model(), strategy=strategy)
    backward(model, rank)
    if how == "model":
        norm = model.clip_grad_norm_(0.5, norm_type)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    shards_equal(model, whole_grads(plain))

    again = model.clip_grad_norm_(1e9, norm_type)  # below the limit: nothing is scaled
    shards_equal(model, whole_grads(plain))
    assert again <= 0.5 * 1.0001
    return norm.view(torch.int32).item(), norm.dtype


@ranks(2, 3)
@pytest.mark.parametrize("how", ["model", "torch"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_norm_equals_the_full_models(pool, strategy, how):
    for norm_type in NORMS:
        results = pool.run(clip_and_compare, strategy, norm_type, how)
        assert set(results) == {(results[0][0], torch.float32)}


@on_ranks(2)
def test_unsharded_parameters_count_once():
    plain, extra = make_model(), nn.Parameter(torch.ones(4))
    backward(plain, 0)
    extra.grad = torch.full((4,), 3.0)
    expected = torch.nn.utils.clip_grad_norm_([*plain.parameters(), extra], 1.0)

    model, extra = zshard.FSDP(make_model()), nn.Parameter(torch.ones(4))
    backward(model, 0)
    extra.grad = torch.full((4,), 3.0)
    norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), extra], 1.0)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    shards_equal(model, whole_grads(plain))
    torch.testing.assert_close(extra.grad, torch.full((4,), 3.0) / expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@on_ranks(2)
def test_nonfinite_gradient_on_one_rank_reaches_all(bad):
    model = zshard.FSDP(make_model())
    backward(model, 0)
    grads = [p.grad for p in model.parameters() if p.grad.numel()]
    if torch.distributed.get_rank() == 1:
        grads[0].to_local().view(-1)[0] = bad
    for clip in (
        lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
    ):
        with pytest.raises(RuntimeError, match=r"norm of order 2.0 .* is (nan|inf)"):
            clip()
    norm = model.clip_grad_norm_(1.0)
    assert not norm.isfinite()
    if math.isnan(bad):
        for grad in grads:
            assert grad.to_local().isnan().all(), grad.to_local()
    else:
        for grad in grads:
            assert ((grad == 0) | grad.isnan()).to_local().all(), grad.to_local()


def clip_by_torch(model):
    return lambda limit: torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def scale_by_torch(model):
    one = torch.tensor(1.0)
    return lambda limit: torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, one)


@on_ranks(2)
def test_gradients_without_a_global_norm_are_refused():
    model = zshard.FSDP(make_model())
    backward(model, 0)
    with pytest.raises(ValueError, match="norm_type must be a positive number or inf, got 0"):
        model.clip_grad_norm_(1.0, 0.0)
    for param in model.parameters():
        param.grad = param.grad * 2
    for clip in (model.clip_grad_norm_, clip_by_torch(model), scale_by_torch(model)):
        with pytest.raises(RuntimeError, match=r"\.grad of sharded parameter '0.weight' was rep"):
            clip(1e-9)
