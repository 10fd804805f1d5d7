"""zshard.save: state dict entries besides parameters, how they are written, and what else is saved.

The save contains whatever state_dict() returns, including users' hooks and methods; where that is
impossible, an error names the entry.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import OrderedDict

import numpy
import pytest
import torch
from checkpoints import decode, manifest_in, saved, small_chunks, states_in, tensors_in, whole
from compare import differences
from models import Block, Dtypes, Mlp, Tied, loss_of, make, wrapped
from optim_states import FULL, rank, trained
from scenarios import Stack, message_of
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP

APART = ("full_shard", "c10d")


# --- file format ----------------------------------------------------------------------------------


def in_bfloat16(folder):
    model, optimizer = trained("conv", FULL, "zshard.AdamW")
    found = saved(folder, model, optimizer, dtype=torch.bfloat16)
    kinds = {name: t.dtype for name, t in tensors_in(folder / "x").items()}
    for own in states_in(folder / "x").values():
        assert own["exp_avg"].dtype == torch.float32
    for name, dtype in kinds.items():
        assert dtype != torch.int64 or "num_batches" in name, name
    return found, set(kinds.values())


def test_another_dtype_on_disk(pool2, tmp_path):
    expected = [], {torch.bfloat16, torch.int64}
    assert pool2.run(in_bfloat16, tmp_path) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e4m3fn], ids=str)
def test_dtypes_on_disk(dtype, tmp_path):
    assert saved(tmp_path, make(Dtypes), dtype=dtype) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_that_become_infinite_on_disk(asynchronous, tmp_path):
    model = nn.Linear(2, 1)
    options = {"dtype": torch.float16, "asynchronous": asynchronous, "overwrite": True}
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[65519.0, -65519.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zshard.save(tmp_path / "x", model, **options).wait()
    with torch.no_grad():
        model.weight[0, 1] = -65520.0
    with pytest.warns(UserWarning, match="has NaN or infinite values in 'weight'"):
        zshard.save(tmp_path / "x", model, **options).wait()
    assert tensors_in(tmp_path / "x")["weight"].tolist() == [[65504.0, -math.inf]]
    assert not manifest_in(tmp_path / "x").finite


@on_ranks(2)
def test_a_warning_that_is_an_error_is_raised_on_all_ranks(tmp_path):
    """Both ranks see the warning that a script has made an error; the checkpoint is complete."""
    model = FSDP(nn.Linear(4, 4))
    with torch.no_grad():
        model.weight.fill_(math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            zshard.save(tmp_path / "x", model)
        except (UserWarning, RuntimeError) as error:
            text = str(error)
    zshard.load(tmp_path / "x", model)
    assert "NaN or infinite values in 'weight'" in text


def in_many_files(folder):
    model, optimizer = trained("net", APART, "zshard.AdamW")
    return saved(folder, model, optimizer, max_shard_size=700)


@ranks(2, 3)
def test_many_files(pool, tmp_path):
    assert pool.run(in_many_files, tmp_path) == [[]] * pool.world
    names = [path.name for path in (tmp_path / "x").glob("model-*")]
    assert len(names) > 20 and f"model-00001-of-{len(names):05}.safetensors" in names
    shards = (tmp_path / "x").glob("optimizer-*-of-*.safetensors")
    assert max(path.stat().st_size for path in shards) <= 4096 + 11 * 31 * 4  # one large tensor


def test_more_files_than_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("zshard.checkpoint.save._OPEN", 3)
    assert saved(tmp_path, make(Stack), max_shard_size=1) == []


class Strided(nn.Module):
    """Tensors that are not row-major, each larger than a chunk in one of its dimensions."""

    def __init__(self):
        super().__init__()
        base = torch.randn(70, 90)
        self.register_buffer("across", base.t())
        self.register_buffer("every", torch.randn(300, 3)[::2])
        self.register_buffer("spread", torch.randn(9, 1).expand(9, 40))
        self.register_buffer(
            "images", torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last)
        )
        self.register_buffer("back", torch.randn(3, 4, 5).permute(2, 0, 1))
        self.register_buffer("conj", torch.randn(50, dtype=torch.complex64).conj())
        self.register_buffer("imag", torch.randn(50, dtype=torch.complex64).conj().imag)
        self.register_buffer("part", base[3:5, 10:20])
        self.register_buffer("empty", torch.empty(0, 3).t())
        self.register_buffer("flags", torch.rand(77) > 0.5)
        self.register_buffer("one", torch.tensor(3.0, dtype=torch.float64))
        self.register_buffer("left_out", torch.ones(3), persistent=False)


@pytest.mark.parametrize("chunk", [64, 1000, 2**24])
def test_non_contiguous_tensors(chunk, tmp_path):
    with small_chunks(chunk):
        assert saved(tmp_path, Strided()) == []


# --- tied tensors ---------------------------------------------------------------------------------


def tied(folder):
    model, optimizer = trained("tied", FULL, "zshard.AdamW")
    return saved(folder, model, optimizer)


def test_tied_parameters_are_saved_once(pool2, tmp_path):
    assert pool2.run(tied, tmp_path) == [[], []]
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

    def forward(self, ids):
        return self.head(self.embed(ids))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = HeadFirst()


def head_first(folder):
    model = FSDP(make(HeadFirst), transport="c10d")
    return saved(folder, model)


def test_model_declares_which_name_is_not_saved(pool2, tmp_path):
    assert pool2.run(head_first, tmp_path) == [[], []]
    assert manifest_in(tmp_path / "x").tied == {"head.weight": "embed.weight"}
    zshard.save(tmp_path / "y", make(Outer))
    assert manifest_in(tmp_path / "y").tied == {"inner.head.weight": "inner.embed.weight"}
    model = nn.Module()
    model.head = model.other = nn.Linear(3, 5, bias=False)
    model._tied_weights_keys = {
        "head.weight": "x",
        "other.weight": "x",
    }  # as in newer versions
    zshard.save(tmp_path / "z", model)
    assert manifest_in(tmp_path / "z").tied == {"other.weight": "head.weight"}


def test_tied_buffers_and_views(tmp_path):
    model = nn.Module()
    table = torch.arange(12.0)
    model.a, model.b = nn.Module(), nn.Module()
    model.a.register_buffer("table", table)
    model.b.register_buffer("table", table)
    model.b.register_buffer("first", table[:6])
    model.b.register_buffer("none", torch.empty(0))
    model.b.register_buffer("nothing", torch.empty(0))
    assert saved(tmp_path, model) == []
    assert manifest_in(tmp_path / "x").tied == {"b.table": "a.table"}


# --- hooks and methods of users -------------------------------------------------------------------


class Described(nn.Module):
    """Extra state, a version, and a state_dict() of its own."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.block = Block(9)
        self.seen = {"steps": 7, "name": ("a", 1.5)}

    def forward(self, x):
        return self.block(x)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state["table"] = torch.full((3,), float(rank()))
        return state


