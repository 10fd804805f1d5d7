"""DDP's dialect: its argument for the device, and the methods of its modules.

The one idea: scripts for DDP run unchanged but for the line that wraps the model. What join() does
is in `_model/join.py`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zshard._model.join import join
from zshard._units.units import state_of, units_of


def one_device(device_id: Any, device_ids: Any) -> Any:
    """Return what `device_id` and DDP's spelling of it say. Raises ValueError if both are given, or
    the second is not one device."""
    if device_ids is None:
        return device_id
    if device_id is not None:
        raise ValueError("pass either device_id or device_ids, not both")
    if not isinstance(device_ids, list | tuple) or len(device_ids) != 1:
        raise ValueError(
            f"device_ids={device_ids!r}: expected a list of one GPU, that of this rank"
        )
    return device_ids[0]


_PREFIX = "module."


def names_without_module(model: nn.Module, state: Any) -> Any:
    """Return a state dict of DDP's, whose names all begin with "module.", under the model's own
    names; any other as it is."""
    names = list(state) if isinstance(state, Mapping) else []
    is_ddps = all(isinstance(name, str) and name.startswith(_PREFIX) for name in names)
    if not names or not is_ddps or "module" in model._modules:
        return state
    made = OrderedDict((name.removeprefix(_PREFIX), value) for name, value in state.items())
    facts = getattr(state, "_metadata", None)
    if facts is not None:  # by module: DDP itself is ""
        own = (
            (f"{name}.".removeprefix(_PREFIX)[:-1], each) for name, each in facts.items() if name
        )
        made._metadata = OrderedDict(own)  # type: ignore[attr-defined]
    return made


class DdpMethods(nn.Module):
    """The methods of DDP's modules."""

    @property
    def module(self) -> Any:
        """The model as an instance of its original class, for scripts written for DDP or FSDP1.

        It shares all state with this module, but has no attribute `module` itself, so that code
        which unwraps a model in a loop terminates. If the model has a child named "module",
        returns that child.
        """
        if "module" in self._modules:
            return self._modules["module"]
        original: type[nn.Module] = type(self).__bases__[1]
        plain = object.__new__(original)
        plain.__dict__ = self.__dict__
        return plain

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces gradients, as scripts for DDP set it instead of using no_sync():
        False is set_requires_gradient_sync(False)."""
        return bool(state_of(self).unit.sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for _, state in units_of(self):
            state.unit.sync = bool(value)

    def will_sync_module_buffers(self) -> bool:
        """Return whether forward broadcasts buffers from rank 0 (forward_sync_buffers=True)."""
        state = state_of(self)
        return (
            bool(state.sync_buffers)
            and state.comms.all.world > 1
            and any(True for _ in self.buffers())
        )

    def _set_static_graph(self) -> None:
        """Accepted for compatibility with DDP; no effect: graphs may change or not."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward does not reduce gradients, as in DDP and FSDP1.

        Inside it, `.grad` is this rank's own, unsharded gradient, accumulated over the backwards;
        this takes memory for the full model's gradients. The next backward outside reduces the sum.
        Without no_sync(), each backward reduces and the accumulated gradient stays sharded, which
        takes no extra memory and gives the same gradient. Collective: use it on all ranks, and not
        inside a backward.
        """
        before = [(state.unit, state.unit.sync) for _, state in units_of(self)]
        for unit, _ in before:
            unit.sync = False
        try:
            yield
        finally:
            for unit, sync in before:
                unit.sync = sync

    def join(
        self,
        *optimizers: Any,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager for training with uneven numbers of batches, as DDP's join().

        A rank that has no more batches leaves the loop, and waits at the end of the with block
        until no rank has any. Meanwhile it does its part of what the others do: it contributes
        zeros to gradients, and steps its shard with the param groups of the lowest rank that still
        has data. Afterwards the optimizers' options are those of that rank on all ranks.

        Collective: use it on all ranks, with the same arguments, on the outermost sharded module.

        Args:
            optimizers: all optimizers that step this model within the block. Learning rate
                schedulers and grad scalers may follow: at the end all ranks load the state that
                they have on the rank that had data last. (Grad scalers that were used are found
                without being passed.)
            divide_by_initial_world_size: True (the default) divides gradients by the number of
                ranks; False by the number of ranks that still have data.
            enable: False makes this a no-op.
            throw_on_early_termination: raise RuntimeError on all ranks when one has no more data
                and others have.

        While all ranks have data, each forward, backward, clipping and step costs one small
        exchange; after that, so does each gather (over c10d) and reduction.

        Raises:
            TypeError, ValueError: an argument is no optimizer, or none of this model; or this is
                not the outermost sharded module.
            RuntimeError: join() is already active on these ranks; an optimizer that was not passed
                steps the model; or a call needs all ranks when some have no more data.
            NotImplementedError: on GPUs, and with optimizer_in_backward().
            DivergenceError: the ranks with data do different things, or another rank left the
                block by an exception, which the message names.
        """
        if not enable:
            return contextlib.nullcontext()
        return join(self, optimizers, divide_by_initial_world_size, throw_on_early_termination)
