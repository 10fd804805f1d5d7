"""An integration adds to sharding through the registry, without changes to the core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenarios import message_of
from spawn import RankPool, on_ranks
from torch import Tensor, nn

import zshard
from zshard import FSDP, MixedPrecision
from zshard.units.extensions import EXTENSIONS, Extension, ParamRef


class Scaled(nn.Linear):
    """A library's layer: its weight has a scale that is not a parameter."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.scale = torch.tensor([scale])  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype
        return super().forward(x.to(self.weight.dtype)) * self.weight.scale


class Fake(Extension):
    """The extension that such a library needs."""

    def methods(self, original: type[nn.Module]) -> dict[str, Any]:
        return {"describe": lambda model: "sharded"} if issubclass(original, Scaled) else {}

    def check(self, name: str, ref: ParamRef) -> None:
        if self.tensors(ref.param) and not ref.param.scale:  # type: ignore[attr-defined]
            raise ValueError(f"parameter '{name}' has no scale")

    def keeps_dtype(self, ref: ParamRef) -> bool:
        return bool(self.tensors(ref.param))

    def tensors(self, param: Tensor) -> list[Tensor]:
        return [param.scale] if hasattr(param, "scale") else []

    def finish(self, model: nn.Module) -> None:
        model.finished = True


@pytest.fixture
def registered() -> Iterator[None]:
    EXTENSIONS.append(Fake())
    yield
    EXTENSIONS.pop()


@pytest.mark.usefixtures("registered")
def test_methods_dtypes_and_finish() -> None:
    model: Any = FSDP(Scaled(), mixed_precision=MixedPrecision(torch.bfloat16))
    assert model.describe() == "sharded" and model.finished
    model(torch.ones(1, 4))
    assert model.seen == torch.float32


@pytest.mark.usefixtures("registered")
def test_refused_parameter() -> None:
    assert message_of(lambda: FSDP(Scaled(0.0)), ValueError) == "parameter 'weight' has no scale"


def scale_of_a_weight() -> float:
    EXTENSIONS.append(Fake())
    try:
        model: Any = FSDP(Scaled(1.0 + dist.get_rank()))
        return float(model.weight.scale)
    finally:
        EXTENSIONS.pop()


def test_attached_tensors_come_from_rank_0(pool2: RankPool) -> None:
    assert pool2.run(scale_of_a_weight) == [1.0] * 2


@pytest.mark.parametrize(
    "given",
    [
        {"deterministic": ""},
        {"micro_batches": 0},
        {"nonfinite": ""},
        {"nonfinite": False},
        {"check_replicas": False},
        {"check_replicas": None},
    ],
    ids=str,
)
def test_an_argument_of_an_extra_that_is_empty_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|belong together"):
        FSDP(nn.Linear(2, 2), **given)


@on_ranks(2)
def test_an_argument_of_an_extra_on_one_rank_is_refused():
    given = {"check_replicas": 2} if dist.get_rank() else {}
    with pytest.raises(zshard.DivergenceError) as caught:
        FSDP(nn.Linear(8, 8), strategy="no_shard", **given)
    text = str(caught.value)
    assert "check_replicas is None on rank 0, but 2 on rank 1" in text
