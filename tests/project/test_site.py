"""The site of `make docs` builds: every link and anchor leads somewhere, every page is in the navigation;
and its pictures are those that docs/tools/pictures.py draws.

Skipped where mkdocs is not installed: `make docs` installs it and builds strictly, in .ci/run too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOUND = [importlib.util.find_spec(name) for name in ("mkdocs", "material")]
needs_mkdocs = pytest.mark.skipif(None in FOUND, reason="mkdocs-material is missing: run make docs")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "-f",
            str(ROOT / "mkdocs.yml"),
            "-d",
            str(folder),
        ],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.thorough  # half a minute, which .ci/run spends in `make docs`
@needs_mkdocs
def test_site_builds(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"\]\(http\S+?/([\w/-]+\.md)\): .", (tmp_path / "llms.txt").read_text())
    made = {"index.md", "api.md", "architecture.md", "messages.md"}  # from elsewhere than docs/
    assert {*made, "quick_start.md"} <= set(listed)
    for page in listed:
        assert (tmp_path / page).read_text().startswith("# "), page
    assert 'id="clip_grad_norm_"' in (tmp_path / "api" / "index.html").read_text()
    overview = (tmp_path / "index.html").read_text()
    assert 'href="training/"' in overview and "docs/training.md" not in overview


@pytest.mark.thorough
def test_pictures_are_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "tools" / "pictures.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=280)
    pictures = sorted(tmp_path.iterdir())
    assert len(pictures) == 6
    for path in pictures:
        kept = (ROOT / "docs" / "images" / path.name).read_text()
        assert path.read_text() == kept, "run: python docs/tools/pictures.py"
