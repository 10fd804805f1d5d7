"""The objects of the last release build, and their symbols: what the compiler made of csrc/."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

Symbols = list[tuple[str, str]]
"""(kind, name), as nm tells them: "U" is needed, a capital of DEFINED is defined for others."""

DEFINED = (
    "TDBRC"  # Weak and unique ones (W, V, u) are templates and inline statics of torch's headers.
)


def release_objects() -> dict[str, Path]:
    """The objects by the names of their sources; skips the test where there are none."""
    tag = f"objects-{sysconfig.get_config_var('SOABI')}-torch{torch.__version__}-release"
    found = {path.name.removesuffix(".o"): path for path in (ROOT / "build" / tag).glob("*.o")}
    if not found:
        pytest.skip("no release build here")
    sources = {path.name for path in (ROOT / "csrc").rglob("*")}
    return {name: path for name, path in found.items() if name in sources}


def symbols(path: Path, *options: str) -> Symbols:
    """The symbols of a library or an object."""
    listed = subprocess.run(["nm", *options, str(path)], text=True, capture_output=True, check=True)
    return [(kind, name) for *_, kind, name in map(str.split, listed.stdout.splitlines())]


def symbols_by_source() -> dict[str, Symbols]:
    """The symbols of each source's object."""
    return {source: symbols(path) for source, path in release_objects().items()}
