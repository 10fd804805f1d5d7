"""Stochastic rounding of bfloat16 parameters: unbiased, and bit-identical on every device and rank
(on shards: test_eight_bit_sharded.py).

Bounds on averages are 5 standard deviations for independent random bits; seeds are fixed, so a test
that passes once always passes.
"""

import math

import pytest
import torch
from compare import assert_same
from optim_cases import assert_same_bits, give_grads, make_params, train
from rows import all_raise
from torch import nn

import zshard
from zshard import _core

BF16 = torch.bfloat16
ULP = 2.0**-7  # of bfloat16 in [1, 2)
N = 1 << 18


def bf16_param(values):
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float32).to(BF16))


def moved(start, change, steps=1, seed=0):
    """Return N elements of `start` after steps of plain SGD that add `change`, as float64."""
    param = bf16_param(torch.full((N,), start))
    optimizer = zshard.SGD([param], lr=1.0, stochastic_rounding=True, rounding_seed=seed)
    for _ in range(steps):
        param.grad = torch.full((N,), -change).to(BF16)
        optimizer.step()
    return param.detach().double()


# --- unbiased rounding ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", [1 / 64, 0.25, 0.5, 0.875])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_is_unbiased_to_neighboring_values(sign, part):
    got = sign * moved(sign * 1.0, sign * part * ULP)
    assert set(got.tolist()) == {1.0, 1.0 + ULP}
    error = ULP * math.sqrt(part * (1 - part) / N)
    assert abs(got.mean().item() - (1 + part * ULP)) < 5 * error


def test_representable_values_stay_exact():
    params = make_params(BF16)
    before = [p.detach().clone() for p in params]
    optimizer = zshard.SGD(params, lr=1.0, stochastic_rounding=True)
    for p in params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        optimizer.step()
    assert_same_bits(params, before)
    assert_same(moved(1.0, 3 * ULP), torch.full((N,), 1.0 + 3 * ULP).double(), "the exact step")


def test_inf_nan_and_zeros_survive():
    inf, nan = math.inf, math.nan
    largest, smallest = torch.finfo(BF16).max, 2.0**-133
    start = [inf, -inf, nan, 0.0, -0.0, 1.0, 1.0, largest, -largest, smallest]
    grads = [1.0, 1.0, 1.0, 0.0, 0.0, nan, inf, 0.0, 0.0, 0.0]
    want = [inf, -inf, nan, 0.0, -0.0, nan, -inf, largest, -largest, smallest]
    for seed in range(50):
        param = bf16_param(start)
        param.grad = torch.tensor(grads).to(BF16)
        zshard.SGD([param], lr=1.0, stochastic_rounding=True, rounding_seed=seed).step()
        expected = torch.tensor(want).to(BF16)
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.signbit(param[3:5]).tolist() == [False, True]


def ups(**options):
    """+1 where half an ulp was rounded up, -1 where down: N fair coins."""
    return torch.where(moved(1.0, ULP / 2, **options) > 1.0, 1.0, -1.0)


def correlation(a, b):
    return abs((a * b).mean().item()) * math.sqrt(a.numel())  # in standard deviations


def test_random_bits_are_independent():
    coins = ups()
    for lag in (1, 2, 3, 4, 8, 16, 32, 64, 4096):
        assert correlation(coins[lag:], coins[:-lag]) < 5, lag
    for seed in (1, 2, 1 << 32, -1):
        assert correlation(coins, ups(seed=seed)) < 5, seed
    param = bf16_param(torch.ones(N))
    optimizer = zshard.SGD([param], lr=1.0, stochastic_rounding=True)
    seen = []
    for _ in range(4):
        with torch.no_grad():
            param.fill_(1.0)
        param.grad = torch.full((N,), -ULP / 2).to(BF16)
        optimizer.step()
        seen.append(torch.where(param.detach() > 1.0, 1.0, -1.0))
    assert_same(seen[0], coins, "the first step's coins")
    for i, a in enumerate(seen):
        for j, b in enumerate(seen[:i]):
            assert correlation(a, b) < 5, f"steps {i} and {j}"


def test_state_decays_unlike_rounding_to_nearest():
    """0.999 of a bfloat16 rounds back to itself, so a second moment would never shrink."""
    steps = 200
    left = {}
    for stochastic in (True, False):
        param = bf16_param(torch.zeros(1 << 14))
        optimizer = zshard.AdamW([param], lr=0.0, stochastic_rounding=stochastic)
        param.grad = torch.ones_like(param)
        optimizer.step()
        state = optimizer.state[param]
        assert state["exp_avg_sq"].dtype == BF16
        state["exp_avg_sq"].fill_(1.0)
        param.grad = torch.zeros_like(param)
        for _ in range(steps):
            optimizer.step()
        left[stochastic] = state["exp_avg_sq"].double().mean().item()
    assert left[False] == 1.0
    spread = ULP * math.sqrt(steps / (1 << 14))  # generous: a coin of at most an ulp per step
    assert abs(left[True] - 0.999**steps) < 5 * spread


# --- bit-identical results on any layout ---------------------------------------------------------


