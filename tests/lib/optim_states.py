"""Shared code of the tests of optimizers' state dicts: trained models, and comparisons.

Two state dicts are compared as flat dicts of their values, bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from models import CASES, differences, train
from scenario import Scenario
from scenario import this_rank as rank

import zshard

FULL = ("full_shard", "shm")
HYBRID = [("hybrid_shard", 2, 2), ("hybrid_full", 2, 2), ("hybrid_shard_zero2", 2, 2)]

# Elementwise optimizers by name.
KINDS = {
    "amsgrad": lambda params: zshard.AdamW(params, amsgrad=True),
    "torch amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,  # keeps two numbers per parameter
    "ASGD": torch.optim.ASGD,
    "Adagrad": torch.optim.Adagrad,  # creates its state before the first step
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "no momentum": lambda params: zshard.SGD(params, lr=0.1),
}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested dicts, lists and tuples, by path, without the names of parameters
    in torch's groups."""
    if isinstance(value, Mapping):
        pairs = [(key, v) for key, v in value.items() if not str(key).endswith("param_names")]
    elif isinstance(value, list | tuple):  # torch's checkpoints turn tuples into lists
        pairs = list(enumerate(value))
    else:
        return {path: value}
    return {k: v for key, each in pairs for k, v in flat(each, f"{path}/{key}").items()}


def differ(ours: Any, theirs: Any) -> list[str]:
    """Return what differs, in any bit, between two optimizers' state dicts."""
    return differences(flat(ours), flat(theirs))


def trained(name: str, combination: Any, kind: str, steps: int = 2) -> tuple[Any, Any]:
    """Return a sharded model of a case and its optimizer, after some steps on this rank's
    batches."""
    training = Scenario(name, combination, kind).sharded(steps)
    return training.model, training.optimizer


def reference(name: str, kind: str, steps: int = 2) -> tuple[Any, Any]:
    """Return the same of a plain model under DDP, bit-identical on two ranks; the model is the
    module that DDP wraps."""
    training = Scenario(name, optimizer=kind).ddp(steps)
    return training.module, training.optimizer


def go_on(name: str, model: Any, optimizer: Any, first: int = 2, steps: int = 2) -> dict[str, Any]:
    """Continue training, from the batch of step `first` on; return the final state of model and
    optimizer."""
    train(model, CASES[name], optimizer, rank(), steps, first)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
