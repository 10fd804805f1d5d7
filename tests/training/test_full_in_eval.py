"""FSDP1's FSDP_USE_FULL_PREC_IN_EVAL=1: a module in eval mode computes in full precision.

The one idea: the script runs under torch's FSDP1 as well, and every output, gradient and buffer has its
bits. What FSDP1 cannot do (a frozen encoder that gets bfloat16) is held against plain modules.

FSDP1 frees full-precision parameters in backward alone where they stay from forward to backward (the
outermost unit's, and with SHARD_GRAD_OP all), so its next evaluation has those of an earlier step. So it runs
with NO_SHARD, or with no parameters in the outermost unit.
"""

from __future__ import annotations

import contextlib
import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from compare import assert_same, differences
from models import COMBINATIONS, STRATEGIES, TRANSPORTS, loss_of, make
from scenarios import WIDTH, floats, message_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision

NAME = "FSDP_USE_FULL_PREC_IN_EVAL"
BF16, FP32 = torch.bfloat16, torch.float32


class Encoder(nn.Module):
    """With a batch norm, which keeps its dtype."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Units one after another, and parameters and a buffer of the outermost one."""

    def __init__(self):
        super().__init__()
        self.encoder, self.second = Encoder(), Encoder()
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.linspace(0.1, 1.7, WIDTH))
        self.seen = {}

    def forward(self, x):
        x = self.second(self.encoder(x)) * self.scale
        self.seen = {
            "x": x.dtype,
            "weight": self.head.weight.dtype,
            "scale": self.scale.dtype,
            "norm": self.encoder.norm.running_mean.dtype,
        }
        return self.head(x)


REFERENCES = {  # torch's strategy, and units that leave no stale parameters with it
    "no_shard": (torchs.ShardingStrategy.NO_SHARD, {Encoder}),
    "full_shard": (torchs.ShardingStrategy.FULL_SHARD, {Encoder, nn.Linear}),
}


@contextlib.contextmanager
def full_in_eval():
    os.environ[NAME] = "1"
    try:
        yield
    finally:
        del os.environ[NAME]


def precision(kind, **changes):
    values = {"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": BF16} | changes
    return kind(**values)


def ours(build=Net, combination=("full_shard", "shm"), units=frozenset({Encoder}), **changes):
    strategy, transport = combination
    with full_in_eval():
        return FSDP(
            make(build),
            strategy=strategy,
            transport=transport,
            auto_wrap_policy=units,
            mixed_precision=precision(MixedPrecision, **changes),
        )


def theirs(strategy, units, **changes):
    with full_in_eval():
        return torchs.FullyShardedDataParallel(
            make(Net),
            sharding_strategy=strategy,
            auto_wrap_policy=torchs.wrap.ModuleWrapPolicy(units),
            mixed_precision=precision(torchs.MixedPrecision, **changes),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )


def is_fsdp1(model):
    return isinstance(model, torchs.FullyShardedDataParallel)


def full_state(model):
    """The state dict, on all ranks; without the buffer, which FSDP1 saves in its earlier dtype."""
    full = contextlib.nullcontext()
    if is_fsdp1(model):
        kind = torchs.StateDictType.FULL_STATE_DICT
        full = torchs.FullyShardedDataParallel.state_dict_type(model, kind)
    with full:
        return {k: v.clone() for k, v in model.state_dict().items() if k != "scale"}


def script(model):
    """Training, evaluation between and within steps, backward in eval mode; all that comes out."""
    rank, found = dist.get_rank(), {}
    net = model.module if is_fsdp1(model) else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def forward(name, batch):
        output = model(floats(rank, batch))
        found[name] = output.detach().clone()
        found.update({f"{name}, {k}": torch.tensor(v.itemsize) for k, v in net.seen.items()})
        return output

    def evaluate(name):
        model.eval()
        with torch.no_grad():
            forward(name, 50)
        model.train()

    def step(name, batch, between=lambda name: None):
        optimizer.zero_grad()
        loss = loss_of(forward(name, batch))
        between(f"within {name}")
        loss.backward()
        optimizer.step()
        return loss

    evaluate("at first")
    step("step 1", 1)
    evaluate("after step 1")
    kept = step("step 2", 2, evaluate)  # its graph lives on, with the gradient nodes of bfloat16
    model.eval()
    step("in eval 1", 3)
    step("in eval 2", 4)
    model.train()
    del kept
    step("step 3", 5)
    evaluate("at last")
    return found | full_state(model)


