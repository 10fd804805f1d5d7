"""Other people's training scripts, with one line changed: the import of DDP.

    python -m benchmarks.scripts --nanogpt DIR --build-nanogpt DIR

DIR: a clone of karpathy/nanoGPT or karpathy/build-nanogpt (neither is part of zshard). Each script
runs twice on two CPU ranks: with DDP, and with zshard's full_shard. On rank 0 alone they evaluate,
sample and save the model and the optimizer. What they print and save is compared. As both expect
GPUs, lines about devices are replaced on both sides alike, and sizes are made small.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP"
ZSHARD = "from zshard import FSDP as DDP"
ROOT = Path(__file__).resolve().parent.parent

Replacements = Mapping[str, str]
"""Pattern -> what it becomes; each must be found."""


@dataclass(frozen=True)
class Script:
    """How to run a script on two CPU ranks, and what to compare."""

    name: str
    file: str
    flags: Sequence[str]
    replacements: Replacements
    prepare: Callable[[Path], None]
    lines: str  # pattern of the printed lines to compare, with their numbers in groups
    checkpoint: str  # pattern of the files that it saves
    tolerance: float  # of what they hold: Adam's first steps may turn round with the last bit


def make_tokens(path: Path, count: int, vocabulary: int) -> None:
    """Text with some structure, so that there is something to learn."""
    draw = np.random.default_rng(len(path.name))
    tokens = draw.integers(0, vocabulary, count)
    tokens[1::2] = (tokens[::2][: len(tokens[1::2])] * 7 + 1) % vocabulary
    if path.suffix == ".npy":
        np.save(path, tokens.astype(np.uint16))
    else:
        tokens.astype(np.uint16).tofile(path)


def prepare_nanogpt(folder: Path) -> None:
    data = folder / "data" / "made"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        make_tokens(data / f"{split}.bin", 20_000, 256)


TIKTOKEN = """
class Encoding:
    def encode(self, text):
        return list(text.encode())
    def decode(self, tokens):
        return bytes(t % 128 for t in tokens).decode()

def get_encoding(name):
    return Encoding()
