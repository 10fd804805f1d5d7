"""Gradient norms and clipping over shards: the full model's norm, bit-identical on every rank.

Sums of squares are exact but for those within groups of 32 elements: they depend neither on cuts,
nor on order, nor on threads.
"""

import math

import pytest
import torch
from rows import all_refused
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import _core

NORMS = [1.0, 2.0, math.inf, 3.0]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 131), nn.ReLU(), nn.LayerNorm(131), nn.Linear(131, 33))


def with_grads(model):
    """The same loss for all ranks, so that the average equals one process's result."""
    inputs = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    return model


def assert_shards_of(model, plain):
    """Fail unless this rank has its shards of the plain gradients, up to the last few bits."""
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = zshard.to_local(param.grad).flatten()
        begin = (zshard.shard_info(param) or {"begin": 0})["begin"]
        part = other.grad.flatten()[begin:][: grad.numel()]
        torch.testing.assert_close(grad, part, rtol=2e-5, atol=1e-7)


# --- sums of powers -----------------------------------------------------------------------------


def threads(*counts):
    """Yield so many threads of torch, one count after another."""
    before = torch.get_num_threads()
    for count in counts:
        torch.set_num_threads(count)
        yield count
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_power_sum(dtype):
    tensors = [torch.randn(n).to(dtype) for n in (0, 1, 33, 100_003)]
    flat = torch.cat(tensors).double()
    assert _core.power_sum(tensors, 2.0) == pytest.approx(float((flat * flat).sum()), rel=1e-12)
    assert _core.power_sum(tensors, 1.0) == pytest.approx(float(flat.abs().sum()), rel=1e-12)
    assert _core.power_sum(tensors, math.inf) == float(flat.abs().max())
    assert _core.power_sum([], 2.0) == 0.0
    for p in NORMS[:3]:
        for bad in (math.nan, math.inf):
            for at in (0, 31, 32, 99):
                tensor = torch.ones(100, dtype=dtype)
                tensor[at] = bad
                total = _core.power_sum([torch.ones(3), tensor, torch.ones(3)], p)
                assert math.isnan(total) if math.isnan(bad) else total == math.inf


def test_power_sum_is_independent_of_threads():
    tensor = torch.randn(1_000_003)
    assert len({_core.power_sum([tensor], 2.0) for _ in threads(1, 2, 3)}) == 1


def squares(*tensors):
    return _core.squares_value(_core.squares(list(tensors)))


def grouped(tensor):
    """The exact sum of the groups' sums in double, by Python."""
    values = torch.cat([tensor.double(), torch.zeros(-len(tensor) % 32)]).view(-1, 4, 8)
    lanes = torch.zeros(len(values), 8, dtype=torch.float64)
    for i in range(4):
        lanes += values[:, i] * values[:, i]
    for width in (4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width:]
    return math.fsum(lanes.flatten().tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_are_exact(dtype):
    for n in (0, 1, 31, 32, 100_003):
        tensor = (torch.randn(n) * 10.0 ** torch.randint(-3, 3, (n,))).to(dtype)
        assert squares(tensor) == grouped(tensor)
    for extreme in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 2):
        if dtype != torch.float64 or extreme < 1:
            tensor = torch.full((40,), extreme, dtype=dtype)
            assert squares(tensor) == grouped(tensor)
    assert squares() == 0.0
    for bad in (math.inf, -math.inf, math.nan):
        result = squares(torch.ones(40).to(dtype), torch.tensor([1.0, bad]).to(dtype))
        assert math.isnan(result) if math.isnan(bad) else result == math.inf


def test_sums_do_not_depend_on_cuts_order_or_threads():
    tensor = torch.randn(1_000_000) * 10.0 ** torch.randint(-15, 15, (1_000_000,))
    expected = squares(tensor)
    pieces = [tensor[a:b] for a, b in ((640_000, 1_000_000), (0, 32), (32, 640_000))]
    assert squares(*pieces) == expected
    numbers = [_core.squares([piece]) for piece in pieces]
    assert _core.squares_value([sum(each) for each in zip(*numbers, strict=True)]) == expected
    assert {squares(tensor) for _ in threads(2, 3)} == {expected}


