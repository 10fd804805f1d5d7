"""Do the ranks hold the same? Asked of a model at wrap time, before anything is shared, and of an
optimizer before its state is gathered. And has the last thing that they did gone well on all?

The one idea: ranks exchange one short hash; only if it differs do they exchange the whole
description, find the first difference and all raise the same error. An outcome is as short.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zshard import _core
from zshard._checkpoint.manifest import CheckpointError

Fact = tuple[str, str]  # (what it is about, what it says)


def check_agreement(comm: _core.Comm, facts: Sequence[Fact], what: str = "models") -> None:
    """Raises DivergenceError on every rank, naming the first fact that differs.

    what: which things these are facts of, in the plural.
    """
    if comm.world == 1:
        return
    digest = hashlib.sha256(repr(list(facts)).encode()).digest()
    if len(set(comm.exchange(digest))) == 1:
        return
    everyone = [json.loads(each) for each in gather_bytes(comm, json.dumps(list(facts)).encode())]
    for rank in range(1, comm.world):
        difference = _first_difference(everyone[0], everyone[rank], rank)
        if difference is not None:
            raise _core.DivergenceError(f"the {what} differ between ranks: {difference}")


def gather_bytes(comm: _core.Comm, mine: bytes) -> list[bytes]:
    """What each rank gives, of whatever length, in rank order. Collective."""
    gathered = []
    for root, length in enumerate(comm.exchange(len(mine).to_bytes(8, "little"))):
        data = bytearray(mine if root == comm.rank else int.from_bytes(length, "little"))
        if data:
            comm.broadcast(torch.frombuffer(data, dtype=torch.uint8), root)
        gathered.append(bytes(data))
    return gathered


_TEXT = 2000  # bytes of a message that the other ranks get
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError, OSError),
        *(NotImplementedError, CheckpointError, ValueError, TypeError, MemoryError),
    )
}


@contextlib.contextmanager
def on_all_ranks(comm: _core.Comm, fact: Callable[[], Any] | None = None) -> Iterator[None]:
    """Context that ends on all ranks as on the worst of them: what raises on one is raised by all.

    fact: what has to be equal on all ranks when it ends. Collective. Raises the rank's own
    exception; where that has none, one of that kind (OSError, RuntimeError) that names the rank;
    DivergenceError where `fact` differs.
    """
    error: Exception | None = None
    digest = b""
    try:
        yield
        digest = hashlib.sha256(repr(fact()).encode()).digest() if fact is not None else b""
    except (_core.PeerError, _core.DivergenceError):
        raise  # the others have heard
    except Exception as caught:
        error = caught
    said = f"{_kind_of(error)}\n{error}".encode(errors="replace")[:_TEXT] if error else b""
    outcomes = comm.exchange(said.ljust(_TEXT, b"\0") + digest.ljust(32, b"\0"))
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        kind, _, text = outcome[:_TEXT].rstrip(b"\0").decode(errors="replace").partition("\n")
        if kind:
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank}: {text}")
    for rank, outcome in enumerate(outcomes):
        if outcome[_TEXT:] != outcomes[0][_TEXT:]:
            raise _core.DivergenceError(f"rank {rank} has other tensors to load than rank 0")


def _kind_of(error: Exception | None) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "RuntimeError")


def _first_difference(ours: list[Fact], theirs: list[Fact], rank: int) -> str | None:
    for mine, other in zip(ours, theirs, strict=False):
        if mine == other:
            continue
        if mine[0] != other[0]:
            return (
                f"where rank 0 has {mine[0]} ({mine[1]}), rank {rank} has {other[0]} ({other[1]})"
            )
        return f"{mine[0]} is {mine[1]} on rank 0 and {other[1]} on rank {rank}"
    if len(ours) != len(theirs):
        longer, rank_of = (ours, 0) if len(ours) > len(theirs) else (theirs, rank)
        extra = longer[min(len(ours), len(theirs))]
        return f"only rank {rank_of} has {extra[0]} ({extra[1]})"
    return None


def tensor_fact(kind: str, name: str, tensor: torch.Tensor) -> Fact:
    """What has to agree of a parameter or buffer."""
    grad = ", trainable" if tensor.requires_grad else ""
    return f"{kind} '{name}'", f"shape {tuple(tensor.shape)}, {tensor.dtype}{grad}"


def value_fact(name: str, tensor: torch.Tensor) -> Fact:
    """A checksum of the values."""
    return f"the value of '{name}'", f"of checksum {checksum(tensor):08x}"


def checksum(tensor: torch.Tensor) -> int:
    """Of a tensor's values; 32 bits."""
    plain = tensor.detach().cpu().contiguous()  # it may be a copy, and has to outlive its bytes
    return zlib.crc32(bytes_of(plain))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read and to write; it has to outlive them."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
