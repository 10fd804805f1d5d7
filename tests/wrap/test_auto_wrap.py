"""auto_wrap_policy="auto": the units that it finds, and the modules that it must not choose.

test_wrap_models.py has models of transformers: towers of blocks, stages, mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from unit_watch import uses_while_sharded

from zshard.wrap import UnitSpec, plan_units

Tensor = torch.Tensor


def names(units: list[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


def numbered(pattern: str, count: int) -> list[str]:
    return [pattern.replace("#", str(k)) for k in range(count)]


class Block(nn.Module):
    """A typical transformer block, with its MLP in a Sequential."""

    def __init__(self, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.mlp(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class OtherBlock(Block):
    """The same size, a different class."""


class OtherLinear(nn.Linear):
    """A linear layer of a different class."""


class Stack(nn.Module):
    """A list of modules that calls them in turn."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Parts(nn.Module):
    """Named submodules, called in the order of registration."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.order = list(parts)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def gpt(blocks: int = 6, vocabulary: int = 256, width: int = 16) -> nn.Module:
    return Parts(
        embed=nn.Embedding(vocabulary, width),
        blocks=Stack(*(Block(width, 4 * width) for _ in range(blocks))),
        norm=nn.LayerNorm(width),
        head=nn.Linear(width, vocabulary, bias=False),
    )


class Mixture(nn.Module):
    def __init__(self, experts: int = 8, width: int = 16) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            Residual(nn.Linear(width, 32), nn.Linear(32, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum((e(self.attention(x)) for e in self.experts), start=x)


def unet() -> nn.Module:
    """Blocks of one class under their own names, as in U-Nets."""
    return Parts(
        inc=nn.Linear(8, 8),
        down1=Residual(nn.Linear(8, 64), nn.Linear(64, 8)),
        down2=Residual(nn.Linear(8, 96), nn.Linear(96, 8)),
        up1=Residual(nn.Linear(8, 96), nn.Linear(96, 8)),
        up2=Residual(nn.Linear(8, 64), nn.Linear(64, 8)),
    )


def alternating(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.ReLU())))


IDS = torch.arange(6).reshape(2, 3)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "gpt": (gpt, IDS, ["embed", *numbered("blocks.layers.#", 6), "head", ""]),
    "blocks that are next to nothing are one unit": (
        lambda: gpt(2, 4096),
        IDS,
        ["embed", "blocks", "head", ""],
    ),
    "next to many blocks an embedding of one's size counts": (
        lambda: Parts(
            embed=nn.Embedding(17, 16), blocks=Stack(*(nn.Linear(16, 16) for _ in range(120)))
        ),
        IDS,
        ["embed", *numbered("blocks.layers.#", 120), ""],
    ),
    "two large blocks stay whole": (
        lambda: gpt(2, 16),
        IDS,
        ["embed", "blocks.layers.0", "blocks.layers.1", "head", ""],
    ),
    "mixture of experts in two layers": (
        lambda: Stack(Mixture(), Mixture()),
        torch.randn(2, 16),
        [
            *("layers.0.attention", *numbered("layers.0.experts.#", 8)),
            *("layers.1.attention", *numbered("layers.1.experts.#", 8), ""),
        ],
    ),
    "hybrid": (
        lambda: Stack(Block(), Block(), OtherBlock(16, 60), Block(), Block(), Block()),
        torch.randn(2, 3, 16),
        [*numbered("layers.#", 6), ""],
    ),
    "unet": (unet, torch.randn(2, 8), ["inc", "down1", "down2", "up1", "up2", ""]),
    "stack of Linear": (
        lambda: alternating(100, 8),
        torch.randn(2, 8),
        [*(str(2 * k) for k in range(100)), ""],
    ),
    "more Linears than a thousand": (
        lambda: alternating(1500, 16),
        torch.randn(2, 16),
        [*(str(2 * k) for k in range(1500)), ""],
    ),
    "thousands of Linears of a handful": (lambda: alternating(1500, 4), torch.randn(2, 4), [""]),
    "mlp": (
        lambda: Parts(fc1=nn.Linear(64, 128), act=nn.ReLU(), fc2=nn.Linear(128, 10)),
        torch.randn(2, 64),
        ["fc1", "fc2", ""],
    ),
    "a tower that repeats nothing": (
        lambda: Parts(
            stem=nn.Linear(16, 16),
            body=Parts(up=nn.Linear(16, 200), bend=nn.PReLU(), down=OtherLinear(200, 16)),
        ),
        torch.randn(2, 16),
        ["stem", "body.up", "body.down", ""],
    ),
    "dust in a holder of everything": (
        lambda: Parts(body=Parts(**{f"part{k}": nn.Linear(4, 4) for k in range(150)})),
        torch.randn(2, 4),
        [""],
    ),
    "parametrized blocks": (
        lambda: Stack(*(parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(120))),
        torch.randn(2, 16),
        [*numbered("layers.#", 120), ""],
    ),
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), torch.randn(2, 4), [""]),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_finds_the_blocks(case: str) -> None:
    make, inputs, wanted = CASES[case]
    model = make()
    units = plan_units(model)
    assert names(units) == wanted
    assert uses_while_sharded(units, inputs) == []


def test_large_layer_of_a_huge_model_is_a_unit() -> None:
    def layer(width: int) -> nn.Module:
        return Residual(nn.Linear(width, width), nn.Linear(width, width))

    with torch.device("meta"):
        model = Stack(layer(1000), layer(100), *(layer(16384) for _ in range(5)))
    assert names(plan_units(model)) == ["layers.0", *numbered("layers.#", 7)[2:], ""]


def test_tied_embedding_stays_with_the_root() -> None:
    model: Any = gpt()
    model.head.weight = model.embed.weight
    units = plan_units(model)
    assert names(units) == [*numbered("blocks.layers.#", 6), ""]
    assert units[-1].params[0].name == "embed.weight" and len(units[-1].params[0].owners) == 2
    assert uses_while_sharded(units, IDS) == []


def test_wrapped_and_ignored_blocks_do_not_count() -> None:
    model: Any = gpt()
    model.blocks.layers[0].__dict__["_zshard_state"] = object()
    units = plan_units(model, "auto", ignored_modules={model.blocks.layers[1], model.head})
    assert names(units) == ["embed", *numbered("blocks.layers.#", 6)[2:], ""]


def test_traced_model_keeps_its_units() -> None:
    """fx calls the leaves directly: the traced blocks are containers that are never called."""
    traced = fx.symbolic_trace(Stack(*(Block() for _ in range(4))))
    units = plan_units(traced)
    assert {type(unit.module) for unit in units[:-1]} == {nn.Linear}
    assert units[-1].numel < sum(unit.numel for unit in units) / 4
    assert uses_while_sharded(units, torch.randn(2, 3, 16)) == []


# --- statements of the model ----------------------------------------------------------------------


class Planned(nn.Module):
    """A large tower that says nothing, and a small one whose layers are too little to be noticed."""

    def __init__(self, **statements: Any) -> None:
        super().__init__()
        self.body = Stack(*(Block(32, 128) for _ in range(6)))
        self.small = Stack(*(Block(8, 8) for _ in range(4)))
        for name, value in statements.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum() + self.small(x[..., :8]).sum()


BODY, SMALL = numbered("body.layers.#", 6), numbered("small.layers.#", 4)
STATEMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, [*BODY, "small", ""]),
    "a plan": ({"_fsdp_plan": {"small.layers.*": "free_full_weight"}}, [*BODY, *SMALL, ""]),
    "a plan without a star": ({"_fsdp_plan": {"small": "keep"}}, [*BODY, "small", ""]),
    "a plan that fits nothing": (
        {"_fsdp_plan": {"layers.*": "free_full_weight", "encoder.*": 3, 7: None}},
        [*BODY, "small", ""],
    ),
    "classes": ({"_no_split_modules": ["Block", "Missing"]}, [*BODY, *SMALL, ""]),
    "a class of parts of layers": ({"_no_split_modules": {"Sequential"}}, [*BODY, *SMALL, ""]),
    "a class that occurs once": ({"_no_split_modules": ["Planned"]}, [*BODY, "small", ""]),
    "other things of these names": (
        {"_fsdp_plan": "layers.*", "_no_split_modules": lambda: ["Block"]},
        [*BODY, "small", ""],
    ),
}


@pytest.mark.parametrize("case", STATEMENTS)
def test_auto_takes_the_blocks_that_a_model_states(case: str) -> None:
    statements, wanted = STATEMENTS[case]
    model = Planned(**statements)
    units = plan_units(model)
    assert names(units) == wanted
    assert uses_while_sharded(units, torch.randn(2, 3, 32)) == []
    below = plan_units(nn.Sequential(model))  # stated by a module below the root
    assert names(below) == [*(f"0.{name}" for name in wanted[:-1]), ""]


def test_a_policy_of_the_user_wins() -> None:
    model = Planned(_fsdp_plan={"small.layers.*": "free_full_weight"})
    assert names(plan_units(model, None)) == [""]
    assert names(plan_units(model, {nn.LayerNorm}))[0] == "body.layers.0.norm"


def test_stated_blocks_are_not_too_large() -> None:
    """Half of the model in a unit is opened, if there are blocks inside."""
    model = Stack(*(Stack(*(Block() for _ in range(4))) for _ in range(2)))
    model._fsdp_plan = {"layers.*": "free_full_weight"}  # type: ignore[assignment]
    assert names(plan_units(model)) == [
        *(f"layers.{k}.layers.{j}" for k in range(2) for j in range(4)),
        "",
    ]


def test_plans_see_through_wrappers() -> None:
    model = Planned(_fsdp_plan={"small.layers.*": "free_full_weight"})
    for k in range(4):
        model.small.layers[k] = checkpoint_wrapper(model.small.layers[k])
    inner = [f"{name}._checkpoint_wrapped_module" for name in SMALL]
    found = names(plan_units(model))
    assert found[:6] == BODY and found[6:-1] in (SMALL, inner)
