"""Saving a checkpoint: all ranks write their own bytes of the same files, then it gets its name.

The one idea: two halves. The plan is made by the thread that trains: what there is to save, which
bytes of which files it is, and whether the ranks agree; no value is read for it. Writing needs the
plan and a transport of its own, and nothing else of the model: it may be any thread's work.

Writing is agreed upon step by step, so each step has gone well on all ranks before the next begins:
rank 0 makes a hidden folder and the files in it; all write, sync, and say what the checksums are;
rank 0 writes the manifest and gives the folder its name. What fails on one rank is an error on all,
the hidden folder is deleted, and what had been saved before is as it was.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from zshard import _core
from zshard._agree import Fact, check_agreement, gather_bytes, on_all_ranks
from zshard._checkpoint import background
from zshard._checkpoint.extra import encode
from zshard._checkpoint.folder import Staging, Target, retain, warn_of_newer
from zshard._checkpoint.layout import (
    File,
    Piece,
    bytes_in,
    index_of,
    joined,
    lay_out,
    pieces_of,
    record_of,
)
from zshard._checkpoint.manifest import BLOCK, FileRecord, Manifest, dump
from zshard._checkpoint.manifest import NAME as MANIFEST
from zshard._checkpoint.outline import (
    Contents,
    Copies,
    facts_of,
    of_model,
    of_optimizer,
    ranks_of,
    settle,
)
from zshard._checkpoint.progress import progress
from zshard._checkpoint.safetensors import CODES, rows_of
from zshard._checkpoint.write import Chunk, Writer, Written
from zshard._group import comm_beside
from zshard._plain_names import bare, plain
from zshard.api import FSDP

_OPEN = 64  # files at a time


class Save:
    """A checkpoint that zshard.save is writing or has written."""

    def __init__(self, path: str, task: background.Task | None = None) -> None:
        self.path = path
        """Its folder, an absolute path."""
        self._task = task

    def wait(self) -> None:
        """Returns when it is finished, and raises what has kept it from that."""
        if self._task is not None:
            self._task.wait()

    def done(self) -> bool:
        """Is it finished, or has it failed?"""
        return self._task is None or self._task.done()

    def __repr__(self) -> str:
        return f"Save({self.path!r})"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[Any, Any] | None = None,
    asynchronous: bool = False,
    dtype: torch.dtype | None = None,
    keep_last: int | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Save:
    """Saves a model, its optimizer and what else training needs, as plain safetensors files.

    path: the folder to be made; its parent has to be there. With `step`, a directory of numbered
        checkpoints, in which `step-00000100` is made; it is made as well if its own parent is
        there. All ranks need to see it.
    model: any module, with or without FSDP modules in it. What its state_dict() has is saved under
        these names (without what torch.compile(), activation checkpointing and DDP add), whole, in
        the dtype that parameters have between steps; of what is no part of an FSDP module, rank 0's
        values. Nothing is gathered: each rank writes the elements that it has. Of tied parameters
        one is saved, and the manifest has the other names. A model of Hugging Face's gets its
        config.json beside, and `from_pretrained` loads the folder.
    optimizer: one over parameters of the model; its state is saved as `<parameter>.exp_avg` in
        files of its own, its param groups and what is no tensor in the manifest.
    step: a number that is kept, and from which the name is made.
    extra: this rank's own dict of numbers, strings, None, lists, tuples, dicts, sets, bytes, and
        tensors and NumPy arrays of at most 16 MiB: a scheduler's and a data loader's state,
        zshard.rng_state(). It is kept as JSON, and load() gives it to the same rank.
    asynchronous: return as soon as this rank's values are copied; a thread writes the copy while
        training goes on. The memory for it, as large as this rank's part of what is saved, is kept
        for the next time. One save is under way at a time: a second one waits. What fails is
        raised by wait(), or by the next save() or load(); a process that ends waits for the thread,
        and ends with status 1 if it fails and nobody has been told.
    dtype: in which floating-point tensors of the model are written, as torch.bfloat16; None: as
        they are. The optimizer's state is always as it is.
    keep_last: (with `step`) so many checkpoints are kept of this one and those of lower steps; the
        oldest are deleted, when this one is finished. Those of higher steps stay, which is a
        warning, as load() would take them. If a parameter is NaN or infinite, which is a warning,
        too, the newest one where none was is kept as well.
    overwrite: a checkpoint that is there is replaced, when this one is finished.
    max_shard_size: bytes of tensors in one file, or "5GB", "200MiB".

    For all ranks together, outside of forward and backward. The folder gets its name when all of it
    is on the disk; whatever ends the process before leaves earlier checkpoints as they were, and a
    hidden folder that the next save deletes. Takes a chunk of memory (16 MiB) beside the model,
    where tensors are cast or on a GPU, else none.

    Raises the same kind of error on all ranks, and training can go on: FileExistsError for a path
    that is taken; OSError where the system refuses; ValueError, TypeError for arguments and entries
    that cannot be kept, naming them; RuntimeError in a forward or backward, where a hook asks for
    the values of sharded parameters, and while another save into the directory is under way;
    DivergenceError where ranks would save different tensors, or to different places; PeerError if a
    rank is gone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save takes an nn.Module, not {type(model).__name__}")
    model = bare(model)
    comm = ranks_of(model)
    copies = Copies(model, comm)
    made: list[_Asked] = []
    with on_all_ranks(comm), torch.no_grad():
        background.finish()
        kept = _Kept(_step(step), keep_last, overwrite)
        limit = bytes_in(max_shard_size)
        _check_arguments(kept, extra, dtype)
        target = Target.of(path, kept.step)
        settle(model)
        contents = [of_model(model, copies, dtype)]
        if optimizer is not None:
            contents.append(of_optimizer(model, optimizer, copies))
        made.append(_Asked(target, kept, limit, contents, encode(dict(extra or {}))))
    check_agreement(comm, made[0].facts(), "checkpoints to be saved")
    _check_nested(comm, made[0].contents[-1].nested)
    plan = _plan(comm, made[0], model)
    beside = comm_beside(comm)
    if not asynchronous:
        _write(plan, beside)
        return Save(target.path)
    with on_all_ranks(comm), torch.no_grad():
        plan = replace(plan, pieces=background.snapshot(model, plan.pieces))
    return Save(target.path, background.start(target.path, lambda: _write(plan, beside, False)))


