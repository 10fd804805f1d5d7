"""Where exports go: a Hugging Face folder, a process group; and what of a model has changed since the
last one."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import Net, make
from nursery import fork_ranks
from spawn import on_ranks, ranks
from torch import nn

import zshard
from zshard import FSDP, AdamW, Exported
from zshard.extras.weights import send

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


# --- changes --------------------------------------------------------------------------------------

TRAINED = {"norm.weight", "norm.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("transport", BOTH)
@on_ranks(2, 3)
def test_only_what_has_changed(transport):
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


@pytest.mark.parametrize("kind", ["strided", "expanded", "negative", "conjugate"])
def test_a_changed_view_is_sent(kind):
    """Their memory is not that of their values."""
    model, since, values = nn.Module(), Exported(), torch.randn(8, dtype=torch.complex64)
    other = values.real.clone()
    view, changed = {
        "strided": lambda: (other[::2], other.index_fill(0, torch.tensor([6]), 5.0)[::2]),
        "expanded": lambda: (other[:1].expand(1 << 22), other[1:2].expand(1 << 22)),
        "negative": lambda: (other, torch._neg_view(other)),
        "conjugate": lambda: (values, values.conj()),
    }[kind]()
    model.register_buffer("b", view)
    expected = view.clone()
    same(joined(zshard.export(model, since=since)), {"b": expected})
    assert joined(zshard.export(model, since=since)) == {}
    model.b = changed
    expected = changed.resolve_neg().resolve_conj().clone()
    same(joined(zshard.export(model, since=since)), {"b": expected})


@on_ranks(2)
def test_after_a_break_on_one_rank_all_ranks_get_everything():
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
            with pytest.raises(error) as caught:
                zshard.export(model).save(f"{folder}/{path}")
            assert "overwrite" not in str(caught.value)  # which save() does not take
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


def test_folder_in_memory_for_processes_of_the_host():
    load_file = pytest.importorskip("safetensors.torch").load_file
    plain = make(Net)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        zshard.export(plain).save(f"{folder}/policy")
        same(load_file(f"{folder}/policy/model.safetensors"), full(plain))


def fails_in_the_middle(transport, folder, monkeypatched):
    from zshard.extras.weights import hf_folder as module

    model, _ = built(transport)
    if dist.get_rank() == 0:

        def write(*_):
            raise OSError(28, "no space left")

        module.bytes_of = write
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


class TooLarge(torch.Tensor):
    """A bucket for which the group's device has no memory."""

    def to(self, *_):
        raise MemoryError("on purpose")


def sender_lacks_memory():
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            room = send.flat_for
            patch.setattr(send, "flat_for", lambda batch: room(batch).as_subclass(TooLarge))
            with pytest.raises(MemoryError, match="on purpose"):
                zshard.export(make(Net)).broadcast()
        zshard.export(make(Net)).broadcast()
    else:
        with pytest.raises(RuntimeError, match=r"the sender's export failed.*on purpose"):
            joined(zshard.receive_export())
        assert joined(zshard.receive_export()).keys() == make(Net).state_dict().keys()


def test_a_sender_without_memory_fails_its_receivers():
    fork_ranks(in_group, 2, sender_lacks_memory.__name__, check=True, timeout=60)


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
