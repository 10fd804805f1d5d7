"""Check that ranks agree: on a model at wrap time, before anything is shared, and on an optimizer
before its state is gathered. Also: gather the ranks' values, share the outcome of an operation, so
that all ranks fail in the same way, and name the public call that they are in.

Ranks exchange one short hash. Only if it differs do they exchange the full description, find the
first difference and all raise the same error. An outcome is equally short.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zshard import _core
from zshard._errors import CheckpointError, warn
from zshard._logger import drain

Fact = tuple[str, str]  # (subject, value)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class PublicCall:
    """Context manager or decorator: exchanges within it are part of this public call, such as
    "save()", for messages and traces, and other ranks must be in the same call. The outermost one
    counts.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._is_outermost = _core.begin_call(self._name)
        self._begun = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            _core.end_call()
            _core.trace_add(f"zshard::{self._name.removesuffix('()')}", self._begun)
            drain()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with PublicCall(self._name):
                return function(*args, **kwargs)

        return called


def check_agreement(comm: _core.Comm, facts: Sequence[Fact], what: str = "models") -> None:
    """Raise DivergenceError on all ranks if the facts differ, naming the first difference.

    what: what the facts describe, in the plural. Collective.
    """
    if comm.world == 1:
        return
    digest = hashlib.sha256(repr(list(facts)).encode()).digest()
    if len(set(comm.exchange(digest))) == 1:
        return
    everyone = gather(comm, list(facts))
    for rank in range(1, comm.world):
        if difference := first_difference(everyone[0], everyone[rank], (0, rank)):
            raise _core.DivergenceError(
                f"the {what} differ between ranks: {difference}; use the same on all ranks"
                f"{comm.locate()}"
            )


def on_any_rank(comm: _core.Comm, fact: bool) -> bool:
    """Return whether the fact is true on some rank. Collective; one exchange, where gather() also
    takes a broadcast of each rank."""
    return b"\1" in comm.exchange(b"\1" if fact else b"\0")


def gather(comm: _core.Comm, value: Any) -> list[Any]:
    """Return the value of every rank in rank order, as JSON keeps it: numbers, texts, None, lists,
    dicts by text. Collective."""
    return [json.loads(each) for each in gather_bytes(comm, json.dumps(value).encode())]


def gather_bytes(comm: _core.Comm, sent: bytes) -> list[bytes]:
    """Return the bytes of every rank, of any length, in rank order. Collective."""
    gathered = []
    for root, length in enumerate(comm.exchange(len(sent).to_bytes(8, "little"))):
        data = bytearray(sent if root == comm.rank else int.from_bytes(length, "little"))
        if data:
            comm.broadcast(torch.frombuffer(data, dtype=torch.uint8), root)
        gathered.append(bytes(data))
    return gathered


def take_from(root: int, comm: _core.Comm, tensor: torch.Tensor) -> None:
    """Broadcast a dense tensor from rank `root`, in place. Collective."""
    if tensor.numel() == 0:
        return
    plain = tensor.contiguous().cpu()
    comm.broadcast(plain, root)
    if plain is not tensor:
        tensor.copy_(plain)


def gather_objects(
    sent: object, group: dist.ProcessGroup, when: str = "while the ranks were connecting"
) -> list[Any]:
    """Return the object of each rank of `group`, of any size, in rank order. Collective.

    For ranks without a transport yet. torch's all_gather_object() needs NumPy; this does not.

    Raises PeerError if torch's collective fails, as it does once a rank has exited. when: for its
    message.
    """
    device = distributed_c10d._get_object_coll_device(group)  # a GPU if the group has only NCCL
    data = torch.frombuffer(bytearray(pickle.dumps(sent)), dtype=torch.uint8)
    length = torch.tensor([len(data)], device=device)
    lengths = [int(each) for each in _all_gather(length, group, when)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data.to(device)
    gathered = [each.cpu() for each in _all_gather(padded, group, when)]
    return [pickle.loads(bytes_of(each)[:n]) for each, n in zip(gathered, lengths, strict=True)]


def warn_together(group: dist.ProcessGroup, text: str) -> None:
    """As warn_on_rank_0(), for ranks without a transport yet."""
    raised: list[Warning] = []
    try:
        if dist.get_rank(group) == 0:
            warn(text, RuntimeWarning)
    except RuntimeWarning as error:
        raised.append(error)
    for each in gather_objects(raised, group)[0]:
        raise each


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup, when: str) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(gathered, tensor, group=group)
    except RuntimeError as error:
        raise _core.PeerError(
            f"a rank may have exited {when}: {error}; see the output of the other ranks"
        ) from error
    return gathered


_TEXT = 2000  # bytes of a message that the other ranks get
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError, TimeoutError),
        OSError,
        *(NotImplementedError, CheckpointError, ValueError, TypeError, MemoryError),
        *(_core.CudaError, _core.NcclError, _core.DivergenceError),
    )
}


