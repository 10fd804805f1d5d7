"""Chooses the parameters that Muon should update: the weight matrices of hidden layers.

Shapes are not enough: an embedding is a matrix as well, but its rows have nothing to do with each
other, and a head is one that maps to the vocabulary. Module types and ties are.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zshard.api import SizeOf, one_tensor, plain_name

__all__ = ["bytes_by_name", "groups_of", "hidden_matrices"]

_OF_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield the matrices of a module that maps vectors to vectors."""
    names: tuple[str, ...] = ()
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        names = ("weight",)
    elif isinstance(module, nn.MultiheadAttention):
        names = _OF_ATTENTION
    for weight in (getattr(module, name, None) for name in names):
        if isinstance(weight, nn.Parameter) and weight.is_floating_point() and weight.ndim == 2:
            yield weight


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D (GPT-2): a Linear whose weight is transposed."""
    utilities = sys.modules.get("transformers.pytorch_utils")  # if it has one, this is imported
    return isinstance(module, getattr(utilities, "Conv1D", ()))


def hidden_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are matrices of hidden layers.

    These are the weights of nn.Linear, nn.MultiheadAttention and transformers' Conv1D, without
    those that an nn.Embedding has as well (tied), and without the output head: the model's last
    nn.Linear, if the model has no embedding, or one with as many rows as the Linear has outputs.
    """
    hidden: set[int] = set()
    embeddings: list[nn.Module] = []
    last: nn.Linear | None = None
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.append(module)
        if isinstance(module, nn.Linear):
            last = module
        hidden.update(map(id, _weights(module)))
    hidden -= {id(each.weight) for each in embeddings}
    sizes = {each.num_embeddings for each in embeddings}
    if last is not None and (not sizes or last.out_features in sizes):
        hidden.discard(id(last.weight))
    return hidden


def bytes_by_name(name: str, model: nn.Module) -> SizeOf:
    """Return the function for the bytes of the state of Muon(model)."""
    hidden = hidden_matrices(model)
    return lambda param, numel: one_tensor(param, numel) * (1 if id(param) in hidden else 2)


def groups_of(model: nn.Module, split: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return param groups for the model's matrices and for its other parameters, and a line that
    says what is in them.

    split: the option `split` of matrices, by patterns of their names; a number for a Conv1D is one
    of columns, where its outputs are.

    Raises ValueError for a pattern that matches no matrix.
    """
    hidden = hidden_matrices(model)
    rest: list[tuple[str, Tensor]] = []
    by_split: dict[str, tuple[Any, list[tuple[str, Tensor]]]] = {}
    turned = {id(module.weight) for module in model.modules() if _is_conv1d(module)}
    unused = set(split)
    for full, param in model.named_parameters():
        name = plain_name(full)
        if id(param) not in hidden:
            rest.append((name, param))
            continue
        pattern = next((each for each in split if fnmatch.fnmatchcase(name, each)), None)
        unused.discard(str(pattern))
        cut = None if pattern is None else split[pattern]
        if isinstance(cut, int) and id(param) in turned:
            cut = ("columns", cut)
        by_split.setdefault(repr(cut), (cut, []))[1].append((name, param))
    if unused:
        names = _shown([name for _, params in by_split.values() for name, _ in params])
        raise ValueError(f"split: {sorted(unused)[0]!r} matches no name of Muon's: pass {names}")
    groups = [{"params": ps, "use_muon": True, "split": cut} for cut, ps in by_split.values()]
    if rest:
        groups.append({"params": rest, "use_muon": False})
    n_matrices = sum(len(params) for _, params in by_split.values())
    others = [name for name, param in rest if param.ndim == 2]
    text = (
        f"Muon updates {n_matrices} matrices of hidden layers, AdamW the other {len(rest)} "
        f"parameters{f', with these matrices: {_shown(others)}' if others else ''}. To choose "
        "otherwise, pass param groups with use_muon=True or False"
    )
    return groups, text


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
