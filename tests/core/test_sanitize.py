"""A short training run with AddressSanitizer and UndefinedBehaviorSanitizer in the core.

The sanitized core is another build (sanitized.py, as `make sanitize` makes it; the
usual one stays as it is), and its ranks run below the preloaded runtime. One run walks through what
training does: strategies, transports, optimizers, odd sizes, failures, models that die. Building it
the first time costs a minute, afterwards a second. `make sanitize` runs the whole suite this way.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from nursery import fork_ranks
from sanitized import SANITIZED, build
from spawn import run_ranks
from torch import nn

import zshard
from zshard import FSDP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first build, on a busy machine
    pytest.mark.skipif(
        os.environ.get("ZSHARD_SANITIZE", "0") != "0", reason="all of this run is sanitized"
    ),
]


@pytest.fixture(scope="module")
def environment():
    """Builds the sanitized package; the environment in which ranks use it."""
    try:
        return build()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def free_twice():
    """What the runtime must stop."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(100)))
    libc.free(block)
    libc.free(block)


@pytest.mark.thorough
def test_sanitizer_is_active(environment):
    (result,) = run_ranks(free_twice, 1, env=environment, check=False)
    assert result.returncode in (1, -signal.SIGABRT)
    assert "AddressSanitizer: attempting double-free" in result.stderr
    (core,) = SANITIZED.glob("zshard/_core.*.so")
    symbols = core.read_bytes()
    assert b"__asan_report_load8" in symbols and b"__ubsan_handle" in symbols


# --- the run --------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Sizes that cut nowhere evenly, a sparse gradient, a frozen, an unused, a 0-dim parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 3, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(13))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.fail = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).relu()
            if self.fail:
                raise ValueError("asked to")
        return self.head(x.double()) * self.gain


def train(strategy, transport):
    """Some steps; the loss after them."""
    torch.manual_seed(0)
    model = FSDP(Odd(), strategy=strategy, transport=transport)
    optimizers = [
        zshard.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        zshard.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9),
    ]
    tokens = torch.arange(10).view(2, 5)
    for step in range(6):
        optimizer = optimizers[step % 2]
        for _ in range(2):  # gradients accumulate
            (model(tokens).square().mean() + model(tokens).abs().mean()).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        try_to_fail(model, tokens)
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        return float(model(tokens).square().mean())


def try_to_fail(model, tokens):
    """A forward that raises, a model that cannot be wrapped, a parameter that cannot be used."""
    model.fail = True
    for broken in (lambda: model(tokens), lambda: FSDP(model), lambda: FSDP(Odd().to("meta"))):
        try:
            broken()
        except ValueError:
            continue
        raise AssertionError("nothing was raised")
    model.fail = False


def train_all():
    """The losses of all combinations, and where zshard came from."""
    losses = []
    for transport in ("shm", "c10d"):
        for strategy in ("full_shard", "shard_grad_op", "no_shard"):
            losses.append(train(strategy, transport))
            gc.collect()
    return losses, zshard.__file__


@pytest.mark.thorough
def test_training_is_clean(environment):
    plain = fork_ranks(train_all, 2, timeout=120, check=True)
    for result, usual in zip(
        run_ranks(train_all, 2, env=environment, timeout=240, check=False), plain, strict=True
    ):
        assert "AddressSanitizer" not in result.stderr, result.stderr
        assert "runtime error:" not in result.stderr, result.stderr
        assert result.returncode == 0, result.stderr
        losses, file = result.value
        assert Path(file).is_relative_to(SANITIZED)
        assert losses == usual.value[0], "not the bits of the usual build"
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
