"""Runs a script's copies, and says how far what they print and save is apart."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.scripts.script import TORCHRUN, Script, edit

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class Side:
    """What one side of a comparison did."""

    folder: Path
    changed: int  # lines
    printed: list[Any]
    seconds: float


@dataclass
class Choices:
    """How to run both sides."""

    transport: str = ""  # zshard's; "": its default
    clips: bool = True  # False: leave clipping out, whose norm DDP rounds differently


def run(script: Script, source: Path, folder: Path, ours: bool, choices: Choices) -> Side:
    """Run a copy of it; return the numbers that rank 0 has printed."""
    skipped = shutil.ignore_patterns(".git")
    shutil.copytree(source / script.source, folder, symlinks=True, ignore=skipped)
    script.prepare(folder)
    edit(folder, script.both)
    if not choices.clips:
        edit(folder, script.clipping)
    changed = edit(folder, script.ours) if ours else 0
    paths = (str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if choices.transport:
        env["ZSHARD_TRANSPORT"] = choices.transport
    began = time.monotonic()
    printed: list[Any] = []
    if script.begins and ours:
        shutil.copytree(begins_of(script, folder.parent / "original"), folder / script.begins)
    for number, flags in enumerate(script.runs):
        if script.begins and ours and number == 0:
            continue
        text = output(script, folder, folder / f"log{number}", flags.split(), env)
        if script.begins and number == 0:
            shutil.copytree(folder / script.begins, begins_of(script, folder))
            continue
        printed += re.findall(script.lines, text, re.MULTILINE)
    return Side(folder, changed, printed, time.monotonic() - began)


def begins_of(script: Script, folder: Path) -> Path:
    """Where a copy is kept of what the original's first run has left."""
    return folder / f"{script.begins}-of-first-run"


def output(
    script: Script, folder: Path, logs: Path, flags: Sequence[str], env: dict[str, str]
) -> str:
    """Run it once; return what rank 0 has printed, or what all have, with a launcher of its own."""
    own = list(script.launcher)
    if script.launcher is TORCHRUN:
        own += ["--redirects=3", f"--log-dir={logs}"]
    done = subprocess.run(
        [sys.executable, *own, *flags],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    errors = "\n".join(path.read_text()[-3000:] for path in sorted(logs.rglob("stderr.log")))
    if done.returncode:
        raise SystemExit(f"{script.name} failed in {folder}:\n{errors or done.stderr[-4000:]}")
    return "\n".join([done.stdout, *(path.read_text() for path in logs.rglob("0/stdout.log"))])


def near(theirs: Any, mine: Any, tolerance: float) -> bool:
    """Numbers are compared as such: the sharded norm is summed in another order."""
    pairs = zip(numbers(theirs), numbers(mine), strict=True)
    return all(
        abs(a - b) <= tolerance * max(1.0, abs(a)) if isinstance(a, float) else a == b
        for a, b in pairs
    )


def numbers(printed: Any) -> list[Any]:
    texts = [printed] if isinstance(printed, str) else printed
    return [float(t) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", t) else t for t in texts if t]


def difference_of(theirs: Side, mine: Side, script: Script) -> tuple[float, int]:
    """The largest difference between the tensors of the files that both have saved; how many."""
    apart, count = 0.0, 0
    if not script.saved:
        return apart, count
    files = [sorted(side.folder.glob(script.saved)) for side in (theirs, mine)]
    for a, b in zip(*files, strict=True):
        pairs = zip(tensors_of(a), tensors_of(b), strict=True)
        for (name, x), (our_name, y) in pairs:
            if name != our_name:
                raise SystemExit(f"{a.name}: {name!r} is saved where zshard saves {our_name!r}")
            apart = max(apart, float((x.double() - y.double()).abs().max()))
            count += 1
    return apart, count


def tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a file, in the order of their names."""
    main = sys.modules["__main__"].__dict__
    main.setdefault("GPTConfig", type("GPTConfig", (), {}))  # a class that build-nanogpt saves
    yield from sorted(walk("", torch.load(path, weights_only=False)), key=lambda pair: pair[0])


def walk(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name.replace("module.", ""), value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from walk(f"{name}.{key}" if name else str(key), each)
