"""zshard.load(): load a model, an optimizer and a script's own state from a checkpoint.

The one idea: three steps, and no rank begins a step before all ranks have completed the previous
one. First, check everything that needs no values: files, names, shapes, dtypes, the optimizer.
Second, verify the checksums of the blocks to be read; each rank verifies its share. Third, each
rank reads its own shards, directly into place. So a checkpoint that is damaged, or that belongs to
another model, changes nothing on any rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard._checkpoint import background
from zshard._checkpoint import verify as blocks
from zshard._checkpoint.checkpoint import Checkpoint, Readable
from zshard._checkpoint.contents import is_extra_state, ranks_of
from zshard._checkpoint.opening import older_than, opened
from zshard._checkpoint.optimizer import OptimizerPlan
from zshard._checkpoint.progress import progress
from zshard._checkpoint.reader import Reader
from zshard._checkpoint.safetensors import TensorEntry
from zshard._errors import CheckpointError
from zshard._ranks import meeting
from zshard._ranks.agreement import Fact, check_agreement, on_all_ranks
from zshard._state_dict.load_plan import LoadPlan, carry_out, plan
from zshard._state_dict.stand_ins import Pending, quick_facts
from zshard._units.names import bare, plain, wanted_by

__all__ = ["Loaded", "load"]


class Loaded(dict[str, Any]):
    """The result of zshard.load(): this rank's `extra` as a dict, and facts about the checkpoint.

    path: the checkpoint that was loaded; for a checkpoint directory, the one that was chosen.
    step: its step, or None.
    missing_keys, unexpected_keys: names that only the model has, and only the checkpoint has.
    verified: whether checksums confirmed everything that was read.
    """

    path: str
    step: int | None
    missing_keys: list[str]
    unexpected_keys: list[str]
    verified: bool


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    verify: bool = True,
) -> Loaded:
    """Load a checkpoint into a model and its optimizer; change nothing unless all of it fits.

    Collective: call it on all ranks, outside forward and backward. Each rank reads only its own
    shards. The strategy and the number of ranks may differ from those of the save. To load without
    initializing values first, build the model on the meta device and wrap it with
    `FSDP(model, param_init_fn=zshard.uninitialized)`.

    path: one of the following; all ranks must see the same files.
        - a checkpoint that zshard.save() wrote
        - a checkpoint directory; its newest finished checkpoint is loaded
        - a .safetensors file
        - a Hugging Face folder, with model.safetensors, or with model.safetensors.index.json and
          the files that it lists
        - a folder that torch.distributed.checkpoint wrote
    model: an nn.Module with or without FSDP modules; all ranks of the default process group load a
        plain model together. Parameters and buffers are written in place. Names are those of
        model.state_dict(), without the prefixes of torch.compile(), activation checkpointing and
        DDP; one name is enough for tied parameters. Tensors have the full shape. Dtypes are cast,
        within floating-point, complex and integer dtypes.
    optimizer: an optimizer over parameters of the model. It receives state and options as from
        load_state_dict(); existing state of the same shape is written in place.
    strict: raise an error for missing and unexpected names, for an optimizer of another class, and
        for entries of torch.distributed.checkpoint beside model and optimizer that are not plain
        data.
    verify: verify the checksums of all blocks to be read. If False, verify only those of headers
        and indices. Only checkpoints of zshard.save() have checksums.

    Returns this rank's `extra`, or rank 0's if this rank did not exist when saving; a Loaded, which
    is a dict with further attributes. Waits for a running asynchronous save and raises its error.
    Load hooks and `_load_from_state_dict` of modules see names, shapes and dtypes, and may rename,
    drop or replace entries; asking for values is an error. Extra state and post hooks come last.

    Raises, on all ranks and before anything changes: CheckpointError (a ValueError) if a file is
    damaged, incomplete or invalid, and OSError if it cannot be read, both naming the file;
    RuntimeError listing everything that does not fit; ValueError if the optimizer has parameters
    that the model does not have; DivergenceError if ranks see different checkpoints. If a file
    fails while values are being read, raises OSError or CheckpointError and leaves the model and
    the optimizer partly loaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"zshard.load(): model must be an nn.Module, got {type(model).__name__}")
    model = bare(model)
    comm = ranks_of(model)
    with on_all_ranks(comm):
        background.finish()  # the running save may be the one to load
        _check_optimizer(optimizer)
    with contextlib.ExitStack() as stack:
        asked = [("optimizer", type(optimizer).__name__), ("strict", strict), ("verify", verify)]
        facts = [(f"load({name}=)", str(value)) for name, value in asked]
        check_agreement(comm, facts, "calls to zshard.load()")
        found = _open(stack, comm, path, optimizer is not None)
        if found.manifest is not None:
            heads = blocks.head_runs(found.files, found.manifest.files)
            with _whole_checkpoint(comm, found):
                blocks.check(blocks.share(heads, comm.rank, comm.world))
        plans = _plan(comm, found, model, optimizer, strict)
        ranges = _ranges(found, plans)
        _check(comm, found, plans, ranges, verify)
        total = sum(each.numel * each.entry.dtype.itemsize for each in ranges)
        with progress(total, "loading", comm.rank) as done:
            _carry_out(comm, plans, found, Reader(done))
    loaded = Loaded(plans.extra)
    loaded.path, loaded.step = found.path, found.step
    loaded.missing_keys = list(plans.model.keys.missing_keys)
    loaded.unexpected_keys = list(plans.model.keys.unexpected_keys)
    loaded.verified = verify and found.manifest is not None
    return loaded


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"zshard.load(): optimizer must be a torch.optim.Optimizer, got {kind}")


