"""zshard.NcclOptions: valid values, what reaches NCCL, and that numbers stay bit-identical.

The fake libnccl logs each communicator's configuration and transfers. Invalid options, and options that
differ between ranks, are errors before a communicator is made.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import gpu_log
import pytest
import stand_ins
import torch
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP, NcclOptions

H200 = {"FAKE_CUDA_MULTIPROCESSORS": "132"}
UNSET = -(2**31)


def train(folder, env, options):
    """Losses of two steps, and the log; or how that ended."""
    rank = int(os.environ["RANK"])
    os.environ.update(env)
    log = gpu_log.start(folder, rank)
    torch.manual_seed(5)
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    transport = options[rank] if isinstance(options, list) else options
    try:
        model = FSDP(
            nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)),
            auto_wrap_policy=policy,
            transport=transport,
            strategy=os.environ.get("ZS_TEST_STRATEGY", "full_shard"),
        )
        losses = []
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            losses.append(loss.item())
        return losses, gpu_log.read(Path(log))
    except Exception as error:
        return type(error).__name__, str(error)


def run(folder, options, **env):
    everything = {**stand_ins.environment("nccl"), **H200, **env}
    logs = tempfile.mkdtemp(dir=folder)
    return [r.value for r in fork_ranks(train, 2, logs, everything, options, check=True)]


def test_invalid_options_are_refused():
    for wrong in (
        {"ctas": "none"},
        {"ctas": 1},
        {"ctas": "zero"},
        {"min_ctas": 0},
        {"max_ctas": 65},
        {"max_ctas": True},
        {"min_ctas": 1.5},
        {"min_ctas": 9, "max_ctas": 8},
        {"communicators": 0},
        {"communicators": 3},
        {"communicators": True},
        {"any_order": 1},
    ):
        (name, *_) = wrong
        with pytest.raises(ValueError, match=name):
            NcclOptions(**wrong)


def test_options_need_a_gpu(monkeypatch):
    monkeypatch.delenv("ZSHARD_CUDA_ON_HOST", raising=False)
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="transport of a model on cpu must be one of"):
        FSDP(model, transport=NcclOptions())
    assert type(model) is nn.Linear


def carried(lines, call):
    """The communicators that carried it, and the streams."""
    found = [fields for name, fields in lines if name == "transfer" and fields.get("call") == call]
    return {f["comm"] for f in found}, {f["stream"] for f in found}


def configs(lines):
    return [
        tuple(int(fields[key]) for key in ("policy", "min", "max"))
        for name, fields in lines
        if name == "config"
    ]


def test_gathers_and_reductions_have_separate_communicators(tmp_path):
    for losses, lines in run(tmp_path, "c10d"):
        gathers, swaps = carried(lines, "AllGather"), carried(lines, "Send")
        assert len(gathers[0]) == len(swaps[0]) == 1 and not gathers[0] & swaps[0]
        assert not gathers[1] & swaps[1], "streams"
        assert configs(lines) == [(UNSET, UNSET, 32)] * 2  # a third of 132, as a power of two
        assert len(losses) == 2


def test_one_communicator_is_bit_identical_to_two(tmp_path):
    two = run(tmp_path, NcclOptions())
    one = run(tmp_path, NcclOptions(communicators=1))
    for (losses, lines), (others, _) in zip(one, two, strict=True):
        assert losses == others
        assert carried(lines, "AllGather")[0] == carried(lines, "Send")[0]
        assert len(configs(lines)) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (NcclOptions(ctas="efficiency"), (1, UNSET, 32)),
        (NcclOptions(ctas="efficiency", max_ctas=8), (1, UNSET, 8)),
        (NcclOptions(min_ctas=4), (UNSET, 4, 32)),
        (NcclOptions(min_ctas=4, max_ctas=4), (UNSET, 4, 4)),
    ],
)
def test_options_reach_nccl(tmp_path, options, expected):
    for _, lines in run(tmp_path, options):
        assert configs(lines) == [expected] * 2


def test_too_many_ctas_are_refused(tmp_path):
    """Else two of them could wait for each other forever, each holding a full GPU."""
    for kind, words in run(tmp_path, NcclOptions(max_ctas=64)):
        assert kind == "ValueError" and "132 multiprocessors" in words and "use at most 32" in words
    for kind, words in run(tmp_path, NcclOptions(min_ctas=8), FAKE_CUDA_MULTIPROCESSORS="20"):
        assert kind == "ValueError" and "20 multiprocessors" in words and "use at most 4" in words


def test_option_of_a_newer_library_is_refused(tmp_path):
    for kind, words in run(tmp_path, NcclOptions(ctas="efficiency"), FAKE_NCCL_VERSION="22605"):
        assert kind == "NotImplementedError" and "'efficiency' (needs 2.27 or newer)" in words


def test_options_that_differ_between_ranks_are_refused(tmp_path):
    pairs = [
        [NcclOptions(), NcclOptions(communicators=1)],
        [NcclOptions(), NcclOptions(any_order=True)],
        [NcclOptions(max_ctas=8), NcclOptions(max_ctas=4)],
        [NcclOptions(ctas="efficiency"), NcclOptions()],
    ]
    for pair in pairs:
        for kind, words in run(tmp_path, pair):
            assert kind == "DivergenceError" and "NcclOptions" in words
