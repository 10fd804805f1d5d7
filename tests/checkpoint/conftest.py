"""Fixtures of several tests of checkpoints."""

from __future__ import annotations

import shutil
import sys

import pytest
from damage import saved
from spawn import RankPool

from zshard import __main__


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `python -m zshard ckpt` in this process; return (exit status, output, errors)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["zshard", "ckpt", *map(str, args)])
        status = __main__.main()
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def good(pools, tmp_path_factory):
    """A checkpoint of two ranks; tests must not change it."""
    path = tmp_path_factory.mktemp("good") / "x"
    pools.setdefault(2, RankPool(2)).run(saved, str(path))
    return path


@pytest.fixture
def path(good, tmp_path):
    """A copy of it."""
    return shutil.copytree(good, tmp_path / "x")
