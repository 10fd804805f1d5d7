"""The position in the data: which samples of an epoch a run has trained on, saved and resumed.

Ranks take turns in one order of the samples, as those of torch's DistributedSampler do, so what
they have trained on is always the beginning of that order. A position is how long this beginning
is. It says nothing about the number of ranks: any number can share the rest.

A batch counts once the script has it. Samplers run ahead of that, for workers that prefetch, so the
count is not the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from zshard.api import DivergenceError, gather_objects

_ORDER = ("n_samples", "shuffle", "seed")  # what decides the order, and must not change


class DataPosition:
    """A position in a data set that a script saves with its checkpoints.

        position = zshard.DataPosition(len(data), seed=0)
        loader = DataLoader(data, batch_size=8, sampler=position.sampler)
        for epoch in range(position.epoch, 3):
            for batch in position.batches(loader):
                ...
                zshard.save("run", model, optimizer, extra={"data": position.state_dict()})

    Until a run is resumed, the samples of each rank are those of torch's DistributedSampler with
    the same arguments. A run that is resumed trains on the rest of the epoch, on any number of
    ranks.

    With torchdata's StatefulDataLoader, state_dict() has this rank's state of the loader as well,
    and batches() restores it if the number of ranks and the batch size are the same. Otherwise the
    workers start again, at the position.

    Args:
        n_samples: the length of the data set. None: the data set is iterable, and the loader a
            StatefulDataLoader. Such a run resumes on the same number of ranks only.
        shuffle: draw a new order in each epoch. Default: True.
        seed: of these orders. Default: 0.
        drop_last: leave out the last samples of an epoch that not all ranks have. Without it, some
            samples are repeated instead. Default: False.
        accumulate: batches in an optimizer step. Default: 1.

    Attributes:
        sampler: for the loader, which has the same batch_size on all ranks.
        epoch: the number of the current epoch; it increases when batches() has ended.
    """

    def __init__(
        self,
        n_samples: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        accumulate: int = 1,
    ) -> None:
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, got {n_samples}")
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {accumulate}")
        self.epoch = 0
        self.sampler = _Sampler(self)
        self._order: dict[str, Any] = dict(zip(_ORDER, (n_samples, shuffle, seed), strict=True))
        self._drop_last, self._accumulate = drop_last, accumulate
        self._begin = 0  # the position where this pass over the loader began
        self._taken = 0  # batches of this pass that the script has
        self._size = self._ranks = 1  # of this pass: samples in a batch, and ranks
        self._loader: Any = None
        self._loaded: Any = None  # the state of a loader, until there is one
        self._pass: object = None

    @property
    def samples(self) -> int:
        """Number of the epoch's samples that all ranks together have trained on."""
        done = self._begin + self._taken * self._size * self._ranks
        total = self._order["n_samples"]
        return done if total is None else min(done, total)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's batches for the rest of the epoch, and count them. Collective.

        A script that left an earlier loop continues behind the batch that it had.

        Raises:
            ValueError: the loader does not draw from `sampler`; or it has no position but its own
                state, which was saved on another number of ranks.
            TypeError: the loader has no batch size, or neither a position nor a state.
            DivergenceError: the ranks have other positions, orders or batch sizes.
            RuntimeError, in the loop: batches() or load_state_dict() was called within it.
        """
        size = _batch_size_of(loader, self.sampler, self._order["n_samples"])
        self._start(loader, size)
        this = self._pass = object()
        try:
            for batch in loader:
                self._taken += 1
                yield batch
                if self._pass is not this:
                    raise RuntimeError("the position was changed within its loop: leave it before")
        finally:
            if self._pass is this:
                self._pass = None
        self.epoch, self._begin, self._taken = self.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for `extra` of zshard.save(). Each rank saves its own.

        Raises RuntimeError between the batches of an optimizer step (`accumulate`): the gradients
        so far are in no checkpoint.
        """
        rest, total = self._taken % self._accumulate, self._order["n_samples"]
        is_end = self._loader is None or (  # None: just loaded
            total is not None and (self.samples >= total or self._taken == len(self._loader))
        )
        if rest and not is_end:
            batches = f"{rest} of {self._accumulate} batches"
            raise RuntimeError(f"a step has had {batches}: save after optimizer.step()")
        state = {"epoch": self.epoch, "begin": self._begin, "batches": self._taken}
        state |= {"batch_size": self._size, "ranks": self._ranks}
        saves = hasattr(self._loader, "state_dict")
        loader = self._loader.state_dict() if saves else self._loaded
        return {**self._order, **state, "loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that state_dict() returned, on any number of ranks.

        Raises ValueError for another data set or order.
        """
        for name in _ORDER:
            if state.get(name) != self._order[name]:
                raise ValueError(
                    f"the position was saved with {name}={state.get(name)}, but this run has "
                    f"{name}={self._order[name]}: pass the same"
                )
        self._pass = None
        self.epoch, self._begin, self._taken = state["epoch"], state["begin"], state["batches"]
        self._size, self._ranks = state["batch_size"], state["ranks"]
        self._loaded, self._loader = state["loader"], None

    def _start(self, loader: Any, size: int) -> None:
        """Begin a pass over the loader at the position."""
        ranks, state = _world(), self._loaded
        stateful = hasattr(loader, "load_state_dict")
        if self._order["n_samples"] is None and self._taken and state is None:
            state = loader.state_dict()  # of the loop that the script left
        same = (ranks, size) == (self._ranks, self._size)
        if self._order["n_samples"] is None and self._taken and not same:
            raise ValueError(
                f"the loader was saved on {self._ranks} ranks with batches of {self._size}, but "
                f"this run has {ranks} with {size}: pass the length, DataPosition(len(data))"
            )
        if ranks > 1:
            self._agree(size)
        if state is not None and stateful and same:
            loader.load_state_dict(state)
        else:
            self._begin, self._taken = self.samples, 0
        self._loaded, self._loader = None, loader
        self._size, self._ranks = size, ranks

    def _agree(self, size: int) -> None:
        """Raise DivergenceError if ranks would not share one order from one position on."""
        facts = {**self._order, "epoch": self.epoch, "position": self.samples, "batch_size": size}
        group: Any = dist.group.WORLD
        when = "while the ranks were comparing their data positions"
        first, *others = gather_objects(facts, group, when)
        for rank, other in enumerate(others, 1):
            for name in facts:
                if other[name] != first[name]:
                    raise DivergenceError(
                        f"the data positions differ between ranks: {name} is {first[name]} on "
                        f"rank 0 and {other[name]} on rank {rank}; use the same on all ranks"
                    )


class _Sampler(Sampler[int]):
    """This rank's samples from the position on."""

    def __init__(self, position: DataPosition) -> None:
        self._position = position

    def __len__(self) -> int:
        rest, ranks = self._n_samples() - self._begin(), _world()
        return rest // ranks if self._position._drop_last else -(-rest // ranks)

    def __iter__(self) -> Iterator[int]:
        """Yield the rest of the order, shared and filled up as DistributedSampler does."""
        position, total, ranks = self._position, self._n_samples(), _world()
        if position._pass is None:
            raise RuntimeError("nothing counts these batches: iterate position.batches(loader)")
        order = order_of(position.epoch, **position._order)
        rest = order[self._begin() :]
        count = ranks * len(self)
        if count > len(rest):
            rest = torch.cat([rest, order[torch.arange(count - len(rest)) % total]])
        rank = dist.get_rank() if ranks > 1 else 0
        yield from rest[rank:count:ranks].tolist()

    def _begin(self) -> int:
        """The sample at which the current pass began, or the next one will."""
        position = self._position
        return position.samples if position._pass is None else position._begin

    def _n_samples(self) -> int:
        total: int | None = self._position._order["n_samples"]
        if total is None:
            raise TypeError("DataPosition() without n_samples has no sampler: pass n_samples")
        return total


def order_of(epoch: int, n_samples: int, shuffle: bool, seed: int) -> torch.Tensor:
    """Return the order of an epoch's samples: that of torch's DistributedSampler."""
    if not shuffle:
        return torch.arange(n_samples)
    return torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed + epoch))


def _world() -> int:
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if there else 1


def _batch_size_of(loader: Any, sampler: _Sampler, n_samples: int | None) -> int:
    """Return how many samples a batch has; check that the position is the loader's."""
    if n_samples is None:
        if not hasattr(loader, "load_state_dict"):
            loaders = "torchdata's StatefulDataLoader"
            raise TypeError(f"DataPosition() without n_samples needs {loaders}: pass n_samples")
        return getattr(loader, "batch_size", None) or 1
    batches = getattr(loader, "batch_sampler", None)
    drawn = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    if drawn is not sampler:
        raise ValueError("the loader draws from another sampler: pass sampler=position.sampler")
    size = getattr(batches, "batch_size", None)
    if not isinstance(size, int):
        raise TypeError(f"a {type(loader).__name__} needs a batch_size: pass batch_size=")
    return size
