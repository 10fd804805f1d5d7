"""zshard.save: writing of files, state dict entries besides parameters, and other contents.

The save contains everything that state_dict() returns, including users' hooks and methods; where
that is impossible, an error names the entry.
"""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from checkpoints import decode, manifest_in, saved, small_chunks, tensors_in, whole
from compare import assert_same
from models import (
    Block,
    Dtypes,
    Mlp,
    Tied,
    make,
    wrapped,
)
from optim_states import FULL, rank, trained
from rows import all_refused
from scenarios import Stack, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

APART = ("full_shard", "c10d")


# --- how the files are written --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["odds", "dtypes", "tied", "conv"])
@on_ranks(2)
def test_through_small_chunks(name, tmp_path):
    """A chunk is filled repeatedly, with casts to another dtype, but not of integers or state."""
    with small_chunks(64):
        for combination in (FULL, ("no_shard", "c10d")):
            model, optimizer = trained(name, combination, "zshard.AdamW")
            assert saved(tmp_path, model, optimizer) == []
            assert saved(tmp_path, model, optimizer, dtype=torch.bfloat16) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e4m3fn], ids=str)
def test_dtypes_on_disk(dtype, tmp_path):
    assert saved(tmp_path, make(Dtypes), dtype=dtype) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_that_become_infinite_on_disk(asynchronous, tmp_path):
    model = nn.Linear(2, 1)
    options = {"dtype": torch.float16, "asynchronous": asynchronous, "overwrite": True}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.weight.copy_(torch.tensor([[65519.0, -65519.0]]))
        zshard.save(tmp_path / "x", model, **options).wait()
        model.weight[0, 1] = -65520.0
    with pytest.warns(UserWarning, match="has NaN or infinite values in 'weight'"):
        zshard.save(tmp_path / "x", model, **options).wait()
    assert tensors_in(tmp_path / "x")["weight"].tolist() == [[65504.0, -math.inf]]
    assert not manifest_in(tmp_path / "x").finite


@on_ranks(2)
def test_a_warning_that_is_an_error_is_raised_on_all_ranks(tmp_path):
    """The checkpoint is complete."""
    model = FSDP(nn.Linear(4, 4))
    with torch.no_grad():
        model.weight.fill_(math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserWarning, RuntimeError), match="infinite values in 'weight'"):
            zshard.save(tmp_path / "x", model)
    zshard.load(tmp_path / "x", model)


@on_ranks(2, 3)
def test_many_files(tmp_path):
    assert saved(tmp_path, *trained("net", APART, "zshard.AdamW"), max_shard_size=700) == []
    names = [path.name for path in (tmp_path / "x").glob("model-*")]
    assert len(names) > 20 and f"model-00001-of-{len(names):05}.safetensors" in names
    shards = (tmp_path / "x").glob("optimizer-*-of-*.safetensors")
    assert max(path.stat().st_size for path in shards) <= 4096 + 11 * 31 * 4  # one large tensor


def test_more_files_than_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("zshard.checkpoint.save._OPEN", 3)
    assert saved(tmp_path, make(Stack), max_shard_size=1) == []


def module_of(**buffers):
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


@pytest.mark.parametrize("chunk", [64, 1000, 2**24])
def test_non_contiguous_tensors(chunk, tmp_path):
    """Tensors that are not row-major, each larger than a chunk in one of its dimensions."""
    base = torch.randn(70, 90)
    pairs = torch.randn(50, dtype=torch.complex64)
    model = module_of(
        across=base.t(),
        every=torch.randn(300, 3)[::2],
        spread=torch.randn(9, 1).expand(9, 40),
        images=torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last),
        back=torch.randn(3, 4, 5).permute(2, 0, 1),
        conj=pairs.conj(),
        imag=pairs.conj().imag,
        part=base[3:5, 10:20],
        empty=torch.empty(0, 3).t(),
        flags=torch.rand(77) > 0.5,
        one=torch.tensor(3.0, dtype=torch.float64),
    )
    model.register_buffer("left_out", torch.ones(3), persistent=False)
    with small_chunks(chunk):
        assert saved(tmp_path, model) == []


# --- tied tensors ---------------------------------------------------------------------------------


