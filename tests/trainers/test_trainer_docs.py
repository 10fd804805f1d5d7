"""The code of docs/trainers.md runs, each trainer's on two ranks that torchrun might have started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nursery import fork_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "docs", "GROUP_RANK": "0"}


def code_below(*headings: str) -> str:
    """The Python blocks below these headings of the page, in order."""
    parts = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M))
    return "\n\n".join(
        re.findall(r"```python\n(.*?)```", "".join(parts[h] for h in headings), re.S)
    )


def test_the_code_for_lightning_runs(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning: make test-trainers")
    script = tmp_path / "page.py"
    code = code_below("Lightning", "Fabric")
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{code}")
    fork_ranks(script, 2, timeout=120, check=True, env=ENVIRONMENT)
