"""zshard.EMA: its averages have the bits of torch's under any strategy, and an evaluation with
them leaves no trace in the model."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, COMBINATIONS, Dtypes, loss_of, make, wrapped
from nursery import fork_ranks
from offloaded import KINDS, to
from offloaded import Wide as WideStack
from offloaded import steps as few_steps
from optim_states import HYBRID
from scenario import sharded
from scenarios import Stack, Wide, floats, learn, whole
from spawn import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import zshard
from zshard import EMA, FSDP, MixedPrecision

STEPS = 4
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


def torchs(model, decay):
    """Return torch's average of a plain model's weights."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def trained(model, case, ema, then):
    """Train, and average after each step; in between, a forward may leave units unsharded."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = case.batch(step, dist.get_rank())
        loss_of(model(batch)).backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(batch)
        model.train()
        ema.update()
        then()


def check_average_of(name, model, decay=0.9):
    """Train; fail unless EMA's is torch's average of the same weights, and the model is left alone."""
    plain = make(CASES[name].make)
    ema, theirs = EMA(model, decay), torchs(plain, decay)

    def follow():
        plain.load_state_dict(model.state_dict())
        theirs.update_parameters(plain)

    trained(model, CASES[name], ema, follow)
    before = whole(model)
    assert_same(ema.state_dict(), theirs.module.state_dict(), "the average")
    assert_same(model.state_dict(), before, "the model")


# --- the averages ---------------------------------------------------------------------------------


@pytest.mark.sampled(9)
@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("decay", [0.999, 0.3])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dtypes"])
@on_ranks(2, 3)
def test_bits_of_torchs_average(name, combination, decay):
    check_average_of(name, sharded(name, combination), decay)


@pytest.mark.parametrize("way", HYBRID)
@on_ranks(4)
def test_hybrid_strategies(way):
    check_average_of("net", sharded("net", way))


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_averages_of_each_dtype(combination):
    """Averages of bfloat16 are float32, of float64 float64, each pulled towards the rounded
    parameter."""
    model = wrapped(Dtypes, combination)
    ema, expected = EMA(model, (0.9, 0.5)), {}

    def follow():
        for name, value in zshard.whole_named_parameters(model):
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            for decay in ema.decays:
                expected.setdefault((name, decay), value.clone()).lerp_(value, 1 - decay)

    trained(model, CASES["dtypes"], ema, follow)
    ours = {
        (name, decay): zshard.full_tensor(value)
        for decay, averages in zip(ema.decays, ema.averages, strict=True)
        for name, value in zip(ema.params, averages, strict=True)
    }
    assert_same(ours, {key: expected[key] for key in ours}, "the averages")
    rounded = {name: ours[name, 0.5].to(p.dtype) for name, p in model.named_parameters()}
    assert_same(ema.state_dict(0.5), rounded, "the average as a model")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_mixed_precision(combination):
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    check_average_of("mlp", wrapped(CASES["mlp"].make, combination, mixed_precision=policy))


def special_values():
    """Return pairs of numbers: usual, subnormal, infinite, NaN."""
    kinds = [0.0, -0.0, 1.0, -3.5, 1e-40, -3e-45, 1.2e-38, 3e38, -3e38, float("inf"), -float("inf")]
    ends = torch.tensor([(a, b) for a in [*kinds, float("nan")] for b in [*kinds, float("nan")]])
    usual = torch.randn(5001, 2, generator=torch.Generator().manual_seed(0))
    return torch.cat([ends, usual * torch.exp(9 * usual.flip(1))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.9999, 0.6, 0.5, 0.4, 0.01])
def test_special_values(dtype, decay):
    wide = torch.promote_types(dtype, torch.float32)
    start, end = (values.contiguous() for values in special_values().to(wide).unbind(1))
    end = end.to(dtype)
    model = FSDP(nn.Linear(len(end), 1, bias=False).to(dtype))
    ema = EMA(model, decay)
    for values in (start.to(dtype), end):
        with torch.no_grad():
            model.weight.copy_(values)
        ema.update()
    expected = start.to(dtype).to(wide).lerp_(end.to(wide), 1 - decay)
    nan = expected.isnan()
    ours = zshard.to_local(ema.averages[0][0])[0]
    assert torch.equal(nan, ours.isnan()) and bool(nan.any()) and bool((~nan).any())
    assert_same(ours[~nan], expected[~nan], "the averages")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_other_instruction_sets(isa):
    """A process chooses them with its first loop, for torch and for zshard."""
    env = {"ATEN_CPU_CAPABILITY": isa}
    fork_ranks(all_special_values, 1, isa, env=env, check=True, alone=True)


def all_special_values(isa):
    chosen = torch.backends.cpu.get_cpu_capability().lower()
    assert (chosen, zshard.available_features()["loops"]) == (isa, isa.replace("default", "base"))
    for dtype in (torch.float32, torch.bfloat16):
        for decay in (0.999, 0.2):
            test_special_values(dtype, decay)


def test_warmup_and_every():
    """The weights are those of the formula; calls in between count, and change nothing."""
    model = FSDP(nn.Linear(2, 1, bias=False))
    ema, expected = EMA(model, 0.5, every=3, warmup=True), None
    for step in range(30):
        with torch.no_grad():
            model.weight.fill_(step * 0.37)
        ema.update()
        n = ema.updates - 1
        if step % 3 == 2:
            value = model.weight.detach().clone()
            expected = value if n == 0 else expected.lerp(value, 1 - min(0.5, (1 + n) / (10 + n)))
        if expected is not None:
            assert_same(ema.averages[0][0], expected, f"the average after step {step}")
    assert (ema.calls, ema.updates) == (30, 10)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_an_average_takes_one_shard(combination):
    model = wrapped(Stack, combination)
    shards = [value.numel() for value in model.parameters()]
    for averages in EMA(model, (0.9, 0.99, 0.999)).averages:
        assert [value.numel() for value in averages] == shards


# --- evaluation -----------------------------------------------------------------------------------


def built(build, combination):
    model = wrapped(build, combination)
    return model, torch.optim.SGD(model.parameters(), 0.1), EMA(model, 0.9)


def evaluate(model):
    with torch.no_grad():
        return model(floats(9)).clone()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_evaluations_leave_no_trace(combination):
    """Evaluations at each place of a step: they have the averaged plain model's outputs."""
    models = [wrapped(Stack, combination) for _ in range(2)]
    emas = [EMA(model, 0.9) for model in models]
    optimizers = [zshard.AdamW(model.parameters(), 0.01) for model in models]
    plain = make(Stack)

    def look():
        with emas[0].swapped():
            outputs = evaluate(models[0]), whole(models[0])
        plain.load_state_dict(emas[0].state_dict())
        torch.testing.assert_close(outputs[0], evaluate(plain), rtol=1e-5, atol=1e-6)
        assert_same(outputs[1], plain.state_dict(), "the state dict within swapped()")

    for step in range(STEPS):
        for model, ema, optimizer in zip(models, emas, optimizers, strict=True):
            seen = look if model is models[0] else lambda: None
            optimizer.zero_grad()
            seen()
            loss = loss_of(model(floats(dist.get_rank(), step)))
            seen()
            loss.backward()
            seen()
            model.clip_grad_norm_(0.1)
            seen()
            optimizer.step()
            ema.update()
        assert_same(models[0].state_dict(), models[1].state_dict(), "the model")
    assert_same(emas[0].state_dict(), emas[1].state_dict(), "the average")


