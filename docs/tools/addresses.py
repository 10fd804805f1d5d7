"""Where a file of the repository is on the site, and where pages were before (docs/moved.txt).

A line of docs/moved.txt is `old new`: pages relative to docs/, each with or without an #anchor.
Every page that was ever published has a line; one that has not moved leads to itself. The site
redirects in the browser (`moved.js`), since a server does not receive anchors.
"""

from __future__ import annotations

import json
import posixpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # path in the repository -> page of the site
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "examples/README.md": "examples/index.md",
}
SCRIPT = """// Leads from old addresses to new ones (docs/tools/addresses.py).
(() => {
  const moved = MOVED;
  const site = new URL(".", document.currentScript.src).href;
  const redirect = () => {
    const here = location.href.split(/[?#]/)[0].replace(/index\\.html$/, "");
    const page = here.slice(site.length);
    const to = moved[page + location.hash] ?? moved[page];
    if (to !== undefined) location.replace(site + to);
  };
  addEventListener("hashchange", redirect);
  redirect();
})();
"""
STUB = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{to}">
<script src="{root}moved.js"></script>
<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript>
<a href="{to}">This page has moved.</a>
</html>
"""


def table(text: str | None = None) -> dict[str, str]:
    """docs/moved.txt: old -> new."""
    lines = (ROOT / "docs" / "moved.txt").read_text() if text is None else text
    return dict(line.split() for line in lines.splitlines() if line and line[0] != "#")


def address(name: str) -> str:
    """Where a page of the table is on the site: `quick_start.md#next` -> `quick_start/#next`."""
    path, hash_, anchor = name.partition("#")
    there = posixpath.normpath(posixpath.join("docs", path))
    page = PAGES.get(there, there.removeprefix("docs/")).removesuffix(".md")
    folder = posixpath.dirname(page) if posixpath.basename(page) == "index" else page
    return (f"{folder}/" if folder else "") + hash_ + anchor


def redirects(moved: dict[str, str]) -> dict[str, str]:
    """Of addresses, those that have changed."""
    found = {address(old): address(new) for old, new in moved.items()}
    return {old: new for old, new in found.items() if old != new}


def script() -> str:
    return SCRIPT.replace("MOVED", json.dumps(redirects(table()), indent=2))


def stubs() -> dict[str, str]:
    """The files of the site that stand where pages were: path -> text."""
    pages = {old: new for old, new in redirects(table()).items() if "#" not in old}
    up = {old: "../" * old.count("/") for old in pages}
    return {
        f"{old}index.html": STUB.format(root=up[old], to=up[old] + new)
        for old, new in pages.items()
    }
