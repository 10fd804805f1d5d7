"""zshard.load of zshard.save's checkpoints, at any number of ranks; the examples of
docs/checkpoints.md.

A resumed run is bit-identical to one that was not interrupted.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, Net, Tied, differences, make, make_optimizer, wrapped
from optim_states import FULL, differ, go_on, rank, trained
from safetensors.torch import load_file, load_model
from scenario import sharded
from spawn import RankPool, on_ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision, Offload, fully_shard

C10D = ("shard_grad_op", "c10d")
NAMES = ("tied", "frozen", "odds", "conv", "dtypes", "unused")


def state_of(model, optimizer):
    """Return copies of all state of both."""
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def extra_of(saver):
    return {"rank": saver, "betas": (0.5, 1), "seen": torch.arange(3)}


def save(path, names, kind, combination):
    """Train a model of each name and save it; return {name: its state}."""
    made = {}
    for name in names:
        model, optimizer = trained(name, combination, kind)
        zshard.save(f"{path}/{name}", model, optimizer, extra=extra_of(rank()))
        made[name] = state_of(model, optimizer)
    return made


def check(path, made, world, kind, combination):
    """Fail unless new models have the saved states after a load; without a combination, plain ones."""
    for name, wanted in made.items():
        model = (
            sharded(name, combination, seed=3) if combination else make(CASES[name].make, seed=3)
        )
        optimizer = make_optimizer(kind, model)
        result = zshard.load(f"{path}/{name}", model, optimizer)
        assert differ(state_of(model, optimizer), wanted) == [], name
        assert result.verified and not result.missing_keys and not result.unexpected_keys, name
        assert differences(result, extra_of(rank() if rank() < world else 0)) == []


HOW = {1: FULL, 2: FULL, 3: C10D, 4: ("hybrid_shard", 2, 2)}
OTHER = {1: FULL, 2: ("zero1", "c10d"), 3: ("no_shard", "shm"), 4: FULL, "plain": None}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("into", [1, 2, 3, 4, "plain"])
@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.SGD", "tests.Counting"])
def test_load_at_any_world_size(pools, world, into, kind, tmp_path):
    """A world of one is this process."""
    names = NAMES if kind == "zshard.AdamW" else NAMES[:2]

    def run(world, function, *args):
        if world in (1, "plain"):
            return [function(*args)]
        return pools.setdefault(world, RankPool(world)).run(function, *args)

    made = run(world, save, str(tmp_path), names, kind, HOW[world])[0]
    run(into, check, str(tmp_path), made, world, kind, OTHER[into])


# --- resuming -------------------------------------------------------------------------------------


def check_resumed(path, name, kind, combination):
    """Fail unless continuing equals continuing after a load into another model."""
    model, optimizer = trained(name, combination, kind)
    zshard.save(path, model, optimizer, step=2)
    expected = go_on(name, model, optimizer)
    other = sharded(name, combination, seed=3)
    theirs = make_optimizer(kind, other)
    if rank() == 0:  # values and options that loading must replace
        theirs.param_groups[0]["lr"] = 5.0
    result = zshard.load(path, other, theirs)
    assert result.step == 2 and result.path.endswith("/step-00000002") and dict(result) == {}
    assert differ(go_on(name, other, theirs), expected) == [], (kind, combination)


WAYS = [FULL, C10D, ("zero1", "c10d"), ("no_shard", "c10d"), ("shard_grad_op", "shm")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", WAYS, ids="-".join)
@pytest.mark.parametrize("name", ["tied", "frozen"])
@on_ranks(2)
def test_resumed_run_is_bit_identical(name, combination, tmp_path):
    for kind in ("zshard.AdamW", "torch.SGD", "torch.Adam", "tests.Counting"):
        check_resumed(tmp_path / kind, name, kind, combination)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@on_ranks(4)
def test_resumed_run_in_groups(strategy, tmp_path):
    check_resumed(tmp_path / "x", "tied", "zshard.AdamW", (strategy, 2, 2))


def unusual(how, folder):
    """Return a model and an optimizer with unusual options."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "offload": {"offload": Offload(cache=2**20, directory=str(folder))},
        "low": {"mixed_precision": low, "strategy": "shard_grad_op", "transport": "c10d"},
    }.get(how, {})
    if how == "fully_shard":
        model = make(Net)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        plain = make(Net).bfloat16() if how == "rounding" else make(Net)
        model = FSDP(plain, auto_wrap_policy=CASES["net"].policy, **options)
    options = {
        "amsgrad": {"lr": torch.tensor(0.01), "amsgrad": True},
        "rounding": {"lr": 0.01, "stochastic_rounding": True, "rounding_seed": 7},
    }.get(how, {"lr": 0.01})
    params = list(model.parameters())
    groups = [{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:]}]
    optimizer = zshard.AdamW(groups, **options)
    if how == "in backward":
        model.optimizer_in_backward(optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    "how", ["amsgrad", "rounding", "in backward", "offload", "low", "fully_shard"]
)
@on_ranks(2)
def test_unusual_optimizer_options(how, tmp_path):
    model, optimizer = unusual(how, tmp_path)
    go_on("net", model, optimizer, 0)
    zshard.save(tmp_path / "x", model, optimizer)
    expected = copy.deepcopy(go_on("net", model, optimizer))
    model, optimizer = unusual(how, tmp_path)
    zshard.load(tmp_path / "x", model, optimizer)
    assert differ(go_on("net", model, optimizer), expected) == []


