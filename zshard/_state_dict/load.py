"""Load a sharded model from a state dict, which every rank passes, or only rank 0.

The one idea: values go directly into the shards. Beside the model itself, no rank needs memory for
a full tensor, or for more than one chunk.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._ranks.agreement import gather_bytes, on_all_ranks
from zshard._state_dict.load_plan import CHUNK, chunks, comm_of, flat_of, stream
from zshard._state_dict.stand_ins import Pending


def load_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    from_rank0: bool = False,
) -> Any:
    """Load an unsharded state dict into a sharded model; change nothing unless all of it fits.

    Collective: call it on all ranks, outside forward and backward.

    model: a model with FSDP modules; its parameters and buffers are written in place.
    state: {name: tensor} as from state_dict(), with full shapes. Dtypes are cast, within
        floating-point, complex and integer dtypes.
    strict: raise an error for missing and unexpected names.
    from_rank0: only rank 0 passes a state, and the other ranks pass None. Rank 0 sends the values
        in chunks of 16 MiB, of which each rank keeps its shards. Otherwise each rank passes the
        same state.

    Returns missing and unexpected keys, like nn.Module.load_state_dict(). Load hooks and
    `_load_from_state_dict` of modules run before anything is copied. With from_rank0 they see
    names, shapes and dtypes, and may rename, drop or replace entries; asking for values is an
    error. Extra state and post hooks come last, after `strict` is applied.

    Raises, on all ranks: RuntimeError listing everything that does not fit; ValueError if the model
    has no sharded modules, or if a rank other than 0 passes a state with from_rank0; TypeError if
    the state is not a dict of tensors; DivergenceError if ranks would load different tensors.
    """
    comm = comm_of(model)
    given = {} if state is None else state
    with on_all_ranks(comm):
        if from_rank0 and comm.rank != 0 and len(given) > 0:
            raise ValueError(
                f"load_state_dict(from_rank0=True) got a state on rank {comm.rank}: pass None on "
                "all ranks but 0"
            )
        _check_state(given if not from_rank0 or comm.rank == 0 else {})
    if not from_rank0:
        return stream(model, given, strict, None, comm)
    outline = _from_rank_0(comm, _outline_of(given) if comm.rank == 0 else None)
    return stream(model, outline, strict, _Sent(comm, given, outline), comm)


# --- the source of values -------------------------------------------------------------------------


class _Sent:
    """Rank 0 has all tensors; the other ranks know names, shapes and dtypes."""

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


# --- the state dict -------------------------------------------------------------------------------


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping from names to tensors, got {type(state).__name__}"
        )
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"state dict keys must be strings, got {name!r}")
        if not isinstance(value, Tensor):
            continue
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided:
            raise TypeError(
                f"'{name}' in the state dict must be a plain strided tensor, got {_text(value)}"
            )
        if value.is_meta:
            raise TypeError(f"'{name}' in the state dict is on the meta device and has no values")


def _text(value: Tensor) -> str:
    return f"a {type(value).__name__} of layout {value.layout}"


def _outline_of(state: Mapping[str, Any]) -> Any:
    """Everything in a state dict but the tensors' values, for the other ranks."""
    tensors = {n: (tuple(v.shape), v.dtype) for n, v in state.items() if isinstance(v, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return list(state), tensors, others, getattr(state, "_metadata", None)


def _from_rank_0(comm: _core.Comm, outline: Any) -> OrderedDict[str, Any]:
    """The state dict of rank 0, with Pending tensors. Ranks trust one another, as in
    torch.distributed's object collectives."""
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
