"""Choosing which modules become units: wrap policies, manual wrapping, and `plan_units`.

Every policy, in any form, becomes a choice of nodes in the module tree (`wrap/tree.py`), and
one function assigns the parameters to them. "auto" (`wrap/auto.py`) chooses from the model's
structure. Names and signatures are those of torch.distributed.fsdp.wrap, so that scripts migrate by
changing the import; torch's own policy objects are accepted as well.

No policy can make a unit of a container without a forward, nor of anything below a module that uses
its children's weights without calling the children (such as nn.MultiheadAttention): the parameters
of such a module belong to the unit above.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

from zshard.precision import precision_of
from zshard.strategy import strategy_of
from zshard.units.extensions import ParamRef
from zshard.units.units import Options
from zshard.wrap.auto import auto_units
from zshard.wrap.tree import ModuleTree, Node, UnitSpec

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "ParamRef",
    "UnitSpec",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "plan_units",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

ModuleClasses = Iterable[type[nn.Module]]
_Choice = dict[Node, dict[str, Any]]

_ACCEPTED = (
    'expected "auto", None, a set of nn.Module classes, a policy object, or a callable (module) or '
    "(module, recurse, nonwrapped_numel) -> bool"
)


class ModuleWrapPolicy:
    """A policy that makes every instance of `module_classes` a unit.

    Raises TypeError for anything but nn.Module classes, ValueError for an empty set.
    """

    def __init__(self, module_classes: ModuleClasses) -> None:
        classes = tuple(module_classes)
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise TypeError(f"wrap policy classes must be nn.Module classes, got {cls!r}")
        if not classes:
            raise ValueError("the wrap policy has no classes: pass None for a single unit")
        self._classes = tuple(dict.fromkeys(classes))

    def __call__(self, module: nn.Module, recurse: bool = False, *_: object, **__: object) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(cls.__name__ for cls in self._classes)}}})"


class CustomPolicy:
    """A policy that calls `lambda_fn(module)` for each module.

    The function returns True to make the module a unit; a dict to make it a unit with these FSDP
    arguments instead of the root's; False or an empty dict to leave it to the unit above.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def overrides(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the overrides for `module`, or None if it is not to be a unit. Raises TypeError if
        the function returned neither a bool nor a dict."""
        answer = self._lambda_fn(module)
        if not isinstance(answer, bool | dict):
            raise TypeError(
                f"CustomPolicy: lambda_fn must return a bool or a dict of arguments, got {answer!r}"
            )
        if not answer:
            return None
        return dict(answer) if isinstance(answer, dict) else {}


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """A policy that makes every module with parameters of its own a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """A policy that makes a module a unit if `lambda_fn(module)` is true.

    Bind `lambda_fn` with functools.partial.
    """
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: ModuleClasses
) -> bool:
    """A policy that makes every instance of `transformer_layer_cls`, a set of classes, a unit.

    Bind `transformer_layer_cls` with functools.partial.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


_FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}
_EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: ModuleClasses | None = None,
    exclude_wrap_modules: ModuleClasses | None = None,
) -> bool:
    """A policy that makes units by size, from the leaves up.

    A module becomes a unit if it has at least `min_num_params` elements that are in no unit yet.
    Bind the last three arguments with functools.partial.

    min_num_params: number of parameter elements (default: 10**8).
    force_leaf_modules: classes below whose instances nothing becomes a unit (default:
        MultiheadAttention).
    exclude_wrap_modules: classes whose instances never become units (default: ModuleList,
        ModuleDict).
    """
    if recurse:
        barred = _FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        barred = _EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(barred))


# FSDP1 scripts extend the default sets by these names.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = _FORCE_LEAF_MODULES  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = _EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """A policy that makes a module a unit if one of `policies` would."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


_manual: ContextVar[tuple[Callable[..., nn.Module], Mapping[str, Any]] | None] = ContextVar(
    "zshard_enable_wrap", default=None
)


@contextlib.contextmanager
def enable_wrap(
    *, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: object
) -> Iterator[None]:
    """Context manager in which `wrap(module)` returns `wrapper_cls(module, **wrapper_kwargs)`.

    Applies to the current thread (or asyncio task); the innermost context wins.
    """
    token = _manual.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _manual.reset(token)


def wrap(module: nn.Module, **wrap_overrides: object) -> nn.Module:
    """Wrap `module` with the surrounding `enable_wrap(...)`; outside of one, return it unchanged.

    wrap_overrides: arguments that replace those of the context.
    """
    manual = _manual.get()
    if manual is None:
        return module
    wrapper_cls, wrapper_kwargs = manual
    return wrapper_cls(module, **{**wrapper_kwargs, **wrap_overrides})


