"""zshard.load of checkpoints that are damaged or incomplete, that the system cannot read, or that
belong to another model.

A good checkpoint with one change is the same error on all ranks; it names the file and the problem,
and nothing on any rank has changed. Mismatches are found before anything changes, and reported in
torch's words where torch has some.
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from compare import differences
from damage import check, files_of, flip, good_one, model_and_optimizer, open_files, state_of
from file_faults import file_faults
from guarded import same
from models import make_optimizer, wrapped
from optim_states import FULL, differ, rank
from safetensors.torch import save_file
from scenarios import Stack, forward_backward, message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import CheckpointError, DivergenceError


@pytest.fixture(scope="module")
def good(pools, tmp_path_factory):
    """A checkpoint of two ranks; tests must not change it."""
    return good_one(pools, tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good, tmp_path):
    """A copy of it."""
    return shutil.copytree(good, tmp_path / "x")


# --- bytes ----------------------------------------------------------------------------------------


def flipped_everywhere(path, files, step, small):
    """Return the files and places where a flipped bit went unnoticed or changed something."""
    model, optimizer = model_and_optimizer()
    before, found = state_of(model, optimizer), []
    for name in files:
        size = os.path.getsize(f"{path}/{name}")
        for at in range(0, size, step if size > 4096 else small):
            if rank() == 0:
                _flip(f"{path}/{name}", at)
            torch.distributed.barrier()
            try:
                zshard.load(path, model, optimizer)
                found.append((name, at, "loaded"))
            except CheckpointError as error:
                if name not in str(error):
                    found.append((name, at, str(error)))
            torch.distributed.barrier()
            if rank() == 0:
                _flip(f"{path}/{name}", at)
    return found, differ(state_of(model, optimizer), before)


def _flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << at % 8)]))


@pytest.mark.parametrize(
    "steps", [(199, 13), pytest.param((97, 7), marks=pytest.mark.thorough)], ids=str
)
def test_every_flipped_bit_is_detected(pool2, path, steps):
    """At places across all files: header, padding, data, index, manifest."""
    files = [name for name in files_of(path) if name != "zshard.json"]
    for found, changed in pool2.run(flipped_everywhere, str(path), files, *steps):
        assert changed == []
        # A bit of a header's JSON may also change a name or shape, which is reported as such.
        assert [each for each in found if each[2] == "loaded"] == []
        assert [each for each in found if ".safetensors" not in each[2]] == []


def test_error_names_the_block_and_its_tensors(pool2, path):
    file = next(each for each in sorted(path.iterdir()) if each.name.startswith("optimizer-00001"))
    flip(file, file.stat().st_size - 1)
    words = [
        f"'{file}' is damaged: checksum mismatch in bytes 0 to {file.stat().st_size} (block 0)",
        "which contain the header",
    ]
    check(pool2, path, words)


def truncated(path, lengths):
    """Return the message of a load at each length."""
    model, optimizer = model_and_optimizer()
    before, said = state_of(model, optimizer), []
    for length in lengths:
        if rank() == 0:
            os.truncate(path, length)
        torch.distributed.barrier()
        said.append(
            message_of(
                lambda: zshard.load(os.path.dirname(path), model, optimizer), CheckpointError
            )
        )
        torch.distributed.barrier()
    return said, differ(state_of(model, optimizer), before)


@pytest.mark.parametrize("name", ["model-00001-of", "model.safetensors.index", "zshard.json"])
def test_truncated_and_extended_files(pool2, path, name):
    file = next(each for each in path.iterdir() if each.name.startswith(name))
    size = file.stat().st_size
    lengths = [size + 1, size - 1, *(size * i // 15 for i in reversed(range(14))), 0]
    for said, changed in pool2.run(truncated, str(file), lengths):
        assert changed == []
        for length, text in zip(lengths, said, strict=True):
            assert str(file) in text
            if not file.name.startswith("zshard"):
                assert f"has {length} bytes, but was saved with {size}" in text


@pytest.mark.parametrize(
    "name", ["model-00002-of", "optimizer-00001-of", "optimizer.safetensors.i"]
)
def test_missing_file(pool2, path, name):
    file = next(each for each in path.iterdir() if each.name.startswith(name))
    file.unlink()
    check(pool2, path, f"'{file}' is missing from the checkpoint")


def test_folder_without_manifest_is_plain(pool2, path):
    (path / "zshard.json").unlink()
    check(pool2, path, "has no usable optimizer state", kind=RuntimeError)
    for verified, wrong in pool2.run(unverified, str(path)):
        assert verified is False and wrong == []


def unverified(path):
    model, _ = model_and_optimizer()
    before = model.state_dict()
    loaded = zshard.load(path, model)
    return loaded.verified, differ(model.state_dict(), before)


def test_files_of_another_save(pool2, path, tmp_path):
    pool2.run(other_values, str(tmp_path / "y"))
    for name in files_of(path):
        if name.startswith("model-00001"):
            shutil.copy(tmp_path / "y" / name, path / name)
            check(pool2, path, f"'{path / name}' is damaged: checksum mismatch in bytes 0 to")


def other_values(path):
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    zshard.save(path, model, optimizer, max_shard_size="2 KB")


def test_files_outside_the_manifest_are_ignored(pool2, path):
    save_file({"head.bias": torch.ones(2)}, path / "model.safetensors")
    save_file({"x": torch.ones(2)}, path / "model-00009-of-00009.safetensors")
    (path / "optimizer.safetensors").write_bytes(b"nothing")
    for verified, wrong in pool2.run(unverified, str(path)):
        assert verified is True and wrong == []


# --- numbered checkpoints -------------------------------------------------------------------------


def numbered(path):
    for step in (9, 10):
        model, optimizer = model_and_optimizer()
        zshard.save(path, model, optimizer, step=step, extra={"step": step})
    loaded = zshard.load(path, model, optimizer)
    return loaded.step, loaded.path, dict(loaded)


def test_newest_is_loaded_and_error_suggests_an_older_one(pool2, tmp_path):
    for found in pool2.run(numbered, str(tmp_path / "run")):
        assert found == (10, str(tmp_path / "run" / "step-00000010"), {"step": 10})
    newest, older = (tmp_path / "run" / f"step-{step:08}" for step in (10, 9))
    flip(newest / "model.safetensors", 5000)
    for path in (newest.parent, newest):
        check(pool2, path, [f"'{newest}/model.safetensors' is damaged", f"'{older}' is an older"])
    (newest / "model.safetensors").unlink()
    check(
        pool2, newest.parent, ["model.safetensors' is missing", f"'{older}' is an older checkpoint"]
    )
    (newest / "zshard.json").unlink()
    assert zshard.latest_checkpoint(newest.parent) == str(older)


# --- the system -----------------------------------------------------------------------------------


def failing(path, what):
    """Return (n-th call, what went wrong with the error) for every call of rank 1 that fails in
    turn."""
    model, optimizer = model_and_optimizer()
    found = []
    for nth in range(1, 1000):
        file_faults(nth if rank() == 1 else 0, what)
        try:
            zshard.load(path, model, optimizer)
        except OSError as error:
            if "[Errno 5]" not in str(error) or str(path) not in str(error):
                found.append((nth, str(error)))
        ended = [file_faults(0) < nth]  # there was no such call
        found += [(nth, each) for each in open_files(path)]
        torch.distributed.broadcast_object_list(ended, 1)
        if ended[0]:
            break
    zshard.load(path, model, optimizer)
    return found, nth, state_of(model, optimizer)


def test_any_failing_call_is_an_error_on_all_ranks(pool2, good):
    (found, calls, state), (others, same, theirs) = pool2.run(failing, str(good), "EIO")
    assert found == others == [] and calls == same > 30
    assert differ(state, theirs) == []


@on_ranks(2)
def test_short_reads_are_resumed(good):
    """Interrupted and short calls are resumed."""
    path = str(good)
    what = "short"
    model, optimizer = model_and_optimizer()
    file_faults(1, what, 500)
    try:
        zshard.load(path, model, optimizer)
    finally:
        calls = file_faults(0)
    other, theirs = model_and_optimizer()
    zshard.load(path, other, theirs)
    assert calls > 30
    assert differ(state_of(model, optimizer), state_of(other, theirs)) == []


def shrinking(path, file):
    """A file is truncated after all checks."""
    model, optimizer = model_and_optimizer()
    optimizer.register_load_state_dict_pre_hook(lambda *_: os.truncate(file, 5000) or None)
    return message_of(lambda: zshard.load(path, model, optimizer), CheckpointError)


def test_file_truncated_during_load(pool2, path):
    file = next(each for each in sorted(path.iterdir()) if each.name.startswith("optimizer-00001"))
    for said in pool2.run(shrinking, str(path), str(file)):
        assert f"'{file}' ends at byte 5000, before byte" in said


def test_verify_off(tmp_path):
    """Headers are checked, data is not."""
    model = nn.Linear(1200, 1200)
    zshard.save(tmp_path / "x", model)
    file = tmp_path / "x" / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    before = model.weight[0, 0].item()
    with pytest.raises(
        CheckpointError, match=r"checksum mismatch in .* \(block 1\), which contain '(weight|bias)'"
    ):
        zshard.load(tmp_path / "x", model)
    assert zshard.load(tmp_path / "x", model, verify=False).verified is False
    flip(file, file.read_bytes().index(b"weight"))
    with pytest.raises(
        CheckpointError, match=r"checksum mismatch .* \(block 0\), which contain the header, "
    ):
        zshard.load(tmp_path / "x", model, verify=False)
    assert model.weight[0, 0].item() == before


# --- mismatches -----------------------------------------------------------------------------------


class Other(Stack):
    """Another head, and one block less."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(9, 3)
        del self.blocks[2]