# --- opening --------------------------------------------------------------------------------------


def _open(
    stack: contextlib.ExitStack, comm: _core.Comm, path: Any, with_optimizer: bool
) -> Checkpoint:
    made: list[Checkpoint] = []
    with on_all_ranks(comm):
        made.append(stack.enter_context(opened(path, with_optimizer)))
    check_agreement(comm, _facts(made[0]), "checkpoints")
    return made[0]


def _facts(found: Checkpoint) -> list[Fact]:
    """The facts that must agree between ranks."""
    facts = [("the checkpoint id", found.manifest.id)] if found.manifest is not None else []
    tensors = sorted(found.model.items())
    return facts + [(f"tensor '{n}'", f"shape {e.shape}, {e.dtype}") for n, e in tensors]


@contextlib.contextmanager
def _whole_checkpoint(comm: _core.Comm, found: Checkpoint) -> Iterator[None]:
    """Context for checking files: on_all_ranks(), and errors name an older checkpoint."""
    with on_all_ranks(comm):
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}{older_than(found.path)}") from None


# --- planning -------------------------------------------------------------------------------------


class _Plans(NamedTuple):
    model: LoadPlan
    optimizer: OptimizerPlan | None
    extra: dict[str, Any]


def _plan(
    comm: _core.Comm,
    found: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer | None,
    strict: bool,
) -> _Plans:
    made: list[_Plans] = []
    with on_all_ranks(comm, lambda: made[0].model.fact()):
        _refuse_meta(model)
        for_model = plan(model, _state_of(found, model), strict)
        for_optimizer = None
        if optimizer is not None:
            with quick_facts():
                for_optimizer = OptimizerPlan(model, optimizer, found, strict)
        made.append(_Plans(for_model, for_optimizer, found.extra_of(comm.rank, strict)))
    return made[0]


def _state_of(found: Checkpoint, model: nn.Module) -> OrderedDict[str, Any]:
    """A state dict of tensors that are not yet read."""
    state: OrderedDict[str, Any] = OrderedDict(
        (plain(name), Reader().whole(e) if is_extra_state(name) else _pending(name, e))
        for name, e in found.model.items()
    )
    state.update((plain(name), value) for name, value in found.others.items())
    _add_tied(model, state)
    names = {plain(n) for kind in (model.named_parameters, model.named_buffers) for n, _ in kind()}
    for alias, name in found.tied.items():  # in this model they may be separate tensors
        if plain(alias) in names and plain(alias) not in state:
            state[plain(alias)] = state[plain(name)]
    state = OrderedDict(wanted_by(model, state))
    if found.versions is not None:
        told = {plain(prefix): version for prefix, version in found.versions.items()}
        versions = {name: told.get(plain(name), 1) for name, _ in model.named_modules()}
        state._metadata = {p: {"version": v} for p, v in versions.items()}  # type: ignore[attr-defined]
    return state


