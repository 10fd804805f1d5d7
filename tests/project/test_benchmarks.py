"""The benchmarks: their statistics, and the quick form of each program.

All are thorough tests: they test tools, not zshard.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import (
    harness,
    host_time,
    memory,
    run,
    sides,
    step_time,
)
from benchmarks.harness import Sample, Spread
from benchmarks.models import TINY_BLOCKS, build_stack

pytestmark = pytest.mark.thorough

MACHINE = {"date", "commit", "cpu", "cores", "memory_bytes", "kernel", "libc", "python", "torch"}
SPREAD = {"min", "median", "max"}
ZSHARD = "zshard-full_shard"


def samples(*times: float, foreign: float = 0.0) -> list[Sample]:
    return [Sample((time,), foreign) for time in times]


def test_spread_is_min_median_max() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0]) == Spread(1.0, 3.0, 5.0)
    assert Spread(1.0, 3.25, 5.0).text(1) == "1.0/3.2/5.0"
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_ratios_are_taken_within_a_round() -> None:
    # The machine gets 10x slower in round 2: the ratio of medians would be 0.2, each round says 2.
    side, base = samples(2.0, 20.0, 2.0), samples(1.0, 10.0, 1.0)
    assert harness.same_round_ratios(side, base) == [2.0, 2.0, 2.0]
    assert harness.same_round_ratios(samples(1.0, 1.0), samples(-0.5, 2.0)) == [0.5]


def test_contended_rounds_are_dropped_from_both_sides_if_enough_are_left() -> None:
    side = samples(*[2.0] * 5) + samples(50.0, foreign=0.3) + samples(2.0)
    base = samples(*[1.0] * 6) + samples(90.0, foreign=0.3)
    assert harness.clean_rounds(side) == [0, 1, 2, 3, 4, 6]
    assert harness.same_round_ratios(side, base) == [2.0] * 5
    few = samples(1.0, 1.0, 1.0, 1.0) + samples(3.0, foreign=0.3)
    assert harness.clean_rounds(few) == [0, 1, 2, 3, 4]


def test_host_time_per_unit_is_relative_to_plain() -> None:
    plain, mine = Sample((1e-3, 2e-3, 3e-3), 0.0), Sample((2e-3, 5e-3, 7e-3), 0.2)
    (sample,) = host_time.added({host_time.PLAIN: [plain], "ddp": [mine]}, "ddp", 1)
    assert sample.times[0] == pytest.approx(3e-3 / TINY_BLOCKS)
    assert sample.foreign == 0.2


def test_memory_is_without_libraries_and_its_target_is_the_smaller_fsdp_peak() -> None:
    def cell(held: int, peak: int) -> list[dict[str, int]]:
        return [{"held": held - rank, "peak": peak - rank, "peak_rss": peak} for rank in (0, 1)]

    cells = {"ddp": cell(2, 2), "fsdp1": cell(9, 40), "fsdp2": cell(9, 30), ZSHARD: cell(40, 35)}
    record = memory.compare("tiny32", 2, cells, dict.fromkeys(cells, cell(3, 10)))
    side = record["sides"][ZSHARD]
    assert [side[f"{key}_bytes"] for key in ("held", "peak", "target")] == [37, 25, 20]
    assert side["verdict"].endswith("MISSED")


def test_pss_follows_allocations() -> None:
    size = 64 * harness.MIB
    before = memory.pss()
    sampler = memory.PssSampler()
    with mmap.mmap(-1, size) as block:  # not malloc's: its heap may keep what is freed
        block.write(b"x" * size)
        sampler.sample()
    assert sampler.stop() - before > 0.9 * size
    assert memory.pss() - before < 0.5 * size


def test_stack_gradients_are_not_denormal() -> None:
    torch.manual_seed(0)
    stack = build_stack(layers=100, width=128)
    stack(torch.randn(16, 128)).square().mean().backward()
    gradient = next(stack.parameters()).grad
    assert gradient is not None
    assert gradient.abs().median() > 1e-12


# --- quick forms ----------------------------------------------------------------------------------


def check_step_time(results: list[dict[str, Any]]) -> None:
    (result,) = results
    compute, ddp, ours = result["sides"].values()
    assert ddp["ratio"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert compute["loss_difference"] is None and ours["loss_difference"] == 0
    assert set(ours["ms"]) == set(ours["ratio"]) == SPREAD


def check_host_time(results: list[dict[str, Any]]) -> None:
    assert [result["ranks"] for result in results] == [1, 2]
    for result in results:
        side = result["sides"][ZSHARD]
        assert set(side["added_us"]) == set(result["plain_us"]) == set(host_time.PARTS)
        assert set(side["ratio"]) == {"ddp"}


def check_memory(results: list[dict[str, Any]]) -> None:
    (result,) = results
    side = result["sides"][ZSHARD]
    assert len(side["per_rank"]) == len(side["libraries_per_rank"]) == 2
    assert side["peak_bytes"] > side["held_bytes"] > 0.9 * result["ideal_held_bytes"]


def check_predictions(results: list[dict[str, Any]]) -> None:
    (result,) = results
    assert len(result["per_rank"]) == 2 and abs(result["error"]) < 0.1  # small: 16 MiB are 8 %


def check_collectives(results: list[dict[str, Any]]) -> None:
    """Its driver calls a transport by its table, as nothing but the core does."""
    sizes = [size for result in results for size in result["sizes"]]
    assert {side for size in sizes for side in size["us"]} >= {"gloo", "unshard", "shm"}
    assert min(side["median"] for size in sizes for side in size["us"].values()) > 0


def check_saves(results: list[dict[str, Any]]) -> None:
    checkpoint, beside, setup, loading, offload = (result["sides"] for result in results)
    for key in ("blocked", "save", "load", "cold"):
        assert set(checkpoint["zshard"][f"{key}_ratio"]) == SPREAD
    assert {"save_peak_bytes", "load_peak_bytes", "state_bytes"} <= set(checkpoint["rank0"])
    assert beside["zshard, no save"]["seconds_ratio"]["max"] == 1
    assert set(beside["fsdp2, every step"]["seconds_ratio"]) == SPREAD
    for side in (setup["zshard-meta"], loading["fsdp2-load-each"]):
        assert {"seconds", "cpu_seconds", "peak_rss_bytes", "kept_rss_bytes"} < set(side)
    assert offload["disk"]["last_loss_ratio"] == {"min": 1, "median": 1, "max": 1}
    assert offload["disk"]["write_bytes"] > 0 and set(offload["raw"]["seconds_ratio"]) == SPREAD


QUICK: dict[str, tuple[list[str], Callable[[list[dict[str, Any]]], None]]] = {
    "step-time": (["--models", "tiny32", "--sides", "compute", "ddp", ZSHARD], check_step_time),
    "host-time": (["--sides", "ddp", ZSHARD], check_host_time),
    "memory": (["--sides", ZSHARD], check_memory),
    "predictions": ([], check_predictions),
    "collectives": (["--ranks", "2", "--mib", "0.0625"], check_collectives),
    "saves": ([], check_saves),
}
"""Program -> flags besides --quick, and what its results must have."""


@pytest.mark.timeout(1000)  # saves starts eleven groups of ranks
@pytest.mark.parametrize("name", [name for name in run.NAMES if run.source(name).exists()])
def test_quick_form(name: str, tmp_path: Path) -> None:
    flags, check = QUICK.get(name, ([], bool))
    check(quick(name, tmp_path / "out.json", *flags))


def quick(name: str, out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run a benchmark as its user does, and return its results after checking their frame."""
    module = f"benchmarks.{run.source(name).stem}"
    command = [sys.executable, "-m", module, "--quick", f"--out={out}", *flags]
    with subprocess.Popen(command, cwd=harness.ROOT, stderr=subprocess.PIPE, text=True) as child:
        try:
            _, errors = child.communicate(timeout=900)
        except BaseException:
            child.terminate()  # and not kill: it has ranks to end
            raise
    assert child.returncode == 0, errors
    record: dict[str, Any] = json.loads(out.read_text())
    assert set(record) == {"benchmark", "machine", "settings", "results"}
    assert set(record["machine"]) >= MACHINE and record["benchmark"] == name
    results: list[dict[str, Any]] = record["results"]
    return results


def test_unknown_benchmark_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["step-tim"])
    error = capsys.readouterr().err
    assert "unknown: step-tim" in error
    assert "step-time, memory" in error


@pytest.mark.parametrize("module", [step_time, memory])
def test_missing_deepspeed_names_the_install_command(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(harness, "collect", lambda *_: pytest.fail("launched ranks"))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"deepspeed-3 requires DeepSpeed(?s:.*)DS_BUILD_OPS=0"):
        module.main(["--quick", "--sides", "ddp", "deepspeed-3"])


def test_step_time_of_deepspeed_quick(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    flags = ["--models", "tiny32", "--sides", "ddp", *sides.DEEPSPEED]
    (result,) = quick("step-time", tmp_path / "step.json", *flags)
    for name in sides.DEEPSPEED:
        assert result["sides"][name]["loss_difference"] < 1e-4, name
