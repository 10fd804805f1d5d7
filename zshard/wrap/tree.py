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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from zshard import _core
from zshard.units.extensions import ParamRef
from zshard.units.shards import part_of
from zshard.units.units import Options, is_unit

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
    options, and its own parameters in `named_parameters()` order."""

    module: nn.Module
    name: str
    options: Options = field(default=Options())
    params: list[ParamRef] = field(default_factory=list)
    parts: list[nn.Module] = field(default_factory=list)  # whose direct calls also unshard it

    @property
    def numel(self) -> int:
        """Number of elements in this unit's parameters, without nested units."""
        return sum(ref.param.numel() for ref in self.params)

    @property
    def param_names(self) -> list[str]:
        """The dotted names of its parameters, relative to the root."""
        return [ref.name for ref in self.params]


@dataclass(eq=False, slots=True)
class Node:
    """A module in the dominator tree, and its name, that of the first visit. `numel` counts the
    parameters whose home is here or below: what a unit here would hold if there were none below."""

    module: nn.Module
    name: str
    edges: list[tuple[Node, str]] = field(default_factory=list)  # (holder, attribute), all
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    depth: int = 0
    rank: int = -1  # post-order index; -1 until the walk has left this node
    numel: int = 0
    barred: bool = False  # below a sealed module

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
    param: nn.Parameter
    name: str  # the first
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
                f"this {type(root).__name__} is already wrapped: call FSDP once per module, inner "
                "modules first"
            )
        self._ignored_modules = {id(module) for module in ignored_modules}
        self._ignored_params = {id(param) for param in ignored_params}
        for module in ignored_modules:
            self._ignored_params.update(id(param) for param in module.parameters())
        self._by_id: dict[int, Node] = {}
        self.wrapped: list[tuple[str, nn.Module]] = []  # units of earlier FSDP calls
        self._post_order: list[Node] = []
        self.root = self._visit(root, "")
        self.nodes = list(self._by_id.values())  # in the order of root.modules()
        listed = {id(module) for module in root.modules()}
        lost = next((node for node in self.nodes if id(node.module) not in listed), None)
        if lost is not None:  # torch finds modules by equality: of two equal ones, only the first
            raise ValueError(
                f"module {lost.name!r} compares equal to another one, so model.parameters() lacks "
                f"its parameters: remove __eq__ from {type(lost.module).__name__}"
            )
        self._dominate()
        self._entries: dict[int, _ParamPlaces] = {}
        for node in self.nodes:
            self._collect(node)
        self._refuse_shared()
        for entry in self._entries.values():
            entry.home.numel += entry.param.numel()
        for node in reversed(self.nodes):
            if node.parent is not None:
                node.parent.numel += node.numel

    def find(self, module: nn.Module) -> Node | None:
        """Return the node of `module`, or None if it is not in the tree."""
        return self._by_id.get(id(module))

    def assign(self, options: Mapping[Node, Options], with_empty: bool = False) -> list[UnitSpec]:
        """Assign each parameter to its unit, which the nodes with `options` become; the root is one
        of them.

        Children come before parents, in module order, the root last. A node that is left without
        parameters of its own is dropped, unless `with_empty`; the root never is.
        """
        specs = {
            node: UnitSpec(node.module, node.name, options[node])
            for node in sorted(options, key=lambda node: node.rank)
        }
        for entry in self._entries.values():
            unit = entry.home
            while unit not in specs:
                assert unit.parent is not None, "the root is a unit"
                unit = unit.parent
            owners = tuple((owner.module, attribute) for owner, attribute in entry.owners)
            specs[unit].params.append(ParamRef(entry.name, entry.param, owners))
        root = self.root
        kept = [spec for node, spec in specs.items() if spec.params or with_empty or node is root]
        # Scripts call submodules directly, as generate() calls `model.encoder(ids)` with a shared
        # embedding in the root's unit: modules that own parameters of a root with several units,
        # usually few, and all embeddings. Most modules fail on weights of a shard's shape, but an
        # embedding would silently read wrong rows.
        for spec in kept:
            holders = {id(owner): owner for ref in spec.params for owner, _ in ref.owners}
            all_count = spec is kept[-1] and len(kept) > 1
            spec.parts = [
                owner
                for owner in holders.values()
                if owner is not spec.module
                and (all_count or isinstance(owner, nn.Embedding | nn.EmbeddingBag))
            ]
        return kept

    def _visit(self, module: nn.Module, name: str) -> Node:
        node = self._by_id[id(module)] = Node(module, name)
        for attribute, child in module._modules.items():
            if child is None or id(child) in self._ignored_modules:
                continue
            if is_unit(child):
                self.wrapped.append((_join(name, attribute), child))
                continue
            below = self._by_id.get(id(child))
            if below is None:
                below = self._visit(child, _join(name, attribute))
            elif below.rank < 0:
                continue  # an edge back to a holder: a cycle does not affect dominance
            below.edges.append((node, attribute))
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
                holder.barred
                or isinstance(holder.module, _SEALED)
                or (name == "parametrizations" and parametrize.is_parametrized(holder.module))
                for holder, name in node.edges
            )
        for node in self.nodes[1:]:
            assert node.parent is not None, "only the root has no holder"
            node.parent.children.append(node)

    def _collect(self, node: Node) -> None:
        for attribute, param in node.module._parameters.items():
            if param is None or id(param) in self._ignored_params:
                continue
            name = _join(node.name, attribute)
            entry = self._entries.setdefault(id(param), _ParamPlaces(param, name, [], node))
            entry.owners.append((node, attribute))
            entry.home = _common_ancestor(entry.home, node)
            if isinstance(node.module, torch.jit.ScriptModule):
                raise ValueError(
                    f"parameter {name!r} is in a TorchScript module, which zshard cannot shard: "
                    "shard the Python module, or pass it in ignored_modules="
                )
            if isinstance(param, UninitializedParameter):
                raise ValueError(
                    f"parameter {name!r} of a lazy module is uninitialized: run a forward first"
                )

    def _refuse_shared(self) -> None:
        """Refuse parameters of units of earlier calls; and two with the same memory, as after
        `a.data = b.data`: under DDP they train as one."""
        areas, inner = [], {}
        for prefix, unit in self.wrapped:
            inner.update({id(param): _join(prefix, n) for n, param in unit.named_parameters()})
        for entry in self._entries.values():
            param, name, part = entry.param, entry.name, part_of(entry.param)
            if part is not None and (id(param) in inner or _core.shard_info(param) is not None):
                raise ValueError(
                    f"parameter {name!r} already belongs to a sharded module, as "
                    f"{inner.get(id(param), part.name)!r}: call FSDP() on the module that both "
                    "share first, or once on a module around both"
                )
            # Views with gaps may contain others.
            is_plain = type(param.data) is torch.Tensor and param.layout == torch.strided
            if is_plain and not param.is_meta and param.numel() and param.is_contiguous():
                begin = param.data_ptr()
                areas.append((begin, begin + param.numel() * param.element_size(), name))
        for (_, end, first), (begin, _, second) in itertools.pairwise(sorted(areas)):
            if 0 < begin < end:
                raise ValueError(
                    f"parameters {first!r} and {second!r} share memory but are two nn.Parameters: "
                    "tie them (module.weight = other.weight) before FSDP(...), or copy one"
                )


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
