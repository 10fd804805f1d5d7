"""User code in saving and loading: hooks and methods see full tensors, or raise; extra state.

A hook works on a sharded model as on its plain twin, whether it was registered before or after
wrapping. set_extra_state() may do anything with a tensor, so it gets one with its values, after
everything that is loaded has been checked.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import manifest_in, tensors_in
from compare import assert_same
from models import Nested, Net, make, wrapped
from safetensors.torch import save_file
from spawn import on_ranks
from torch import nn

import zshard
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


@pytest.mark.parametrize("combination", [FULL, ("full_shard", "c10d")])
@pytest.mark.parametrize("policy", [None, {Own}], ids=["one unit", "units"])
@on_ranks(2)
def test_user_defined_methods_see_full_tensors(policy, combination):
    model, plain = wrapped(owns, combination, auto_wrap_policy=policy), make(owns)
    assert_same(model.state_dict(), plain.state_dict(), "the state dict")
    assert_same(model[1].state_dict(), plain[1].state_dict(), "a part's state dict")
    state = make(owns, 2).state_dict()
    model.load_state_dict(state)
    plain.load_state_dict(state)
    assert_same(model.state_dict(), plain.state_dict(), "the model")


@EARLY
@on_ranks(2)
def test_hooks_on_all_modules_see_full_shapes(early):
    """Of each module's own entries; those of a load double each value."""
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

    state = make(Net, seed=2).state_dict()
    model = with_hooks(register, early, {Nested})
    model.load_state_dict(state)
    doubled = {name: value * 2 for name, value in state.items()}
    assert_same(model.state_dict(), doubled, "the model")
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert seen == {"save": shapes, "load": shapes, "self": shapes}


@EARLY
@on_ranks(2)
def test_load_hook_may_read_shapes(early):
    """It fits a weight of another length, and keeps the bias, which an older file lacks."""

    def fit(module, state, prefix, *_):
        size = module.weight.size(0)
        state[prefix + "weight"] = state[prefix + "weight"].repeat(2)[:size]
        state.setdefault(prefix + "bias", module.bias.data)

    def register(model):
        model.norm.register_load_state_dict_pre_hook(fit)

    for n in (7, 11, 17):
        model, plain = with_hooks(register, early, None), make(Net)
        register(plain)
        state = {**make(Net, 2).state_dict(), "norm.weight": torch.randn(n)}
        del state["norm.bias"]
        for each in (model, plain):
            each.load_state_dict(state)
        assert_same(model.state_dict(), plain.state_dict(), "the model")


@pytest.mark.parametrize("ask", ["clone", "copy_", "fill_", "cat", "data"])
@on_ranks(2)
def test_load_hook_that_reads_values_is_an_error(ask):
    """A load hook that reads missing values changes nothing."""
    asks = {
        "clone": lambda param, value: param.clone(),
        "copy_": lambda param, value: param.data.copy_(value),
        "fill_": lambda param, value: nn.init.zeros_(param),
        "cat": lambda param, value: torch.cat([value[:1], param[1:]]),
        "data": lambda param, value: setattr(param, "data", value),
    }
    model = wrapped(Net, FULL, auto_wrap_policy=None)
    model.norm.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: asks[ask](module.weight, state[prefix + "weight"])
    )
    before = dict(model.norm._parameters), dict(model.norm._load_state_dict_pre_hooks)
    with pytest.raises(RuntimeError, match=r"'norm\.weight'") as caught:
        model.norm.load_state_dict(make(Net, 2).norm.state_dict())
    assert "state_dict()" in str(caught.value)
    after = dict(model.norm._parameters), dict(model.norm._load_state_dict_pre_hooks)
    for now, then in zip(after, before, strict=True):
        assert list(now) == list(then) and all(now[key] is then[key] for key in then)
    assert_same(model.state_dict(), make(Net).state_dict(), "the model")


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
    assert_same(model.state_dict(), plain.state_dict(), "the state dict")
    assert_same(model.norm.state_dict(), plain.norm.state_dict(), "the norm's")
    assert model.blocks.state_dict() is None, "the user's"


class OwnLoad(nn.Linear):
    """Its own load_state_dict, with fewer arguments."""

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict({k.removeprefix("own."): v for k, v in state_dict.items()})


@on_ranks(2)
def test_custom_load_state_dict():
    model, plain = wrapped(lambda: OwnLoad(5, 3), FULL), make(lambda: OwnLoad(5, 3), seed=2)
    model.load_state_dict({f"own.{name}": value for name, value in plain.state_dict().items()})
    assert_same(model.state_dict(), plain.state_dict(), "the model")


# --- extra state ----------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """Its extra state is a tensor of bytes, from which it computes something on loading."""

    def __init__(self, value):
        super().__init__(3, 3)
        self.peaks = torch.full((2,), float(value))

    def get_extra_state(self):
        return self.peaks.view(torch.uint8)

    def set_extra_state(self, state):
        self.peaks = state.cpu().clone().view(torch.float32) * 1


def scaled(value):
    return nn.Sequential(Scaled(value), nn.Linear(3, 2))


@pytest.fixture(params=["zshard", "safetensors", "torch"])
def folder_with_extra_state(request, tmp_path):
    folder, state = tmp_path / "x", dict(scaled(5).state_dict())
    if request.param == "zshard":
        zshard.save(folder, FSDP(scaled(5)))
        assert "0._extra_state" not in tensors_in(folder)
        assert list(manifest_in(folder).model["extra_state"]) == ["0._extra_state"]
    elif request.param == "safetensors":
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
    else:
        dcp.save({"model": state}, checkpoint_id=folder)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed")
@on_ranks(2)
def test_a_tensor_of_extra_state_is_loaded(folder_with_extra_state):
    for model in (FSDP(scaled(7)), scaled(7)):
        zshard.load(folder_with_extra_state, model)
        assert model[0].peaks.tolist() == [5, 5]