# --- the plan -------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What there will be beside it."""

    step: int | None
    keep_last: int | None
    overwrite: bool


class _Asked(NamedTuple):
    """What a rank has been asked to save; the ranks may not agree."""

    target: Target
    kept: _Kept
    limit: int  # bytes in a file
    contents: list[Contents]  # of the model and, if it was given, the optimizer
    extra: Any  # this rank's, encoded

    def facts(self) -> list[Fact]:
        facts = [(name, repr(value)) for name, value in self.kept._asdict().items()]
        facts += [("path", repr(self.target.path)), ("max_shard_size", repr(self.limit))]
        for what, contents in zip(("tensor", "optimizer tensor"), self.contents, strict=False):
            facts += facts_of(contents, what)
        if len(self.contents) > 1:
            told = self.contents[1].told
            names = [group["params"] for group in told["groups"]]
            facts += [("the optimizer", told["class"]), ("param_groups", repr(names))]
        return facts


@dataclass(frozen=True)
class Plan:
    """All that writing needs. What `pieces` have is read when it is written."""

    target: Target
    kept: _Kept
    files: list[File]
    pieces: list[Piece]  # this rank's, by file
    texts: Mapping[str, bytes]  # (rank 0) further files
    manifest: Callable[[Mapping[str, FileRecord], bool], bytes]  # its text: of files; finite?
    id: str
    parameters: frozenset[str]  # names


def _step(step: Any) -> int | None:
    if step is None:
        return None
    number = _whole("step", step)
    if not 0 <= number < 2**63 or isinstance(step, bool):
        raise ValueError(f"step={step!r} is no number of steps: 0 to 2**63 - 1 are")
    return number


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r}: {error}") from None


