"""Loading a sharded model from a state dict: every rank's, or rank 0's alone.

The one idea: a model has a place for each of its slices, so values go there straight from where
they are. No rank has a whole tensor, or more than one chunk, beside the model itself.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._agree import gather_bytes, on_all_ranks
from zshard._outline import Pending
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
