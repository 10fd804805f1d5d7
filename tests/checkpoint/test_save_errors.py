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
from checkpoints import APART, bit_by_bit, inside, outcome, tried, unlike
from file_faults import file_faults
from groups import comm_of_all
from models import CASES, Mlp, loss_of, make
from optim_states import rank, trained
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

# --- arguments ------------------------------------------------------------------------------------


def other_model(folder, model, optimizer):
    other = torch.optim.SGD(make(Mlp).parameters(), 0.1)
    zshard.save(folder / "new", model, other)


def some_function():
    pass


ARGUMENTS = {
    "step below 0": (
        ValueError,
        "step must be an integer from 0 to 2**63 - 1, got -1",
        {"step": -1},
    ),
    "no step": (TypeError, "'float' object cannot be interpreted", {"step": 1.0}),
    "a truth value": (
        ValueError,
        "step must be an integer from 0 to 2**63 - 1, got True",
        {"step": True},
    ),
    "extra": (
        TypeError,
        "extra['a']['b']: unsupported type function",
        {"extra": {"a": {"b": some_function}}},
    ),
    "extra that is no dict": (TypeError, "extra must be a dict, got list", {"extra": [1]}),
    "dtype": (
        ValueError,
        "must be a floating-point dtype of safetensors, got torch.int32",
        {"dtype": torch.int32},
    ),
    "dtype of other kind": (TypeError, "torch.dtype, got 'bf16'", {"dtype": "bf16"}),
    "size": (
        ValueError,
        "max_shard_size must be a positive number of bytes",
        {"max_shard_size": "5XB"},
    ),
    "keep_last": (ValueError, "keep_last needs numbered", {"keep_last": 2}),
    "keep none": (ValueError, "keep_last must be an integer from 1", {"keep_last": 0, "step": 1}),
}


@pytest.mark.parametrize("case", ARGUMENTS)
@on_ranks(2)
def test_arguments(case, tmp_path):
    kind, text, options = ARGUMENTS[case]
    assert (
        tried(
            tmp_path,
            kind,
            text,
            lambda f, model, opt: zshard.save(f / "new", model, opt, **options),
        )
        == []
    )


def on_one_rank(folder):
    """A mistake of one rank is an error on all ranks."""

    def wrong(folder, model, optimizer):
        extra = {"a": some_function} if rank() == 1 else {"a": 1}
        zshard.save(folder / "new", model, extra=extra)

    text = (
        "cannot save extra['a']: unsupported type"
        if rank() == 1
        else "rank 1: cannot save extra['a']: unsupported type"
    )
    return tried(folder, TypeError, text, wrong)


def test_mistake_of_one_rank_is_an_error_on_all(pool2, tmp_path):
    assert pool2.run(on_one_rank, tmp_path) == [[], []]


def test_non_models_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got OrderedDict"):
        zshard.save(tmp_path / "x", make(Mlp).state_dict())
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got dict"):
        zshard.save(tmp_path / "x", make(Mlp), {})
    for path in ("", "/"):
        with pytest.raises(ValueError, match="does not name a folder"):
            zshard.save(path, make(Mlp))
    with pytest.raises(TypeError, match="must be a string"):
        zshard.save(b"x", make(Mlp))


DIFFERENT = {
    "step": ("step is 1 on rank 0, but 2 on rank 1", lambda: {"step": 1 + rank()}),
    "limit": ("max_shard_size is 10 on rank 0, but 11", lambda: {"max_shard_size": 10 + rank()}),
    "dtype": (
        "tensor 'first.weight' is shape (13, 7), torch.float32 on rank 0, but shape (13, 7), torch.b",
        lambda: {"dtype": [None, torch.bfloat16][rank()]},
    ),
    "keep_last": ("keep_last is", lambda: {"keep_last": 1 + rank(), "step": 1}),
    "overwrite": ("overwrite is", lambda: {"overwrite": bool(rank())}),
}


def of_different(case, folder):
    text, options = DIFFERENT[case]

    def wrong(folder, model, optimizer):
        zshard.save(folder / "new", model, optimizer, **options())

    return tried(folder, zshard.DivergenceError, text, wrong)


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_differ(pool2, case, tmp_path):
    (tmp_path / "new").mkdir() if "keep_last" in case else None
    assert pool2.run(of_different, case, tmp_path) == [[], []]


def of_different_contents(folder):
    def paths(folder, model, optimizer):
        zshard.save(folder / f"new{rank()}", model, optimizer)

    def names(folder, model, optimizer):
        model.register_buffer(f"more{rank()}", torch.ones(1))
        try:
            zshard.save(folder / "new", model)
        finally:
            del model._buffers[f"more{rank()}"]

    def optimizers(folder, model, optimizer):
        zshard.save(folder / "new", model, [optimizer, None][rank()])

    def states(folder, model, optimizer):
        optimizer.state[model.first.weight][f"more{rank()}"] = 1
        try:
            zshard.save(folder / "new", model, optimizer)
        finally:
            del optimizer.state[model.first.weight][f"more{rank()}"]

    kind, found = zshard.DivergenceError, []
    for text, action in (
        ("rank 0 has 'first.weight.more0' (not a tensor)", states),
        ("path is '", paths),
        ("rank 0 has tensor 'more0'", names),
        ("which rank 1 lacks", optimizers),
    ):
        (own := folder / action.__name__).mkdir(exist_ok=True)
        found += tried(own, kind, text, action)
    return found