def runs_as_fsdp1(reference, combinations=COMBINATIONS):
    strategy, units = REFERENCES[reference]
    expected = script(theirs(strategy, units))
    found = {
        c: differences(script(ours(combination=c, units=units)), expected) for c in combinations
    }
    return {c: names for c, names in found.items() if names}


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_output_gradient_and_buffer_is_fsdp1s(pool2, reference):
    assert pool2.run(runs_as_fsdp1, reference) == [{}, {}]


# --- a part in eval mode ----------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A frozen encoder in a model that trains; `again`: recomputed in backward, if it gets gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.encoder = nn.Linear(WIDTH, WIDTH), Encoder()
        self.last, self.head = Encoder(), nn.Linear(WIDTH, 3)
        self.again = False

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.encoder, x, use_reentrant=False) if self.again else self.encoder(x)
        return self.head(self.last(x))


def plain_step(parts, x):
    """What plain modules compute whose parts, but for the encoder, were cast to bfloat16."""
    x = parts.first(x.to(BF16))
    x = parts.encoder(x.float()).to(BF16)
    low = parts.last
    x = low.up(x)
    x = low.down(torch.tanh(low.norm(x.float()).to(BF16)))
    return parts.head(x)


def lowered(model):
    """A plain copy that computes in bfloat16 except for its encoder, and except for batch norms."""
    parts = copy.deepcopy(model)
    for module in (parts.first, parts.last.up, parts.last.down, parts.head):
        module.to(BF16)
    return parts


def trains_around_a_frozen_encoder(combination, casts, again):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = ours(Frozen, combination, cast_forward_inputs=casts)
    plain = make(Frozen)
    model.again = again
    model.encoder.eval(), plain.encoder.eval()
    sgd = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for step in range(3):
        sgd[0].zero_grad()
        output = model(floats(rank, step))
        loss_of(output).backward()
        sgd[0].step()
        grads = []
        for r in range(world):
            parts = lowered(plain)
            expected = plain_step(parts, floats(r, step))
            if r == rank:
                assert_same(output, expected, f"the output of step {step}")
            loss_of(expected).backward()
            grads.append([p.grad.float() for p in parts.parameters()])
            if r == rank:
                buffers = dict(parts.named_buffers())
        for param, *each in zip(plain.parameters(), *grads, strict=True):
            param.grad = sum(g / world for g in each)
        for name, buffer in plain.named_buffers():
            buffer.copy_(buffers[name])
        sgd[1].step()
    return differences(full_state(model), full_state(plain))


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_an_encoder_in_eval_mode_within_a_model_that_trains(pool2, casts, again):
    for combination in COMBINATIONS if again else (COMBINATIONS[0], ("zero1", "c10d")):
        found = pool2.run(trains_around_a_frozen_encoder, combination, casts, again)
        assert found == [[], []], combination


# --- gradients ----------------------------------------------------------------------------------------------


def grads_of(model):
    return {name: zshard.full_tensor(p.grad) for name, p in model.named_parameters()}


