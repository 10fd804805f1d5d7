"""benchmarks/on_gpu.sh without a GPU: its commands, its stages on fakes, its summary.

On a lent machine there is no time to mend the script. All but the summary are thorough tests.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from c_compile import ROOT

from benchmarks import gpu, gpu_summary

SCRIPT = ["bash", str(ROOT / "benchmarks" / "on_gpu.sh")]
STAGES = list(gpu_summary.CLAIMS)
LEFT_OUT = {"compiled", "1.5b", "long", "125m", "rest", "1.5b-small", "1.5b-compiled"}
"""Of a rehearsal: other stages run the same code."""
ACROSS = ["bandwidth", "killed", "several", "several-1.5b"]


def run(*stages: str, **env: str) -> subprocess.CompletedProcess[str]:
    here = {**os.environ, "PYTHON": sys.executable, "COLUMNS": "200", **env}
    here.pop("PYTEST_ADDOPTS", None)
    return subprocess.run([*SCRIPT, *stages], env=here, capture_output=True, text=True, cwd=ROOT)


def commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


# --- the commands for a GPU -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def commands() -> dict[str, str]:
    """What each stage would run, by its name."""
    return dry("1") | dry("2")


def dry(gpus: str, hosts: str = "1") -> dict[str, str]:
    """What the stages with so many GPUs would run, in their order."""
    lines = run(DRY="1", GPUS=gpus, HOSTS=hosts, HEAD="first").stdout.splitlines()
    return dict(re.match(r"== (\S+): (.*) \(\d+s left\)", line).groups() for line in lines)  # type: ignore[union-attr]


@pytest.mark.thorough
def test_summary_knows_all_stages(commands: dict[str, str]) -> None:
    assert [name for name in commands if name in STAGES] == STAGES
    wrong = run("1.6b")
    assert wrong.returncode == 2 and wrong.stderr.partition(" of: ")[2].split() == STAGES


@pytest.mark.thorough
def test_benchmarks_of_the_stages_parse(commands: dict[str, str]) -> None:
    lines = [line.split() for line in commands.values() if " -m benchmarks.gpu " in line]
    asked = [gpu.arguments(line[line.index("benchmarks.gpu") + 1 :]) for line in lines]
    cells = [cell for each in asked for _, cell in gpu.cells(each)]
    parts = {(c["part"], c.get("model"), c.get("mode")) for c in cells}
    gpts, modes = ("gpt125m", "gpt1.5b"), ("eager", "compiled")
    models = {("steps", m, mode) for m in gpts for mode in modes}
    models |= {("steps", "gpt125m-4096", "eager"), ("steps", "gpt1.5b", "recomputed")}
    models |= {("memory", m, "eager") for m in gpts} | {("saves", "gpt1.5b", None)}
    assert models <= parts
    assert {part for part, *_ in parts} == set(gpu.PARTS)


@pytest.mark.thorough
def test_several_gpus_and_hosts_have_stages_of_their_own() -> None:
    assert list(dry("2"))[-7:] == [*ACROSS, "nccl", "faults", "features"]
    found = dry("8", "2")
    assert [name for name in found if name in STAGES] == ACROSS
    ports = []
    for name in ACROSS:
        args = gpu.arguments(found[name].partition("benchmarks.gpu ")[2].split())
        assert (args.gpus, args.hosts) == (8, 2)
        flags = [gpu.rendezvous(args, n) for n, (ranks, _) in enumerate(gpu.cells(args))]
        assert all("--nnodes=2" in each for each in flags)
        ports += [flag for each in flags for flag in each if "endpoint=first:" in flag]
    assert len(set(ports)) == len(ports) > len(ACROSS)


@pytest.mark.thorough
def test_stages_run_all_tests_on_a_gpu(commands: dict[str, str]) -> None:
    """Together they are all tests on a GPU, except those of ranks over gloo."""
    files = sorted(
        {match for line in commands.values() for match in re.findall(r"tests/gpu/\S+", line)}
    )
    listing = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listing += ["-m", "thorough or not thorough", *files]
    done = subprocess.run(listing, capture_output=True, text=True, cwd=ROOT)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    chosen: set[str] = set()
    for stage, line in commands.items():
        if " -k " in line:
            file, which = re.search(r"(tests/gpu/\S+) -k (.*)", line).groups()  # type: ignore[union-attr]
            expression = Expression.compile(which)
            found = {
                name
                for name in names
                if name.startswith(file) and expression.evaluate(lambda word, **_: word in name)  # noqa: B023
            }
            assert found and not any("stand-in" in name for name in found), stage
            assert not found & chosen, stage
            chosen |= found
    left = [name for name in names if name not in chosen and "stand-in" not in name]
    ranks = re.compile(r"c10d|copies")
    assert [name for name in left if not ranks.search(name)] == []


# --- over fakes -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_all_stages_but_one_that_has_passed_run_on_fakes(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    state.mkdir()
    passed, *stages = (name for name in STAGES if name not in ACROSS)
    (state / f"{passed}.status").write_text(f"0 1 {commit()} 1\n")
    how = {"REHEARSE": "1", "STATE": str(state), "OUT": str(out), "LIMIT": "1500"}
    done = run(**how, GPUS="1", CORES="8")  # tests run side by side
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.findall(r"== (\S+): passed before", done.stdout) == [passed]
    summary = (out / "summary.md").read_text()
    assert "REHEARSAL OVER FAKES" in summary and "Nothing new: no stage has passed" in summary
    for name in stages:
        ends = r"nothing ran \| 0" if name in LEFT_OUT else r"passed \| [1-9]"
        assert re.search(rf"^\| {name} \| {ends}", summary, re.MULTILINE), summary
    with tarfile.open(out / "on_gpu.tgz") as packed:
        logs = {f"./{name}.log" for name in stages if name not in LEFT_OUT}
        assert logs <= set(packed.getnames())


@pytest.mark.thorough
def test_stages_of_several_gpus_run_on_fakes(tmp_path: Path) -> None:
    """Two hosts are two calls of the script."""
    how = {"REHEARSE": "1", "LIMIT": "1500", "ZSHARD_BACKEND": "nccl"}
    done = run("bandwidth", "several", **how, STATE=str(tmp_path), GPUS="2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = (tmp_path / "summary.md").read_text()
    for name in ("bandwidth", "several"):
        assert re.search(rf"^\| {name} \| passed \| [1-9]", summary, re.MULTILINE), summary
    env = {**os.environ, **how, "PYTHON": sys.executable, "GPUS": "1", "HOSTS": "2"}
    env |= {"HEAD": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(
            [*SCRIPT, "killed"],
            env={**env, "STATE": str(tmp_path / str(host))},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert sum("Rank 1 of 2, killed in training, is reported by all" in text for text in said) == 1


@pytest.mark.thorough
def test_stage_without_time_is_not_started(tmp_path: Path) -> None:
    done = run("graph", REHEARSE="1", STATE=str(tmp_path), LIMIT="5")
    assert done.returncode == 1 and "== graph: not begun, no time is left" in done.stdout
    assert shlex.split(done.stdout.splitlines()[-1])[-1] == "graph"
    assert "| graph | not run |" in (tmp_path / "summary.md").read_text()


# --- the summary ----------------------------------------------------------------------------------

CASE = '<testcase name="{name}">{inside}</testcase>'
FAILURE = '<failure message="zshard.CudaError: cuMemAlloc: CUDA_ERROR_MAP_FAILED (205)" />'
SKIP = '<skipped message="NCCL needs a GPU for each rank" />'


def write_stage(folder: Path, name: str, status: int, *cases: str) -> None:
    (folder / f"{name}.status").write_text(f"{status} 7 abc 0\n")
    tests = "".join(CASE.format(name=f"test_{i}", inside=each) for i, each in enumerate(cases))
    (folder / f"{name}.xml").write_text(f"<testsuites><testsuite>{tests}</testsuite></testsuites>")


def test_summary_names_failures_and_claims(tmp_path: Path) -> None:
    write_stage(tmp_path, "driver", 0, "", "")
    write_stage(tmp_path, "trainer", 124, "", "")
    write_stage(tmp_path, "nccl", 0, SKIP)
    write_stage(tmp_path, "features", 1, "", FAILURE)
    cells = [{"part": "device", "gpu": "H200", "stand_in": False}, {"part": "adam"}]
    machine = {"date": "2026-11-25", "commit": "abc"}
    record = {"machine": machine, "results": cells}
    (tmp_path / "gpu-rest.json").write_text(json.dumps(record))
    (tmp_path / "rest.status").write_text("0 9 abc 0\n")
    text = gpu_summary.markdown(tmp_path)
    assert "2026-11-25, commit abc. gpu: H200" in text and "REHEARSAL" not in text
    for row in (
        "| driver | passed | 2 | 0 | 0 | 7 |",
        "| trainer | cut off by the time limit | 2 |",
        "| nccl | nothing ran | 0 | 0 | 1 |",
        "| features | FAILED | 1 | 1 |",
        "| graph | not run |",
        "| features | `test_1` | `cuMemAlloc` | zshard.CudaError",
        "- NCCL needs a GPU for each rank",
    ):
        assert row in text, text
    claims = text.partition("README may now say")[2]
    assert gpu_summary.CLAIMS["driver"] in claims and gpu_summary.CLAIMS["rest"] in claims
    assert claims.count("\n- ") == 2
