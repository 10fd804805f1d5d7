"""model.join(...): continue to train when some ranks have fewer batches than others.

A rank whose data has ended stays at the end of the with block and follows the others: the core runs
their passes without modules (csrc/engine/join_follow.c), and this file repeats what they do between
passes, with their values. So its shard, its optimizers' state and its settings are always as if it
had data whose gradients are zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard.grad_scaler import unscale
from zshard.guard.slices import plain
from zshard.optim.announce import Act, Joined, options_of
from zshard.optim.clip import clip_by, follow_norm
from zshard.optim.in_backward import is_stepped_in_backward
from zshard.ranks.agreement import PublicCall, check_agreement, on_all_ranks, take_from
from zshard.ranks.ends import may_stay_open
from zshard.units.shards import part_of, units_stepped_by
from zshard.units.units import is_apart, is_unit, state_of, units_of

_LONGEST = 200  # characters of an exception that the other ranks get


@contextlib.contextmanager
@may_stay_open
def join(model: nn.Module, objects: Sequence[Any], by_all: bool, throws: bool) -> Iterator[None]:
    """See FSDP.join()."""
    if not is_unit(model):
        raise TypeError(
            f"join() expects a model that FSDP(...) has sharded, got {type(model).__name__}: call "
            "model = FSDP(model) first"
        )
    comm = state_of(model).comms.all
    with PublicCall("join()"):
        with on_all_ranks(comm):
            optimizers, others = _sorted(model, objects)
            _check_model(model)
        check_agreement(comm, _facts(optimizers, others, by_all, throws), "arguments of join()")
    follower = _Follower(model, optimizers, others)
    follower.engine.join_begin(by_all, throws)
    follower.begin()
    try:
        try:
            yield
            with PublicCall("join()"):
                follower.follow()
        except (_core.PeerError, _core.PeerTimeoutError):
            raise  # no rank can receive it
        except BaseException as error:
            if not follower.is_over:
                follower.engine.join_leave(f"{type(error).__name__}: {error}"[:_LONGEST])
            raise
    finally:
        follower.end()
        follower.engine.join_end()


# --- arguments ------------------------------------------------------------------------------------


def _sorted(
    model: nn.Module, objects: Sequence[Any]
) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return the optimizers, and the other objects whose state follows."""
    optimizers: list[torch.optim.Optimizer] = []
    others: list[Any] = []
    engine = state_of(model).unit.engine
    for each in objects:
        name = type(each).__name__
        if any(each is known for known in (*optimizers, *others)):
            raise ValueError(f"join() got the same {name} twice: pass it once")
        if not isinstance(each, torch.optim.Optimizer):
            has_state = hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
            if not has_state or isinstance(each, nn.Module):
                raise TypeError(
                    "join() expects optimizers, learning rate schedulers and grad scalers, got "
                    f"{name}"
                )
            others.append(each)
            continue
        if all(unit.engine != engine for unit in units_stepped_by(each)):
            raise ValueError(
                f"join() got an optimizer ({name}) that has no parameter of this model: pass the "
                "optimizers that step it"
            )
        optimizers.append(each)
    return optimizers, others


def _check_model(model: nn.Module) -> None:
    state = state_of(model)
    if state.unit.name:
        raise ValueError(
            f"join() was called on unit '{state.unit.name}': call it on the outermost sharded "
            "module"
        )
    if any(is_apart(each, state.comms) for _, each in units_of(model)):
        raise NotImplementedError(
            "join() does not support units with process groups of other ranks than the model's: "
            "give all ranks the same number of batches"
        )
    if state.options.micro_batches:
        raise NotImplementedError(
            "join() does not support deterministic='any-world': omit join(), as "
            "model.micro_batches() gives all ranks equally many"
        )
    if is_stepped_in_backward(model):
        raise NotImplementedError(
            "join() does not support optimizer_in_backward(): call remove() on its handle, and "
            "optimizer.step() after backward"
        )
    if state.unit.engine.join_news() is not None:
        raise RuntimeError(
            "join() is already active on this model: leave it before you enter another"
        )


def _facts(
    optimizers: Sequence[Any], others: Sequence[Any], by_all: bool, throws: bool
) -> list[tuple[str, str]]:
    return [
        ("the list of optimizers", ", ".join(type(each).__name__ for each in optimizers) or "none"),
        ("the list of other objects", ", ".join(type(each).__name__ for each in others) or "none"),
        ("divide_by_initial_world_size", str(by_all)),
        ("throw_on_early_termination", str(throws)),
    ]


