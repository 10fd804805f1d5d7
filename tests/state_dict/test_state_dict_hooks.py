"""User code in saving and loading: hooks and methods see full tensors, or raise.

A hook works on a sharded model as on its plain twin, whether it was registered before or after
wrapping.
"""

from __future__ import annotations

import pytest
import torch
from models import Nested, Net, differences, make, wrapped
from spawn import on_ranks
from torch import nn

from zshard import FSDP

FULL = ("full_shard", "shm")
EARLY = pytest.mark.parametrize("early", [True, False], ids=["before wrapping", "after wrapping"])


def with_hooks(register, early, policy):
    """Return a sharded Net with the hooks that `register(model)` adds, before or after wrapping."""
    model = make(Net)
    if early:
        register(model)
    model = FSDP(model, auto_wrap_policy=policy)
    if not early:
        register(model)
    return model


class Own(nn.Module):
    """Saves and loads in its own format: transposed, under another name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.rand(()))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight").t() * self.scale

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()
        assert state_dict[prefix + "weight"].shape == self.weight.shape
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x):
        return x @ self.weight * self.scale


def owns():
    return nn.Sequential(Own(), nn.Sequential(Own(), nn.Linear(3, 5)), Own())


def methods_of_the_users_class(combination, policy):
    model, plain = wrapped(owns, combination, auto_wrap_policy=policy), make(owns)
    found = differences(model.state_dict(), plain.state_dict())
    found += differences(model[1].state_dict(), plain[1].state_dict())
    state = make(owns, 2).state_dict()
    model.load_state_dict(state)
    plain.load_state_dict(state)
    return found + differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("policy", [None, {Own}], ids=["one unit", "units"])
def test_user_defined_methods_see_full_tensors(pool2, policy):
    for combination in [FULL, ("full_shard", "c10d")]:
        assert pool2.run(methods_of_the_users_class, combination, policy) == [[], []]


def shapes_in_hooks(early):
    """Return {kind: {name: shape}} that hooks on each module see of its own entries; also load with
    hooks that double each value."""
    seen = {"save": {}, "load": {}, "self": {}}

    def on_save(module, state, prefix, local_metadata):
        own = [prefix + name for name in module._parameters]
        seen["save"].update({key: tuple(state[key].shape) for key in own})

    def on_load(module, state, prefix, *_):
        for name, param in module._parameters.items():
            seen["load"][prefix + name] = tuple(state[prefix + name].shape)
            seen["self"][prefix + name] = tuple(param.shape)
            state[prefix + name] = state[prefix + name] * 2

    def register(model):
        for module in model.modules():
            module.register_state_dict_post_hook(on_save)
            module.register_load_state_dict_pre_hook(on_load)

    plain, state = make(Net), make(Net, seed=2).state_dict()
    model = with_hooks(register, early, {Nested})
    model.load_state_dict(state)
    plain.load_state_dict({name: value * 2 for name, value in state.items()})
    return seen, differences(model.state_dict(), plain.state_dict())


@EARLY
def test_hooks_on_all_modules_see_full_shapes(pool2, early):
    shapes = {name: tuple(value.shape) for name, value in make(Net).state_dict().items()}
    for seen, found in pool2.run(shapes_in_hooks, early):
        assert seen == {"save": shapes, "load": shapes, "self": shapes}
        assert found == []


class Positions(nn.Module):
    """Accepts a different number of positions, as vision models do."""

    def __init__(self, n=12):
        super().__init__()
        self.table = nn.Parameter(torch.randn(n, 2))
        self.more = nn.Parameter(torch.randn(3))
        self.register_load_state_dict_pre_hook(self.fit)

    @staticmethod
    def fit(module, state, prefix, *_):
        given = state[prefix + "table"]
        if given.shape != module.table.shape:
            n = module.table.size(0)
            state[prefix + "table"] = given[:n] if len(given) > n else given.repeat(2, 1)[:n]
        if prefix + "more" not in state:  # an older file: it keeps its values
            state[prefix + "more"] = module.more.data

    def forward(self, x):
        return x + self.table.sum() + self.more.sum()


@on_ranks(2)
def test_load_hook_may_read_shapes():
    found = []
    for n in (9, 12, 17):
        plain = make(Positions)
        model = FSDP(nn.Sequential(make(Positions)), auto_wrap_policy=None)
        state = make(lambda n=n: Positions(n), 2).state_dict()
        del state["more"]
        plain.load_state_dict(state)
        model.load_state_dict({f"0.{name}": value for name, value in state.items()})
        found += differences(model[0].state_dict(), plain.state_dict())
    assert found == []


@pytest.mark.parametrize("ask", ["clone", "copy_", "fill_", "cat", "data"])
@on_ranks(2)
def test_load_hook_that_reads_values_is_an_error(ask):
    """Return the error of a load hook that reads missing values, and whether nothing has
    changed."""
    asks = {
        "clone": lambda param, given: param.clone(),
        "copy_": lambda param, given: param.data.copy_(given),
        "fill_": lambda param, given: nn.init.zeros_(param),
        "cat": lambda param, given: torch.cat([given[:1], param[1:]]),
        "data": lambda param, given: setattr(param, "data", given),
    }
    model = wrapped(Net, FULL, auto_wrap_policy=None)
    model.norm.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: asks[ask](module.weight, state[prefix + "weight"])
    )
    before = dict(model.norm._parameters), dict(model.norm._load_state_dict_pre_hooks)
    with pytest.raises(RuntimeError, match=r"'norm\.weight'") as caught:
        model.norm.load_state_dict(make(Net, 2).norm.state_dict())
    after = dict(model.norm._parameters), dict(model.norm._load_state_dict_pre_hooks)
    kept = all(
        a[key] is value for a, b in zip(after, before, strict=True) for key, value in b.items()
    )
    tidy = kept and [len(each) for each in after] == [len(each) for each in before]
    message = str(caught.value)
    found = differences(model.state_dict(), make(Net).state_dict())
    assert "state_dict()" in message
    assert tidy
    assert found == []


@on_ranks(2)
def test_patched_methods_get_full_tensors():
    """Methods that the user replaced on instances, and which call the old ones, as PEFT does."""
    model, plain = make(Net), make(Net)
    for each in (model, plain):
        old, blocks, save = each.state_dict, each.blocks.state_dict, each.norm._save_to_state_dict

        def saved(state, prefix, keep_vars, save=save):
            save(state, prefix, keep_vars)
            state[prefix + "weight"] = state[prefix + "weight"] * 2

        each.state_dict = lambda old=old: {"only." + k: v for k, v in old().items()}
        each.blocks.state_dict = lambda *args, old=blocks, **kwargs: old(*args, **kwargs) and None
        each.norm._save_to_state_dict = saved
    model = FSDP(model, auto_wrap_policy=None)
    found = differences(model.state_dict(), plain.state_dict())
    found += differences(model.norm.state_dict(), plain.norm.state_dict())
    assert (found if model.blocks.state_dict() is None else [*found, "not the user's"]) == []


class OwnLoad(nn.Linear):
    """A load_state_dict of its own, with fewer arguments."""

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict({k.removeprefix("own."): v for k, v in state_dict.items()})


@on_ranks(2)
def test_custom_load_state_dict():
    model, plain = wrapped(lambda: OwnLoad(5, 3), FULL), make(lambda: OwnLoad(5, 3), seed=2)
    model.load_state_dict({f"own.{name}": value for name, value in plain.state_dict().items()})
    assert differences(model.state_dict(), plain.state_dict()) == []
