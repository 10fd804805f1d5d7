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
from optim_states import FULL, differ, go_on, rank, trained, wrap
from safetensors.torch import load_file, load_model
from spawn import RankPool, on_ranks
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig

import zshard
from zshard import FSDP, MixedPrecision, Offload, fully_shard

C10D = ("shard_grad_op", "c10d")
NAMES = ("tied", "frozen", "odds", "conv", "dtypes", "unused")


def state_of(model, optimizer):
    """Return copies of all state of both."""
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def save(path, names, kind, combination):
    """Train a model of each name and save it; return {name: its state}."""
    made = {}
    for name in names:
        model, optimizer = trained(name, combination, kind)
        extra = {"rank": rank(), "betas": (0.5, 1), "seen": torch.arange(3)}
        zshard.save(f"{path}/{name}", model, optimizer, extra=extra)
        made[name] = state_of(model, optimizer)
    return made


def wrong(path, made, world, kind, combination):
    """Return what differs from `made` on this rank after a load into new models."""
    found = []
    for name, wanted in made.items():
        model = wrap(name, combination, seed=3)
        optimizer = make_optimizer(kind, model)
        result = zshard.load(f"{path}/{name}", model, optimizer)
        found += [f"{name}: {each}" for each in differ(state_of(model, optimizer), wanted)]
        if not result.verified or result.missing_keys or result.unexpected_keys:
            found.append(f"{name}: {vars(result)}")
        saver = rank() if rank() < world else 0
        extra = {"rank": saver, "betas": (0.5, 1), "seen": torch.arange(3)}
        found += [f"{name}: {each}" for each in differences(result, extra)]
    return found


HOW = {1: FULL, 2: FULL, 3: C10D, 4: ("hybrid_shard", 2, 2)}
OTHER = {1: FULL, 2: ("zero1", "c10d"), 3: ("no_shard", "shm"), 4: FULL}


