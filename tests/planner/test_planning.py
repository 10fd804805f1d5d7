"""zshard.plan() and its command: ways that fit, recommendations, and refusals."""

from __future__ import annotations

import functools
import json
import sys

import pytest
import torch
from rows import all_refused, all_rows
from torch import nn

import zshard
from zshard import MixedPrecision
from zshard.__main__ import main
from zshard.extras.planner import workloads
from zshard.extras.planner.decoder import decoder_of
from zshard.extras.planner.gpus import DEVICES, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.search import GAP
from zshard.extras.planner.ways import Cluster, Way

# Tests share these models: a trace takes a quarter of a second, and is made once.
DIMS = zshard.Dims(layers=4, width=256, heads=4, kv_heads=4, ffn=1024, vocab=1000, seq=128)
LARGE = zshard.Dims(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=4096)


def predicted(dims, gpus, strategy, nic=3200, **way):
    """Return the prediction of one way on H100s, without a search."""
    cluster = Cluster(DEVICES["h100"], gpus, Network(450, nic, min(gpus, 8)), "nccl")
    return predict(workloads.workload_of(dims), Way(strategy, **way), cluster)


def test_the_recommended_way_is_the_fastest_that_fits():
    plan = zshard.plan(LARGE, 16, "a100-80gb", batch=16)
    fitting = [each for each in plan.predictions if plan.fits(each)]
    assert plan.best in fitting
    assert len(fitting) < len(plan.predictions)
    assert plan.best.tokens_per_s >= 0.99 * max(each.tokens_per_s for each in fitting)
    assert all(GAP * each.memory["total"] <= plan.limit for each in fitting)
    assert "recommended" in str(plan) and "does not fit" in str(plan)


def test_a_decoder_is_predicted_as_if_all_its_blocks_were_traced(monkeypatch):
    dims = DIMS._replace(layers=5, vocab=20000)  # embedding and head are units
    found = []
    for traced in (3, 5):
        monkeypatch.setattr(workloads, "STRETCHED", traced)  # of 5: the second traces all
        each = predicted(dims, 4, "shard_grad_op")
        found.append((each.memory, each.seconds))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1])


def test_sharding_takes_less_memory_with_more_gpus():
    def states(gpus, strategy):
        memory = predicted(LARGE, gpus, strategy).memory
        return memory["shards"] + memory["optimizer"]

    assert states(8, "full_shard") == pytest.approx(states(16, "full_shard") * 2, rel=0.01)
    assert states(8, "no_shard") == states(16, "no_shard")


def test_a_slower_network_exposes_communication():
    fast, slow = (predicted(LARGE, 64, "full_shard", nic) for nic in (3200, 50))
    assert slow.exposed > fast.exposed
    assert slow.tokens_per_s < fast.tokens_per_s
    assert slow.traffic == fast.traffic


def test_wire_bytes_are_three_passes_of_the_parameters():
    each = predicted(LARGE, 8, "full_shard", precision="fp32")
    numel = sum(p.numel() for p in decoder_of(LARGE).parameters())
    # the last unit of the forward stays for the backward
    assert 0.9 * 3 * 4 * numel * 7 / 8 < each.traffic.host <= 3 * 4 * numel * 7 / 8


def test_a_batch_is_split_into_micro_batches():
    plan = zshard.plan(DIMS, 4, "a100-80gb", batch=8, strategies=["full_shard"])
    for each in plan.predictions:
        assert each.way.micro_batch * each.way.accumulate == 2
        assert each.tokens == 2 * DIMS.seq


def test_the_line_is_python():
    torch.manual_seed(0)
    line = zshard.plan(DIMS, 1, "h100", batch=1).line()
    assert 'strategy="no_shard"' in line
    calls = []
    names = {"FSDP": lambda *a, **k: calls.append((a, k)), "MixedPrecision": MixedPrecision}
    eval(line, {**names, "torch": torch, "model": "model"})  # the text that a user would paste
    assert calls == [
        (("model",), {"strategy": "no_shard", "mixed_precision": MixedPrecision(torch.bfloat16)})
    ]


def test_any_module_with_a_step():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 900, 10)
    )

    def step(model, samples):
        return model(torch.zeros(samples, 3, 32, 32)).square().mean()

    plan = zshard.plan(model, 4, "a100-40gb", step=step, batch=64)
    assert plan.unit == "samples"
    assert plan.best.tokens == 16
    assert not model._forward_pre_hooks
    one, many = (
        zshard.plan(model, 4, "a100-40gb", step=step, batch=batch, strategies=["no_shard"])
        for batch in (4, 64)
    )
    assert many.best.memory["activations"] > 8 * one.best.memory["activations"]


def test_a_transformers_config():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100)
    plan = zshard.plan(config, 2, "h100", seq=32, batch=2)
    assert {each.way.checkpointing for each in plan.predictions} == {"", "full"}
    assert plan.best.tokens % 32 == 0


def test_optimizers_with_small_states_take_less():
    for strategy in ("full_shard", "no_shard"):
        usual, small = (
            predicted(LARGE, 8, strategy, optimizer=optimizer).memory["optimizer"]
            for optimizer in ("adamw", "adamw8bit")
        )
        assert small < 0.3 * usual


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y.sum() if y.sum().item() > 0 else y[y > 0].sum()


