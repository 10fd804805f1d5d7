"""Parameters, gradients and optimizer state in files: bit-identical results, whatever a script
does.

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
from groups import mesh_of
from models import CASES, differences, loss_of, make, make_optimizer, train
from nursery import fork_ranks
from offloaded import KINDS, Wide, compare_wide, steps, to, wide
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

import zshard
from zshard import FSDP, AdamW, MixedPrecision, Offload


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_offload_is_bit_identical(pool2, tmp_path, transport, kind):
    what = KINDS[kind]
    assert pool2.run(compare_wide_over, str(tmp_path), what, False, transport) == [[], []]


def compare_wide_over(folder, what, in_backward, transport, **options):
    return compare_wide(folder, what, in_backward, transport=transport, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["shard_grad_op", "zero1", "no_shard"])
def test_every_strategy(pool2, tmp_path, strategy):
    for transport in ("shm", "c10d"):
        run = pool2.run(compare_strategy, str(tmp_path), strategy, transport)
        assert run == [[], []], transport


def compare_strategy(folder, strategy, transport):
    every = KINDS["all"]
    return compare_wide(folder, every, False, strategy=strategy, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_stepped_in_backward(pool2, tmp_path, transport):
    assert pool2.run(compare_wide_over, str(tmp_path), {}, True, transport) == [[], []]


@pytest.mark.parametrize("in_backward", [False, True])
def test_single_rank(tmp_path, in_backward):
    assert compare_wide(str(tmp_path), KINDS["all"], in_backward) == []


def compare_low(folder, transport):
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    every = KINDS["all"]
    return compare_wide(folder, every, False, mixed_precision=low, transport=transport)


def test_mixed_precision(pool2, tmp_path):
    for transport in ("shm", "c10d"):
        assert pool2.run(compare_low, str(tmp_path), transport) == [[], []], transport


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@on_ranks(4)
def test_hybrids(strategy, tmp_path):
    folder = str(tmp_path)
    mesh = mesh_of(2, 2)
    assert compare_wide(folder, {}, False, strategy=strategy, device_mesh=mesh) == []


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2)
def test_models_of_every_kind(name, tmp_path):
    folder = str(tmp_path)
    optimizer = "zshard.AdamW"
    case, found = CASES[name], []
    for offload in (None, to(folder, grads=True)):
        model = FSDP(make(case.make), auto_wrap_policy=case.policy, offload=offload)
        losses = train(model, case, make_optimizer(optimizer, model), dist.get_rank())
        found.append((losses, model.state_dict()))
    same = found[0][0] == found[1][0]
    assert differences(found[1][1], found[0][1]) + ([] if same else ["losses"]) == []


# --- everything else that uses parameters --------------------------------------------------------


def use(folder):
    """Return what fails with a model on a disk that works with one in memory."""
    wrong = []
    plain = make(Wide)
    model, optimizer = wide(to(folder))
    wrong += differences(model.state_dict(), plain.state_dict())
    other = make(Wide, seed=2).state_dict()
    model.load_state_dict(other)
    wrong += differences(model.state_dict(), other)
    with FSDP.summon_full_params(model):
        model.head.bias.data.fill_(3)
    with torch.no_grad():
        model.blocks[0].weight.mul_(2)  # the shard, between steps
    expected = {**other, "head.bias": torch.full((3,), 3.0)}
    expected["blocks.0.weight"] = other["blocks.0.weight"] * 2
    wrong += differences(model.state_dict(), expected)
    steps(model, optimizer)
    average = copy.deepcopy(model)
    wrong += differences(average.state_dict(), model.state_dict())
    if average.memory()["offloaded"] < 1 << 20:
        wrong.append("the copy is in memory")
    steps(model, optimizer)
    if not differences(average.state_dict(), model.state_dict()):
        wrong.append("the copy follows")
    return wrong


def test_operations_of_scripts(pool2, tmp_path):
    assert pool2.run(use, str(tmp_path)) == [[], []]


@on_ranks(2)
def test_torchs_optimizer_on_a_model_on_disk(tmp_path):
    folder = str(tmp_path)
    found = []
    for offload in (None, to(folder)):
        model = FSDP(make(Wide), offload=offload, auto_wrap_policy={nn.Linear})
        steps(model, torch.optim.AdamW(model.parameters(), 1e-2), n=2)
        found.append(model.state_dict())
    assert differences(*found) == []


def evaluate_in_worker(folder):
    """DataLoader workers are forked while the pager's threads run."""
    model, optimizer = wide(to(folder))
    rows = torch.utils.data.TensorDataset(torch.randn(8, 512))
    for (x,) in torch.utils.data.DataLoader(rows, batch_size=4, num_workers=1):
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
    return []