def run(pools, world, function, *args):
    """Return each rank's result; a world of one is this process."""
    return (
        [function(*args)]
        if world == 1
        else pools.setdefault(world, RankPool(world)).run(function, *args)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("into", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.SGD", "tests.Counting"])
def test_load_at_any_world_size(pools, world, into, kind, tmp_path):
    names = NAMES if kind == "zshard.AdamW" else NAMES[:2]
    made = run(pools, world, save, str(tmp_path), names, kind, HOW[world])[0]
    for differing in run(pools, into, wrong, str(tmp_path), made, world, kind, OTHER[into]):
        assert differing == []


# --- resuming -------------------------------------------------------------------------------------


def resumed(path, name, kind, combination):
    """Return what differs between continuing and continuing after a load into another model."""
    model, optimizer = trained(name, combination, kind)
    zshard.save(path, model, optimizer, step=2)
    expected = go_on(name, model, optimizer)
    other = wrap(name, combination, seed=3)
    theirs = make_optimizer(kind, other)
    if rank() == 0:  # values and options that loading must replace
        theirs.param_groups[0]["lr"] = 5.0
    result = zshard.load(path, other, theirs)
    assert result.step == 2 and result.path.endswith("/step-00000002") and dict(result) == {}
    return differ(go_on(name, other, theirs), expected)


WAYS = [FULL, C10D, ("zero1", "c10d"), ("no_shard", "c10d"), ("shard_grad_op", "shm")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combination", WAYS, ids="-".join)
@pytest.mark.parametrize("name", ["tied", "frozen"])
def test_resumed_run_is_bit_identical(pool2, name, combination, tmp_path):
    for kind in ("zshard.AdamW", "torch.SGD", "torch.Adam", "tests.Counting"):
        path = str(tmp_path / kind)
        assert pool2.run(resumed, path, name, kind, combination) == [[], []], kind


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
def test_resumed_run_in_groups(pool4, strategy, tmp_path):
    found = pool4.run(resumed, str(tmp_path / "x"), "tied", "zshard.AdamW", (strategy, 2, 2))
    assert found == [[]] * 4


@pytest.mark.parametrize(
    "how", ["amsgrad", "rounding", "in backward", "offload", "low", "fully_shard"]
)
@on_ranks(2)
def test_unusual_optimizer_options(how, tmp_path):
    """The same with unusual options of an optimizer."""
    path = str(tmp_path)
    states = []
    for load in (False, True):
        offload = Offload(cache=2**20, directory=path) if how == "offload" else None
        model = FSDP(make(Net), auto_wrap_policy=CASES["net"].policy, offload=offload)
        options = {"lr": 0.01}
        if how == "amsgrad":
            options = {"lr": torch.tensor(0.01), "amsgrad": True}
        if how == "low":
            low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = FSDP(make(Net), mixed_precision=low, strategy="shard_grad_op", transport="c10d")
        if how == "fully_shard":
            model = make(Net)
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        if how == "rounding":
            model = FSDP(make(Net).bfloat16(), auto_wrap_policy=CASES["net"].policy)
            options = {"lr": 0.01, "stochastic_rounding": True, "rounding_seed": 7}
        params = list(model.parameters())
        groups = [{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:]}]
        optimizer = zshard.AdamW(groups, **options)
        if how == "in backward":
            model.optimizer_in_backward(optimizer)
        if load:
            zshard.load(f"{path}/x", model, optimizer)
        else:
            go_on("net", model, optimizer, 0)
            zshard.save(f"{path}/x", model, optimizer)
        states.append(copy.deepcopy(go_on("net", model, optimizer)))
    assert differ(*states) == []


def in_place(path, combination):
    """Existing state is overwritten in place, so a model returns to its earlier state."""
    model, optimizer = trained("tied", combination, "zshard.AdamW")
    zshard.save(path, model, optimizer)
    before = state_of(model, optimizer)
    go_on("tied", model, optimizer)
    places = [each["exp_avg"].data_ptr() for each in optimizer.state.values()]
    zshard.load(path, model, optimizer)
    kept = places == [each["exp_avg"].data_ptr() for each in optimizer.state.values()]
    return kept, differ(state_of(model, optimizer), before)


def test_load_into_a_running_model(pool2, tmp_path):
    for i, combination in enumerate((FULL, C10D, ("no_shard", "shm"))):
        assert pool2.run(in_place, str(tmp_path / str(i)), combination) == [(True, [])] * 2


# --- plain models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch.AdamW", "zshard.AdamW", "torch.SGD"])
def test_into_a_plain_model(pool2, kind, tmp_path):
    made = pool2.run(save, str(tmp_path), ["tied", "dtypes"], kind, FULL)[0]
    for name, wanted in made.items():
        model = make(CASES[name].make, seed=3)
        optimizer = make_optimizer(kind, model)
        zshard.load(tmp_path / name, model, optimizer)
        assert differ(state_of(model, optimizer), wanted) == []
        assert go_on(name, model, optimizer)


def from_plain(path):
    """Two ranks load a plain model that a single rank saved."""
    model = wrap("tied", C10D)
    optimizer = make_optimizer("zshard.AdamW", model)
    result = zshard.load(path, model, optimizer)
    return state_of(model, optimizer), dict(result)


def test_from_a_plain_model(pool2, tmp_path):
    model = make(Tied, 7)
    optimizer = make_optimizer("torch.AdamW", model)
    go_on("tied", model, optimizer, 0)
    zshard.save(tmp_path / "x", model, optimizer, extra={"a": 1})
    for found, extra in pool2.run(from_plain, str(tmp_path / "x")):
        assert differ(found, state_of(model, optimizer)) == [] and extra == {"a": 1}


def plain_together(path):
    """Two ranks save and load a plain model together."""
    model = make(Tied)
    optimizer = make_optimizer("torch.AdamW", model)
    go_on("tied", model, optimizer, 0)  # each rank has its own batches
    zshard.save(path, model, optimizer, extra={"rank": rank()})
    other = make(Tied, 3)
    theirs = make_optimizer("torch.AdamW", other)
    result = zshard.load(path, other, theirs)
    return state_of(other, theirs), dict(result)


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


def test_plain_models_of_two_ranks(pool2, tmp_path):
    first, second = pool2.run(plain_together, str(tmp_path / "x"))
    assert differ(first[0], second[0]) == []
    assert first[1] == {"rank": 0} and second[1] == {"rank": 1}


class Untied(Tied):
    """The same with two separate weights."""

    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def untied(path):
    model = wrapped(Untied, FULL)
    keys = zshard.load(path, model)
    state = model.state_dict()
    return keys.missing_keys, differences(state["head.weight"], state["embed.weight"])


def test_tied_tensor_loads_under_all_names(pool2, tmp_path):
    zshard.save(tmp_path / "x", make(Tied, 7))
    assert pool2.run(untied, str(tmp_path / "x")) == [([], [])] * 2


def save_and_export(path):
    model = wrapped(Tied, FULL)
    zshard.save(f"{path}/saved", model)
    zshard.export(model).save(f"{path}/exported")
    return model.state_dict()


def test_safetensors_own_function_loads_tied_files_into_a_plain_model(pool2, tmp_path):
    """The page's advice, and why: load_state_dict() of what load_file() returns lacks names."""
    state = pool2.run(save_and_export, str(tmp_path))[0]
    for folder in ("saved", "exported"):
        file = tmp_path / folder / "model.safetensors"
        model = make(Tied, 3)
        with pytest.raises(RuntimeError, match=r'Missing key.*"head.weight"'):
            model.load_state_dict(load_file(file))
        assert load_model(model, file) == (set(), [])
        assert model.head.weight is model.embed.weight
        assert_same(model.state_dict(), state, folder)


@on_ranks(2)
def test_load_waits_for_a_running_save(tmp_path):
    """A load waits for a save in progress, then loads it."""
    path = str(tmp_path / "x")
    model, optimizer = trained("net", FULL, "zshard.AdamW")
    zshard.save(path, model, optimizer, step=1)
    go_on("net", model, optimizer)
    wanted = state_of(model, optimizer)
    zshard.save(path, model, optimizer, step=2, asynchronous=True)
    loaded = zshard.load(path, model, optimizer)
    assert loaded.step == 2
    assert differ(state_of(model, optimizer), wanted) == []


# --- the examples of docs/checkpoints.md ----------------------------------------------------------


TEXT = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def reader_names() -> dict[str, Any]:
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "zshard": zshard}


def step_of(names: dict[str, Any]) -> None:
    names["optimizer"].zero_grad()
    names["model"](torch.randn(2, 3)).sum().backward()
    names["optimizer"].step()
    names["scheduler"].step()


def run_block(text: str, steps: int) -> dict[str, Any]:
    names = reader_names()
    exec(text.replace("...", "step_of(globals())"), {**names, "steps": steps, "step_of": step_of})
    return dict(names["model"].state_dict())


def test_documented_script_resumes(tmp_path, monkeypatch):
    (text,) = (block for block in BLOCKS if "for step in" in block)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    torch.manual_seed(3)
    wanted = run_block(text, 500)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    torch.manual_seed(3)
    run_block(text, 250)  # lost from step 200 on
    torch.manual_seed(4)
    found = run_block(text, 500)
    assert differences(found, wanted) == []
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == [
        f"step-00000{number}" for number in (300, 400, 500)
    ]


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


# --- state dicts ----------------------------------------------------------------------------------


def saved_and_loaded(folder, saving, loading):
    """Train, run a block that saves and, with another model, one that loads. Return the differences
    between both models and optimizers, and whether the load changed anything."""
    names = {"FullStateDictConfig": FullStateDictConfig, "FSDP": FSDP, "torch": torch}
    names["rank"] = dist.get_rank()
    ours, theirs = reader_names(), reader_names()
    step_of(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(saving, {**names, **ours})
        dist.barrier()
        before = theirs["model"].state_dict()
        exec(loading, {**names, **theirs})
    wanted = ours["model"].state_dict()
    found = differences(theirs["model"].state_dict(), wanted)
    found += differ(theirs["optimizer"].state_dict(), ours["optimizer"].state_dict())
    return found, differences(before, wanted) != []


@pytest.mark.parametrize("file", ["state.pt", "rank0.pt"])
def test_state_dicts(pool2, file, tmp_path):
    saving, loading = (block for block in BLOCKS if file in block)
    assert pool2.run(saved_and_loaded, tmp_path, saving, loading) == [([], True)] * 2


def test_every_documented_block_runs():
    marks = ("for step in", '"meta"', "state.pt", "rank0.pt", "per_host", "DataPosition(")
    assert [sum(mark in block for block in BLOCKS) for mark in marks] == [1, 1, 2, 2, 1, 1]
    assert len(BLOCKS) == 8  # the last two: test_save_per_host.py, test_data_position.py
