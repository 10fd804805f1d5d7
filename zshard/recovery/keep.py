"""zshard.Keep: each step of a run can be continued by other processes.

    kept = zshard.Keep(model, optimizer, scheduler)
    start = kept.recover({"step": 0})
    for step in range(start["step"], steps):
        loss_of(model, batch(step)).backward()
        with kept.commit({"step": step + 1}):
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()

Within the block the optimizer only prepares its step. At the end of the block, all that the script
needs to continue is written to memory files; the ranks meet; the step runs. Once all ranks have
written, the step will be done, by them or by the processes that follow; before, none has begun it.
docs/design/keep.md has the protocol, recover.py what a new process does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard.checkpoint.folder import newest_in
from zshard.checkpoint.load import load
from zshard.checkpoint.script_state import rng_state
from zshard.guard.slices import grads_of
from zshard.keeping.client import Keeper, keeper_of_run
from zshard.optim.in_backward import is_stepped_in_backward
from zshard.optim.sharded_state import params_of
from zshard.optim.step import InOneCall, Prepared
from zshard.ranks.agreement import PublicCall, bytes_of
from zshard.recovery.layout import (
    Counters,
    counters_of,
    layout_of,
    named_shards,
    names_of,
    own_state,
    state_tensors,
    values_of,
)
from zshard.recovery.recover import Mark, Old, generations, recovered, say
from zshard.units import shards
from zshard.units.units import is_unit, state_of, units_of

__all__ = ["Keep"]

_held: dict[str, list[Tensor]] = {}
"""What the keeper knows of, by its name there. Memory that is freed loses its contents, and an
exception that ends the script frees the model: these references stay until the keeper
drops it, also when the interpreter ends."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))


