"""torch.distributed.checkpoint.state_dict on sharded models: its functions and options.

These functions read and set the state dicts of model and optimizer, which are full, so they must do
the same for a sharded model as for the plain one.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as files
import torch.distributed.checkpoint.state_dict as dcp
from models import CASES, ddp, make, make_optimizer, train
from optim_states import FULL, differ, go_on, rank, reference, trained
from scenario import sharded
from spawn import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard

import zshard

C10D = ("shard_grad_op", "c10d")
SAVING = {
    "as it is": {},
    "full": {"full_state_dict": True},
    "cpu": {"cpu_offload": True},
    "rank 0": {"full_state_dict": True, "cpu_offload": True},
    "trainable": {"ignore_frozen_params": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


@pytest.mark.parametrize("name", ["tied", "frozen", "conv"])
@on_ranks(2)
def test_state_equals_the_plain_models(name):
    kind = "zshard.AdamW"
    plain, theirs = reference(name, kind)
    model, optimizer = trained(name, FULL, kind)
    for what, chosen in SAVING.items():
        options = StateDictOptions(**chosen)
        ours = dcp.get_state_dict(model, optimizer, options=options)
        assert differ(ours, dcp.get_state_dict(plain, theirs, options=options)) == [], what
        assert any(ours) == (what != "rank 0" or rank() == 0)
        alone = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        assert differ((dcp.get_model_state_dict(model, options=options), alone), ours) == [], what


LOADING = {
    "as it is": {},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "not strict": {"full_state_dict": True, "strict": False},
}


WAYS = [(name, what) for name in ("tied", "frozen", "odds") for what in LOADING]
WAYS += [("conv", "as it is"), ("conv", "full")]  # from rank 0, buffers would be rank 0's


@pytest.mark.parametrize(("kind", "combination"), [("zshard.AdamW", C10D), ("torch.SGD", FULL)])
@pytest.mark.parametrize(("name", "what"), WAYS)
@on_ranks(2)
def test_resumed_run_is_bit_identical(name, what, kind, combination):
    model, optimizer = trained(name, FULL, kind)
    state = copy.deepcopy(dcp.get_state_dict(model, optimizer))
    expected = go_on(name, model, optimizer)
    if what == "from rank 0" and rank() == 1:
        state = {}, {}
    other = sharded(name, combination, seed=3)
    theirs = make_optimizer(kind, other)
    options = StateDictOptions(**LOADING[what])
    # Not set_state_dict(), which mistakes a rank without a dict for one that loads no model.
    assert not any(dcp.set_model_state_dict(other, state[0], options=options))
    dcp.set_optimizer_state_dict(other, theirs, state[1], options=options)
    assert differ(go_on(name, other, theirs), expected) == []


@on_ranks(2)
def test_both_at_once_and_flat():
    """set_state_dict(), and a flat dict of an optimizer's state."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optim_state = dcp.get_state_dict(model, optimizer, options=flat)
    other = sharded("mlp", C10D, seed=3)
    theirs = make_optimizer("zshard.AdamW", other)
    both = {"model_state_dict": model_state, "optim_state_dict": optim_state}
    dcp.set_state_dict(other, theirs, **both, options=flat)
    assert differ(go_on("mlp", other, theirs), go_on("mlp", model, optimizer)) == []


@pytest.mark.parametrize("full", [True, False])
@on_ranks(2)
def test_frozen_parameters_may_be_omitted(full):
    """They are not in the dict, and stay unchanged when it is loaded."""
    model, other = trained("frozen", FULL, "zshard.AdamW")[0], sharded("frozen", C10D, seed=3)
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=full, strict=full)
    state = dcp.get_model_state_dict(model, options=options)
    assert not any(name in state for name, p in model.named_parameters() if not p.requires_grad)
    expected = {**other.state_dict(), **state}
    dcp.set_model_state_dict(other, state, options=options)
    assert differ(other.state_dict(), expected) == []