def test_ranks_that_would_save_different_things(pool2, tmp_path):
    assert pool2.run(of_different_contents, tmp_path) == [[], []]


@on_ranks(2)
def test_optimizer_of_another_model(tmp_path):
    text = "has a parameter of shape (13, 7), which the model lacks"
    assert tried(tmp_path, ValueError, text, other_model) == []


# --- wrong time -----------------------------------------------------------------------------------


def in_forward(folder, model, optimizer):
    def save(*_):
        zshard.save(folder / "new", model, optimizer)

    handle = model.second.register_forward_hook(save)
    try:
        model(CASES["mlp"].batch(0, rank()))
    finally:
        handle.remove()


def in_backward(folder, model, optimizer):
    def save(grad):
        zshard.save(folder / "new", model)

    handle = model.second.register_forward_hook(
        lambda _, args, out: out.register_hook(save) and None
    )
    try:
        loss_of(model(CASES["mlp"].batch(0, rank()))).backward()
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


TIMES = {
    in_forward: "cannot save during a step: do it before the forward",
    while_whole: "cannot save while unshard() or summon_full_params() keeps the parameters",
    unsharded: "cannot save while unshard() or summon_full_params() keeps the parameters",
}


@pytest.mark.parametrize("action", TIMES, ids=lambda action: action.__name__)
@on_ranks(2)
def test_save_at_the_wrong_time(action, tmp_path):
    text = TIMES[action]
    assert tried(tmp_path, RuntimeError, text, action) == []


def in_a_backward(folder):
    """A backward that raises ends there, as always; the model cannot train on from it here."""
    model, optimizer = trained("mlp", APART, "zshard.AdamW")
    found = outcome(lambda: in_backward(folder, model, optimizer))
    return found[0] is RuntimeError, "cannot save during a step" in found[1], inside(folder)


def test_save_in_a_backward(pool2, tmp_path):
    assert pool2.run(in_a_backward, tmp_path) == [(True, True, [])] * 2


# --- failing calls --------------------------------------------------------------------------------


def each_call(folder, sufferer, what, overwrite):
    """Fail each call of a save in turn, on one rank. Return what is wrong, how often there was an
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
            elif not issubclass(found[0], OSError):
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


# --- paths and steps -----------------------------------------------------------------------------


PATHS = {
    "none": (
        None,
        TypeError,
        "path must be a string or a pathlib.Path, got None; zshard.latest_checkpoint",
    ),
    "bytes": (b"x", TypeError, "path must be a string or a pathlib.Path, got b'x'"),
    "a number": (3, TypeError, "expected str, bytes or os.PathLike object, not int"),
    "a NUL byte": ("a\0b", ValueError, r"path='a\x00b' contains a NUL byte"),
}


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.parametrize("call", [zshard.save, zshard.load])
def test_invalid_paths(call, case):
    path, kind, text = PATHS[case]
    with pytest.raises(kind) as caught:
        call(path, nn.Linear(1, 1))
    assert text in str(caught.value)


def test_missing_parent_folder(tmp_path):
    missing = tmp_path / "runs"
    for path, options in ((missing / "x", {}), (missing / "run" / "x", {"step": 1})):
        with pytest.raises(
            FileNotFoundError, match=f"'{path.parent}.*does not exist; create it first"
        ):
            zshard.save(path, nn.Linear(1, 1), **options)
    assert list(tmp_path.iterdir()) == []


STEPS = {
    "text": ({"step": "7"}, TypeError, "step='7': 'str' object cannot be interpreted"),
    "too large": ({"step": 2**63}, ValueError, "0 to 2**63 - 1, got 9223372036854775808"),
    "keep_last": ({"step": 1, "keep_last": 1.5}, TypeError, "keep_last=1.5: 'float' object cannot"),
}


@pytest.mark.parametrize("case", STEPS)
def test_invalid_steps(case, tmp_path):
    options, kind, text = STEPS[case]
    with pytest.raises(kind) as caught:
        zshard.save(tmp_path, nn.Linear(1, 1), **options)
    assert text in str(caught.value) and list(tmp_path.iterdir()) == []


def test_largest_step(tmp_path):
    zshard.save(tmp_path, nn.Linear(1, 1), step=torch.tensor(2**63 - 1))
    assert zshard.load(tmp_path, nn.Linear(1, 1)).step == 2**63 - 1
