"""zshard.Exported: which tensors have changed since the last export.

Each rank keeps a SHA-256 digest of its shard of each tensor; one exchange shows all ranks which
tensors have changed on any. So an unchanged tensor is neither gathered nor sent, and there is no
chance worth counting that a changed one is missed, however it was changed.

Only a complete export counts. An export takes the digests out first and puts the new ones in at its
end, so after a break or an error everything is sent again; ranks with different counts of complete
exports do the same.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zshard import api
from zshard.api import Entry, PublicCall, bytes_of, chunks, gather, plain, to_local


class Exported:
    """Remembers the last export to one receiver. Create one per receiver; pass it as `since=`.

    The first export sends all tensors, later ones those that have changed in any way: their values,
    or `dtype` or `rename` of the export. It costs each rank a digest of its shards, and 40 bytes
    for each tensor. A receiver that starts anew, or an export that broke off, gets all tensors:
    call reset(), or make a new one; after an export that broke off this happens by itself.
    """

    def __init__(self) -> None:
        self._count = 0  # complete exports
        self._digests: dict[str, bytes] = {}  # by name and dtype

    def reset(self) -> None:
        """Make the next export send all tensors."""
        self._digests = {}

    @contextlib.contextmanager
    def news(self, entries: Sequence[Entry], comm: api.Comm | None) -> Iterator[list[Entry]]:
        """Context manager around an export, with the entries that have changed on any rank.
        Collective."""
        before, self._digests = self._digests, {}
        now = {f"{each.name} {each.dtype}": digest(each.value) for each in entries}
        changed = [before.get(key) != value for key, value in now.items()]
        if comm is not None and comm.world > 1:
            with PublicCall("export()"):
                counts, changes = zip(*gather(comm, [self._count, changed]), strict=True)
            apart, self._count = len(set(counts)) > 1, max(counts)
            changed = [apart or any(each) for each in zip(*changes, strict=True)]
        yield [entry for entry, new in zip(entries, changed, strict=True) if new]
        self._digests = now
        self._count += 1


@plain()
@torch.no_grad()
def digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of what this rank has of a tensor."""
    flat = to_local(tensor).detach().reshape(-1)
    sha = hashlib.sha256()
    for begin, end in chunks(flat.numel(), flat.dtype):
        # A view may have gaps, no stride, or a bit that says that its values are negated.
        piece = flat[begin:end].cpu().resolve_conj().resolve_neg().contiguous()
        sha.update(bytes_of(piece))
    return sha.digest()
