"""The benchmarks: their statistics, and each program once with `--quick` on a small model.

All are thorough tests: they test tools, not zshard.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import (
    gpu_report,
    gpu_sides,
    gpu_steps,
    harness,
    host_time,
    memory,
    predict,
    run,
    sides,
    step_time,
)
from benchmarks.harness import Sample, Spread
from benchmarks.models import TINY_BLOCKS, build_stack

pytestmark = pytest.mark.thorough

MACHINE = {"date", "commit", "cpu", "cores", "memory_bytes", "kernel", "libc", "python", "torch"}
SPREAD = {"min", "median", "max"}


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


def test_contended_rounds_are_dropped_from_both_sides() -> None:
    side = samples(*[2.0] * 5) + samples(50.0, foreign=0.3) + samples(2.0)
    base = samples(*[1.0] * 6) + samples(90.0, foreign=0.3)
    assert harness.clean_rounds(side) == [0, 1, 2, 3, 4, 6]
    assert harness.same_round_ratios(side, base) == [2.0] * 5


def test_contended_rounds_count_if_too_few_are_clean() -> None:
    mixed = samples(1.0, 1.0, 1.0, 1.0) + samples(3.0, foreign=0.3)
    assert harness.clean_rounds(mixed) == [0, 1, 2, 3, 4]
    side = samples(*[2.0] * 5) + samples(*[6.0] * 5, foreign=0.3)
    base = samples(*[1.0] * 5, foreign=0.3) + samples(*[1.0] * 5)
    assert harness.same_round_ratios(side, base) == [2.0] * 5 + [6.0] * 5


def test_negative_base_gives_no_ratio() -> None:
    assert harness.same_round_ratios(samples(1.0, 1.0), samples(-0.5, 2.0)) == [0.5]


def test_host_time_per_unit_is_relative_to_plain() -> None:
    units = TINY_BLOCKS
    plain, mine = Sample((1e-3, 2e-3, 3e-3), 0.0), Sample((2e-3, 5e-3, 7e-3), 0.2)
    both = {host_time.PLAIN: [plain], "ddp": [mine]}
    (sample,) = host_time.added(both, "ddp", 1)
    assert sample.times[0] == pytest.approx(3e-3 / units)
    assert sample.foreign == 0.2


def test_memory_subtracts_the_libraries_of_each_rank() -> None:
    cell = [{"held": 50, "peak": 90, "peak_rss": 95}, {"held": 60, "peak": 80, "peak_rss": 99}]
    tiny = [{"held": 10, "peak": 11, "peak_rss": 12}, {"held": 30, "peak": 31, "peak_rss": 32}]
    record = memory.compare("tiny32", 2, {"fsdp1": cell}, {"fsdp1": tiny})
    side = record["sides"]["fsdp1"]
    assert (side["held_bytes"], side["peak_bytes"], side["peak_rss_bytes"]) == (40, 79, 83)
    assert side["target_bytes"] is None


def test_memory_target_is_the_smaller_fsdp_peak() -> None:
    def cell(peak: int) -> list[dict[str, int]]:
        return [{"held": 0, "peak": peak, "peak_rss": peak}]

    cells = {"ddp": cell(1), "fsdp1": cell(30), "fsdp2": cell(20), memory.TARGET_SIDE: cell(25)}
    tiny = dict.fromkeys(cells, cell(0))
    side = memory.compare("tiny32", 2, cells, tiny)["sides"][memory.TARGET_SIDE]
    assert side["target_bytes"] == 20
    assert memory.target_text(side).endswith("MISSED")


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


def test_step_time_quick(tmp_path: Path) -> None:
    flags = ["--models", "tiny32", "--sides", "compute", "ddp", "zshard-full_shard"]
    record = quick("step_time", tmp_path / "step.json", *flags)
    (result,) = record["results"]
    assert (result["model"], result["ranks"]) == ("tiny32", 2)
    assert list(result["sides"]) == flags[3:]
    for side in result["sides"].values():
        assert set(side["ms"]) == set(side["ratio"]) == SPREAD
        assert len(side["samples_ms"]) == len(side["foreign"]) == record["settings"]["rounds"]
    assert result["sides"]["ddp"]["ratio"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert result["sides"]["compute"]["loss_difference"] is None
    assert result["sides"]["zshard-full_shard"]["loss_difference"] == 0


def test_host_time_quick(tmp_path: Path) -> None:
    record = quick("host_time", tmp_path / "host.json", "--sides", "ddp", "zshard-full_shard")
    assert [result["ranks"] for result in record["results"]] == [1, 2]
    for result in record["results"]:
        assert list(result["sides"]) == ["ddp", "zshard-full_shard"]
        side = result["sides"]["zshard-full_shard"]
        assert set(side["added_us"]) == set(result["plain_us"]) == set(host_time.PARTS)
        assert set(side["ratio"]) == {"ddp"}
        assert set(side["target"]) == set(host_time.TARGETS[result["ranks"]])


def test_trace_overhead_quick(tmp_path: Path) -> None:
    (result,) = quick("trace_overhead", tmp_path / "trace.json")["results"]
    assert result["model"] == "tiny32" and result["records_per_step"] > 8 * TINY_BLOCKS
    for part in ("cpu", "wall"):
        assert set(result[part]["ms"]) == {"off", "on"} and set(result[part]["ratio"]) == SPREAD


def test_kept_step_quick(tmp_path: Path) -> None:
    (result,) = quick("kept_step", tmp_path / "kept.json")["results"]
    assert result["millions"] == 1
    for name in ("plain_ns", "kept_ns", "ratio"):
        assert set(result[name]) == SPREAD and result[name]["median"] > 0


def test_memory_quick(tmp_path: Path) -> None:
    flags = ["--models", "gpt10m", "--sides", "zshard-full_shard"]
    (result,) = quick("memory", tmp_path / "memory.json", *flags)["results"]
    side = result["sides"]["zshard-full_shard"]
    assert len(side["per_rank"]) == len(side["libraries_per_rank"]) == result["ranks"] == 2
    assert side["held_bytes"] > 0.9 * result["ideal_held_bytes"]
    assert side["peak_bytes"] > side["held_bytes"]


def test_collectives_quick(tmp_path: Path) -> None:
    """Its driver calls a transport by its table, as nothing but the core does."""
    record = quick("collectives", tmp_path / "x.json", "--ranks", "2", "--mib", "0.0625")
    sizes = [size for result in record["results"] for size in result["sizes"]]
    assert {side for size in sizes for side in size["us"]} >= {"gloo", "unshard", "shm"}
    assert min(side["median"] for size in sizes for side in size["us"].values()) > 0


def test_load_quick(tmp_path: Path) -> None:
    flags = ["--sides", "zshard-load", "fsdp2-load-each"]
    (result,) = quick("load", tmp_path / "load.json", *flags)["results"]
    assert list(result["sides"]) == flags[1:]
    for name, side in result["sides"].items():
        assert set(side["seconds"]) == set(side["cpu_seconds"]) == SPREAD
        assert side["values_of_the_plain_model"] is (True if name.startswith("zshard") else None)
    assert result["share_bytes"] == 4 * result["parameters"] // 2


def test_checkpoint_quick(tmp_path: Path) -> None:
    flags = ["--sides", "zshard", "dcp", "zshard-async"]
    (result,) = quick("checkpoint", tmp_path / "checkpoint.json", *flags)["results"]
    assert set(result["sides"]) == set(flags[1:])
    for side in result["sides"].values():
        assert set(side["save"]) == set(side["cold"]) == SPREAD
        assert set(side["peaks"]) == {"save", "load"}
    assert set(result["sides"]["zshard"]["faster"]) == {"blocked", "save", "load", "cold"}


def test_predict_quick(tmp_path: Path) -> None:
    (result,) = quick("predict", tmp_path / "predict.json")["results"]
    assert result["cell"] == "gpt10m" and len(result["per_rank"]) == 2
    assert abs(result["error"]) < 2 * predict.TARGET


def test_predictions_are_compared_by_the_mean_over_ranks() -> None:
    ranks = [
        {"predicted": {"total": 90}, "measured": 100},
        {"predicted": {"total": 110}, "measured": 110},
    ]
    record = predict.compare("gpt10m", ranks)
    assert (record["predicted_bytes"], record["measured_bytes"]) == (100, 105)
    assert record["error"] == pytest.approx(0.05)


def test_norms_quick(tmp_path: Path) -> None:
    """Where gradients are sharded, the norm is the float32 number next to the exact one."""
    (result,) = quick("norms", tmp_path / "norms.json", "--max-norm=0.1")["results"]
    sides = result["sides"]
    full, grads = sides["zshard-full_shard"], sides["zshard-shard_grad_op"]
    assert max(map(abs, full["errors"])) <= 0.5001 and full["norms"] == grads["norms"]
    assert sides["zshard-no_shard"] == sides["ddp"]
    assert min(full["norms"]) > result["max_norm"], "nothing was clipped"
    assert max(side["loss_difference"] for side in sides.values()) < 1e-5


def test_unknown_benchmark_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["step-tim"])
    error = capsys.readouterr().err
    assert "unknown: step-tim" in error
    assert "step-time, memory" in error


# --- DeepSpeed ---------------------------------------------------------------


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
    (result,) = quick("step_time", tmp_path / "step.json", *flags)["results"]
    assert list(result["sides"]) == flags[3:]
    for name in sides.DEEPSPEED:
        assert result["sides"][name]["loss_difference"] < 1e-4, name


def test_eight_bit_quick(tmp_path: Path) -> None:
    flags = ["--sides", "AdamW8bit, bfloat16", "--steps", "2", "--elements", "4096"]
    (result,) = quick("eight_bit", tmp_path / "eight.json", *flags)["results"]
    ends = [curve[-1] for own in result["curves"].values() for curve in own]
    assert [step for step, _ in ends] == [2, 2]
    assert all(4 < loss < 6 for _, loss in ends)


# --- benchmarks on a GPU ---------------------------------------------------------------------------


def run_gpu(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *flags]
    whole = {**os.environ, **env}
    return subprocess.run(
        command, cwd=harness.ROOT, env=whole, capture_output=True, text=True, timeout=280
    )


def test_gpu_benchmark_needs_a_gpu(tmp_path: Path) -> None:
    done = run_gpu(f"--out={tmp_path / 'x.json'}", ZSHARD_CUDA_LIB="/no/libcuda.so.1")
    assert done.returncode == 1
    assert "needs a GPU" in done.stderr and "/no/libcuda.so.1" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_gpu_benchmark_refuses_a_fake_gpu_without_quick(tmp_path: Path) -> None:
    done = run_gpu(f"--out={tmp_path / 'x.json'}", **stand_ins.environment())
    assert done.returncode == 1 and "--quick" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_gpu_quick_on_a_fake_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run_gpu(
        "--quick",
        f"--out={out}",
        "--modes",
        "eager",
        "--batches",
        "large",
        **stand_ins.environment(),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads(out.read_text())
    assert set(record["machine"]) >= MACHINE
    device, steps, host, *adams, curve, ranks = record["results"]
    assert device["stand_in"] is True and len(adams) == 2
    assert list(steps["sides"]) == list(gpu_sides.USUAL)
    ours = steps["sides"]["zshard"]
    assert ours["memory"]["taken"] == ours["memory"]["predicted"] and ours["memory"]["constant"]
    assert ours["loss_difference"]["plain-by-hand"] < 1e-3 and ours["goal"] is None
    assert set(ours["ratio"]["fsdp2"]) == SPREAD
    assert set(host["sides"]) == {"ddp", "fsdp2", "zshard"}
    for name, value in curve["largest_difference"].items():
        assert value <= curve["tolerance"][name], name
    for name, side in ranks["sides"].items():
        assert side["same_bits_as_first"] and side["largest_difference_to_ddp"] == 0, name
    page = out.with_suffix(".md").read_text()
    assert "FAKE GPU ON THE HOST" in page and "| zshard |" in page


def test_gpu_sides_are_paired_if_they_do_not_fit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory(held: int) -> dict[str, dict[str, int]]:
        return {name: {"held_bytes": held, "peak_bytes": held + 20} for name in names}

    names = ["plain", "ddp", "zshard"]
    monkeypatch.setattr(gpu_steps, "is_stand_in", lambda: False)
    size = types.SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: size)
    assert gpu_steps.groups_that_fit(names, memory(20)) == [names]
    assert gpu_steps.groups_that_fit(names, memory(30)) == [["plain", "ddp"], ["plain", "zshard"]]


def test_failed_cell_is_shown_as_failed() -> None:
    record = {"part": "steps", "failed": "status 1", "cell": {"model": "tiny"}}
    (table,) = gpu_report.tables(record)
    assert "FAILED" in table.title and "tiny" in table.markdown() and "status 1" in table.markdown()
