"""Mixed precision: compute in one dtype, sum in float32, keep shards in the model's own.

The reference needs no library: each rank's gradients come from a plain copy of the model that is
cast, and are summed in float32 in rank order; before, over micro-batches in the model's own dtype.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from compare import assert_same
from groups import hosts_of, mesh_of
from models import COMBINATIONS, Block, Parts, loss_of, make, wrapped
from rows import all_refused
from scenario import this_rank
from scenarios import WIDTH, Stack, all_grads, floats, message_of, stack
from spawn import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard import FSDP, MixedPrecision, MixedPrecisionPolicy, fully_shard, precision

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
REDUCES_IN_OWN = torch.__version__ >= "2.15"  # FSDP2 without a reduce_dtype
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
FOLLOWING = MixedPrecisionPolicy(torch.bfloat16) if REDUCES_IN_OWN else None
POLICIES = {
    "bf16": BF16,
    "fp16": MixedPrecision(param_dtype=torch.float16),
    "bf16, reduced in fp32": MixedPrecision(torch.bfloat16, torch.float32),
    "fp32, reduced in bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
    "policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp64": MixedPrecision(param_dtype=torch.float64),
    "policy without a reduce dtype": FOLLOWING or MixedPrecisionPolicy(torch.bfloat16),
}


def own_grads(model, policy, rank, step):
    """The gradients of one rank's batch by a plain, cast copy."""
    low = copy.deepcopy(model)
    compute = policy.param_dtype or torch.float32
    low.to(compute)
    loss_of(low(floats(rank, step).to(compute))).backward()
    wire = policy.reduce_dtype or (torch.float32 if policy is FOLLOWING else compute)
    return [p.grad.to(wire) for p in low.parameters()]


def summed(parts):
    """The mean over ranks, in float32 and rank order (float64 if that is the reduce dtype)."""
    kind = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = torch.zeros(parts[0].shape, dtype=kind)
    for part in parts:
        total += part.to(kind) / len(parts)
    return total.float()


def reference(build, policy, steps=3):
    """The state dict after some steps of SGD with momentum."""
    model = make(build)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    world = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(steps):
        grads = [own_grads(model, policy, rank, step) for rank in range(world)]
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            param.grad = summed(parts)
        optimizer.step()
    return model.state_dict()


def trained(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(floats(this_rank(), step))).backward()
        optimizer.step()
    return model.state_dict()


def train_like_the_reference(name, combinations=COMBINATIONS):
    expected = reference(Stack, POLICIES[name])
    for combination in combinations:
        model = wrapped(Stack, combination, mixed_precision=POLICIES[name])
        assert_same(trained(model), expected, f"{name} under {combination}: the state")


@pytest.mark.parametrize("name", POLICIES)
@on_ranks(2, 4)
def test_gradients_are_summed_in_float32(name):
    """no_shard sends and sums in the model's own dtype."""
    own = name in ("fp32, reduced in bf16", "fp64")
    train_like_the_reference(name, SHARDED if own else COMBINATIONS)


def test_world_size_one():
    for name in ("bf16", "fp16", "bf16, reduced in fp32"):
        train_like_the_reference(name, [("full_shard", None)])


def test_policies_of_torch_are_accepted():
    for kind in (torchs.MixedPrecision, torchs.MixedPrecisionPolicy):
        model = FSDP(make(Stack), mixed_precision=kind(param_dtype=torch.bfloat16))
        assert_same(trained(model), reference(Stack, BF16), f"{kind}: the state")


@pytest.mark.skipif(not REDUCES_IN_OWN, reason="torch adds gradients in bfloat16")
@on_ranks(2)
def test_policy_without_a_reduce_dtype_gives_the_bits_of_torch():
    policy = torchs.MixedPrecisionPolicy(torch.bfloat16)
    mesh, theirs = init_device_mesh("cpu", (dist.get_world_size(),)), make(Stack)
    for module in (*theirs.blocks, theirs):
        torchs.fully_shard(module, mesh=mesh, mp_policy=policy)
    full = {name: each.full_tensor() for name, each in trained(theirs).items()}
    assert_same(trained(stack(mp_policy=policy)), full, "the state")


