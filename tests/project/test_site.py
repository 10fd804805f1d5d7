"""The site of `make docs` builds: every link and anchor leads somewhere, every page is in the navigation;
old addresses lead to new ones; and its pictures are those that docs/tools/pictures.py draws.

Skipped where mkdocs is not installed: `make docs` installs it and builds strictly, in .ci/run too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import addresses  # noqa: E402

NODE = shutil.which("node")
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
    for old in addresses.stubs():
        assert "moved.js" in (tmp_path / old).read_text()
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


@pytest.mark.skipif(NODE is None, reason="node is missing")
def test_old_addresses_lead_to_new_ones() -> None:
    """The script of old pages, in a page of each address."""
    site = "https://example.org/zshard/"
    moved = addresses.redirects(addresses.table())
    pages = {f"{site}{old}": f"{site}{new}" for old, new in moved.items()}
    pages |= {f"{site}training/#none": "", f"{site}": "", f"{site}migration/#none": f"{site}{moved['migration/']}"}  # fmt: skip
    pages[f"{site}migration/index.html?x=1"] = f"{site}{moved['migration/']}"
    script = f"""
    const document = {{currentScript: {{src: {site!r} + "moved.js"}}}};
    const addEventListener = () => {{}};
    let to = "", location;
    const led = Object.keys({json.dumps(pages)}).map((href) => {{
      to = "";
      location = {{href, hash: new URL(href).hash, replace: (there) => (to = there)}};
      {addresses.script()};
      return to;
    }});
    console.log(JSON.stringify(led));
    """
    done = subprocess.run([NODE, "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [*pages.values()]
