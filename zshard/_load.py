"""Loading a sharded model from one rank's state dict, or from safetensors files.

The one idea: a model has a place for each of its slices, so values go there straight from where
they are. No rank has a whole tensor, or more than one chunk, beside the model itself.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._agree import bytes_of, gather_bytes, on_all_ranks
from zshard._outline import Pending
from zshard._safetensors import Checkpoint, Entry
from zshard._stream import CHUNK, chunks, comm_of, flat_of, stream


def load_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    from_rank0: bool = False,
) -> Any:
    """Loads whole tensors under plain names into a sharded model; nothing changes unless all fits.

    model: one with FSDP modules, over any ranks; its parameters and buffers are written in place.
    state: {name: tensor} as state_dict() gives it, each of the parameter's or buffer's whole shape;
        dtypes may differ within floating-point, complex, and whole numbers, and are cast.
    strict: missing and unexpected names are an error.
    from_rank0: only rank 0 passes a state, the others None; values are sent in chunks of 16 MiB, of
        which each rank keeps its part. Else each rank passes the same.

    For all ranks together, outside of forward and backward. Returns missing and unexpected keys, as
    nn.Module.load_state_dict does. Load hooks and `_load_from_state_dict` of modules run before
    anything is copied, and with from_rank0 before any value is there: then they see names, shapes
    and dtypes, and may rename, drop or replace entries; one that asks for values is an error. At
    the end extra state is set and post hooks run; `strict` is judged before them.

    Raises RuntimeError, on all ranks, that lists what does not fit; ValueError for a model without
    sharded modules, or a state on another rank than 0; TypeError for a state that is no dict of
    tensors; DivergenceError where ranks would load different tensors.
    """
    comm = comm_of(model)
    given = {} if state is None else state
    with on_all_ranks(comm):
        if from_rank0 and comm.rank != 0 and len(given) > 0:
            raise ValueError("load_state_dict(from_rank0=True) got a state of this rank's own, too")
        _check_state(given if not from_rank0 or comm.rank == 0 else {})
    if not from_rank0:
        return stream(model, given, strict, None, comm)
    outline = _from_rank_0(comm, _outline_of(given) if comm.rank == 0 else None)
    return stream(model, outline, strict, _Sent(comm, given, outline), comm)


def load(path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True) -> Any:
    """Loads safetensors files into a sharded model; nothing changes unless all of it fits.

    path: a .safetensors file, or a folder as Hugging Face has them: with model.safetensors, or with
        several files and their model.safetensors.index.json. All ranks have to see the same.
    model: one with FSDP modules, over any ranks; its parameters and buffers are written in place.
        Names in the files are those of model.state_dict(); of tied parameters one name is enough.
        Dtypes as for zshard.load_state_dict.
    strict: missing and unexpected names are an error.

    Each rank reads its own parts only, straight into its shards. A model whose values all come from
    files is set up without others by `FSDP(model, param_init_fn=zshard.empty)` of a model on the
    meta device.

    For all ranks together, outside of forward and backward. Returns missing and unexpected keys;
    hooks as for zshard.load_state_dict.

    Raises, on all ranks and before the model changes: OSError or ValueError for files that cannot
    be read or are not valid, RuntimeError that lists what does not fit, DivergenceError where the
    ranks see different files. A file that fails while its data is read is an OSError or ValueError,
    too, and the model is then loaded in part.
    """
    comm = comm_of(model)
    opened: list[Checkpoint] = []
    try:
        with on_all_ranks(comm, lambda: _facts(opened[0])):
            opened.append(Checkpoint(path))
        entries = opened[0].entries
        state = OrderedDict(
            (name, Pending.of(name, e.shape, e.dtype)) for name, e in entries.items()
        )
        _add_tied(model, state)
        return stream(model, state, strict, _Read(entries), comm)
    finally:
        for checkpoint in opened:
            checkpoint.close()


# --- where values come from -----------------------------------------------------------------------


class _Sent:
    """Rank 0 has all tensors; the others know what they are like."""

    def __init__(
        self, comm: _core.Comm, state: Mapping[str, Any], outline: Mapping[str, Any]
    ) -> None:
        self._comm, self._state, self._outline = comm, state, outline
        self._memory = torch.empty(CHUNK, dtype=torch.uint8)

    def read(self, name: str, begin: int, target: Tensor) -> None:
        numel, dtype = self._outline[name].numel(), self._outline[name].dtype
        whole = self._state[name].detach().reshape(-1) if self._comm.rank == 0 else None
        with flat_of(target) as flat:
            end = begin + flat.numel()
            for first, last in chunks(numel, dtype):
                sent = self._memory[: (last - first) * dtype.itemsize]
                chunk = sent.view(dtype)
                if whole is not None:
                    chunk.copy_(whole[first:last])
                self._comm.broadcast(sent, 0)
                low, high = max(first, begin), min(last, end)
                if low < high:
                    flat[low - begin : high - begin].copy_(chunk[low - first : high - first])


class _Read:
    """Tensors are in files."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, begin: int, target: Tensor) -> None:
        entry = self._entries[name]
        offset = entry.begin + begin * entry.dtype.itemsize
        with flat_of(target) as flat:
            if flat.dtype == entry.dtype and flat.device.type == "cpu":
                entry.file.read_into(bytes_of(flat), offset)
                torch.autograd.graph.increment_version(target)
                return
            for first, last in chunks(flat.numel(), entry.dtype):
                chunk = self._chunk(last - first, entry.dtype)
                entry.file.read_into(bytes_of(chunk), offset + first * entry.dtype.itemsize)
                flat[first:last].copy_(chunk)

    def _chunk(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._memory.numel() == 0:
            self._memory = torch.empty(CHUNK, dtype=torch.uint8)
        return self._memory[: numel * dtype.itemsize].view(dtype)


# --- what is in them ------------------------------------------------------------------------------


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a state dict is a mapping of names to tensors, not {type(state).__name__}"
        )
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"a state dict has names as keys, not {name!r}")
        if not isinstance(value, Tensor):
            continue
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided:
            raise TypeError(f"'{name}' in the state dict is no plain tensor, but {_text(value)}")
        if value.is_meta:
            raise TypeError(f"'{name}' in the state dict is on the meta device: it has no values")


