"""zshard.load of checkpoints that are damaged or incomplete, that the system cannot read, or that
belong to another model.

A good checkpoint with one change is the same error on all ranks; it names the file and the problem,
and nothing on any rank has changed. Mismatches are found before anything changes, and reported in
torch's words where torch has some.
"""

from __future__ import annotations

import itertools
import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compare import assert_same, differences
from damage import check, flip, model_and_optimizer, open_files, refused, saved, state_of
from file_faults import file_faults
from models import make_optimizer, wrapped
from optim_states import FULL, differ, rank
from rows import all_refused, all_rows
from safetensors.torch import save_file
from scenarios import Stack, forward_backward
from spawn import on_ranks
from torch import nn

import zshard
from zshard import CheckpointError, DivergenceError


def first_of(path, name):
    """Return the first file of that begin."""
    return next(each for each in sorted(path.iterdir()) if each.name.startswith(name))


# --- bytes ----------------------------------------------------------------------------------------


def on_rank_0(action, *args):
    """Change files while no rank reads them."""
    dist.barrier()
    if rank() == 0:
        action(*args)
    dist.barrier()


@pytest.mark.parametrize(
    "steps", [(199, 13), pytest.param((97, 7), marks=pytest.mark.thorough)], ids=str
)
@on_ranks(2)
def test_every_flipped_bit_is_detected(path, steps):
    """At places across all files: header, padding, data, index."""
    model, optimizer = model_and_optimizer()
    before = state_of(model, optimizer)
    for file in sorted(each for each in path.iterdir() if each.name != "zshard.json"):
        size = file.stat().st_size
        for at in range(0, size, steps[size <= 4096]):
            on_rank_0(flip, file, at, at % 8)
            # A bit of a header's JSON may also change a name or shape, which is reported as such.
            with pytest.raises(CheckpointError, match=r"\.safetensors"):
                zshard.load(path, model, optimizer)
            on_rank_0(flip, file, at, at % 8)
    assert differ(state_of(model, optimizer), before) == []


