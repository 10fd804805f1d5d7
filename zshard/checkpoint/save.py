"""zshard.save(): all ranks write their own bytes of the same files; a rename completes the save.

Two halves. The training thread makes a plan (save_plan.py). Writing needs only the
plan and its own transport, not the model, so any thread can do it.

Writing proceeds in steps, and each step succeeds on all ranks before the next begins. Rank 0
creates a hidden folder with the files; all ranks write, fsync and exchange checksums; rank 0 writes
the manifest and renames the folder into place. A failure on one rank is an error on all ranks: the
hidden folder is deleted, and earlier checkpoints stay as they are.
"""

from __future__ import annotations

import functools
import operator
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zshard import _core
from zshard._logger import timed
from zshard.checkpoint.checkpoint import Averages
from zshard.checkpoint.contents import Replicas, of_model, of_optimizer, ranks_of
from zshard.checkpoint.folder import Staging, Target
from zshard.checkpoint.manifest import NAME as MANIFEST
from zshard.checkpoint.manifest import FileRecord, Written
from zshard.checkpoint.progress import bar
from zshard.checkpoint.safetensors import CODES
from zshard.checkpoint.save_plan import Kept, SavePlan, SaveRequest, plan_of
from zshard.checkpoint.script_state import encode
from zshard.checkpoint.write import SaveHandle, Writer, finish, snapshot, start, write_text
from zshard.options import parse_size
from zshard.ranks.agreement import (
    PublicCall,
    check_agreement,
    gather_bytes,
    on_all_ranks,
    on_any_rank,
)
from zshard.ranks.transports import comm_beside
from zshard.units.moment import REPLACED, refuse, reshard_all
from zshard.units.returned import look
from zshard.units.units import ModelContext, bare, units_of
from zshard.upper import module_for

__all__ = ["SaveHandle", "save"]

_OPEN = 64  # files at a time


