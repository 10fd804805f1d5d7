"""AdamW8bit, Adam8bit and SGD8bit: the arithmetic of a step, and the parameters that have 8
bits."""

import numpy as np
import pytest
import torch
from compare import assert_same
from optim_cases import assert_same_bits, give_grads, make_params
from rows import all_raise
from torch import nn

import zshard
from zshard.extras.optimizers import codes

BF16 = torch.bfloat16
MOMENTS = ["exp_avg", "exp_avg_sq", "momentum_buffer"]


# --- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MOMENTS)
def test_a_decoded_code_encodes_to_itself(name):
    largest = 126 if name != "exp_avg_sq" else 254  # beyond it the exponent is one more
    values = torch.arange(256, dtype=torch.uint8)
    values[127 if name != "exp_avg_sq" else 0] = values[255] = 1
    values = values.view(-1, 8)
    all_codes = torch.cat([values, torch.full((len(values), 24), largest, dtype=torch.uint8)], 1)
    for exponent in (1, 2, 100, 127, 200, 250):
        scale = torch.full((len(all_codes),), exponent, dtype=torch.uint8)
        decoded = codes.decode(name, all_codes, scale)
        assert_same(codes.decode(name, *codes.encode(name, decoded)), decoded, f"2**{exponent}")
    zeros = torch.zeros(32, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    assert codes.decode(name, *zeros).tolist() == [0.0] * 32  # new state


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 2.0**125])
def test_a_group_with_an_element_out_of_range_becomes_nan_and_no_other(wrong):
    values = torch.ones(96)
    values[40] = wrong
    decoded = codes.decode("exp_avg", *codes.encode("exp_avg", values))
    assert decoded.isnan().tolist() == [False] * 32 + [True] * 32 + [False] * 32


# --- one step, computed by other means ------------------------------------------------------------

F = np.float32


class Reference:
    """AdamW8bit's step of one flat parameter in NumPy, whose float32 operations are IEEE's."""

    STEPS = {"exp_avg": (197887, 149381, 18, F(2**-4), F((1 - 2**-6 - 2**-4) / 2))}  # noqa: RUF012
    STEPS["exp_avg_sq"] = (298761, 395773, 19, F(2**-16), F((1 - 2**-5 - 2**-16) / 2))

    def __init__(self, values, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, decay=1e-2):
        self.param = values.numpy().astype(F)
        self.moments = {name: np.zeros_like(self.param) for name in self.STEPS}
        self.step, self.options = 0, (lr, betas, eps, decay)

    def take(self, grad):
        lr, betas, eps, decay = self.options
        grad = grad.numpy().astype(F)
        first, second = self.moments["exp_avg"], self.moments["exp_avg_sq"]
        self.step += 1
        correction = F(np.sqrt(1 - betas[1] ** self.step))
        first = F(1 - betas[0]) * (grad - first) + first
        second = F(1 - betas[1]) * grad * grad + second * F(betas[1])
        neg_step = F(F(-lr / (1 - betas[0] ** self.step)) * correction)
        change = neg_step * first / (np.sqrt(second) + F(F(eps) * correction))
        self.param = self.param * F(1 - lr * decay) + change
        self.moments = {"exp_avg": self.coded("exp_avg", first)}
        self.moments["exp_avg_sq"] = self.coded("exp_avg_sq", second)

    def coded(self, name, values):
        """Return values after encoding at this step."""
        by_element, by_round, shift, floor, fill = self.STEPS[name]
        number = np.arange(len(values), dtype=np.uint64)
        offset = (number * by_element + (self.step - 1) * by_round) & ((1 << shift) - 1)
        bits = np.abs(values).view(np.uint32)
        groups = np.maximum.reduceat(bits, np.arange(0, len(bits), 32)) >> 23
        power = np.repeat(np.maximum(groups, 1), 32)[: len(bits)]
        scale = ((254 - power) << 23).astype(np.uint32).view(F) * fill
        low = floor.view(np.uint32)
        above = (np.abs(values) * scale + floor).view(np.uint32) - low
        code = (above + offset.astype(np.uint32)) >> shift
        code = np.maximum(code, 1) if name == "exp_avg_sq" else code
        back = ((code << shift) + low).astype(np.uint32).view(F) - floor
        back = back * ((power << 23).astype(np.uint32).view(F) * (F(1) / fill))
        return np.copysign(back, values)


def test_a_step_has_the_bits_of_the_formulas():
    sizes = [(4100,), (33, 5), (32,), (7,)]
    for size in sizes:
        param = make_params(sizes=[size])[0]
        reference = Reference(param.detach().reshape(-1))
        optimizer = zshard.AdamW8bit([param], min_8bit_size=0)
        for step in range(20):
            give_grads([param], seed=step)
            optimizer.step()
            reference.take(param.grad.reshape(-1))
        ours = zshard.AdamW8bit.to_fp32(optimizer.state_dict())["state"][0]
        for name, values in reference.moments.items():
            assert_same(ours[name].reshape(-1), torch.from_numpy(values), f"{name} of {size}")
        assert_same(param.detach().reshape(-1), torch.from_numpy(reference.param), f"{size}")