def plan_units(
    root: nn.Module,
    policy: object = "auto",
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    with_empty: bool = False,
    options: Options = Options(),  # noqa: B008 - a tuple
) -> list[UnitSpec]:
    """Choose the units of `root` and assign each of its parameters to exactly one.

    policy: as FSDP's auto_wrap_policy.
    ignored_modules, ignored_params: left out, with all parameters of ignored modules.
    with_empty: keep units without parameters of their own, as earlier outermost ones may be.
    options: of the model, where a CustomPolicy does not override them.

    Returns the units children first, in module order; the last is `root` itself, which has the
    remaining parameters (possibly none). Every other unit has parameters. Modules that are units of
    an earlier FSDP call keep their parameters.

    Raises TypeError or ValueError for an invalid policy or override; ValueError if the root is
    already wrapped, if a parameter is shared with a nested unit, and if a lazy parameter has no
    shape yet.
    """
    if isinstance(policy, set | frozenset | list | tuple):
        policy = ModuleWrapPolicy(policy)
    tree = ModuleTree(root, ignored_modules, ignored_params)
    try:
        choice = _choose(tree, policy, ignored_modules)
        by_node = {node: _overridden(options, each, node) for node, each in choice.items()}
        return tree.assign({**by_node, tree.root: options}, with_empty)
    finally:
        for node in tree.nodes:  # cycles would keep the model until the next garbage collection
            node.children.clear()


def _choose(tree: ModuleTree, policy: object, ignored: Collection[nn.Module]) -> _Choice:
    """Return the nodes that the policy chooses, with its overrides."""
    choice: _Choice = {}
    if isinstance(policy, ModuleWrapPolicy):
        matching = [node for node in tree.nodes if policy(node.module)]
        choice = {node: {} for node in matching if node.may_be_unit}
        if not choice and tree.root.numel and not tree.wrapped:
            why = "there are no such modules" if not matching else "those modules cannot be units"
            warnings.warn(
                f"{policy!r} chooses no units, so that all parameters are gathered at once: {why}; "
                'pass auto_wrap_policy="auto" to choose units automatically',
                stacklevel=2,
            )
    elif isinstance(policy, CustomPolicy):
        for node in tree.nodes:
            overrides = policy.overrides(node.module) if node.may_be_unit else None
            if overrides is not None:
                choice[node] = overrides
    elif hasattr(policy, "_run_policy"):  # torch.distributed.fsdp.wrap's policy objects
        for module, overrides in policy._run_policy(tree.root.module, set(ignored), {}).items():
            at = tree.find(module)
            if at is not None and at.may_be_unit:
                choice[at] = overrides
    elif isinstance(policy, str):
        if policy != "auto":
            raise ValueError(f"unknown auto_wrap_policy {policy!r}: {_ACCEPTED}")
        choice = {node: {} for node in auto_units(tree)}
    elif policy is not None:
        _descend(tree.root, _fsdp1_signature(policy), choice)
    return choice


def _overridden(usual: Options, overrides: Mapping[str, Any], node: Node) -> Options:
    """Return a unit's options. Raises ValueError for an override of an entire model's option."""
    strategy, precision = usual.strategy, usual.precision
    asked = overrides.get("sharding_strategy", overrides.get("strategy"))
    if asked is not None:
        strategy = strategy_of(asked)
    if strategy is not usual.strategy and (strategy.is_hybrid or strategy.has_secondary):
        raise ValueError(
            f"unit '{node.name}' requests strategy {strategy.value!r}, which applies to entire "
            "models: pass it to the outermost FSDP(...)"
        )
    if overrides.get("mixed_precision") is not None:
        precision = precision_of(overrides["mixed_precision"])
    return usual._replace(strategy=strategy, precision=precision)


def _descend(node: Node, ask: Callable[[nn.Module, bool, int], bool], choice: _Choice) -> int:
    """FSDP1's recursion: `ask(module, True, numel)` decides whether to descend below a module, then
    `ask(module, False, rest)` whether to make a unit of the parameters that have none yet. Return
    how many elements are in units at or below `node`."""
    if not ask(node.module, True, node.numel):
        return 0
    in_units = sum(_descend(child, ask, choice) for child in node.children if not child.barred)
    if node.parent is None or not node.may_be_unit:
        return in_units
    if not ask(node.module, False, node.numel - in_units):
        return in_units
    choice[node] = {}
    return node.numel


def _fsdp1_signature(policy: Any) -> Callable[[nn.Module, bool, int], bool]:
    """Return `policy` as a function of (module, recurse, nonwrapped_numel). Raises TypeError if it
    accepts neither these arguments nor a single module."""

    def takes(*args: object, **kwargs: object) -> bool:
        try:
            inspect.signature(policy).bind(*args, **kwargs)
        except (TypeError, ValueError):  # or it has no signature
            return False
        return not isinstance(policy, type | nn.Module)

    if takes(module=None, recurse=None, nonwrapped_numel=None):
        return lambda module, recurse, numel: bool(
            policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        )
    if takes(None):
        return lambda module, recurse, numel: recurse or bool(policy(module))
    if takes(None, None, None):
        return lambda module, recurse, numel: bool(policy(module, recurse, numel))
    raise TypeError(f"auto_wrap_policy={policy!r} is not a policy: {_ACCEPTED}")
