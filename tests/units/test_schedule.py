"""When units are gathered, resharded and reduced: csrc/schedule/, without memory, ranks or torch.

The schedule takes events and returns actions, so a C program (tests/c/test_schedule.c) plays both
autograd and the engine, and checks random passes with failures in a second.
"""

import re
import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, C, compile_c, program_environment
from c_sources import CSRC, sources

PROGRAM = C / "test_schedule.c"
NAMES = re.findall(r"^    TEST\((\w+)\)", PROGRAM.read_text(), re.MULTILINE)
SCHEDULE = sorted((CSRC / "schedule").glob("*.c"))


@pytest.fixture(
    scope="module",
    params=["sanitized", pytest.param("release", marks=pytest.mark.thorough)],
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("schedule") / f"test_schedule_{request.param}"
    return compile_c(target, [PROGRAM, *SCHEDULE, *sources("status.c")], BUILDS[request.param])


@pytest.mark.parametrize("name", NAMES)
def test_c_program(program: Path, name: str) -> None:
    command, env = [str(program), name], program_environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{name}: ok\n"