# --- clipping -----------------------------------------------------------------------------------


def test_without_shards_torch_clips():
    params = [nn.Parameter(torch.randn(9)) for _ in range(3)]
    for param in params:
        param.grad = torch.randn(9)
    norm = torch.cat([p.grad for p in params]).norm()
    assert nn.utils.clip_grad_norm_(params, 1e9) == pytest.approx(float(norm))
    assert nn.utils.get_total_norm([p.grad for p in params]) == pytest.approx(float(norm))
    params[0].grad[0] = math.inf
    with pytest.raises(RuntimeError, match=r"non-finite|is inf, so"):
        nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def clip_and_compare(strategy, norm_type, how):
    """Clip the sharded model one way and a plain one by torch; return the norm's bits."""
    plain, model = (
        with_grads(make_model()),
        with_grads(zshard.FSDP(make_model(), strategy=strategy)),
    )
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    if how == "model":
        norm = model.clip_grad_norm_(0.5, norm_type)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_shards_of(model, plain)
    again = model.clip_grad_norm_(1e9, norm_type)  # below the limit: nothing is scaled
    assert_shards_of(model, plain)
    assert again <= 0.5 * 1.0001 and norm.dtype == torch.float32
    return norm.view(torch.int32).item()


@ranks(2, 3)
@pytest.mark.parametrize("how", ["model", "torch"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_norm_equals_the_full_models(pool, strategy, how):
    for norm_type in NORMS:
        assert len(set(pool.run(clip_and_compare, strategy, norm_type, how))) == 1


@on_ranks(2)
def test_unsharded_parameters_count_once():
    plain, model = with_grads(make_model()), with_grads(zshard.FSDP(make_model()))
    extras = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    norms = []
    for each, extra in zip((plain, model), extras, strict=True):
        extra.grad = torch.full((4,), 3.0)
        norms.append(nn.utils.clip_grad_norm_([*each.parameters(), extra], 1.0))
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
    assert_shards_of(model, plain)
    torch.testing.assert_close(extras[1].grad, torch.full((4,), 3.0) / norms[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@on_ranks(2)
def test_nonfinite_gradient_on_one_rank_reaches_all(bad):
    model = with_grads(zshard.FSDP(make_model()))
    grads = [p.grad for p in model.parameters() if p.grad.numel()]
    if torch.distributed.get_rank() == 1:
        grads[0].to_local().view(-1)[0] = bad
    for clip in (
        lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
    ):
        with pytest.raises(RuntimeError, match=r"norm of order 2.0 .* is (nan|inf)"):
            clip()
    assert not model.clip_grad_norm_(1.0).isfinite()
    for grad in map(zshard.to_local, grads):
        assert (grad.isnan() | (math.isinf(bad) & (grad == 0))).all(), grad


@on_ranks(2)
def test_gradients_without_a_global_norm_are_refused():
    model = with_grads(zshard.FSDP(make_model()))
    with pytest.raises(ValueError, match="norm_type must be a positive number or inf, got 0"):
        model.clip_grad_norm_(1.0, 0.0)
    for param in model.parameters():
        param.grad = param.grad * 2
    params, one = list(model.parameters()), torch.tensor(1.0)
    table = {
        "a model": lambda: model.clip_grad_norm_(1e-9),
        "torch": lambda: nn.utils.clip_grad_norm_(params, 1e-9),
        "torch by a norm": lambda: nn.utils.clip_grads_with_norm_(params, 1e-9, one),
    }
    said = ".grad of sharded parameter '0.weight' was rep"
    all_refused({name: (clip, RuntimeError, said) for name, clip in table.items()})
