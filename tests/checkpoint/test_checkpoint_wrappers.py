"""Checkpoints of models that are compiled, recompute their blocks, or are within DDP.

A checkpoint has the names of the plain model, however the model is run, and loads into
one that is run in another way.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import tensors_in
from models import ddp, differences
from optim_states import differ
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import zshard
from zshard import FSDP
from zshard.checkpoint.opening import read_manifest


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)  # whose state dict is of another version

    def forward(self, x):
        return x + self.norm(self.inner(x)).relu()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def fsdp(model):
    return FSDP(model, auto_wrap_policy={Part})


def recomputed(model):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Part | nn.Embedding))
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_within(model):
    """A compiled part, and one that is recomputed and compiled as well; the tied head, too."""
    for i, each in enumerate((compiled, lambda part: checkpoint_wrapper(compiled(part)))):
        model.parts[i] = each(model.parts[i])
    model.head = compiled(model.head)
    return model


WAYS = {
    "as it is": fsdp,
    "recomputed": lambda model: recomputed(fsdp(model)),
    "recomputed before": lambda model: fsdp(recomputed(model)),
    "compiled": lambda model: compiled(fsdp(model)),
    "compiled before": lambda model: fsdp(compiled(model)),
    "compiled within": lambda model: compiled_within(fsdp(model)),
    "ddp": lambda model: compiled(ddp(model)),
}


def made(way, seed):
    torch.manual_seed(seed)
    model = WAYS[way](Whole())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer, value):
    for param in model.parameters():  # what it computes is of no interest here
        param.grad = torch.full_like(param, value)
    optimizer.step()


def wrong_names(path):
    """Which names in a checkpoint are not those of the plain model."""
    params = dict(Whole().named_parameters())
    told = read_manifest(path)
    found = tensors_in(path).keys() ^ (Whole().state_dict().keys() - {"head.weight"})
    found |= told.optimizer["state"].keys() ^ params.keys()
    found |= set(told.optimizer["groups"][0]["params"]) ^ params.keys()
    return sorted(found) + ([] if told.tied == {"head.weight": "table.weight"} else [told.tied])


def there_and_back(folder):
    """What is wrong in the files of models that are run in each way, and after a load into each."""
    model, optimizer = made("as it is", 1)
    step(model, optimizer, 0.5)
    zshard.save(f"{folder}/plain", model, optimizer)
    found = wrong_names(f"{folder}/plain")
    for way in WAYS:
        model, optimizer = made(way, 2)
        step(model, optimizer, 0.25)
        loaded = zshard.load(f"{folder}/plain", model, optimizer)
        found += [*loaded.missing_keys, *loaded.unexpected_keys]
        zshard.save(f"{folder}/{way}", model, optimizer)
        found += wrong_names(f"{folder}/{way}")
        for stem in ("model", "optimizer"):
            pair = (tensors_in(f"{folder}/{name}", stem) for name in ("plain", way))
            found += [f"{way}: {each}" for each in differences(*pair)]
    return found


def test_any_way_into_any_other(pool2, tmp_path):
    assert pool2.run(there_and_back, tmp_path) == [[], []]


def test_a_compiled_part_that_is_there_twice(tmp_path):
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Linear(2, 2))
    model.append(model[0])
    zshard.save(tmp_path / "x", model)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    zshard.load(tmp_path / "x", model)
    assert differences(dict(model.state_dict()), wanted) == []


def by_name(way):
    """The optimizer's state by names, from a model that is run in a way into the plain one's."""
    model, optimizer = made(way, 1)
    step(model, optimizer, 0.5)
    state = zshard.optim_state_dict(model, optimizer)
    other, theirs = made("as it is", 2)
    zshard.load_optim_state_dict(other, theirs, state)
    back = zshard.optim_state_dict(other, theirs)
    zshard.load_optim_state_dict(model, optimizer, back)
    return differ(back, state), list(state["state"]) == [n for n, _ in Whole().named_parameters()]


def test_the_optimizers_state_by_names(pool2):
    for way in ("recomputed", "compiled", "compiled within"):
        assert pool2.run(by_name, way) == [([], True)] * 2, way


def test_a_recomputed_parameter_that_is_not_finite(tmp_path):
    model, _ = made("recomputed", 1)
    zshard.save(tmp_path, model, step=1, keep_last=1)
    with torch.no_grad():
        model.parts[0].inner.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match=r"NaN or infinite values in 'parts\.0\.inner\.weight'"):
        zshard.save(tmp_path, model, step=2, keep_last=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