def test_a_bfloat16_parameter_with_master_follows_the_float32_one():
    exact = make_params(sizes=[(8192,)])
    params = {master: [nn.Parameter(exact[0].detach().to(BF16))] for master in (None, "int8")}
    with torch.no_grad():
        exact[0].copy_(params[None][0])
    optimizers = {m: zshard.AdamW8bit(p, lr=1e-5, master=m) for m, p in params.items()}
    whole = zshard.AdamW8bit(exact, lr=1e-5)
    for step in range(300):
        give_grads(exact, *params.values(), seed=step)
        exact[0].grad = params[None][0].grad.float()
        for each in (*optimizers.values(), whole):
            each.step()
    low = optimizers["int8"].state[params["int8"][0]]["low_bits"]
    high = params["int8"][0].detach().view(torch.int16).to(torch.int32) << 16
    joined = (high + (low.to(torch.int32) << 8)).view(torch.float32)
    error = (joined - exact[0].detach()).abs().mean()
    assert error < 2**-13 * exact[0].abs().mean()
    assert error < (params[None][0].detach().float() - exact[0].detach()).abs().mean() / 10


def test_sgd_without_momentum_keeps_low_bits():
    param = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = zshard.SGD8bit([param], lr=2.0**-14, master="int8")
    for _ in range(64):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert list(optimizer.state[param]) == ["low_bits"]
    assert param.tolist() == [1 - 2.0**-8] * 64


# --- which parameters ----------------------------------------------------------------------------


def test_small_parameters_and_named_ones_keep_float32_moments():
    large, small, named = make_params(sizes=[(64, 64), (63, 65), (64, 65)])
    groups = [{"params": [large, small]}, {"params": [named], "bits": 32}]
    optimizer = zshard.AdamW8bit(groups, master="int8")
    give_grads([large, small, named])
    optimizer.step()
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in (large, small, named)]
    assert dtypes == [torch.uint8, torch.float32, torch.float32]


def test_bytes_of_parameter_and_state():
    for dtype, options, most in ((torch.float32, {}, 6.063), (BF16, {"master": "int8"}, 5.063)):
        (param,) = make_params(dtype, sizes=[(1 << 16,)])
        optimizer = zshard.AdamW8bit([param], **options)
        give_grads([param])
        optimizer.step()
        held = [param, *optimizer.state[param].values()]
        assert sum(x.numel() * x.element_size() for x in held) / param.numel() <= most


# --- refusals ------------------------------------------------------------------------------------


def test_unsupported_options_are_refused():
    def new(dtype=torch.float32, **options):
        return lambda: zshard.AdamW8bit(make_params(dtype), **options)

    all_raise(ValueError, {"'int8'": new(master="int16"), "at least 0": new(min_8bit_size=-1)})
    for dtype in (torch.float64, torch.float16):
        all_raise(NotImplementedError, {"float32 and bfloat16": new(dtype)})
    all_raise(NotImplementedError, {"zshard.AdamW": new(amsgrad=True)})
    for option in ("amsgrad", "stochastic_rounding"):
        _, optimizer = stepped()
        optimizer.param_groups[0][option] = True
        all_raise(NotImplementedError, {f"{option}=True: use zshard.AdamW": optimizer.step})


def stepped(**options):
    params = make_params(BF16, sizes=[(1 << 13,)])
    optimizer = zshard.AdamW8bit(params, **options)
    give_grads(params)
    optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("option", [("master", "int8"), ("min_8bit_size", 1 << 20), ("bits", 32)])
def test_the_form_of_the_state_cannot_change_after_the_first_step(option):
    params, optimizer = stepped()
    optimizer.param_groups[0].update([option])
    give_grads(params)
    with pytest.raises(ValueError, match="pass them to another optimizer, and load"):
        optimizer.step()
    again = zshard.AdamW8bit(params, **({} if option[0] == "bits" else dict([option])))
    again.param_groups[0].update([option])
    again.load_state_dict(optimizer.state_dict())
    again.step()


def test_a_param_group_may_be_removed():
    a, b = make_params(torch.float32, sizes=[(80, 80), (80, 80)])
    optimizer = zshard.AdamW8bit([{"params": [a]}, {"params": [b], "bits": 32}])
    for _ in range(2):
        give_grads([a, b])
        optimizer.step()
        del optimizer.param_groups[:-1]
    assert [optimizer.state[param]["step"].item() for param in (a, b)] == [1, 2]
    optimizer.param_groups[0]["bits"] = 8
    with pytest.raises(ValueError, match="after the first step"):
        optimizer.step()


@pytest.mark.parametrize("saved", [None, "int8"])
@pytest.mark.parametrize("made", [None, "int8"])
def test_a_load_keeps_low_bits_that_either_side_has(saved, made):
    _, before = stepped(master=saved)
    params, after = stepped(master=made)
    after.load_state_dict(before.state_dict())
    give_grads(params)
    after.step()
    kept = saved or made
    assert after.param_groups[0]["master"] == kept
    assert ("low_bits" in after.state[params[0]]) == (kept is not None)


def test_a_sparse_gradient_is_refused_and_changes_nothing():
    model = nn.Sequential(nn.Embedding(512, 16, sparse=True), nn.Linear(16, 300))
    optimizer = zshard.AdamW8bit(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="dense gradients"):
        optimizer.step()
    assert_same_bits([param.detach() for param in model.parameters()], before)


def test_a_load_of_32_bit_state_keeps_a_groups_own_form_and_a_scripts_numbers():
    params = make_params(torch.float32)
    plain = torch.optim.AdamW(params)
    give_grads(params)
    plain.step()
    plain.state[params[0]]["count"] = 3
    group = {"params": params, "bits": 32, "min_8bit_size": 0}
    optimizer = zshard.AdamW8bit([group])
    optimizer.load_state_dict(plain.state_dict())
    group = optimizer.param_groups[0]
    assert (group["bits"], group["min_8bit_size"]) == (32, 0)
    assert optimizer.state[params[0]]["count"] == 3
    for param in params:
        assert torch.equal(optimizer.state[param]["exp_avg"], plain.state[param]["exp_avg"])