class Keep:
    """Keeps the state of a training run in memory that outlives its ranks.

    Args:
        model: the FSDP(...) model.
        optimizer: zshard.AdamW, Adam or SGD, or one of these with 8-bit state, over parameters of
            the model.
        *others: what else the script steps: schedulers, a GradScaler; anything with state_dict()
            and load_state_dict().
        checkpoints: a folder of zshard.save(..., step=...), whose newest checkpoint recover() loads
            where no memory is left: a host is missing, or another number of ranks runs. `extra` of
            these checkpoints must be the dict that commit() takes.

    Raises RuntimeError if this run has no keeper (start it with `python -m zshard run --keep`, or
    call zshard.keep() before FSDP), and on a single rank; TypeError, NotImplementedError and
    ValueError for a model or an optimizer that cannot be kept.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *others: Any,
        checkpoints: str | os.PathLike[str] | None = None,
    ) -> None:
        keeper = keeper_of_run()
        if keeper is None or not _core.keeps_memory():
            raise RuntimeError(
                "this run has no keeper: start it with `python -m zshard run --keep script.py`, or "
                "call zshard.keep() before FSDP(...)"
            )
        _check(model, optimizer)
        for other in others:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise TypeError(
                    f"Keep() got a {type(other).__name__}, which has no state_dict(): pass it in "
                    "the dict of commit()"
                )
        self._keeper: Keeper = keeper
        self._model, self._optimizer, self._others = model, optimizer, others
        self._checkpoints = checkpoints
        self._comm = state_of(model).comms.all
        self._step = 0  # the last that was committed
        self._generation: int | None = None  # how many runs before this one have committed
        self._files: Files | None = None
        self._hand_writes = shards.hand_writes.count
        self._in_block = False
        self._is_alone = False  # earlier processes' memory is freed
        refuse = lambda *_: self._refuse_in_block()  # noqa: E731 - deepcopy() shares functions
        model.register_forward_pre_hook(refuse)
        model.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        optimizer.register_state_dict_pre_hook(refuse)

    # --- after a restart --------------------------------------------------------------------------

    @PublicCall("Keep.recover()")
    def recover(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """Return where to continue. Collective; call it once, before the first step.

        start: where a new run begins.

        Returns the dict of the last commit() that all ranks of all hosts completed, after restoring
        parameters, optimizer, buffers, random number generators and `others` as of then. If no
        memory is left, loads the newest checkpoint and returns its `extra`. Otherwise `start`. A
        line on stderr says which.

        Raises RuntimeError if the kept state is of another model or optimizer, naming the first
        parameter that differs; KeeperError if the keeper cannot be reached.
        """
        if self._generation is not None:
            raise RuntimeError("recover() was called before: call it once, before the first step")
        old = generations(self._keeper, self._comm)
        self._generation = 1 + max(old.all_known, default=-1)
        found = recovered(
            Old(self._keeper, self._comm, old), self._model, self._optimizer, self._others
        )
        self._hand_writes = shards.hand_writes.count
        if found is None:
            return self._from_checkpoint(start, bool(old.all_known))
        self._step, script = found
        return script

    def _from_checkpoint(self, start: Mapping[str, Any], is_restart: bool) -> dict[str, Any]:
        path = None if self._checkpoints is None else newest_in(self._checkpoints)
        if path is None:
            if is_restart:
                say(self._comm, "no rank's memory is left, and no checkpoint: from the beginning")
            return dict(start)
        say(self._comm, f"no rank's memory is left: from the checkpoint {path}")
        extra = load(path, self._model, self._optimizer)
        return {**start, **extra}

    # --- at each step -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def commit(self, script: Mapping[str, Any]) -> Iterator[None]:
        """Context manager around optimizer.step(), which takes effect at its end: then all ranks
        have the step, or will have it after a restart, together with `script`, which recover()
        then returns. Collective.

        script: plain values that say how to continue after this step.

        Raises RuntimeError for a second step of the optimizer, a forward or a state dict within the
        block; TypeError for values that cannot be pickled; DivergenceError, PeerError if other
        ranks do not commit. If the body raises, nothing is stepped.
        """
        if self._generation is None:
            raise RuntimeError("commit() before recover(): call kept.recover(...) before the loop")
        if self._in_block:
            raise RuntimeError("commit() within commit(): leave the block first")
        if shards.hand_writes.count != self._hand_writes:
            raise NotImplementedError(
                f"a kept run cannot restore what scripts write to parameters in place "
                f"({shards.hand_writes.last}): keep it in the dict of commit(), or do not keep "
                "this run"
            )
        try:
            own = pickle.dumps(dict(script))
        except Exception as error:
            raise TypeError(f"commit() takes plain values, but pickling failed: {error}") from error
        optimizer: Any = self._optimizer
        if self._files is None or self._files.changes != optimizer.state_changes:
            own_state(optimizer)
        prepared = Prepared()
        self._in_block, optimizer.prepared = True, prepared
        try:
            yield
            _core.kept_look_again(prepared.plans)
            self._complete(own, prepared.plans)
        finally:
            self._in_block, optimizer.prepared = False, None
            for unit in shards.units_stepped_by(optimizer) if prepared.is_writing else ():
                unit.engine.end_write()

    def close(self) -> None:
        """Free this rank's memory at the keeper, as a run that has ended needs no recovery. Call it
        at the end of a script under plain torchrun, where the keeper stays for a while;
        `python -m zshard run --keep` ends it itself."""
        for name in self._keeper.list():
            if name.partition(" ")[2] == str(self._comm.rank):
                self._drop(name)
        if self._files is not None:
            self._files.close()
        self._files = None

    def _drop(self, name: str) -> None:
        self._keeper.drop(name)
        _held.pop(name, None)

    def _complete(self, script: bytes, plans: list[_core.OptimPlan]) -> None:
        number = self._step + 1
        files = self._files_for(plans)
        if plans:
            _core.kept_write(files.area, number, plans)
        _core.kept_count(plans)
        files.write(number, self._snapshot(script, bool(plans), files.counters))
        grads = grads_of(params_of(self._optimizer))
        _held["in hand"] = [each for each in grads if each is not None]  # others may finish it
        files.mark(Mark.READY, number)
        with PublicCall("Keep.commit()"):
            self._comm.exchange(number.to_bytes(8, "little"))
        self._forget_older()
        if plans:
            _core.kept_finish(files.area, number)
        files.mark(Mark.DONE, number)
        del _held["in hand"]
        self._step = number

    def _snapshot(self, script: bytes, stepped: bool, counters: Counters) -> bytes:
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
        ]
        buffers = {
            name: (str(value.dtype).removeprefix("torch."), tuple(value.shape), _bytes(value))
            for name, value in self._model.named_buffers()
        }
        state = {
            "script": script,
            "stepped": stepped,
            "rng": rng_state(),
            "buffers": buffers,
            "groups": groups,
            "counters": values_of(counters),
            "others": [other.state_dict() for other in self._others],
        }
        return pickle.dumps(state)

    def _files_for(self, plans: list[_core.OptimPlan]) -> Files:
        """Return the files to write to; new ones if the optimizer's state or its runs changed."""
        optimizer: Any = self._optimizer
        runs = _core.kept_runs(plans)
        if self._files is not None and self._files.fit(runs, optimizer.state_changes):
            return self._files
        layout = layout_of(self._model, optimizer, self._comm)
        files = Files(max(runs, 1), optimizer.state_changes, self._files)
        files.counters = counters_of(optimizer)
        layout.files = list(dict.fromkeys([*layout.files, *_core.kept_files(plans)]))
        name = f"{self._generation} {self._comm.rank}"
        self._keeper.hold(name, layout.as_json(), [*files.fds, *layout.files])
        memory = [value for _, value in named_shards(self._model)]
        _held[name] = [
            each.detach() for each in (*memory, *(v for _, v in state_tensors(optimizer)))
        ]
        self._files = files
        return files

    def _forget_older(self) -> None:
        """Free what earlier processes left, once all ranks have written a step of this one."""
        if self._is_alone:
            return
        self._is_alone = True
        for name in self._keeper.list():
            generation, _, rank = name.partition(" ")
            if int(generation) < (self._generation or 0) and int(rank) == self._comm.rank:
                self._drop(name)

    def _refuse_in_block(self, *_: object) -> None:
        if self._in_block:
            raise RuntimeError(
                "the optimizer's step takes effect at the end of the commit() block: run forwards "
                "and state_dict() after it"
            )


