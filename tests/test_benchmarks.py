"""The benchmarks run and say what they promise: statistics by hand, each program once, quickly."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/ is not installed

from benchmarks import harness, host_time, memory, predict, run, step_time
from benchmarks.harness import Sample, Spread
from benchmarks.models import TINY_BLOCKS, WORKLOADS, build_stack

MACHINE = {"date", "commit", "cpu", "cores", "memory_bytes", "kernel", "libc", "python", "torch"}
SPREAD = {"min", "median", "max"}


def samples(*times: float, foreign: float = 0.0) -> list[Sample]:
    return [Sample((time,), foreign) for time in times]


def test_spread_is_min_median_max() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0]) == Spread(1.0, 3.0, 5.0)
    assert Spread(1.0, 3.25, 5.0).text(1) == "1.0/3.2/5.0"
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_ratio_is_taken_inside_a_round() -> None:
    # The machine gets 10x slower in round 2: the ratio of medians would be 0.2, each round says 2.
    side, base = samples(2.0, 20.0, 2.0), samples(1.0, 10.0, 1.0)
    assert harness.same_round_ratios(side, base) == [2.0, 2.0, 2.0]


def test_contended_rounds_are_left_out_of_both_sides() -> None:
    side = samples(*[2.0] * 5) + samples(50.0, foreign=0.3) + samples(2.0)
    base = samples(*[1.0] * 6) + samples(90.0, foreign=0.3)
    assert harness.clean_rounds(side) == [0, 1, 2, 3, 4, 6]
    assert harness.same_round_ratios(side, base) == [2.0] * 5


def test_contended_rounds_count_if_too_few_are_clean() -> None:
    mixed = samples(1.0, 1.0, 1.0, 1.0) + samples(3.0, foreign=0.3)
    assert harness.clean_rounds(mixed) == [0, 1, 2, 3, 4]


def test_sides_that_are_never_clean_together_use_all_rounds() -> None:
    side = samples(*[2.0] * 5) + samples(*[6.0] * 5, foreign=0.3)
    base = samples(*[1.0] * 5, foreign=0.3) + samples(*[1.0] * 5)
    assert harness.same_round_ratios(side, base) == [2.0] * 5 + [6.0] * 5


def test_a_base_drowned_in_noise_gives_no_ratio() -> None:
    assert harness.same_round_ratios(samples(1.0, 1.0), samples(-0.5, 2.0)) == [0.5]


def test_order_rotates_so_that_each_side_comes_first() -> None:
    names = ["a", "b", "c"]
    orders = [harness.rotated(names, number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_json_refuses_what_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        harness.write_json(tmp_path / "x.json", {"ratio": math.nan})


def test_added_time_is_the_difference_to_plain_per_unit() -> None:
    units = TINY_BLOCKS
    plain, mine = Sample((1e-3, 2e-3, 3e-3), 0.0), Sample((2e-3, 5e-3, 7e-3), 0.2)
    both = {host_time.PLAIN: [plain], "ddp": [mine]}
    (sample,) = host_time.added(both, "ddp", 1)
    assert sample.times[0] == pytest.approx(3e-3 / units)
    assert sample.foreign == 0.2


def test_memory_takes_the_libraries_off_rank_by_rank() -> None:
    cell = [{"held": 50, "peak": 90, "peak_rss": 95}, {"held": 60, "peak": 80, "peak_rss": 99}]
    tiny = [{"held": 10, "peak": 11, "peak_rss": 12}, {"held": 30, "peak": 31, "peak_rss": 32}]
    record = memory.compare("tiny32", 2, {"fsdp1": cell}, {"fsdp1": tiny})
    side = record["sides"]["fsdp1"]
    assert (side["held_bytes"], side["peak_bytes"], side["peak_rss_bytes"]) == (40, 79, 83)
    assert side["target_bytes"] is None


def test_memory_target_is_the_smaller_of_the_fsdps_peaks() -> None:
    def cell(peak: int) -> list[dict[str, int]]:
        return [{"held": 0, "peak": peak, "peak_rss": peak}]

    cells = {"ddp": cell(1), "fsdp1": cell(30), "fsdp2": cell(20), memory.TARGET_SIDE: cell(25)}
    tiny = dict.fromkeys(cells, cell(0))
    side = memory.compare("tiny32", 2, cells, tiny)["sides"][memory.TARGET_SIDE]
    assert side["target_bytes"] == 20
    assert memory.target_text(side).endswith("MISSED")


def test_pss_sees_memory_come_and_go() -> None:
    size = 64 * harness.MIB
    before = memory.pss()
    sampler = memory.PssSampler()
    block = bytearray(size)
    block[::4096] = b"x" * (size // 4096)
    sampler.sample()
    del block
    assert sampler.stop() - before > 0.9 * size
    assert memory.pss() - before < 0.5 * size


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt10m", 10.9), ("gpt85m", 85.5), ("stack100", 105.0), ("bert", 109.5)],
)
def test_models_have_the_sizes_of_the_reference(name: str, millions: float) -> None:
    assert WORKLOADS[name].parameters() / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("name", ["gpt10m", "tiny32"])
def test_models_train_on_their_batches(name: str) -> None:
    workload = WORKLOADS[name]
    module = workload.build()
    loss = workload.loss(module, workload.batch(torch.Generator().manual_seed(0)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert any(type(child) in workload.units for child in module.modules())


def test_stack_gradients_are_not_denormal() -> None:
    torch.manual_seed(0)
    stack = build_stack(layers=100, width=128)
    stack(torch.randn(16, 128)).square().mean().backward()
    gradient = next(stack.parameters()).grad
    assert gradient is not None
    assert gradient.abs().median() > 1e-12


def quick(module: str, out: Path, *flags: str) -> dict[str, Any]:
    """Run a benchmark as its user does, and return its record after checking the frame."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", f"--out={out}", *flags]
    with subprocess.Popen(command, cwd=harness.ROOT, stderr=subprocess.PIPE, text=True) as child:
        try:
            _, errors = child.communicate(timeout=240)
        except BaseException:
            child.terminate()  # and not kill: it has ranks to end
            raise
    assert child.returncode == 0, errors
    record: dict[str, Any] = json.loads(out.read_text())
    assert set(record) == {"benchmark", "machine", "settings", "results"}
    assert set(record["machine"]) >= MACHINE
    return record


