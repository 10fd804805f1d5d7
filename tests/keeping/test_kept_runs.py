"""`python -m zshard run --keep` of the script of docs/fault_tolerance.md: killed, it ends with the loss of
a run that nothing disturbed. tests/run/test_launch.py has the options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nursery import forked_python, python

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fault_tolerance.md"


def run(script: Path, **env: str) -> tuple[str, list[str]]:
    """Return what a run said, and each rank's last loss."""
    words = ["zshard", "run", "-n2", "--bind=none", "--standalone", "--keep", script]
    done = forked_python("-m", *words, env={"PYTHON_EXEC": python(), **env}, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr, sorted(re.findall(r"loss of rank \d: \S+", done.stderr))


@pytest.mark.slow
def test_the_script_of_the_page_survives_a_kill(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (code,) = (block for block in blocks if "zshard.Keep(" in block)
    first = "    loss.backward()\n"
    kill = '    if step == 7 and os.environ.get("KILL") == os.environ["RANK"] + attempt:\n'
    code = code.replace(first, f"{kill}        os.kill(os.getpid(), 9)\n{first}")
    code = 'import os, sys\nattempt = os.environ["TORCHELASTIC_RESTART_COUNT"]\n' + code
    code += "said = f\"loss of rank {os.environ['RANK']}: {loss.item().hex()}\\n\"\n"
    script = tmp_path / "page.py"
    script.write_text(code + "sys.stderr.write(said)\n")
    _, expected = run(script)
    said, losses = run(script, KILL="10")
    assert "recovered step 7 from memory" in said
    assert losses == expected and len(losses) == 2
