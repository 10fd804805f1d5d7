"""Dtypes of parameters: frozen ones of any dtype, complex ones, and gradients of another dtype.

Frozen parameters of integer and 8-bit float dtypes, as in a quantized model, are sharded bit for
bit and never cast: in forward, where mixed precision casts other parameters, in state dicts, and in
a checkpoint on another number of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same
from models import COMBINATIONS, make
from scenarios import WIDTH, forward_backward, message_of, wrong_in
from spawn import on_ranks
from torch import Tensor, nn

import zshard
from zshard import FSDP, MixedPrecision

DTYPES = (torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn)


class Body(nn.Module):
    """A linear layer and frozen parameters; `seen` has their values in a forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        for dtype in DTYPES:
            bits = torch.randint(0, 2 if dtype == torch.bool else 100, (3000 * dtype.itemsize,))
            value = bits.to(torch.uint8).view(dtype)
            name = str(dtype).removeprefix("torch.")
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.named_parameters(recurse=False)
        self.seen = {name: param.detach().clone() for name, param in own}
        out: torch.Tensor = self.linear(x)
        return out


def frozen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters(recurse=False)}


def check_frozen(model: nn.Module) -> None:
    expected, state = frozen(Body()), model.state_dict()
    assert_same({name: state[name] for name in expected}, expected, "the state")
    full = {name: zshard.full_tensor(p) for name, p in model.named_parameters(recurse=False)}
    assert_same(full, expected, "full tensors")


def save(half: bool, transport: str, folder: str) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16) if half else None
    model = FSDP(Body(), transport=transport, mixed_precision=precision)
    model(torch.ones(1, 8)).float().sum().backward()
    assert_same(model.seen, frozen(Body()), "values in forward")
    check_frozen(model)
    zshard.save(f"{folder}/saved", model)
    load(folder)


def load(folder: str) -> None:
    model = FSDP(Body(seed=1))
    zshard.load(f"{folder}/saved", model)
    check_frozen(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("half", [False, True])
def test_frozen_parameters_keep_their_bits(pool2, pool3, tmp_path, half, transport):
    pool2.run(save, half, transport, str(tmp_path))
    pool3.run(load, str(tmp_path))


class Own(nn.Parameter):
    """A parameter with a custom class, which is not guarded."""


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_full_values_of_parameters_of_other_classes(transport):
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for layer in model:
        layer.weight = Own(layer.weight.detach())
    model = FSDP(model, transport=transport)
    for each in (plain, model):
        each(torch.ones(2, 40)).sum().backward()
    full = {name: zshard.full_tensor(p) for name, p in model.named_parameters()}
    params = dict(plain.named_parameters())
    grads = {name: p.grad for name, p in params.items()}
    assert_same(full, params, "full tensors")
    assert_same(dict(zshard.whole_named_parameters(model)), params, "parameters")
    assert_same(dict(zshard.whole_named_parameters(model, grads=True)), grads, "gradients")
    expected = {name: float(p.norm()) for name, p in params.items()}
    assert zshard.named_norms(model) == pytest.approx(expected)


# --- gradients of a different dtype ---------------------------------------------------------------


def two_layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


@on_ranks(2)
def test_frozen_parameters_may_have_another_gradient_dtype() -> None:
    model = FSDP(two_layers(), strategy="no_shard")
    model[1].weight.requires_grad_(False).grad_dtype = torch.float32
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_different_gradient_dtype_is_refused_by_name(combination, dtype):
    strategy, transport = combination
    words = ["parameter '1.weight' has", "grad_dtype", "MixedPrecision(param_dtype=torch.bfloat16)"]

    def wrap(model, **options):
        return FSDP(model, strategy=strategy, transport=transport, **options)

    def step(model):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()

    def set_and_step(model):
        model[1].weight.grad_dtype = dtype
        step(model)

    def refused(call):
        text = message_of(call, NotImplementedError)
        assert all(word in text for word in words), text

    early, late = two_layers(), wrap(two_layers())
    early[1].weight.grad_dtype = dtype
    refused(lambda: wrap(early))
    refused(lambda: set_and_step(late))
    if late[1].weight.grad_dtype == dtype:  # unsharded: it was not checked when it was set
        refused(lambda: step(late))
        late[1].weight.grad_dtype = torch.bfloat16
    step(late)
    remedy = wrap(two_layers(torch.float32), mixed_precision=MixedPrecision(torch.bfloat16))
    remedy[1].weight.grad_dtype = torch.float32  # its own dtype: no change
    step(remedy)
    assert {p.grad.dtype for p in remedy.parameters()} == {torch.float32}


# --- complex parameters ---------------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.first_value())

    def first_value(self) -> Tensor:
        return torch.randn(WIDTH, 150, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Any:
        return (x.to(torch.complex64) @ self.weight).abs()


class MixingAsReal(Mixing):
    def first_value(self) -> Tensor:
        return torch.view_as_real(super().first_value())

    def forward(self, x: Tensor) -> Any:
        return (x.to(torch.complex64) @ torch.view_as_complex(self.weight)).abs()


@pytest.mark.parametrize("strategy", ("full_shard", "no_shard"))
@on_ranks(2)
def test_complex_parameter_that_trains_is_refused(strategy):
    said = message_of(lambda: FSDP(make(Mixing), strategy=strategy), ValueError)
    assert "'weight'" in said and "nn.Parameter(torch.view_as_real(w))" in said


def test_real_view_of_a_complex_parameter_trains(pool2):
    assert pool2.run(wrong_in, MixingAsReal, forward_backward, True) == [{}, {}]