def of_other(path):
    model = wrapped(Other, FULL)
    optimizer = make_optimizer("zshard.AdamW", model)
    forward_backward(model, rank())
    optimizer.step()
    zshard.save(path, model, optimizer)


def test_another_model(pool2, tmp_path):
    pool2.run(of_other, str(tmp_path / "x"))
    words = [
        "size mismatch for head.weight",
        'Missing key(s) in state_dict: "blocks.2.norm.weight"',
    ]
    check(pool2, tmp_path / "x", words, kind=RuntimeError)
    loose = {"strict": False}
    check(pool2, tmp_path / "x", words[0], kind=RuntimeError, options=loose)


def strange_optimizer(path, what):
    model, optimizer = model_and_optimizer()
    params = list(model.parameters())
    if what == "class":
        optimizer = zshard.SGD(params, lr=0.1, momentum=0.9)
    elif what == "parts":
        optimizer = zshard.AdamW(params[1:])
    elif what == "groups":
        optimizer = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    elif what == "stranger":
        optimizer = zshard.AdamW([*params, nn.Parameter(torch.ones(3))])
    elif what == "dtype":
        optimizer = zshard.AdamW(wrapped(lambda: Stack().bfloat16(), FULL).parameters())
    before = state_of(model, optimizer)
    said = message_of(lambda: zshard.load(path, model, optimizer), (RuntimeError, ValueError))
    return said, differ(state_of(model, optimizer), before)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("class", "the checkpoint has the state of zshard.optim.AdamW, but the optimizer is SGD"),
        ("parts", "the optimizer has no parameter 'blocks.0.norm.weight'"),
        ("groups", "it has 1 param groups, but the optimizer has 2"),
        ("stranger", "has a parameter of shape (3,), which the model lacks"),
        ("dtype", "which the model lacks"),
    ],
)
def test_another_optimizer(pool2, good, what, words):
    for said, changed in pool2.run(strange_optimizer, str(good), what):
        assert words in said and changed == []


