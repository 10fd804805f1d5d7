"""Parameters, gradients and optimizer state in files: bit-identical results for all scripts.

A model on a disk is compared with the same model in memory, under everything that reads or writes
its parameters. The model, the pager and system limits count the bytes.
"""

from __future__ import annotations

import copy
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from models import CASES, differences, make, make_optimizer, train
from nursery import fork_ranks
from offloaded import KINDS, Wide, compare_wide, steps, to, wide
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

import zshard
from zshard import FSDP, AdamW, MixedPrecision, Offload

ALL = KINDS["all"]
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS = {
    **{kind: {"what": what} for kind, what in KINDS.items()},
    **{way: {"what": ALL, "strategy": way} for way in ("shard_grad_op", "zero1", "no_shard")},
    "low": {"what": ALL, "mixed_precision": LOW},
    "in backward": {"what": {}, "in_backward": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_offload_is_bit_identical(tmp_path, transport, way):
    compare_wide(tmp_path, transport=transport, **WAYS[way])


@pytest.mark.parametrize("in_backward", [False, True])
def test_single_rank(tmp_path, in_backward):
    compare_wide(tmp_path, ALL, in_backward)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@on_ranks(4)
def test_hybrids(tmp_path, strategy):
    compare_wide(tmp_path, {}, strategy=strategy, device_mesh=mesh_of(2, 2))


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2)
def test_models_of_every_kind(tmp_path, name):
    case, found = CASES[name], []
    kind = "torch.AdamW" if name in ("mlp", "net") else "zshard.AdamW"
    for offload in (None, to(tmp_path, grads=True)):
        model = FSDP(make(case.make), auto_wrap_policy=case.policy, offload=offload)
        losses = train(model, case, make_optimizer(kind, model), dist.get_rank())
        found.append((losses, model.state_dict()))
    assert found[0][0] == found[1][0]
    assert_same(found[1][1], found[0][1], "the state")


# --- everything else that uses parameters --------------------------------------------------------


@on_ranks(2)
def test_operations_of_scripts(tmp_path):
    model, optimizer = wide(to(tmp_path))
    assert_same(model.state_dict(), make(Wide).state_dict(), "as wrapped")
    other = make(Wide, seed=2).state_dict()
    model.load_state_dict(other)
    assert_same(model.state_dict(), other, "as loaded")
    with FSDP.summon_full_params(model):
        model.head.bias.data.fill_(3)
    with torch.no_grad():
        model.blocks[0].weight.mul_(2)  # the shard, between steps
    expected = {**other, "head.bias": torch.full((3,), 3.0)}
    expected["blocks.0.weight"] = other["blocks.0.weight"] * 2
    assert_same(model.state_dict(), expected, "as written")
    steps(model, optimizer)
    average = copy.deepcopy(model)
    assert_same(average.state_dict(), model.state_dict(), "the copy")
    assert average.memory()["offloaded"] > 1 << 20
    steps(model, optimizer)
    assert differences(average.state_dict(), model.state_dict()), "the copy follows"


def threads_of_models(folder):
    """Return this process's threads after steps of each of three models on a disk."""
    found = []
    for _ in range(3):
        model = FSDP(make(Wide), offload=Path(folder))
        steps(model, AdamW(model.parameters()), n=1)
        assert model.memory()["offloaded"] > 0
        found.append(len(os.listdir("/proc/self/task")))
    return found


def test_models_share_the_pagers_threads(tmp_path):
    (result,) = fork_ranks(threads_of_models, 1, tmp_path, check=True)
    assert len(set(result.value)) == 1, result.value


def offloaded_in_a_fork(folder):
    """Return the error of a model on a disk in a process forked from one with such a model."""
    model = FSDP(make(Wide), offload=to(folder))
    assert len(model.state_dict()) > 0
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            made = message_of(lambda: FSDP(make(Wide), offload=to(folder)), RuntimeError)
            os.write(write, made.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 10000).decode()


def test_a_fork_of_a_process_that_offloads_cannot(tmp_path):
    (result,) = fork_ranks(offloaded_in_a_fork, 1, tmp_path, check=True)
    assert "start it with 'spawn'" in result.value


def test_host_offload_has_no_effect_on_cpus():
    for offload in (True, CPUOffload(offload_params=True), CPUOffloadPolicy(), Offload()):
        model = FSDP(make(Wide), cpu_offload=offload)
        steps(model, AdamW(model.parameters()), n=1)
        assert model.memory()["offloaded"] == 0
    model = zshard.fully_shard(make(Wide), offload_policy=CPUOffloadPolicy())
    assert model.memory()["offloaded"] == 0


# --- memory and files ----------------------------------------------------------------------------


def held(folder, **what):
    model, optimizer = wide(to(folder, **what))
    steps(model, optimizer)
    return model.memory()


def test_location_of_tensors(tmp_path):
    params = sum(p.numel() * 4 for p in make(Wide).parameters())
    memory = held(tmp_path, grads=True)
    assert memory["shards"] == memory["grads"] == 0
    assert 4 * params <= memory["offloaded"] < 4.1 * params + 64 * 4096
    assert held(tmp_path, params=False)["shards"] >= params
    half = held(tmp_path, grads=True, fraction=0.5)["offloaded"]
    assert 0.35 * memory["offloaded"] < half < 0.65 * memory["offloaded"]
    assert held(tmp_path, fraction=0.0)["offloaded"] == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strategy", "transport"), [("full_shard", "shm"), ("full_shard", "c10d"), ("no_shard", "shm")]
)
@on_ranks(2)
def test_memory_is_predicted(tmp_path, strategy, transport, kind):
    where = to(tmp_path, **KINDS[kind])
    options = {"strategy": strategy, "transport": transport}
    model, optimizer = wide(where, **options)
    predicted = model.memory("predicted")
    steps(model, optimizer)
    options["auto_wrap_policy"] = {nn.Linear}
    before = zshard.predict_memory(make(Wide), 2, offload=where, **options)
    peak = model.memory("peak")
    if dist.get_rank() > 0:
        return
    on_disk = [each.pop("offloaded") for each in (predicted, before, peak)]
    assert predicted == before
    # State is in separate blocks: a few bytes of padding. All models share the transport.
    for part in set(peak) - {"optimizer", "total", "transport"}:
        assert peak[part] == predicted[part], part
    assert peak["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.02)
    assert on_disk == pytest.approx([on_disk[2]] * 3, rel=0.02, abs=1 << 17)


def test_offloaded_model_may_exceed_memory(tmp_path):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    options = {"auto_wrap_policy": {nn.Linear}, "memory_limit": 6 << 20}
    with pytest.raises(MemoryError, match="offload="):
        FSDP(model, **options)
    model = FSDP(model, offload=to(tmp_path, grads=True), **options)
    steps(model, AdamW(model.parameters()), n=1)


def resident():
    """Return the bytes of mapped files in this process's memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssFile:")[1].split()[0])


def residents(folder):
    model, optimizer = wide(to(folder, grads=True))
    steps(model, optimizer, n=1)
    before, most = resident(), 0
    for _ in range(4):
        steps(model, optimizer, n=1)
        most = max(most, resident() - before)
    return most


@pytest.mark.thorough
def test_resident_memory_is_bounded(tmp_path):
    """Parameters, gradients and state are 25 MB."""
    (rank,) = fork_ranks(residents, 1, tmp_path, check=True)
    assert rank.value < 8 << 20


def dies(folder):
    model, optimizer = wide(to(folder))
    steps(model, optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_file_is_left_by_a_killed_process(tmp_path):
    killed = fork_ranks(dies, 2, tmp_path)
    assert [rank.returncode for rank in killed] == [-signal.SIGKILL] * 2
    assert os.listdir(tmp_path) == []


UNDER_LIMIT = """
    import resource, sys, torch, zshard
    from torch import nn

    folder, offload = sys.argv[1], sys.argv[2] == "disk"
    torch.set_num_threads(1)
    (nn.Linear(64, 64)(torch.randn(2, 64))).sum().backward()  # threads and their stacks
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(64)])
    size = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    limit = size + (160 << 20)  # torch wants some of it: buffers of its libraries, stacks
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    where = zshard.Offload(directory=folder, grads=True, cache=32 << 20) if offload else None
    model = zshard.FSDP(model, offload=where, auto_wrap_policy={nn.Linear})
    model.optimizer_in_backward(zshard.AdamW(model.parameters(), 1e-3))
    for step in range(2):
        model(torch.ones(2, 1024)).square().mean().backward()
    print(model.memory()["offloaded"] >> 20)