class Files:
    """The files of this rank that have a step in hand: what the script needs, twice, and the record
    of the optimizer's step."""

    def __init__(self, runs: int, changes: int, before: Files | None) -> None:
        self.runs, self.changes = runs, changes
        self.counters: Counters = []
        self._area: int
        self.area: mmap.mmap
        if before is None:
            self._head, head = _file("zshard-kept-head", mmap.PAGESIZE)
            self._slots = [os.memfd_create(f"zshard-kept-slot-{i}") for i in range(2)]
            self.header = head
        else:
            self._head, self.header, self._slots = before._head, before.header, before._slots
            before.area.close()
            os.close(before._area)
        threads = torch.get_num_threads()
        self._area, self.area = _file("zshard-kept-step", _core.kept_bytes(runs, threads))
        _core.kept_format(self.area, runs, threads)

    @property
    def fds(self) -> list[int]:
        return [self._head, *self._slots, self._area]

    def close(self) -> None:
        """Close this rank's descriptors and mappings; the keeper has descriptors of its own."""
        self.area.close()
        self.header.close()
        for fd in self.fds:
            os.close(fd)

    def fit(self, runs: int, changes: int) -> bool:
        """Return whether a step of so many runs can be recorded, and the state has not moved."""
        return runs <= self.runs and changes == self.changes

    def write(self, number: int, data: bytes) -> None:
        """Write what the script needs after step `number`, in place of what it needed two steps
        before."""
        fd = self._slots[number % 2]
        os.ftruncate(fd, len(data))
        view = memoryview(data)
        at = 0
        while at < len(data):
            at += os.pwrite(fd, view[at:], at)

    def mark(self, what: Mark, number: int) -> None:
        _core.kept_mark(self.header, int(what), number)


def _file(name: str, size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


def _bytes(value: Tensor) -> bytes:
    return bytes(bytes_of(value.detach().cpu().contiguous()))


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    if not is_unit(model):
        raise TypeError(f"Keep() expects an FSDP(...) model, got {type(model).__name__}")
    if not isinstance(optimizer, InOneCall):
        raise NotImplementedError(
            f"a kept run needs one of zshard's elementwise optimizers (AdamW, Adam, SGD, or these "
            f"with 8-bit state), got {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    state = state_of(model)
    if state.comms.all.world == 1:
        raise NotImplementedError("a kept run needs two ranks or more, got one")
    names_of(optimizer)
    if is_stepped_in_backward(model):
        raise NotImplementedError(
            "optimizer_in_backward() steps before all gradients are there, so a kept run cannot "
            "finish its step: call remove() on the handle"
        )
    if any(param.device.type != "cpu" for param in model.parameters()):
        raise NotImplementedError("a kept run needs parameters in host memory, got some on a GPU")
    if any(each.options.offload for _, each in units_of(model)):
        raise NotImplementedError("a kept run cannot be offloaded to a disk: omit offload")
