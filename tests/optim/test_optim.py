"""zshard.AdamW, Adam and SGD against torch.optim: results, and when a plan must be rebuilt.

The reference is torch's own: SGD must be bit-identical to torch.optim.SGD, Adam and AdamW to
torch's fused step, and within 3e-7 of its default step, whose square root is less exact.
"""

import os
import subprocess
import sys

import pytest
import torch
from compare import assert_same
from optim_cases import (
    IDS,
    PAIRS,
    assert_same_bits,
    give_grads,
    make_params,
    reference,
    state_tensors,
    train,
)
from torch import nn

import zshard


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bit_identical_to_torch(ours, torchs, options, dtype):
    mine, theirs = make_params(dtype), make_params(dtype)
    if torchs is not torch.optim.SGD:  # the scalar tail of torch's loop may round differently
        mine, theirs = mine[4:6], theirs[4:6]
        mine[0], theirs[0] = (
            nn.Parameter(p.detach()[:128, :64].clone()) for p in (mine[0], theirs[0])
        )
    a, b = ours(mine, **options), reference(torchs, theirs, **options)
    train([(a, mine), (b, theirs)])
    assert_same_bits(mine, theirs)
    names = [name for name in b.state[theirs[0]] if b.state[theirs[0]][name] is not None]
    assert list(a.state[mine[0]]) == names
    assert_same_bits(state_tensors(a, mine, names), state_tensors(b, theirs, names))


