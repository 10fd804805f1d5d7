"""Lists wheels as indexes for pip, one for each torch.

    python tools/wheel_index.py FOLDER WHEEL...

FOLDER/torch2.13/zshard/ has the wheels of 0.1.0+torch2.13 and a page that lists them (PEP 503), so
`pip install zshard --extra-index-url .../torch2.13` takes no wheel of another torch.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

LINK = '<a href="{to}">{text}</a><br>\n'


def local_version(wheel: Path) -> str:
    """Return the "torch2.13" of a wheel's name. Raises ValueError for any other wheel."""
    name, version, _, tags = parse_wheel_filename(wheel.name)
    if name != "zshard" or not (version.local or "").startswith("torch"):
        raise ValueError(f"{wheel.name} is not a wheel of zshard for one torch: run .ci/wheel")
    if not all(tag.platform.startswith("manylinux") for tag in tags):
        raise ValueError(f"{wheel.name} has no manylinux tag: run .ci/wheel")
    return str(version.local)


def write_index(folder: Path, wheels: list[Path]) -> None:
    """Copy the wheels into an index for each torch, and write its pages."""
    links: dict[Path, list[str]] = defaultdict(list)
    for wheel in sorted(wheels):
        home = folder / local_version(wheel) / "zshard"
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, home)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        links[home].append(LINK.format(to=f"{quote(wheel.name)}#sha256={digest}", text=wheel.name))
    for home, lines in links.items():
        home.joinpath("index.html").write_text("<!DOCTYPE html>\n" + "".join(lines))
        up = LINK.format(to="zshard/", text="zshard")
        home.with_name("index.html").write_text("<!DOCTYPE html>\n" + up)


if __name__ == "__main__":
    try:
        folder, *wheels = map(Path, sys.argv[1:])
        write_index(folder, wheels)
    except ValueError as error:
        sys.exit(f"error: {error}")