def described(folder):
    model = FSDP(make(Described), auto_wrap_policy={nn.Linear}, transport="c10d")
    model.seen["steps"] += rank()
    zshard.save(folder / "x", model)
    expected = model.state_dict()
    found = whole(folder / "x")
    assert list(found) != [] and rank() >= 0
    state = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    others = [name for name in state if name != "table"]
    wrong = differences({n: found[n] for n in others}, {n: state[n] for n in others})
    return wrong, found.keys() ^ state.keys(), found["table"].tolist()


def test_extra_state_versions_and_custom_state_dict(pool2, tmp_path):
    assert pool2.run(described, tmp_path) == [([], set(), [0.0] * 3)] * 2
    told = manifest_in(tmp_path / "x").model
    assert told["versions"] == {"": 3}
    assert decode(told["extra_state"]["_extra_state"]) == {
        "steps": 7,
        "name": ("a", 1.5),
    }


@on_ranks(2)
def test_hooks_may_rename_and_drop_entries(tmp_path):
    model = wrapped(Stack, APART, auto_wrap_policy={Block})
    seen = []

    def rename(module, state, prefix, metadata):
        for name in list(state):
            value = state.pop(name)
            seen.append((name, tuple(value.shape), value.dtype, value.requires_grad))
            if "norm.bias" not in name:
                state[f"net.{name}"] = value.clone().cpu().contiguous().detach()
        state["ones"] = torch.ones_like(value)

    handle = model.register_state_dict_post_hook(rename)
    expected = model.state_dict()
    first, seen[:] = list(seen), []
    zshard.save(tmp_path / "x", model)
    handle.remove()
    found = whole(tmp_path / "x")
    assert [row[:3] for row in first] == [row[:3] for row in seen]
    assert len(found) > 10
    assert differences(found, expected) == []


@on_ranks(2)
def test_hooks_that_read_values_are_refused(tmp_path):
    model = wrapped(Stack, APART, auto_wrap_policy={Block})
    before = model.state_dict()

    def halve(module, state, prefix, metadata):
        state["head.weight"] = state["head.weight"] / 2

    def past(module, state, prefix, metadata):
        state["other"] = shard

    shard = model.head.weight.detach()
    texts = []
    for hook in (halve, past):
        handle = model.register_state_dict_post_hook(hook)
        texts.append(message_of(lambda: zshard.save(tmp_path / "x", model), RuntimeError))
        handle.remove()
    after = model.state_dict()
    (halved, past), wrong, names = texts, differences(after, before), list(tmp_path.iterdir())
    assert "div" in halved and "parameter 'head.weight' while its checkpoint is saved" in halved
    assert "only this rank's shard of 'other'" in past
    assert wrong == [] and names == []


class Holder(nn.Module):
    """Its state dict is whatever it is given."""

    def __init__(self, state):
        super().__init__()
        self.told = state

    def state_dict(self, *args, **kwargs):
        return self.told


