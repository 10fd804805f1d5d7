"""Kept steps, killed and finished by another process: tests/c/check_kept.c, kill_kept.c.

A check that finds nothing proves little until planted faults are found by it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from c_compile import BUILDS, C, compile_c, program_environment
from c_sources import built, source, sources

LOOPS = ("optim_cpu.c", "optim_compact.c", "device_cpu.c", "simd.c", "status.c", "memory.c")
KINDS = [
    *(f"{dtype}-{rule}" for dtype in ("f32", "f64", "bf16", "f16", "dithered")
      for rule in ("adam", "amsgrad", "sgd", "momentum", "first")),
    *(f"{form}-{width}-{rule}" for form in ("wide", "coded") for width in ("f32", "bf16", "low")
      for rule in ("adam", "momentum")),
    "compact-sgd",
]  # fmt: skip

Fault = tuple[str, str, str, str]

SAVE = "        save(of, one, at->undo);\n"
HAND = "        ZS_KEPT_MARK(&at->done, 2 * done + 1);\n"
BACK = "        copy_undo(of, one, at->undo, true);"
UPDATE = "    ZS_KEPT_UPDATE(of->loop, &of->run, one.from, one.to);\n"
DONE = "    ZS_KEPT_MARK(&at->done, 2 * (done + 1));\n"
CLEAR = "    ZS_KEPT_MARK(&at.head->step, UINT64_C(0));"
RECORD = "    for (int64_t i = 0; i < n_jobs; i++)\n"

FAULTS: dict[str, Fault] = {
    # what is planted: the file, the text that is replaced, by what, the check that finds it
    "marked in hand before the copy": ("kept_step.c", SAVE + HAND, HAND + SAVE, "stores f32-adam"),
    "marked done before the update": ("kept_step.c", UPDATE + DONE, DONE + UPDATE, "stores f32-sgd"),
    "never marked in hand": ("kept_step.c", HAND, "", "stores f32-sgd"),
    "nothing is copied": ("kept_step.c", SAVE, "", "stores f32-sgd"),
    "nothing is put back": ("kept_step.c", BACK, "        ;", "stores f32-sgd"),
    "what is in hand is copied again": (
        "kept_step.c", "if (at->done % 2 != 0)", "if (false)", "stores f32-sgd"),
    "what is in hand counts as done": (
        "kept_step.c", "at->done / 2), before", "(at->done + 1) / 2), before", "stores f32-sgd"),
    "the mark goes before all is put back": (
        "kept_step.c", BACK, f"        ZS_KEPT_MARK(&at->done, 2 * done);\n{BACK}",
        "stores f32-sgd"),
    "the last state is not copied": (
        "kept_step.c", "i < ZS_KEPT_MEMORIES; i++)\n        if (i != ZS_KEPT_GRAD",
        "i < ZS_KEPT_MEMORIES - 1; i++)\n        if (i != ZS_KEPT_GRAD", "stores wide-low-adam"),
    "threads share a slot": ("kept_step.c", "at->undo", "at[-index % 2].undo", "threads f32-sgd"),
    "a chunk less than there is": (
        "kept_area.h", "(numel - 1) / zs_kept_chunk(dtype) + 1", "(numel - 1) / zs_kept_chunk(dtype)",
        "kinds"),
    "the record before stays": ("kept_area.c", CLEAR, "", "write f32-sgd"),
    "the record is there before it is whole": (
        "kept_area.c", RECORD, f"    ZS_KEPT_MARK(&at.head->step, step);\n{RECORD}",
        "write f32-sgd"),
    "threads begin where they ended": (
        "kept_area.c", "        ZS_KEPT_MARK(&at.workers[i].done, UINT64_C(0));", "        ;",
        "write f32-sgd"),
    "a record is not compared with its digest": (
        "kept_area.c", "head->digest != digest_of(&at, head, step)", "head->digest == 1",
        "damage f32-adam"),
    "threads' marks are not checked": (
        "kept_area.c", "if (at->workers[i].done > 2", "if (false && at->workers[i].done > 2",
        "damage f32-adam"),
    "the end of memory is not checked": (
        "kept_area.c", "|| skipped > range->bytes || bytes > range->bytes - skipped) continue;\n"
        "        in->last = n;", ") continue;\n        in->last = n;", "damage f32-adam"),
}  # fmt: skip


def built_with_loops(program: Path, target: Path, *flags: str) -> Path:
    return compile_c(target, [program, *built(*LOOPS)], [*BUILDS["release"], *flags])


@pytest.fixture(
    scope="module",
    params=["release", pytest.param("sanitized", marks=pytest.mark.thorough)],
)
def checker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kept") / "check_kept"
    return compile_c(
        target,
        [C / "check_kept.c", *(built if request.param == "release" else sources)(*LOOPS)],
        BUILDS[request.param],
    )


def check(program: Path, *args: object, isa: str = "avx512") -> subprocess.CompletedProcess[str]:
    env = program_environment(ZSHARD_ISA=isa)
    command = [program, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def counted(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the numbers that a program printed; it must have found nothing."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(number) for number in re.findall(r" (\d+)", done.stdout)]


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
def test_bits_are_those_of_the_plain_step(checker, isa):
    assert counted(check(checker, "kinds", isa=isa)) == [len(KINDS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_store(checker, kind):
    states, kills = counted(check(checker, "stores", kind))
    assert states > 30 and kills > 10 * states
    assert counted(check(checker, "threads", kind))[0] > 1000
    assert counted(check(checker, "write", kind))[0] > 10
    check(checker, "damage", kind).check_returncode()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["f32-adam", "dithered-momentum", "coded-low-adam"])
def test_killed_at_every_word(tmp_path, kind):
    program = built_with_loops(C / "check_kept.c", tmp_path / "check_kept", "-DUNIT=8")
    states, kills = counted(check(program, "stores", kind))
    assert states > 5000 and kills > 1e6


@pytest.mark.parametrize(
    ("isa", "steps"), [("avx512", 17_000), pytest.param("avx2", 10**6, marks=pytest.mark.thorough)]
)
def test_random_kills(checker, isa, steps):
    assert counted(check(checker, "random", 1, steps, isa=isa))[1] > steps // 2


@pytest.mark.parametrize(
    ("seed", "enough"), [(1, 100), (2, 100), pytest.param(3, 5_000, marks=pytest.mark.thorough)]
)
def test_sigkill(tmp_path, seed, enough):
    program = compile_c(
        tmp_path / "kill_kept",
        [C / "kill_kept.c", *sources("kept_step.c", "kept_area.c"), *built(*LOOPS)],
        BUILDS["release"],
    )
    killed, within = counted(check(program, seed, enough))
    assert killed >= within == enough


def planted(fault: Fault, folder: Path) -> None:
    """Make check_kept.c and the sources that it includes, with a fault, in a folder."""
    name, old, new, _ = fault
    text = source(name).read_text()
    assert old in text, f"{name} has no such line: {old}"
    (folder / "optim").mkdir()
    for each in ("kept_step.c", "kept_area.c", "kept_area.h"):
        (folder / "optim" / each).write_text(source(each).read_text())
    (folder / "optim" / name).write_text(text.replace(old, new))
    (folder / "check_kept.c").write_text((C / "check_kept.c").read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(tmp_path, fault):
    planted(FAULTS[fault], tmp_path)
    flags = (f"-iquote{tmp_path}", f"-iquote{C}", "-Wno-unused")  # folders before csrc/
    program = built_with_loops(tmp_path / "check_kept.c", tmp_path / "check_kept", *flags)
    done = check(program, *FAULTS[fault][3].split())
    assert done.returncode == 1 and done.stdout.startswith("broken: "), done.stdout + done.stderr
