"""zshard.save: failures raise the same kind of error on all ranks and have no effect.

After each failure the folder has its earlier content, bit for bit, and nothing else; training
continues, and the next save succeeds. An error about an argument names it and the remedy.
"""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest
import torch
from checkpoints import APART, bit_by_bit, check_refused, inside, outcome, unlike
from file_faults import file_faults
from groups import comm_of_all
from models import CASES, Mlp, loss_of, make
from optim_states import rank, trained
from rows import all_refused
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP


def some_function():
    pass


def save(*names, **options):
    """Return a call for a table: a save to "new" of these (the model and the optimizer, by default)."""

    def call(folder, model, optimizer):
        given = {"model": model, "optimizer": optimizer}
        zshard.save(folder / "new", *(given[name] for name in names or given), **options)

    return call


# --- arguments ------------------------------------------------------------------------------------


@on_ranks(2)
def test_arguments(tmp_path):
    int32, other = torch.int32, torch.optim.SGD(make(Mlp).parameters(), 0.1)
    function = {"a": {"b": some_function}}
    sizes = "max_shard_size must be a positive number of bytes"
    table = {
        "step must be an integer from 0 to 2**63 - 1, got -1": (ValueError, {"step": -1}),
        "step=1.0: 'float' object cannot be interpreted": (TypeError, {"step": 1.0}),
        "step must be an integer from 0 to 2**63 - 1, got True": (ValueError, {"step": True}),
        "step='7': 'str' object cannot be interpreted": (TypeError, {"step": "7"}),
        "0 to 2**63 - 1, got 9223372036854775808": (ValueError, {"step": 2**63}),
        "extra['a']['b']: unsupported type function": (TypeError, {"extra": function}),
        "extra must be a dict, got list": (TypeError, {"extra": [1]}),
        "floating-point dtype of safetensors, got torch.int32": (ValueError, {"dtype": int32}),
        "torch.dtype, got 'bf16'": (TypeError, {"dtype": "bf16"}),
        sizes: (ValueError, {"max_shard_size": "5XB"}),
        "keep_last needs numbered": (ValueError, {"keep_last": 2}),
        "keep_last must be an integer from 1": (ValueError, {"keep_last": 0, "step": 1}),
        "keep_last=1.5: 'float' object cannot": (TypeError, {"keep_last": 1.5, "step": 1}),
    }
    rows = {text: (save(**options), kind, text) for text, (kind, options) in table.items()}
    text = "has a parameter of shape (13, 7), which the model lacks"
    call = lambda folder, model, _: zshard.save(folder / "new", model, other)  # noqa: E731
    check_refused(tmp_path, rows | {"another model's optimizer": (call, ValueError, text)})


def test_non_models_and_paths_are_refused(tmp_path):
    model, missing = nn.Linear(1, 1), tmp_path / "runs"
    path = "path must be a string or a pathlib.Path, got "
    paths = {
        "none": (None, TypeError, f"{path}None; zshard.latest_checkpoint"),
        "bytes": (b"x", TypeError, f"{path}b'x'"),
        "a number": (3, TypeError, "expected str, bytes or os.PathLike object, not int"),
        "a NUL byte": ("a\0b", ValueError, r"path='a\x00b' contains a NUL byte"),
    }
    table = {
        f"{call.__name__} {name}": (lambda call=call, path=path: call(path, model), kind, text)
        for call in (zshard.save, zshard.load)
        for name, (path, kind, text) in paths.items()
    }

    def refused(error, text, *words, **options):
        call = lambda: zshard.save(*words, **options)  # noqa: E731
        table[f"{len(table)}"] = call, error, text

    new, state = tmp_path / "x", model.state_dict()
    refused(TypeError, "model must be an nn.Module, got OrderedDict", new, state)
    refused(TypeError, "must be a torch.optim.Optimizer, got dict", new, model, {})
    refused(ValueError, "does not name a folder", "", model)
    refused(ValueError, "does not name a folder", "/", model)
    refused(FileNotFoundError, f"'{missing}' does not exist; create it first", missing / "x", model)
    missing = missing / "run"
    refused(FileNotFoundError, f"'{missing}' does not exist", missing, model, step=1)
    all_refused(table)
    assert list(tmp_path.iterdir()) == []


def test_largest_step(tmp_path):
    zshard.save(tmp_path, nn.Linear(1, 1), step=torch.tensor(2**63 - 1))
    assert zshard.load(tmp_path, nn.Linear(1, 1)).step == 2**63 - 1


# --- ranks that differ ----------------------------------------------------------------------------


def other_paths(folder, model, optimizer):
    zshard.save(folder / f"new{rank()}", model, optimizer)


def other_names(folder, model, optimizer):
    model.register_buffer(f"more{rank()}", torch.ones(1))
    try:
        zshard.save(folder / "new", model)
    finally:
        del model._buffers[f"more{rank()}"]


def other_states(folder, model, optimizer):
    optimizer.state[model.first.weight][f"more{rank()}"] = 1
    try:
        zshard.save(folder / "new", model, optimizer)
    finally:
        del optimizer.state[model.first.weight][f"more{rank()}"]