def _text(value: Tensor) -> str:
    return f"a {type(value).__name__} of layout {value.layout}"


def _outline_of(state: Mapping[str, Any]) -> Any:
    """All of a state dict but the tensors' values: what the other ranks have to know."""
    tensors = {n: (tuple(v.shape), v.dtype) for n, v in state.items() if isinstance(v, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return list(state), tensors, others, getattr(state, "_metadata", None)


def _from_rank_0(comm: _core.Comm, outline: Any) -> OrderedDict[str, Any]:
    """The state dict of rank 0, with Pending tensors. Ranks trust one another, as they do in
    torch.distributed's collectives of objects."""
    data = b""
    with on_all_ranks(comm):
        data = pickle.dumps(outline) if comm.rank == 0 else b""
    names, tensors, others, metadata = pickle.loads(gather_bytes(comm, data)[0])
    made: OrderedDict[str, Any] = OrderedDict(
        (name, Pending.of(name, *tensors[name]) if name in tensors else others[name])
        for name in names
    )
    if metadata is not None:
        made._metadata = metadata  # type: ignore[attr-defined]
    return made


def _facts(checkpoint: Checkpoint) -> list[Any]:
    return sorted((name, e.shape, str(e.dtype)) for name, e in checkpoint.entries.items())


def _add_tied(model: nn.Module, state: OrderedDict[str, Any]) -> None:
    """Gives all names of a tied tensor what stands under one of them: files have it once."""
    names: dict[int, list[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    for same in names.values():
        there = next((name for name in same if name in state), None)
        for name in same:
            if there is not None and name not in state:
                state[name] = state[there]
