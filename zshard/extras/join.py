"""model.join(loader): end a loop over batches on all ranks once one of them has no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from zshard.api import (
    DivergenceError,
    PeerError,
    PublicCall,
    is_unit,
    on_all_ranks,
    state_of,
)

_END = object()


class Join:
    """See FSDP.join()."""

    def __init__(self, model: nn.Module, loaders: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not is_unit(model):
            name = type(model).__name__
            raise TypeError(f"join() expects a sharded model, got {name}: call FSDP()")
        if len(loaders) != 1 or options or not isinstance(loaders[0], Iterable):
            got = [type(each).__name__ for each in loaders] + [f"{name}=" for name in options]
            raise TypeError(
                f"join() expects one iterable of batches, got {', '.join(got) or 'none'}: write "
                "`for batch in model.join(loader)`, which ends on all ranks once one has no more"
            )
        self._loader, self._state = loaders[0], state_of(model)

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] | None = None
        while True:
            batch, failed = _END, None
            try:
                batches = iter(self._loader) if batches is None else batches
                batch = next(batches, _END)
            except (PeerError, DivergenceError):
                raise  # the others have the error
            except Exception as error:
                failed = error
            with PublicCall("join()"):
                if self._state.unit.engine.max_over_ranks([float(batch is _END)])[0]:
                    with on_all_ranks(self._state.comms.all):
                        if failed is not None:
                            raise failed
                    return
            yield batch