@pytest.mark.parametrize("name", ["model-00001-of", "model.safetensors.index", "zshard.json"])
@on_ranks(2)
def test_truncated_and_extended_files(path, name):
    file = first_of(path, name)
    size = file.stat().st_size
    model, optimizer = model_and_optimizer()
    before = state_of(model, optimizer)
    for length in [size + 1, size - 1, *(size * i // 15 for i in reversed(range(14))), 0]:
        on_rank_0(os.truncate, file, length)
        with pytest.raises(CheckpointError) as caught:
            zshard.load(path, model, optimizer)
        said = f"has {length} bytes, but was saved with {size}"
        assert str(file) in str(caught.value)
        assert said in str(caught.value) or name == "zshard.json"
    assert differ(state_of(model, optimizer), before) == []


def test_damaged_missing_and_exchanged_files(pool2, good, tmp_path):
    pool2.run(saved, tmp_path / "other", 2)
    with all_rows() as row:
        for name in ("model-00002-of", "optimizer-00001-of", "optimizer.safetensors.i"):
            with row("missing", name):
                path = shutil.copytree(good, tmp_path / name)
                (file := first_of(path, name)).unlink()
                check(pool2, path, f"'{file}' is missing from the checkpoint")
        path = shutil.copytree(good, tmp_path / "x")
        with row("exchanged"):
            file = first_of(path, "model-00001")
            shutil.copy(tmp_path / "other" / file.name, file)
            check(pool2, path, f"'{file}' is damaged: checksum mismatch in bytes 0 to")
            shutil.copy(good / file.name, file)
        with row("damaged"):
            file = first_of(path, "optimizer-00001")
            flip(file, -1)
            words = f"checksum mismatch in bytes 0 to {file.stat().st_size} (block 0)"
            check(pool2, path, [f"'{file}' is damaged: {words}", "which contain the header"])


@pytest.mark.parametrize("has_manifest", [True, False])
def test_files_outside_the_manifest_are_ignored(pool2, path, has_manifest):
    """Without a manifest, the folder is a plain one of other tools."""
    if has_manifest:
        save_file({"head.bias": torch.ones(2)}, path / "model.safetensors")
        save_file({"x": torch.ones(2)}, path / "model-00009-of-00009.safetensors")
        (path / "optimizer.safetensors").write_bytes(b"nothing")
    else:
        (path / "zshard.json").unlink()
        check(pool2, path, "has no usable optimizer state", RuntimeError)
    pool2.run(loads_the_model, path, has_manifest)


def loads_the_model(path, verified):
    model, _ = model_and_optimizer()
    before = model.state_dict()
    assert zshard.load(path, model).verified is verified
    assert_same(model.state_dict(), before, "the model")


# --- numbered checkpoints -------------------------------------------------------------------------


def numbered(path):
    for step in (9, 10):
        model, optimizer = model_and_optimizer()
        zshard.save(path, model, optimizer, step=step, extra={"step": step})
    loaded = zshard.load(path, model, optimizer)
    assert (loaded.step, loaded.path) == (10, str(path / "step-00000010"))
    assert dict(loaded) == {"step": 10}


def test_newest_is_loaded_and_error_suggests_an_older_one(pool2, tmp_path):
    pool2.run(numbered, tmp_path / "run")
    newest, older = (tmp_path / "run" / f"step-{step:08}" for step in (10, 9))
    flip(newest / "model.safetensors", 5000)
    for folder in (newest.parent, newest):
        check(pool2, folder, [f"'{newest}/model.safetensors' is damaged", f"'{older}' is an older"])
    (newest / "model.safetensors").unlink()
    words = ["model.safetensors' is missing", f"'{older}' is an older checkpoint"]
    check(pool2, newest.parent, words)
    (newest / "zshard.json").unlink()
    assert zshard.latest_checkpoint(newest.parent) == str(older)


# --- the system -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.sampled(2)
@on_ranks(2)
def test_any_failing_call_is_an_error_on_all_ranks(good, is_foreign):
    """Each call of rank 1 fails in turn, of zshard's files or of another tool's; no file stays open."""
    model, optimizer = model_and_optimizer()
    other, state = model_and_optimizer()
    if is_foreign:
        good, optimizer, state = first_of(good, "model-00001"), None, None
    for nth in itertools.count(1):
        file_faults(nth if rank() == 1 else 0, "EIO")
        try:
            zshard.load(good, model, optimizer, strict=not is_foreign)
        except OSError as error:
            assert "[Errno 5]" in str(error) and str(good) in str(error), nth
        ended = [file_faults(0) < nth]  # there was no such call
        assert open_files(good) == []
        dist.broadcast_object_list(ended, 1)
        if ended[0]:
            break
    assert nth > (4 if is_foreign else 30)
    for each in ((model, optimizer), (other, state)):
        zshard.load(good, *each, strict=not is_foreign)
    assert differ(model.state_dict(), other.state_dict()) == []


@on_ranks(2)
def test_file_truncated_during_load(path):
    """A file is truncated after all checks."""
    file = first_of(path, "optimizer-00001")
    model, optimizer = model_and_optimizer()
    optimizer.register_load_state_dict_pre_hook(lambda *_: os.truncate(file, 5000) or None)
    with pytest.raises(CheckpointError) as caught:
        zshard.load(path, model, optimizer)
    assert f"'{file}' ends at byte 5000, before byte" in str(caught.value)


def test_verify_off(tmp_path):
    """Headers are checked, data is not."""
    model = nn.Linear(1200, 1200)
    zshard.save(tmp_path / "x", model)
    file = tmp_path / "x" / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    before = model.weight[0, 0].item()
    words = r"checksum mismatch in .* \(block 1\), which contain '(weight|bias)'"
    with pytest.raises(CheckpointError, match=words):
        zshard.load(tmp_path / "x", model)
    assert zshard.load(tmp_path / "x", model, verify=False).verified is False
    flip(file, file.read_bytes().index(b"weight"))
    words = r"checksum mismatch .* \(block 0\), which contain the header, "
    with pytest.raises(CheckpointError, match=words):
        zshard.load(tmp_path / "x", model, verify=False)
    assert model.weight[0, 0].item() == before


# --- mismatches -----------------------------------------------------------------------------------


class Other(Stack):
    """Another head, and one block less."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(9, 3)
        del self.blocks[2]


@on_ranks(2)
def test_another_model(tmp_path):
    model = wrapped(Other, FULL)
    optimizer = make_optimizer("zshard.AdamW", model)
    forward_backward(model, rank())
    optimizer.step()
    zshard.save(tmp_path / "x", model, optimizer)
    for is_strict in (True, False):
        said, changed, _ = refused(tmp_path / "x", RuntimeError, {"strict": is_strict}, True)
        assert "size mismatch for head.weight" in said and changed == []
        missing = 'Missing key(s) in state_dict: "blocks.2.norm.weight"'
        assert missing in said or not is_strict


@on_ranks(2)
def test_another_optimizer(good):
    """Also wrong arguments."""
    model, optimizer = model_and_optimizer()
    params, one = list(model.parameters()), rank() == 1
    low = wrapped(lambda: Stack().bfloat16(), FULL)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    before = state_of(model, optimizer)
    adam, load, kinds = torch.optim.Adam(params), zshard.load, (RuntimeError, ValueError)
    more = zshard.AdamW([*params, nn.Parameter(torch.ones(3))])
    table = {
        "class": (zshard.SGD(params, lr=0.1, momentum=0.9), "AdamW, but the optimizer is SGD"),
        "parts": (zshard.AdamW(params[1:]), "has no parameter 'blocks.0.norm.weight'"),
        "groups": (zshard.AdamW(groups), "1 param groups, but the optimizer has 2"),
        "stranger": (more, "has a parameter of shape (3,), which the model lacks"),
        "of another model": (zshard.AdamW(low.parameters()), "which the model lacks"),
        "of the same state": (adam, "the optimizer is Adam; pass strict=False"),
    }
    mine, text = (optimizer if one else None), "must be a torch.optim.Optimizer, got "
    calls = {n: (partial(load, good, model, o), kinds, said) for n, (o, said) in table.items()}
    calls |= {
        said: (partial(load, *arguments), kind, said)
        for kind, said, *arguments in (
            (
                DivergenceError,
                "(optimizer=) is NoneType on rank 0, but AdamW on",
                good,
                model,
                mine,
            ),
            (TypeError, f"{text}int", good, model, optimizer if one else 3),
            (TypeError, f"{text}str", good, model, "optimizer"),
            (TypeError, "must be an nn.Module, got str", good, "model"),
            (TypeError, "not int", 3, model),
        )
    }
    said = "load(verify=) is False on rank 0, but True on rank 1"
    calls[said] = partial(load, good, model, verify=one), DivergenceError, said
    all_refused(calls)
    assert differ(state_of(model, optimizer), before) == []
    load(good, model, adam, strict=False)  # as load_state_dict() would
    assert "exp_avg" in adam.state[params[0]]


@on_ranks(2)
def test_optimizer_that_raises_on_one_rank(good):
    """After loading: all ranks get their state back and can continue."""
    model, optimizer = model_and_optimizer()
    optimizer.step()  # make values and options differ from the checkpoint
    optimizer.param_groups[0]["lr"] = 3.0
    before = state_of(model, optimizer)
    usual = type(optimizer).__setstate__

    def set_state(self, state):
        usual(self, state)
        if "param_groups" in state and rank() == 1:
            raise NotImplementedError("not with these options")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "__setstate__", set_state)
        with pytest.raises(NotImplementedError, match="not with these options"):
            zshard.load(good, model, optimizer)
    assert differ(state_of(model, optimizer), before) == []
    seen, first = [], next(model.parameters())

    def post_hook(optimizer):
        seen.append(zshard.to_local(optimizer.state[first]["exp_avg"]).clone())

    optimizer.register_load_state_dict_post_hook(post_hook)
    changed = zshard.to_local(optimizer.state[first]["exp_avg"]).clone()
    zshard.load(good, model, optimizer)
    after = zshard.to_local(optimizer.state[first]["exp_avg"])
    assert len(seen) == 1 and torch.equal(seen[0], after), "post hooks see the values"
    assert not torch.equal(after, changed) or not after.numel()  # rank 1 may have none of it
    forward_backward(model, rank())
    optimizer.step()


@on_ranks(2)
def test_a_whole_matrix_that_refuses_on_one_rank(tmp_path):
    """A WholeMatrix's state is in another optimizer, which loads before a hook raises."""
    model, _ = model_and_optimizer()
    optimizer = zshard.WholeMatrix(torch.optim.Adam, list(model.parameters()), lr=0.1)
    forward_backward(model, rank())
    optimizer.step()
    zshard.save(tmp_path / "x", model, optimizer)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 3.0
    before = optimizer.state_dict()

    def refuse(optimizer, state):
        if rank() == 1:
            raise NotImplementedError("not on this rank")

    handle = optimizer.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(NotImplementedError, match="not on this rank"):
        zshard.load(tmp_path / "x", model, optimizer)
    handle.remove()
    assert optimizer.param_groups[0]["lr"] == 3.0
    assert differences(optimizer.state_dict()["state"], before["state"]) == []
