"""Checkpoint directories: the latest checkpoint, retention, cleanup and refusals.

Only finished checkpoints count, no matter what else is in the folder, and zshard deletes only its
own leftovers. A folder that cannot be saved to keeps its content.
"""

from __future__ import annotations

import errno
import os
import warnings

import pytest
import torch
from checkpoints import APART, bit_by_bit, check_refused, inside, manifest_in, tensors_in
from groups import comm_of_all
from models import Mlp, make, wrapped
from optim_states import FULL, rank
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, CheckpointError, _core
from zshard.checkpoint import folder as folders
from zshard.checkpoint.folder import Target
from zshard.checkpoint.manifest import Manifest

ID = "0123456789abcdef" * 2


def test_path_through_a_link_is_the_systems(tmp_path, monkeypatch):
    """`link/..` is the folder above the link's target, for save as for load."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to("../real/deep")
    monkeypatch.chdir(tmp_path)
    paths = {"link/../a": "real/a", "link/../deep/../b/": "real/b", "link/c": "real/deep/c"}
    for path, found in paths.items():
        model = small(3.0)
        zshard.save(f"here/{path}", model)
        assert (tmp_path / found / "zshard.json").is_file()
        assert zshard.load(f"here/{path}", small()).verified
    zshard.save("here/link/../steps", small(), step=1)
    assert zshard.load("here/link/../steps", small()).step == 1
    zshard.save("here/link/..", small(), step=2)
    assert zshard.load("real", small()).step == 2


def small(value=1.0):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


def name(step):
    return f"step-{step:08}"


# --- numbered checkpoints -------------------------------------------------------------------------


def test_latest(tmp_path):
    assert zshard.latest_checkpoint(tmp_path) is None
    assert zshard.latest_checkpoint(tmp_path / "gone") is None
    path = zshard.save(tmp_path, small(), step=5).path
    for other in ("step-00000007", "step-9", "step-000000009", "step-00000009.old", "other"):
        (tmp_path / other).mkdir()
        if other != "step-00000007":
            (tmp_path / other / "zshard.json").write_text("{}")
    (tmp_path / "step-00000008").write_text("")
    assert zshard.save(tmp_path, small(), step=3).path == f"{tmp_path}/step-00000003"
    assert zshard.latest_checkpoint(tmp_path) == zshard.latest_checkpoint(str(tmp_path)) == path
    with pytest.raises(NotADirectoryError):
        zshard.latest_checkpoint(tmp_path / "step-00000008")
    assert zshard.save(tmp_path, small(), step=123456789).path == f"{tmp_path}/step-123456789"
    assert zshard.latest_checkpoint(tmp_path) == f"{tmp_path}/step-123456789"
    assert folders.finished(tmp_path) == [3, 5, 123456789]


def test_step_requires_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zshard.save("runs", small(), step=1)
    zshard.save("runs/", small(), step=2)
    zshard.save("one", small())
    assert inside("runs") == ["step-00000001", "step-00000002"]
    assert inside(".") == ["one", "runs"]


def test_keep_last(pool2, tmp_path):
    (tmp_path / name(0)).mkdir()  # not finished, so not zshard's to delete
    (tmp_path / name(0) / "notes").write_text("")
    pool2.run(save_four_steps, tmp_path)
    assert inside(tmp_path) == [name(0), name(3), name(4)]


def save_four_steps(folder):
    model = wrapped(Mlp, FULL)
    for step in (1, 2, 3, 4):
        zshard.save(folder, model, step=step, keep_last=2)
    comm_of_all().exchange(b"")  # rank 0 tidies up last


def test_later_steps_are_never_deleted(tmp_path):
    """A run that resumed from an earlier step, or started from scratch in the wrong directory."""
    for step in (1, 2, 7, 10**8):
        zshard.save(tmp_path, small(), step=step)
    with pytest.warns(UserWarning, match=r"step-100000000' has a later step than 'step-00000003'"):
        zshard.save(tmp_path, small(), step=3, keep_last=1)
    assert inside(tmp_path) == [name(3), name(7), name(10**8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zshard.save(tmp_path, small(), step=10**8 + 1, keep_last=1)
        zshard.save(tmp_path / "one", small())
    assert inside(tmp_path) == ["one", name(10**8 + 1)]


def test_directory_shared_with_another_job(tmp_path, monkeypatch):
    """The newest checkpoint may be deleted between the listing and the opening."""
    model = small()
    zshard.save(tmp_path, model, step=1)
    real = Manifest.read

    def later(path):
        manifest = real(path)
        if zshard.latest_checkpoint(tmp_path) == f"{tmp_path}/{name(1)}":
            zshard.save(tmp_path, model, step=2, keep_last=1)
        return manifest

    monkeypatch.setattr(Manifest, "read", later)
    assert zshard.load(tmp_path, model).step == 2
    (tmp_path / name(2) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is missing"):
        zshard.load(tmp_path, model)


@on_ranks(1, 2)
def test_last_finite_checkpoint_is_kept(tmp_path):
    model, inf = FSDP(small()), float("inf")
    for step, (value, steps) in enumerate(
        [(1.0, [0]), (float("nan"), [0, 1]), (-inf, [0, 2]), (4.0, [3]), (5.0, [4])]
    ):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for param in model.parameters():
                param.fill_(value)
            zshard.save(tmp_path, model, step=step, keep_last=1)
        comm_of_all().exchange(b"")
        left = [each for each in inside(tmp_path) if each.startswith("step")]
        assert left == [name(each) for each in steps]
        texts = [str(each.message) for each in caught]
        assert len(texts) == (step in (1, 2) and rank() == 0), texts
        assert all("NaN or infinite values in '" in text for text in texts)
        comm_of_all().exchange(b"")


def failing(number):
    """Return a call of the file system that fails with this errno."""

    def call(path, *_):
        raise OSError(number, os.strerror(number), path)

    return call


def test_failed_deletion_warns(tmp_path, monkeypatch):
    zshard.save(tmp_path, small(), step=1)
    before = bit_by_bit(tmp_path / "step-00000001")
    real, fail = _core.rename, failing(errno.EPERM)
    monkeypatch.setattr(_core, "rename", lambda a, b: real(a, b) if ".tmp" in a else fail(a))
    words = r"could not delete the checkpoint '.*step-00000001': .* not permitted"
    with pytest.warns(UserWarning, match=words):
        zshard.save(tmp_path, small(), step=2, keep_last=1)
    assert inside(tmp_path) == ["step-00000001", "step-00000002"]
    assert bit_by_bit(tmp_path / "step-00000001") == before


# --- existing folders -----------------------------------------------------------------------------


def test_overwrite(tmp_path):
    path = tmp_path / "x"
    path.mkdir()  # empty
    zshard.save(path, small(1.0), overwrite=True)
    old = manifest_in(path)
    (path / "more").mkdir()
    (path / "more" / "file").write_text("of the user's")
    with open(path / "model.safetensors", "rb") as still_open:
        zshard.save(path, small(2.0), overwrite=True)
        values = torch.frombuffer(bytearray(still_open.read()[-32:-8]), dtype=torch.float32)
        assert values.eq(1).all()
    assert inside(tmp_path) == ["x"] and not (path / "more").exists()
    assert manifest_in(path).id != old.id
    assert tensors_in(path)["weight"].eq(2).all()
    zshard.save(tmp_path, small(3.0), step=1, overwrite=True)
    zshard.save(tmp_path, small(4.0), step=1, overwrite=True)
    assert tensors_in(tmp_path / "step-00000001")["weight"].eq(4).all()


def test_file_system_without_atomic_exchange(tmp_path, monkeypatch):
    zshard.save(tmp_path / "x", small(1.0))
    before = bit_by_bit(tmp_path / "x")
    monkeypatch.setattr(_core, "swap", failing(folders._NO_SWAPS[0]))
    with pytest.raises(OSError, match=r"cannot swap folders: save to another path, .*/x'"):
        zshard.save(tmp_path / "x", small(2.0), overwrite=True)
    assert inside(tmp_path) == ["x"] and bit_by_bit(tmp_path / "x") == before


def leave_behind(path, names=("model.safetensors", "zshard.json")):
    path.mkdir()
    for name in names:
        (path / name).write_text("half")


def test_leftovers_of_a_broken_save_are_deleted(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("")
    run = tmp_path / "run"
    run.mkdir()
    leave_behind(run / f".step-00000007.{ID}.tmp")
    leave_behind(run / f".step-00000008.{ID}.tmp", [])
    leave_behind(run / f".step-00000007.{ID}.tmp" / "below")
    (run / f".step-00000007.{ID}.tmp" / "below" / "link").symlink_to(outside)
    leave_behind(tmp_path / f".x.{ID}.tmp")
    others = [f".step-7.{ID}.tmp", f".y.{ID}.tmp", ".step-00000007.tmp", f"step-00000007.{ID}.tmp"]
    for name in others:
        leave_behind(run / name)
    (run / f".step-00000009.{ID}.tmp").symlink_to(outside)
    zshard.save(run, small(), step=1)
    assert inside(run) == sorted([*others, f".step-00000009.{ID}.tmp", "step-00000001"])
    zshard.save(tmp_path / "y", small())
    assert inside(tmp_path) == [f".x.{ID}.tmp", "outside", "run", "y"]
    zshard.save(tmp_path / "x", small())
    assert inside(tmp_path) == ["outside", "run", "x", "y"]
    assert inside(outside) == ["file"]


def test_lock_file_deleted_by_the_previous_holder(tmp_path, monkeypatch):
    """Another process deletes the lock file between our opening and locking it, so we create
    another."""
    target, real, calls = Target.of(tmp_path / "a", None), _core.lock_file, []

    def lock_file(path):
        lock = real(path)
        calls.append(path)
        if len(calls) == 1:
            os.unlink(path)
        return lock

    monkeypatch.setattr(_core, "lock_file", lock_file)
    lock = folders._locked(target)
    assert len(calls) == 2 and os.path.samestat(os.fstat(lock), os.stat(calls[0]))
    _core.unlock(lock)


def test_full_disk_does_not_keep_the_lock(tmp_path, monkeypatch):
    """Its file says who holds it, which takes space."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            zshard.save(tmp_path / "x", small())
    zshard.save(tmp_path / "x", small())