def test_policy_without_a_reduce_dtype_sends_what_parameters_promote_to(monkeypatch):
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    wires = []
    for follows in (False, True):
        monkeypatch.setattr(precision, "_REDUCES_IN_OWN", follows)
        for kind in (MixedPrecisionPolicy, torchs.MixedPrecisionPolicy, MixedPrecision):
            policy = precision.precision_of(kind(torch.bfloat16))
            wires.append([policy.wire_for(some) for some in (params, params[1:], [])])
        set_by_name = precision.precision_of(MixedPrecisionPolicy(torch.bfloat16, torch.float16))
        assert set_by_name.wire_for(params) == torch.float16
    unset, own = [None] * 3, [torch.float32, torch.bfloat16, None]
    assert wires == [unset, unset, unset, own, own, unset]


# --- dtypes ---------------------------------------------------------------------------------------


def look(model, x, *, bias, mask):
    """A forward that remembers the dtypes that it sees."""
    y = model.linear(x) * model.scale
    z = model.norm(y)
    named = {"weight": model.linear.weight, "norm": model.norm.weight, "buffer": model.scale}
    named |= {"x": x, "bias": bias, "mask": mask, "y": y, "z": z}
    model.seen = {name: tensor.dtype for name, tensor in named.items()}
    return z + bias


def looking():
    model = Parts(look, linear=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(WIDTH))
    model.register_buffer("scale", torch.ones(WIDTH))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return model


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_dtypes_of_parameters_inputs_and_buffers(combination):
    low, full = torch.bfloat16, torch.float32
    policy = MixedPrecision(low, full, buffer_dtype=low)
    model = wrapped(looking, combination, mixed_precision=policy, auto_wrap_policy=None)
    out = model(floats(0), bias=torch.zeros(WIDTH), mask=torch.ones(4, dtype=torch.bool))
    out.float().square().sum().backward()
    optimizer = zshard.AdamW(model.parameters())
    optimizer.step()
    of_low = dict.fromkeys(("weight", "x", "bias", "buffer", "y", "z"), low)
    assert model.seen == {**of_low, "norm": full, "mask": torch.bool}
    assert (out.dtype, model.scale.dtype, model.norm.running_mean.dtype) == (low, low, full)
    moments = [t for state in optimizer.state.values() for t in state.values()]
    at_rest = [*moments, *model.parameters(), *(p.grad for p in model.parameters())]
    assert {tensor.dtype for tensor in at_rest} == {full}


@on_ranks(2)
def test_casts_of_inputs_and_outputs():
    for out in (torch.float32, None):
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=out)
        model = FSDP(make(Stack), mixed_precision=policy)
        assert model(floats(0)).dtype == (out or torch.bfloat16)
    uncast = MixedPrecision(torch.bfloat16, cast_root_forward_inputs=False)
    assert "dtype" in message_of(lambda: FSDP(make(Stack), mixed_precision=uncast)(floats(0)))


@on_ranks(2)
def test_param_dtype_override_fn():
    """A norm keeps its dtype; a wrong dtype, and ranks that differ, are errors."""

    def sharded(override, kind=MixedPrecisionPolicy):
        policy = kind(torch.bfloat16, param_dtype_override_fn=override)
        return fully_shard(make(build), mp_policy=policy)

    def see(model, x):
        model.seen = {name: param.dtype for name, param in model.named_parameters()}
        return model.norm(model.inner(x).float())

    def build():
        return Parts(see, inner=nn.Linear(WIDTH, WIDTH, bias=False), norm=nn.LayerNorm(WIDTH))

    low, full = torch.bfloat16, torch.float32
    for kind in (MixedPrecisionPolicy, torchs.MixedPrecisionPolicy):
        if "param_dtype_override_fn" in kind.__dataclass_fields__:  # since torch 2.15
            model = sharded(lambda p: full if p.dim() == 1 else None, kind)
            model(floats(0)).sum().backward()
            assert model.seen == {"inner.weight": low, "norm.weight": full, "norm.bias": full}
    text = "param_dtype_override_fn returned torch.float16"
    wrong = (lambda: sharded(lambda p: torch.float16), ValueError, text)
    of_one = lambda: sharded(lambda p: full if dist.get_rank() else None)  # noqa: E731
    differ = (of_one, zshard.DivergenceError, "what keeps its dtype in unit ''")
    all_refused({"a wrong dtype": wrong, "ranks that differ": differ})