@on_ranks(2)
def test_ranks_that_differ(tmp_path):
    """Also: a mistake of one rank is an error on all ranks."""
    dtype = "shape (13, 7), torch.float32 on rank 0, but shape (13, 7), torch.b"
    table = {
        "step is 1 on rank 0, but 2 on rank 1": save(step=1 + rank()),
        "max_shard_size is 10 on rank 0, but 11": save(max_shard_size=10 + rank()),
        f"tensor 'first.weight' is {dtype}": save(dtype=[None, torch.bfloat16][rank()]),
        "keep_last is": save(keep_last=1 + rank(), step=1),
        "overwrite is": save(overwrite=bool(rank())),
        "rank 0 has 'first.weight.more0' (not a tensor)": other_states,
        "path is '": other_paths,
        "rank 0 has tensor 'more0'": other_names,
        "which rank 1 lacks": save("model", *["optimizer"][rank() :]),
    }
    (tmp_path / "new").mkdir(exist_ok=True)  # the folder of numbered ones
    rows = {text: (call, zshard.DivergenceError, text) for text, call in table.items()}
    text = f"{['rank 1: ', ''][rank()]}cannot save extra['a']: unsupported type"
    extra = {"a": [1, some_function][rank()]}
    check_refused(tmp_path, rows | {"of one rank": (save(extra=extra), TypeError, text)})


# --- wrong time -----------------------------------------------------------------------------------


def in_forward(folder, model, optimizer):
    handle = model.second.register_forward_hook(lambda *_: save()(folder, model, optimizer))
    try:
        model(CASES["mlp"].batch(0, rank()))
    finally:
        handle.remove()


def while_whole(folder, model, optimizer):
    with FSDP.summon_full_params(model):
        zshard.save(folder / "new", model)


def unsharded(folder, model, optimizer):
    model.first.unshard()
    try:
        zshard.save(folder / "new", model)
    finally:
        model.first.reshard()


@on_ranks(2)
def test_save_at_the_wrong_time(tmp_path):
    step = "cannot save during a step: do it before the forward"
    whole = "cannot save while unshard() or summon_full_params() keeps the parameters"
    texts = {in_forward: step, while_whole: whole, unsharded: whole}
    rows = {call.__name__: (call, RuntimeError, text) for call, text in texts.items()}
    check_refused(tmp_path, rows)


@on_ranks(2)
def test_save_in_a_backward(tmp_path):
    """A backward that raises ends there, as always; the model cannot train on from it here."""
    model, _ = trained("mlp", APART, "zshard.AdamW")
    model.second.register_forward_hook(
        lambda _, args, out: (
            out.register_hook(lambda _: zshard.save(tmp_path / "x", model)) and None
        )
    )
    with pytest.raises(RuntimeError, match="cannot save during a step"):
        loss_of(model(CASES["mlp"].batch(0, rank()))).backward()
    assert inside(tmp_path) == []


# --- failing calls --------------------------------------------------------------------------------


def each_call(folder, sufferer, what, overwrite):
    """Fail each call of a save in turn, on one rank. Return the faults, how often there was an
    error, and how often there was none: some calls only tidy up."""
    model, optimizer = trained("mlp", APART, "zshard.AdamW", steps=1)
    zshard.save(folder / "old", model, optimizer)
    state, named = model.state_dict(), zshard.optim_state_dict(model, optimizer)
    before, wrong, ends, nth = bit_by_bit(folder / "old"), [], [], 0
    path = folder / ("old" if overwrite else "new")
    comm = comm_of_all()
    while True:
        nth += 1
        comm.exchange(b"")
        file_faults(nth if rank() == sufferer else 0, what)
        found = outcome(lambda: zshard.save(path, model, optimizer, overwrite=overwrite))
        calls = file_faults(0)
        if rank() == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / f".{path.name}.zshard.lock")  # may stay: it belongs to no save
            hidden = [name for name in inside(folder) if name.startswith(".")]
            if found is None:
                wrong += unlike(path, state, named)
                before = before if not overwrite else bit_by_bit(path)
            elif set(inside(folder)) != {"old"} or bit_by_bit(folder / "old") != before:
                wrong.append((nth, inside(folder)))
            elif not issubclass(found[0], OSError) or f"'{folder}" not in found[1]:
                wrong.append((nth, found))
            if len(hidden) > 1 or (hidden and found is not None):
                wrong.append((nth, hidden))
            if found is None and not overwrite:
                shutil.rmtree(path)
        ends.append(found is None)
        last = comm.exchange(bytes([rank() == sufferer and calls < nth]))
        if any(end == b"\1" for end in last):
            return wrong, ends.count(False), ends.count(True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("sufferer", [0, 1])
@pytest.mark.parametrize("what", ["EIO", "ENOSPC"])
def test_each_failing_call(pool2, sufferer, what, overwrite, tmp_path):
    first, second = pool2.run(each_call, tmp_path, sufferer, what, overwrite)
    assert first[0] == second[0] == []
    assert first[1:] == second[1:]
    assert first[1] >= (30 if sufferer == 0 else 6)
    assert first[2] <= (24 if sufferer == 0 else 2)  # it deletes the old checkpoint and its lock
