"""Shared code of the optimizers' tests: options, equal parameters, equal steps."""

import torch
from compare import assert_same
from torch import nn

import zshard
from zshard import FSDP
from zshard.extras.optimizers.matrices import hidden_matrices

SIZES = [(16,), (3, 5), (1,), (0,), (130, 77), (64, 1, 1), (4099,)]

ADAM_OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.3, 0.5), "eps": 1e-3, "lr": 0.5},
    {"betas": (0.0, 0.0)},
]
SGD_OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01, "maximize": True},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
]
PAIRS = [
    *((zshard.AdamW, torch.optim.AdamW, options) for options in ADAM_OPTIONS),
    *((zshard.Adam, torch.optim.Adam, options) for options in ADAM_OPTIONS),
    *((zshard.SGD, torch.optim.SGD, options) for options in SGD_OPTIONS),
]
IDS = [f"{ours.__name__}-{options}" for ours, _, options in PAIRS]


def make_params(dtype=torch.float32, sizes=SIZES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def give_grads(*lists, seed=0):
    """Set equal random gradients for the parameters of each list."""
    for params in zip(*lists, strict=True):
        seed += 1
        grad = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(seed))
        for param in params:
            param.grad = grad.to(param.dtype)


def train(optimizers_and_params, steps=5, start=0):
    """Step all optimizers side by side, with equal gradients."""
    for step in range(start, start + steps):
        give_grads(*(params for _, params in optimizers_and_params), seed=1000 * step)
        for optimizer, _ in optimizers_and_params:
            optimizer.step()


def assert_same_bits(mine, theirs):
    assert_same(mine, theirs, "the list of tensors")


def state_tensors(optimizer, params, names):
    return [optimizer.state[p][name] for p in params for name in names]


def reference(cls, params, **options):
    """Return torch's optimizer with the same numerics as ours: its fused Adam, its plain SGD."""
    fused = {} if cls is torch.optim.SGD else {"fused": True}
    return cls(params, **options, **fused)


class Pair:
    """Two optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()

    def step(self):
        for each in self.optimizers:
            each.step()


def muon(rest=zshard.AdamW, adamw=None, **options):
    """Return a function that makes zshard.Muon of a sharded model; of a plain one torch.optim.Muon
    for zshard.Muon's parameters, and `rest` for the others."""
    options = {"lr": 0.05, **options}

    def new_optimizer(model):
        if isinstance(model, FSDP):
            return zshard.Muon(model, adamw=adamw, **options)
        hidden = hidden_matrices(model)
        matrices = [p for p in model.parameters() if id(p) in hidden]
        others = [p for p in model.parameters() if id(p) not in hidden]
        return Pair(torch.optim.Muon(matrices, **options), rest(others))

    return new_optimizer
