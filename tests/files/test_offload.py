"""Parameters, gradients and optimizer state in files: the same bits, whatever a script does.

A model on a disk is compared with the same model in memory, under everything that
reads or writes its parameters.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from models import CASES, differences, loss_of, make, make_optimizer, train
from offloaded import KINDS, Wide, compare_wide, steps, to, wide
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

import zshard
from zshard import FSDP, AdamW, MixedPrecision, Offload


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_bits_are_those_of_memory(pool2, tmp_path, transport, kind):
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
def test_a_world_of_one(tmp_path, in_backward):
    assert compare_wide(str(tmp_path), KINDS["all"], in_backward) == []


def compare_low(folder, transport):
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    every = KINDS["all"]
    return compare_wide(folder, every, False, mixed_precision=low, transport=transport)


def test_mixed_precision(pool2, tmp_path):
    for transport in ("shm", "c10d"):
        assert pool2.run(compare_low, str(tmp_path), transport) == [[], []], transport


def compare_hybrid(folder, strategy):
    mesh = mesh_of(2, 2)
    return compare_wide(folder, {}, False, strategy=strategy, device_mesh=mesh)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
def test_hybrids(pool4, tmp_path, strategy):
    assert pool4.run(compare_hybrid, str(tmp_path), strategy) == [[]] * 4


def compare_case(folder, name, optimizer):
    case, found = CASES[name], []
    for offload in (None, to(folder, grads=True)):
        model = FSDP(make(case.make), auto_wrap_policy=case.policy, offload=offload)
        losses = train(model, case, make_optimizer(optimizer, model), dist.get_rank())
        found.append((losses, model.state_dict()))
    same = found[0][0] == found[1][0]
    return differences(found[1][1], found[0][1]) + ([] if same else ["losses"])


@pytest.mark.parametrize("name", list(CASES))
def test_models_of_every_kind(pool2, tmp_path, name):
    assert pool2.run(compare_case, str(tmp_path), name, "zshard.AdamW") == [[], []]


# --- everything else that touches parameters -----------------------------------------------------


def use(folder):
    """What goes wrong with a model on a disk that one in memory can do."""
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
        model.blocks[0].weight.mul_(2)  # the slice, between steps
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


def test_what_a_script_may_do(pool2, tmp_path):
    assert pool2.run(use, str(tmp_path)) == [[], []]


def with_torch_optimizer(folder):
    found = []
    for offload in (None, to(folder)):
        model = FSDP(make(Wide), offload=offload, auto_wrap_policy={nn.Linear})
        steps(model, torch.optim.AdamW(model.parameters(), 1e-2), n=2)
        found.append(model.state_dict())
    return differences(*found)


def test_torchs_optimizer_on_a_model_on_disk(pool2, tmp_path):
    assert pool2.run(with_torch_optimizer, str(tmp_path)) == [[], []]


def evaluate_in_worker(folder):
    """DataLoader workers are forked while the pager's threads run."""
    model, optimizer = wide(to(folder))
    rows = torch.utils.data.TensorDataset(torch.randn(8, 512))
    for (x,) in torch.utils.data.DataLoader(rows, batch_size=4, num_workers=1):
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
    return []


def test_beside_forked_workers(tmp_path):
    assert evaluate_in_worker(str(tmp_path)) == []


def test_host_memory_is_where_all_is_anyway():
    for given in (True, CPUOffload(offload_params=True), CPUOffloadPolicy(), Offload()):
        model = FSDP(make(Wide), cpu_offload=given)
        steps(model, AdamW(model.parameters()), n=1)
        assert model.memory()["offloaded"] == 0
    model = zshard.fully_shard(make(Wide), offload_policy=CPUOffloadPolicy())
    assert model.memory()["offloaded"] == 0
