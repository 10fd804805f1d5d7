"""A small model whose weights, gradients and optimizer state are numbers of a formula, bit for bit.

Checkpoints of it (fixtures/) are compared with the formulas, so a test
needs neither the code that wrote them nor a file of expected values. The output is linear in the
parameters, so gradients do not depend on the optimizer's steps; all numbers are short binary
fractions, so sums and products of them are exact.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compare import assert_same
from torch import Tensor, nn

import zshard

FOLDER = Path(__file__).resolve().parent / "fixtures"
STEPS = 2  # of the optimizer, before each save
LR = 0.25
BETAS = (0.5, 0.75)
ADAMW: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": 0.0}
MUON: dict[str, Any] = {"lr": LR, "momentum": 0.5, "weight_decay": 0.0}
WARMUP = {"warmup_max_lr": 1.0, "warmup_num_steps": 8, "warmup_type": "linear"}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": ADAMW},
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 0,
    "fp16": {"enabled": True, "initial_scale_power": 4},
}
SEED = 7
KINDS = (
    *("plain", "per_host", "ema", "eight_bit", "muon", "kept", "deepspeed"),
    *("dcp_fsdp2", "dcp_zshard", "state_dicts"),
    *("accelerate", "accelerate_ddp", "transformers", "lightning"),
)


def rank() -> int:
    return int(os.environ["RANK"])


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


class Net(nn.Module):
    """Matrices, a tied one, a BatchNorm with its buffers, and a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12))
        self.low = nn.Linear(12, 5, dtype=torch.bfloat16)
        self.unembed = nn.Linear(8, 7, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar, whose gradient for each parameter is `slope` of it if x is of ones."""
        total = x.new_zeros(())
        for name, param in self.named_parameters():
            total = total + (param.float() * slope(name, param.shape)).sum()
        return total * x.mean()


class Untied(Net):
    """A Trainer of transformers cannot save a tied matrix of a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.unembed.weight = nn.Parameter(self.embed.weight.detach().clone())


def net() -> Net:
    """Return a model with other weights than those of the checkpoints."""
    torch.manual_seed(0)
    return Net()


NAMES = sorted(net().state_dict())
TRAINED = dict(net().named_parameters()).keys()


def counted(shape: Any) -> Tensor:
    """Return 0, 1, 2, ... in a shape."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def weights(shift: float = 0.0) -> dict[str, Tensor]:
    """Return the model's state dict. shift: added to all but integers."""
    found = {}
    for name, like in Net().state_dict().items():
        value = (counted(like.shape) - like.numel() // 2) / 8 + NAMES.index(name)
        found[name] = (value + shift if like.is_floating_point() else value).to(like.dtype)
    found["unembed.weight"] = found["embed.weight"]
    return found


def slope(name: str, shape: Any) -> Tensor:
    """Return the gradient of a parameter."""
    return ((counted(shape) + NAMES.index(name)) % 7 - 3) / 4


def adam_state(model: type[Net] = Net) -> dict[str, dict[str, Tensor]]:
    """Return the state of AdamW by parameter name after STEPS steps with BETAS."""
    found = {}
    for name, param in model().named_parameters():
        grad = slope(name, param.shape).to(param.dtype)
        state = {"exp_avg": torch.zeros_like(grad), "exp_avg_sq": torch.zeros_like(grad)}
        for _ in range(STEPS):
            state["exp_avg"] = state["exp_avg"] * BETAS[0] + grad * (1 - BETAS[0])
            state["exp_avg_sq"] = state["exp_avg_sq"] * BETAS[1] + grad * grad * (1 - BETAS[1])
        found[name] = {"step": torch.tensor(float(STEPS)), **state}
    return found


def muon_state() -> dict[str, dict[str, Tensor]]:
    """Return the state of Muon by parameter name; its momentum of 0.5 is an average, as exp_avg."""
    found = adam_state()
    matrices = ("hidden.0.weight", "low.weight")
    return found | {name: {"momentum_buffer": found[name]["exp_avg"]} for name in matrices}


def coded_state() -> dict[str, dict[str, Tensor]]:
    """Return state of AdamW8bit(master="int8", min_8bit_size=0) by parameter name. No training had
    it: codes are counted."""
    found = {}
    for name, param in Net().named_parameters():
        count = counted(param.shape)
        groups = torch.arange(-(-param.numel() // 32))
        found[name] = {
            "step": torch.tensor(5.0),
            "exp_avg": (count % 256).to(torch.uint8),
            "exp_avg_scale": (120 + groups).to(torch.uint8),
            "exp_avg_sq": (count * 3 % 256).to(torch.uint8),
            "exp_avg_sq_scale": (110 + groups).to(torch.uint8),
        }
        if param.dtype == torch.bfloat16:
            found[name]["low_bits"] = (count % 256 - 128).to(torch.int8)
    return found


def new_optimizer(kind: str, model: Any) -> Any:
    """Return an optimizer of zshard's class of that name."""
    if kind == "AdamW8bit":
        return zshard.AdamW8bit(model.parameters(), **ADAMW, master="int8", min_8bit_size=0)
    if kind == "Muon":
        return zshard.Muon(model, **MUON, adamw=ADAMW)
    return zshard.AdamW(model.parameters(), **ADAMW)


def data_position() -> tuple[zshard.DataPosition, Any]:
    """Return the position of a run in 64 samples, and the loader."""
    position = zshard.DataPosition(64, seed=3)
    return position, torch.utils.data.DataLoader(range(64), 4, sampler=position.sampler)


def script_state(rank: int) -> dict[str, Any]:
    """Return a script's values to save with its model: one of each kind that `extra` takes."""
    return {
        "rank": rank,
        "loss": (1, 2.5, None),
        "seen": torch.arange(3),
        "low": torch.ones(2, dtype=torch.bfloat16),
        "by number": {1: "one", 2: float("inf")},
        "names": {"a"},
        "scheduler": {"last_epoch": STEPS, "base_lrs": [LR]},
    }


def is_seeded(rank: int) -> bool:
    """Return whether the generators are in that state."""
    expected = random.Random(SEED + rank).getstate(), torch.Generator().manual_seed(SEED + rank)
    return random.getstate() == expected[0] and torch.equal(
        torch.get_rng_state(), expected[1].get_state()
    )


# --- comparisons ----------------------------------------------------------------------------------

STATES = {"AdamW": adam_state(), "AdamW8bit": coded_state(), "Muon": muon_state()}


class Saved(NamedTuple):
    """The contents of a folder: an optimizer of that class, at that learning rate, and weights."""

    kind: str = "AdamW"
    lr: float = LR
    shift: float = 0.0
    dtype: torch.dtype | None = None  # of all weights


def check_model(model: nn.Module, shift: float = 0.0, dtype: torch.dtype | None = None) -> None:
    expected = weights(shift)
    for name, value in expected.items():
        expected[name] = value.to(dtype) if value.is_floating_point() else value
    assert_same(dict(model.state_dict()), expected, "the model")


def check_optimizer(model: nn.Module, optimizer: Any, state: Any, lr: float) -> None:
    named = zshard.optim_state_dict(model, optimizer)
    assert_same(named["state"], state, "the optimizer's state")
    assert {group["lr"] for group in named["param_groups"]} == {lr}


def check(model: nn.Module, optimizer: Any, saved: Saved) -> None:
    check_model(model, saved.shift, saved.dtype)
    state: dict[str, dict[str, Tensor]] = STATES[saved.kind]
    if saved.dtype is not None:
        state = {n: {k: v.to(saved.dtype) for k, v in own.items()} for n, own in state.items()}
    check_optimizer(model, optimizer, state, saved.lr)
