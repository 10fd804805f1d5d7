"""Scripts written for FSDP1 (tests/compat/fsdp1_scripts) run with another import, to the same
numbers.

Each runs twice on fresh ranks, unchanged and with changed imports; the results are compared within
rounding (FSDP1 adds in another order).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nursery import fork_ranks

SCRIPTS = sorted((Path(__file__).parent / "fsdp1_scripts").glob("*.py"))
# All changes that a user makes.
CHANGES = {
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n": "from zshard import FSDP\n",
    "from torch.distributed.fsdp.wrap import ": "from zshard.wrap import ",
}


def with_other_imports(script: Path, folder: Path) -> Path:
    """Return a copy of `script` for zshard."""
    text = script.read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, f"{script.name} does not have {old!r} once"
        text = text.replace(old, new)
    copy = folder / f"zshard_{script.name}"
    copy.write_text(text)
    return copy


def saved_by(script: Path, folder: Path) -> dict[str, object]:
    """Return what `script` saved on two ranks."""
    path = folder / f"{script.stem}.pt"
    fork_ranks(script, 2, path, timeout=120, check=True)
    saved: dict[str, object] = torch.load(path)
    return saved


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_fsdp1_script_gives_the_same_numbers(script: Path, tmp_path: Path) -> None:
    theirs = saved_by(script, tmp_path)
    ours = saved_by(with_other_imports(script, tmp_path), tmp_path)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
