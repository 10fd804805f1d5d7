"""docs/images has what docs/tools/pictures.py draws: what models say has not changed since."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_pictures_are_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "tools" / "pictures.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=280)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 6
    for path in drawn:
        kept = (ROOT / "docs" / "images" / path.name).read_text()
        assert path.read_text() == kept, "run: python docs/tools/pictures.py"
