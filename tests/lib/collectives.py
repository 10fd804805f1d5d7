"""Record which collectives a piece of code runs, and their order among torch's operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LEAST = 4096  # bytes: messages before a collective are smaller


NAMES = {"c10d::_allgather_base_": "gather", "c10d::alltoall_base_": "scatter"}


class Collectives:
    """Context manager that watches torch's collectives over c10d, of all process groups.

    Counts those that move more than LEAST bytes. `order` also has the names of torch's operations
    given as `among`.
    """

    def __init__(self, *among: str) -> None:
        self.among = among
        self.order: list[str] = []
        self.received = {"gather": 0, "scatter": 0}  # bytes from other ranks

    def __enter__(self) -> Collectives:
        torch.autograd.profiler.profile(record_shapes=True).__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        events = torch.autograd.profiler._disable_profiler().events()  # torch's own takes ten times
        for event in sorted(events, key=lambda event: event.start_ns()):  # as long to read them
            name = event.name()
            if name in NAMES and max(_sizes(event)) > LEAST:
                self.order.append(NAMES[name])
                self.received[NAMES[name]] += _from_others(NAMES[name], event)
            elif name in self.among:
                self.order.append(name)

    def gathers_of_each(self, word: str) -> list[int]:
        """The gathers after each occurrence of a name given as `among`, up to the next."""
        starts = [i for i, name in enumerate(self.order) if name == word]
        ends = [*starts[1:], len(self.order)]
        return [self.order[i:j].count("gather") for i, j in zip(starts, ends, strict=True)]

    @property
    def gathers(self) -> int:
        """All-gathers of parameters."""
        return self.order.count("gather")

    @property
    def scatters(self) -> int:
        """Exchanges of gradients: the reduce-scatters, whose sums each rank computes itself."""
        return self.order.count("scatter")


def _from_others(kind: str, event: Any) -> int:
    """Of a gather, all but this rank's part; of an exchange (over all ranks), all but its own
    piece."""
    sizes = _sizes(event)[1:]
    return max(sizes) - (min(sizes) if kind == "gather" else max(sizes) // dist.get_world_size())


def _sizes(event: Any) -> list[int]:
    return [0, *(shape[0] for shape in event.shapes() if len(shape) == 1)]
