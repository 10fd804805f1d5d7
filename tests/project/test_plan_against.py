"""Published runs: which rows are predicted, which are left out and why, what is printed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from rows import all_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import plan_against

ROW = {
    **dict.fromkeys(plan_against.COLUMNS, ""),
    **{"id": "lab-001", "software": "torch FSDP2", "model": "Llama 1B", "layers": "4"},
    **{"hidden": "256", "heads": "4", "kv_heads": "2", "ffn": "688", "vocab": "1000", "tied": "no"},
    **{"seq": "128", "micro_batch": "4", "grad_accum": "1", "precision": "bf16"},
    **{"act_ckpt": "none", "compile": "no", "offload": "none", "strategy": "FULL_SHARD"},
    **{"gpu": "H100", "gpu_mem_gb": "80", "n_gpus": "8", "per_node": "8"},
    **{"tokens_per_s_per_gpu": "1000000"},
}


def compared(**changes):
    return plan_against.compare([{**ROW, **changes}])


def test_a_row_with_speed_and_memory_gives_two_numbers():
    found, left = compared(peak_mem_gb="10")
    assert [each.what for each in found] == ["speed", "memory"]
    assert left == []
    assert found[0].error == found[0].predicted / 1000000 - 1
    assert (found[0].source, found[0].device, found[0].apart) == ("lab", "h100", "")


def test_seconds_count_where_no_rate_was_published():
    (rate,), _ = compared()
    (time,), _ = compared(tokens_per_s_per_gpu="", step_s="0.5", grad_accum="2")
    assert time.unit == "s"
    assert time.predicted == pytest.approx(2 * 4 * 128 / rate.predicted, rel=0.05)


REASONS = [
    ({"seq": ""}, "not stated: seq"),
    ({"micro_batch": "", "layers": ""}, "not stated: layers, micro_batch"),
    ({"gpu": ""}, "the GPU is not stated"),
    ({"gpu": "TPU v5"}, "no data sheet of TPU v5 80"),
    ({"strategy": "FSDP4 x TP2"}, "splits the model: FSDP4 x TP2"),
    ({"offload": "params to CPU"}, "offload: params to CPU"),
    ({"act_ckpt": "5 layers"}, "activation checkpointing: 5 layers"),
    ({"model": "Llama 1B LoRA r8"}, "trains a part of the parameters"),
    ({"strategy": "pipeline"}, "strategy pipeline"),
    ({"tokens_per_s_per_gpu": ""}, "no speed and no memory was published"),
    ({"n_gpus": "eight"}, "n_gpus is not a number: 'eight'"),
    ({"heads": "0"}, "heads is 0"),
    ({"kv_heads": "3"}, "Dims(layers=4, width=256, heads=4, kv_heads=3"),
    ({"strategy": "HSDP", "shard_group": "3"}, "all shard groups must have the same size"),
]
STRATEGIES = [
    ({"strategy": "HSDP", "shard_group": "4"}, ("hybrid_shard", 4)),
    ({"strategy": "FULL_SHARD", "shard_group": "2"}, ("hybrid_shard", 2)),
    ({"strategy": "FSDP2", "shard_group": "8"}, ("full_shard", 0)),
    ({"strategy": "SHARD_GRAD_OP"}, ("shard_grad_op", 0)),
    ({"strategy": "ZeRO-1"}, ("zero1", 0)),
    ({"strategy": "ZeRO-3"}, ("full_shard", 0)),
    ({"strategy": "DDP (FSDP=0)"}, ("no_shard", 0)),
]


def test_strategies_and_rows_left_out() -> None:
    with all_rows() as row:
        for changes, reason in REASONS:
            with row(reason):
                found, (left,) = compared(**changes)
                assert found == [] and left.id == "lab-001" and left.reason.startswith(reason)
        for changes, strategy in STRATEGIES:
            with row(changes):
                way = plan_against.way_of({**ROW, **changes})
                assert (way.strategy, way.group) == strategy


def file_of(tmp_path, rows):
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_the_command_reads_a_file(tmp_path, capsys):
    file = file_of(tmp_path, [ROW, {**ROW, "id": "lab-002", "seq": ""}])
    plan_against.main([str(file)])
    text = capsys.readouterr().out
    assert "1 rows of 1 sources" in text and "| 1 | not stated: seq |" in text
    plan_against.main([str(file), "--json"])
    number, left = json.loads(capsys.readouterr().out)
    assert {"id", "predicted", "published", "what"} <= set(number)
    assert number["id"] == "lab-001" and left == {"id": "lab-002", "reason": "not stated: seq"}


def test_a_file_that_cannot_be_read(tmp_path):
    file = file_of(tmp_path, [{"id": "x", "speed": "3"}])
    for given, says in ((file, "lacks columns:"), (tmp_path / "nowhere.csv", "No such file")):
        with pytest.raises(SystemExit, match=says):
            plan_against.main([str(given)])