def _check_arguments(kept: _Kept, extra: Any, dtype: Any) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra takes a dict, not {type(extra).__name__}")
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype takes a torch.dtype, not {dtype!r}")
        if not dtype.is_floating_point or dtype not in CODES:
            raise ValueError(f"dtype={dtype}: tensors can be written in a floating-point dtype")
    if kept.keep_last is not None:
        if kept.step is None:
            raise ValueError("keep_last is for numbered checkpoints: give step as well")
        if _whole("keep_last", kept.keep_last) < 1:
            raise ValueError(f"keep_last={kept.keep_last}: at least this one is kept")


def _check_nested(comm: _core.Comm, found: str) -> None:
    """Refuses slices within lists and dicts of an optimizer's state, if all ranks have found some:
    one alone could be misled by a shape."""
    if all(told == b"\1" for told in comm.exchange(b"\1" if found else b"\0")):
        raise RuntimeError(
            f"{found} in the optimizer's state holds this rank's slices, which save() cannot keep; "
            "it can where tensors are under names of their own"
        )


def _plan(comm: _core.Comm, asked: _Asked, model: nn.Module) -> Plan:
    """Collective. The ranks have agreed."""
    own, *others = asked.contents
    extras = _from_all(comm, asked.extra)
    id = comm.exchange(os.urandom(16))[0].hex()
    with on_all_ranks(comm):
        files = lay_out(own.items, "model", asked.limit, own.tied)
        texts = _texts(model, files) if comm.rank == 0 else {}
        texts["model.safetensors.index.json"] = index_of(files)
        if others and others[0].items:
            more = lay_out(others[0].items, "optimizer", asked.limit)
            texts["optimizer.safetensors.index.json"] = index_of(more)
            files = files + more

    def manifest(records: Mapping[str, FileRecord], finite: bool) -> bytes:
        return dump(
            Manifest(
                id=id,
                step=asked.kept.step,
                world=comm.world,
                files=records,
                tied=own.tied,
                model=own.told,
                optimizer=others[0].told if others else None,
                extra=extras,
                software=_software(),
                finite=finite,
            )
        )

    names = frozenset(plain(n) for n, _ in model.named_parameters(remove_duplicate=False))
    return Plan(asked.target, asked.kept, files, pieces_of(files), texts, manifest, id, names)


def _from_all(comm: _core.Comm, mine: Any) -> list[Any]:
    """The JSON values of all ranks, or one if they are equal."""
    text = json.dumps(mine).encode()
    if len(set(comm.exchange(hashlib.sha256(text).digest()))) == 1:
        return [mine]
    return [json.loads(each) for each in gather_bytes(comm, text)]


def _software() -> dict[str, str]:
    from zshard import __version__  # which is set when all modules are imported

    return {"zshard": __version__, "torch": torch.__version__}


def _texts(model: nn.Module, files: Sequence[File]) -> dict[str, bytes]:
    """Hugging Face's files beside the tensors, of a model that has what they are made of."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    told = json.loads(config.to_json_string())
    dtypes = [item.dtype for file in files for item, _ in file.places]
    stored = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    if stored is not None:  # as save_pretrained() does: it is what from_pretrained() makes of them
        told["torch_dtype" if "torch_dtype" in told else "dtype"] = str(stored)[len("torch.") :]
    if not told.get("architectures"):
        told["architectures"] = [_own_class(model).__name__]
    texts = {"config.json": json.dumps(told, indent=2, sort_keys=True).encode()}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        texts["generation_config.json"] = generation.to_json_string().encode()
    return texts


def _own_class(model: nn.Module) -> type:
    """The class that it had before it was wrapped."""
    kinds = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDP))
    return next(kind for kind in kinds if not kind.__module__.startswith("zshard."))


# --- writing --------------------------------------------------------------------------------------


def _write(plan: Plan, comm: _core.Comm, watched: bool = True) -> None:
    """Writes what is planned. Collective; `comm` is this thread's. watched: the script waits."""
    rank_0 = comm.rank == 0
    staging = Staging(plan.target, plan.id, plan.kept.overwrite)
    try:
        with on_all_ranks(comm):
            if rank_0:
                staging.open()
                for file in plan.files:
                    _core.File.create(os.path.join(staging.path, file.name), file.size).close()
        rows: list[tuple[int, Written]] = []
        bar = progress(_bytes_of(plan), "saving", comm.rank if watched else -1)
        found: list[str] = []
        with on_all_ranks(comm), torch.no_grad(), bar as done:
            rows += _write_pieces(plan, staging.path, rank_0, done, found)
        everyone = _gather(comm, rows)
        told = gather_bytes(comm, "".join(found[:1]).encode())
        strange = {each.decode() for each in told if each}
        finite = not strange
        with on_all_ranks(comm):
            if rank_0:
                _finish(plan, staging, everyone, finite)
        staging.discard()
        if rank_0 and not finite:
            names = ", ".join(f"'{name}'" for name in sorted(strange))
            warnings.warn(
                f"the checkpoint '{plan.target.path}' has NaN or infinite values in {names}; "
                "keep_last keeps the newest one that has none, besides",
                stacklevel=2,
            )
        if rank_0:
            warn_of_newer(plan.target)
        if rank_0 and plan.kept.keep_last is not None:
            retain(plan.target, plan.kept.keep_last, plan.id)
    finally:
        staging.discard()
        staging.close()