BAD = {
    "a sparse one": ({"a": torch.eye(3).to_sparse()}, TypeError, "'a' is a Tensor of layout"),
    "on meta": ({"a": torch.empty(3, device="meta")}, RuntimeError, "'a' is on the meta device"),
    "complex128": (
        {"a": torch.ones(3, dtype=torch.complex128)},
        TypeError,
        "'a' is of dtype torch.complex128",
    ),
    "a function": ({"a": message_of}, TypeError, "cannot save 'a': unsupported type function"),
    "a number as name": ({1: torch.ones(3)}, TypeError, "keys must be strings, got 1"),
    "no name": ({"": torch.ones(3)}, ValueError, "'' is not a valid tensor name"),
    "the name of the notes": (
        {"__metadata__": torch.ones(3)},
        ValueError,
        "not a valid tensor name",
    ),
    "a subclass": (
        {"a": torch.ones(3).as_subclass(type("My", (torch.Tensor,), {}))},
        TypeError,
        "'a' is a My",
    ),
    "no dict": ([1], TypeError, "state_dict() of Holder must return a mapping, got list"),
}


@pytest.mark.parametrize("case", BAD)
def test_unsupported_entries(case, tmp_path):
    state, kind, text = BAD[case]
    assert text in message_of(lambda: zshard.save(tmp_path / "x", Holder(state)), kind)
    assert list(tmp_path.iterdir()) == []


# --- optimizers -----------------------------------------------------------------------------------


@on_ranks(2)
def test_non_tensor_optimizer_state(tmp_path):
    model, optimizer = trained("mlp", APART, "torch.SGD")
    param = next(iter(model.parameters()))
    optimizer.state[param] |= {"count": 3, "name": None, "more": {"a": (1, float("inf"))}}
    optimizer.param_groups[0]["initial_lr"] = torch.tensor(0.5)
    zshard.save(tmp_path / "x", model, optimizer)
    told = manifest_in(tmp_path / "x").optimizer
    own = decode(told["state"]["first.weight"]["values"])
    texts = []
    for value in (message_of, {"a": message_of}):
        optimizer.state[param]["odd"] = value
        texts.append(message_of(lambda: zshard.save(tmp_path / "y", model, optimizer), TypeError))
    optimizer.state[param]["odd"] = [param.detach() + 1]
    texts.append(message_of(lambda: zshard.save(tmp_path / "y", model, optimizer), RuntimeError))
    del optimizer.state[param]["odd"]
    optimizer.state[param][7] = 1
    texts.append(message_of(lambda: zshard.save(tmp_path / "y", model, optimizer), TypeError))
    own, rate, kind, texts = (
        own,
        decode(told["groups"][0]["options"])["initial_lr"].item(),
        told["class"],
        texts,
    )
    assert own == {"count": 3, "name": None, "more": {"a": (1, float("inf"))}} and rate == 0.5
    assert kind == "torch.optim.sgd.SGD"
    assert "optimizer state 'odd' of 'first.weight': unsupported type function" in texts[0]
    assert "optimizer state 'odd' of 'first.weight'['a']: unsupported type function" in texts[1]
    assert "'odd' (a list) of 'first.weight' in the optimizer state, which contains" in texts[2]
    assert "must be strings, got 7 for 'first.weight'" in texts[3]


def test_duplicate_tensor_name(tmp_path):
    model = nn.ParameterDict({"a": torch.ones(2)})
    model._modules["a"] = nn.ParameterDict({"b": torch.ones(2)})  # bypasses the check
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second = model.parameters()
    optimizer.state[first]["b.c"] = torch.ones(2)
    optimizer.state[second]["c"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"name in the optimizer state: 'a\.b\.c'"):
        zshard.save(tmp_path / "x", model, optimizer)


# --- extra ----------------------------------------------------------------------------------------


def with_extra(folder):
    model = wrapped(Mlp, FULL)
    zshard.save(folder / "same", model, extra={"step": 3, "lr": (0.5, None)})
    own = {"rank": rank(), "drawn": torch.arange(rank()), "order": numpy.arange(3)}
    zshard.save(folder / "own", model, extra=own | {"random": zshard.rng_state()})
    zshard.save(folder / "none", model)
    zshard.save(folder / "ordered", model, extra=OrderedDict(a=1))


def test_extra(pool3, tmp_path):
    pool3.run(with_extra, tmp_path)
    assert len(manifest_in(tmp_path / "same").extra) == 1
    assert decode(manifest_in(tmp_path / "same").extra_of(2)) == {
        "step": 3,
        "lr": (0.5, None),
    }
    for i in range(3):
        found = decode(manifest_in(tmp_path / "own").extra_of(i))
        assert found["rank"] == i and found["drawn"].tolist() == list(range(i))
        assert found["order"].tolist() == [0, 1, 2] and "torch" in found["random"]
    assert decode(manifest_in(tmp_path / "none").extra_of(0)) == {}
    assert decode(manifest_in(tmp_path / "ordered").extra_of(0)) == {"a": 1}
    told = manifest_in(tmp_path / "own")
    assert told.world == 3 and told.software["torch"] == torch.__version__
    assert told.software["zshard"] == zshard.__version__


def test_result_of_save(tmp_path):
    model = FSDP(make(Tied))
    loss_of(model(torch.zeros(1, 3, dtype=torch.long))).backward()
    result = zshard.save(tmp_path / "x", model)
    assert result.done() and result.wait() is None
    assert repr(result) == f"SaveHandle('{tmp_path}/x')"