@pytest.mark.parametrize("combination", [FULL, C10D, ("no_shard", "shm")])
@on_ranks(2)
def test_load_into_a_running_model(tmp_path, combination):
    """Existing state is overwritten in place, so a model returns to its earlier state."""
    model, optimizer = trained("tied", combination, "zshard.AdamW")
    zshard.save(tmp_path / "x", model, optimizer)
    before = state_of(model, optimizer)
    go_on("tied", model, optimizer)
    places = [each["exp_avg"].data_ptr() for each in optimizer.state.values()]
    zshard.load(tmp_path / "x", model, optimizer)
    assert places == [each["exp_avg"].data_ptr() for each in optimizer.state.values()]
    assert differ(state_of(model, optimizer), before) == []


# --- plain models ---------------------------------------------------------------------------------


@on_ranks(2)
def test_from_plain_models(tmp_path):
    """Each rank has its own batches; rank 0's model is saved, with the extra of both."""
    model = make(Tied)
    optimizer = make_optimizer("torch.AdamW", model)
    go_on("tied", model, optimizer, 0)
    zshard.save(tmp_path / "x", model, optimizer, extra={"rank": rank()})
    state = [state_of(model, optimizer)]
    dist.broadcast_object_list(state)
    for other in (make(Tied, 3), sharded("tied", C10D)):
        theirs = make_optimizer("torch.AdamW", other)
        assert dict(zshard.load(tmp_path / "x", other, theirs)) == {"rank": rank()}
        assert differ(state_of(other, theirs), state[0]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_into_tensors_with_negative_and_conjugate_bits(tmp_path, dtype):
    """Their memory has other values than they have."""
    model = nn.Module()
    values = torch.randn(4, dtype=dtype)
    model.register_buffer("b", values.conj() if dtype.is_complex else torch._neg_view(values))
    saved = model.b.resolve_conj().resolve_neg().clone()
    zshard.save(tmp_path / "x", model)
    with torch.no_grad():
        model.b.zero_()
    zshard.load(tmp_path / "x", model)
    assert model.b.is_conj() or model.b.is_neg()
    assert_same(model.b.resolve_conj().resolve_neg(), saved, "the buffer")


class Untied(Tied):
    """The same with two separate weights."""

    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


@on_ranks(2)
def test_tied_tensors_load_under_all_names_and_with_safetensors_own_function(tmp_path):
    """The page's advice, and why: load_state_dict() of what load_file() returns lacks names."""
    model = wrapped(Tied, FULL)
    state = model.state_dict()
    zshard.save(tmp_path / "saved", model)
    zshard.export(model).save(tmp_path / "exported")
    untied = wrapped(Untied, FULL)
    assert zshard.load(tmp_path / "saved", untied).missing_keys == []
    assert_same(untied.state_dict()["head.weight"], state["embed.weight"], "the head")
    for folder in ("saved", "exported"):
        file = tmp_path / folder / "model.safetensors"
        plain = make(Tied, 3)
        with pytest.raises(RuntimeError, match=r'Missing key.*"head.weight"'):
            plain.load_state_dict(load_file(file))
        assert load_model(plain, file) == (set(), [])
        assert plain.head.weight is plain.embed.weight
        assert_same(plain.state_dict(), state, folder)


@on_ranks(2)
def test_load_waits_for_a_running_save(tmp_path):
    model, optimizer = trained("net", FULL, "zshard.AdamW")
    zshard.save(tmp_path, model, optimizer, step=1)
    go_on("net", model, optimizer)
    wanted = state_of(model, optimizer)
    zshard.save(tmp_path, model, optimizer, step=2, asynchronous=True)
    assert zshard.load(tmp_path, model, optimizer).step == 2
    assert differ(state_of(model, optimizer), wanted) == []


# --- the examples of docs/checkpoints.md ----------------------------------------------------------


TEXT = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
BLOCKS = re.findall(r"```py(?:thon)?\n(.*?)```", TEXT, re.S)


class Lost(Exception):
    """What ends a run."""


@on_ranks(2)
def test_documented_script_resumes(tmp_path):
    """A run that is lost in an epoch resumes with other seeds, and ends as an undisturbed one."""
    text = BLOCKS[0].replace("model = FSDP", "torch.manual_seed(seed)\nmodel = FSDP")
    text = text.replace("step += 1\n", "step += 1\n        check(step)\n")

    def run(folder, seed, lost=None):
        def check(step):
            if step == lost:
                raise Lost

        names = {"seed": seed, "check": check}
        (tmp_path / folder).mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / folder)
            exec(text, names)
        return dict(names["model"].state_dict())

    wanted = run("a", 3 + rank())
    with pytest.raises(Lost):
        run("b", 3 + rank(), lost=170)
    assert_same(run("b", 5 + rank()), wanted, "the model")
    dist.barrier()  # rank 0 has deleted older ones
    folders = sorted(path.name for path in (tmp_path / "b" / "checkpoints").glob("step-*"))
    assert folders == [f"step-00000{number}" for number in (200, 250, 300)]