@PublicCall("save()")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: Averages | None = None,
    step: int | None = None,
    extra: Mapping[Any, Any] | None = None,
    asynchronous: bool = False,
    dtype: torch.dtype | None = None,
    keep_last: int | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    per_host: bool = False,
    replicas: int = 0,
) -> SaveHandle:
    """Save a model, its optimizer and the script's own state as plain safetensors files.

    Collective: call it on all ranks, outside forward and backward. Each rank writes the elements
    that it holds; nothing is gathered. Once every rank has fsynced, a rename moves the folder into
    place; until then, earlier checkpoints stay as they are. Needs 16 MiB of memory if tensors are
    cast or on a GPU.

    path: the folder to create, which all ranks must see, unless `per_host`; its parent must exist.
        With `step`, a checkpoint directory, in which `step-00000100` is created.
    model: any module, with or without FSDP modules. The entries of its state_dict() are saved
        unsharded, under their names without the prefixes of torch.compile(), activation
        checkpointing and DDP, in the dtype that parameters have between steps; for tensors outside
        FSDP modules, rank 0's values. Tied parameters are saved once. from_pretrained() loads the
        folder of a Hugging Face model, but not of one with PEFT's adapters.
    optimizer: an optimizer over parameters of the model.
    ema: the model's EMA. Each of its averages is saved in its own dtype, as files of that decay,
        `average-0.999.safetensors`, which also load into a plain model by themselves.
    step: the step number, which is saved and gives the folder its name.
    extra: a dict of this rank's own state, such as a scheduler's and zshard.rng_state(), which
        load() returns to the same rank, with the same types: numbers, strings, None, lists,
        tuples, dicts, sets, bytes, and tensors and NumPy arrays of at most 16 MiB; also Counter,
        OrderedDict, defaultdict, deque, torch.Size, nn.Parameter. It is saved as JSON.
    asynchronous: copy this rank's values and return; a thread writes the copy, whose memory later
        saves reuse. One save runs at a time: the next one waits for it. wait() of the result, or
        the next save() or load(), raises its error. A process that exits waits for the thread; its
        exit status is 1 if the save failed and no call has raised the error.
    dtype: the dtype of the model's floating-point tensors in the files, such as torch.bfloat16;
        None keeps their dtypes. The optimizer's state always keeps its dtypes.
    keep_last: with `step`, the number of checkpoints to keep, counting this one and those of lower
        steps; older ones are deleted once this one is finished. Warns of checkpoints of higher
        steps, which load() would choose, and of NaN and infinite parameters; then the newest
        checkpoint without such values is kept as well.
    overwrite: replace an existing checkpoint once this one is finished.
    max_shard_size: the maximum bytes of tensors per file, as a number or as "5GB", "200MiB".
    per_host: each host writes what its ranks hold to its own disk, and a manifest, for hosts that
        share no disk; the ranks of a host share `path`. The same ranks load it on the same hosts;
        for others, `python -m zshard ckpt collect` first brings all parts to all hosts. `overwrite`
        is not available then.
    replicas: removed; raises ValueError.

    Raises the same type of error on all ranks, after which training can continue: FileExistsError
    if the path exists; OSError if the system refuses; ValueError or TypeError, which name the
    argument or entry, for what cannot be saved; RuntimeError during forward or backward, if a hook
    reads values of sharded parameters, or while another save to the directory is in progress;
    DivergenceError if ranks would save different things, or have not made the same steps; PeerError
    if a rank exited.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"zshard.save(): model must be an nn.Module, got {type(model).__name__}")
    look()  # before the ranks begin, since it may raise
    model = bare(model)
    comm = ranks_of(model)
    with on_all_ranks(comm), torch.no_grad():
        finish()
        kept = Kept(
            None if step is None else _count("step", step, 0),
            None if keep_last is None else _count("keep_last", keep_last, 1),
            overwrite,
        )
        limit = parse_size("max_shard_size", max_shard_size, base=1000)
        _check_arguments(kept, extra, dtype)
        if per_host and overwrite:
            raise ValueError("overwrite=True is not available with per_host=True: pass step=")
        if replicas:
            raise ValueError("replicas= was removed: copy each host's folder to another host")
        target = Target.of(path, kept.step)
        reshard_all(model, "save")
        if optimizer is not None or ema is not None:
            states = (state for _, state in units_of(model))
            refuse(states, "save an optimizer or an EMA", REPLACED)
        contents = [of_model(model, dtype)]
        if optimizer is not None:
            contents.append(of_optimizer(model, optimizer))
        encoded = encode(dict(extra or {}))
        more = [] if ema is None else [module_for("ema").to_save(ema, model)]
        request = SaveRequest(target, kept, limit, contents, encoded, bool(per_host), more)
    check_agreement(comm, request.facts(), "checkpoints to save")
    nested = request.contents[-1].nested
    if not on_any_rank(comm, not nested):  # on one rank alone, a shape may match by chance
        text = f"cannot save {nested} in the optimizer state, which contains this rank's shards"
        raise RuntimeError(f"{text}: store each tensor under a key of its own")
    for engine in dict.fromkeys(state.unit.engine for _, state in units_of(model)):
        engine.compare()  # whether the ranks' shards are of one step
    write, ranks = _write, range(comm.world)
    if per_host:
        write, ranks = module_for("per_host").writer(comm)
    plan = plan_of(comm, request, model, Replicas(model, comm, ranks))
    beside = comm_beside(comm)

    def run() -> None:
        with timed(comm.rank, "save", target.path) as sizes:
            write(plan, beside)
            sizes.extend(piece.size for piece in plan.pieces)

    if not asynchronous:
        run()
        return SaveHandle(target.path)
    with on_all_ranks(comm), torch.no_grad():
        context = next((state.model for _, state in units_of(model)), ModelContext())
        plan = replace(plan, pieces=snapshot(context, plan.pieces))
    return start(SaveHandle(target.path, run))


# --- checks ---------------------------------------------------------------------------------------


def _count(name: str, value: Any, low: int) -> int:
    """Return an argument as an integer. Raise TypeError or ValueError, which names it."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r}: {error}") from None
    if not low <= number < 2**63 or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer from {low} to 2**63 - 1, got {value!r}")
    return number


