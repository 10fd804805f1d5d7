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
Nothing else may write to the model, so kept memory is always that of a committed step.
docs/design/keep.md has the protocol, recover.py what a new process does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum, auto
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import api
from zshard.api import (
    EXTENSIONS,
    Extension,
    PublicCall,
    bytes_of,
    grads_of,
    latest_checkpoint,
    load,
    other_state,
    params_of,
    rng_state,
    set_rng_state,
    state_of,
    units_of,
    units_stepped_by,
)
from zshard.extras.keeping.client import Keeper, keeper_of_run
from zshard.extras.recovery.checks import check, check_others
from zshard.extras.recovery.files import Files, Mark, mark
from zshard.extras.recovery.layout import (
    counters_of,
    layout_of,
    named_shards,
    own_state,
    state_tensors,
    values_of,
)
from zshard.extras.recovery.recover import (
    KeptName,
    names_at,
    old_memory,
    recovered,
    restore_others,
    say,
    states_of,
)

__all__ = ["Keep"]

_held: dict[str, list[Tensor]] = {}
"""Memory that the keeper holds, by its name there. Memory that is freed loses its contents, and an
exception that ends the script frees the model: these references stay until the keeper
drops it, also when the interpreter ends."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_held))


class Phase(Enum):
    """The position of a Keep."""

    NEW = auto()  # before recover()
    BETWEEN = auto()  # between two commits
    CALLED = auto()  # commit() was called, and its block has not begun
    BLOCK = auto()  # within the block
    CUT_OFF = auto()  # a commit failed when it had begun to count the step
    CLOSED = auto()


_NO_COMMIT = {
    Phase.NEW: "commit() before recover(): call kept.recover(...) before the loop",
    Phase.CALLED: "commit() without `with` commits nothing: write `with kept.commit(...):`",
    Phase.BLOCK: "commit() within commit(): leave the block first",
    Phase.CUT_OFF: "the last commit() failed on the way: continue in another process",
    Phase.CLOSED: "commit() after close(): call close() at the end of the run",
}


class Keep:
    """Keeps the state of a training run in memory that outlives its ranks.

    One at a time, for all that the run trains: other FSDP(...) models are not stepped meanwhile.
    From recover() to close(), nothing but the optimizer's step within commit() changes the model:
    loads, writes in place and steps elsewhere raise RuntimeError, since a restart would repeat
    them.

    Args:
        model: the FSDP(...) model.
        optimizer: zshard.AdamW, Adam or SGD, or one of these with 8-bit state, over parameters of
            the model.
        *others: what else the script steps: schedulers, a GradScaler; anything with state_dict()
            and load_state_dict(), also a module without FSDP and the optimizer of its parameters.
            All of it is restored as it was at the end of a commit() block, so step it there.
        checkpoints: a folder of zshard.save(..., step=..., extra=kept.state_dict()), whose newest
            checkpoint recover() loads where no memory is left: a host is missing, or another number
            of ranks runs.
        name: of this run, for a script that keeps several, one after the other, and after a restart
            does not begin with the first of them. By default a run's name is its number among them.

    Raises RuntimeError if this run has no keeper (start it with `python -m zshard run --keep`), and
    if there is another Keep; TypeError, NotImplementedError and ValueError for what cannot be kept,
    such as a single rank, or a second optimizer.
    """

    _made: ClassVar[int] = 0  # by this process, and so by those before it
    _open: ClassVar[weakref.ref[Keep] | None] = None  # one of them

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *others: Any,
        checkpoints: str | os.PathLike[str] | None = None,
        name: str = "",
    ) -> None:
        keeper = keeper_of_run()
        if keeper is None or not api.keeps_memory():
            raise RuntimeError("this run has no keeper: start it by `python -m zshard run --keep`")
        check(model, optimizer)
        check_others(others)
        if Keep._open is not None and Keep._open() is not None:
            text = "this process has a Keep() already: close() it"
            raise RuntimeError(f"{text}, or keep one module that contains all models")
        self._keeper: Keeper = keeper
        self._model, self._others = model, others
        self._optimizer: Any = optimizer
        self._checkpoints = checkpoints
        self._comm = state_of(model).comms.all
        self._states = [state for _, state in units_of(model)]
        self._engines = {state.unit.engine for state in self._states}
        self._phase = Phase.NEW
        self._step = 0  # the last that was committed
        self._script = b""  # its dict
        self._name = KeptName(0, self._comm.rank, self._comm.world, name or str(Keep._made))
        self._files: Files | None = None
        self._is_alone = False  # earlier processes' memory is freed
        refuse = lambda *_: self._refuse_in_block()  # noqa: E731 - deepcopy() shares functions
        model.register_forward_pre_hook(refuse)
        model.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        optimizer.register_state_dict_pre_hook(refuse)
        Keep._made, Keep._open = Keep._made + 1, weakref.ref(self)
        for state in self._states:
            state.model.is_kept = True

    # --- after a restart --------------------------------------------------------------------------

    @PublicCall("Keep.recover()")
    def recover(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """Return where to continue. Collective; call it once, before the first step.

        start: where a new run begins.

        Returns the dict of the last commit() that all ranks of all hosts completed, after restoring
        parameters, optimizer, buffers, random number generators and `others` as of then. If no
        memory is left, loads the newest checkpoint, with all of these, and returns its dict.
        Otherwise `start`. A line on stderr says which.

        Raises RuntimeError if the kept state is of another model, optimizer or others, naming the
        first that differs, and for a checkpoint without the state of `others`; KeeperError if the
        keeper cannot be reached.
        """
        if self._phase is not Phase.NEW:
            raise RuntimeError("recover() was called before: call it once, before the first step")
        _pickled("recover()", start)
        old = old_memory(self._keeper, self._comm, self._name)
        if old.step:
            script = recovered(old, self._model, self._optimizer, self._others)
            self._step = old.step
        else:
            script = self._from_checkpoint(start, old.newest >= 0)
        self._script = _pickled("recover()", script)
        self._name = self._name._replace(generation=old.newest + 1)
        self._phase = Phase.BETWEEN
        return script

    def _from_checkpoint(self, start: Mapping[str, Any], is_restart: bool) -> dict[str, Any]:
        folder = self._checkpoints
        path = None if folder is None else latest_checkpoint(folder, self._model)
        if path is None:
            if is_restart:
                say(self._comm, "no rank's memory is left, and no checkpoint: from the beginning")
            return dict(start)
        say(self._comm, f"no rank's memory is left: from the checkpoint {path}")
        extra: dict[str, Any] = dict(load(path, self._model, self._optimizer))
        if extra.keys() == {"script", "others", "random"}:  # of state_dict()
            restore_others(self._others, extra["others"])
            set_rng_state(extra["random"])
            return {**start, **extra["script"]}
        if self._others:
            text = f"the checkpoint {path} lacks the state of the {type(self._others[0]).__name__}"
            raise RuntimeError(f"{text}: save with extra=kept.state_dict(), or load() it yourself")
        say(self._comm, "it has no random states: save with extra=kept.state_dict()")
        return {**start, **extra}

    def state_dict(self) -> dict[str, Any]:
        """Return what recover() needs of a checkpoint besides model and optimizer, for `extra` of
        zshard.save(): the dict of the last commit(), the states of `others`, and of this rank's
        random number generators. Call it after the block.

        Raises RuntimeError before recover(), and within a commit() block.
        """
        if self._phase is Phase.NEW:
            raise RuntimeError("state_dict() before recover(): call kept.recover(...) first")
        self._refuse_in_block()
        return {
            "script": pickle.loads(self._script),
            "others": states_of(self._others),
            "random": rng_state(),
        }

    # --- at each step -----------------------------------------------------------------------------

    def commit(self, script: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Context manager around optimizer.step(), which takes effect at its end: then all ranks
        have the step, or will have it after a restart, together with `script`, which recover()
        then returns. Collective.

        script: plain values that say how to continue after this step.

        Raises RuntimeError if the last commit() was called without `with`, and for a second step of
        the optimizer, a forward or a state dict within the block; TypeError for values that cannot
        be pickled; DivergenceError, PeerError if other ranks do not commit. If the body raises,
        nothing is stepped.
        """
        self._refuse_unentered()
        if self._phase is not Phase.BETWEEN:
            raise RuntimeError(_NO_COMMIT[self._phase])
        pickled = _pickled("commit()", script)
        self._phase = Phase.CALLED
        return self._block(pickled)

    @contextlib.contextmanager
    def _block(self, script: bytes) -> Iterator[None]:
        self._phase, optimizer = Phase.BETWEEN, self._optimizer
        if self._files is None or self._files.changes != optimizer.state_changes:
            own_state(optimizer)
        before = [group.get("rounding_step") for group in optimizer.param_groups]
        prepared = optimizer.prepare_only()
        self._phase = Phase.BLOCK
        try:
            yield
            for plan in prepared.plans:
                plan.look_again()
            self._complete(script, prepared)
        except BaseException:
            for group, count in zip(optimizer.param_groups, before, strict=False):
                if count is not None:
                    group["rounding_step"] = count  # step() has counted already
            raise
        finally:
            if self._phase is Phase.BLOCK:
                self._phase = Phase.BETWEEN
            optimizer.prepared = None
            for unit in units_stepped_by(optimizer) if prepared.is_writing else ():
                unit.engine.end_write()

    def close(self) -> None:
        """End the kept run, which needs no recovery any more: free this rank's memory at the
        keeper. Call it before another Keep(); at its end, `python -m zshard run --keep` does.

        Raises RuntimeError within a commit() block, and if the last commit() was called without
        `with`."""
        if self._phase is Phase.BLOCK:
            raise RuntimeError("close() within commit(): leave the block first")
        try:
            self._refuse_unentered()
        finally:
            if self._phase is not Phase.CLOSED:
                self._phase, Keep._open = Phase.CLOSED, None
                for state in self._states:
                    state.model.is_kept = False
                self._drop(lambda name: name.rank == self._name.rank)
                if self._files is not None:
                    self._files.close()
                self._files = None

    def _drop(self, is_done: Callable[[KeptName], bool]) -> None:
        for name in names_at(self._keeper):
            if name.keep == self._name.keep and is_done(name):
                self._keeper.drop(str(name))
                _held.pop(str(name), None)

    def _complete(self, script: bytes, prepared: Any) -> None:
        plans = prepared.plans
        number = self._step + 1
        files = self._files_for(prepared)
        state = self._snapshot(script, bool(plans))
        if plans:
            files.step.write(number, plans)
        self._phase = Phase.CUT_OFF
        for plan in plans:
            plan.count()
        files.write(number, pickle.dumps(values_of(files.counters)) + state)
        grads = grads_of(params_of(self._optimizer))
        _held["in hand"] = [grad for grad in grads if grad is not None]  # others may finish it
        mark(files.head, Mark.READY, number)
        with PublicCall("Keep.commit()"):
            self._comm.exchange(number.to_bytes(8, "little"))
        self._forget_older()
        if plans:
            files.step.finish(number)
        mark(files.head, Mark.DONE, number)
        del _held["in hand"]
        self._step, self._script, self._phase = number, script, Phase.BETWEEN

    def _snapshot(self, script: bytes, stepped: bool) -> bytes:
        """Return what the script needs to continue, but for counters."""
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
        ]
        buffers = {}
        for name, value in self._model.named_buffers():
            plain = value.detach().cpu().contiguous()  # alive while bytes_of() is read
            facts = str(plain.dtype).removeprefix("torch."), tuple(plain.shape)
            buffers[name] = (*facts, bytes(bytes_of(plain)))
        state = {
            "script": script,
            "stepped": stepped,
            "rng": rng_state(),
            "buffers": buffers,
            "groups": groups,
            "other": other_state(self._optimizer.state),
            "others": states_of(self._others),
        }
        return _pickled("Keep()", state)

    def _files_for(self, prepared: Any) -> Files:
        """Return the files to write to; new ones if the optimizer's state or its runs changed, or
        if gradients lie in files that the keeper does not have."""
        optimizer, before = self._optimizer, self._files
        files_of_runs = [fd for plan in prepared.plans for fd in plan.grad_files()]
        runs, with_grads = len(files_of_runs), sorted({*files_of_runs} - {-1})
        if before is not None and before.fit(runs, optimizer.state_changes, with_grads):
            return before
        layout = layout_of(self._model, optimizer, self._comm)
        layout.files = list(dict.fromkeys([*layout.files, *with_grads]))
        files = Files(max(runs, 1), optimizer.state_changes, before)
        files.counters, files.held = counters_of(optimizer), layout.files
        name, layout_json = str(self._name), json.dumps(asdict(layout)).encode()
        try:
            self._keeper.hold(name, layout_json, [*files.fds, *layout.files])
        except BaseException:
            files.close_area()
            raise
        tensors = (*named_shards(self._model), *state_tensors(optimizer))
        _held[name] = [tensor.detach() for _, tensor in tensors]
        self._files = files
        if before is not None:
            before.close_area()
        return files

    def _forget_older(self) -> None:
        """Free what earlier processes left, once all ranks have written a step of this one."""
        if not self._is_alone:
            self._is_alone, (this, rank, world, _) = True, self._name
            self._drop(lambda n: n.generation < this and (n.rank == rank or n.rank >= world))

    # --- refusals ---------------------------------------------------------------------------------

    def _refuse_unentered(self) -> None:
        if self._phase is Phase.CALLED:
            self._phase = Phase.BETWEEN
            raise RuntimeError(_NO_COMMIT[Phase.CALLED])

    def _refuse_in_block(self) -> None:
        self._refuse_unentered()
        if self._phase is Phase.BLOCK:
            text = "the step takes effect at the end of the commit() block"
            raise RuntimeError(f"{text}: run forwards and state_dict() after it")

    def refuse_write(self, what: str, optimizer: Optimizer | None) -> None:
        self._refuse_unentered()
        if optimizer is None:
            if self._phase is Phase.NEW:
                return
            text = f"{what} would change a kept model outside of its steps"
            raise RuntimeError(f"{text}: do it before kept.recover(...)")
        if optimizer is not self._optimizer:
            text = f"{type(optimizer).__name__} steps a kept model, but Keep() was given another"
            raise RuntimeError(f"{text}: give all parameters to that one")
        if self._phase is not Phase.BLOCK:
            text = "a step outside of commit() would be repeated by a restart"
            raise RuntimeError(f"{text}: write `with kept.commit(...):` around optimizer.step()")


def _pickled(call: str, values: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(values))
    except Exception as error:
        raise TypeError(f"{call} takes plain values, but pickling failed: {error}") from error


class _SoleWriter(Extension):
    """The open Keep alone writes to its model between passes."""

    def check_write(self, units: Sequence[api.Unit], what: str, stepper: Optimizer | None) -> None:
        keep = None if Keep._open is None else Keep._open()
        if keep is None:
            return
        for unit in units:
            if unit.engine in keep._engines:
                keep.refuse_write(what, stepper)
            elif stepper is not None:
                raise RuntimeError(
                    f"{type(stepper).__name__} trains an FSDP(...) model that zshard.Keep() was "
                    "not given, so a restart would lose its steps: keep one module that contains "
                    "all models, and step it with one optimizer, a param group for each model"
                )


EXTENSIONS.append(_SoleWriter())
