"""ZSHARD_LOG=info or debug, and the longer reports of the log: the plan of a model and its first
step. Passes on the core's records.

Imported by FSDP() and load() if that variable is set, or Python's logger "zshard" takes the level
info. The level may change while the model trains.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from zshard import api
from zshard.api import (
    EXTENSIONS,
    Extension,
    State,
    drain,
    log,
    log_forget,
    log_level,
    state_of,
    units_of,
)

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_OFF = 100  # csrc/base/log.h has the same
_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_ROWS = 20  # of a plan
_MIB = 1 << 20


class _Logged(Extension):
    """Logs models and their first steps. begun: when each that has not been stepped was made, by
    the number of its engine."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._is_first = True

    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        _follow_level()
        if self._is_first:
            self._is_first = False
            log.info("%s", _process())
        state = state_of(model)
        self._begun[state.unit.engine_id] = time.monotonic()
        if log.isEnabledFor(logging.DEBUG if state.comms.all.rank else logging.INFO):
            for line in _plan(model, state):
                log.common(state.comms.all.rank, "%s", line)
        drain()

    def after_step(self, optimizer: Optimizer, models: list[State]) -> None:
        _follow_level()
        for state in models if self._begun and sys.exc_info()[0] is None else ():
            begun = self._begun.pop(state.unit.engine_id, None)
            if begun is not None:
                peak = state.unit.engine.peak()
                log.info(
                    "the first step of %s ended %.2f s after FSDP(); memory so far, MiB: %s",
                    *(type(optimizer).__name__, time.monotonic() - begun, _by_part(peak)),
                )
        drain()


def _process() -> str:
    """Describe this process."""
    loops, variant = api.build()
    return (
        f"zshard {api.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{variant} build, loops for {loops}, {torch.get_num_threads()} threads; "
        f"process {os.getpid()} of host {socket.gethostname()}"
    )


def _plan(model: nn.Module, root: State) -> Iterator[str]:
    """Yield lines: equal units share one."""
    states = [state for _, state in units_of(model)]
    equal: dict[tuple[object, ...], list[str]] = {}
    for state in states:
        unit = state.unit
        sizes = unit.bytes
        key = sizes["full"], sizes["shard"], unit.n_params, unit.strategy
        equal.setdefault(key, []).append(unit.name or "(root)")
    yield f"plan of {type(model).__name__}: {len(states)} units, {_transports(root)}"
    for (full, shard, count, strategy), names in list(equal.items())[:_ROWS]:
        named = f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}'"
        yield (
            f"  {len(names)} x {named}: {count} parameters, {full:,} bytes, {shard:,} on this "
            f"rank, {strategy}"
        )
    if len(equal) > _ROWS:
        yield f"  and units of {len(equal) - _ROWS} other kinds"
    yield f"memory of a step as planned, MiB: {_by_part(root.unit.engine.predict(False))}"


def _transports(state: State) -> str:
    comms = state.comms
    if comms.all.world == 1:
        return "1 rank"
    text = f"over {comms.all.world} ranks by {comms.all.transport}"
    if comms.shard_group.world < comms.all.world:
        text += f", gathered over {comms.shard_group.world} by {comms.shard_group.transport}"
    return f"{text}, timeout {comms.all.timeout:g} s"


def _by_part(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / _MIB:.1f}" for name, size in parts.items() if size)


def _follow_level() -> None:
    levels = (level for level in _LEVELS.values() if log.isEnabledFor(level))
    log_level(min(levels, default=_OFF))


def _set_up(asked: str) -> None:
    """Set the level that ZSHARD_LOG asks for. Lines go to stderr unless the script says where."""
    if asked not in _LEVELS:
        raise ValueError(f"ZSHARD_LOG must be 'info' or 'debug', got {asked!r}")
    log.setLevel(_LEVELS[asked])
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.addFilter(lambda _: not logging.root.handlers)  # the script's, made since
        log.logger.addHandler(handler)


if asked := os.environ.get("ZSHARD_LOG"):
    _set_up(asked)
_follow_level()
EXTENSIONS.append(_Logged())
atexit.register(drain)
os.register_at_fork(after_in_child=log_forget)
