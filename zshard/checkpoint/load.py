"""zshard.load(): load a model, an optimizer and a script's own state from a checkpoint.

Loading has three steps, and no rank begins a step before all ranks have completed the previous one.
First, check everything that needs no values: files, names, shapes, dtypes, the optimizer. Second,
verify the checksums of the blocks to be read; each rank verifies its share. Third, each rank reads
its own shards, directly into place. So a checkpoint that is damaged, or that belongs to another
model, changes nothing on any rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zshard import _core
from zshard._errors import CheckpointError
from zshard._logger import timed
from zshard.checkpoint.checkpoint import Averages, Checkpoint, is_extra_state, older_than
from zshard.checkpoint.contents import ranks_of
from zshard.checkpoint.folder import has_parts, path_of
from zshard.checkpoint.load_optimizer import numbered_state, pending_in, prepare
from zshard.checkpoint.manifest import BLOCK, FileBlocks, own_blocks, share
from zshard.checkpoint.progress import bar
from zshard.checkpoint.safetensors import SafetensorsFile, TensorEntry
from zshard.checkpoint.write import finish
from zshard.guard import slices
from zshard.ranks import meeting
from zshard.ranks.agreement import PublicCall, check_agreement, on_all_ranks, on_any_rank
from zshard.state.load_state_dict import plan
from zshard.state.source import LoadPlan, filled
from zshard.state.stand_ins import Pending
from zshard.units.extensions import EXTENSIONS
from zshard.units.units import bare, plain_name, wanted_by
from zshard.upper import import_upper, module_for

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


@PublicCall("load()")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: Averages | None = None,
    strict: bool = True,
    verify: bool = True,
) -> Loaded:
    """Load a checkpoint into a model and its optimizer; change nothing unless all of it fits.

    Collective: call it on all ranks, outside forward and backward. Each rank reads only its own
    shards. The strategy and the number of ranks may differ from those of the save. To load without
    initializing values first, build the model on the meta device and wrap it with
    `FSDP(model, param_init_fn=zshard.uninitialized)`.

    path: a checkpoint of zshard.save(); a checkpoint directory, whose newest finished checkpoint is
        loaded; a .safetensors file; a Hugging Face folder with safetensors files; or a folder of
        torch.distributed.checkpoint. All ranks must see the same files.
    model: an nn.Module with or without FSDP modules; all ranks of the default process group load a
        plain model together. Parameters and buffers are written in place. Names are those of
        model.state_dict(), without the prefixes of torch.compile(), activation checkpointing and
        DDP; one name is enough for tied parameters. Tensors have the full shape. Dtypes are cast,
        within floating-point, complex and integer dtypes.
    optimizer: an optimizer over parameters of the model. It receives state and options as from
        load_state_dict(); existing state of the same shape is written in place.
    ema: the model's EMA, with the decays of the one that was saved. It receives averages and
        counts.
    strict: raise an error for missing and unexpected names, for an optimizer of another class, and
        for entries of torch.distributed.checkpoint besides model and optimizer that are not plain
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
    import_upper()
    model = bare(model)
    comm = ranks_of(model)
    with on_all_ranks(comm):
        finish()  # the running save may be the one to load
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"zshard.load(): optimizer must be a torch.optim.Optimizer, got {kind}")
        open_averages = None if ema is None else module_for("ema").to_load(ema, model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # later steps write to what it makes
        asked = [("optimizer", type(optimizer).__name__), ("strict", strict), ("verify", verify)]
        asked.append(("ema", type(ema).__name__))
        facts = [(f"load({name}=)", str(value)) for name, value in asked]
        check_agreement(comm, facts, "calls to zshard.load()")
        checkpoint = _open(stack, comm, path, optimizer is not None)
        sizes = stack.enter_context(timed(comm.rank, "load", checkpoint.path))
        plan_averages: Callable[[], LoadPlan] | None = None
        with on_all_ranks(comm):
            if open_averages is not None:
                plan_averages = open_averages(checkpoint)
        if checkpoint.manifest is not None:
            _check_heads(comm, checkpoint)
        numbered: dict[str, Any] = {}
        with on_all_ranks(comm, lambda: plans[0].fact()):
            for_model, keys = _plan_model(model, checkpoint, strict)
            plans = [for_model]
            if optimizer is not None:
                numbered = numbered_state(model, optimizer, checkpoint, strict)
            if plan_averages is not None:
                plans.append(plan_averages())
            loaded = Loaded(checkpoint.extra_of(comm.rank, strict))
        with slices.plain():
            pending = [value for todo in plans for value in todo.pending()]
            if optimizer is not None:
                pending += pending_in(optimizer, numbered)
            _check(comm, checkpoint, pending, verify)
        sizes.append(_bytes_of(pending))
        if optimizer is not None:
            plans.insert(1, prepare(comm, optimizer, numbered))
        with on_all_ranks(comm), bar("loading", lambda: _bytes_of(pending), comm.rank == 0):
            for todo in plans:
                todo.carry_out()
    loaded.path, loaded.step = checkpoint.path, checkpoint.step
    loaded.missing_keys = list(keys.missing_keys)
    loaded.unexpected_keys = list(keys.unexpected_keys)
    loaded.verified = verify and checkpoint.manifest is not None
    return loaded


def _bytes_of(pending: Iterable[Pending]) -> int:
    return sum(value.numel() * value.dtype.itemsize for value in pending)


# --- opening --------------------------------------------------------------------------------------


def _open(
    stack: contextlib.ExitStack,
    comm: _core.Comm,
    path: str | os.PathLike[str],
    with_optimizer: bool,
) -> Checkpoint:
    in_parts = False
    with on_all_ranks(comm):
        path = path_of(path)
        in_parts = has_parts(path)
    if on_any_rank(comm, in_parts):
        path = module_for("per_host").common_checkpoint(comm, path)
    with on_all_ranks(comm):
        checkpoint = stack.enter_context(Checkpoint.opened(path, with_optimizer))
    tensors = sorted(checkpoint.model.items())
    facts = [(f"tensor '{n}'", f"shape {e.shape}, {e.dtype}") for n, e in tensors]
    if checkpoint.manifest is not None:
        facts.insert(0, ("the checkpoint id", checkpoint.manifest.id))
    check_agreement(comm, facts, "checkpoints")
    return checkpoint


# --- planning -------------------------------------------------------------------------------------


def _plan_model(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> tuple[LoadPlan, Any]:
    """Return what to do, and what load_state_dict() would return. Raise RuntimeError, which lists
    everything that does not fit."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    names = [f"'{name}'" for name, tensor in tensors if tensor.is_meta]
    if names:  # nn.Module would skip these
        raise RuntimeError(
            f"cannot load into tensors on the meta device ({', '.join(names[:5])}): first call "
            "FSDP(model, param_init_fn=zshard.uninitialized) or model.to_empty(device=...)"
        )
    if checkpoint.manifest is not None:
        for extension in EXTENSIONS:
            extension.check_recorded(model, checkpoint.manifest.model, checkpoint.path)
    return plan(model, _state_of(checkpoint, model), strict)


def _state_of(checkpoint: Checkpoint, model: nn.Module) -> OrderedDict[str, Any]:
    """Return a state dict of tensors that are not read yet."""
    state: OrderedDict[str, Any] = OrderedDict(
        (plain_name(name), filled(value) if is_extra_state(name) else value)
        for name, entry in checkpoint.model.items()
        for value in (checkpoint.pending(name, entry),)
    )
    state.update((plain_name(name), value) for name, value in checkpoint.others.items())
    names: dict[int, list[str]] = {}  # each tensor's; files contain a tied tensor once
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(plain_name(name))
    for same in names.values():
        if saved := [name for name in same if name in state]:
            state.update((name, state[saved[0]]) for name in same if name not in state)
    firsts = {same[0] for same in names.values()}
    for alias, name in checkpoint.tied.items():  # in this model they may be separate tensors
        if plain_name(alias) in firsts and plain_name(alias) not in state:
            state[plain_name(alias)] = state[plain_name(name)]
    state = OrderedDict(wanted_by(model, state))
    if checkpoint.versions is not None:
        saved_ones = {plain_name(prefix): v for prefix, v in checkpoint.versions.items()}
        versions = {name: saved_ones.get(plain_name(name), 1) for name, _ in model.named_modules()}
        state._metadata = {p: {"version": v} for p, v in versions.items()}  # type: ignore[attr-defined]
    return state


def _check_heads(comm: _core.Comm, checkpoint: Checkpoint) -> None:
    """Verify what opening has read, apart from the manifest; each rank verifies its share."""
    assert checkpoint.manifest is not None, "the caller checks this"
    files = checkpoint.files
    if checkpoint.spread is None:
        blocks = FileBlocks.heads(files, checkpoint.manifest.files).share(comm.rank, comm.world)
    else:
        headers = [(n, 0, f.data) for n, f in files.items() if isinstance(f, SafetensorsFile)]
        blocks = checkpoint.spread.own_blocks(comm, headers)
    _verify(comm, checkpoint, blocks)


def _verify(comm: _core.Comm, checkpoint: Checkpoint, blocks: FileBlocks) -> None:
    """Verify this rank's blocks. Collective. An error names an older checkpoint."""
    with on_all_ranks(comm):
        try:
            blocks.check()
        except CheckpointError as error:
            raise CheckpointError(f"{error}{older_than(checkpoint.path)}") from None


def _check(
    comm: _core.Comm, checkpoint: Checkpoint, pending: Sequence[Pending], verify: bool
) -> None:
    """Check what will be read; each rank checks its share. Check the archives around values, and
    the checksums of all blocks that have not been checked yet."""
    entries = list({id(value.origin): value.origin for value in pending}.values())
    with on_all_ranks(comm):
        for entry in share(entries, comm.rank, comm.world):
            entry.check()
    if checkpoint.manifest is None or not (verify or checkpoint.spread):
        return
    needed = {id(entry.file) for entry in entries if isinstance(entry, TensorEntry)}
    files = {name: file for name, file in checkpoint.files.items() if id(file) in needed}
    wanted = [
        value.origin.place(value.begin, value.numel())
        for value in pending
        if isinstance(value.origin, TensorEntry)
    ]
    if checkpoint.spread is None:
        blocks = own_blocks(comm, files, checkpoint.manifest.files, wanted, meeting.host_id())
    else:
        names = {id(file): name for name, file in files.items()}
        ranges = [(names[id(file)], begin, end) for file, begin, end in wanted]
        blocks = checkpoint.spread.own_blocks(comm, ranges)  # also if nothing is verified
    if verify:
        with bar("verifying", lambda: BLOCK * len(blocks), comm.rank == 0):
            _verify(comm, checkpoint, blocks)