def test_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(_core, "lock_file", failing(folders._NO_LOCKS[0]))
    leave_behind(tmp_path / f".x.{ID}.tmp")
    zshard.save(tmp_path / "x", small())
    assert inside(tmp_path) == [f".x.{ID}.tmp", "x"]  # another process may be writing it


def test_path_created_during_a_save(tmp_path, monkeypatch):
    real = _core.sync_folder

    def sync_folder(path):
        (tmp_path / "x").mkdir(exist_ok=True)
        real(path)

    monkeypatch.setattr(_core, "sync_folder", sync_folder)
    with pytest.raises(FileExistsError, match="already exists"):
        zshard.save(tmp_path / "x", make(Mlp))
    assert inside(tmp_path) == ["x"] and inside(tmp_path / "x") == []


# --- folders of saves -----------------------------------------------------------------------------


FOLDERS = {  # the folder, options -> kind and text of the error
    ("old", ""): (FileExistsError, "another path, or pass overwrite=True"),
    ("file", ""): (FileExistsError, "already exists"),
    ("file", "overwrite"): (FileExistsError, "is not a zshard checkpoint"),
    ("mine", "overwrite"): (FileExistsError, "is not a zshard checkpoint"),
    ("link", "overwrite"): (FileExistsError, "is not a zshard checkpoint"),
    ("gone/new", ""): (FileNotFoundError, "/gone' does not exist"),
    ("gone/new", "step"): (FileNotFoundError, "/gone/new' does not exist"),
    ("file/new", ""): (NotADirectoryError, "/file' is not a directory"),
    ("file", "step"): (NotADirectoryError, "/file' is not a directory"),
}