@pytest.mark.parametrize(("ours", "torchs", "options"), PAIRS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_one_float_step_rounded(ours, torchs, options, dtype):
    """Parameter and state are converted to float, stepped by torch, and rounded back."""
    mine = make_params(dtype)
    optimizer = ours(mine, **options)
    floats = [nn.Parameter(p.detach().float()) for p in mine]
    oracle = torchs(floats, **options)
    for step in range(4):
        give_grads(mine, seed=1000 * step)
        for p, f in zip(mine, floats, strict=True):
            f.grad = p.grad.float()
        optimizer.step()
        oracle.step()
        for p, f in zip(mine, floats, strict=True):
            torch.testing.assert_close(p.float(), f, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            with torch.no_grad():
                f.copy_(p)
            for name, value in oracle.state[f].items():
                if name != "step" and value is not None:
                    value.copy_(optimizer.state[p][name])


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_every_instruction_set(isa):
    """Each instruction set's loops, in a process limited to it, beside torch with the same
    limit."""
    tests = "test_bit_identical_to_torch or test_half_precision"
    capability = {"base": "default"}.get(isa, isa)
    env = {**os.environ, "ZSHARD_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        tests,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_threads_do_not_change_bits():
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params = make_params(sizes=[(300_001,), (7,), (70_000,)])
        train([(zshard.AdamW(params), params)], steps=3)
        results.append(params)
    torch.set_num_threads(before)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_neighbors_in_a_flat_buffer_stay_separate():
    """Shards with and without gaps, some without gradients, equal separate tensors."""
    flat = torch.randn(4096)
    pieces = [(0, 100), (100, 300), (304, 304), (304, 1000), (1010, 1011), (2048, 4096)]
    mine = [nn.Parameter(flat[a:b].unsqueeze(1)) for a, b in pieces]
    theirs = [nn.Parameter(flat[a:b].clone().unsqueeze(1)) for a, b in pieces]
    gaps = torch.cat([flat[300:304], flat[1000:1010], flat[1011:2048]])
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    for step in range(6):
        give_grads(mine, theirs, seed=100 * step)
        mine[step].grad = theirs[step].grad = None
        a.step()
        b.step()
    assert_same_bits(mine, theirs)
    after = torch.cat([flat[300:304], flat[1000:1010], flat[1011:2048]])
    assert_same(after, gaps, "what lies between the slices")


def test_state_is_adjacent_like_the_parameters():
    flat = torch.randn(1000)
    params = [nn.Parameter(flat[:300]), nn.Parameter(flat[304:500]), nn.Parameter(flat[500:])]
    optimizer = zshard.AdamW(params)
    train([(optimizer, params)], steps=1)
    for name in ("exp_avg", "exp_avg_sq"):
        tensors = state_tensors(optimizer, params, [name])
        offsets = [t.data_ptr() - tensors[0].data_ptr() for t in tensors]
        assert offsets == [p.data_ptr() - params[0].data_ptr() for p in params]


# --- changing parameters -----------------------------------------------------------------------


def test_parameters_without_gradients_stay_unchanged():
    params = make_params()
    optimizer = zshard.AdamW(params)
    give_grads(params)
    params[0].grad = None
    before = params[0].detach().clone()
    optimizer.step()
    assert_same(params[0], before, "the parameter without a gradient")
    assert params[0] not in optimizer.state
    assert [optimizer.state[p]["step"].item() for p in params[1:]] == [1.0] * (len(params) - 1)


def test_late_gradients():
    mine, theirs = make_params(), make_params()
    a, b = (
        zshard.SGD(mine, 0.1, momentum=0.9, dampening=0.5),
        torch.optim.SGD(theirs, 0.1, 0.9, 0.5),
    )
    for step in range(5):
        give_grads(mine, theirs, seed=100 * step)
        for i in range(len(mine) - step):
            mine[-1 - i].grad = theirs[-1 - i].grad = None if i >= step + 2 else mine[-1 - i].grad
        a.step()
        b.step()
    assert_same_bits(mine, theirs)


def test_step_counts_are_per_parameter():
    """Different step counts give different bias corrections, in one call."""
    mine, theirs = make_params(sizes=[(64,)] * 4), make_params(sizes=[(64,)] * 4)
    a, b = zshard.AdamW(mine), torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        give_grads(mine, theirs, seed=100 * step)
        for i in range(step):
            mine[i].grad = theirs[i].grad = None
        a.step()
        b.step()
    assert_same_bits(mine, theirs)
    assert [a.state[p]["step"].item() for p in mine] == [1.0, 2.0, 3.0, 4.0]


def test_add_param_group_and_group_options():
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine[:3], 0.1, momentum=0.9), torch.optim.SGD(theirs[:3], 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    a.add_param_group({"params": mine[3:], "lr": 0.5, "momentum": 0.1})
    b.add_param_group({"params": theirs[3:], "lr": 0.5, "momentum": 0.1})
    train([(a, mine), (b, theirs)], steps=3, start=2)
    assert_same_bits(mine, theirs)


def test_replaced_parameter_list():
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    a.param_groups[0]["params"], b.param_groups[0]["params"] = mine[2:], theirs[2:]
    train([(a, mine), (b, theirs)], steps=2, start=2)
    assert_same_bits(mine, theirs)


def test_moved_memory_is_detected():
    """`p.data = ...` for a parameter and for its state, between steps."""
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    mine[4].data = mine[4].data.clone()
    buffer = a.state[mine[4]]["momentum_buffer"]
    buffer.data = buffer.data.clone()
    train([(a, mine), (b, theirs)], steps=2, start=2)
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("how", ["tensor", "entry", "clear", "delete"])
def test_replaced_state_is_detected(how):
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1, momentum=0.9), torch.optim.SGD(theirs, 0.1, momentum=0.9)
    train([(a, mine), (b, theirs)], steps=2)
    for optimizer, params in ((a, mine), (b, theirs)):
        p, old = params[4], optimizer.state[params[4]]["momentum_buffer"]
        if how == "tensor":
            optimizer.state[p]["momentum_buffer"] = old * 2
        elif how == "entry":
            optimizer.state[p] = {"momentum_buffer": old * 3}
        elif how == "clear":
            optimizer.state.clear()
        else:
            del optimizer.state[p]
    train([(a, mine), (b, theirs)], steps=2, start=2)
    assert_same_bits(mine, theirs)


def test_options_changed_between_steps():
    """A scheduler's lr, and amsgrad and momentum turned on: state that was not needed is
    created."""
    mine, theirs = make_params(), make_params()
    a, b = zshard.SGD(mine, 0.1), torch.optim.SGD(theirs, 0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (a, b)]
    for step in range(4):
        train([(a, mine), (b, theirs)], steps=1, start=step)
        for schedule in schedules:
            schedule.step()
        a.param_groups[0]["momentum"] = b.param_groups[0]["momentum"] = 0.9 if step else 0
    assert_same_bits(mine, theirs)

    params = make_params()
    adam = zshard.AdamW(params)
    train([(adam, params)], steps=1)
    adam.param_groups[0]["amsgrad"] = True
    train([(adam, params)], steps=1, start=1)
    for p in params:
        assert "max_exp_avg_sq" in adam.state[p]


def test_lr_and_betas_as_tensors():
    mine, theirs = make_params(), make_params()
    options = {"lr": torch.tensor(0.125), "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    a, b = zshard.AdamW(mine, **options), zshard.AdamW(theirs, lr=0.125, betas=(0.5, 0.75))
    train([(a, mine), (b, theirs)])
    assert_same_bits(mine, theirs)