def test_model_from_the_meta_device(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    (text,) = (block for block in BLOCKS if '"meta"' in block)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=1)
    monkeypatch.chdir(tmp_path)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained("llama")
    names = {"torch": torch, "zshard": zshard, "FSDP": FSDP, "config": config}
    names["LlamaForCausalLM"] = transformers.LlamaForCausalLM
    exec(text, names)
    ids = torch.arange(6).reshape(2, 3)
    assert_same(names["model"](ids).logits, model(ids).logits, "the logits")


def reader_names() -> dict[str, Any]:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "torch": torch}


@on_ranks(2)
def test_state_dicts(tmp_path):
    """A block saves, and one loads into another model."""
    saving, loading = (block for block in BLOCKS if "state.pt" in block)
    ours, theirs = reader_names(), reader_names()
    ours["model"](torch.randn(2, 3)).sum().backward()
    ours["optimizer"].step()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(saving, ours)
        before = theirs["model"].state_dict()
        exec(loading, theirs)
    wanted = ours["model"].state_dict()
    assert differences(before, wanted) != []
    assert_same(theirs["model"].state_dict(), wanted, "the model")
    assert differ(theirs["optimizer"].state_dict(), ours["optimizer"].state_dict()) == []


def test_every_documented_block_runs():
    marks = ("DataPosition(", '"meta"', "per_host", "state.pt")
    assert [sum(mark in block for block in BLOCKS) for mark in marks] == [1, 1, 1, 2]
    assert len(BLOCKS) == 5  # test_save_per_host.py, test_data_position.py
