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
from models import CASES, ddp, differences, make, make_optimizer, train
from optim_states import FULL, differ, go_on, rank, reference, trained, wrap
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
    """Return {options: what differs between the results for a sharded model and for a DDP
    model}."""
    kind = "zshard.AdamW"
    plain, theirs = reference(name, kind)
    model, optimizer = trained(name, FULL, kind)
    found = {}
    for what, options in SAVING.items():
        ours = dcp.get_state_dict(model, optimizer, options=StateDictOptions(**options))
        expected = dcp.get_state_dict(plain, theirs, options=StateDictOptions(**options))
        empty = what == "rank 0" and rank() == 1
        found[what] = differ(list(ours), list(expected)) + (
            ["not empty"] if empty and any(ours) else []
        )
        alone = dcp.get_model_state_dict(model, options=StateDictOptions(**options))
        found[what] += differ(alone, ours[0])
        alone = dcp.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
        found[what] += differ(alone, ours[1])
    assert not any(found.values()), found


LOADING = {
    "as it is": {},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    "not strict": {"full_state_dict": True, "strict": False},
}


def resumed(name, kind, combination, options):
    """Return what differs between continuing and continuing after a load into another model."""
    model, optimizer = trained(name, FULL, kind)
    state = copy.deepcopy(dcp.get_state_dict(model, optimizer))
    expected = go_on(name, model, optimizer)
    if options.get("broadcast_from_rank0") and rank() == 1:
        state = {}, {}
    other = wrap(name, combination, seed=3)
    theirs = make_optimizer(kind, other)
    chosen = StateDictOptions(**options)
    # Not set_state_dict(), which mistakes a rank without a dict for one that loads no model.
    result = dcp.set_model_state_dict(other, state[0], options=chosen)
    dcp.set_optimizer_state_dict(other, theirs, state[1], options=chosen)
    found = [str(each) for each in result if each]
    return found + differ(go_on(name, other, theirs), expected)


WAYS = [(name, what) for name in ("tied", "frozen", "odds") for what in LOADING]
WAYS += [("conv", "as it is"), ("conv", "full")]  # from rank 0, buffers would be rank 0's


@pytest.mark.parametrize(("name", "what"), WAYS)
def test_resumed_run_is_bit_identical(pool2, name, what):
    for kind, combination in (("zshard.AdamW", C10D), ("torch.SGD", FULL)):
        assert pool2.run(resumed, name, kind, combination, LOADING[what]) == [[], []]


@on_ranks(2)
def test_both_at_once_and_flat():
    """set_state_dict(), and a flat dict of an optimizer's state."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optim_state = dcp.get_state_dict(model, optimizer, options=flat)
    other = wrap("mlp", C10D, seed=3)
    theirs = make_optimizer("zshard.AdamW", other)
    both = {"model_state_dict": model_state, "optim_state_dict": optim_state}
    dcp.set_state_dict(other, theirs, **both, options=flat)
    assert differ(go_on("mlp", other, theirs), go_on("mlp", model, optimizer)) == []


def without_frozen(options):
    """Frozen parameters are not in the dict, and stay unchanged when it is loaded."""
    model, _ = trained("frozen", FULL, "zshard.AdamW")
    state = dcp.get_model_state_dict(model, options=StateDictOptions(**options))
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    other = wrap("frozen", C10D, seed=3)
    before = other.state_dict()
    expected = {**before, **state}
    left_out = set(frozen).isdisjoint(state)  # checked now: torch may add to the dict that it loads
    dcp.set_model_state_dict(other, state, options=StateDictOptions(**options))
    return left_out, differences(other.state_dict(), expected)


@pytest.mark.parametrize("full", [True, False])
def test_frozen_parameters_may_be_omitted(pool2, full):
    options = {"ignore_frozen_params": True, "full_state_dict": full, "strict": full}
    assert pool2.run(without_frozen, options) == [(True, [])] * 2


def misuse(what, options):
    """Return the errors of a load of state dicts with missing or misshapen entries."""
    model, optimizer = trained("mlp", FULL, "zshard.AdamW")
    model_state, optim_state = dcp.get_state_dict(model, optimizer)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    if what == "missing":
        del model_state["first.weight"], optim_state["state"]["first.weight"]
    else:
        model_state["first.weight"] = torch.zeros(7, 13)
        optim_state["state"]["first.weight"]["exp_avg"] = torch.zeros(7, 13)
    texts = []
    options = StateDictOptions(**options)
    try:
        dcp.set_model_state_dict(model, model_state, options=options)
    except RuntimeError as error:
        texts.append(str(error))
    try:
        dcp.set_optimizer_state_dict(model, optimizer, optim_state, options=options)
    except (RuntimeError, ValueError) as error:
        texts.append(str(error))
    return texts, differ([model.state_dict(), optimizer.state_dict()], before)


def test_mismatches_are_errors(pool2):
    for (of_model, of_optimizer), changed in pool2.run(misuse, "missing", {}):
        assert 'Missing key(s) in state_dict: "first.weight"' in of_model
        assert "Missing optimizer state for parameter 'first.weight'" in of_optimizer
        assert changed == []
    for options in ({}, {"full_state_dict": True}):
        for (of_model, of_optimizer), changed in pool2.run(misuse, "shape", options):
            assert "size mismatch for first.weight" in of_model
            assert "'exp_avg' of parameter 'first.weight'" in of_optimizer
            assert changed == []


def test_single_rank():
    for name in ("tied", "frozen"):
        model = wrap(name, FULL)
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
    """Return what differs after the same script, with zshard's import, has loaded that
    checkpoint."""
    expected = saved_by_fsdp2(tmp_path)
    model = wrap("mlp", ("full_shard", transport), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    if how == "by name":
        states = dcp.get_state_dict(model, optimizer)
        files.load({"model": states[0], "optim": states[1]}, checkpoint_id=tmp_path / how)
        both = {"model_state_dict": states[0], "optim_state_dict": states[1]}
        dcp.set_state_dict(model, optimizer, **both)
    else:
        train(model, CASES["mlp"], optimizer, rank(), 1)  # dcp.load() reads into existing state
        files.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / how)
    found = differ(dcp.get_state_dict(model, optimizer), expected)
    assert found == []


@on_ranks(2)
def test_names_with_module_prefix_are_loaded():
    """DDP's state dict has `module.` before each name; return what differs after loading it."""
    theirs = ddp(make(CASES["conv"].make))
    train(theirs, CASES["conv"], torch.optim.SGD(theirs.parameters(), lr=0.1), rank(), 2)
    found = []
    for load in (
        lambda model, state: model.load_state_dict(state),
        lambda model, state: zshard.load_state_dict(model, state if rank() == 0 else None, from_rank0=True),
        lambda model, state: dcp.set_model_state_dict(model, state),
    ):  # fmt: skip
        model = zshard.DistributedDataParallel(make(CASES["conv"].make, 3))
        load(model, theirs.state_dict())
        found += differences(dict(model.named_parameters()), dict(theirs.module.named_parameters()))
    own = zshard.DistributedDataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    own.load_state_dict(own.state_dict())  # of a model that has such a child
    mixed = {**theirs.state_dict(), "else": torch.ones(1)}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(mixed)
    assert found == []
