"""zshard.export(): the plain model's tensors, under every strategy and transport, bit for bit; ends
of a loop; refusals."""

from __future__ import annotations

import contextlib
import copy
import functools
import time

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import mesh_of
from models import COMBINATIONS, Net, make
from nursery import fork_ranks
from rows import all_refused
from spawn import on_ranks

import zshard
from zshard import FSDP, AdamW, MixedPrecision


class Model(Net):
    """Net with tied weights, two saved buffers and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.full((5,), 0.3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def batch():
    return torch.arange(12).view(2, 6) % 31


def step(model, optimizer):
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


def built(combination=("full_shard", "shm"), **options):
    """A sharded model after a step, and its optimizer."""
    strategy, transport = combination
    model = FSDP(make(Model), strategy=strategy, transport=transport, timeout=10, **options)
    optimizer = AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def full(model):
    """The expected export of a plain model."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del state["head.weight"]  # the second name of a tied weight
    return state


same = functools.partial(assert_same, what="the export")


def joined(buckets):
    found = {}
    for bucket in buckets:
        assert not found.keys() & bucket.keys()
        found.update(bucket)
    return found


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["float32", "mixed", "offloaded"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2, 3)
def test_an_export_has_the_bits_of_the_state_dict(combination, how, tmp_path):
    options = {
        "mixed": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        "offloaded": {"offload": zshard.Offload(directory=str(tmp_path))},
    }
    model, optimizer = built(combination, **options.get(how, {}))
    expected = full(model)
    sizes = []
    for bucket in zshard.export(model, bucket=3000):
        sizes.append(sum(each.numel() * each.element_size() for each in bucket.values()))
        assert sizes[-1] <= 3000 or len(bucket) == 1
    assert len(sizes) > 3
    same(joined(zshard.export(model)), expected)
    low = joined(zshard.export(model, dtype=torch.bfloat16, bucket=1))
    assert low["steps"].dtype == torch.int64
    same(low, {n: v.bfloat16() if v.is_floating_point() else v for n, v in expected.items()})
    step(model, optimizer)
    assert not torch.equal(joined(zshard.export(model))["norm.weight"], expected["norm.weight"])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@on_ranks(4)
def test_hybrid_strategies(strategy, transport):
    how = {"device_mesh": mesh_of(2, 2), "strategy": strategy, "timeout": 20}
    model = FSDP(make(Model), transport=transport, **how)
    step(model, AdamW(model.parameters()))
    expected = full(model)
    same(joined(zshard.export(model, bucket=5000)), expected)
    dist.barrier()
    if transport == "shm" and dist.get_rank() == 3:
        same(joined(zshard.export(model)), expected)
    dist.barrier()


@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@on_ranks(2)
def test_buckets_own_their_memory(combination):
    model, _ = built(combination)
    expected = full(model)
    kept = list(zshard.export(model, bucket=2000))
    first = kept[0]
    next(iter(first.values())).zero_()
    same(full(model), expected)
    model(batch()).sum().backward()
    same({**joined(kept), **{n: expected[n] for n in first}}, expected)


@pytest.mark.parametrize("chosen", [1, [0, 1]])
@pytest.mark.parametrize("combination", [("full_shard", "shm"), ("full_shard", "c10d")])
@on_ranks(2)
def test_on_chosen_ranks(combination, chosen):
    model, optimizer = built(combination)
    expected = full(model)
    if chosen == 1 and dist.get_rank() == 0:
        expected = {}
    same(joined(zshard.export(model, ranks=chosen, bucket=2000)), expected)
    step(model, optimizer)


@on_ranks(2)
def test_one_rank_alone_has_one_step_while_others_train_on():
    model, optimizer = built()
    expected = full(model)
    if dist.get_rank() == 0:
        found = []
        for bucket in zshard.export(model, bucket=500):
            found.append(bucket)
            time.sleep(0.01)
        same(joined(found), expected)
    step(model, optimizer)
    assert not torch.equal(full(model)["norm.weight"], expected["norm.weight"])


@on_ranks(2)
def test_ranks_that_take_nothing_wait_with_their_writes(tmp_path):
    """One rank takes an export; then all write, and that rank comes last."""
    model, _ = built()
    for i in range(2):
        zshard.export(model, ranks=i).save(f"{tmp_path}/{i}")
        if dist.get_rank() == i:
            time.sleep(0.05)
        with FSDP.summon_full_params(model):
            for param in model.parameters():
                param.detach().add_(1)
    states = [None, None]
    dist.all_gather_object(states, full(model))
    same(*states)


@on_ranks(2)
def test_names():
    plain = make(Model)
    model = FSDP(copy.deepcopy(plain))
    expected = full(plain)
    same(joined(zshard.export(plain)), expected)

    def renamed(name):
        return None if name == "scale" else f"policy.{name}"

    del expected["scale"]
    wanted = {f"policy.{name}": value for name, value in expected.items()}
    same(joined(zshard.export(model, rename=renamed)), wanted)
    compiled = joined(zshard.export(torch.compile(model), rename=renamed))
    same(compiled, wanted)


