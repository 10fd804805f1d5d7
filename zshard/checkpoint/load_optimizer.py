"""Load the state of an optimizer from a checkpoint: checked first, then through the optimizer's own
load_state_dict(), and read into place at the end.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zshard import _core
from zshard.checkpoint.checkpoint import Checkpoint, OptimizerState, read_whole
from zshard.guard import slices
from zshard.optim.sharded_state import class_of_state
from zshard.ranks.agreement import on_all_ranks
from zshard.state.optimizer import install
from zshard.state.optimizer_load import LaterReads, entries_to_load, planned_reads
from zshard.state.optimizer_names import by_number, names_of
from zshard.state.source import Source
from zshard.state.stand_ins import Pending
from zshard.units.units import plain_name


class OptimizerLoad:
    """Loads an optimizer, in steps.

    optimizer.load_state_dict() receives tensors without values. For this rank's shards, it takes
    new memory or the existing state, which read() fills, and it reads the rest. So hooks work as
    always, and if one fails on any rank, the optimizer gets its previous state back.

    Creating it changes nothing. It raises RuntimeError, which lists what does not fit, and
    ValueError for parameters that are not the model's.
    """

    @slices.plain()
    def __init__(
        self, model: nn.Module, optimizer: Optimizer, contents: Checkpoint, strict: bool = True
    ) -> None:
        """strict: require an optimizer of the class that the checkpoint names."""
        told = contents.optimizer
        if told is None:
            why = contents.no_optimizer or "omit the optimizer to load the model alone"
            raise RuntimeError(f"'{contents.path}' has no usable optimizer state: {why}")
        names = names_of(model, optimizer)
        problems, kind = [], class_of_state(optimizer).__name__  # torch's or zshard's
        if strict and told.kind is not None and told.kind.rpartition(".")[2] != kind:
            problems.append(
                f"the checkpoint has the state of {told.kind}, but the optimizer is {kind}; pass "
                "strict=False to load it anyway"
            )
        told, more = told.fitted(optimizer, names)
        problems += more
        more, self._numbered = by_number(model, optimizer, _pending_state(model, contents, told))
        if problems + more:
            head = f"Error(s) in loading optimizer state for {type(optimizer).__name__}:"
            raise RuntimeError("\n\t".join([head, *problems, *more]))
        self._optimizer = optimizer
        self._later: LaterReads | None = None

    def pending(self) -> list[Pending]:
        """Return the tensors that this rank will read."""
        shards = (each.own for each in entries_to_load(self._optimizer, self._numbered))
        return [own for own in shards if isinstance(own, Pending)]

    def install(self, comm: _core.Comm, reader: Source) -> None:
        """Make the optimizer load everything except its shards, for which it gets memory.
        Collective: if its load_state_dict() raises on any rank, this raises on all ranks and leaves
        the optimizer unchanged."""
        optimizer, later = self._optimizer, LaterReads(reader)
        changed = [optimizer, *getattr(optimizer, "inner", ())]
        before = [(each.state, dict(each.state), each.param_groups) for each in changed]
        options = [(group, dict(group)) for *_, groups in before for group in groups]
        install()  # a plain model's optimizer may be torch's
        token = planned_reads.set(later)
        try:
            with on_all_ranks(comm):
                optimizer.load_state_dict(self._numbered)
                later.check(optimizer)
        except BaseException:
            for each, (state, entries, groups) in zip(changed, before, strict=True):
                state.clear()
                state.update(entries)
                each.state, each.param_groups = state, groups
            for group, values in options:
                group.clear()
                group.update(values)
            raise
        finally:
            planned_reads.reset(token)
        self._later = later

    def read(self, reader: Source) -> None:
        """Read the shards into the state that install() created, then run the post hooks."""
        assert self._later is not None, "install() comes first"
        self._later.carry_out()


def _pending_state(model: nn.Module, contents: Checkpoint, told: OptimizerState) -> dict[str, Any]:
    """Return the state dict by name, with tensors that have no values yet. They keep their dtypes
    where their parameter was saved in the dtype that it has here."""
    saved = {**contents.model, **{a: contents.model[n] for a, n in contents.tied.items()}}
    dtypes = {plain_name(name): entry.dtype for name, entry in saved.items()}
    here = model.named_parameters(remove_duplicate=False)
    same = {name for full, p in here if dtypes.get(name := plain_name(full)) == p.dtype}
    state: dict[str, dict[str, Any]] = {name: {} for name in [*told.tensors, *told.values]}
    for name, tensors in told.tensors.items():
        for key, entry in tensors.items():
            state[name][key] = value = Pending.of(f"{name}.{key}", entry)
            value.keeps_dtype = plain_name(name) in same
    for name, own in told.values.items():
        state[name].update(own)
    other = tree_map(_read, told.other)
    return {"state": {**other, **state}, "param_groups": told.groups}


def _read(value: Any) -> Any:
    if not hasattr(value, "read_into"):
        return value
    value.check()
    return read_whole(value)