def refused_folders(folder):
    def save(path, options):
        return lambda folder, *both: zshard.save(folder / path, *both, **options)

    options = {"": {}, "overwrite": {"overwrite": True}, "step": {"step": 1}}
    rows = {row: (save(row[0], options[row[1]]), *error) for row, error in FOLDERS.items()}
    check_refused(folder, rows)


def test_folders(pool2, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    pool2.run(refused_folders, tmp_path)
    assert inside(tmp_path / "mine") == ["notes"]


@pytest.mark.parametrize("is_numbered", [False, True])
@on_ranks(2)
def test_save_while_another_is_in_progress(tmp_path, is_numbered):
    """Save while another process holds the lock, and after that."""
    model, options = wrapped(Mlp, APART), {"step": 5} if is_numbered else {}
    path, comm = tmp_path / "new", comm_of_all()
    if rank() == 0:
        path.mkdir() if is_numbered else None
        lock = folders._locked(folders.Target.of(path, options.get("step")))
    comm.exchange(b"")
    with pytest.raises(RuntimeError, match=r"another save is in progress: process .*lock'"):
        zshard.save(path, model, **options)
    zshard.save(tmp_path / "other", model)  # which has its own lock
    comm.exchange(b"")
    if rank() == 0:
        _core.unlock(lock)
    comm.exchange(b"")
    zshard.save(path, model, **options)
    comm.exchange(b"")  # rank 0 tidies up last
    assert inside(tmp_path) == ["new", "other"]


def on_disks_of_their_own(folder, model, optimizer):
    """Rank 1 finds another folder under the path."""
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(folders.Target, "hidden", lambda self, id: f"/elsewhere/{id}")
        zshard.save(folder / "new", model, optimizer)


@on_ranks(2)
def test_folder_not_shared_by_all_ranks(tmp_path):
    text = "this rank cannot see '/elsewhere/" if rank() == 1 else "rank 1: this rank cannot see"
    check_refused(tmp_path, {"apart": (on_disks_of_their_own, FileNotFoundError, text)})
