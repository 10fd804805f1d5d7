"""benchmarks/on_gpu.sh and benchmarks.gpu without a GPU: commands, stages on fakes, the summary.

On a lent machine there is no time to mend the script. All but the summary are thorough tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import stand_ins
from _pytest.mark.expression import Expression
from c_compile import ROOT

from benchmarks import gpu, gpu_stages


def run(*stages: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), *stages]
    here = {**os.environ, "PYTHON": sys.executable, **env}
    here.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, env=here, capture_output=True, text=True, cwd=ROOT)


def parsed(command: str) -> list[dict]:
    args = gpu.arguments(command.partition("-m benchmarks.gpu ")[2].split())
    cells = [(cell, gpu.rendezvous(args, n)) for n, cell in enumerate(gpu.cells(args))]
    return [{**cell, "meeting": flags} for cell, flags in cells]


def sides(path: Path) -> dict[str, dict]:
    """The measurements of a stage's last cell."""
    return json.loads(path.read_text())["results"][-1]["sides"]


@pytest.mark.thorough
def test_stages_measure_all_parts_and_run_all_tests_on_a_gpu() -> None:
    """Except tests of ranks over gloo, and copies. No test is in two stages."""
    commands = [" ".join(gpu_stages.command(name)) for name in gpu_stages.STAGES]
    cells = [cell for line in commands if "benchmarks.gpu" in line for cell in parsed(line)]
    assert {cell["part"] for cell in cells} == set(gpu.PARTS)
    tests = [line.partition(" tests/gpu/")[2].split(" -k ") for line in commands]
    files = sorted({f"tests/gpu/{each[0]}" for each in tests if len(each) == 2})
    listing = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listing += ["-m", "thorough or not thorough", *files]
    done = subprocess.run(listing, capture_output=True, text=True, cwd=ROOT)
    left = {line for line in done.stdout.splitlines() if "::" in line}
    for file, which in (each for each in tests if len(each) == 2):
        meant = Expression.compile(which).evaluate
        chosen = {n for n in left if f"/{file}:" in n and meant(lambda word, n=n, **_: word in n)}
        assert chosen and not any("stand-in" in name for name in chosen), which
        left -= chosen
    assert [name for name in left if not re.search("stand-in|c10d|copies", name)] == []


@pytest.mark.thorough
def test_several_gpus_and_hosts_have_stages_and_ports_of_their_own() -> None:
    across = list(gpu_stages.ACROSS)
    for (gpus, hosts), stages in (
        (("1", "1"), list(gpu_stages.ONE)),
        (("2", "1"), [*across, "nccl", "faults", "features"]),
        (("8", "2"), across),
    ):
        said = run(DRY="1", GPUS=gpus, HOSTS=hosts, HEAD="first").stdout
        lines = re.findall(r"^== (\S+): (.*) \(\d+s left\)$", said, re.MULTILINE)
        assert [name for name, _ in lines] == stages
    cells = [cell for _, line in lines for cell in parsed(line)]
    assert {cell["ranks"] for cell in cells} == {8}
    meetings = [cell["meeting"] for cell in cells]
    assert all(flags[0] == "--nnodes=2" and "endpoint=first:" in flags[2] for flags in meetings)
    assert len({flags[2] for flags in meetings}) == len(meetings) > len(across)


@pytest.mark.thorough
def test_all_stages_but_one_that_has_passed_run_on_fakes(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    state.mkdir()
    (state / "driver.status").write_text(f"0 1 {gpu_stages.COMMIT} 1\n")
    how = {"REHEARSE": "1", "STATE": str(state), "OUT": str(out), "LIMIT": "1500"}
    done = run(**how, GPUS="1", CORES="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.findall(r"== (\S+): passed before", done.stdout) == ["driver"]
    summary = (out / "summary.md").read_text()
    for name in gpu_stages.ONE.keys() - {"driver"}:
        ends = r"passed \(OVER FAKES.*\| [1-9]" if gpu_stages.STAGES[name][1] else "nothing ran"
        assert re.search(rf"^\| {name} \| {ends}", summary, re.MULTILINE), summary
    ours = sides(state / "gpu-peaks.json")["zshard"]
    assert ours["prediction holds"] and ours["held is constant"] and ours["taken"] > ours["held"]
    assert (out / "on_gpu.tgz").stat().st_size > 1000


@pytest.mark.thorough
def test_stages_of_several_gpus_and_hosts_run_on_fakes(tmp_path: Path) -> None:
    how = {"REHEARSE": "1", "LIMIT": "1500", "ZSHARD_BACKEND": "nccl", "STATE": str(tmp_path)}
    done = run("bandwidth", "several", **how, GPUS="2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert sides(tmp_path / "gpu-several.json")["zshard"]["loss - ddp"] < 1e-3
    hosts = {**how, "GPUS": "1", "HOSTS": "2", "HEAD": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    both = f"STATE={tmp_path}/other bash benchmarks/on_gpu.sh killed & "
    both += "bash benchmarks/on_gpu.sh killed && wait $!"
    env = {**os.environ, **hosts, "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", both], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("Rank 1 of 2, killed in training, is reported by all") == 1


@pytest.mark.thorough
def test_benchmark_needs_a_gpu_and_refuses_times_of_a_fake(tmp_path: Path) -> None:
    fake = stand_ins.environment()
    for env, words in (({"ZSHARD_CUDA_LIB": "/no/cuda"}, "needs a GPU"), (fake, "add --quick")):
        command = [sys.executable, "-m", "benchmarks.gpu", f"--out={tmp_path / 'x.json'}"]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, cwd=ROOT)
        assert done.returncode == 1 and words in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_summary_names_failures(tmp_path: Path) -> None:
    failure = '<failure message="zshard.CudaError: cuMemAlloc: CUDA_ERROR_MAP_FAILED (205)" />'
    for name, status, case in (
        ("driver", 124, ""),
        ("nccl", 0, "<skipped />"),
        ("wire", 1, failure),
    ):
        (tmp_path / f"{name}.status").write_text(f"{status} 7 abc 0\n")
        test = f'<testsuites><testcase name="test_0">{case}</testcase></testsuites>'
        (tmp_path / f"{name}.xml").write_text(test)
    machine = {"date": "2026-11-25", "commit": "abc"}
    cells = [{"sides": {"H200": {}}}, {"cell": "steps", "failed": "ncclCommInitRank: 2"}]
    (tmp_path / "gpu-1.5b.json").write_text(json.dumps({"machine": machine, "results": cells}))
    (tmp_path / "1.5b.status").write_text("1 9 abc 0\n")
    text = gpu_stages.summary(tmp_path)
    for row in (
        "| driver | cut off by the time limit | 1 |",
        "| nccl | nothing ran | 0 | 0 | 1 |",
        "| wire | FAILED | 0 | 1 |",
        "| graph | not run |",
        "| wire | `test_0` | `cuMemAlloc` | zshard.CudaError",
        "| 1.5b | `steps` | `ncclCommInitRank` |",
    ):
        assert row in text, text
