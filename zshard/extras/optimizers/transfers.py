"""Run an optimizer's work on whole matrices: elements to owners, results back (optim/owners.py).

Over shm nothing is sent. Each rank has a row of memory that the others map; they read there what it
has put down. Elsewhere the ranks of a process group of zshard's own exchange what a transfer
carries in one all-to-all, while the owners compute.

Ranks meet before each transfer. If one has raised by then, all ranks raise, and none waits in vain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zshard import api
from zshard.api import group_beside, on_all_ranks
from zshard.extras.optimizers.owners import ALIGN, Portion, StepPlan, room_of

__all__ = ["Job", "Mail", "carry_out", "mail_for"]


class Job(Protocol):
    """The work of an optimizer on its matrices, which are numbered as in the plan."""

    def device(self, matrix: int) -> torch.device:
        """Return where the owner computes."""

    def put(self, matrix: int, out: Tensor | None) -> None:
        """Write this rank's elements for the owner to `out`, of shape (inputs, elements). None:
        another replica's are taken."""

    def compute(self, inputs: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Return the results, one-dimensional, of this rank's own matrices of a batch, given
        (inputs, elements) of each."""

    def take(self, matrix: int, result: Tensor) -> None:
        """Apply this rank's elements of the result, one-dimensional."""


def carry_out(plan: StepPlan, job: Job, comm: api.Comm | None, mail: Mail | None) -> None:
    """Run the plan; see the head of owners.py. comm, mail: None if nothing leaves its rank.

    Collective. Raises on all ranks if the job raises on any.
    """
    run = _Run(plan, job, 0 if comm is None else comm.rank, mail)
    numbers = iter(range(len(plan.transfers)))
    for number in numbers:
        with on_all_ranks(comm) if comm is not None else contextlib.nullcontext():
            run.work(number)
            while not plan.transfers[number]:
                following = next(numbers, None)
                if following is None:
                    break
                number = following
                run.work(number)
        if mail is not None and plan.transfers[number]:
            mail.send()
    run.work(len(plan.transfers))


class _Run:
    def __init__(self, plan: StepPlan, job: Job, rank: int, mail: Mail | None) -> None:
        self._plan, self._job, self._rank, self._mail = plan, job, rank, mail
        self._inputs: dict[int, Tensor] = {}  # of this rank's matrices
        self._results: dict[int, Tensor] = {}

    def work(self, number: int) -> None:
        """Do everything that lies between transfer `number - 1` and transfer `number`."""
        ready = self._plan.batch(number - 2)
        if ready:
            inputs = {i: self._inputs.pop(i) for i in ready if self._plan.owners[i] == self._rank}
            self._results.update(self._job.compute(inputs))
        self._receive(number - 1)
        pieces = self._plan.transfers[number] if number < len(self._plan.transfers) else []
        if self._mail is not None and pieces:
            self._mail.begin(pieces)
        self._put(number, [piece for piece in pieces if piece.source == self._rank])

    def _receive(self, number: int) -> None:
        pieces = self._plan.transfers[number] if number >= 0 else []
        if self._mail is None or not pieces:
            return
        self._mail.receive()
        for piece in (piece for piece in pieces if piece.target == self._rank):
            matrix = self._plan.matrices[piece.matrix]
            values = self._mail.arrived(piece).view(matrix.dtype)
            if piece.is_result:
                self._job.take(piece.matrix, values)
            else:
                into = self._inputs[piece.matrix][:, piece.begin : piece.begin + piece.numel]
                into.copy_(values.view(matrix.n_inputs, -1))

    def _put(self, number: int, pieces: Sequence[Portion]) -> None:
        sent = {piece.matrix: piece for piece in pieces if not piece.is_result}
        for i in self._plan.batch(number):
            self._job.put(i, self._place(i, sent.get(i)))
        for piece in pieces:
            if piece.is_result and self._mail is not None:
                result = self._results[piece.matrix][piece.begin : piece.begin + piece.numel]
                self._mail.out(piece).view(result.dtype).copy_(result)
        for i in self._plan.batch(number - 2):
            begin, numel = self._plan.matrices[i].ranges[self._rank]
            if self._plan.owners[i] == self._rank:
                result = self._results.pop(i)[begin : begin + numel]
                if numel > 0:
                    self._job.take(i, result)

    def _place(self, i: int, piece: Portion | None) -> Tensor | None:
        """Return where this rank's elements of a matrix go."""
        matrix = self._plan.matrices[i]
        if piece is not None and self._mail is not None:
            return self._mail.out(piece).view(matrix.dtype).view(matrix.n_inputs, -1)
        if self._plan.owners[i] != self._rank:
            return None
        # Aligned rows: the last bits of a product may depend on where its factors begin.
        shape = matrix.n_inputs, -(-matrix.numel // ALIGN) * ALIGN
        whole = torch.empty(shape, dtype=matrix.dtype, device=self._job.device(i))
        whole = self._inputs[i] = whole[:, : matrix.numel]
        begin, numel = matrix.ranges[self._rank]
        return whole[:, begin : begin + numel] if numel > 0 else None


# --- memory ---------------------------------------------------------------------------------------


def mail_for(plan: StepPlan, comm: api.Comm, device: torch.device, before: Mail | None) -> Mail:
    """Return memory for the plan's transfers, which may be that of an earlier plan. Collective."""
    if comm.transport != "shm":
        return _Sent(comm, device)
    if isinstance(before, _Rows) and before.fits(comm, plan.most_sent):
        before.restart()
        return before
    with on_all_ranks(comm):
        return _Rows(comm, plan.most_sent)


def _starts(pieces: Sequence[Portion]) -> Iterator[tuple[Portion, int]]:
    at = 0
    for piece in pieces:
        yield piece, at
        at += room_of(piece)


class _Rows:
    """Memory that all ranks map, in two halves: while peers may read one, the next transfer fills
    the other."""

    def __init__(self, comm: api.Comm, size: int) -> None:
        self._comm, self._size, self._half = comm, size, 0
        self._rows = api.shared_rows(comm, 2 * size, torch.empty(0, dtype=torch.uint8))
        self._places: dict[Portion, int] = {}

    def fits(self, comm: api.Comm, size: int) -> bool:
        return comm is self._comm and size <= self._size

    def restart(self) -> None:
        """Begin a step: one that raised may have left ranks in different halves."""
        self._half = 0

    def begin(self, pieces: Sequence[Portion]) -> None:
        self._half = 1 - self._half
        base = self._size * self._half
        self._places = {}
        for rank in range(self._comm.world):  # ranks that get the same elements read them together
            sent = dict.fromkeys(p._replace(target=-1) for p in pieces if p.source == rank)
            self._places.update((piece, base + at) for piece, at in _starts(list(sent)))

    def out(self, piece: Portion) -> Tensor:
        start = self._places[piece._replace(target=-1)]
        return self._rows[piece.source][start : start + piece.nbytes]

    arrived = out

    def send(self) -> None:
        pass

    def receive(self) -> None:
        pass


class _Sent:
    """Memory of this rank, and an all-to-all of a process group."""

    def __init__(self, comm: api.Comm, device: torch.device) -> None:
        self._comm = comm
        self._group = group_beside(comm, device)
        on_host = dist.get_backend(self._group) == "gloo"
        self._device = torch.device("cpu") if on_host else device
        self._out, self._in = self._bytes(0), self._bytes(0)
        self._splits: tuple[list[int], list[int]] = [], []  # received, sent
        self._places: dict[Portion, int] = {}
        self._work: Any = None

    def _bytes(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.uint8, device=self._device)

    def begin(self, pieces: Sequence[Portion]) -> None:
        ranks, here = range(self._comm.world), self._comm.rank
        sent = [[p for p in pieces if (p.source, p.target) == (here, rank)] for rank in ranks]
        received = [[p for p in pieces if (p.source, p.target) == (rank, here)] for rank in ranks]
        self._splits = tuple(  # type: ignore[assignment]
            [sum(map(room_of, each)) for each in lists] for lists in (received, sent)
        )
        self._places = {}
        for lists in (sent, received):
            self._places.update(_starts([piece for each in lists for piece in each]))
        n_in, n_out = map(sum, self._splits)
        if n_in > self._in.numel():
            self._in = self._bytes(n_in)
        if n_out > self._out.numel():
            self._out = self._bytes(n_out)

    def out(self, piece: Portion) -> Tensor:
        start = self._places[piece]
        return self._out[start : start + piece.nbytes]

    def send(self) -> None:
        received, sent = self._splits
        with self._as_peer_error():
            self._work = dist.all_to_all_single(
                self._in[: sum(received)],
                self._out[: sum(sent)],
                received,
                sent,
                group=self._group,
                async_op=True,
            )

    def receive(self) -> None:
        work, self._work = self._work, None
        with self._as_peer_error():
            work.wait(timedelta(seconds=self._comm.timeout))

    @contextlib.contextmanager
    def _as_peer_error(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise api.PeerError(f"an optimizer's transfer of matrices failed: {error}") from None

    def arrived(self, piece: Portion) -> Tensor:
        start = self._places[piece]
        return self._in[start : start + piece.nbytes]


Mail = _Rows | _Sent
"""The memory of transfers: begin() begins to fill the next one, send() follows when all ranks have,
and receive() waits for it. out(), arrived(): the bytes of a piece that this rank sends, or has
received."""
