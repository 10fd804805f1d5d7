"""What describes a script: how it runs on two CPU ranks, and which of its lines change for zshard.

A script is a copy of somebody's folder in which lines are replaced. `both` is for
both sides (devices, sizes, data that would come from the network); `ours` for zshard alone, and
those lines are counted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Edits = Mapping[str, Mapping[str, str]]
"""File -> pattern -> what it becomes; each pattern must be found."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Script:
    """How to run a script on two CPU ranks, and what to compare."""

    name: str
    source: str  # the folder below that of the clones
    commit: str  # of which the replacements are
    runs: Sequence[str]  # file and flags, one after another in the same folder
    both: Edits
    ours: Edits
    lines: str  # pattern of the printed lines to compare, with their numbers in groups
    saved: str  # pattern of the files that it saves
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    print_tolerance: float = 2e-4
    tolerance: float = 1e-4  # of what is saved: Adam's first steps may turn round with the last bit
    launcher: Sequence[str] = TORCHRUN
    clipping: Edits = field(default_factory=dict)  # what to replace for a run without clipping
    begins: str = ""  # a folder of the original's first run, from which both sides go on


def edit(folder: Path, edits: Edits) -> int:
    """Replace lines in the files; return how many lines that changed."""
    changed = 0
    for file, replacements in edits.items():
        before = text = (folder / file).read_text()
        for pattern, made in replacements.items():
            text, found = re.subn(pattern, made, text, flags=re.MULTILINE)
            if not found:
                raise SystemExit(f"{file} has no {pattern!r}: another version of it?")
        (folder / file).write_text(text)
        changed += lines_apart(before, text)
    return changed


def lines_apart(before: str, after: str) -> int:
    """The number of lines to replace, insert or delete."""
    a, b = before.splitlines(), after.splitlines()
    steps = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in steps if kind != "equal")