@pytest.mark.parametrize("way", HYBRID)
@on_ranks(4)
def test_evaluations_between_forward_and_backward(way):
    """In hybrid groups a backward reads shards at once, or parameters that the forward has kept."""
    states, case = [], CASES["net"]
    for swaps in (False, True):
        model = sharded("net", way)
        optimizer, ema = torch.optim.SGD(model.parameters(), 0.1), EMA(model, 0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model(case.batch(step, dist.get_rank())))
            if swaps:
                with ema.swapped(), torch.no_grad():
                    model(case.batch(0, 0))
            loss.backward()
            optimizer.step()
            ema.update()
        states.append(whole(model))
    assert_same(*states, "the model")


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_what_an_evaluation_leaves_unsharded_is_resharded(combination):
    """A forward with gradients keeps parameters for a backward that never comes."""
    model, optimizer, ema = built(Wide, combination)
    learn(model, optimizer, 0)
    ema.update()
    before = whole(model)
    for leaves in (lambda: model(floats(0)), lambda: FSDP.unshard(model)):
        with ema.swapped():
            leaves()
        assert_same(whole(model), before, "the model after swapped()")


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[1] == "shm"])
@on_ranks(2)
def test_rank_0_evaluates_alone(combination):
    """Rank 0 evaluates several times; the others leave the context at once and train on."""
    model, optimizer, ema = built(Wide, combination)
    plain = make(Wide)
    for step in range(STEPS):
        learn(model, optimizer, step)
        ema.update()
        plain.load_state_dict(ema.state_dict())
        with ema.swapped():
            for _ in range(3 if dist.get_rank() == 0 else 0):
                torch.testing.assert_close(evaluate(model), evaluate(plain), rtol=1e-5, atol=1e-6)
    assert ema.updates == STEPS


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(9, 9), nn.BatchNorm1d(9))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_buffers_are_the_models(combination):
    """update_bn() in the context gives the average its own statistics, and the model keeps its."""
    model, optimizer, ema = built(Normed, combination)
    plain = make(Normed)
    for step in range(STEPS):
        learn(model, optimizer, step)
        ema.update()
    before, batches = copy.deepcopy(dict(model.named_buffers())), [floats(7), floats(8)]
    plain.load_state_dict(ema.state_dict())
    assert_same(dict(plain.named_buffers()), before, "buffers of the average")
    update_bn(batches, plain)
    with ema.swapped():
        update_bn(batches, model)
        torch.testing.assert_close(whole(model), plain.state_dict())
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert_same(dict(model.named_buffers()), before, "the model's buffers")


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_an_exception_restores_the_parameters(combination, who):
    """Some ranks raise within the context; all continue with their own weights."""
    model, optimizer, ema = built(Stack, combination)
    learn(model, optimizer, 0)
    ema.update()
    learn(model, optimizer, 1)
    before = whole(model)
    with contextlib.suppress(LookupError), ema.swapped():
        evaluate(model)
        if dist.get_rank() in who:
            raise LookupError("no data")
    assert_same(model.state_dict(), before, "the model")
    learn(model, optimizer, 2)
    ema.update()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_offloaded(tmp_path, kind):
    """Also where an average is read from and written to the disk all the time."""
    what = KINDS[kind]
    model, plain = FSDP(make(WideStack), offload=to(tmp_path, **what)), make(WideStack)
    ema, theirs = EMA(model, (0.9, 0.99)), torchs(plain, 0.99)
    optimizer = zshard.AdamW(model.parameters(), 0.01)
    for _ in range(STEPS):
        few_steps(model, optimizer, 1)
        ema.update()
        plain.load_state_dict(model.state_dict())
        theirs.update_parameters(plain)
    before = whole(model)
    assert_same(ema.state_dict(0.99), theirs.module.state_dict(), "the average")
    assert_same(model.state_dict(), before, "the model")
