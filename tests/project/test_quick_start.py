"""docs/quick_start.md as typed: two ranks, one is killed, three resume; the losses are those of an undisturbed run.

tests/project/test_fresh_clone.py does the same in a clone that is installed as the page says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from nursery import fork_ranks, python
from tasks import python_path
from typed_page import BLOCK, commands_of, follow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quick_start.md").read_text()
LOSS = re.compile(r"^step (\d+): loss (\d\.\d+)$", re.M)
FAST = PAGE.replace("time.sleep(0.2)", "time.sleep(0.02)")


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell whose `zshard` is that of this process, with the imports done."""
    command = tmp_path / "bin" / "zshard"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {python()} -m zshard "$@"\n')
    command.chmod(0o700)
    path = f"{command.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {
        "PATH": path,
        "PYTHON_EXEC": python(),
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
    }


def test_kill_one_of_two_ranks_and_resume_on_three(tmp_path: Path, shell: dict[str, str]) -> None:
    install, start, kill, resume = commands_of(PAGE)[:-3], *commands_of(PAGE)[-3:]
    assert (start, resume) == ("zshard run -n 2 train.py", "zshard run -n 3 train.py")
    assert kill.startswith("kill -9 ") and all(line.startswith("pip ") for line in install)
    said = follow(FAST, tmp_path, shell, dict.fromkeys(install))
    assert [line for line, _ in said] == [start, resume]
    killed, resumed = (output for _, output in said)
    assert "Signal 9 (SIGKILL) received" in killed and "train.py FAILED" in killed
    begin = int(re.findall(r"rank 2 of 3 is process \d+, first step (\d+)", resumed)[0])
    assert begin > 40 and min(losses(resumed)) == begin + 9 and max(losses(resumed)) == 100
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "train.py").write_text(
        f"import os\nos.chdir({str(undisturbed)!r})\n{(tmp_path / 'train.py').read_text()}"
    )
    done = fork_ranks(undisturbed / "train.py", 2, check=True)
    expected = losses("".join(rank.stdout for rank in done))
    assert [*expected] == [*range(10, 101, 10)]
    for found in (losses(killed), losses(resumed)):
        assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-4)
    shown = losses("".join(body for language, body in BLOCK.findall(PAGE) if language == "text"))
    assert shown == pytest.approx(expected, abs=1e-4)  # on the page


def test_the_first_script_is_short() -> None:
    (script,) = (body for language, body in BLOCK.findall(PAGE) if language == "python")
    assert len(script.splitlines()) <= 40
