"""Export.broadcast() and zshard.receive_export(): an export over a process group.

Each bucket is a message: the length of a header, the header, and the bucket's bytes. A header is
JSON: {"tensors": [[name, dtype, shape], ...]}, dtypes as in safetensors files. {} ends the export,
and {"error": text} says that the sender has raised. So receivers know neither names nor sizes in
advance, and none of them waits for a sender that has given up.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zshard.api import CODES, DTYPES
from zshard.extras.weights.export import Bucket, flat_for, views_of

if TYPE_CHECKING:
    from zshard.extras.weights.export import Export, Rounds


class _Channel:
    """Messages from one rank of a process group to all others."""

    def __init__(self, group: dist.ProcessGroup | None, source: int | None = None) -> None:
        """source: the sender's rank in the group; None: this rank. Raises ValueError if one of the
        two is not in the group."""
        self._group = dist.group.WORLD if group is None else group
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        if rank < 0:
            raise ValueError("this rank is not in the process group: call it on the group's ranks")
        self.source = rank if source is None else source
        if not 0 <= self.source < world or source == rank:
            raise ValueError(f"src must be another rank of the group, below {world}, got {source}")
        self._device = distributed_c10d._get_object_coll_device(self._group)

    def send(self, header: Mapping[str, Any], flat: Tensor | None = None) -> None:
        data = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        parts = [torch.tensor([data.numel()]), data]
        if flat is not None and flat.numel() > 0:
            parts.append(flat)
        # First the memory: half a message cannot be followed by an error.
        for part in [part.to(self._device) for part in parts]:
            self._pass(part)

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return a header and the tensors that it announces."""
        length = int(self._pass(torch.zeros(1, dtype=torch.int64)))
        header = json.loads(bytes(self._pass(torch.zeros(length, dtype=torch.uint8)).tolist()))
        shapes = [(DTYPES[code], tuple(shape)) for _, code, shape in header.get("tensors", ())]
        size = header.get("bytes", 0)
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size > 0:
            self._pass(flat)
        return header, views_of(flat, shapes)

    def _pass(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self._device)
        dist.broadcast(there, group=self._group, group_src=self.source)
        return there


def broadcast(export: Export, group: dist.ProcessGroup | None) -> None:
    """See Export.broadcast()."""
    lines: list[_Channel] = []
    if export.sends() and dist.get_rank(group) >= 0:
        lines.append(_Channel(group))  # now: receivers get any failure from here on

    def prepare(rounds: Rounds) -> None:
        lines[:] = lines or [_Channel(group)]  # raises on all ranks

    try:
        with export.rounds(export.sender, prepare) as rounds:
            for batch in rounds.batches:
                flat = flat_for(batch) if rounds.takes else None
                shapes = [(entry.dtype, entry.shape) for entry in batch]
                rounds.fill(batch, [] if flat is None else views_of(flat, shapes))
                with rounds.together():
                    if flat is not None:
                        rows = [[e.name, CODES[e.dtype], list(e.shape)] for e in batch]
                        lines[0].send({"tensors": rows, "bytes": flat.numel()}, flat)
                del flat  # before the next bucket takes memory
            with rounds.together():
                if rounds.takes:
                    lines.pop().send({})
    except BaseException as error:
        for line in lines:
            with contextlib.suppress(RuntimeError):  # the group itself may be what failed
                line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def receive_export(group: dist.ProcessGroup | None = None, src: int = 0) -> Iterator[Bucket]:
    """Yield the buckets that Export.broadcast() sends: dicts of tensors by name.

    Call it on all ranks of the group but the sender, once for each broadcast(). If the loop is left
    early, the rest is received and dropped. Tensors have memory of their own, on the CPU or, for a
    group of GPUs only, on this rank's GPU.

    Args:
        group: the process group; None: the default one.
        src: the sender's rank in the group.

    Raises ValueError for another `src`; RuntimeError if the sender raised: then what came before is
    not all of the weights; torch's error if the group fails.
    """
    line = _Channel(group, src)
    header: dict[str, Any] = {"tensors": []}
    try:
        while "tensors" in header:
            header = {}  # unless a message says otherwise: a group that fails is not drained
            header, tensors = line.receive()
            if "error" in header:
                raise RuntimeError(f"the sender's export failed: {header['error']}: export again")
            if "tensors" in header:
                names = [name for name, _, _ in header["tensors"]]
                bucket = dict(zip(names, tensors, strict=True))
                del tensors
                yield bucket
                del bucket
    finally:
        while "tensors" in header:
            header = {}
            header, _ = line.receive()