# --- following ------------------------------------------------------------------------------------


class _Follower(Joined):
    """A rank of a model within join(), and its work once its data has ended."""

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], others: list[Any]
    ) -> None:
        super().__init__(state_of(model).unit.engine, list(model.parameters()), optimizers, others)
        self.model = model
        self.is_over = False  # all ranks' data has ended
        self._is_ours = [part_of(param) is not None for param in self.params]
        self._acts: dict[Act, Callable[..., None]] = {
            Act.STEP: self._step,
            Act.ZERO: self._zero,
            Act.NORM: self._norm,
            Act.CLIP: self._clip,
            Act.UNSCALE: self._unscale,
        }

    def follow(self) -> None:
        """Do as the ranks with data do, until none has any; then all ranks are in the same
        state."""
        self.follows = True
        while self.engine.join_follow():
            act, values = self.share(None)
            self._acts[act](*values)
        self.is_over = True
        self._take_final_state()

    def _align(self, held: Sequence[bool]) -> None:
        """Drop gradients that the leading rank has dropped since the last backward, and those of
        ignored parameters, which no other rank shares."""
        for i, (param, is_held) in enumerate(zip(self.params, held, strict=True)):
            if not is_held or not self._is_ours[i]:
                param.grad = None
            elif param.grad is None:
                raise RuntimeError(
                    f"parameter {i} of the model has a .grad on the ranks with data that no "
                    "backward has made, so a rank without data cannot follow in join(): let "
                    "backward make all gradients"
                )

    def _without_others(self, number: int) -> torch.optim.Optimizer:
        """Return the optimizer without parameters of other modules, which have no gradients here:
        no other rank shares them."""
        optimizer = self.optimizers[number]
        for group in optimizer.param_groups:
            for param in group["params"]:
                if part_of(param) is None:
                    param.grad = None
        return optimizer

    def _set_options(self, number: int, options: Sequence[dict[str, Any]]) -> None:
        groups = self.optimizers[number].param_groups
        if len(groups) != len(options):
            raise RuntimeError(
                "param groups were added to an optimizer within join(), which ranks without data "
                "cannot follow: add them before join()"
            )
        for group, values in zip(groups, options, strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _step(
        self, number: int, held: list[bool], options: list[dict[str, Any]], extra: dict[str, Any]
    ) -> None:
        optimizer = self._without_others(number)
        self._align(held)
        self._set_options(number, options)
        given = {name: value for name, value in extra.items() if value is not None}
        for name, value in given.items():
            setattr(optimizer, name, value)
        try:
            optimizer.step()
        finally:
            for name in given:
                delattr(optimizer, name)

    def _zero(self, number: int, held: list[bool]) -> None:
        self._align(held)
        self.optimizers[number].zero_grad(set_to_none=False)

    def _norm(self, numbers: list[int], held: list[bool], norm_type: float) -> None:
        self._align(held)
        grads = [self.params[i].grad for i in numbers]
        with plain():
            follow_norm(self.engine, [g for g in grads if g is not None], norm_type)

    def _clip(self, numbers: list[int], held: list[bool], max_norm: float, total: Tensor) -> None:
        self._align(held)
        clip_by([self.params[i] for i in numbers], max_norm, total)

    def _unscale(self, number: int, held: list[bool], inv_scale: Tensor, allow_fp16: bool) -> None:
        self._align(held)
        unscale(self._without_others(number), inv_scale, allow_fp16)

    # --- end --------------------------------------------------------------------------------------

    def _take_final_state(self) -> None:
        """Take the state of the ranks that had data last, if some ranks followed them."""
        news = self.engine.join_news()
        if news is None or not news[3]:
            return
        _, leader, latest, _ = news
        comm = state_of(self.model).comms.all
        theirs = self.share(
            (
                [options_of(optimizer) for optimizer in self.optimizers],
                [other.state_dict() for other in self.others],
            )
        )
        if state_of(self.model).sync_buffers:  # as DDP does: the highest rank of them
            for buffer in self.model.buffers():
                take_from(latest, comm, buffer.detach())
        if comm.rank != leader:
            self._take(*theirs)

    def _take(self, options: list[list[dict[str, Any]]], others: list[dict[str, Any]]) -> None:
        for number, each in enumerate(options):
            self._set_options(number, each)
        for other, state in zip(self.others, others, strict=True):
            other.load_state_dict(state)