@pytest.mark.slow
def test_step_time_quick(tmp_path: Path) -> None:
    flags = ["--models", "tiny32", "--sides", "compute", "ddp", "fsdp2", "zshard-full_shard"]
    record = quick("step_time", tmp_path / "step.json", *flags)
    (result,) = record["results"]
    assert (result["model"], result["ranks"]) == ("tiny32", 2)
    assert list(result["sides"]) == flags[3:]
    for side in result["sides"].values():
        assert set(side["ms"]) == set(side["ratio"]) == SPREAD
        assert len(side["samples_ms"]) == len(side["foreign"]) == record["settings"]["rounds"]
    assert result["sides"]["ddp"]["ratio"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert result["sides"]["compute"]["loss_difference"] is None
    assert result["sides"]["fsdp2"]["loss_difference"] == 0
    assert result["sides"]["zshard-full_shard"]["loss_difference"] == 0


@pytest.mark.slow
def test_host_time_quick(tmp_path: Path) -> None:
    record = quick("host_time", tmp_path / "host.json", "--sides", "ddp", "zshard-full_shard")
    assert [result["ranks"] for result in record["results"]] == [1, 2]
    for result in record["results"]:
        assert list(result["sides"]) == ["ddp", "zshard-full_shard"]
        side = result["sides"]["zshard-full_shard"]
        assert set(side["added_us"]) == set(result["plain_us"]) == set(host_time.PARTS)
        assert set(side["ratio"]) == {"ddp"}
        assert set(side["target"]) == set(host_time.TARGETS[result["ranks"]])


@pytest.mark.slow
def test_memory_quick(tmp_path: Path) -> None:
    flags = ["--models", "gpt10m", "--sides", "zshard-full_shard"]
    (result,) = quick("memory", tmp_path / "memory.json", *flags)["results"]
    side = result["sides"]["zshard-full_shard"]
    assert len(side["per_rank"]) == len(side["libraries_per_rank"]) == result["ranks"] == 2
    assert side["held_bytes"] > 0.9 * result["ideal_held_bytes"]
    assert side["peak_bytes"] > side["held_bytes"]


@pytest.mark.slow
def test_load_quick(tmp_path: Path) -> None:
    flags = ["--sides", "plain", "zshard-meta", "zshard-load", "fsdp2-load-each"]
    (result,) = quick("load", tmp_path / "load.json", *flags)["results"]
    assert list(result["sides"]) == flags[1:]
    for name, side in result["sides"].items():
        assert set(side["seconds"]) == set(side["cpu_seconds"]) == SPREAD
        assert side["values_of_the_plain_model"] is (True if name.startswith("zshard") else None)
    assert result["share_bytes"] == 4 * result["parameters"] // 2


@pytest.mark.slow
def test_predict_quick(tmp_path: Path) -> None:
    (result,) = quick("predict", tmp_path / "predict.json")["results"]
    assert result["cell"] == "gpt10m" and len(result["per_rank"]) == 2
    assert abs(result["error"]) < 2 * predict.TARGET


def test_predictions_are_compared_by_the_mean_of_ranks() -> None:
    ranks = [
        {"predicted": {"total": 90}, "measured": 100},
        {"predicted": {"total": 110}, "measured": 110},
    ]
    record = predict.compare("gpt10m", ranks)
    assert (record["predicted_bytes"], record["measured_bytes"]) == (100, 105)
    assert record["error"] == pytest.approx(0.05)


def test_every_target_belongs_to_a_side_and_model() -> None:
    assert set(step_time.TARGETS) <= set(WORKLOADS)
    for module in (step_time, host_time, memory):
        assert module.TARGET_SIDE in module.ALL_SIDES


def test_run_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["step-tim"])
    error = capsys.readouterr().err
    assert "unknown: step-tim" in error
    assert "step-time, memory" in error
