"""Where exports go: a Hugging Face folder, a process group, shared memory; and what of a model has
changed since the last one."""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import Net, make
from nursery import fork_ranks
from spawn import ranks

import zshard
from zshard import FSDP, AdamW, Exported, SharedWeights

BOTH = ["shm", "c10d"]


def batch():
    return torch.arange(12).view(2, 6) % 31


def step(model, optimizer):
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


def built(transport, group=None, frozen=True):
    """A sharded model with frozen first layers, and its optimizer."""
    plain = make(Net)
    if frozen:
        plain.requires_grad_(False)
        plain.norm.requires_grad_(True)
        plain.head.requires_grad_(True)
    model = FSDP(plain, transport=transport, process_group=group, timeout=10)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    step(model, optimizer)
    return model, optimizer


def same(found, expected):
    assert_same(found, expected, "what was exported")


def full(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def joined(buckets):
    return {name: value for bucket in buckets for name, value in bucket.items()}


def name_of(what):
    """A name in shared memory that no other test has."""
    return f"test-{os.environ['MASTER_PORT']}-{what}"


# --- changes --------------------------------------------------------------------------------------

TRAINED = {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def sends_changes(transport):
    model, optimizer = built(transport)
    since = Exported()

    def export(**options):
        return joined(zshard.export(model, since=since, bucket=1500, **options))

    expected = full(model)
    same(export(), expected)
    assert export() == {}
    step(model, optimizer)
    expected = full(model)
    same(export(), {name: expected[name] for name in TRAINED})
    # one element, on the rank that has it
    with torch.no_grad():
        zshard.load_state_dict(
            model,
            expected | {"norm.bias": expected["norm.bias"].index_fill(0, torch.tensor([7]), 5.0)},
        )
    assert export().keys() == {"norm.bias"}
    assert export(dtype=torch.bfloat16).keys() == expected.keys(), "another dtype"
    # a break: everything is sent again, to all
    for _ in zshard.export(model, since=since, bucket=1500, dtype=torch.bfloat16):
        break
    step(model, optimizer)
    if dist.get_rank() == 0:
        for _ in zshard.export(model, since=since, bucket=1500):
            pass
    else:
        export()
    assert export() == {}
    since.reset()
    assert export().keys() == expected.keys()


@ranks(2, 3)
@pytest.mark.parametrize("transport", BOTH)
def test_only_what_has_changed(pool, transport):
    pool.run(sends_changes, transport)


def one_rank_broke(transport):
    model, optimizer = built("shm")
    since = Exported()
    joined(zshard.export(model, since=since))
    step(model, optimizer)
    for i, _ in enumerate(zshard.export(model, since=since, bucket=400)):
        if i == 0 and dist.get_rank() == 1:
            break
    for expected in (full(model), {}):
        same(joined(zshard.export(model, since=since)), expected)
    assert joined(zshard.export(model, since=since, ranks=0)) == {}


@ranks(2)
def test_after_a_break_on_one_rank_all_ranks_get_everything(pool):
    pool.run(one_rank_broke, "shm")


# --- folders --------------------------------------------------------------------------------------


def writes_folders(transport, folder):
    from safetensors.torch import load_file

    model, optimizer = built(transport)
    expected = full(model)
    zshard.export(model).save(f"{folder}/all")
    zshard.export(model, dtype=torch.bfloat16, bucket=900, rename="m.{}".format).save(
        f"{folder}/low", max_shard_size=2000
    )
    dist.barrier()
    if dist.get_rank() == 0:
        same(load_file(f"{folder}/all/model.safetensors"), expected)
        files = [n for n in os.listdir(f"{folder}/low") if n.endswith(".safetensors")]
        assert len(files) > 2
        low = {k: v for n in files for k, v in load_file(f"{folder}/low/{n}").items()}
        same(low, {f"m.{name}": value.bfloat16() for name, value in expected.items()})
    other = make(Net)
    zshard.load(f"{folder}/all", other)
    same(full(other), expected)
    kind = FileExistsError if transport == "c10d" or dist.get_rank() == 0 else None
    for path, error in (("all", kind), ("none/x", kind and FileNotFoundError)):
        if error is None:
            zshard.export(model).save(f"{folder}/{path}")
        else:
            with pytest.raises(error):
                zshard.export(model).save(f"{folder}/{path}")
    with pytest.raises(ValueError, match="without since"):
        zshard.export(model, since=Exported()).save(f"{folder}/delta")
    dist.barrier()
    assert sorted(n for n in os.listdir(folder) if n.startswith(".")) == []
    step(model, optimizer)


@ranks(2)
@pytest.mark.parametrize("transport", BOTH)
def test_folders(pool, transport, tmp_path):
    pytest.importorskip("safetensors")
    pool.run(writes_folders, transport, str(tmp_path))


def fails_in_the_middle(transport, folder, monkeypatched):
    from zshard.weights import hf_folder as module

    model, _ = built(transport)
    if dist.get_rank() == 0:

        def write(*_):
            raise OSError(28, "no space left")

        module._Folder.write = write
    if transport == "c10d" or dist.get_rank() == 0:
        with pytest.raises(OSError, match="no space left"):
            zshard.export(model, bucket=900).save(f"{folder}/x")
    dist.barrier()
    assert os.listdir(folder) == []
    zshard.full_tensor(model.norm.weight)


@pytest.mark.parametrize("transport", BOTH)
def test_a_full_disk_is_an_error_on_all_ranks(transport, tmp_path):
    fork_ranks(in_group, 2, fails_in_the_middle.__name__, transport, str(tmp_path), 0, check=True)


# --- process groups -------------------------------------------------------------------------------


def in_group(name, *args):
    dist.init_process_group("gloo")
    globals()[name](*args)
    dist.destroy_process_group()


def sends_to_group(transport):
    """Ranks 0 and 1 train; 0 sends to 2 and 3."""
    trainers, line = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    rank = dist.get_rank()
    if rank < 2:
        model, optimizer = built(transport, trainers)
        since = Exported()
        told = [full(model)]
        export = zshard.export(model, bucket=2000, since=since)
        export.broadcast(line)
        step(model, optimizer)
        told.append(full(model))
        export.broadcast(line)
        told.append({})
        export.broadcast(line)
        told[1] = {name: told[1][name] for name in TRAINED}
        low = zshard.export(model, dtype=torch.bfloat16)
        low.broadcast(line)
        told.append({name: value.bfloat16() for name, value in full(model).items()})
        with pytest.raises(ValueError, match="same name"):
            zshard.export(model, rename=lambda _: "x").broadcast(line)
        if rank == 1 or transport == "c10d":
            with pytest.raises(ValueError, match="not in the process group"):
                zshard.export(model, ranks=1).broadcast(line)
    else:
        told = [joined(zshard.receive_export(line)) for _ in range(4)]
        told[0]["norm.bias"].add_(0)
        with pytest.raises(RuntimeError, match=r"the sender's export failed.*same name"):
            joined(zshard.receive_export(line))
        with pytest.raises(ValueError, match="src must be another rank"):
            joined(zshard.receive_export(line, src=3))
    everyone = [None] * 4
    dist.all_gather_object(everyone, told)
    for each in everyone:
        same(each, everyone[0])


@pytest.mark.parametrize("transport", BOTH)
def test_broadcasts(transport):
    fork_ranks(in_group, 4, sends_to_group.__name__, transport, check=True, timeout=120)


def receiver_leaves():
    if dist.get_rank() == 0:
        plain = make(Net)
        export = zshard.export(plain, bucket=600)
        export.broadcast()
        export.broadcast()
    else:
        for _ in zshard.receive_export():
            break
        assert joined(zshard.receive_export()).keys() == make(Net).state_dict().keys()


def test_a_receiver_may_leave_early():
    fork_ranks(in_group, 2, receiver_leaves.__name__, check=True)


# --- shared memory --------------------------------------------------------------------------------


def shares(transport):
    model, optimizer = built(transport)
    name, first = name_of(transport), dist.get_rank() == 0
    shared = SharedWeights(name)
    if first:
        with pytest.raises(FileNotFoundError, match="no process of this host"), shared.read():
            pass
    assert shared.generation() == 0
    dist.barrier()
    since = Exported()
    for number in range(3):
        zshard.export(model, since=since, bucket=1500).share(name)
        expected = full(model)
        dist.barrier()
        with shared.read() as tensors:
            same(dict(tensors), expected)
            tensors["norm.bias"].zero_()  # stays in this process
            kept = tensors["head.weight"]
        assert kept.numel() == 0
        assert shared.generation() == number + 1
        dist.barrier()
        step(model, optimizer)
    inode = os.stat(shared._path).st_ino
    zshard.export(model, since=Exported()).share(name)  # another one's: all tensors
    zshard.export(model, since=since).share(name)
    expected = full(model)
    dist.barrier()
    assert os.stat(shared._path).st_ino == inode
    with shared.read() as tensors:
        same(dict(tensors), expected)
    dist.barrier()
    zshard.export(model, since=since, dtype=torch.bfloat16).share(name)  # another layout
    dist.barrier()
    assert os.stat(shared._path).st_ino != inode
    with shared.read() as tensors:
        same(dict(tensors), {name: value.bfloat16() for name, value in expected.items()})
    dist.barrier()
    shared.unlink()
    shared.unlink()


@ranks(2)
@pytest.mark.parametrize("transport", BOTH)
def test_shared_memory(pool, transport):
    pool.run(shares, transport)


def locks(transport):
    model, _ = built(transport)
    name, first = name_of(f"locks-{transport}"), dist.get_rank() == 0
    shared = SharedWeights(name)
    zshard.export(model).share(name)
    dist.barrier()
    with shared.read():
        if transport == "c10d" or first:
            with pytest.raises(TimeoutError, match="a process reads"):
                zshard.export(model).share(name, timeout=0.2)
        dist.barrier()
    for bad in ("", "a/b", "x" * 300, 3):
        with pytest.raises(ValueError, match="name must be"):
            SharedWeights(bad)
    dist.barrier()
    if first:
        shared.unlink()


@ranks(2)
@pytest.mark.parametrize("transport", BOTH)
def test_an_export_waits_for_readers(pool, transport):
    pool.run(locks, transport)


def dies_in_the_middle(name):
    plain = make(Net)
    zshard.export(plain).share(name)

    class Bad(torch.nn.Module):
        pass

    from zshard.weights.export import Rounds

    fill = Rounds.fill
    calls = []

    def dying(*args):
        calls.append(1)
        if len(calls) == 2:
            os._exit(7)
        fill(*args)

    Rounds.fill = dying
    zshard.export(plain, bucket=1000).share(name)


def test_a_half_written_export_is_refused():
    name = f"test-{os.getpid()}-half"
    shared = SharedWeights(name)
    (result,) = fork_ranks(dies_in_the_middle, 1, name)
    assert result.returncode == 7
    with pytest.raises(RuntimeError, match="did not finish"), shared.read():
        pass
    plain = make(Net)
    zshard.export(plain).share(name)
    with shared.read() as tensors:
        same(dict(tensors), full(plain))
    assert shared.generation() == 2
    shared.unlink()


def reads_all_the_time(name, seconds):
    """Rank 0 writes models of one number each, rank 1 reads: it must never see two numbers."""
    shared, plain = SharedWeights(name), make(Net)
    with torch.no_grad():
        for number in range(1000):
            if dist.get_rank() == 0:
                for param in plain.parameters():
                    param.fill_(number)
                zshard.export(plain, bucket=1000).share(name)
                time.sleep(0.001)
            if number == 0:
                dist.barrier()
                end = time.monotonic() + seconds
            if dist.get_rank() == 1:
                with shared.read() as tensors:
                    seen = {float(v) for each in tensors.values() for v in (each.min(), each.max())}
                assert len(seen) == 1, seen
            if time.monotonic() > end:
                break
    dist.barrier()


def test_a_reader_sees_one_export_only():
    name = f"test-{os.getpid()}-race"
    fork_ranks(in_group, 2, reads_all_the_time.__name__, name, 2.0, check=True)
    SharedWeights(name).unlink()


def test_a_plain_model_shares_alone():
    plain = copy.deepcopy(make(Net))
    name = f"test-{os.getpid()}-plain"
    zshard.export(plain).share(name)
    with SharedWeights(name).read() as tensors:
        same(dict(tensors), full(plain))
    SharedWeights(name).unlink()