# --- how a loop may end ---------------------------------------------------------------------------


def leave(model, how, n=1):
    with contextlib.suppress(ZeroDivisionError):
        for i, _ in enumerate(zshard.export(model, bucket=2000)):
            if i == n and how == "break":
                break
            if i == n and how == "raise":
                raise ZeroDivisionError


@pytest.mark.parametrize("how", ["break", "raise"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_all_ranks_may_leave_a_loop_and_nest_two(combination, how):
    model, optimizer = built(combination)
    leave(model, how)
    expected = full(model)
    same(joined(zshard.export(model)), expected)
    outer = zshard.export(model, bucket=2000)
    pairs = [pair for pair in zip(outer, zshard.export(model, bucket=2000), strict=True)]
    same(joined(a for a, _ in pairs), expected)
    same(joined(b for _, b in pairs), expected)
    step(model, optimizer)


def left_by_one(transport, then):
    dist.init_process_group("gloo")
    model, optimizer = built(("full_shard", transport))
    if dist.get_rank() == 0:
        leave(model, "break")
    else:
        joined(zshard.export(model, bucket=2000))
    if then == "step":
        step(model, optimizer)
    else:
        dist.barrier()
    print("went on")
    dist.destroy_process_group()


@pytest.mark.parametrize("then", ["step", "barrier"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_one_rank_alone_leaves_a_loop(transport, then):
    results = fork_ranks(left_by_one, 2, transport, then, timeout=60)
    for result in results:
        assert result.returncode is not None, "it hangs"
        if transport == "shm":
            assert "went on" in result.stdout
        else:
            assert result.returncode == 0 or "Error" in result.stderr
    if transport == "c10d" and then == "barrier":
        assert any("PeerTimeoutError" in each.stderr for each in results)


# --- refused --------------------------------------------------------------------------------------


@torch.no_grad()
def by_hand(param, is_cut):
    (param.data if is_cut else param).mul_(2)


@pytest.mark.parametrize("what", ["step", "sgd", "load", "by hand", "buffer"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_the_model_cannot_be_written_within_the_loop(combination, what):
    model, optimizer = built(combination)
    state = model.state_dict()
    acts = {
        "step": lambda: step(model, optimizer),
        "sgd": lambda: step(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "load": lambda: model.load_state_dict(state),
        "by hand": lambda: by_hand(model.norm.weight, combination[0] != "no_shard"),
        "buffer": lambda: model.scale.mul_(2),
    }
    expected = full(model)
    found = {}
    # A whole tensor may be written to once it has been exported.
    whole = what == "buffer" or (what == "by hand" and combination[0] == "no_shard")
    refused = pytest.raises(RuntimeError, match="export")
    with contextlib.suppress(RuntimeError) if whole else refused:
        for bucket in zshard.export(model, bucket=800):
            found.update(bucket)
            acts[what]()
    same(found, {name: expected[name] for name in found})


@on_ranks(2)
def test_bad_arguments_are_refused():
    model, _ = built()
    refusals = {
        "equal names": ({"rename": lambda name: "x"}, ValueError, "same name, 'x'"),
        "a number as name": ({"rename": len}, TypeError, "must return a string or None"),
        "a dict of names": ({"rename": {"a": "b"}}, TypeError, "rename must be a function"),
        "a bucket in words": ({"bucket": "much"}, ValueError, "bucket must be a positive number"),
        "no bucket": ({"bucket": 0}, ValueError, "bucket must be a positive number"),
        "a bucket with half a byte": ({"bucket": 1.5}, TypeError, "bucket must be"),
        "integers": ({"dtype": torch.int8}, ValueError, "floating-point"),
        "a dtype in words": ({"dtype": "bf16"}, TypeError, "torch.dtype"),
        "no such rank": ({"ranks": 2}, ValueError, "out of range for world size 2"),
        "no rank": ({"ranks": []}, ValueError, "must not be empty"),
        "ranks in words": ({"ranks": "0x"}, TypeError, "ranks must be"),
        "since a dict": ({"since": {}}, TypeError, "zshard.Exported"),
    }
    table = {
        name: (lambda options=options: joined(zshard.export(model, **options)), kind, text)
        for name, (options, kind, text) in refusals.items()
    }
    table["no model"] = (lambda: zshard.export(list(model.parameters())), TypeError, "must be an")
    all_refused(table)
    joined(zshard.export(model))


@on_ranks(2)
def test_ranks_must_export_the_same_over_c10d():
    model, _ = built(("full_shard", "c10d"))
    with pytest.raises(zshard.DivergenceError, match="bucket"):
        joined(zshard.export(model, bucket=1000 + dist.get_rank()))
    with pytest.raises(ValueError, match="same name"):
        joined(zshard.export(model, rename=(lambda n: "x") if dist.get_rank() == 1 else None))
    joined(zshard.export(model))