def reduced_in_bf16(combination):
    """Training has the bits that it has without the variable, and gradients in eval mode are plain ones."""
    rank, world, states = dist.get_rank(), dist.get_world_size(), []
    for build in (ours, without):
        model = build(combination=combination, reduce_dtype=None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(floats(rank, step))).backward()
            optimizer.step()
        states.append(full_state(model))
    found = differences(*states)
    model = ours(combination=combination, reduce_dtype=None).eval()
    loss_of(model(floats(rank))).backward()
    expected = None
    for r in range(world):
        plain = make(Net).eval()
        plain.scale.data = plain.scale.to(BF16).float()  # as under FSDP1, where that is for good
        loss_of(plain(floats(r))).backward()
        grads = [p.grad / world for p in plain.parameters()]
        expected = [a + b for a, b in zip(expected, grads, strict=True)] if expected else grads
    names = [name for name, _ in plain.named_parameters()]
    return found + differences(grads_of(model), dict(zip(names, expected, strict=True)))


def without(combination, **changes):
    """The same without the variable."""
    strategy, transport = combination
    given = precision(MixedPrecision, **changes)
    units = {"strategy": strategy, "transport": transport, "auto_wrap_policy": {Encoder}}
    return FSDP(make(Net), mixed_precision=given, **units)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_gradients_in_eval_mode_are_not_rounded_to_be_sent(pool2, combination):
    assert pool2.run(reduced_in_bf16, combination) == [[], []]


def backwards_of_their_own_forwards(combination):
    """The mode at the time of a backward does not matter, and forwards of either mode may wait for theirs."""
    rank = dist.get_rank()
    model, other = ours(combination=combination), ours(combination=combination)
    trained = loss_of(model(floats(rank, 1)))
    evaluated = loss_of(model.eval()(floats(rank, 2)))
    model.train()
    trained.backward()
    loss_of(other(floats(rank, 1))).backward()
    found = differences(grads_of(model), grads_of(other))
    evaluated.backward()
    loss_of(other.eval()(floats(rank, 2))).backward()
    found += differences(grads_of(model), grads_of(other))
    both = loss_of(model(floats(rank, 1))) + loss_of(model.eval()(floats(rank, 2)))
    text = message_of(both.backward, RuntimeError)
    found += [] if "call backward for each" in text else [text]
    for each in (model, other):  # goes on
        each.train().zero_grad()
        loss_of(each(floats(rank, 3))).backward()
    return found + differences(grads_of(model), grads_of(other))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_backward_is_in_the_dtype_of_its_forward(pool2, combination):
    assert pool2.run(backwards_of_their_own_forwards, combination) == [[], []]


# --- misuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param_dtype", [BF16, None])
def test_gradients_that_would_be_rounded_are_refused(pool2, param_dtype):
    assert pool2.run(backward_with_fp16_reduction, param_dtype) == [True, True]


def backward_with_fp16_reduction(param_dtype):
    model = ours(param_dtype=param_dtype, reduce_dtype=torch.float16).eval()
    if param_dtype is None:
        model.scale.data = model.scale.float()
    loss = loss_of(model(floats(dist.get_rank())))
    text = message_of(loss.backward, NotImplementedError)
    loss_of(model.train()(floats(dist.get_rank()))).backward()  # goes on
    return "reduce_dtype=torch.float32" in text


def full_parameters_by_hand(transport):
    rank = dist.get_rank()
    model = ours(combination=("full_shard", transport)).eval()
    with torch.no_grad():
        expected = model(floats(rank))
        with FSDP.summon_full_params(model):
            assert_same(model(floats(rank)), expected, "a forward within summon_full_params()")
        model.unshard()
        assert_same(model(floats(rank)), expected, "a forward after unshard()")
        texts = [message_of(lambda: model.train()(floats(rank)), RuntimeError)]
        model.reshard()
        model.unshard()
        texts.append(message_of(lambda: model.eval()(floats(rank)), RuntimeError))
        model.reshard()
        assert_same(model(floats(rank)), expected, "a forward after reshard()")
    loss = loss_of(model.train()(floats(rank)))
    with FSDP.summon_full_params(model):
        texts.append(message_of(loss.backward, RuntimeError))
    return texts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_that_are_full_in_the_other_dtype_are_refused(pool2, transport):
    for texts in pool2.run(full_parameters_by_hand, transport):
        assert "outside summon_full_params()" in texts[0] and "outside summon" in texts[2]
        assert "call reshard(), or eval() before unshard()" in texts[1]


