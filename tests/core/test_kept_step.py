"""Kept steps, killed at every store and finished by another process: tests/c/check_kept.c."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, C, compile_c, program_environment
from c_sources import built, sources

LOOPS = (
    "optim_cpu.c",
    "optim_compact.c",
    "optim_lanes.c",
    "device_cpu.c",
    "simd.c",
    "status.c",
    "memory.c",
)
KINDS = [
    *(f"{dtype}-{rule}" for dtype in ("f32", "f64", "bf16", "f16", "dithered")
      for rule in ("adam", "amsgrad", "sgd", "momentum", "first")),
    *(f"{form}-{width}-{rule}" for form in ("wide", "coded") for width in ("f32", "bf16", "low")
      for rule in ("adam", "momentum")),
    "compact-sgd",
]  # fmt: skip


@pytest.fixture(
    scope="module",
    params=["release", pytest.param("sanitized", marks=pytest.mark.thorough)],
)
def checker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kept") / "check_kept"
    loops = (built if request.param == "release" else sources)(*LOOPS)
    return compile_c(target, [C / "check_kept.c", *loops], BUILDS[request.param])


def counted(program: Path, *args: object, isa: str = "avx512") -> list[int]:
    """Return the numbers that a program prints; it must find nothing."""
    env = program_environment(ZSHARD_ISA=isa)
    command = [program, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(number) for number in re.findall(r" (\d+)", done.stdout)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_store(checker, kind):
    states, kills = counted(checker, "stores", kind)
    assert states > 30 and kills > 10 * states
    assert counted(checker, "write", kind)[0] > 10
    counted(checker, "damage", kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["f32-adam", "dithered-momentum", "coded-low-adam"])
def test_killed_at_every_word(tmp_path, kind):
    files = [C / "check_kept.c", *built(*LOOPS)]
    program = compile_c(tmp_path / "check_kept", files, [*BUILDS["release"], "-DUNIT=8"])
    states, kills = counted(program, "stores", kind)
    assert states > 5000 and kills > 1e6


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
@pytest.mark.parametrize("steps", [17_000, pytest.param(10**6, marks=pytest.mark.thorough)])
def test_random_steps_killed_at_random(checker, isa, steps):
    assert counted(checker, "random", 1, steps, isa=isa)[1] > steps // 2