def trained(pieces, **options):
    """Return the elements after five steps, split into parameters of `pieces` elements."""
    generator = torch.Generator().manual_seed(3)

    def parts():
        return [
            each.to(BF16) for each in torch.randn(sum(pieces), generator=generator).split(pieces)
        ]

    params = [nn.Parameter(part.clone()) for part in parts()]
    optimizer = zshard.AdamW(params, stochastic_rounding=True, **options)
    for _ in range(5):
        for p, grad in zip(params, parts(), strict=True):
            p.grad = grad
        optimizer.step()
    return torch.cat([p.detach() for p in params])


def test_results_are_independent_of_grouping():
    whole = trained([10_000])
    assert_same(trained([1, 4_999, 0, 5_000]), whole, "what four parameters become")
    assert_same(trained([31, 9_969]), whole, "what two parameters become")
    assert not torch.equal(whole, trained([10_000], rounding_seed=1))


def test_numbers_beyond_32_bits():
    """Keys change where the lower half wraps around, in the middle of a run as at its start."""
    first = 2**32 - 50

    def step(numbers, pieces):
        params = [bf16_param(torch.ones(n)) for n in pieces]
        for p in params:
            p.grad = torch.full_like(p, -ULP / 2)
        (group,) = zshard.SGD(params, 1.0, stochastic_rounding=True).param_groups
        plan = _core.OptimPlan("sgd", params, {}, set(), numbers)
        assert plan.step(group, {}) == ()
        return torch.cat([p.detach() for p in params])

    whole = step([first], [200])
    assert_same(step([first, 2**32], [50, 150]), whole, "the step of two parts")
    assert not torch.equal(whole[50:], step([0], [150]))


# --- scope and options ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", [zshard.AdamW, zshard.Adam, zshard.SGD])
def test_other_dtypes_are_unaffected(cls, dtype):
    mine, theirs = make_params(dtype), make_params(dtype)
    mixed = [*mine, *make_params(BF16)]
    a, b = cls(mixed, lr=0.1, stochastic_rounding=True), cls(theirs, lr=0.1)
    for step in range(3):
        give_grads(mixed, seed=step)
        give_grads(theirs, seed=step)
        a.step()
        b.step()
    assert_same_bits(mine, theirs)


def test_groups_have_the_options_only_if_enabled():
    bf16, other = make_params(BF16), make_params(BF16)
    plain = zshard.AdamW([{"params": bf16[:2]}, {"params": other, "stochastic_rounding": True}])
    assert "stochastic_rounding" not in plain.state_dict()["param_groups"][0]
    assert set(plain.param_groups[0]) == set(torch.optim.AdamW(bf16).param_groups[0])
    assert plain.param_groups[1]["rounding_step"] == 0

    optimizer = zshard.AdamW(
        [{"params": bf16[:2], "stochastic_rounding": False}, {"params": bf16[2:]}],
        stochastic_rounding=True,
        rounding_seed=9,
    )
    train([(optimizer, bf16)], steps=3)
    groups = optimizer.param_groups
    assert [group["stochastic_rounding"] for group in groups] == [False, True]
    assert groups[1]["rounding_seed"] == 9
    assert groups[1]["rounding_step"] == 3
    nearest = make_params(BF16)[:2]
    train([(zshard.AdamW(nearest), nearest)], steps=3)
    assert_same_bits(bf16[:2], nearest)


def test_an_option_alone_that_is_set_after_construction_is_refused_with_the_remedy():
    params = make_params(BF16)
    optimizer = zshard.AdamW(params)
    train([(optimizer, params)], steps=1)
    optimizer.param_groups[0]["stochastic_rounding"] = True
    with pytest.raises(ValueError, match="without rounding_seed and rounding_step: set all three"):
        optimizer.step()
    optimizer.param_groups[0].update(rounding_seed=1, rounding_step=0)
    optimizer.step()
    assert optimizer.param_groups[0]["rounding_step"] == 1


def test_step_without_gradients_does_not_count():
    params = make_params(BF16)
    optimizer = zshard.AdamW(params, stochastic_rounding=True)
    optimizer.step()
    assert optimizer.param_groups[0]["rounding_step"] == 0
    train([(optimizer, params)], steps=2)
    assert optimizer.param_groups[0]["rounding_step"] == 2


def test_unsupported_dtypes_and_options_are_refused():
    half, bf16 = make_params(torch.float16), make_params(BF16)
    rounded = zshard.AdamW(bf16, stochastic_rounding=True)
    all_raise(
        NotImplementedError,
        {
            "of shape (16,), which is float16": lambda: zshard.AdamW(
                half, stochastic_rounding=True
            ),
            "float16": lambda: rounded.add_param_group({"params": half}),
        },
    )
    said = "rounding_seed requires stochastic_rounding=True"
    all_raise(ValueError, {said: lambda: zshard.SGD(bf16, rounding_seed=3)})
    with pytest.raises(TypeError):
        zshard.SGD(bf16, stochastic_rounding=True, rounding_seed=0.5)


@pytest.mark.parametrize("cls", [zshard.AdamW, zshard.SGD])
def test_unsupported_parameters_raise(cls):
    across = nn.Parameter(torch.randn(6, 5).to(BF16).t())
    usual = bf16_param(torch.ones(4))
    optimizer = cls([usual, across], stochastic_rounding=True)
    give_grads([usual, across])
    with pytest.raises(NotImplementedError, match=r"contiguous bfloat16 parameters.*of 30"):
        optimizer.step()
    assert_same(usual, torch.ones(4).to(BF16), "the other parameter")  # nothing was changed before
    optimizer.param_groups[0]["stochastic_rounding"] = False
    optimizer.step()