def variable_on_one_rank():
    build = ours if dist.get_rank() == 0 else without
    return message_of(lambda: build(combination=("full_shard", "shm")), zshard.DivergenceError)


def test_the_variable_on_one_rank_alone_is_refused(pool2):
    for text in pool2.run(variable_on_one_rank):
        assert "full_in_eval=True" in text and "on rank 1" in text


# --- other ways to evaluate ----------------------------------------------------------------------------------


def evaluates_alone():
    """Over shm rank 0 evaluates by itself; then all train."""
    model = ours().eval()
    found = []
    if dist.get_rank() == 0:
        plain = make(Net).eval()
        plain.scale.data = plain.scale.to(BF16).float()
        with torch.no_grad():
            found += differences([model(floats(0)) for _ in range(3)], [plain(floats(0))] * 3)
    loss_of(model.train()(floats(dist.get_rank()))).backward()
    return found


def test_one_rank_evaluates_alone(pool2):
    assert pool2.run(evaluates_alone) == [[], []]


def uneven_batches(combination):
    model = ours(combination=combination)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with model.join(optimizer):
        for step in range(2 + dist.get_rank()):
            loss_of(model.train()(floats(0, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(floats(0, step))
            seen.append(model.seen["weight"])
    return set(seen) == {FP32}


@pytest.mark.parametrize("combination", [("full_shard", "c10d"), ("zero1", "c10d")])
def test_evaluation_within_join(pool2, combination):
    assert pool2.run(uneven_batches, combination) == [True, True]


def nested_by_hand():
    """A unit that was outermost has been evaluated before; its buffer follows the new outermost one."""
    with full_in_eval():
        inner = FSDP(make(Net), mixed_precision=precision(MixedPrecision))
        inner.eval()(floats(0))
        seen = [inner.seen["scale"]]
        inner.train()(floats(0))
        seen.append(inner.seen["scale"])
        outer = nn.Sequential(inner, nn.Linear(3, 3))
        model = FSDP(outer, mixed_precision=precision(MixedPrecision))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.eval()(floats(0))
        seen.append(each[0].seen["scale"])
        each.train()(floats(0))
        seen.append(each[0].seen["scale"])
    return seen


def test_buffers_of_units_that_are_nested_later_and_of_copies(pool2):
    assert pool2.run(nested_by_hand) == [[FP32, BF16] * 3] * 2


def test_in_a_world_of_one_and_not_for_fsdp2():
    model = ours().eval()
    model(floats(0))
    assert set(model.seen.values()) == {FP32}
    with full_in_eval():
        policy = zshard.MixedPrecisionPolicy(BF16)
        other = zshard.fully_shard(make(Encoder), mp_policy=policy).eval()
    assert other(floats(0)).dtype == BF16  # as torch's, which does not know the variable


# --- memory --------------------------------------------------------------------------------------------------


def predicted_and_measured(combination):
    found = []
    for build in (without, lambda combination, **changes: ours(combination=combination, **changes)):
        model = build(combination, reduce_dtype=FP32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        predicted = model.memory("predicted")
        for step in range(2):
            model.eval()
            with torch.no_grad():
                model(floats(0, step))
            loss_of(model.train()(floats(0, step))).backward()
            optimizer.step()
        found.append((predicted["slots"], model.memory("peak")["slots"]))
    return found


@pytest.mark.parametrize("strategy", [*STRATEGIES, "zero1"])
def test_memory_of_full_precision_gathers_is_predicted(pool2, strategy):
    for (low, low_peak), (full, full_peak) in pool2.run(predicted_and_measured, (strategy, "c10d")):
        assert low == low_peak and full == full_peak > low


def test_over_shm_full_precision_takes_no_memory(pool2):
    for (low, low_peak), (full, full_peak) in pool2.run(
        predicted_and_measured, ("full_shard", "shm")
    ):
        assert low == low_peak == full == full_peak == 0
