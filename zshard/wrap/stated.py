"""FileBlocks that a model states itself.

A class may say what to shard by two attributes, which models of several libraries have:

- `_fsdp_plan`, a dict of paths below the module: in "layers.*" the star stands for a number. Its
  values say what stays gathered after a forward, which here is the strategy's to say.
- `_no_split_modules`, names of classes whose modules stay in one piece.
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

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def stated_blocks(tree: ModuleTree) -> dict[Node, str]:
    """Return the modules that the root, or a module above, states to be blocks, each with the name
    of the attribute that states it.

    What repeats is a block: a path with a star, a class with several modules. A path or a class
    that fits no module states nothing. A lesser part of a layer in a list (its attention) stands
    for the layer.
    """
    found: dict[Node, str] = {}
    for attribute, modules_of in _STATEMENTS.items():
        for speaker in _with(tree, attribute):
            statement = getattr(speaker.module, attribute)
            if isinstance(statement, Mapping | list | tuple | set | frozenset):
                for module in modules_of(speaker.module, set(statement)):
                    node = tree.find(module)
                    if node is not None:
                        found.setdefault(_layer_of(node, speaker), attribute)
    return found


def _with(tree: ModuleTree, attribute: str) -> list[Node]:
    """Return the nodes whose modules have an attribute. Module.__getattr__() would be slow for the
    many that have not."""
    kinds: dict[type, bool] = {}
    found = []
    for node in tree.nodes:
        kind = node.module.__class__
        if kind not in kinds:
            kinds[kind] = hasattr(kind, attribute)
        if kinds[kind] or attribute in node.module.__dict__:
            found.append(node)
    return found


def is_list(node: Node) -> bool:
    return isinstance(node.module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _layer_of(node: Node, speaker: Node) -> Node:
    layer = node
    while layer.parent not in (None, speaker):
        if is_list(layer.parent):
            return node if 2 * node.numel >= layer.numel else layer
        layer = layer.parent
    return node


def _planned(model: nn.Module, paths: set[Any]) -> list[nn.Module]:
    named = model.named_modules()
    starred = ((_NUMBER.sub(".*", plain_name(name)), module) for name, module in named)
    return [module for path, module in starred if "*" in path and path in paths]


def _of_classes(model: nn.Module, classes: set[Any]) -> list[nn.Module]:
    kinds = [
        (parametrize.type_before_parametrizations(module).__name__, module)
        for module in model.modules()
    ]
    counts = Counter(kind for kind, _ in kinds)
    return [module for kind, module in kinds if kind in classes and counts[kind] > 1]


_STATEMENTS = {"_fsdp_plan": _planned, "_no_split_modules": _of_classes}
