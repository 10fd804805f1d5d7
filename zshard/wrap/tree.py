"""The module tree, walked once: the unit of each parameter.

Shared modules make the module "tree" a graph, and tied weights give a parameter several places in
it. A unit may hold a parameter only if every path from the root to each of those places leads
through the unit's module; otherwise the parameter would be used while it is sharded. That is
dominance. So the graph is turned into its dominator tree once. A parameter's home is the nearest
common ancestor of its owners there, and its unit is the first unit at or above the home. Without
sharing, the dominator tree is the module tree.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from zshard import _core
from zshard.units.extensions import ParamRef
from zshard.units.units import is_unit

# No module below these may be a unit. They use their children's weights without calling the
# children (MultiheadAttention its out_proj, the transformer layers in their fast path), keep the
# weights in lists of their own (RNNBase), or run their children without hooks (ScriptModule).
_SEALED: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    torch.jit.ScriptModule,
)


@dataclass(eq=False)
class UnitSpec:
    """One unit: its module, that module's dotted name relative to the root ('' for the root), its
    own parameters in `named_parameters()` order, and what a CustomPolicy overrides for it."""

    module: nn.Module
    name: str
    params: list[ParamRef] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Number of elements in this unit's parameters, without nested units."""
        return sum(ref.param.numel() for ref in self.params)


class Node:
    """A module in the dominator tree. `numel` counts the parameters whose home is here or below:
    what a unit here would hold if there were none below it."""

    __slots__ = ("barred", "children", "depth", "edges", "module", "numel", "parent", "rank")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.edges: list[tuple[Node, str]] = []  # every (holder, attribute), the first visit first
        self.parent: Node | None = None
        self.children: list[Node] = []
        self.depth = 0
        self.rank = -1  # post-order index; -1 until the walk has left this node
        self.numel = 0
        self.barred = False  # below a sealed module

    @property
    def may_be_unit(self) -> bool:
        """Return whether a hook on this module sees all uses of the parameters below: its forward
        is called, and no sealed module is above it."""
        return not self.barred and has_forward(self.module)

    @property
    def is_leaf(self) -> bool:
        """Return whether all parameters below are the module's own."""
        return not any(child.numel for child in self.children)


@dataclass(eq=False)
class _ParamPlaces:
    """A parameter and its places."""

    param: nn.Parameter
    owners: list[tuple[Node, str]]
    home: Node


