"""What several tests of checkpoints use."""

from __future__ import annotations

import sys

import pytest

from zshard import __main__


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `python -m zshard ckpt` in this process; return (exit status, output, errors)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["zshard", "ckpt", *map(str, args)])
        status = __main__.main()
        return status, *capsys.readouterr()

    return run
