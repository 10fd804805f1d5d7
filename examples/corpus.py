"""The corpus: the sources of Python's standard library, a text that every machine has.

Nothing is downloaded, and everything is deterministic. Files are read in sorted
order, a hash of its name assigns each file to the training or the held-out side, and every batch
is a function of (seed, rank, step): two libraries with the same seed see the same bytes.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

FILE_END = b"\0"  # separates files: no source text contains this byte
HELD_OUT_SHARE = 16  # one file in 16 is held out
SKIPPED = {  # installed packages, tests, caches, and long tables
    *("site-packages", "dist-packages", "__pycache__", "ensurepip"),
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data"),
}


class CorpusError(RuntimeError):
    """No text to train on; the message names the directory."""


def source_files(root: Path | None = None) -> list[Path]:
    """The corpus's files below `root` (the standard library if None), sorted, relative to `root`.

    Raises CorpusError if there are none.
    """
    root = root or _standard_library()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [Path(name) for name in names if _is_wanted(Path(name))]
    if not kept:
        raise CorpusError(
            f"no Python sources found in {root}: this Python was installed without the .py files "
            "of its standard library (zipped or stripped); use another Python"
        )
    return kept


def is_held_out(name: Path) -> bool:
    """Return whether a file belongs to the held-out side: decided by its relative name alone."""
    digest = hashlib.sha256(name.as_posix().encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def load(root: Path | None = None) -> tuple[Tensor, Tensor]:
    """The training and the held-out text, each uint8 of shape (bytes,).

    Raises CorpusError if a side is empty or a file cannot be read.
    """
    root = root or _standard_library()
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for name in source_files(root):
        try:
            text = (root / name).read_bytes()
        except OSError as error:
            raise CorpusError(f"cannot read {root / name}: {error.strerror}") from error
        sides[is_held_out(name)].append(text)
    train, held_out = (_as_tensor(texts) for texts in sides)
    for side, joined in (("training", train), ("held-out", held_out)):
        if joined.numel() == 0:
            raise CorpusError(f"the {side} side of the corpus in {root} is empty: too few files")
    return train, held_out


def train_batches(
    text: Tensor, batch: int, context: int, *, seed: int, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of `text`: (inputs, targets), each int64 of shape (batch, context).

    Every rank has its own generator. Raises CorpusError if `text` is shorter than a window.
    """
    _require_window(text, context)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    while True:
        starts = torch.randint(text.numel() - context, (batch,), generator=generator)
        yield _windows(text, starts, context)


def held_out_batches(
    text: Tensor, batch: int, context: int, count: int, *, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's `count` windows, spread evenly over the held-out text and disjoint from others'.

    Shapes as in train_batches; the last batch may be smaller. Every call returns the same windows.
    Raises CorpusError if `text` is shorter than a window.
    """
    _require_window(text, context)
    last = text.numel() - context - 1
    starts = torch.linspace(0, last, count * world, dtype=torch.float64).long()
    for mine in starts[rank::world].split(batch):
        yield _windows(text, mine, context)


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _is_wanted(name: Path) -> bool:
    """Excludes build settings too: they contain this machine's paths."""
    return SKIPPED.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata")


def _as_tensor(texts: list[bytes]) -> Tensor:
    joined = bytearray(FILE_END.join(texts))  # a bytearray: frombuffer needs writable memory
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()


def _require_window(text: Tensor, context: int) -> None:
    if text.numel() <= context:
        raise CorpusError(f"a text of {text.numel()} bytes is too short for a context of {context}")


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
