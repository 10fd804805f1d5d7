"""The three batch sizes of a DeepSpeed config, of which two give the third.

train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps *
number of ranks, exactly; where a division leaves a rest, that is an error that names the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

_TRAIN, _MICRO, _STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


class BatchSizes(NamedTuple):
    """The samples of an optimizer step over all ranks, those of a forward on one rank, and the
    number of forwards per step."""

    train: int
    micro: int
    steps: int


def complete(train: int | None, micro: int | None, steps: int | None, world: int) -> BatchSizes:
    """Return all three, given some of them (None: not in the config) and the number of ranks.

    Raises ValueError if they contradict each other or are too few.
    """
    if train is None and micro is None:
        raise ValueError(f"the DeepSpeed config needs '{_TRAIN}' or '{_MICRO}'")
    if train is None:
        assert micro is not None
        steps = 1 if steps is None else steps
        return BatchSizes(micro * steps * world, micro, steps)
    if micro is None:
        steps = 1 if steps is None else steps
        return BatchSizes(train, _divide(train, {_STEPS: steps}, world), steps)
    if steps is None:
        return BatchSizes(train, micro, _divide(train, {_MICRO: micro}, world))
    if train != micro * steps * world:
        raise ValueError(
            f"{_TRAIN}={train} is not {_MICRO}={micro} * {_STEPS}={steps} * {world} rank(s), which "
            f"is {micro * steps * world}: leave one of them out of the DeepSpeed config, or start "
            "another number of ranks"
        )
    return BatchSizes(train, micro, steps)


def _divide(train: int, by: dict[str, int], world: int) -> int:
    ((name, size),) = by.items()
    quotient, rest = divmod(train, size * world)
    if rest or not quotient:
        raise ValueError(
            f"{_TRAIN}={train} is not a multiple of {name}={size} * {world} rank(s): choose a "
            f"multiple of {size * world}, or start another number of ranks"
        )
    return quotient
