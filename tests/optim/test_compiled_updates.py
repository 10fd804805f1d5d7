"""Updates that torch.compile compiles per parameter, and library kernels.

An elementwise one trains as on the plain model; any other is refused with a remedy for optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import differences
from models import COMBINATIONS, make, wrapped
from nursery import fork_ranks
from scenarios import floats, message_of
from spawn import on_ranks
from torch import Tensor, nn

from zshard import FSDP, ShardError


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(9, 600), nn.Tanh(), nn.Linear(600, 2))


def elementwise(param: Tensor, grad: Tensor, momentum: Tensor) -> None:
    momentum.lerp_(grad, 0.1)
    param.sub_(momentum.sign() * 0.01)


def by_norm(param: Tensor, grad: Tensor, momentum: Tensor) -> None:
    param.sub_(grad / grad.norm())


class PerParameter(torch.optim.Optimizer):
    """An optimizer in torchao's style: one parameter at a time."""

    def __init__(self, params: Any, update: Callable[..., None]) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param].setdefault("momentum", torch.zeros_like(param))
                self.update(param, param.grad, state)


def train(model: Any, optimizer: torch.optim.Optimizer, averages: bool) -> Any:
    for step in range(3):
        optimizer.zero_grad()
        model(floats(dist.get_rank(), step)).square().mean().backward()
        for param in model.parameters() if averages else ():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
    return model.state_dict()


def compiled(update: Callable[..., None], **options: Any) -> Callable[..., None]:
    return torch.compile(update, backend="eager", **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_compiled_elementwise_update_trains(combination):
    model, plain = wrapped(Wide, combination), make(Wide)
    update = compiled(elementwise)
    ours = train(model, PerParameter(model.parameters(), update), False)
    assert (
        differences(ours, train(plain, PerParameter(plain.parameters(), elementwise), True)) == []
    )


@pytest.mark.parametrize("transport", ("shm", "c10d"))
@on_ranks(2)
def test_compiled_update_with_a_norm_is_refused(transport):
    model = wrapped(Wide, ("full_shard", transport))
    update = compiled(by_norm)
    said = message_of(
        lambda: train(model, PerParameter(model.parameters(), update), False), ShardError
    )
    assert "norm()" in said and "elementwise one" in said and "no_shard" in said


def compiled_before() -> None:
    """Functions that were compiled before the process's first FSDP(...)."""
    dist.init_process_group("gloo")
    loose, strict = compiled(elementwise), compiled(elementwise, fullgraph=True)
    plain = make(Wide)
    train(plain, PerParameter(plain.parameters(), loose), True)
    for update in (loose, strict):
        model = wrapped(Wide, ("full_shard", "c10d"))
        ours = train(model, PerParameter(model.parameters(), update), False)
        assert differences(ours, plain.state_dict()) == []


def test_functions_compiled_before_sharding():
    fork_ranks(compiled_before, 2, check=True)


def with_bitsandbytes(
    combination: tuple[str, str], name: str, options: dict[str, Any]
) -> list[str]:
    import bitsandbytes

    kind = getattr(bitsandbytes.optim, name)
    model, plain = wrapped(Wide, combination), make(Wide)
    ours = train(model, kind(model.parameters(), **options), False)
    return differences(ours, train(plain, kind(plain.parameters(), **options), True))


BNB = ("AdamW", "PagedAdamW32bit", "Lion", "SGD", "RMSprop", "Adagrad", "AdEMAMix")


@pytest.mark.parametrize("name", BNB)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_32_bit_optimizers_of_bitsandbytes_train(pool2, combination, name):
    pytest.importorskip("bitsandbytes", reason="needs zshard[trainers]: make test-trainers")
    options = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    assert pool2.run(with_bitsandbytes, combination, name, options) == [[], []]


class Kernel:
    """A library's operation, as torch passes it to the guard."""

    _qualified_op_name = "bitsandbytes::optimizer_update_32bit"
    __name__ = "optimizer_update_32bit"

    def __call__(self, *args: Any) -> Any:
        if torch.overrides.has_torch_function(args[1:]):
            return torch.overrides.handle_torch_function(self, args[1:], *args)
        return args[2].sub_(args[1], alpha=0.1)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_library_kernel_gets_matching_shards(combination):
    def update(param: Tensor, grad: Tensor, momentum: Tensor) -> None:
        Kernel()("sgd", grad, param, momentum)

    model, plain = wrapped(Wide, combination), make(Wide)
    ours = train(model, PerParameter(model.parameters(), update), False)
    other = model[0].bias if combination[0] != "no_shard" else None
    if other is not None:
        message_of(lambda: Kernel()("sgd", other, model[0].weight), ShardError)
    assert differences(ours, train(plain, PerParameter(plain.parameters(), update), True)) == []


@pytest.mark.parametrize("strategy", ("full_shard", "no_shard"))
@on_ranks(2)
def test_sparse_adam_is_refused_by_name(strategy):
    model = FSDP(nn.Embedding(11, 4, sparse=True), strategy=strategy)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer = torch.optim.SparseAdam(model.parameters())
    said = message_of(optimizer.step, NotImplementedError)
    assert "SparseAdam needs sparse gradients" in said and "torch.optim.Adagrad" in said
