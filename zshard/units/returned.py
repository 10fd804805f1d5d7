"""Notice writes to what state_dict() has returned.

Under DDP, the tensors of model.state_dict() and optimizer.state_dict() are the model's own, and
scripts write to them: partial loads, averages, pruning. Of sharded parameters they are copies, so
such a write is lost. That is no error, as a script may want a copy; one warning per model says it.

A tensor that shares its version counter with a returned one, but none of its memory, shows the
write, even after the script has dropped the dict. Nothing is checked in a forward, but only before
a step or a save. A load does not check: the script may load the other dict right after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zshard._errors import warn
from zshard.units.moment import is_for_now
from zshard.units.units import State

__all__ = ["is_plain", "known", "look", "note", "note_returned", "note_used"]

_version_of = Tensor._version.__get__  # type: ignore[attr-defined]


class _Returned:
    """The tensors of one state dict that are copies of a model's."""

    def __init__(self, state: State, tensors: Mapping[str, Tensor], calls: tuple[str, str]) -> None:
        self._state = weakref.ref(state)
        self._names = list(tensors)
        self._calls = calls  # the call that returned them, and the one that would load them
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors.values()]  # type: ignore[no-untyped-call]
        self._numbers = {each.cdata for each in self._storages}
        self._counters = [_counter_of(each) for each in tensors.values()]
        self._before = list(map(_version_of, self._counters))
        self._sum = sum(self._before)

    def has(self, storages: set[int]) -> bool:
        """Return whether one of the tensors uses one of these storages."""
        return not self._numbers.isdisjoint(storages)

    def is_written(self) -> bool:
        """Return whether a script has written to one of the tensors."""
        return bool(sum(map(_version_of, self._counters)) != self._sum)

    def is_dropped(self) -> bool:
        """Return whether the script has dropped all of them."""
        return all(each.expired() for each in self._storages)  # type: ignore[no-untyped-call]

    def warn(self) -> None:
        """Warn of the write, once per model."""
        state = self._state()
        if state is None or state.model.knows_of_writes:
            return
        state.model.knows_of_writes = True
        now = map(_version_of, self._counters)
        rows = zip(self._names, now, self._before, strict=True)
        name = next(name for name, after, before in rows if after != before)
        got, loads = self._calls
        warn(
            f"a script wrote to {name} in the result of {got}, a copy, and that write is lost: "
            f"pass the dict to {loads} to keep the write"
        )


def _counter_of(tensor: Tensor) -> Tensor:
    """Return a tensor without memory that shares the version counter of another one."""
    counter = tensor.detach()
    counter.data = tensor.detach().new_empty(0)
    return counter


known: list[_Returned] = []
"""Those whose tensors the script may still have, or has had since the ranks met last."""


def note_returned(owners: Mapping[int, State], state: object) -> None:
    """Remember the entries of a model's state dict that are full copies. owners: by the identity of
    the copies' storages."""
    by_owner: dict[State, dict[str, Tensor]] = {}
    for key, value in state.items() if owners and isinstance(state, Mapping) else ():
        owner = owners.get(value.untyped_storage()._cdata) if is_plain(value) else None
        if owner is not None and owner.form.settings is None and not owner.summons:
            by_owner.setdefault(owner, {})[f"'{key}'"] = value
    for owner, tensors in by_owner.items():
        note(owner, tensors, ("model.state_dict()", "model.load_state_dict()"))


def note(state: State, tensors: Mapping[str, Tensor], calls: tuple[str, str]) -> None:
    """Remember copies by what messages call them. calls: the call that returned them, and the one
    that would load them."""
    if tensors and not state.model.knows_of_writes and not is_for_now(state):
        known[:] = [each for each in known if each.is_written() or not each.is_dropped()]
        known.append(_Returned(state, tensors, calls))


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor of torch's own classes, with a version counter."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    return value.layout == torch.strided and not value.is_inference()  # type: ignore[attr-defined]


def tensors_in(state: object) -> Iterator[Tensor]:
    """Yield the tensors of a state dict's "state"."""
    for entries in state.values() if isinstance(state, Mapping) else ():
        yield from entries.values() if isinstance(entries, Mapping) else ()


def note_used(values: Iterable[object]) -> None:
    """Forget state dicts if a value of theirs is loaded, or is for another purpose."""
    if known:
        plain = [each for each in values if is_plain(each)]
        used = {each.untyped_storage()._cdata for each in plain}  # type: ignore[attr-defined]
        known[:] = [each for each in known if not each.has(used)]


@torch._disable_dynamo  # type: ignore[attr-defined]
def look() -> None:
    """Warn of writes that are lost."""
    written = [each for each in known if each.is_written()]
    known[:] = [each for each in known if each not in written and not each.is_dropped()]
    for each in written:
        each.warn()