@on_ranks(2)
def test_another_class_of_the_same_state(good):
    """strict=False accepts it, as load_state_dict() would."""
    path = str(good)
    model, _ = model_and_optimizer()
    optimizer = torch.optim.Adam(list(model.parameters()))
    said = message_of(lambda: zshard.load(path, model, optimizer), RuntimeError)
    zshard.load(path, model, optimizer, strict=False)
    has = "exp_avg" in optimizer.state[next(model.parameters())]
    assert "the optimizer is Adam; pass strict=False" in said and has


@on_ranks(2)
def test_optimizer_that_raises_on_one_rank(good):
    """A hook on the optimizer raises on one rank after loading: all ranks get their state back and
    can continue."""
    path = str(good)
    rank_of_error = 1
    model, optimizer = model_and_optimizer()
    optimizer.step()  # make values and options differ from the checkpoint
    optimizer.param_groups[0]["lr"] = 3.0
    before = state_of(model, optimizer)
    usual = type(optimizer).__setstate__

    def set_state(self, state):
        usual(self, state)
        if "param_groups" in state and rank() == rank_of_error:
            raise NotImplementedError("not with these options")

    type(optimizer).__setstate__ = set_state
    try:
        said = message_of(lambda: zshard.load(path, model, optimizer), NotImplementedError)
    finally:
        type(optimizer).__setstate__ = usual
    changed = differ(state_of(model, optimizer), before)
    moments = optimizer.state[next(model.parameters())]["exp_avg"]
    other, seen = moments.clone(), []
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[next(model.parameters())]["exp_avg"].clone())
    )
    zshard.load(path, model, optimizer)
    after = optimizer.state[next(model.parameters())]["exp_avg"]
    changes = not same(after, other) or after.numel() == 0  # rank 1 may have no shard of it
    seen = [same(each, after) and changes for each in seen]
    forward_backward(model, rank())
    optimizer.step()
    assert "not with these options" in said and changed == []
    assert seen == [True], "post hooks see the values"