def test_with_forked_workers(tmp_path):
    assert evaluate_in_worker(str(tmp_path)) == []


def threads_of_models(folder):
    """Return this process's threads after steps of each of three models on a disk."""
    found = []
    for _ in range(3):
        model = FSDP(make(Wide), offload=to(folder))
        steps(model, AdamW(model.parameters()), n=1)
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
    for given in (True, CPUOffload(offload_params=True), CPUOffloadPolicy(), Offload()):
        model = FSDP(make(Wide), cpu_offload=given)
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
    folder = str(tmp_path)
    params = sum(p.numel() * 4 for p in make(Wide).parameters())
    memory = held(folder, grads=True)
    assert memory["shards"] == memory["grads"] == 0
    assert 4 * params <= memory["offloaded"] < 4.1 * params + 64 * 4096
    assert held(folder, params=False)["shards"] >= params
    half = held(folder, grads=True, fraction=0.5)["offloaded"]
    assert 0.35 * memory["offloaded"] < half < 0.65 * memory["offloaded"]
    assert held(folder, fraction=0.0)["offloaded"] == 0


def predictions(folder, kind, strategy, transport):
    """Return (predicted by the wrapped model, predicted by predict_memory(), held after steps)."""
    where = to(folder, **KINDS[kind])
    model, optimizer = wide(where, strategy=strategy, transport=transport)
    predicted = model.memory("predicted")
    steps(model, optimizer)
    world = dist.get_world_size()
    options = {"strategy": strategy, "transport": transport, "auto_wrap_policy": {nn.Linear}}
    before = zshard.predict_memory(make(Wide), world, offload=where, **options)
    return predicted, before, model.memory("peak")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_predicted(pool2, tmp_path, kind):
    for strategy, transport in (("full_shard", "shm"), ("full_shard", "c10d"), ("no_shard", "shm")):
        rows = pool2.run(predictions, str(tmp_path), kind, strategy, transport)
        for predicted, before, held in rows[:1]:
            on_disk = [each.pop("offloaded") for each in (predicted, before, held)]
            assert predicted == before
            # State is in separate blocks: a few bytes of padding. All models share the transport.
            for part in set(held) - {"optimizer", "total", "transport"}:
                assert held[part] == predicted[part], (part, strategy, transport)
            assert held["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.02)
            assert on_disk == pytest.approx([on_disk[2]] * 3, rel=0.02, abs=1 << 17)


def test_offloaded_model_may_exceed_memory(tmp_path):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    options = {"auto_wrap_policy": {nn.Linear}, "memory_limit": 6 << 20}
    with pytest.raises(MemoryError, match="offload="):
        FSDP(model, **options)
    model = FSDP(model, offload=to(str(tmp_path), grads=True), **options)
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
    (rank,) = fork_ranks(residents, 1, str(tmp_path), check=True)
    assert rank.value < 8 << 20


def test_no_file_is_left(pool2, tmp_path):
    pool2.run(held, str(tmp_path))
    assert os.listdir(tmp_path) == []


def dies(folder):
    model, optimizer = wide(to(folder))
    steps(model, optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_file_is_left_by_a_killed_process(tmp_path):
    killed = fork_ranks(dies, 2, str(tmp_path))
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
    torch.manual_seed(0)
    size = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    limit = size + (160 << 20)  # torch wants some of it: buffers of its libraries, stacks
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    where = zshard.Offload(directory=folder, grads=True, cache=32 << 20) if offload else None
    model = zshard.FSDP(model, offload=where, auto_wrap_policy={nn.Linear})
    optimizer = zshard.AdamW(model.parameters(), 1e-3)
    model.optimizer_in_backward(optimizer)
    for step in range(2):
        loss = model(torch.ones(2, 1024)).square().mean()
        loss.backward()
        print("loss", loss.item())
    print("disk", model.memory()["offloaded"] >> 20)
"""


def under_limit(folder, where):
    command = [sys.executable, "-c", textwrap.dedent(UNDER_LIMIT), str(folder), where]
    # The limit counts address space, and malloc never returns its heap.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.thorough
def test_model_almost_five_times_larger_than_memory(tmp_path):
    """768 MiB of parameters and state with 160 MiB of memory."""
    done = under_limit(tmp_path, "disk")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 2 and int(done.stdout.split()[-1]) >= 768
    refused = under_limit(tmp_path, "memory")
    assert refused.returncode != 0 and "memory" in refused.stderr.lower(), refused.stderr


# --- refusals -------------------------------------------------------------------------------------


def in_folder(folders):
    return message_of(lambda: wide(to(folders[dist.get_rank()])))


def test_missing_directory_is_an_error_on_all_ranks(pool2, tmp_path):
    nowhere = str(tmp_path / "none")
    first, second = pool2.run(in_folder, [nowhere, str(tmp_path)])
    assert nowhere in first and "No such file" in first
    assert "rank 0" in second and "offload" in second
    assert os.listdir(tmp_path) == []


def test_unwritable_directory(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for where in (str(file), "/proc"):
        with pytest.raises(OSError, match=where):
            wide(to(where))


def limit_files(size):
    """Let this process write no larger files: that acts like a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def with_full_disk(folder):
    limit_files(3 << 20)
    model = nn.Linear(1024, 1024)
    before = model.weight.clone()
    text = message_of(lambda: FSDP(model, offload=Offload(directory=folder)), OSError)
    assert torch.equal(model.weight, before)
    return text


def test_disk_full(tmp_path):
    (rank,) = fork_ranks(with_full_disk, 1, str(tmp_path), check=True)
    assert "by 4 MiB" in rank.value and str(tmp_path) in rank.value and "MiB free" in rank.value


def with_full_disk_for_the_state(folder):
    limit_files(5 << 20)
    model = FSDP(nn.Linear(1024, 1024), offload=Offload(directory=folder))
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    before = model.weight.detach().clone()
    text = message_of(optimizer.step, OSError)
    assert torch.equal(model.weight, before)
    return text


def test_disk_full_for_the_state(tmp_path):
    (rank,) = fork_ranks(with_full_disk_for_the_state, 1, str(tmp_path), check=True)
    assert "MiB free" in rank.value


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"fraction": 1.5}, ValueError, "fraction"),
        ({"cache": -1}, ValueError, "cache"),
        ({"cache": True}, ValueError, "cache"),
        ({"directory": 3}, TypeError, "directory"),
    ],
)
def test_invalid_settings(arguments, kind, match):
    with pytest.raises(kind, match=match):
        Offload(**arguments)


def test_invalid_arguments(tmp_path):
    with pytest.raises(ValueError, match="not both"):
        FSDP(make(Wide), offload=str(tmp_path), cpu_offload=True)
    with pytest.raises(TypeError, match="offload"):
        FSDP(make(Wide), offload=3)
    with pytest.raises(TypeError, match="cpu_offload"):
        FSDP(make(Wide), cpu_offload=3)


@on_ranks(2)
def test_ranks_that_differ(tmp_path):
    folder = str(tmp_path)
    message = message_of(
        lambda: wide(to(folder, grads=dist.get_rank() == 1)), zshard.DivergenceError
    )
    assert "offload" in message and "rank 1" in message, message


def test_directory_may_be_a_path_object(tmp_path):
    model = FSDP(make(Wide), offload=Path(tmp_path))
    steps(model, AdamW(model.parameters()), n=1)
    assert model.memory()["offloaded"] > 0
