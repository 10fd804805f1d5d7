"""The stages of on_gpu.sh, the most valuable first, as such a machine is lent for minutes.

A call begins with the first stage that has not passed at this commit. Tests run in parallel if
there are enough cores; timed stages run alone. STATE, and on_gpu.tgz in OUT, have STAGE.log,
STAGE.status and the measurements of each stage, and summary.md. This imports neither torch nor
zshard.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

TINY = "--quick --models tiny --batches small --rounds 1"
EAGER, MANY = "--parts steps --modes eager", "ddp fsdp2 zshard zshard-no_shard zshard-c10d"
LARGE = f"{EAGER} --models gpt1.5b --batches large"
BY_HAND = "--parts steps --modes compiled --batches small --sides plain-by-hand fsdp2 zshard"
ONE = {
    "peaks": ("--parts memory --modes eager --batches large --sides plain fsdp2 zshard", TINY),
    "driver": (
        "test_gpu.py kernels and gpu and not copies or lack_of_memory",
        "kernels and copies",
    ),
    "faults": ("test_gpu_recovery.py not c10d", "stand-in-2-1-nccl or stand-in-nccl-False"),
    "features": ("test_gpu_features.py not graph", "optimizers and stand-in"),
    "compiled": (f"{BY_HAND} --models gpt125m --rounds 7", ""),
    "host": ("--parts host --rounds 7", TINY),
    "1.5b": (f"{LARGE} --rounds 4", ""),
    "saves": ("--parts saves --models gpt1.5b", TINY),
    "offload": (f"{LARGE} --rounds 2 --sides fsdp2-offload zshard-offload", TINY),
    "trainer": ("test_gpu.py not memory and not kernels", "gradients_add_up and stand-in"),
    "memory": ("test_gpu.py memory_is_constant", "constant and stand-in and fp32 and full_shard"),
    "nccl": ("test_gpu_ranks.py not c10d", "nccl_with_one_rank and stand-in"),
    "wire": ("test_gpu_wire.py test", "no_effect and stand-in"),
    "graph": ("test_gpu_features.py graph", "graph and stand-in"),
    "125m": ("--parts steps --models gpt125m", ""),
}
"""Stage of one GPU -> arguments of benchmarks.gpu, or a file in tests/gpu and pytest's -k; and what
a rehearsal adds to those arguments, or has as -k. "" leaves it out: another runs the same code."""

ACROSS = {
    "bandwidth": ("--parts bandwidth", TINY),
    "killed": ("--parts killed", TINY),
    "several": (f"{EAGER} --models gpt125m --rounds 7 --sides {MANY}", TINY),
    "several-1.5b": (f"{EAGER} --models gpt1.5b --rounds 5 --sides {MANY}", TINY),
}
STAGES = ONE | ACROSS
BEGAN = time.monotonic()
FAKES, DRY = (os.environ.get(name) == "1" for name in ("REHEARSE", "DRY"))
GPUS, HOSTS = (int(os.environ.get(name) or 1) for name in ("GPUS", "HOSTS"))
LIMIT = int(os.environ.get("LIMIT") or (1800 if GPUS > 1 else 530))
LIMIT -= int(os.environ.get("SPENT", 0))  # in on_gpu.sh
STATE = Path(os.environ.get("STATE", "build/on_gpu"))
COMMIT = subprocess.getoutput("git rev-parse HEAD 2>/dev/null || echo unknown")


def command(name: str) -> list[str]:
    """Return the commands of a stage. Each of several hosts' stages has its own ports of HEAD."""
    run, fakes = STAGES[name]
    if run.startswith("test"):
        file, _, which = run.partition(" ")
        which = fakes if FAKES else f"({which}) and not stand-in"
        options = ["-q", "-rs", "-p", "no:cacheprovider", "--whole"]
        options.append(f"--junitxml={STATE / name}.xml")
        return [sys.executable, "-m", "pytest", *options, f"tests/gpu/{file}", "-k", which]
    found = [sys.executable, "-m", "benchmarks.gpu", "--out", f"{STATE / f'gpu-{name}.json'}"]
    found += run.split()
    if name in ACROSS:
        found += ["zshard-hybrid"] if HOSTS > 1 and "--sides" in run else []
        found += ["--gpus", str(GPUS), "--hosts", str(HOSTS)]
        port = 29500 + 20 * list(ACROSS).index(name)
        found += ["--head", f"{os.environ.get('HEAD')}:{port}"] if HOSTS > 1 else []
    if FAKES:
        found = [sys.executable, "tests/lib/stand_ins.py", *found, *fakes.split()]
    return found


def has_passed(name: str) -> bool:
    path = STATE / f"{name}.status"
    status, _, *rest = path.read_text().split() if path.exists() else ["none", ""]
    return [status, *rest] == ["0", COMMIT, str(int(FAKES))]


