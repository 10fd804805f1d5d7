"""Steps that bypass the page cache, and offload from a GPU to its host's memory, over fakes of
CUDA.

Whatever a test does to an offloaded model between or during steps, it also does to the same model
in memory, and compares bit for bit; bytes written by system calls show whether buffers were lent.
"""

from __future__ import annotations

import copy
import os

import pytest
import stand_ins
import torch
import torch.distributed as dist
from compare import assert_same
from guarded import same
from models import differences, loss_of, make
from nursery import fork_ranks
from offloaded import CACHE, io_count, steps, to, wide
from safetensors.torch import save_file
from scenarios import message_of
from torch import nn

import zshard
from zshard import FSDP, SGD, AdamW, Offload

MANY = 1 << 20  # bytes


def with_direct(folder, direct, in_backward, transport):
    """Return the state after steps, and the bytes that system calls wrote."""
    os.environ["ZSHARD_OFFLOAD_DIRECT"] = direct
    try:
        before = io_count("wchar")
        model, optimizer = wide(to(folder), in_backward, transport=transport)
        steps(model, optimizer, clip=False)
        return {**model.state_dict(), **flat_state(optimizer)}, io_count("wchar") - before
    finally:
        del os.environ["ZSHARD_OFFLOAD_DIRECT"]


def flat_state(optimizer):
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value.clone() for i in state for key, value in state[i].items()}


def compare_ways(folder, in_backward, transport):
    (direct, some), (cached, none) = (
        with_direct(folder, way, in_backward, transport) for way in ("1", "0")
    )
    assert some > none + MANY, "not lent, or lent where the environment forbids it"
    return differences(direct, cached)


@pytest.mark.parametrize("in_backward", [False, True])
def test_direct_io_is_bit_identical(pool2, tmp_path, in_backward):
    for transport in ("shm", "c10d"):
        assert pool2.run(compare_ways, str(tmp_path), in_backward, transport) == [[], []]


def in_shared_memory(in_backward):
    with_disk, plain = (wide(where, in_backward) for where in (to("/dev/shm"), None))
    for each in (with_disk, plain):
        steps(*each, clip=False)
    return differences(with_disk[0].state_dict(), plain[0].state_dict())


@pytest.mark.parametrize("in_backward", [False, True])
def test_file_system_in_memory(pool2, in_backward):
    """Older kernels have no direct I/O there."""
    assert pool2.run(in_shared_memory, in_backward) == [[], []]


def test_cached_data_stays_in_memory(tmp_path):
    before = io_count("wchar")
    model, optimizer = wide(Offload(directory=tmp_path, cache=1 << 30))
    steps(model, optimizer)
    assert io_count("wchar") - before < MANY


# --- between steps ---------------------------------------------------------------------------------