def _check_arguments(kept: Kept, extra: object, dtype: object) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict, got {type(extra).__name__}")
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if dtype is not None and (not dtype.is_floating_point or dtype not in CODES):
        raise ValueError(f"dtype must be a floating-point dtype of safetensors, got {dtype}")
    if kept.keep_last is not None and kept.step is None:
        raise ValueError("keep_last needs numbered checkpoints: pass step as well")


# --- writing --------------------------------------------------------------------------------------


@PublicCall("save()")
def _write(plan: SavePlan, comm: _core.Comm) -> None:
    """Execute the plan. Collective; `comm` belongs to this thread."""
    rank_0 = comm.rank == 0
    staging = Staging(plan.target, plan.id, plan.kept.overwrite)
    try:
        with on_all_ranks(comm):
            if rank_0:
                staging.open()
                for file in plan.files:
                    _core.File.create(os.path.join(staging.path, file.name), file.size).close()
        writer = Writer(plan)
        size = functools.partial(plan.size, headers=rank_0, texts=False)
        with on_all_ranks(comm), torch.no_grad(), bar("saving", size, rank_0):
            rows = list(_write_runs(plan, staging.path, rank_0, writer))
        everyone = _gather(comm, rows)
        strange = writer.strange_on_any(comm)
        with on_all_ranks(comm):
            if rank_0:  # after all tensors are synced
                records = {
                    file.name: FileRecord.of(file.name, file.size, everyone[number])
                    for number, file in enumerate(plan.files)
                }
                for name, text in plan.texts.items():
                    records[name] = write_text(os.path.join(staging.path, name), text)
                path = os.path.join(staging.path, MANIFEST)
                write_text(path, plan.manifest(records, finite=not strange))
                staging.commit()
        staging.discard()
        plan.clean_up(comm, rank_0, strange)
    finally:
        staging.discard()
        staging.close()


def _write_runs(
    plan: SavePlan, folder: str, headers: bool, writer: Writer
) -> Iterator[tuple[int, Written]]:
    """Write this rank's pieces, and the headers if `headers`, and fsync them. Yield (file number,
    checksum) pairs."""
    numbers = {file.name: number for number, file in enumerate(plan.files)}
    todo = sorted(plan.runs(headers, texts=False).items(), key=lambda item: numbers[item[0]])
    for first in range(0, len(todo), _OPEN):
        with ExitStack() as stack:
            opened = []
            for name, runs in todo[first : first + _OPEN]:
                file = stack.enter_context(_open(os.path.join(folder, name)))
                opened.append(file)
                yield from ((numbers[name], row) for row in writer.write(file, runs))
            for file in opened:
                file.sync()


def _open(path: str) -> _core.File:
    try:
        return _core.File.open_to_write(path)
    except FileNotFoundError:
        text = f"this rank cannot see '{path}', which rank 0 just created"
        raise FileNotFoundError(f"{text}: save to a shared disk, or pass per_host=True") from None


def _gather(comm: _core.Comm, rows: Sequence[tuple[int, Written]]) -> dict[int, list[Written]]:
    """Return what all ranks wrote, by file."""
    numbers = array("Q", [number for file, row in rows for number in (file, *row)])
    written: dict[int, list[Written]] = {}
    for data in gather_bytes(comm, numbers.tobytes()):
        values = iter(memoryview(data).cast("Q").tolist())
        for file, *row in zip(values, values, values, values, strict=True):
            written.setdefault(file, []).append((row[0], row[1], row[2]))
    return written
