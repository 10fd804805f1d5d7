"""Methods of FSDP2's modules that tune communication, with no effect in zshard.

The one idea: each chooses between ways to the same numbers, and zshard has one way, the one that
takes the least memory. Their arguments are checked as torch checks them, so that a script finds its
mistakes. What would change numbers is not here: it works, or is an error (`attributes.py`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zshard._units.units import state_of


class Fsdp2Tuning(nn.Module):
    """The methods of FSDP2's modules that choose among ways to the same numbers."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        Every backward completes all its reductions. Raises TypeError if not given a bool.
        """
        _check_bool("is_last_backward", is_last_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        There, False leaves out the reduction over replicas until a later backward. Here every
        backward reduces over all ranks; the accumulated gradient is the same. To accumulate without
        communication, use no_sync(). Raises TypeError if not given a bool.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        Every backward reshards parameters; over shm, where the next forward reads them in place,
        this costs nothing. Raises TypeError if not given a bool.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        Backward unshards a unit whether its parameters are needed or not. Raises TypeError if not
        given a bool.
        """
        _check_bool("unshard_in_backward", unshard_in_backward)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        Ranks always exchange plain gradients, and the sum is divided. Raises TypeError if not given
        a bool.
        """
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        A parameter that some rank does not use always counts as zeros of that rank. Raises
        TypeError if not given a bool.
        """
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted for compatibility with FSDP2; no effect: zshard plans its memory when wrapping.

        Raises TypeError if not given an int, ValueError if it is not positive.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be positive, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted for compatibility with FSDP2; no effect: a model has one transport.

        Raises TypeError if not given a bool.
        """
        _check_bool("enable", enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted for compatibility with FSDP2; no effect: choose memory that NCCL has registered
        by FSDP(transport=zshard.NcclOptions(...)). Raises TypeError if not given a bool."""
        _check_bool("enable", enable)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility with FSDP2; no effect. Raises TypeError without a bool."""
        _check_bool("async_op", async_op)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the current stream wait for `event`, which was recorded after the optimizer's step.

        On GPUs, gathers wait for the current stream, and so for a step on another one. No effect on
        CPU ranks. Raises TypeError if `event` is not a torch.Event.
        """
        if not callable(getattr(event, "wait", None)) or not hasattr(event, "record"):
            raise TypeError(f"event must be a torch.Event, got {event!r}")
        if any(param.is_cuda for param in self.parameters()):
            event.wait()

    def reset_iter_state(self) -> None:
        """Accepted for compatibility with FSDP2; no effect: a model is ready for its next forward
        after any exception that all ranks catch. Raises RuntimeError on an inner unit, as torch."""
        name = state_of(self).unit.name
        if name:
            raise RuntimeError(
                f"reset_iter_state() was called on unit '{name}': call it on the outermost sharded "
                "module"
            )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
