"""The benchmarks: ratios are fair, and the quick form of each program runs.

All are thorough tests: they test tools, not zshard.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import harness, sides
from benchmarks.harness import Sample
from benchmarks.hosts_net import Hosts, HostsUnavailable

pytestmark = pytest.mark.thorough

MACHINE = {"date", "commit", "cpu", "cores", "memory_bytes", "kernel", "libc", "python", "torch"}
ZSHARD = "zshard-full_shard"
WHO = "cat /proc/sys/kernel/random/boot_id; hostname; readlink /proc/self/ns/pid /proc/self/ns/net"


def samples(*times: float, foreign: float = 0.0) -> list[Sample]:
    return [Sample((time,), foreign) for time in times]


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


# --- quick forms ----------------------------------------------------------------------------------

TINY = ["--models", "tiny32", "--sides"]
QUICK = {
    "step-time": [*TINY, "compute", "ddp", ZSHARD],
    "host-time": ["--sides", "ddp", ZSHARD],
    "memory": ["--sides", ZSHARD],
    "predictions": [],
    "collectives": ["--ranks", "2", "--mib", "0.0625"],
    "optim": [],
    "saves": [],
    "hosts": [*TINY, "ddp", "zshard-full_shard-auto", "--gbit", "10"],
}
"""Program -> flags besides --quick."""


def check(name: str, results: list[dict[str, Any]]) -> None:
    """Findings that a benchmark must have, beyond keys."""
    if name == "predictions":
        assert abs(results[0]["error"]) < 0.1  # small: 16 MiB are 8 %
    elif name == "memory":
        side = results[0]["sides"][ZSHARD]
        assert side["peak_bytes"] > side["held_bytes"] > 0.9 * results[0]["ideal_held_bytes"]
    elif name == "step-time":
        compute, ddp, ours = results[0]["sides"].values()
        assert ddp["ratio"] == {"min": 1.0, "median": 1.0, "max": 1.0}
        assert compute["loss_difference"] is None and ours["loss_difference"] == 0
    elif name == "collectives":
        sides = [side for each in results for size in each["sizes"] for side in size["us"].items()]
        assert {side for side, _ in sides} >= {"gloo", "unshard", "shm"}
        assert min(us["median"] for _, us in sides) > 0
    elif name == "saves":
        assert results[1]["sides"]["zshard, no save"]["seconds_ratio"]["max"] == 1
        disk = results[4]["sides"]["disk"]
        assert disk["last_loss_ratio"]["max"] == 1 and disk["write_bytes"] > 0
    elif name == "hosts":
        side = results[0]["sides"]["zshard-full_shard-auto"]
        sizes = side["bytes"]
        assert side["loss_difference"] == 0
        assert sizes["peak"][1] > sizes["held"][1] > 0.5 * sizes["predicted"][1] > 0
        assert min(side["wire"]["sent"]) > 0.8 * side["least_bytes"]


@pytest.mark.timeout(1000)  # saves starts eleven groups of ranks
@pytest.mark.parametrize("name", QUICK)
def test_quick_form(name: str, tmp_path: Path) -> None:
    if name == "hosts":
        with hosts_of_this_machine() as hosts:
            answers = [host.call("sh", "-c", WHO).split() for host in hosts.all]
            assert all(len(set(what)) == 2 for what in zip(*answers, strict=True)), answers
    check(name, quick(name, tmp_path / "out.json", *QUICK[name]))


def hosts_of_this_machine() -> Hosts:
    try:
        return Hosts(2)
    except HostsUnavailable as error:
        pytest.skip(f"needs root and network namespaces: {error}")


def quick(name: str, out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run a benchmark as its user does, and return its results after checking their frame."""
    module = f"benchmarks.{name.replace('-', '_')}"
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


def test_step_time_of_deepspeed_quick(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    flags = ["--models", "tiny32", "--sides", "ddp", *sides.DEEPSPEED]
    (result,) = quick("step-time", tmp_path / "step.json", *flags)
    for name in sides.DEEPSPEED:
        assert result["sides"][name]["loss_difference"] < 1e-4, name