@pytest.mark.parametrize(
    ("what", "full"), [("missing", False), ("of another shape", False), ("of another shape", True)]
)
@on_ranks(2)
def test_mismatches_are_errors(what, full):
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    model_state, optim_state = dcp.get_state_dict(model, optimizer)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    if what == "missing":
        del model_state["first.weight"], optim_state["state"]["first.weight"]
        of_model = 'Missing key.* in state_dict: "first.weight"'
        of_optimizer = "Missing optimizer state for parameter 'first.weight'"
    else:
        model_state["first.weight"] = torch.zeros(7, 13)
        optim_state["state"]["first.weight"]["exp_avg"] = torch.zeros(7, 13)
        of_model = "size mismatch for first.weight"
        of_optimizer = "'exp_avg' of parameter 'first.weight'"
    options = StateDictOptions(full_state_dict=full)
    with pytest.raises(RuntimeError, match=of_model):
        dcp.set_model_state_dict(model, model_state, options=options)
    with pytest.raises((RuntimeError, ValueError), match=of_optimizer):
        dcp.set_optimizer_state_dict(model, optimizer, optim_state, options=options)
    assert differ([model.state_dict(), optimizer.state_dict()], before) == []


def test_single_rank():
    for name in ("tied", "frozen"):
        model = sharded(name, FULL)
        optimizer = zshard.AdamW(model.parameters())
        train(model, CASES[name], optimizer, 0, 2)
        plain = make(CASES[name].make, seed=2)
        theirs = torch.optim.AdamW(plain.parameters())
        for options in ({}, {"full_state_dict": True}, {"cpu_offload": True}):
            chosen = StateDictOptions(**options)
            state = copy.deepcopy(dcp.get_state_dict(model, optimizer, options=chosen))
            both = {"model_state_dict": state[0], "optim_state_dict": state[1]}
            dcp.set_state_dict(plain, theirs, **both, options=chosen)
            dcp.set_state_dict(model, optimizer, **both, options=chosen)
            expected = dcp.get_state_dict(plain, theirs)
            assert differ(list(dcp.get_state_dict(model, optimizer)), list(expected)) == []


def saved_by_fsdp2(path):
    """A script with FSDP2 saves in both ways; return its state."""
    model = make(CASES["mlp"].make)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, CASES["mlp"], optimizer, rank(), 2)
    states = dcp.get_state_dict(model, optimizer)
    files.save({"model": states[0], "optim": states[1]}, checkpoint_id=path / "by name")
    files.save({"model": model, "optim": optimizer}, checkpoint_id=path / "by number")
    whole = StateDictOptions(full_state_dict=True)
    return dcp.get_state_dict(model, optimizer, options=whole)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("how", ["by name", "by number"])
@on_ranks(2)
def test_fsdp2_checkpoint_is_resumed(tmp_path, how, transport):
    """By the same script with zshard's import."""
    expected = saved_by_fsdp2(tmp_path)
    model = sharded("mlp", ("full_shard", transport), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    if how == "by name":
        states = dcp.get_state_dict(model, optimizer)
        files.load({"model": states[0], "optim": states[1]}, checkpoint_id=tmp_path / how)
        both = {"model_state_dict": states[0], "optim_state_dict": states[1]}
        dcp.set_state_dict(model, optimizer, **both)
    else:
        train(model, CASES["mlp"], optimizer, rank(), 1)  # dcp.load() reads into existing state
        files.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / how)
    assert differ(dcp.get_state_dict(model, optimizer), expected) == []


LOADERS = [
    lambda model, state: model.load_state_dict(state),
    lambda model, state: zshard.load_state_dict(
        model, state if rank() == 0 else None, from_rank0=True
    ),
    dcp.set_model_state_dict,
]


@on_ranks(2)
def test_names_with_module_prefix_are_loaded():
    """DDP's state dict has `module.` before each name."""
    theirs = ddp(make(CASES["conv"].make))
    train(theirs, CASES["conv"], torch.optim.SGD(theirs.parameters(), lr=0.1), rank(), 2)
    for load in LOADERS:
        model = zshard.DistributedDataParallel(make(CASES["conv"].make, 3))
        load(model, theirs.state_dict())
        assert differ(*(dict(each.named_parameters()) for each in (model, theirs.module))) == []
    own = zshard.DistributedDataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    own.load_state_dict(own.state_dict())  # of a model that has such a child
    mixed = {**theirs.state_dict(), "else": torch.ones(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(mixed)
