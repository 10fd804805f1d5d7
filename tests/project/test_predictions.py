"""Published runs: which rows are predicted, which are left out and why, what is printed."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from rows import all_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import predictions

ROW = {
    **dict.fromkeys(predictions.COLUMNS, ""),
    **{"id": "lab-001", "software": "torch FSDP2", "model": "Llama 1B", "layers": "4"},
    **{"hidden": "256", "heads": "4", "kv_heads": "2", "ffn": "688", "vocab": "1000", "tied": "no"},
    **{"seq": "128", "micro_batch": "4", "grad_accum": "1", "precision": "bf16"},
    **{"act_ckpt": "none", "compile": "no", "offload": "none", "strategy": "FULL_SHARD"},
    **{"gpu": "H100", "gpu_mem_gb": "80", "n_gpus": "8", "per_node": "8"},
    **{"tokens_per_s_per_gpu": "1000000"},
}


def compared(**changes):
    return predictions.compare([{**ROW, **changes}])


LEFT_OUT = [
    ({"seq": ""}, "not stated: seq"),
    ({"gpu": ""}, "the GPU is not stated"),
    ({"gpu": "TPU v5"}, "no data sheet of TPU v5 80"),
    ({"strategy": "FSDP4 x TP2"}, "splits the model: FSDP4 x TP2"),
    ({"offload": "params to CPU"}, "offload: params to CPU"),
    ({"act_ckpt": ""}, "activation checkpointing: not stated"),
    ({"model": "Llama 1B LoRA r8"}, "trains a part of the parameters"),
    ({"strategy": "pipeline"}, "strategy pipeline"),
    ({"tokens_per_s_per_gpu": ""}, "no speed and no memory was published"),
    ({"n_gpus": "eight"}, "n_gpus is not a number: 'eight'"),
    ({"heads": "0"}, "heads is 0"),
    ({"heads": "3"}, "width is no multiple of heads"),
    ({"kv_heads": "3"}, "Dims(layers=4, width=256, heads=4, kv_heads=3"),
    ({"strategy": "HSDP", "shard_group": "3"}, "all shard groups must have the same size"),
]


def test_rows_left_out_say_why():
    with all_rows() as row:
        for changes, reason in LEFT_OUT:
            with row(str(changes)):
                numbers, ((name, text),) = compared(**changes)
                assert (numbers, name) == ([], "lab-001") and text.startswith(reason)


def test_strategies():
    with all_rows() as row:
        for strategy, group, way in (
            ("HSDP", "4", ("hybrid_shard", 4)),
            ("FSDP2", "8", ("full_shard", 0)),
            ("FULL_SHARD", "2", ("hybrid_shard", 2)),
            ("SHARD_GRAD_OP", "", ("shard_grad_op", 0)),
            ("ZeRO-1", "", ("zero1", 0)),
            ("ZeRO-3", "", ("full_shard", 0)),
            ("DDP (FSDP=0)", "", ("no_shard", 0)),
        ):
            with row(strategy):
                read = predictions.way_of({**ROW, "strategy": strategy, "shard_group": group})
                assert (read.strategy, read.group) == way


def test_speed_seconds_and_memory_are_compared():
    (speed, memory), left = compared(peak_mem_gb="10", software="JAX MaxText")
    assert (speed.what, memory.what, speed.apart, left) == ("speed", "memory", "JAX MaxText", [])
    assert speed.error == speed.predicted / 1000000 - 1
    (time,), _ = compared(tokens_per_s_per_gpu="", step_s="0.5", grad_accum="2")
    assert time.predicted == pytest.approx(2 * 4 * 128 / speed.predicted, rel=0.05)


def test_the_command_prints_the_page_of_a_file(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(ROW))
        writer.writeheader()
        writer.writerows([ROW, {**ROW, "id": "lab-002", "seq": ""}])
    predictions.main(["--runs", str(file)])
    text = capsys.readouterr().out
    assert "1 published training results" in text and "| 1 | not stated: seq |" in text
    file.write_text("id,speed\nx,3\n")
    for name, says in (("runs.csv", "lacks columns:"), ("nowhere.csv", "No such file")):
        with pytest.raises(SystemExit, match=says):
            predictions.main(["--runs", str(tmp_path / name)])