REFUSED = [
    (ValueError, {"gpu": "h1000"}, "unknown GPU 'h1000': known are v100-16gb"),
    (ValueError, {"gpus": 0}, "gpus must be a positive integer, got 0"),
    (ValueError, {"gpus": True}, "gpus must be a positive integer, got True"),
    (ValueError, {"gpus": None}, "needs gpus= and gpu="),
    (ValueError, {"gpu": None}, "needs gpus= and gpu="),
    (ValueError, {"gpu": 80}, "unknown GPU 80: known are"),
    (ValueError, {"precision": "int8"}, "got 'int8'"),
    (ValueError, {"batch": 9}, "batch=9 is not a multiple of gpus=4"),
    (ValueError, {"batch": 6, "offload": True}, "batch=6 is not a multiple of gpus=4"),
    (ValueError, {"per_host": 3}, "gpus=4 is not a multiple of per_host=3"),
    (ValueError, {"strategies": ["zero9"]}, "zero9"),
    (ValueError, {"optimizer": "lion"}, "unknown optimizer 'lion'"),
    (ValueError, {"optimizer": "muon"}, 'pass optimizer="adamw" here'),
    (ValueError, {"wire": "fp4"}, "wire must be one of 'bf16', None"),
    (NotImplementedError, {"offload": "/tmp"}, "omit directory"),
    (TypeError, {"offload": 3}, "offload must be"),
    (ValueError, {"model": nn.Linear(2, 2)}, "needs step= for a module"),
    (ValueError, {"model": DIMS._replace(layers=0)}, "layers must be a positive integer, got 0"),
    (ValueError, {"model": DIMS._replace(heads=3)}, "width must be a multiple of 2 heads"),
    (ValueError, {"model": DIMS._replace(kv_heads=3)}, "heads of kv_heads"),
    (ValueError, {"model": DIMS._replace(lora=-1)}, "lora must be a rank, or 0"),
    (TypeError, {"model": 3}, "takes a module, zshard.Dims or a config, got 3"),
    (FileNotFoundError, {"model": "nowhere.json"}, "no such config"),
    *[
        (ValueError, {"model": nn.Sequential(model), "step": step, "batch": 4}, text)
        for model, step, text in [
            (Reads(), lambda model, n: model(torch.ones(n, 4)), "reads values of tensors"),
            (nn.Linear(4, 4), lambda model, n: model(torch.ones(n, 4)), "got shape (1, 4)"),
            (nn.Linear(4, 4), lambda model, n: None, "got None"),
            (nn.Linear(4, 4), lambda model, n: torch.ones(()), "got shape ()"),
            (
                nn.Linear(4, 4).requires_grad_(False),
                lambda model, n: model(torch.ones(n, 4)).sum(),
                "a scalar loss with a graph",
            ),
        ]
    ],
]


def test_arguments_that_are_refused():
    pytest.importorskip("transformers")  # which reads configs
    plan = functools.partial(functools.partial, zshard.plan)
    usual = {"model": DIMS, "gpus": 4, "gpu": "h100"}
    all_refused({str(row): (plan(**{**usual, **row[1]}), row[0], row[2]) for row in REFUSED})


DECODER = ("--layers", "4", "--width", "64", "--heads", "2", "--vocab", "100", "--seq", "32")
TWO = ("--gpus", "2", "--gpu", "h100", "--batch", "2")


WORDS = {  # status, output
    (*DECODER, *TWO, "--offload", "params,grads,optimizer", "--wire", "bf16"): (
        0,
        "offload=Offload(grads=True)",
    ),
    (*DECODER, *TWO, "--lora", "4", "--offload", "none"): (0, "0.2 M parameters"),
    (*DECODER, *TWO, "--offload", "disk"): (
        *(2, "--offload takes some of params,grads,optimizer, or none"),
    ),
    (*DECODER, *TWO, "--wire", "fp4"): (2, "wire must be one of 'bf16', None"),
    DECODER: (2, "plan() needs gpus= and gpu="),
    (*DECODER[:4], *TWO): (2, "give either MODEL or all of"),
    (*DECODER, "--gpus", "0", "--gpu", "h100"): (2, "gpus must be a positive integer, got 0"),
}


def test_the_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)  # numbers do not need it
    with all_rows() as row:
        for words, (expected, text) in WORDS.items():
            with row(*words):
                monkeypatch.setattr("sys.argv", ["zshard", "plan", *words])
                status = main()
                out, err = capsys.readouterr()
                assert status == expected and text in (err if status else out)
                assert ("FSDP(model" in out) == (not status) and (not status or out == "")
    monkeypatch.setattr("sys.argv", ["zshard", "plan", *DECODER, *TWO, "--json"])
    assert main() == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["ways"][plan["best"]]["fits"]
    assert {"memory", "seconds", "tokens_per_s_per_gpu"} <= set(plan["ways"][0])


def test_numbers_need_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert "FSDP(model" in str(zshard.plan(DIMS, 1, "h100", batch=1))
    with pytest.raises(TypeError, match=r"config \(pip install transformers\)"):
        zshard.plan("config", 2, "h100")