"""


@pytest.mark.thorough
def test_model_almost_five_times_larger_than_memory(tmp_path):
    """768 MiB of parameters and state with 160 MiB of memory."""
    command = [sys.executable, "-c", textwrap.dedent(UNDER_LIMIT), str(tmp_path)]
    # The limit counts address space, and malloc never returns its heap.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done, refused = (
        subprocess.run([*command, where], capture_output=True, text=True, timeout=120, env=env)
        for where in ("disk", "memory")
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 768
    assert refused.returncode != 0 and "memory" in refused.stderr.lower(), refused.stderr


# --- refusals -------------------------------------------------------------------------------------


@on_ranks(2)
def test_missing_directory_is_an_error_on_all_ranks(tmp_path):
    nowhere = tmp_path / "none"
    first = dist.get_rank() == 0
    message = message_of(lambda: wide(to(nowhere if first else tmp_path)))
    for word in (str(nowhere), "No such file") if first else ("rank 0", "offload"):
        assert word in message
    assert os.listdir(tmp_path) == []


def fill_the_disk(folder, size, state):
    """Return the error where no larger files can be written, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    model = nn.Linear(1024, 1024)
    before = model.weight.clone()
    if not state:
        text = message_of(lambda: FSDP(model, offload=Offload(directory=folder)), OSError)
    else:
        model = FSDP(model, offload=Offload(directory=folder))
        optimizer = AdamW(model.parameters())
        model(torch.ones(1, 1024)).sum().backward()
        text = message_of(optimizer.step, OSError)
    assert torch.equal(model.weight, before)
    return text


