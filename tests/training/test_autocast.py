"""torch.autocast around several passes: each gather has its own casts.

Autocast keeps its casts of parameters until its context ends. The reference is a plain model that
drops them before each forward: equal to the bit where each forward has its own backward. At any time
only one unit's casts are alive.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import hosts_of, mesh_of
from models import COMBINATIONS, ddp, loss_of, make, wrapped
from scenarios import Grads, Stack, floats, mean_grads, near, whole_grads, wrong_grads
from spawn import on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zshard import FSDP

Run = Callable[[nn.Module, int], None]


def on(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled)


# --- what a script does within one context -----------------------------------------------------------


def evaluation_first(model: nn.Module, rank: int) -> None:
    with on():
        with torch.no_grad():
            model(floats(rank, 7))
        loss_of(model(floats(rank))).backward()


def inference_first(model: nn.Module, rank: int) -> None:
    with on():
        model.eval()
        with torch.inference_mode():
            model(floats(rank, 7, rows=2))
        model.train()
        loss_of(model(floats(rank))).backward()


def evaluation_between(model: nn.Module, rank: int) -> None:
    with on():
        output = model(floats(rank))
        with torch.no_grad():
            model(floats(rank, 7))
        loss_of(output).backward()


def micro_batches(model: nn.Module, rank: int) -> None:
    with on():
        for step in range(3):
            loss_of(model(floats(rank, step))).backward()


def backward_where_it_is_off(model: nn.Module, rank: int) -> None:
    with on():
        for step in range(3):
            loss = loss_of(model(floats(rank, step)))
            with on(False):
                loss.backward()


def two_forwards_one_backward(model: nn.Module, rank: int) -> None:
    with on():
        (loss_of(model(floats(rank))) + loss_of(model(floats(rank, 1)))).backward()


def two_forwards_two_backwards(model: nn.Module, rank: int) -> None:
    with on():
        for loss in [loss_of(model(floats(rank, step))) for step in range(2)]:
            loss.backward()


def a_forward_is_dropped(model: nn.Module, rank: int) -> None:
    with on():
        model(floats(rank, 7))
        loss_of(model(floats(rank))).backward()


def a_forward_raises(model: nn.Module, rank: int) -> None:
    with on():
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model.head(floats(rank)[:, :3])
        loss_of(model(floats(rank))).backward()


SCENARIOS: list[tuple[Run, bool]] = [
    (evaluation_first, True),
    (inference_first, True),
    (evaluation_between, True),
    (micro_batches, False),
    (backward_where_it_is_off, False),
    (two_forwards_one_backward, True),
    (two_forwards_two_backwards, False),
    (a_forward_is_dropped, True),
    (a_forward_raises, True),
]


def with_casts_of_its_own(run: Run) -> Run:
    """The scenario on a plain model that drops its casts before each forward."""

    def plain(model: nn.Module, rank: int) -> None:
        model.register_forward_pre_hook(lambda *_: torch.clear_autocast_cache())
        run(model, rank)

    return plain


def expected_grads(run: Run, strategy: str) -> Grads:
    """The means of the ranks' gradients; a model that is not sharded is as plain as DDP's."""
    grads = mean_grads(Stack, run if strategy == "no_shard" else with_casts_of_its_own(run))
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())
    return grads


def wrong(run: Run, exact: bool, model: nn.Module, strategy: str) -> list[str]:
    """The gradients that are not the mean of the ranks'."""
    expected = expected_grads(run, strategy)
    run(model, dist.get_rank())
    ours = whole_grads(model)
    if not exact:
        ours = {name: near(grad, expected[name]) for name, grad in ours.items()}
    return wrong_grads(ours, expected)


@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
@on_ranks(2)
def test_passes_in_one_context(run, exact):
    for each in COMBINATIONS:
        assert wrong(run, exact, wrapped(Stack, each), each[0]) == [], each


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("run", "exact"), SCENARIOS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_passes_in_one_context_on_two_hosts(run, exact, strategy):
    with hosts_of(1, 1) as group:
        model = FSDP(make(Stack), process_group=group, transport="hosts", strategy=strategy)
        assert "transport hosts" in model.summary()
        assert wrong(run, exact, model, strategy) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@pytest.mark.parametrize("run", [evaluation_first, micro_batches])
@on_ranks(4)
def test_passes_in_one_context_under_hybrid_strategies(run, strategy):
    exact = False
    model = FSDP(make(Stack), device_mesh=mesh_of(2, 2), strategy=strategy, transport="c10d")
    assert wrong(run, exact, model, strategy) == []


def trained(model: nn.Module, parameters: list[nn.Parameter]) -> list[float]:
    """Losses of training with an evaluation before each step, all of it in one context."""
    optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
    rank, losses = dist.get_rank(), []
    for step in range(4):
        with on():
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(loss_of(model(floats(rank, 50 + step))).item())
            loss = loss_of(model(floats(rank, step)))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


@on_ranks(2)
def test_training_with_evaluations_matches_ddp():
    combinations = COMBINATIONS
    plain = make(Stack)
    expected = trained(ddp(plain), list(plain.parameters()))
    for combination in combinations:
        model = wrapped(Stack, combination)
        losses = trained(model, list(model.parameters()))
        assert losses == expected, combination
        assert_same(model.state_dict(), plain.state_dict(), f"{combination}: the state")


# --- memory -------------------------------------------------------------------------------------------

SIDE = 24


class Living(TorchDispatchMode):
    """Counts casts of weights that are alive at each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[StorageWeakRef] = []
        self.made = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if cast and result.shape == (SIDE, SIDE):
            self.casts.append(StorageWeakRef(result.untyped_storage()))
            self.made += 1
        self.casts = [each for each in self.casts if not each.expired()]
        self.most = max(self.most, len(self.casts))
        return result


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "recomputed"])
@on_ranks(2)
def test_only_one_units_casts_are_alive(training, transport):
    """How many casts two passes in one context have made, and how many were alive at once."""
    combination = ("full_shard", transport)
    strategy, transport = combination
    model = FSDP(
        make(Deep), auto_wrap_policy={nn.Sequential}, strategy=strategy, transport=transport
    ).train(training)
    x = torch.randn(3, SIDE)
    with on(), Living() as living:
        for _ in range(2):
            if training:
                model(x).square().mean().backward()
            else:
                with torch.no_grad():
                    model(x)
        alive = sum(not each.expired() for each in living.casts)
    made = living.made
    most = max(living.most, alive)
    assert made >= 16, "each gather has casts of its own"
    assert most == 1