"""


def prepare_build_nanogpt(folder: Path) -> None:
    """Its tokenizer, data and questions come from the network: here, bytes and made ones."""
    data = folder / "edu_fineweb10B"
    data.mkdir()
    for split in ("train", "val"):
        make_tokens(data / f"made_{split}_000000.npy", 20_000, 256)
    (folder / "tiktoken.py").write_text(TIKTOKEN)
    (folder / "requests.py").write_text("")
    (folder / "transformers.py").write_text("class GPT2LMHeadModel:\n    pass\n")
    questions = folder / "hellaswag"
    questions.mkdir()
    endings = ["one end", "another end", "a third one", "the last"]
    rows = [{"ctx": "a" * (i + 3), "label": i % 4, "endings": endings} for i in range(5)]
    text = "\n".join(map(json.dumps, rows))
    (questions / "hellaswag_val.jsonl").write_text(text + "\n")


ON_CPU = {
    r"device = f'cuda:\{ddp_local_rank\}'": "device = 'cpu'",
    r"torch\.cuda\.set_device\(device\)": "pass",
    r"device_ids=\[ddp_local_rank\]": "device_ids=None",
}
NANOGPT = Script(
    "nanoGPT",
    "train.py",
    (
        *("--backend=gloo", "--compile=False", "--dtype=float32", "--dataset=made"),
        *("--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--batch_size=4"),
        *("--gradient_accumulation_steps=4", "--dropout=0.0", "--warmup_iters=2"),
        *("--eval_iters=3", "--eval_interval=4", "--log_interval=1", "--max_iters=12"),
        *("--always_save_checkpoint=True", "--learning_rate=1e-3"),
    ),
    ON_CPU,
    prepare_nanogpt,
    r"^(?:iter|step) (\d+): .*?loss (\d+\.\d+)(?:, val loss (\d+\.\d+))?",
    "out/ckpt.pt",
    1e-4,
)
BUILD_NANOGPT = Script(
    "build-nanogpt",
    "train_gpt2.py",
    (),
    {
        **ON_CPU,
        r"assert torch\.cuda\.is_available\(\).*": "pass",
        r"backend='nccl'": "backend='gloo'",
        r"ReduceOp\.AVG": "ReduceOp.SUM",
        r"total_batch_size = 524288": "total_batch_size = 1024",
        r"B = 64 ": "B = 4 ",
        r"T = 1024 ": "T = 64 ",
        r"GPTConfig\(vocab_size=50304\)": "GPTConfig(256, 256, 4, 4, 128)",
        r"max_steps = 19073": "max_steps = 9",
        r"warmup_steps = 715": "warmup_steps = 2",
        r"step % 250": "step % 3",
        r"step % 5000": "step % 3",
    },
    prepare_build_nanogpt,
    r"^(?:step +(\d+) \| loss: (\d+\.\d+)|validation loss: (\d+\.\d+)|HellaSwag accuracy: (\S+))",
    "log/model_*.pt",
    5e-3,  # it computes in bf16
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run training scripts with one line changed.")
    parser.add_argument("--nanogpt", type=Path, help="a clone of karpathy/nanoGPT")
    parser.add_argument("--build-nanogpt", type=Path, help="a clone of karpathy/build-nanogpt")
    args = parser.parse_args(argv)
    if args.nanogpt is None and args.build_nanogpt is None:
        parser.error("pass the folder of at least one script")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    good = True
    for script, source in ((NANOGPT, args.nanogpt), (BUILD_NANOGPT, args.build_nanogpt)):
        if source is not None:
            good &= compare(script, source)
    sys.exit(0 if good else 1)


def compare(script: Script, source: Path) -> bool:
    """Run the script both ways; print and return whether they agree."""
    with tempfile.TemporaryDirectory() as folder:
        ddp, seconds = run(script, source, Path(folder) / "ddp", DDP)
        ours, our_seconds = run(script, source, Path(folder) / "zshard", ZSHARD)
        apart, count = difference_of(Path(folder), script.checkpoint)
    print(f"\n{script.name}: DDP {seconds:.0f} s, zshard {our_seconds:.0f} s")
    for theirs, mine in zip(ddp, ours, strict=False):
        print(f"  {' '.join(filter(None, theirs)):32} {' '.join(filter(None, mine))}")
    same = len(ddp) == len(ours) and all(map(near, ddp, ours))
    print(f"  printed numbers agree: {same}")
    print(f"  {count} saved tensors, model and optimizer: differ by at most {apart:.1e}")
    return same and count > 0 and apart < script.tolerance


def near(theirs: Sequence[str | None], mine: Sequence[str | None]) -> bool:
    """Losses are printed with four digits; the sharded norm is summed in another order."""

    def value(text: str | None) -> Any:
        return float(text) if text and re.fullmatch(r"[\d.]+", text) else text

    pairs = [(value(a), value(b)) for a, b in zip(theirs, mine, strict=True)]
    return all(abs(a - b) < 2e-4 if isinstance(a, float) else a == b for a, b in pairs)


def run(script: Script, source: Path, folder: Path, line: str) -> tuple[list[Any], float]:
    """Run a copy of it; return the numbers that it has printed, and the seconds it took."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"))
    script.prepare(folder)
    text = (folder / script.file).read_text()
    for pattern, made in {**script.replacements, re.escape(DDP): line}.items():
        text, found = re.subn(pattern, made.replace("\\", r"\\"), text)
        if not found:
            raise SystemExit(f"{script.name} has no {pattern!r}: another version of it?")
    (folder / script.file).write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    done = subprocess.run(
        [*command, script.file, *script.flags],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    if done.returncode:
        raise SystemExit(f"{script.name} failed with {line!r}:\n{done.stderr[-4000:]}")
    found_lines = re.findall(script.lines, done.stdout, re.MULTILINE)
    return found_lines, time.monotonic() - began


def difference_of(folder: Path, pattern: str) -> tuple[float, int]:
    """The largest difference between the tensors of the files that both have saved; how many."""
    apart, count = 0.0, 0
    for theirs in sorted((folder / "ddp").glob(pattern)):
        mine = folder / "zshard" / theirs.relative_to(folder / "ddp")
        pairs = zip(tensors_of(theirs), tensors_of(mine), strict=True)
        for a, b in pairs:
            apart = max(apart, float((a.double() - b.double()).abs().max()))
            count += 1
    return apart, count


def tensors_of(path: Path) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for each in value.values():
                walk(each)

    sys.modules["__main__"].__dict__.setdefault("GPTConfig", type("GPTConfig", (), {}))
    walk(torch.load(path, weights_only=False))
    return found


if __name__ == "__main__":
    main()
