"""The examples: corpus, model and reports separately, then full runs as a user starts them."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compare import assert_same

import zshard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # the examples import each other by plain names, as scripts do


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small library: 64 files of text, and some to skip."""
    for index in range(64):
        (tmp_path / f"module_{index}.py").write_text(f"number = {index}\n" * 20)
    for name in ("test/test_x.py", "package/tests/test_y.py", "encodings/table.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("skipped = True\n")
    (tmp_path / "_sysconfigdata_here.py").write_text("skipped = True\n")
    return tmp_path


# --- corpus ---------------------------------------------------------------------------------------


def test_corpus_is_split_by_file(tree: Path) -> None:
    corpus = example("corpus")
    names = corpus.source_files(tree)
    assert len(names) == 64
    for side, text in zip((False, True), corpus.load(tree), strict=True):
        files = bytes(text.tolist()).split(corpus.FILE_END)
        expected = [(tree / n).read_bytes() for n in names if corpus.is_held_out(n) == side]
        assert files == expected


def test_train_batches_depend_on_seed_and_rank() -> None:
    corpus = example("corpus")
    text = torch.arange(256, dtype=torch.uint8).repeat(8)

    def batch(seed: int, rank: int, skip: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        batches = corpus.train_batches(text, 4, 32, seed=seed, rank=rank)
        for _ in range(skip):
            next(batches)
        return next(batches)

    inputs, targets = batch(0, 0)
    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert_same(targets[:, :-1], inputs[:, 1:], "what follows each byte")
    assert_same(targets, (inputs + 1) % 256, "the targets")
    assert_same(batch(0, 0)[0], inputs, "the same batch")
    for other in (batch(0, 1), batch(1, 0), batch(0, 0, skip=1)):
        assert not torch.equal(inputs, other[0])
    with pytest.raises(corpus.CorpusError, match="too short"):
        next(corpus.train_batches(text, 4, text.numel(), seed=0, rank=0))


# --- model ----------------------------------------------------------------------------------------


def test_model_is_causal_and_starts_flat() -> None:
    gpt = example("gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.SIZES["tiny"])
    tokens = torch.randint(256, (2, 64))
    changed = tokens.clone()
    changed[:, 40:] = 7
    logits, other = model(tokens), model(changed)
    assert_same(other[:, :40], logits[:, :40], "what is before the change")
    assert not torch.equal(logits[:, 40:], other[:, 40:])
    assert model(tokens, tokens).item() == pytest.approx(math.log(256), abs=0.2)
    with pytest.raises(ValueError, match="context of 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))


# --- the training script's parts ------------------------------------------------------------------


def test_invalid_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in (
        ("--library ddp --strategy full_shard", "with ddp: choose no_shard"),
        ("--library fsdp2 --transport shm", "--transport requires --library zshard"),
        ("--batch 0", "--batch must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            example("train_gpt").parse(flags.split())
        assert text in capsys.readouterr().err


# --- whole runs -----------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """The children import the zshard that is tested here, built in place or elsewhere."""
    paths = [str(Path(zshard.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def numbers_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.thorough
@pytest.mark.slow
def test_demo_ends_with_a_table_a_plot_and_bit_identical_losses(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--quick", "--out", str(tmp_path)]
    command += ["--libraries", "zshard", "ddp", "fsdp2"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.rindex("===") :]
    ours, *others = (numbers_of(tmp_path / library) for library in command[-3:])
    for numbers in (ours, *others):
        compared = numbers["compared"]
        assert f"{compared['held_out']:.4f}" in table
        assert len(compared["peak_memory_mib"]) == numbers["ranks"] == 2
        assert min(compared["peak_memory_mib"]) > 50 and compared["tokens_per_second"] > 0
    assert "PASS: zshard's held-out loss is" in done.stdout and "`make bench`" in table
    assert done.stdout.count("corpus:") == 1  # said by the first run only
    assert "\nclass " in done.stdout and "\ndef " in done.stdout  # a text of each rank
    if importlib.util.find_spec("matplotlib"):
        assert f"plot: {tmp_path / 'demo.png'}" in table and (tmp_path / "demo.png").exists()
    steps = ours["compared"]["steps"]
    assert (ours["config"]["strategy"], steps, len(ours["loss"])) == ("full_shard", 5, 8)
    for theirs in others:
        assert theirs["compared"]["steps"] == steps
        assert ours["loss"][:steps] == theirs["loss"]
        assert ours["held_out"][0] == theirs["held_out"][0]
    assert ours["held_out"][-1][1] < ours["loss"][0] - 0.2


@pytest.mark.thorough
@pytest.mark.slow
def test_train_gpt_without_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--out", str(tmp_path)]
    command += ["--size", "tiny", "--batch", "2", "--steps", "10", "--warmup", "2"]
    command += ["--eval-every", "4", "--eval-sequences", "3", "--sample", "8"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = numbers_of(tmp_path)
    assert numbers["ranks"] == 1
    assert len(numbers["loss"]) == 10
    assert [step for step, _ in numbers["held_out"]] == [4, 8, 10]
    assert numbers["loss"][-1] < numbers["loss"][0] - 0.2
    assert numbers["samples"][0].startswith("class ")


@pytest.mark.thorough
@pytest.mark.slow
def test_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    demo = example("demo")
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path)]
    command += ["--libraries", "ddp"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("corpus:"):
            assert line, "the demo ended before it trained"
        started = list(demo.descendants(process.pid))
        assert len(started) >= 3  # torchrun and its two ranks
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    alive = [pid for pid in started if is_running(pid)]
    assert not alive


def is_running(pid: int) -> bool:
    """A process that ended and awaits its parent's wait() counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