@on_ranks(2)
def test_tied_parameters_are_saved_once(tmp_path):
    assert saved(tmp_path, *trained("tied", FULL, "zshard.AdamW")) == []
    expected = {f"twins.{i}.two.weight": f"twins.{i}.one.weight" for i in range(3)}
    expected["head.weight"] = "embed.weight"
    assert manifest_in(tmp_path / "x").tied == expected
    data = (tmp_path / "x" / "model.safetensors").read_bytes()
    notes = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert notes == {"format": "pt"} | expected


class HeadFirst(nn.Module):
    """The first name of the tied weight is the one that is not saved."""

    _tied_weights_keys = (r"^head\.weight$", "(")

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)
        self.embed = nn.Embedding(5, 3)
        self.embed.weight = self.head.weight


def test_model_declares_which_name_is_not_saved(tmp_path):
    newer = nn.ModuleDict({"head": nn.Linear(3, 5, bias=False)})
    newer["other"] = newer["head"]
    newer._tied_weights_keys = dict.fromkeys(("head.weight", "other.weight"), "x")
    for model, name, home in (
        (FSDP(make(HeadFirst)), "head.weight", "embed.weight"),
        (nn.ModuleDict({"inner": HeadFirst()}), "inner.head.weight", "inner.embed.weight"),
        (newer, "other.weight", "head.weight"),
    ):
        assert saved(tmp_path, model) == []
        assert manifest_in(tmp_path / "x").tied == {name: home}


def test_tied_buffers_and_views(tmp_path):
    table, none = torch.arange(12.0), torch.empty(0)
    others = module_of(table=table, first=table[:6], none=none, nothing=torch.empty(0))
    model = nn.ModuleDict({"a": module_of(table=table), "b": others})
    assert saved(tmp_path, model) == []
    assert manifest_in(tmp_path / "x").tied == {"b.table": "a.table"}


# --- hooks and methods of users -------------------------------------------------------------------


class Described(nn.Module):
    """Extra state, a version, and its own state_dict()."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.block = Block(9)
        self.seen = {"steps": 7 + rank(), "name": ("a", 1.5)}

    def get_extra_state(self):
        return self.seen

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state["table"] = torch.full((3,), float(rank()))
        return state


@on_ranks(2)
def test_extra_state_versions_and_custom_state_dict(tmp_path):
    model = FSDP(make(Described), auto_wrap_policy={nn.Linear}, transport="c10d")
    zshard.save(tmp_path / "x", model)
    state = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    state["table"] = torch.zeros(3)
    assert_same(whole(tmp_path / "x"), state, "the files")
    facts = manifest_in(tmp_path / "x").model
    assert facts["versions"] == {"": 3}
    assert decode(facts["extra_state"]["_extra_state"]) == {"steps": 7, "name": ("a", 1.5)}


@on_ranks(2)
def test_hooks_may_rename_and_drop_entries(tmp_path):
    model = wrapped(Stack, APART, auto_wrap_policy={Block})
    seen = []

    def rename(module, state, prefix, metadata):
        for name in list(state):
            value = state.pop(name)
            seen.append((name, tuple(value.shape), value.dtype))
            if "norm.bias" not in name:
                state[f"net.{name}"] = value.clone().cpu().contiguous().detach()
        state["ones"] = torch.ones_like(value)

    handle = model.register_state_dict_post_hook(rename)
    expected = model.state_dict()
    zshard.save(tmp_path / "x", model)
    handle.remove()
    assert len(expected) > 10 and seen == 2 * seen[: len(seen) // 2]
    assert_same(whole(tmp_path / "x"), expected, "the files")


@on_ranks(2)
def test_hooks_that_read_values_are_refused(tmp_path):
    model = wrapped(Stack, APART, auto_wrap_policy={Block})
    before = model.state_dict()
    shard = model.head.weight.detach()
    for name, value, *words in (
        ("head.weight", lambda state: state["head.weight"] / 2, "div", "its checkpoint is saved"),
        ("other", lambda state: shard, "only this rank's shard of 'other'"),
    ):
        handle = model.register_state_dict_post_hook(
            lambda module, state, *_, name=name, value=value: state.update({name: value(state)})
        )
        text = message_of(lambda: zshard.save(tmp_path / "x", model), RuntimeError)
        handle.remove()
        assert all(word in text for word in words), text
    assert_same(model.state_dict(), before, "the model")
    assert list(tmp_path.iterdir()) == []


class Holder(nn.Module):
    """Its state dict is the one that it is given."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def state_dict(self, *args, **kwargs):
        return self.state