def meddle(model, optimizer):
    """Read and write the shards and their state in place, as a script may."""
    seen = []
    with torch.no_grad():
        for param in model.parameters():
            state = optimizer.state[param]
            seen.append((param.clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
            param.mul_(1.25)
            state["exp_avg"].neg_()
            zshard.to_local(state["exp_avg_sq"])[::3] += 0.5
    return seen


def meddled(folder, in_backward, cache):
    found = []
    for where in (None, Offload(directory=folder, cache=cache)):
        model, optimizer = wide(where, in_backward)
        seen = []
        for _ in range(4):
            steps(model, optimizer, n=2, clip=False)
            seen += meddle(model, optimizer)
        found.append((seen, model.state_dict()))
    equal = all(
        same(a, b)
        for one, other in zip(found[0][0], found[1][0], strict=True)
        for a, b in zip(one, other, strict=True)
    )
    return differences(found[1][1], found[0][1]) + ([] if equal else ["what was seen"])


@pytest.mark.parametrize("in_backward", [False, True])
def test_next_step_uses_modified_tensors(pool2, tmp_path, in_backward):
    for cache in (CACHE, 8 << 20):  # too little to prefetch anything, and enough
        assert pool2.run(meddled, str(tmp_path), in_backward, cache) == [[], []]


def looked_ahead(folder):
    """Steps without a forward in between, each preceded by a prefetch."""
    found = []
    for where in (None, Offload(directory=folder, cache=8 << 20, grads=True)):
        model, optimizer = wide(where)
        steps(model, optimizer, n=1)
        for _ in range(5):
            model.clip_grad_norm_(0.5)  # the pager knows that a step follows
            meddle(model, optimizer)
            optimizer.step()
        found.append({**model.state_dict(), **flat_state(optimizer)})
    return differences(found[1], found[0])


def test_prefetched_data_may_have_changed(pool2, tmp_path):
    assert looked_ahead(str(tmp_path)) == []
    assert pool2.run(looked_ahead, str(tmp_path)) == [[], []]


def resumed(folder, in_backward, file):
    """Two steps, a checkpoint, two more; then repeat those two from the checkpoint, in the same
    model and in another; compare with the same in memory."""
    plain, plain_optimizer = wide(None, in_backward)
    for _ in range(2):
        steps(plain, plain_optimizer, n=2, clip=False)
    model, optimizer = wide(to(folder), in_backward)
    steps(model, optimizer, n=2, clip=False)
    state, optimizer_state = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 0:
        save_file({name: value.clone() for name, value in state.items()}, file)
    dist.barrier()
    steps(model, optimizer, n=2, clip=False)
    wrong = differences(model.state_dict(), plain.state_dict())
    other, its_optimizer = wide(to(folder), in_backward)
    steps(other, its_optimizer, n=1, clip=False)
    model.load_state_dict(state)
    zshard.load(file, other)
    for each, stepper in ((model, optimizer), (other, its_optimizer)):
        stepper.load_state_dict(optimizer_state)
        wrong += differences(each.state_dict(), state)
        steps(each, stepper, n=2, clip=False)
        wrong += differences(each.state_dict(), plain.state_dict())
    return wrong


@pytest.mark.parametrize("in_backward", [False, True])
def test_checkpoints_in_the_middle(pool2, tmp_path, in_backward):
    file = str(tmp_path / "model.safetensors")
    assert pool2.run(resumed, str(tmp_path), in_backward, file) == [[], []]


# --- sizes -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Nothing ends at a page boundary, and some units are smaller than a page."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in ((512, 511), (511, 1027), (1027, 7), (7, 5))
        )
        self.norm = nn.LayerNorm(1027)

    def forward(self, x):
        x = self.norm(self.layers[1](torch.relu(self.layers[0](x))))
        return self.layers[3](torch.relu(self.layers[2](x)))


def odd(folder, kind):
    found = []
    for where in (None, to(folder)):
        dtype = torch.bfloat16 if kind == "rounded" else torch.float32
        model = FSDP(make(Odd).to(dtype), offload=where, auto_wrap_policy={nn.Linear})
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
        if kind == "sgd":
            optimizer = SGD(groups, lr=1e-2, momentum=0.9)
        elif kind == "rounded":
            optimizer = AdamW(groups, lr=1e-2, stochastic_rounding=True)
        else:
            optimizer = AdamW(groups, lr=1e-2, amsgrad=True)
        if kind == "in backward":
            model.optimizer_in_backward(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
            loss_of(model(x.to(dtype)).float()).backward()
            optimizer.step()
        found.append({**model.state_dict(), **flat_state(optimizer)})
    return differences(found[1], found[0])


@pytest.mark.parametrize("kind", ["amsgrad", "in backward", "sgd", "rounded"])
def test_odd_sizes(pool2, pool3, tmp_path, kind):
    for pool in (pool2, pool3):
        assert pool.run(odd, str(tmp_path), kind) == [[]] * pool.world


# --- in the middle of a step -----------------------------------------------------------------------


class Broken(Exception):
    pass


def broken(folder, direct):
    """Return the state after backwards that raise when some units have been stepped."""
    os.environ["ZSHARD_OFFLOAD_DIRECT"] = direct
    model, optimizer = wide(to(folder), True)
    del os.environ["ZSHARD_OFFLOAD_DIRECT"]
    steps(model, optimizer, n=2, clip=False)
    seen = []
    for _ in range(2):
        handle = model.blocks[1].register_full_backward_pre_hook(raise_broken)
        loss = loss_of(model(torch.randn(4, 512, generator=torch.Generator().manual_seed(3))))
        message_of(loss.backward, Broken)
        handle.remove()
        seen += [p.detach().clone() for p in model.parameters()]
        seen += list(flat_state(optimizer).values())
        steps(model, optimizer, n=2, clip=False)
    return seen + list(model.state_dict().values())


def raise_broken(module, grads):
    raise Broken("in the middle")


def test_failing_backward(tmp_path):
    direct, cached = (broken(str(tmp_path), way) for way in ("1", "0"))
    assert_same(direct, cached, "what the files give")


def forking(folder):
    """Fork children in the middle of a backward that steps; they read parameters."""
    found = []
    for where in (None, to(folder)):
        model, optimizer = wide(where, True)
        statuses = []

        def fork(module, grads, model=model, statuses=statuses):
            child = os.fork()
            if child == 0:
                good = all(bool(p.isfinite().all()) for p in model.head.parameters())
                os._exit(0 if good else 1)
            statuses.append(os.waitpid(child, 0)[1])

        model.blocks[1].register_full_backward_pre_hook(fork)
        steps(model, optimizer, n=3, clip=False)
        assert statuses == [0, 0, 0]
        found.append(model.state_dict())
    return differences(*found)


def test_forks_in_the_middle(tmp_path):
    assert forking(str(tmp_path)) == []


ALL = zshard.Offload(grads=True)
HALF_OF_THE_STATE = zshard.Offload(params=False, fraction=0.5)
BF16 = zshard.MixedPrecision(torch.bfloat16)
CASES = {
    "full_shard": {},
    "bf16": {"mixed_precision": BF16},
    "zero1": {"strategy": "zero1"},
    "no_shard": {"strategy": "no_shard"},
}


def trained(options, offload, in_backward):
    """Return losses, parameters and memory after some steps."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(32, 3))
    model = FSDP(model, auto_wrap_policy={nn.Linear}, offload=offload, **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    if in_backward:
        model.optimizer_in_backward(optimizer)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    losses = []
    for _ in range(4):
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        loss.backward()
        if not in_backward:
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, model.memory(), model.memory("predicted")


def trained_three_ways(env, options, in_backward):
    """Without offload, with all and with some."""
    os.environ.update(env)
    return [trained(options, offload, in_backward) for offload in (None, ALL, HALF_OF_THE_STATE)]


def check_same(one, other):
    assert one[0] == other[0]
    assert_same(one[1], other[1], "the state")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in backward"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "backend"), [(1, "c10d"), (2, "c10d"), (2, "nccl")])
def test_gpu_offload_is_bit_identical(world, backend, case, in_backward):
    env, options = stand_ins.environment(backend), CASES[case]
    for rank in fork_ranks(trained_three_ways, world, env, options, in_backward, check=True):
        usual, moved, partly = rank.value
        check_same(usual, moved)
        check_same(usual, partly)
        before, after, predicted = usual[2], moved[2], moved[3]
        assert before["offloaded"] == 0 < partly[2]["offloaded"] < after["offloaded"]
        assert after["shards"] == after["grads"] == after["optimizer"] == 0
        assert after["total"] < before["total"]
        assert abs(after["offloaded"] - predicted["offloaded"]) < 0.02 * predicted["offloaded"]


def refused(env):
    os.environ.update(env)
    try:
        FSDP(nn.Linear(3, 3), offload="/tmp")
    except NotImplementedError as error:
        return str(error)
    return ""


def test_directory_requires_the_cpu():
    (result,) = fork_ranks(refused, 1, stand_ins.environment(), check=True)
    assert "on a GPU: omit directory" in result.value
