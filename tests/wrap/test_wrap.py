"""The wrap policies, and the unit of each parameter."""

from __future__ import annotations

import functools
import random
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from models import Block
from rows import all_refused, all_rows
from torch import nn
from torch.nn.utils import parametrize

import zshard.wrap as zwrap
from zshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    UnitSpec,
    lambda_auto_wrap_policy,
    plan_units,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2", ""]


def names(units: list[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


def check_partition(root: nn.Module, units: list[UnitSpec]) -> None:
    """Check that each parameter is in one unit, under the names in the unit's module."""
    held = [id(ref.param) for unit in units for ref in unit.params]
    assert sorted(held) == sorted(id(param) for param in root.parameters())
    assert units[-1].module is root
    for unit in units:
        assert root.get_submodule(unit.name) is unit.module
        own = {id(ref.param) for ref in unit.params}
        first = [(name, id(p)) for name, p in root.named_parameters() if id(p) in own]
        assert [(ref.name, id(ref.param)) for ref in unit.params] == first
        for ref in unit.params:
            holders = [
                (m, a) for m in root.modules() for a, p in m._parameters.items() if p is ref.param
            ]
            assert list(ref.owners) == holders


# Policies


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def kind_of(policy: Any) -> str:
    """Return a name that is the same in each process."""
    return getattr(getattr(policy, "func", policy), "__name__", type(policy).__name__)


def positional(m: nn.Module, r: bool, unwrapped: int) -> bool:
    return r or is_block(m)


@pytest.mark.parametrize(
    "policy",
    [
        "auto",
        {Block},
        frozenset({Block}),
        [Block],
        (Block,),
        ModuleWrapPolicy({Block}),
        ModuleWrapPolicy([Block, nn.Conv2d]),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
        functools.partial(size_based_auto_wrap_policy, min_num_params=250),
        functools.partial(
            zwrap._or_policy,
            policies=[
                ModuleWrapPolicy({nn.Conv2d}),
                functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
            ],
        ),
        CustomPolicy(is_block),
        is_block,
        lambda module: isinstance(module, Block),
        positional,
        torch_wrap.ModuleWrapPolicy({Block}),
        torch_wrap.CustomPolicy(is_block),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=250),
        functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=is_block),
    ],
    ids=kind_of,
)
def test_every_form_of_a_policy_finds_the_blocks(policy: Any) -> None:
    model = Net()
    units = plan_units(model, policy)
    wanted = ["embed", *BLOCKS[:3], "head", ""] if policy == "auto" else BLOCKS
    assert names(units) == wanted
    check_partition(model, units)


def test_default_leaf_and_excluded_classes_can_be_extended() -> None:
    excluded = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES | {Block}
    policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=250, exclude_wrap_modules=excluded
    )
    assert "blocks.0" not in names(plan_units(Net(), policy))
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES


def test_custom_policy_carries_overrides() -> None:
    model = Net()

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is model.head:
            return {"sharding_strategy": "shard_grad_op"}
        return {} if module is model.embed else isinstance(module, Block)

    for policy in (CustomPolicy(choose), torch_wrap.CustomPolicy(choose)):
        units = plan_units(model, policy)
        assert names(units) == [*BLOCKS[:3], "head", ""]
        assert [u.options.strategy.value for u in units] == ["full_shard"] * 3 + [
            "shard_grad_op",
            "full_shard",
        ]


INVALID = [
    ("blocks", ValueError, "'blocks'"),
    (3, TypeError, "3 is not a policy"),
    (Block, TypeError, "a set of nn.Module classes"),
    (Net(1), TypeError, "is not a policy"),
    ({"Block"}, TypeError, "'Block'"),
    ([int], TypeError, "int"),
    (set(), ValueError, "no classes"),
    (lambda: True, TypeError, "is not a policy"),
    (lambda a, b: True, TypeError, "is not a policy"),
    (CustomPolicy(lambda module: "yes"), TypeError, "'yes'"),
]


def test_invalid_policies_are_named():
    plan = functools.partial(functools.partial, plan_units, Net())
    all_refused({str(row): (plan(row[0]), *row[1:]) for row in INVALID})


def test_classes_that_find_nothing_are_reported() -> None:
    with pytest.warns(UserWarning, match=r"Conv2d.*no such module"):
        assert names(plan_units(Net(), {nn.Conv2d})) == [""]
    with pytest.warns(UserWarning, match=r"ModuleList.*cannot be units"):
        assert names(plan_units(Net(), {nn.ModuleList})) == [""]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(plan_units(Block(8), {Block})) == [""]  # the root itself is one


# Modules that no policy may split