def step(name: str) -> None:
    """Run a stage for the rest of LIMIT. SIGINT makes pytest and the benchmarks write their results
    so far, and end their ranks."""
    begin, left = time.monotonic(), LIMIT - int(time.monotonic() - BEGAN)
    print(f"== {name}: {' '.join(command(name))} ({left}s left)", flush=True)
    if DRY:
        return
    if left < 10:
        print(f"== {name}: not begun, no time is left", flush=True)
        return
    status, cut = 0, ["timeout", "--signal=INT", "--kill-after=20", str(left), *command(name)]
    if STAGES[name][1] or not FAKES:
        with (STATE / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(cut, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for line in child.stdout or ():
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
            status = child.wait()
    words = f"{status} {time.monotonic() - begin:.0f} {COMMIT} {int(FAKES)}\n"
    (STATE / f"{name}.status").write_text(words)


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in STAGES]:
        raise SystemExit(f"no stage {unknown[0]}; stages: {' '.join(STAGES)}")
    usual = list(ONE) if GPUS < 2 else [*ACROSS, "nccl", "faults", "features"]
    todo = names or (usual if HOSTS == 1 else list(ACROSS))
    for name in todo if not names and not DRY else ():
        if has_passed(name):
            print(f"== {name}: passed before")
            todo = [each for each in todo if each != name]
    side_by_side, running = ThreadPoolExecutor(16), []
    for name in todo:
        if STAGES[name][0].startswith("test") and int(os.environ.get("CORES", 1)) >= 8:
            running.append(side_by_side.submit(step, name))
            continue
        wait(running)
        step(name)
        if not DRY:
            hand_over()
    wait(running)
    if DRY:
        return 0
    hand_over()
    print((STATE / "summary.md").read_text())
    failed = [name for name in todo if not has_passed(name)]
    print(f"== failed: {' '.join(failed)}" if failed else "== nothing failed")
    return int(bool(failed))


def hand_over() -> None:
    """Write the summary and the archive, as the call may be cut off in the next stage."""
    (STATE / "summary.md").write_text(summary(STATE))
    if out := os.environ.get("OUT"):
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "summary.md").write_text(summary(STATE))
        with tarfile.open(Path(out) / "on_gpu.tgz", "w:gz") as archive:
            archive.add(STATE, ".")


CALL = re.compile(r"\b(?:cu[A-Z]\w+|nccl[A-Z]\w+)\b")


def ends_of(folder: Path, name: str) -> tuple[int, int, list[tuple[str, str]]]:
    """Return how much of a stage passed and was skipped, and what failed with which words: by
    STAGE.xml of pytest and gpu-STAGE.json of benchmarks.gpu."""
    passed, skipped, failed = 0, 0, []
    tests, cells = folder / f"{name}.xml", folder / f"gpu-{name}.json"
    for case in ET.parse(tests).getroot().iter("testcase") if tests.exists() else ():
        problems = [*case.iter("failure"), *case.iter("error")]
        was_skipped = case.find("skipped") is not None
        failed += [(case.get("name", ""), p.get("message") or p.text or "") for p in problems]
        skipped += was_skipped
        passed += not problems and not was_skipped
    for record in json.loads(cells.read_text())["results"][1:] if cells.exists() else ():
        failed += [(str(record["cell"]), record["failed"])] if "failed" in record else []
        passed += "failed" not in record
    return passed, skipped, failed


def summary(folder: Path) -> str:
    """Return the stages' results so far, as Markdown."""
    rows = ["| stage | result | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|"]
    failures = ["| stage | what | call | words |\n|---|---|---|---|"]
    for name in STAGES:
        path = folder / f"{name}.status"
        if not path.exists():
            rows.append(f"| {name} | not run | | | | |")
            continue
        status, seconds, _, fakes = path.read_text().split()
        passed, skipped, failed = ends_of(folder, name)
        result = "FAILED" if status != "0" or failed else "passed" if passed else "nothing ran"
        result = "cut off by the time limit" if status in ("124", "130", "137") else result
        result += " (OVER FAKES: says nothing about a GPU)" if fakes == "1" else ""
        rows.append(f"| {name} | {result} | {passed} | {len(failed)} | {skipped} | {seconds} |")
        for what, words in failed:
            call, line = CALL.search(words), " ".join(words.split())[:300].replace("|", "\\|")
            failures.append(f"| {name} | `{what}` | {f'`{call[0]}`' if call else ''} | {line} |")
    device = ""
    for file in sorted(folder.glob("gpu-*.json"))[:1]:
        record = json.loads(file.read_text())
        where = record["machine"]
        device = f"{where['date']}, commit {where['commit']}. {record['results'][0]['sides']}"
    parts = ["# zshard on a GPU\n", f"{device}\n", *rows]
    parts += ["\n## Failures, with the first call that they name\n", *failures]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
