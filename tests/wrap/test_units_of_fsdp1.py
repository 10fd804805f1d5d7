"""The units of FSDP(model) compared with the FSDP instances of torch's FSDP1: all policies, many
models.

Torch wraps one copy of a model, zshard shards another, and the two lists of names must be equal
except for the differences in docs/memory.md: `expected()` is that text as code.
"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

import zshard.wrap as zwrap
from zshard import FSDP
from zshard.wrap.tree import _SEALED, has_forward


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """Own parameters, and children."""

    def __init__(self, *children: nn.Module, own: int = 0) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)
        if own:
            self.scale = nn.Parameter(torch.ones(own))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Plain(Block):
    """No parameters of its own, so that its children may leave it with none."""


class Quiet(nn.Module):
    """No parameters at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


POLICIES: dict[str, Callable[[Any], Any]] = {
    **{
        f"size {least}": functools.partial(
            lambda lib, least: functools.partial(lib.size_based_auto_wrap_policy, min_num_params=least),
            least=least,
        )
        for least in (0, 1, 30, 100, 300)
    },
    "size, leaves": lambda lib: functools.partial(
        lib.size_based_auto_wrap_policy, min_num_params=40, force_leaf_modules={Block}
    ),
    "transformer": lambda lib: functools.partial(
        lib.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.LayerNorm}
    ),
    "lambda": lambda lib: functools.partial(
        lib.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Plain | nn.Linear | Quiet)
    ),
    "or": lambda lib: functools.partial(
        lib._or_policy,
        policies=[
            functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is Plain),
            functools.partial(lib.size_based_auto_wrap_policy, min_num_params=90),
        ],
    ),
    "classes": lambda lib: lib.ModuleWrapPolicy({Block, nn.Linear}),
    "containers": lambda lib: lib.ModuleWrapPolicy({nn.ModuleList, nn.ModuleDict, nn.Sequential}),
    "custom": lambda lib: lib.CustomPolicy(
        lambda m: {"forward_prefetch": True} if isinstance(m, Block) else isinstance(m, nn.LayerNorm)
    ),
    "always": lambda lib: lib.always_wrap_policy,
    "none": lambda lib: None,
}  # fmt: skip


BY_CLASS = ("transformer", "lambda", "classes", "containers", "custom", "always", "none")


def random_tree(rng: random.Random, shared: list[nn.Module], depth: int = 0) -> nn.Module:
    """A model of nested blocks and containers, some of them empty, and of those in `shared`."""
    leaves: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(rng.randint(1, 9), rng.randint(1, 9)),
        lambda: nn.LayerNorm(rng.randint(1, 40)),
        nn.ReLU,
        Quiet,
        lambda: nn.Embedding(rng.randint(1, 9), 4),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.LSTM(2, 2),
    ]
    if depth == 4 or (depth and rng.random() < 0.3):
        return rng.choice(shared) if shared and rng.random() < 0.4 else rng.choice(leaves)()
    children = [random_tree(rng, shared, depth + 1) for _ in range(rng.randint(0, 3))]
    kind = rng.randint(0, 4) if depth else 0
    if kind == 0:
        return Block(*children, own=rng.randint(0, 50))
    if kind == 1:
        return Plain(*children)
    if kind == 2:
        return nn.ModuleList(children)
    if kind == 3:
        return nn.ModuleDict({f"k{at}": child for at, child in enumerate(children)})
    return nn.Sequential(*children)


def instances(model: nn.Module, policy: Any, ignored: list[str]) -> set[str]:
    """Return the names of the FSDP instances that torch creates for `model`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = torchs.FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            ignored_modules=[model.get_submodule(name) for name in ignored] or None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    found = wrapped.named_modules(remove_duplicate=False)
    inside = "._fsdp_wrapped_module"
    return {
        f".{name}".replace(inside, "")[1:]
        for name, module in found
        if isinstance(module, torchs.FullyShardedDataParallel)
    }


def units(model: nn.Module, policy: Any, ignored: list[str]) -> set[str]:
    """Return the names of zshard's units, including the root."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left_out = [model.get_submodule(name) for name in ignored]
        FSDP(model, auto_wrap_policy=policy, ignored_modules=left_out)
    modules = FSDP.fsdp_modules(model)
    return {name for name, module in model.named_modules() if module in modules}


def expected(model: nn.Module, theirs: set[str], ignored: list[str]) -> set[str]:
    """Return the subset of FSDP1's instances that docs/memory.md describes: modules with a
    forward, not below those that use their children's weights directly, and innermost around all
    uses of some parameter. The root always stays."""
    name_of = {module: name for name, module in model.named_modules()}
    left_out = {model.get_submodule(name) for name in ignored}
    ways: dict[nn.Parameter, list[list[nn.Module]]] = {}
    sealed: set[nn.Module] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        path = name.split(".")[:-1]
        way = [model.get_submodule(".".join(path[:at])) for at in range(len(path) + 1)]
        ways.setdefault(param, []).append(way)
        seals = [at for at, module in enumerate(way) if isinstance(module, _SEALED)]
        sealed.update(way[seals[0] + 1 :] if seals else ())
    chosen = {model.get_submodule(name) for name in theirs} - sealed
    may = {module for module in chosen if has_forward(module)} | {model}
    has = {model}
    for each in ways.values():
        if not any(left_out.intersection(way) for way in each):
            common = [module for module in each[0] if all(module in way for way in each)]
            has.add(next(module for module in reversed(common) if module in may))
    return {name_of[module] for module in may & has}