class LSTMWithChild(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = nn.Linear(4, 4)


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", [{nn.Linear}, zwrap.always_wrap_policy, "auto"], ids=kind_of)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.TransformerDecoderLayer(4, 2, 8),
        LSTMWithChild,
        parametrized,
    ],
)
def test_nothing_below_a_sealed_module_becomes_a_unit(make: Any, policy: Any) -> None:
    model = nn.Sequential(make(), nn.Linear(64, 64), make(), nn.Linear(64, 64))
    assert {name.split(".")[0] for name in names(plan_units(model, policy))} >= {"1", "3"}
    for unit in plan_units(model, policy):
        assert unit.name.count(".") == 0


# Assignment of parameters to units


def random_graph(rng: random.Random) -> nn.Module:
    """Modules that hold each other and parameters at random, some in several places."""
    made: list[nn.Module] = []
    shared = [nn.Parameter(torch.zeros(k)) for k in range(1, 4)]
    for _ in range(rng.randint(2, 12)):
        module = nn.Identity()
        for k in range(rng.randint(0, 2)):
            param = rng.choice(shared) if rng.random() < 0.3 else nn.Parameter(torch.zeros(2))
            module.register_parameter(f"p{k}", param)
        for child in rng.sample(made, min(len(made), rng.randint(0, 3))):
            module.add_module(f"m{len(module._modules)}", child)
        made.append(module)
    return made[-1]


def innermost_unit(root: nn.Module, units: list[nn.Module], param: nn.Parameter) -> nn.Module:
    """The rule itself: of the units on every path from the root to `param`, the last."""
    ways = []
    for name, found in root.named_parameters(remove_duplicate=False):
        if found is param:
            parts = name.split(".")[:-1]
            way = [root.get_submodule(".".join(parts[:k])) for k in range(len(parts) + 1)]
            ways.append([module for module in way if module is root or module in units])
    return next(m for m in reversed(ways[0]) if all(m in way for way in ways))


def check_innermost_units(seed: int) -> None:
    rng = random.Random(seed)
    root = random_graph(rng)
    inner = list(root.modules())[1:]
    chosen = rng.sample(inner, rng.randint(0, len(inner)))
    units = plan_units(root, CustomPolicy(lambda module: module in chosen))
    check_partition(root, units)
    for unit in units:
        for ref in unit.params:
            assert innermost_unit(root, chosen, ref.param) is unit.module
    ranks = {unit.module: rank for rank, unit in enumerate(units)}
    for unit in units:
        for module in unit.module.modules():
            assert ranks.get(module, -1) <= ranks[unit.module]


def test_parameter_belongs_to_the_innermost_unit_around_all_its_places() -> None:
    with all_rows() as row:
        for seed in range(200):
            with row(seed):
                check_innermost_units(seed)


def test_module_that_contains_itself_is_walked_once() -> None:
    model = Net()
    model.blocks[0].parent = model.blocks
    assert names(plan_units(model, {Block})) == BLOCKS


def test_ignored_modules_and_parameters_are_excluded() -> None:
    model = Net()
    model.head.weight = model.embed.weight  # ignored in one place, ignored in all
    units = plan_units(
        model, {Block}, {model.blocks[1], model.embed}, {model.blocks[0].norm.weight}
    )
    assert names(units) == ["blocks.0", "blocks.2", ""]
    assert units[0].params[0].name == "blocks.0.norm.bias"
    assert [ref.name for ref in units[2].params] == ["head.bias"]


def mark_wrapped(module: nn.Module) -> nn.Module:
    module.__dict__["_zshard_state"] = object()
    return module


def test_wrapped_modules_stay_unchanged() -> None:
    model = Net()
    mark_wrapped(model.blocks[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        units = plan_units(model, {Block})
        assert names(plan_units(model, {nn.Conv2d})) == [""]
    assert names(units) == ["blocks.1", "blocks.2", ""]
    inside = {id(param) for param in model.blocks[0].parameters()}
    assert not any(id(ref.param) in inside for unit in units for ref in unit.params)
    with pytest.raises(ValueError, match="Block is already wrapped"):
        plan_units(model.blocks[0])


def test_lazy_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'1.weight' of a lazy module"):
        plan_units(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))


def test_planning_does_not_change_the_model() -> None:
    model = Net()
    before = [(m, list(m.__dict__), list(m._forward_pre_hooks)) for m in model.modules()]
    plan_units(model)
    assert before == [(m, list(m.__dict__), list(m._forward_pre_hooks)) for m in model.modules()]


def calls_to_plan(blocks: int) -> int:
    with torch.device("meta"):
        model = Net(blocks)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    plan_units(model)  # reads the sources
    sys.setprofile(count)
    try:
        plan_units(model)
    finally:
        sys.setprofile(None)
    return calls


def test_planning_time_is_linear_in_modules() -> None:
    few, many = calls_to_plan(100), calls_to_plan(500)
    assert many < 5.5 * few
    assert many < 110 * 4 * 500  # calls per module