@pytest.mark.parametrize(("size", "state"), [(3 << 20, False), (5 << 20, True)])
def test_disk_full(tmp_path, size, state):
    (rank,) = fork_ranks(fill_the_disk, 1, str(tmp_path), size, state, check=True)
    assert str(tmp_path) in rank.value and "MiB free" in rank.value


def test_misuse(tmp_path):
    file = tmp_path / "file"
    file.touch()
    table = [
        (lambda: wide(to(file)), OSError, str(file)),
        (lambda: wide(to("/proc")), OSError, "/proc"),
        (lambda: Offload(fraction=1.5), ValueError, "fraction"),
        (lambda: Offload(cache=-1), ValueError, "cache"),
        (lambda: Offload(cache=True), ValueError, "cache"),
        (lambda: Offload(directory=3), TypeError, "directory"),
        (lambda: FSDP(Wide(), offload=str(tmp_path), cpu_offload=True), ValueError, "not both"),
        (lambda: FSDP(Wide(), offload=3), TypeError, "offload"),
        (lambda: FSDP(Wide(), cpu_offload=3), TypeError, "cpu_offload"),
    ]
    with all_rows() as row:
        for k, (call, kind, text) in enumerate(table):
            with row(k, text):
                assert text in message_of(call, kind)


@on_ranks(2)
def test_ranks_that_differ(tmp_path):
    differs = dist.get_rank() == 1
    message = message_of(lambda: wide(to(tmp_path, grads=differs)), zshard.DivergenceError)
    assert "offload" in message and "rank 1" in message