class Own(torch.Tensor):
    pass


BAD = {
    "'a' is a Tensor of layout": (TypeError, {"a": torch.eye(3).to_sparse()}),
    "'a' is on the meta device": (RuntimeError, {"a": torch.empty(3, device="meta")}),
    "'a' is of dtype torch.complex128": (TypeError, {"a": torch.ones(3, dtype=torch.complex128)}),
    "cannot save 'a': unsupported type function": (TypeError, {"a": message_of}),
    "keys must be strings, got 1": (TypeError, {1: torch.ones(3)}),
    "'' is not a valid tensor name": (ValueError, {"": torch.ones(3)}),
    "not a valid tensor name": (ValueError, {"__metadata__": torch.ones(3)}),
    "'a' is a Own": (TypeError, {"a": torch.ones(3).as_subclass(Own)}),
    "state_dict() of Holder must return a mapping, got list": (TypeError, [1]),
}


def test_unsupported_entries(tmp_path):
    def save(state):
        return lambda: zshard.save(tmp_path / "x", Holder(state))

    all_refused({text: (save(state), kind, text) for text, (kind, state) in BAD.items()})
    assert list(tmp_path.iterdir()) == []


# --- optimizers, extra ----------------------------------------------------------------------------


@on_ranks(2)
def test_non_tensor_optimizer_state(tmp_path):
    model, optimizer = trained("mlp", APART, "torch.SGD")
    param = next(iter(model.parameters()))
    values = {"count": 3, "name": None, "more": {"a": (1, float("inf"))}}
    optimizer.state[param] |= values
    optimizer.param_groups[0]["initial_lr"] = torch.tensor(0.5)
    zshard.save(tmp_path / "x", model, optimizer)
    facts = manifest_in(tmp_path / "x").optimizer
    assert decode(facts["state"]["first.weight"]["values"]) == values
    assert decode(facts["groups"][0]["options"])["initial_lr"].item() == 0.5
    assert facts["class"] == "torch.optim.sgd.SGD"
    for key, value, kind, words in (
        ("odd", message_of, TypeError, "'odd' of 'first.weight': unsupported type function"),
        ("odd", {"a": message_of}, TypeError, "of 'first.weight'['a']: unsupported type function"),
        ("odd", [param.detach() + 1], RuntimeError, "'odd' (a list) of 'first.weight' in the opt"),
        (7, 1, TypeError, "must be strings, got 7 for 'first.weight'"),
    ):
        optimizer.state[param][key] = value
        text = message_of(lambda: zshard.save(tmp_path / "y", model, optimizer), kind)
        assert words in text, text
        del optimizer.state[param][key]


def test_duplicate_tensor_name(tmp_path):
    model = nn.ParameterDict({"a": torch.ones(2)})
    model._modules["a"] = nn.ParameterDict({"b": torch.ones(2)})  # bypasses the check
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second = model.parameters()
    optimizer.state[first]["b.c"] = torch.ones(2)
    optimizer.state[second]["c"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"name in the optimizer state: 'a\.b\.c'"):
        zshard.save(tmp_path / "x", model, optimizer)


@on_ranks(3)
def test_extra(tmp_path):
    """One copy, where that of all ranks is the same."""
    model = wrapped(Mlp, FULL)
    zshard.save(tmp_path / "same", model, extra={"step": 3, "lr": (0.5, None)})
    zshard.save(tmp_path / "own", model, extra={"rank": rank(), "drawn": torch.arange(rank())})
    same, own = (manifest_in(tmp_path / name) for name in ("same", "own"))
    assert len(same.extra) == 1 and decode(same.extra_of(2)) == {"step": 3, "lr": (0.5, None)}
    for i in range(3):
        found = decode(own.extra_of(i))
        assert found["rank"] == i and found["drawn"].tolist() == list(range(i))
    software = {"torch": torch.__version__, "zshard": zshard.__version__}
    assert own.world == 3 and own.software.items() >= software.items()


def test_result_of_save(tmp_path):
    model = FSDP(make(Tied))
    result = zshard.save(tmp_path / "x", model)
    assert result.done() and result.wait() is None
    assert repr(result) == f"SaveHandle('{tmp_path}/x')"