class Shared(Stack):
    """Uses the weights of a block, and of the head, twice. Its root has its own weight, which
    over c10d stays unsharded until the backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x * self.scale
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x) + self.head(x.square())


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_state_dict_keeps_the_dtype_of_the_model(combination):
    """State dicts are exact before a forward, before its backward, and after a load."""
    model = wrapped(Shared, combination, mixed_precision=BF16)
    expected = make(Shared).state_dict()
    assert_same(model.state_dict(), expected, "the state before a forward")
    out = model(floats(dist.get_rank()))
    assert_same(model.state_dict(), expected, "the state before the backward")
    loss_of(out).backward()
    others = {name: value + 1 for name, value in expected.items()}
    model.load_state_dict(others)
    assert_same(model.state_dict(), others, "the loaded state")


# --- micro-batches --------------------------------------------------------------------------------

MICRO = 16
HYBRIDS = [("hybrid_shard", "c10d"), ("hybrid_shard_zero2", "shm"), ("hybrid_full", "c10d")]


def micro_batch(model, rank, step, dtype=torch.float32):
    """One backward: after one forward, or after two."""
    steps = [step, step + MICRO] if step % 5 == 4 else [step]
    sum(loss_of(model(floats(rank, each).to(dtype))) for each in steps).backward()


def own_sums(compute, rank):
    """One rank's sums of gradients after each micro-batch, in float32, by a plain, cast copy."""
    low, found = make(Shared).to(compute), []
    for step in range(MICRO):
        low.zero_grad()
        micro_batch(low, rank, step, compute)
        grads = {name: param.grad.float() for name, param in low.named_parameters()}
        found.append({name: found[-1][name] + g for name, g in grads.items()} if found else grads)
    return found


def dict_of_grads(model):
    return {name: param.grad for name, param in model.named_parameters()}


def sum_micro_batches(name, combination, **options):
    """Within no_sync() each rank's .grad is exactly the float32 sum; the ranks' mean is that of
    these sums, each cast once."""
    rank, policy = dist.get_rank(), POLICIES[name]
    compute = policy.param_dtype or torch.float32
    wire = torch.float32 if combination[0] == "no_shard" else policy.reduce_dtype or compute
    sums = [own_sums(compute, each) for each in range(dist.get_world_size())]
    model = wrapped(Shared, combination, mixed_precision=policy, **options)
    with model.no_sync():
        for step, expected in enumerate(sums[rank][:-1]):
            micro_batch(model, rank, step)
            ours = dict_of_grads(model)
            assert_same(ours, expected, f"the gradient after micro-batch {step}")
            full = {name: zshard.full_tensor(grad) for name, grad in ours.items()}
            assert_same(full, expected, f"its full tensor after micro-batch {step}")
    micro_batch(model, rank, MICRO - 1)
    means = {name: summed([each[-1][name].to(wire) for each in sums]) for name in sums[0][-1]}
    assert_same(all_grads(model), means, "the mean")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16, reduced in fp32", "fp32, reduced in bf16"])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_micro_batches_are_summed_in_the_dtype_of_the_parameters(combination, name):
    sum_micro_batches(name, combination)


