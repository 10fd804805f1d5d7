"""zshard.AdamW, Adam and SGD against torch.optim: results, and when a plan must be rebuilt.

The reference is torch's own: SGD must be bit-identical to torch.optim.SGD, Adam and AdamW to
torch's fused step, and within 3e-7 of its default step, whose square root is less exact. A tensor's
tail is its last numel % 16 elements (float32 in AVX-512's vectors; 8 in AVX2's): torch's fused loop
steps them one by one, in code for which the compiler has chosen different multiply-adds.
"""

import copy
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
    """Each instruction set's loops, in a process limited to it, compared with torch under the same
    limit."""
    tests = "test_bit_identical_to_torch or test_half_precision"
    capability = {"base": "default"}.get(isa, isa)
    env = {**os.environ, "ZSHARD_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    options = ["-q", "-x", "-p", "no:cacheprovider", __file__, "-k", tests]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


# --- which of torch's implementations of Adam -----------------------------------------------------

WIDEST = 16  # float32 elements of the widest vector
SIZES = [*range(1, 50), 64, 1000, 1001, 4099, 70001]
OPTIONS = [{}, {"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}]
CLASSES = [(zshard.AdamW, torch.optim.AdamW), (zshard.Adam, torch.optim.Adam)]


EACH_CLASS = pytest.mark.parametrize(("ours", "torchs"), CLASSES, ids=["AdamW", "Adam"])
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=str)


def one_step_from_the_same(ours, torchs, size, options, **way):
    """Return (parameter, state) of both after a step from the state that `ours` has after three.

    way: torch's implementation, as an argument."""
    random = torch.Generator().manual_seed(size)
    mine = nn.Parameter(torch.randn(size, generator=random))
    optimizer = ours([mine], lr=1e-2, **options)
    for _ in range(3):
        mine.grad = torch.randn(size, generator=random)
        optimizer.step()
    other = nn.Parameter(mine.detach().clone())
    theirs = torchs([other], lr=1e-2, **way, **options)
    state = copy.deepcopy(optimizer.state_dict()["state"])  # else both would step the same moments
    theirs.load_state_dict({**theirs.state_dict(), "state": state})
    mine.grad = torch.randn(size, generator=random)
    other.grad = mine.grad.clone()
    optimizer.step()
    theirs.step()
    names = [name for name in optimizer.state[mine] if name != "step"]
    return [
        (param.detach(), {name: each.state[param][name] for name in names})
        for param, each in ((mine, optimizer), (other, theirs))
    ]


@EACH_OPTION
@EACH_CLASS
def test_all_but_the_tail_is_bit_identical_to_torchs_fused_step(ours, torchs, options):
    """Most elements of tails are equal; their moments never differ by more than a few roundings."""
    differ = total = 0
    for size in SIZES:
        (p, state), (q, other) = one_step_from_the_same(ours, torchs, size, options, fused=True)
        body = size - size % WIDEST
        assert_same(p[:body], q[:body], f"the parameter of {size}")
        torch.testing.assert_close(p[body:], q[body:], rtol=3e-7, atol=3e-8)
        for name, value in state.items():
            assert_same(value[:body], other[name][:body], f"{name} of {size}")
            torch.testing.assert_close(value[body:], other[name][body:], rtol=1e-6, atol=1e-9)
        differ += int((p[body:] != q[body:]).sum())
        total += size - body
    assert differ <= total // 4


@pytest.mark.parametrize("foreach", [True, False])
@EACH_OPTION
@EACH_CLASS
def test_unfused_steps_have_equal_moments_and_close_parameters(ours, torchs, options, foreach):
    for size in SIZES:
        way = {"foreach": foreach, "fused": False}
        (p, state), (q, other) = one_step_from_the_same(ours, torchs, size, options, **way)
        for name, value in state.items():
            assert_same(value, other[name], f"{name} of {size}")
        largest = torch.stack([p.abs(), q.abs()]).amax(0).clamp(min=1e-2)
        assert ((p - q).abs() <= 3e-7 * largest).all(), size


# --- memory and threads ---------------------------------------------------------------------------


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


# --- changes between steps ----------------------------------------------------------------------


def sgds(momentum=0.9, dampening=0.0):
    """Return zshard's and torch's SGD, with the parameters of each."""
    mine, theirs = make_params(), make_params()
    arguments = (0.1, momentum, dampening)
    return [(zshard.SGD(mine, *arguments), mine), (torch.optim.SGD(theirs, *arguments), theirs)]


def move(tensor):
    tensor.data = tensor.data.clone()


def momentum_of(optimizer, param):
    return optimizer.state[param]["momentum_buffer"]


CHANGES = {
    "fewer parameters": lambda o, params: o.param_groups[0].update(params=params[2:]),
    "a moved parameter": lambda o, params: move(params[4]),
    "moved state": lambda o, params: move(momentum_of(o, params[4])),
    "another tensor": lambda o, params: o.state[params[4]].update(
        momentum_buffer=momentum_of(o, params[4]) * 2
    ),
    "another entry": lambda o, params: o.state.update(
        {params[4]: {"momentum_buffer": momentum_of(o, params[4]) * 3}}
    ),
    "no state": lambda o, params: o.state.clear(),
    "no entry": lambda o, params: o.state.pop(params[4]),
    "another rate": lambda o, params: o.param_groups[0].update(lr=0.025),
    "another group": lambda o, params: o.add_param_group(
        {"params": make_params(seed=9), "lr": 0.5, "momentum": 0.1}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps_are_noticed(change):
    pairs = sgds()
    train(pairs, steps=2)
    for optimizer, params in pairs:
        CHANGES[change](optimizer, params)
    trained = [(o, [p for g in o.param_groups for p in g["params"]]) for o, _ in pairs]
    train(trained, steps=2, start=2)
    for (_, mine), (_, theirs) in (pairs, trained):
        assert_same_bits(mine, theirs)


def test_late_gradients():
    (a, mine), (b, theirs) = sgds(dampening=0.5)
    for step in range(5):
        give_grads(mine, theirs, seed=100 * step)
        for i in range(len(mine) - step):
            mine[-1 - i].grad = theirs[-1 - i].grad = None if i >= step + 2 else mine[-1 - i].grad
        a.step()
        b.step()
    assert_same_bits(mine, theirs)


def test_step_counts_are_per_parameter():
    """Different step counts give different bias corrections, in one call."""
    mine, theirs = make_params(sizes=[(64,)] * 5), make_params(sizes=[(64,)] * 5)
    a, b = zshard.AdamW(mine), torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        give_grads(mine, theirs, seed=100 * step)
        for i in (*range(step), 4):
            mine[i].grad = theirs[i].grad = None
        a.step()
        b.step()
    assert_same_bits(mine, theirs)
    assert [a.state[p]["step"].item() for p in mine[:4]] == [1.0, 2.0, 3.0, 4.0]
    assert mine[4] not in a.state


def test_options_that_need_state_may_be_turned_on():
    pairs = sgds(momentum=0.0)
    for step in range(3):
        train(pairs, steps=1, start=step)
        for optimizer, _ in pairs:
            optimizer.param_groups[0]["momentum"] = 0.9 if step else 0
    assert_same_bits(pairs[0][1], pairs[1][1])
    params = make_params()
    adam = zshard.AdamW(params)
    train([(adam, params)], steps=1)
    adam.param_groups[0]["amsgrad"] = True
    train([(adam, params)], steps=1, start=1)
    assert all("max_exp_avg_sq" in adam.state[p] for p in params)


def test_lr_and_betas_as_tensors():
    mine, theirs = make_params(), make_params()
    options = {"lr": torch.tensor(0.125), "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    a, b = zshard.AdamW(mine, **options), zshard.AdamW(theirs, lr=0.125, betas=(0.5, 0.75))
    train([(a, mine), (b, theirs)])
    assert_same_bits(mine, theirs)