def _pending(name: str, entry: Readable) -> Pending:
    return Pending.of(name, entry.shape, entry.dtype)


def _add_tied(model: nn.Module, state: OrderedDict[str, Any]) -> None:
    """Give all names of a tied tensor the entry of one of them: files contain it once."""
    names: dict[int, list[str]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(plain(name))
    for same in names.values():
        there = next((name for name in same if name in state), None)
        for name in same:
            if there is not None and name not in state:
                state[name] = state[there]


def _refuse_meta(model: nn.Module) -> None:
    """Raise RuntimeError for tensors without memory, which nn.Module would skip."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    names = [f"'{name}'" for name, tensor in tensors if tensor.is_meta]
    if names:
        raise RuntimeError(
            f"cannot load into tensors on the meta device ({', '.join(names[:5])}): first call "
            "FSDP(model, param_init_fn=zshard.uninitialized) or model.to_empty(device=...)"
        )


def _check(
    comm: _core.Comm,
    found: Checkpoint,
    plans: _Plans,
    ranges: Sequence[_ElementRange],
    verify: bool,
) -> None:
    """Check what will be read; each rank checks its share. Check the archives around values, and
    the checksums of all blocks that have not been checked yet."""
    labels = {c.value.label: None for c in plans.model.copies if isinstance(c.value, Pending)}
    entries = [found.model[label] for label in labels]
    entries += plans.optimizer.entries if plans.optimizer is not None else []
    with on_all_ranks(comm):
        for entry in blocks.share(entries, comm.rank, comm.world):
            entry.check()
    if found.manifest is None or not verify:
        return
    needed = {id(entry.file) for entry in entries if isinstance(entry, TensorEntry)}
    files = {name: file for name, file in found.files.items() if id(file) in needed}
    wanted = (e.place(begin, numel) for e, begin, numel in ranges if isinstance(e, TensorEntry))
    mine = blocks.own_runs(comm, files, found.manifest.files, wanted, meeting.host_id())
    total = sum(run.size for run in mine)
    with progress(total, "verifying", comm.rank) as done, _whole_checkpoint(comm, found):
        blocks.check(mine, done)


# --- loading --------------------------------------------------------------------------------------


class _CheckpointValues:
    """The model's tensors in a checkpoint, as a source of zshard._state_dict.load_plan."""

    def __init__(self, found: Checkpoint, reader: Reader) -> None:
        self._found, self._reader = found, reader

    def read(self, name: str, begin: int, target: Tensor) -> None:
        self._reader.read(self._found.model[name], begin, target)


def _carry_out(comm: _core.Comm, plans: _Plans, found: Checkpoint, reader: Reader) -> None:
    optimizer = plans.optimizer
    if optimizer is not None:
        with on_all_ranks(comm), quick_facts():
            optimizer.prepare(reader)
        try:
            with on_all_ranks(comm):
                optimizer.install()
        except BaseException:
            optimizer.undo()
            raise
    with on_all_ranks(comm):
        carry_out(plans.model, _CheckpointValues(found, reader))
        if optimizer is not None:
            optimizer.read(reader)


class _ElementRange(NamedTuple):
    """Elements of a tensor of the checkpoint, in row-major order."""

    entry: Readable
    begin: int
    numel: int


def _ranges(found: Checkpoint, plans: _Plans) -> list[_ElementRange]:
    """What this rank will read, except for a few elements."""
    with quick_facts():
        ranges = [
            _ElementRange(found.model[copy.value.label], copy.value.begin, copy.target.numel())
            for copy in plans.model.copies
            if isinstance(copy.value, Pending)
        ]
        if plans.optimizer is not None:
            ranges += (_ElementRange(*each) for each in plans.optimizer.ranges())
    return ranges
