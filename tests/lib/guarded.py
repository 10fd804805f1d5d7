"""Guarded shards without ranks: one process plays a rank that has some elements of each tensor."""

from types import SimpleNamespace

import torch
from torch import nn

from zshard import ShardParameter, _core, _patches, to_local
from zshard.units.shards import Part

_patches.install()  # as the first FSDP(...) of a process does


def part_like(whole, name="weight", begin=None, numel=None):
    """Some elements from the middle of a tensor: two more than a third of them, not whole rows."""
    begin = whole.numel() // 3 if begin is None else begin
    numel = min(whole.numel() - begin, whole.numel() // 3 + 2) if numel is None else numel
    comm = SimpleNamespace(world=3)
    shape = tuple(whole.shape)
    return Part(comm, comm, shape, begin, numel, whole.dtype, True, [name], [], lambda: None, 0)


def shard_of(whole, part):
    """Return the rank's shard of the tensor, guarded."""
    return _core.mark_slice(part.of(whole).clone(), part)


def sharded_parameter(whole, name="weight"):
    """A guarded parameter."""
    part = part_like(whole, name)
    param = nn.Parameter(part.of(whole).clone())
    param._zshard_part = part
    param.__class__ = ShardParameter
    return param


def same(a, b):
    """Return whether two tensors, guarded or not, are equal on this rank."""
    return torch.equal(to_local(a), to_local(b))


def part_of(tensor):
    return _core.slice_part(tensor)


def equal_to_shard(tensor, whole):
    """Return whether a guarded tensor is bit-identical to the rank's shard of `whole`."""
    return torch.equal(tensor.to_local(), part_of(tensor).of(whole.detach()))