def compare(model: nn.Module, policy: str, ignored: list[str]) -> str:
    """Describe what differs."""
    make, copied = POLICIES[policy], copy.deepcopy(model)
    theirs = instances(copied, make(torch_wrap), ignored)
    wanted = expected(model, theirs, ignored)
    for lib in (zwrap, torch_wrap):  # torch's own policies are accepted, too
        ours = units(copy.deepcopy(model), make(lib), ignored)
        if ours != wanted:
            return f"{policy}: {sorted(ours)}, not {sorted(wanted)} of {sorted(theirs)} in {model}"
    return ""


each_seed = pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 50), marks=pytest.mark.thorough)], ids=str
)


def random_models(seeds: range, shares: bool) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield models, and the ignored parts of them."""
    for seed in seeds:
        rng = random.Random(seed)
        shared: list[nn.Module] = [Block(nn.Linear(3, 3), own=5), nn.Linear(4, 4)] if shares else []
        model = random_tree(rng, shared)
        below = [name for name, _ in model.named_modules() if name]
        ignored = rng.sample(below, min(len(below), rng.choice([0, 0, 1, 2])))
        gone = {p for name in ignored for p in model.get_submodule(name).parameters()}
        if set(model.parameters()) - gone:  # torch wraps no model without any
            yield model, ignored


@each_seed
@pytest.mark.parametrize("policy", POLICIES)
def test_random_models_match_fsdp1(policy: str, seeds: range) -> None:
    compared = 0
    for model, ignored in random_models(seeds, shares=False):
        assert not (problem := compare(model, policy, ignored)), f"{ignored}: {problem}"
        compared += 1
    assert compared > len(seeds) // 2


@each_seed
@pytest.mark.parametrize("policy", BY_CLASS)
def test_shared_modules_are_units_where_fsdp1_wraps_them(policy: str, seeds: range) -> None:
    compared = 0
    for model, ignored in random_models(seeds, shares=True):
        try:
            problem = compare(model, policy, ignored)
        except AssertionError as error:
            if "is already wrapped" in str(error):  # torch's recursion finds its own wrapper
                continue
            raise
        assert not problem, f"{ignored}: {problem}"
        compared += 1
    assert compared > len(seeds) // 5


def test_batch_norm_is_not_a_unit_under_mixed_precision() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    low = torchs.MixedPrecision(torch.bfloat16)
    policy = functools.partial(
        zwrap.lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is nn.Linear
    )
    wrapped = torchs.FullyShardedDataParallel(
        copy.deepcopy(model),
        auto_wrap_policy=policy,
        mixed_precision=low,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    theirs = [type(m.module) for m in torchs.FullyShardedDataParallel.fsdp_modules(wrapped)]
    assert theirs == [nn.Sequential, nn.Linear, nn.BatchNorm1d]
    ours = FSDP.fsdp_modules(FSDP(model, auto_wrap_policy=policy, mixed_precision=low))
    assert ours == [model, model[0]]


# --- manual wrapping -----------------------------------------------------------------------------


def by_hand(lib: Any, cls: Any) -> nn.Module:
    """enable_wrap() and wrap(), nested, with overrides and below modules that are not wrapped."""
    options: dict[str, Any] = {"auto_wrap_policy": None}  # not zshard's default
    if cls is not FSDP:
        options |= {"device_id": torch.device("cpu"), "use_orig_params": True}
    with lib.enable_wrap(wrapper_cls=cls, **options):
        inner = lib.wrap(nn.Linear(3, 3), sync_module_states=False)
        block = lib.wrap(Block(inner, nn.Linear(2, 2), nn.ReLU(), own=3))
        bare = Plain(lib.wrap(Plain(nn.Linear(4, 4))), nn.Linear(5, 5))
        model = lib.wrap(nn.Sequential(block, bare, lib.wrap(nn.LayerNorm(6))))
    assert type(lib.wrap(nn.Linear(1, 1))) is nn.Linear  # not outside
    return model


def test_manual_wrapping_matches_fsdp1() -> None:
    theirs = {
        f".{name}".replace("._fsdp_wrapped_module", "")[1:]
        for name, module in by_hand(torch_wrap, torchs.FullyShardedDataParallel).named_modules()
        if isinstance(module, torchs.FullyShardedDataParallel)
    }
    model = by_hand(zwrap, FSDP)
    modules = FSDP.fsdp_modules(model)
    assert {name for name, module in model.named_modules() if module in modules} == theirs
    assert theirs == {"", "0", "0.inner.0", "1.inner.0", "2"}


@pytest.mark.parametrize("policy", ["classes", "size 30"])
def test_policy_keeps_manually_wrapped_units(policy: str) -> None:
    """FSDP1 refuses a policy over modules that are already wrapped."""

    def make(cls: Any) -> nn.Module:
        options: dict[str, Any] = {"auto_wrap_policy": None}
        if cls is not FSDP:
            options |= {"device_id": torch.device("cpu"), "use_orig_params": True}
        return nn.Sequential(cls(Block(nn.Linear(9, 9), own=3), **options), Block(nn.Linear(7, 7)))

    with pytest.raises((ValueError, AssertionError), match="already"):
        instances(make(torchs.FullyShardedDataParallel), POLICIES[policy](torch_wrap), [])
    inner = {"classes": {"1.inner.0"}, "size 30": {"1.inner.0"}}[policy]
    assert units(make(FSDP), POLICIES[policy](zwrap), []) == {"", "0", *inner}


def test_manual_wrapping_keeps_a_unit_without_parameters() -> None:
    """The outermost module of a call is a unit even if there is nothing to gather, as in FSDP1."""
    model = nn.Sequential(FSDP(nn.ReLU()), FSDP(nn.Sequential(FSDP(nn.Linear(3, 3)))))
    FSDP(model, auto_wrap_policy=None)
    assert FSDP.fsdp_modules(model) == [model, model[0], model[1], model[1][0]]
    model(torch.ones(2, 3)).sum().backward()
