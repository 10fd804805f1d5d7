"""What benchmarks/on_gpu.sh has found so far, as Markdown: stages, failed calls, claims.

    python benchmarks/gpu_summary.py build/on_gpu

A claim may be made if its stage ran on a GPU and nothing in it failed. So the summary reads only
what the stages wrote (STAGE.status, STAGE.xml of pytest, gpu-STAGE.json of benchmarks.gpu), and a
rehearsal over fakes allows no claim. It imports neither torch nor zshard.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALL = re.compile(r"\b(?:cu[A-Z]\w+|nccl[A-Z]\w+)\b")
CLAIMS = {
    "peaks": "What the 124 M and the 1.5 B model hold and take at the peak, beside FSDP2.",
    "driver": "The CUDA kernels run on this GPU, with the bits of the CPU's loops.",
    "faults": "Ctrl-C in a backward, caught errors, lack of memory in a backward, killed ranks, a "
    "hanging kernel and failed saves end as on the CPU.",
    "features": "Checkpoints, offload, loss scaling, torch's optimizers, `fully_shard`, whole "
    "parameters, other streams and hybrid groups work as on the CPU.",
    "compiled": "The step time with compiled blocks, beside the same by hand.",
    "host": "Host time per unit.",
    "1.5b": "The step times and memory of the 1.5 B model beside DDP, FSDP2 and by hand.",
    "long": "The step times at sequence 4096.",
    "recomputed": "The step times and memory with activation checkpointing.",
    "saves": "Seconds and GB/s of checkpoints of the 1.5 B model, beside DCP.",
    "offload": "The step time of the 1.5 B model offloaded to the host, beside FSDP2's.",
    "trainer": "Training on one GPU has plain PyTorch's numbers, within the tolerances of "
    "tests/gpu/gpus.py: strategies, mixed precision, accumulation, clipping, checkpointed and "
    "compiled blocks, state dicts.",
    "memory": "Memory is constant from the first step on, and as `memory('predicted')` says.",
    "nccl": "zshard's own NCCL communicators train two and four ranks that share a GPU (over "
    "sockets) with the host's numbers.",
    "wire": "Coded gradients and parameters have the bits of the CPU's codes, on ranks that share "
    "a GPU.",
    "graph": "A captured training step has the bits of the same steps without a graph.",
    "125m": "The step times and memory of the 125 M model, with date and GPU.",
    "rest": "AdamW's rate, the loss curve, losses of ranks on one GPU.",
    "1.5b-small": "The step times and memory of the 1.5 B model with a batch of 1.",
    "1.5b-compiled": "The step times and memory of the 1.5 B model with compiled blocks.",
    "bandwidth": "GB/s of gathers and reductions between GPUs.",
    "killed": "A killed rank is reported by all others.",
    "several": "The step times and memory of the 124 M model on several GPUs.",
    "several-1.5b": "The step times and memory of the 1.5 B model on several GPUs.",
}
"""Stage -> what the README may say once it has passed."""


@dataclass
class Stage:
    name: str
    status: int
    seconds: int
    rehearsed: bool
    passed: int = 0
    skipped: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # what, and in which words

    def holds(self) -> bool:
        """Whether all of it ran and nothing failed."""
        return self.status == 0 and self.passed > 0 and not self.failed


def read_stages(folder: Path) -> list[Stage]:
    """Return the stages that ran, in the order of CLAIMS."""
    found = []
    for name in CLAIMS:
        path = folder / f"{name}.status"
        if path.exists():
            status, seconds, _, rehearsed = path.read_text().split()
            stage = Stage(name, int(status), int(seconds), rehearsed == "1")
            _add_tests(stage, folder / f"{name}.xml")
            _add_cells(stage, folder / f"gpu-{name}.json")
            found.append(stage)
    return found


def _add_tests(stage: Stage, path: Path) -> None:
    if not path.exists():
        return
    for case in ET.parse(path).getroot().iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            words = problems[0].get("message") or problems[0].text or ""
            stage.failed.append((case.get("name", ""), words))
        elif (skip := case.find("skipped")) is not None:
            stage.skipped.append(skip.get("message", ""))
        else:
            stage.passed += 1


def _add_cells(stage: Stage, path: Path) -> None:
    if not path.exists():
        return
    for record in json.loads(path.read_text())["results"]:
        if "failed" in record:
            stage.failed.append((json.dumps(record["cell"]), record["failed"]))
        elif record["part"] != "device":
            stage.passed += 1


def markdown(folder: Path) -> str:
    """Return the summary."""
    stages = read_stages(folder)
    parts = ["# zshard on a GPU\n", *_device(folder)]
    if any(stage.rehearsed for stage in stages):
        parts.append("**REHEARSAL OVER FAKES OF CUDA AND NCCL: says nothing about a GPU.**\n")
    parts += ["## Stages\n", *_table(stages), "", *_failures(stages), *_claims(stages)]
    return "\n".join(parts) + "\n"


def _device(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("gpu-*.json")):
        record = json.loads(path.read_text())
        device: dict[str, Any] = record["results"][0]
        facts = [f"{name}: {device[name]}" for name in device if name not in ("part", "stand_in")]
        where = record["machine"]
        yield f"{where['date']}, commit {where['commit']}. {', '.join(facts)}\n"
        return


def _table(stages: list[Stage]) -> Iterator[str]:
    yield "| stage | result | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|"
    for stage in stages:
        cut = stage.status in (124, 130, 137)
        result = "passed" if stage.holds() else "cut off by the time limit" if cut else "FAILED"
        if stage.status == 0 and stage.passed == 0:
            result = "nothing ran"
        counts = f"{stage.passed} | {len(stage.failed)} | {len(stage.skipped)} | {stage.seconds}"
        yield f"| {stage.name} | {result} | {counts} |"
    for name in CLAIMS:
        if name not in {stage.name for stage in stages}:
            yield f"| {name} | not run | | | | |"


def _failures(stages: list[Stage]) -> Iterator[str]:
    rows = [(stage.name, what, words) for stage in stages for what, words in stage.failed]
    if rows:
        yield "## Failures, with the first call that they name\n"
        yield "| stage | what | call | words |\n|---|---|---|---|"
        for name, what, words in rows:
            call = CALL.search(words)
            line = " ".join(words.split())[:300].replace("|", "\\|")
            yield f"| {name} | `{what}` | {f'`{call[0]}`' if call else ''} | {line} |"
        yield ""
    reasons = sorted({reason for stage in stages for reason in stage.skipped})
    if reasons:
        yield "## Skipped\n"
        yield from (f"- {' '.join(reason.split())[:300]}" for reason in reasons)
        yield ""


def _claims(stages: list[Stage]) -> Iterator[str]:
    yield "## What the README may now say\n"
    held = [stage.name for stage in stages if stage.holds() and not stage.rehearsed]
    yield from (f"- {CLAIMS[name]}" for name in held)
    if not held:
        yield "Nothing new: no stage has passed on a GPU."


if __name__ == "__main__":
    print(markdown(Path(sys.argv[1])), end="")
