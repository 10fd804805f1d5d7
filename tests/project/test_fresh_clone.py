"""All commands of the first pages, in their order, in a fresh clone of the last commit and a fresh environment.

Each code block of bash or without a language is typed (tests/lib/typed_page.py). A command that cannot run here stands in
NOT_RUN, with its reason; any other one that fails is a failure of this test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_build import FLAGS
from typed_page import commands_of, follow

ROOT = Path(__file__).resolve().parents[2]
INDEX = "https://OWNER.github.io/zshard/wheels/torch2.13"
NOT_RUN = {
    "ZSHARD_CUDA=1 pip install --no-build-isolation .": "needs nvcc",
    "docker build -t zshard . && docker run --rm --shm-size 2g zshard": "needs Docker",
    f"pip install zshard --extra-index-url {INDEX}": "no release yet",
    "pip install --no-build-isolation --no-cache-dir zshard": "no release yet",
}
SHORTER = {"make demo": "make demo ARGS=--quick"}  # five minutes
PRINTED = {  # by command, what its output has
    "zshard doctor": r"CPU training is available",
    "zshard run -n 2 train.py": r"loss 0\.\d+",
    "zshard run -n 3 train.py": r"rank 2 of 3 is process \d+, first step [2-9]1(.|\n)*step 100: loss 0\.0057\n",
    "torchrun --standalone --nproc-per-node 2 train.py": r"loss 0\.\d+",
    "make demo": r"PASS: zshard's held-out loss is",
}


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    command = ["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")]
    if subprocess.run(command).returncode != 0:
        pytest.skip("not a clone")
    yield tmp_path / "clone"
    shutil.rmtree(tmp_path)  # gigabytes


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell in which a new virtual environment is active."""
    home = tmp_path / "home"
    venv.create(home, symlinks=True, with_pip=True)
    (tmp_path / "torch.txt").write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    plain = {name: "" for name in ("PYTHONPATH", *FLAGS) if name in os.environ}
    index = {} if torch.version.cuda else {"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org/whl/cpu"}  # fmt: skip
    return {
        **plain,
        **index,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(home),
        "PIP_CONSTRAINT": str(tmp_path / "torch.txt"),  # the torch that is tested, not the newest
    }


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/quick_start.md"])
def test_commands_of_page_in_a_fresh_clone(page: str, clone: Path, shell: dict[str, str]) -> None:
    text = (clone / page).read_text()
    commands = commands_of(text)
    assert "pip install --no-build-isolation ." in commands
    instead = SHORTER | dict.fromkeys(NOT_RUN)
    said = follow(text, clone, shell, instead, limit=900)
    for command, output in said:
        assert re.search(PRINTED.get(command, ""), output), f"{command}\n{output}"
        if "train.py" in command and "SIGKILL" not in output:  # a killed run's rank 0 may warn
            assert "Warning" not in output, output
    typed = {command for command, _ in said}
    assert {*commands} - typed == {c for c in commands if c in NOT_RUN or c.startswith("kill ")}
    where = "```\npython -c 'import zshard; print(zshard.__path__[0])'\n```\n"
    ((_, found),) = follow(where, clone.parent, shell, {})
    assert Path(found.strip()).parent.name == "site-packages"
