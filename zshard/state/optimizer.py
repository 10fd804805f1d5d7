"""state_dict() and load_state_dict() of optimizers over sharded parameters: full tensors.

The optimizer state of a sharded parameter is sharded like the parameter. A torch hook, after
torch's packing and before any hook of the user's, gathers the shards, a tensor at a time. Loading
(optimizer_load.py) takes this rank's shard of each full tensor. So the result is what the same
optimizer over the unsharded model would save, and it loads under any strategy, at any world size,
and into the unsharded model's optimizer.

Saving is collective; ranks agree first on what to gather. Over shm, however, the saving rank reads
the others' memory (optim/shared_state.py), unless the state is offloaded. Loading is not
collective: each rank has all it needs, or zshard.load() reads shards from files.

Optimizers without parameters of a wrapped model keep torch's behavior.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.whole_values import new_full, read_full
from zshard.optim.hooks import is_older, know, post
from zshard.optim.sharded_state import (
    copied,
    facts_of_other,
    full_state_of,
    held_by,
    other_state,
    params_of,
    takes_full_state,
)
from zshard.optim.shared_state import FullState, read_peers
from zshard.ranks.agreement import PublicCall, check_agreement, gather, on_any_rank
from zshard.ranks.devices import CPU
from zshard.state.optimizer_load import has_parts, load
from zshard.state.source import filled
from zshard.units import returned
from zshard.units.returned import tensors_in
from zshard.units.shards import part_of
from zshard.units.units import State

_torchs_save = Optimizer.state_dict


def install() -> None:
    """Make torch's optimizers save and load full tensors. Idempotent."""
    Optimizer.state_dict = _save  # type: ignore[method-assign]
    Optimizer.load_state_dict = load  # type: ignore[method-assign]


@functools.wraps(_torchs_save)
def _save(self: Optimizer) -> dict[str, Any]:
    if not has_parts(self):
        if any(_core.slice_part(value) is not None for value in tensors_in(self.state)):
            raise ShardError(
                "state_dict() of a copied optimizer, whose state is shards of no model: copy both, "
                "copy.deepcopy((model, optimizer)), or save the optimizer itself"
            )
        return _torchs_save(self)
    with self.register_state_dict_post_hook(_with_full_state, prepend=True):
        return _torchs_save(self)


def _note_returned(
    optimizer: Optimizer, numbers: Mapping[int, Any], saved: Mapping[Any, Any]
) -> None:
    """Have lost writes to the copies noticed; other tensors are the optimizer's own."""
    found: dict[State, dict[str, Tensor]] = {}
    for param in params_of(optimizer):
        part, entries = part_of(param), saved.get(numbers[id(param)])
        state = part.state if part is not None and part.is_cut else None
        own = optimizer.state.get(param, {})
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if part is None or state is None or value is own.get(key):
                continue
            if returned.is_plain(value) and value.numel() > 0:
                found.setdefault(state, {})[f"'{key}' of '{part.name}'"] = value
    for state, tensors in found.items():
        said = "optimizer.state_dict()", "optimizer.load_state_dict()"
        returned.note(state, tensors, said)


def _with_full_state(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Torch's post-hook of state_dict(). gather_state() documents which ranks call it."""
    listed = (number for group in packed["param_groups"] for number in group["params"])
    numbers = {id(p): number for p, number in zip(params_of(optimizer), listed, strict=True)}
    whole = {numbers[id(param)]: entries for param, entries in gather_state(optimizer)}
    state = packed["state"]
    if whole:  # copy the rest as well: otherwise it could be one step newer
        state = {
            number: _snapshot(own, whole[number]) if number in whole else copied(own)
            for number, own in state.items()
        }
    _note_returned(optimizer, numbers, state)
    return {**packed, "state": state}


def _snapshot(entries: object, whole: Mapping[Any, Tensor]) -> object:
    """Return a parameter's state with `whole` in place of shards; all values are copies."""
    if not isinstance(entries, Mapping):
        return copied(entries)
    return {k: whole[k] if k in whole else filled(v) for k, v in entries.items()}


@PublicCall("optimizer.state_dict()")
@torch.inference_mode(False)  # later steps write to the result
def gather_state(optimizer: Optimizer, keep: bool = True) -> FullState:
    """Return the sharded parameters, each with the full tensors of its sharded state.

    keep: return the state; otherwise this rank only sends its shards, holds one full tensor at a
        time, and returns empty dicts.

    Collective over the ranks of the parameters' models, except over shm, where a rank reads the
    others' memory. Raises DivergenceError if their states differ in parameters, names, shapes or
    dtypes; RuntimeError for shards within a list or dict, or under a key that is no parameter.
    """
    if takes_full_state(optimizer):
        optimizer.full_state()  # type: ignore[attr-defined]
        return []
    other = facts_of_other(other_state(optimizer.state))
    older = _still_full(optimizer)
    if older is not None:
        return older if keep else [(param, {}) for param, _ in older]
    know(optimizer)
    held = held_by(optimizer)
    result: FullState = []
    for model in dict.fromkeys(each.part.peers for each in held):
        mine = [each for each in held if each.part.peers is model]
        if model is not None and keep:
            result += read_peers(optimizer, model, mine)
        elif model is not None:
            result += [(each.param, {}) for each in mine]
    for comm in dict.fromkeys(each.part.comm for each in held if each.part.peers is None):
        mine = [e for e in held if e.part.peers is None and e.part.comm is comm]
        check_agreement(comm, [*(each.fact for each in mine), *other], "optimizers")
        nested = [each.nested is not None for each in mine]
        if on_any_rank(comm, any(nested)):
            everyone = zip(*gather(comm, nested), strict=True)
            for each in itertools.compress(mine, map(all, everyone)):
                each.refuse_nested()
        entries = [entry for each in mine for entry in each.shards.values()]
        full = [new_full(entry, CPU) for entry in entries if keep]
        read_full(entries, full if keep else [None for _ in entries])
        values = iter(full)
        for each in mine:
            whole = {key: next(values) for key in each.shards if keep}
            result.append((each.param, whole))
    return result


def _still_full(optimizer: Optimizer) -> FullState | None:
    """Return copies of state that is older than the sharded models and that no step has sharded
    yet: this rank has all of it, so it needs no other rank. None: some of it is sharded, or the
    ranks read it together, and shard it."""
    held = held_by(optimizer)
    if not is_older(optimizer) or any(each.part.peers is None for each in held):
        return None
    full = {(id(p), key) for key, own in full_state_of(optimizer).items() for p, _ in own}
    cut = {(id(each.param), key) for each in held for key in each.shards}
    if not full or not cut <= full:
        return None
    post(optimizer)
    return [
        (e.param, {k: filled(v) for k, v in e.state.items() if (id(e.param), k) in full})
        for e in held
    ]