def _write_pieces(
    plan: Plan, folder: str, headers: bool, done: Callable[[int], object], strange: list[str]
) -> Iterator[tuple[int, Written]]:
    """Writes this rank's pieces, and the headers if that is its task; when it is over they are on
    the disk. Gives files by number, with checksums. `done` is told of bytes, `strange` gets names
    of parameters that are not finite: see Writer."""
    mine: dict[int, list[Piece]] = {number: [] for number in range(len(plan.files) * headers)}
    for piece in plan.pieces:
        mine.setdefault(piece.file, []).append(piece)
    numbers = sorted(mine)
    chunk = Chunk(any(piece.values.is_cuda for piece in plan.pieces))
    for first in range(0, len(numbers), _OPEN):
        with ExitStack() as stack:
            opened = []
            for number in numbers[first : first + _OPEN]:
                file = _open(os.path.join(folder, plan.files[number].name))
                opened.append(stack.enter_context(file))
                writer = Writer(file, chunk, done, plan.parameters)
                if headers:
                    writer.add_bytes(0, plan.files[number].header)
                for piece in mine[number]:
                    writer.add(piece)
                yield from ((number, row) for row in joined(writer.end()))
                strange += writer.strange
            for file in opened:
                file.sync()


def _bytes_of(plan: Plan) -> int:
    """How many bytes of tensors this rank is to write."""
    return sum(piece.size for piece in plan.pieces)


def _open(path: str) -> _core.File:
    try:
        return _core.File.open_to_write(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"this rank does not see '{path}', which rank 0 has just made: all ranks have to save "
            "into one folder, on a file system that they share"
        ) from None


def _gather(comm: _core.Comm, rows: Sequence[tuple[int, Written]]) -> dict[int, list[Written]]:
    """What all ranks have written, by file."""
    mine = array("Q", [number for file, row in rows for number in (file, *row)])
    found: dict[int, list[Written]] = {}
    for data in gather_bytes(comm, mine.tobytes()):
        told = memoryview(data).cast("Q").tolist()
        for file, *row in zip(told[::4], told[1::4], told[2::4], told[3::4], strict=True):
            found.setdefault(file, []).append((row[0], row[1], row[2]))
    return found


def _finish(
    plan: Plan, staging: Staging, written: Mapping[int, list[Written]], finite: bool
) -> None:
    """What rank 0 does when all tensors are on the disk."""
    records = {
        file.name: record_of(file.name, file.size, written[number])
        for number, file in enumerate(plan.files)
    }
    for name, text in plan.texts.items():
        records[name] = _write_text(os.path.join(staging.path, name), text)
    _write_text(os.path.join(staging.path, MANIFEST), plan.manifest(records, finite))
    staging.commit()


def _write_text(path: str, text: bytes) -> FileRecord:
    with _core.File.create(path, len(text)) as file:
        written = rows_of(file.write([(0, text)], BLOCK))
        file.sync()
    return record_of(path, len(text), written)
