"""Steps that bypass the page cache, and offload from a GPU to its host's memory, over fakes of
CUDA.

A test makes the same changes to an offloaded model and to one in memory, between or during steps,
and compares them bit for bit; bytes written by system calls show whether buffers were lent.
"""

from __future__ import annotations

import os

import pytest
import stand_ins
import torch
from compare import assert_same
from models import loss_of, make
from nursery import fork_ranks
from offloaded import CACHE, io_count, steps, to, wide
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, SGD, AdamW, Offload

MANY = 1 << 20  # bytes


def wide_direct(way, folder, *options, **more):
    """Return a model and its optimizer, with direct I/O ("1") or without ("0")."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_OFFLOAD_DIRECT", way)
        return wide(to(folder), *options, **more)


def state_of(model, optimizer):
    states = optimizer.state_dict()["state"]
    found = {f"{i}.{key}": value.clone() for i in states for key, value in states[i].items()}
    return {**model.state_dict(), **found}


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_direct_io_is_bit_identical(tmp_path, in_backward):
    for transport in ("shm", "c10d"):
        states, counts = [], []  # of bytes that system calls write
        for way in ("1", "0"):
            before = io_count("wchar")
            both = wide_direct(way, tmp_path, in_backward, transport=transport)
            steps(*both, clip=False)
            states.append(state_of(*both))
            counts.append(io_count("wchar") - before)
        assert_same(*states, "the state")
        assert counts[0] > counts[1] + MANY, "not lent, or lent where the environment forbids it"


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_file_system_in_memory(in_backward):
    """Older kernels have no direct I/O there."""
    with_disk, plain = (wide(where, in_backward) for where in (to("/dev/shm"), None))
    for each in (with_disk, plain):
        steps(*each, clip=False)
    assert_same(with_disk[0].state_dict(), plain[0].state_dict(), "the state")


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


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_next_step_uses_modified_tensors(tmp_path, in_backward):
    seen = []
    for cache in (None, CACHE, 8 << 20):  # too little to prefetch anything, and enough
        where = None if cache is None else Offload(directory=tmp_path, cache=cache)
        model, optimizer = wide(where, in_backward)
        seen.append([])
        for _ in range(4):
            steps(model, optimizer, n=2, clip=False)
            seen[-1] += meddle(model, optimizer)
        seen[-1].append(model.state_dict())
    assert_same(seen[1], seen[0], "what was seen")
    assert_same(seen[2], seen[0], "what was seen")


@on_ranks(1, 2)
def test_prefetched_data_may_have_changed(tmp_path):
    """Steps without a forward in between, each preceded by a prefetch."""
    found = []
    for where in (None, Offload(directory=tmp_path, cache=8 << 20, grads=True)):
        model, optimizer = wide(where)
        steps(model, optimizer, n=1)
        for _ in range(5):
            model.clip_grad_norm_(0.5)  # the pager knows that a step follows
            meddle(model, optimizer)
            optimizer.step()
        found.append(state_of(model, optimizer))
    assert_same(*found, "the state")


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


@pytest.mark.parametrize("kind", ["amsgrad", "in backward", "sgd", "rounded"])
@on_ranks(2, 3)
def test_odd_sizes(tmp_path, kind):
    found = []
    dtype = torch.bfloat16 if kind == "rounded" else torch.float32
    for where in (None, to(tmp_path)):
        model = FSDP(make(Odd).to(dtype), offload=where, auto_wrap_policy={nn.Linear})
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
        if kind == "sgd":
            optimizer = SGD(groups, lr=1e-2, momentum=0.9)
        else:
            how = "stochastic_rounding" if kind == "rounded" else "amsgrad"
            optimizer = AdamW(groups, lr=1e-2, **{how: True})
        if kind == "in backward":
            model.optimizer_in_backward(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
            loss_of(model(x.to(dtype)).float()).backward()
            optimizer.step()
        found.append(state_of(model, optimizer))
    assert_same(*found, "the state")


# --- in the middle of a step -----------------------------------------------------------------------


class Broken(Exception):
    pass


def raise_broken(module, grads):
    raise Broken("in the middle")


def test_failing_backward(tmp_path):
    """Backwards that raise when some units have been stepped."""
    seen = []
    for way in ("1", "0"):
        model, optimizer = wide_direct(way, tmp_path, True)
        steps(model, optimizer, n=2, clip=False)
        states = []
        for _ in range(2):
            handle = model.blocks[1].register_full_backward_pre_hook(raise_broken)
            loss = loss_of(model(torch.randn(4, 512, generator=torch.Generator().manual_seed(3))))
            message_of(loss.backward, Broken)
            handle.remove()
            states += [p.detach().clone() for p in model.parameters()]
            steps(model, optimizer, n=2, clip=False)
            states.append(state_of(model, optimizer))
        seen.append(states)
    assert_same(*seen, "what the files give")


def test_forks_in_the_middle(tmp_path):
    """Fork children in the middle of a backward that steps; they read parameters."""
    found = []
    for where in (None, to(tmp_path)):
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
    assert_same(*found, "the state")


# --- from a GPU to its host -------------------------------------------------------------------------


OFFLOADS = (None, Offload(grads=True), Offload(params=False, fraction=0.5))
CASES = {
    "full_shard": {},
    "bf16": {"mixed_precision": zshard.MixedPrecision(torch.bfloat16)},
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
    return [trained(options, offload, in_backward) for offload in OFFLOADS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in backward"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world", "backend"), [(1, "c10d"), (2, "c10d"), (2, "nccl")])
def test_gpu_offload_is_bit_identical(world, backend, case, in_backward):
    env, options = stand_ins.environment(backend), CASES[case]
    for rank in fork_ranks(trained_three_ways, world, env, options, in_backward, check=True):
        usual, moved, partly = rank.value
        for each in (moved, partly):
            assert_same(each[:2], usual[:2], "losses and state")
        before, after, predicted = usual[2], moved[2], moved[3]
        assert before["offloaded"] == 0 < partly[2]["offloaded"] < after["offloaded"]
        assert after["shards"] == after["grads"] == after["optimizer"] == 0
        assert after["total"] < before["total"]
        assert abs(after["offloaded"] - predicted["offloaded"]) < 0.02 * predicted["offloaded"]


def refused(env):
    os.environ.update(env)
    return message_of(lambda: FSDP(nn.Linear(3, 3), offload="/tmp"), NotImplementedError)


def test_directory_requires_the_cpu():
    (result,) = fork_ranks(refused, 1, stand_ins.environment(), check=True)
    assert "on a GPU: omit directory" in result.value