class ModuleTree:
    """All modules and parameters below `root` that are neither ignored nor in a unit already.

    A parameter of an ignored module is ignored wherever else it appears. Raises ValueError if the
    root is a unit already, if a parameter is shared with a nested unit, and if a lazy parameter has
    no shape yet.
    """

    def __init__(
        self,
        root: nn.Module,
        ignored_modules: Collection[nn.Module] = (),
        ignored_params: Collection[nn.Parameter] = (),
    ) -> None:
        if is_unit(root):
            raise ValueError(
                f"this {type(root).__name__} is already wrapped: call FSDP once per module (inner "
                "modules first when wrapping by hand)"
            )
        self._ignored_modules = {id(module) for module in ignored_modules}
        self._ignored_params = {id(param) for param in ignored_params}
        for module in ignored_modules:
            self._ignored_params.update(id(param) for param in module.parameters())
        self._by_id: dict[int, Node] = {}
        self.wrapped: list[tuple[nn.Module, Node, str]] = []  # units of earlier FSDP calls
        self._post_order: list[Node] = []
        self._names: dict[tuple[Node, Node], tuple[str, ...]] = {}
        self.root = self._visit(root)
        self.nodes = list(self._by_id.values())  # in the order of root.modules()
        self._refuse_equal(root)
        self._dominate()
        self._entries: dict[int, _ParamPlaces] = {}
        for node in self.nodes:
            self._collect(node)
        self._refuse_params_of_wrapped()
        self._refuse_common_memory()
        for entry in self._entries.values():
            entry.home.numel += entry.param.numel()
        for node in reversed(self.nodes):
            if node.parent is not None:
                node.parent.numel += node.numel

    def find(self, module: nn.Module) -> Node | None:
        """Return the node of `module`, or None if it is not in the tree."""
        return self._by_id.get(id(module))

    def names(self, node: Node, above: Node) -> tuple[str, ...]:
        """Return all dotted names of `node` relative to `above`, a dominator of it; that of the
        first visit comes first."""
        if node is above:
            return ("",)
        known = self._names.get((node, above))
        if known is None:
            known = self._names[node, above] = tuple(
                _join(prefix, attribute)
                for holder, attribute in node.edges
                for prefix in self.names(holder, above)
            )
        return known

    def assign(
        self, chosen: Mapping[Node, dict[str, Any]], with_empty: bool = False
    ) -> list[UnitSpec]:
        """Assign each parameter to its unit: the root and the `chosen` nodes, with their overrides.

        Children come before parents, in module order, the root last. A chosen node that is left
        without parameters of its own is dropped, unless `with_empty`; the root never is.
        """
        nodes = sorted({*chosen, self.root}, key=lambda node: node.rank)
        specs = {
            node: UnitSpec(node.module, self._name(node), overrides=dict(chosen.get(node, {})))
            for node in nodes
        }
        for entry in self._entries.values():
            unit = entry.home
            while unit not in specs:
                assert unit.parent is not None, "the root is a unit"
                unit = unit.parent
            names = tuple(
                _join(prefix, attribute)
                for owner, attribute in entry.owners
                for prefix in self.names(owner, unit)
            )
            owners = tuple((owner.module, attribute) for owner, attribute in entry.owners)
            specs[unit].params.append(ParamRef(names, entry.param, owners))
        root = self.root
        return [spec for node, spec in specs.items() if spec.params or with_empty or node is root]

    def fell(self) -> None:
        """Take the tree apart after use: its cycles would keep the model and its memory alive until
        the next garbage collection."""
        for node in self.nodes:
            node.children.clear()

    def _visit(self, module: nn.Module) -> Node:
        node = Node(module)
        self._by_id[id(module)] = node
        for attribute, child in module._modules.items():
            if child is None or id(child) in self._ignored_modules:
                continue
            if is_unit(child):
                self.wrapped.append((child, node, attribute))
                continue
            known = self.find(child)
            if known is None:
                known = self._visit(child)
            elif known.rank < 0:
                continue  # an edge back to a holder: a cycle does not affect dominance
            known.edges.append((node, attribute))
        node.rank = len(self._post_order)
        self._post_order.append(node)
        return node

    def _dominate(self) -> None:
        # Reversed post-order visits all holders of a module before the module, so one pass
        # suffices.
        for node in reversed(self._post_order[:-1]):
            node.parent = node.edges[0][0]
            for holder, _ in node.edges[1:]:
                node.parent = _common_ancestor(node.parent, holder)
            node.depth = node.parent.depth + 1
            node.barred = any(
                holder.barred or _seals(holder.module, name) for holder, name in node.edges
            )
        for node in self.nodes[1:]:
            assert node.parent is not None, "only the root has no holder"
            node.parent.children.append(node)

    def _collect(self, node: Node) -> None:
        for attribute, param in node.module._parameters.items():
            if param is None or id(param) in self._ignored_params:
                continue
            entry = self._entries.setdefault(id(param), _ParamPlaces(param, [], node))
            entry.owners.append((node, attribute))
            entry.home = _common_ancestor(entry.home, node)
            name = _join(self._name(node), attribute)
            if isinstance(node.module, torch.jit.ScriptModule):
                raise ValueError(
                    f"parameter {name!r} is in a TorchScript module, which zshard cannot shard: "
                    "shard the Python module that it was made from (and compile that with "
                    "torch.compile), or pass it in ignored_modules="
                )
            if isinstance(param, UninitializedParameter):
                raise ValueError(
                    f"parameter {name!r} of a lazy module is uninitialized: run a forward pass "
                    "before FSDP(...)"
                )

    def _refuse_equal(self, root: nn.Module) -> None:
        """torch finds modules by equality: of two equal modules it trains only the first."""
        found = {id(module) for module in root.modules()}
        lost = next((node for node in self.nodes if id(node.module) not in found), None)
        if lost is not None:
            name, kind = self.names(lost, self.root)[0], type(lost.module).__name__
            raise ValueError(
                f"module {name!r} compares equal to another one, so torch takes it for the same, "
                f"and model.parameters() lacks its parameters: remove __eq__ from {kind}"
            )

    def _refuse_params_of_wrapped(self) -> None:
        for module, holder, attribute in self.wrapped:
            prefix = _join(self._name(holder), attribute)
            for name, param in module.named_parameters():
                entry = self._entries.get(id(param))
                if entry is None:
                    continue
                owner, own_name = entry.owners[0]
                raise ValueError(
                    f"parameter {_join(self._name(owner), own_name)!r} is tied to "
                    f"{_join(prefix, name)!r}, which already belongs to the nested FSDP module "
                    f"{prefix!r}: wrap a module that contains both instead, or leave the wrapping "
                    "to auto_wrap_policy"
                )
        for entry in self._entries.values():
            info = _core.shard_info(entry.param)
            if info is not None:
                owner, attribute = entry.owners[0]
                raise ValueError(
                    f"parameter {_join(self._name(owner), attribute)!r} was sharded before, as "
                    f"{info['name']!r} of unit {info['unit'] or '(root)'!r}: two modules share its "
                    "module. Shard the shared module itself first, or call FSDP() once on the "
                    "module around both"
                )

    def _refuse_common_memory(self) -> None:
        """Refuse two parameters with the same memory (`a.data = b.data`): under DDP they train as
        one."""
        there = [entry for entry in self._entries.values() if not entry.param.is_meta]
        areas = sorted(((*_memory_of(e.param), e) for e in there), key=operator.itemgetter(0, 1))
        for (_, end, first), (begin, _, second) in itertools.pairwise(areas):
            if 0 < begin < end:
                names = [_join(self._name(e.owners[0][0]), e.owners[0][1]) for e in (first, second)]
                raise ValueError(
                    f"parameters {names[0]!r} and {names[1]!r} share memory (as after "
                    "a.data = b.data) but are two nn.Parameters, which FSDP would train apart: tie "
                    "them before FSDP(...) by using one nn.Parameter for both "
                    "(module.weight = other.weight), or give one a copy"
                )

    def _name(self, node: Node) -> str:
        return self.names(node, self.root)[0]


def _memory_of(param: nn.Parameter) -> tuple[int, int]:
    """Return the first address and the end; 0 for tensors without memory, and for views with gaps,
    which may contain others."""
    if type(param.data) is not torch.Tensor or param.layout != torch.strided:
        return 0, 0
    if param.numel() == 0 or not param.is_contiguous():
        return 0, 0
    begin = param.data_ptr()
    return begin, begin + param.numel() * param.element_size()


def has_forward(module: nn.Module) -> bool:
    """Return whether `module` can be called: containers such as ModuleList cannot."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _common_ancestor(a: Node, b: Node) -> Node:
    while a is not b:
        if a.depth < b.depth:
            a, b = b, a
        assert a.parent is not None, "all nodes are below the root"
        a = a.parent
    return a


def _seals(module: nn.Module, attribute: str) -> bool:
    """Return whether `module` uses its child `attribute` without running the child's hooks."""
    if isinstance(module, _SEALED):
        return True
    return attribute == "parametrizations" and parametrize.is_parametrized(module)