@pytest.mark.parametrize("combination", HYBRIDS)
@on_ranks(4)
def test_micro_batches_of_hybrid_strategies(combination):
    sum_micro_batches("bf16", combination, device_mesh=mesh_of(2, 2))


@pytest.mark.parametrize("wire", [None, "bf16"])
@on_ranks(2)
def test_micro_batches_over_hosts(wire):
    with hosts_of(1, 1) as group:
        options = {"process_group": group, "wire": wire}
        sum_micro_batches("bf16", ("full_shard", "hosts"), **options)


@on_ranks(2)
def test_micro_batches_of_an_offloaded_model(tmp_path):
    offload = zshard.Offload(directory=str(tmp_path), grads=True)
    sum_micro_batches("bf16", ("full_shard", "shm"), offload=offload)


@pytest.mark.parametrize("reduced", [None, torch.float32])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_micro_batches_of_a_bfloat16_model(combination, reduced):
    """A bfloat16 model has the bits that it has without zshard."""
    rank, plain = dist.get_rank(), make(Shared).bfloat16()
    policy = MixedPrecision(reduce_dtype=reduced)
    model = wrapped(lambda: make(Shared).bfloat16(), combination, mixed_precision=policy)
    plain.load_state_dict(model.state_dict())
    for step in range(MICRO):
        for net in (plain, model):
            with getattr(net, "no_sync", contextlib.nullcontext)():
                micro_batch(net, rank, step, torch.bfloat16)
        assert_same(dict_of_grads(model), dict_of_grads(plain), f"the gradient after {step}")


@pytest.mark.parametrize("combination", SHARDED)
@pytest.mark.parametrize("order", [("linear", "norm"), ("norm", "linear")])
@on_ranks(2)
def test_parameters_that_keep_their_dtype_send_it(order, combination):
    """Rank 0 alone has gradients: only the linear layer's sums are values of bfloat16."""
    layers = {"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH)}
    build = lambda: nn.Sequential(OrderedDict((name, layers[name]) for name in order))  # noqa: E731
    model = wrapped(build, combination, mixed_precision=POLICIES["fp32, reduced in bf16"])
    (model(floats(0)).pow(3).sum() * (dist.get_rank() == 0)).backward()
    sums = all_grads(model)
    rounded = {name: bool((each == each.bfloat16().float()).all()) for name, each in sums.items()}
    assert rounded["linear.weight"] and not rounded["norm.weight"]


@on_ranks(2)
def test_units_have_their_own_policies():
    """A float32 unit within a bfloat16 model."""

    def forward(model, x):
        y = model.block(x)
        z = model.exact(y.float())
        model.dtypes = y.dtype, z.dtype
        return z

    exact = FSDP(nn.Linear(WIDTH, WIDTH), mixed_precision=MixedPrecision())
    model = FSDP(Parts(forward, block=Block(WIDTH), exact=exact), mixed_precision=BF16)
    loss_of(model(floats(0))).backward()
    assert model.dtypes == (torch.bfloat16, torch.float32)
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_full_buffers_and_buckets_use_the_low_dtype():
    held = []
    for policy in (None, BF16):
        layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        model = FSDP(layers, mixed_precision=policy, transport="c10d")
        for _ in range(2):
            model(torch.randn(4, 256)).float().square().sum().backward()
            model.zero_grad()
        held.append(model.memory())
    full, low = held
    assert 0.45 < low["slots"] / full["slots"] < 0.55
    assert 0.45 < low["buckets"] / full["buckets"] < 0.55
    assert low["grads"] == full["grads"]
    assert 1.45 < low["shards"] / full["shards"] < 1.55  # in addition to the shards, a cast copy


def test_invalid_policies_are_refused():
    def sharded(policy):
        return lambda: FSDP(make(Stack), mixed_precision=policy)

    keeps = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    integers = (sharded(MixedPrecision(torch.int8)), ValueError, "param_dtype must be one of")
    low = (sharded(keeps), NotImplementedError, "keep_low_precision_grads")
    all_refused({"integers": integers, "low gradients": low})
