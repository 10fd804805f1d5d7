"""auto_wrap_policy="auto": find the units of a model from what it states and from its structure.

What a model states to be its blocks are its blocks. Its class, or one above it, may say what to
shard by two attributes, which models of several libraries have:

- `_fsdp_plan`, a dict of paths below the module: in "layers.*" the star stands for a number. Its
  values say what stays gathered after a forward, which here is the strategy's to say.
- `_no_split_modules`, names of classes whose modules stay in one piece.

Elsewhere, big models repeat themselves: children of one container that share a class are the
model's blocks. The outermost level whose blocks are small enough becomes the units; the remainder
(embeddings, heads, models without repetition) is cut by size. All limits are fractions of the
model, so a model and its tiny copy in a test get the same units.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from zshard.units.units import plain_name
from zshard.wrap.tree import ModuleTree, Node

# Open a block above this share if it has blocks inside: two gathered units, what a step holds at a
# time, would be half the model.
_LARGE = 1 / 4
# Do not open a container for blocks that together hold less than this share.
_WORTHWHILE = 1 / 20
# Left-over modules from this share on become units, or from this share of the largest block if that
# is less: next to two gathered blocks, smaller modules do not matter.
_LEFTOVER = 1 / 100
_LEFTOVER_TO_BLOCK = 1 / 4
# A block is tiny, and not a unit, if it has less than this share and this number of elements. If
# such blocks hold most of a large share of the model, they must also be fewer than a handful.
_TINY = 1 / 1000
_TINY_AT_MOST = 1 << 20
_HANDFUL = 256
# Inner blocks replace a block if they hold this share of it.
_MOST = 1 / 2
# A module with children that holds this share of the model is the entire model, not a part of it.
_WHOLE = 9 / 10


def auto_units(tree: ModuleTree) -> list[Node]:
    """Return the nodes of `tree` that become units, without the root."""
    return _AutoWrap(tree).run() if tree.root.numel else []


class _AutoWrap:
    def __init__(self, tree: ModuleTree) -> None:
        self._root = tree.root
        self._nodes = tree.nodes
        self._total = tree.root.numel
        self._tiny = min(_TINY * self._total, _TINY_AT_MOST)
        self._stated = {node for node in stated_blocks(tree) if node.numel >= self._tiny}
        self._units: dict[Node, None] = {}  # an ordered set
        self._leftover = 0.0  # the elements from which a left-over module becomes a unit
        self._above: set[Node] = set()  # nodes with a block below

    def run(self) -> list[Node]:
        blocks = self._blocks(self._root)
        self._units.update(dict.fromkeys(blocks))
        largest = max((block.numel for block in blocks), default=self._total)
        self._leftover = min(_LEFTOVER * self._total, _LEFTOVER_TO_BLOCK * largest)
        for node in reversed(self._nodes):  # children first
            if node.parent is not None and (node in self._units or node in self._above):
                self._above.add(node.parent)
        self._take_leftovers(self._root)
        return list(self._units)

    def _may_be_unit(self, node: Node) -> bool:
        return node is not self._root and node.numel > 0 and node.may_be_unit

    def _blocks(self, node: Node) -> list[Node]:
        """Return the repeated blocks below `node`, at the outermost level that is fine enough."""
        repeated = self._repeated(node)
        blocks: list[Node] = []
        for child in node.children:
            inner = self._blocks(child)
            if child not in repeated:
                blocks += inner
                continue
            # A block's single layers (the Linears of its MLP) are not blocks themselves.
            inner = [block for block in inner if not block.is_leaf]
            blocks += inner if self._is_opened(node, child, inner) else [child]
        return blocks

    def _repeated(self, node: Node) -> set[Node]:
        """Return the children of `node` that are blocks: the model states them, or they share a
        class and are large enough for units.

        In a list, any layer may be a block (a stack of Linear). Among named attributes, only
        modules with children may: otherwise the q, k and v of an attention would be blocks.
        """
        in_list = is_list(node)
        candidates = [
            child
            for child in node.children
            if self._may_be_unit(child) and (in_list or not child.is_leaf)
        ]
        by_class: dict[type, list[Node]] = {}
        for child in candidates:
            kind = parametrize.type_before_parametrizations(child.module)
            by_class.setdefault(kind, []).append(child)
        repeated = {child for group in by_class.values() for child in self._worthwhile(group)}
        repeated.update(filter(self._may_be_unit, self._stated.intersection(node.children)))
        if in_list and repeated:  # a layer of a rarer kind: the attention of a hybrid model
            least = min(child.numel for child in repeated) / 2
            repeated.update(
                child for child in candidates if not child.is_leaf and child.numel >= least
            )
        return repeated

    def _worthwhile(self, group: list[Node]) -> list[Node]:
        """Return those modules of one class that are big enough, in number or in size."""
        together = sum(node.numel for node in group)
        if len(group) < 2 or together < _WORTHWHILE * self._total:
            return []
        big = [node for node in group if node.numel >= self._tiny]
        if sum(node.numel for node in big) >= _MOST * together:
            return big
        if together < _LARGE * self._total:
            return []
        return [node for node in group if node.numel >= _HANDFUL]

    def _is_opened(self, holder: Node, block: Node, inner: list[Node]) -> bool:
        """Return whether the blocks inside `block` replace it.

        In a list, they replace a large block (the stages of a Swin, not the layers of a mixture of
        experts). Among named attributes they always do (encoder and decoder, a ResNet's layer1 to
        layer4): those are the model's parts rather than its blocks.
        """
        if sum(child.numel for child in inner) < _MOST * block.numel:
            return False
        return block.numel > _LARGE * self._total or not is_list(holder)

    def _take_leftovers(self, node: Node) -> None:
        """Add the large modules outside the blocks that are not worth splitting further.

        A module around blocks is never one: its own parameters are usually few, and other code
        reaches through such wrappers (`model.language_model.get_input_embeddings()`).
        """
        if node in self._units or node.numel < self._leftover:
            return
        largest = max((child.numel for child in node.children), default=0)
        can_be_cut = node.numel > _LARGE * self._total and largest >= self._leftover
        if node in self._above or can_be_cut or not self._may_be_unit(node):
            for child in node.children:
                self._take_leftovers(child)
        elif node.is_leaf or node.numel < _WHOLE * self._total:
            self._units[node] = None


def is_list(node: Node) -> bool:
    return isinstance(node.module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


# --- what models state ----------------------------------------------------------------------------

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def stated_blocks(tree: ModuleTree) -> dict[Node, str]:
    """Return the modules that the root, or a module above, states to be blocks, each with the name
    of the attribute that states it.

    What repeats is a block: a path with a star, a class with several modules. A path or a class
    that fits no module states nothing. A lesser part of a layer in a list (its attention) stands
    for the layer.
    """
    blocks: dict[Node, str] = {}
    for attribute in ("_fsdp_plan", "_no_split_modules"):
        # Module.__getattr__() would be slow for the many that have none.
        has = {kind: hasattr(kind, attribute) for kind in {type(n.module) for n in tree.nodes}}
        for speaker in tree.nodes:
            model = speaker.module
            if not has[type(model)] and attribute not in vars(model):
                continue
            statement = getattr(model, attribute)
            if isinstance(statement, Mapping | list | tuple | set | frozenset):
                for node in map(tree.find, _stated(model, attribute, set(statement))):
                    if node is not None:
                        blocks.setdefault(_layer_of(node, speaker), attribute)
    return blocks


def _stated(model: nn.Module, attribute: str, words: set[Any]) -> list[nn.Module]:
    if attribute == "_fsdp_plan":
        named = model.named_modules()
        starred = [(_NUMBER.sub(".*", plain_name(name)), module) for name, module in named]
        return [module for path, module in starred if "*" in path and path in words]
    kinds = [
        (parametrize.type_before_parametrizations(module).__name__, module)
        for module in model.modules()
    ]
    counts = Counter(kind for kind, _ in kinds)
    return [module for kind, module in kinds if kind in words and counts[kind] > 1]


def _layer_of(node: Node, speaker: Node) -> Node:
    layer = node
    while layer.parent not in (None, speaker):
        if is_list(layer.parent):
            return node if 2 * node.numel >= layer.numel else layer
        layer = layer.parent
    return node