@on_ranks(2)
def test_a_whole_matrix_that_refuses_on_one_rank(tmp_path):
    """A WholeMatrix's state is in another optimizer, which loads before a hook raises."""
    path = str(tmp_path)
    model, _ = model_and_optimizer()
    optimizer = zshard.WholeMatrix(torch.optim.Adam, list(model.parameters()), lr=0.1)
    forward_backward(model, rank())
    optimizer.step()
    zshard.save(f"{path}/whole", model, optimizer)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 3.0
    before = optimizer.state_dict()

    def refuse(optimizer, state):
        if rank() == 1:
            raise NotImplementedError("not on this rank")

    handle = optimizer.register_load_state_dict_pre_hook(refuse)
    said = message_of(lambda: zshard.load(f"{path}/whole", model, optimizer), NotImplementedError)
    handle.remove()
    assert optimizer.param_groups[0]["lr"] == 3.0
    changed = differences(optimizer.state_dict()["state"], before["state"])
    assert "not on this rank" in said and changed == []


@on_ranks(2)
def test_ranks_with_different_arguments(good):
    """Ranks that pass different arguments, then continue."""
    path = str(good)
    model, optimizer = model_and_optimizer()
    one = rank() == 1
    said = [
        message_of(lambda: zshard.load(path, model, optimizer if one else None), DivergenceError),
        message_of(lambda: zshard.load(path, model, verify=one), DivergenceError),
        message_of(lambda: zshard.load(path, model, optimizer if one else 3), TypeError),
    ]
    zshard.load(path, model, optimizer)
    first, second, third = said
    assert "load(optimizer=) is NoneType on rank 0, but AdamW on rank 1" in first
    assert "load(verify=) is False on rank 0, but True on rank 1" in second
    assert "optimizer must be a torch.optim.Optimizer, got int" in third


@on_ranks(2)
def test_wrong_arguments(good):
    path = str(good)
    model, _ = model_and_optimizer()
    first, second, third = [
        message_of(lambda: zshard.load(path, "model"), TypeError),
        message_of(lambda: zshard.load(path, model, "optimizer"), TypeError),
        message_of(lambda: zshard.load(3, model), TypeError),
    ]
    assert "model must be an nn.Module, got str" in first
    assert "optimizer must be a torch.optim.Optimizer, got str" in second
    assert "not int" in third
