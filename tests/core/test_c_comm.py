"""The transports in C, with real processes (tests/c/test_comm_*.c): shm, its failures, c10d, self;
and connections between hosts (tests/c/test_hosts_links.c).

A transport is libc only (the process group below c10d is played by shm), so each test
forks its ranks in a small program that the compiler makes in a second, plain and sanitized. There,
ranks come late, come in any order, get killed and disagree, which Python's ranks cannot do at will.
Most of these tests wait for timeouts, so all chosen ones are started together, and run AT_A_TIME.
What torch's own process groups do is in test_transports.py.
"""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from c_compile import (
    BUILDS,
    NO_LOOPS,
    C,
    compile_c,
    program_environment,
    skip_without_thread_sanitizer,
)
from c_sources import SHM, TURNS, sources

PROGRAMS = {
    "test_comm_shm": SHM,
    "test_comm_shm_faults": SHM,
    "test_comm_c10d": [
        *SHM,
        "traffic.c",
        "arena.c",
        "process_watch.c",
        "comm_c10d.c",
        "c10d_*.c",
        *TURNS,
    ],
    "test_hosts_links": ["status.c", "clock.c", "hosts_links.c"],
}
AT_A_TIME = 8
TEST = re.compile(r"^    TEST\((\w+), .*\),$", re.MULTILINE)


def cases() -> list:
    """Every test of every program, in every build that shows something about it."""
    found = []
    for program in PROGRAMS:
        text = (C / f"{program}.c").read_text()
        for build in BUILDS:
            for name in TEST.findall(text):
                if build == "threads" and "thread" not in name:
                    continue
                marks = [] if build == "sanitized" else [pytest.mark.thorough]
                found.append(pytest.param(program, build, name, marks=marks))
    return found


def made(folder: Path, program: str, build: str) -> Path:
    """Compile a program; return its path."""
    if build == "threads":
        skip_without_thread_sanitizer()
    files = [C / f"{program}.c", NO_LOOPS, *sources(*PROGRAMS[program])]
    return compile_c(folder / f"{program}_{build}", files, BUILDS[build])


def run(program: Future[Path], name: str) -> subprocess.CompletedProcess[str]:
    command, env = [program.result(), name], program_environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


Runs = dict[tuple[str, str, str], Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """The run of each chosen test, by (program, build, name); what does not compile fails each."""
    folder = tmp_path_factory.mktemp("comm")
    calls = [
        tuple(item.callspec.params[word] for word in ("program", "build", "name"))
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_in_c
    ]
    with ThreadPoolExecutor(AT_A_TIME) as executor:
        wanted = {call[:2] for call in calls}  # each is linked once: a busy file does not run
        programs = {each: executor.submit(made, folder, *each) for each in wanted}
        yield {call: executor.submit(run, programs[call[:2]], call[2]) for call in calls}
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("program", "build", "name"), cases())
def test_in_c(runs: Runs, program: str, build: str, name: str) -> None:
    done = runs[program, build, name].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{name}(:| +\d ranks ) ok", done.stdout, re.MULTILINE)