@contextlib.contextmanager
def on_all_ranks(comm: _core.Comm, fact: Callable[[], object] | None = None) -> Iterator[None]:
    """Context manager that raises on all ranks if its body raises on any. Collective.

    fact: its value must be equal on all ranks on exit.

    Raises a rank's own exception on that rank; on the others, one of the same kind (OSError,
    RuntimeError, ...) that names the rank; DivergenceError if `fact` differs. If the body
    communicates, and a rank fails while the others are in a collective there, these raise
    DivergenceError with the text of its exception.
    """
    error: Exception | None = None
    digest = b""
    try:
        yield
        digest = hashlib.sha256(repr(fact()).encode()).digest() if fact is not None else b""
    except (_core.PeerError, _core.DivergenceError):
        raise  # the others have the error
    except Exception as caught:
        error = caught
        said = f"raised {type(error).__name__}: {error}"
        comm.publish_failure(said.encode(errors="replace").decode(errors="replace"))
    try:
        outcomes = comm.exchange(bytes([error is not None]) + digest.ljust(32, b"\0"))
    except _core.DivergenceError:
        if error is None:
            raise
        raise error  # noqa: B904 - the others, still in their bodies, have its text
    if error is not None:
        comm.publish_failure("")
    if any(outcome[0] for outcome in outcomes):
        _raise_on_all(comm, error)
    for rank, outcome in enumerate(outcomes):
        if outcome != outcomes[0]:
            raise _core.DivergenceError(
                f"rank {rank} loads other tensors than rank 0: load the same{comm.locate()}"
            )


@contextlib.contextmanager
def told_to_all_ranks(comm: _core.Comm) -> Iterator[None]:
    """Context manager for a body that communicates: if it raises on this rank alone, the others,
    which may be waiting for this rank inside the body, get a PeerError with the text at once. Their
    transport cannot be used afterwards."""
    try:
        yield
    except (_core.PeerError, _core.DivergenceError):
        raise  # the others have the error
    except Exception as error:
        comm.abort(f"{type(error).__name__}: {error}")
        raise


def _raise_on_all(comm: _core.Comm, error: Exception | None) -> None:
    """Raise this rank's error, or without one, the first of the other ranks' errors. Collective."""
    kinds = (name for name, kind in _KINDS.items() if isinstance(error, kind))
    report = f"{next(kinds, 'RuntimeError')}\n{error}" if error else ""
    reports = comm.exchange(report.encode(errors="replace")[:_TEXT].ljust(_TEXT, b"\0"))
    if error is not None:
        raise error
    for rank, each in enumerate(reports):
        name, _, text = each.rstrip(b"\0").decode(errors="replace").partition("\n")
        if name:
            raise _KINDS.get(name, RuntimeError)(f"rank {rank}: {text}")


def warn_on_rank_0(comm: _core.Comm, text: str, category: type[Warning] = UserWarning) -> None:
    """Warn on rank 0; if a script has made warnings errors, raise on all ranks. Collective."""
    with on_all_ranks(comm):
        if comm.rank == 0:
            warn(text, category)


def first_difference(
    facts: Sequence[Fact], others: Sequence[Fact], ranks: tuple[int, int]
) -> str | None:
    """Describe the first difference between the facts of two ranks; None if they are equal."""
    first, second = (f"rank {rank}" for rank in ranks)
    subjects, other_subjects = dict(facts), dict(others)
    for fact, other in itertools.zip_longest(facts, others):
        if fact == other:
            continue
        words, other_words = (f"{each[0]} ({each[1]})" if each else "" for each in (fact, other))
        is_new = fact is not None and (other is None or fact[0] not in other_subjects)
        is_new_there = other is not None and (fact is None or other[0] not in subjects)
        if is_new and is_new_there:
            return f"{first} has {words}, but {second} has {other_words}"
        if is_new:
            return f"{first} has {words}, which {second} lacks"
        if is_new_there:
            return f"{second} has {other_words}, which {first} lacks"
        if fact[0] == other[0]:
            return f"{fact[0]} is {fact[1]} on {first}, but {other[1]} on {second}"
        return f"{fact[0]} comes before {other[0]} on {first}, but after it on {second}"
    return None


def tensor_facts(
    kind: str, name: str, tensor: torch.Tensor, values: bool = False
) -> Iterator[Fact]:
    """Yield what ranks must agree on about a parameter or buffer; with `values`, also a checksum of
    its values."""
    grad = ", trainable" if tensor.requires_grad else ""
    yield f"{kind} '{name}'", f"shape {tuple(tensor.shape)}, {tensor.dtype}{grad}"
    if values:
        yield f"the checksum of the values of '{name}'", f"{checksum(tensor):08x}"


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32C of a tensor's values."""
    plain = tensor.detach().cpu().contiguous()  # possibly a copy, which must outlive its bytes
    return _core.crc32c(bytes_of(plain))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's bytes; the tensor must outlive it."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
