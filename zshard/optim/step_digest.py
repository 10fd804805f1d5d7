"""A digest of what an optimizer steps with, for ranks to compare: param groups and number of steps.

A scheduler that only one rank calls leaves shards that were stepped with different learning rates.
So each step notes a digest, which travels with what ranks exchange anyway (csrc/engine/history.h),
and keeps the values as text. Ranks compare texts only where digests differ
(csrc/comm/fingerprint.c): numbers may differ in their last digits between hosts.

Before its first step, ranks also compare the parameters that every rank has in full, as with
no_shard. Nothing guards these, so a script may have initialized them with other random numbers on
each rank, and would train different models.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zshard.guard.slices import plain
from zshard.units.shards import Stepped, context_of, contexts, known_parts, stepped_by

_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Options that change speed, not results; ranks may differ in them."""

_MASK = (1 << 64) - 1


class _Account:
    """The known state of an optimizer that steps a model, with its digest."""

    def __init__(self, optimizer: torch.optim.Optimizer, label: str) -> None:
        self.label = label
        options = getattr(optimizer, "options", None) or getattr(optimizer, "defaults", {})
        self.keys = [key for key in options if key not in _HOW]
        self.digest = 0
        self.lines = ""
        self._groups: tuple[tuple[int, int, int], ...] = ()  # the model's, see Stepped
        self._options: list[tuple[Any, ...]] = []  # each group's options at the last digest
        self._counted: tuple[int, int] | None = None
        """The (group, parameter) whose step counter is compared; None on GPUs, where some
        implementations keep the counter on the device."""

    def take(self, optimizer: torch.optim.Optimizer, model: Stepped) -> bool:
        """Check what the optimizer has stepped with; return whether it is new."""
        groups = optimizer.param_groups
        options = [tuple(map(groups[number].get, self.keys)) for number, _, _ in model.groups]
        if model.groups is self._groups and _are_same(options, self._options):
            return False
        self._groups, self._options = model.groups, options
        on_cpu = (
            (number, first)
            for number, first, n in model.groups
            if n > 0 and groups[number]["params"][first].device.type == "cpu"
        )
        self._counted = next(on_cpu, None)
        values = [[_value(each) for each in row] for row in options]
        counts = [0 if model.replicated else n for _, _, n in model.groups]
        self.digest = 0
        for number in (*(_number(each) for row in values for each in row), *counts):
            self.digest = (self.digest * 0x100000001B3 + number) & _MASK
        columns: dict[str, list[Any]]
        columns = {key: [row[i] for row in values] for i, key in enumerate(self.keys)}
        columns["number of parameters"] = counts
        self.lines = "".join(
            f"{self.label} {key}\t{_listed(column)}\n"
            for key, column in columns.items()
            if any(value is not None for value in column)
        )
        return True

    def count(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the step count in the optimizer's state; 0 if unknown."""
        if self._counted is None:
            return 0
        number, first = self._counted
        state = optimizer.state.get(optimizer.param_groups[number]["params"][first])
        step = _value(state.get("step")) if isinstance(state, dict) else None
        return int(step) if isinstance(step, int | float) and math.isfinite(step) else 0


@torch._disable_dynamo  # type: ignore[attr-defined] # the compiler does not support all of it
def note_step(optimizer: torch.optim.Optimizer, engine_id: int | None = None) -> None:
    """Notify the models (or one of them) that the optimizer has stepped, and with what."""
    for model in stepped_by(optimizer):
        state = model.state
        if state is None or engine_id not in (None, state.unit.engine_id):
            continue
        if state.comms.all.world == 1:
            continue
        comm_id = id(state.comms.all)
        account = _account_of(optimizer, comm_id)
        with plain():
            is_new = account.take(optimizer, model)
            count = account.count(optimizer)
        engine = state.unit.engine
        engine.note_step(account.digest, count & _MASK)
        if is_new:
            accounts = (each.accounts.get(comm_id) for each in contexts.values())
            engine.tell_settings("".join(each.lines for each in accounts if each is not None))
        if state.model.spare is not None:
            state.model.spare.note_step()


def _account_of(optimizer: torch.optim.Optimizer, comm_id: int) -> _Account:
    accounts: dict[int, _Account] = context_of(optimizer).accounts
    if comm_id not in accounts:
        name = type(optimizer).__name__
        others = sum(
            type(other).__name__ == name and comm_id in context.accounts
            for other, context in contexts.items()
        )
        label = name if others == 0 else f"{name} #{others + 1}"
        accounts[comm_id] = _Account(optimizer, label)
    return accounts[comm_id]


# --- parameters that every rank has in full -------------------------------------------------------

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def note_values(models: list[Stepped]) -> None:
    """Note the values of models that an optimizer is about to step for the first time."""
    for each in models:
        state = each.state
        if state is None or not each.replicated or state.model.is_compared:
            continue
        state.model.is_compared = True
        for param, part in known_parts() if state.comms.all.world > 1 else ():
            if part.unit is not None and part.unit.engine_id == state.unit.engine_id:
                part.note_draw(param, sum_of_bits(param))


def sum_of_bits(param: Tensor) -> int:
    """Return the sum of contiguous elements' bits as integers, a fast digest; 0 for others."""
    if param.is_complex():
        param = torch.view_as_real(param)
    kind = _INTEGERS.get(param.element_size())
    if kind is None or not param.is_contiguous():
        return 0
    bits = param.detach().view(-1).view(kind)
    per_word = 8 // bits.element_size()
    in_words = bits.numel() // per_word * per_word if bits.storage_offset() % per_word == 0 else 0
    words, rest = bits[:in_words].view(torch.int64), bits[in_words:]  # in words: 25 times as fast
    return int(words.sum() + rest.sum(dtype=torch.int64)) & _MASK


# --- comparable values ----------------------------------------------------------------------------


def _are_same(rows: list[tuple[Any, ...]], before: list[tuple[Any, ...]]) -> bool:
    """Return whether these are the same immutable objects. (Tensors and lists can change.)"""
    return all(
        value is earlier and not isinstance(value, Tensor | list)
        for row, row_before in zip(rows, before, strict=True)
        for value, earlier in zip(row, row_before, strict=True)
    )


def _value(value: object) -> object:
    """Return a number, text or tuple; None for what is not compared, such as tensors on GPUs."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return tuple(_value(each) for each in value)
    return value if isinstance(value, bool | int | float | str) else None


@functools.lru_cache(maxsize=4096, typed=True)
def _number(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _listed(values: Sequence[Any]) -> str:
    """Return one value if all are the same, else the values of all groups."""
    texts = [_text(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


@functools.lru_cache(maxsize=4096, typed=True)
def _text(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(each) for each in value)})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
