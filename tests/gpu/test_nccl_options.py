"""zshard.NcclOptions: valid values, what reaches NCCL, and that numbers stay bit-identical.

The fake libnccl logs each communicator's configuration and transfers. Invalid options, and options that
differ between ranks, are errors before a communicator is made.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile

import gpu_log
import pytest
import torch
from gpus import on_fakes
from rows import all_refused, all_rows
from torch import nn

import zshard
from zshard import FSDP, NcclOptions

UNSET = -(2**31)


def train(folder, options):
    """Losses of two steps, and the log; or how that ended."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    transport = options[rank] if isinstance(options, list) else options
    try:
        with gpu_log.written(folder) as log:
            policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
            layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
            model = FSDP(layers, auto_wrap_policy=policy, transport=transport)
            losses = []
            for step in range(2):
                torch.manual_seed(10 * step + rank)
                loss = model(torch.randn(4, 16)).square().mean()
                loss.backward()
                losses.append(loss.item())
        return losses, gpu_log.read(log)
    except Exception as error:
        return type(error).__name__, str(error)


def run(folder, options, **env):
    env = {"FAKE_CUDA_MULTIPROCESSORS": "132", **env}  # those of an H200
    return on_fakes(train, 2, tempfile.mkdtemp(dir=folder), options, **env)


INVALID = [{"ctas": value} for value in ("none", 1, "zero")]
INVALID += [{"max_ctas": 65}, {"max_ctas": True}, {"min_ctas": 9, "max_ctas": 8}]
INVALID += [{"min_ctas": 0}, {"min_ctas": 1.5}, {"any_order": 1}]
INVALID += [{"communicators": value} for value in (0, 3, True)]


def test_invalid_options_are_refused():
    calls = {str(wrong): functools.partial(NcclOptions, **wrong) for wrong in INVALID}
    names = [next(iter(wrong)) for wrong in INVALID]
    pairs = zip(calls.items(), names, strict=True)
    all_refused({row: (call, ValueError, name) for (row, call), name in pairs})


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
    """Each communicator's policy, and its least and most CTAs."""
    found = [fields for name, fields in lines if name == "config"]
    return [tuple(int(f[key]) for key in ("policy", "min", "max")) for f in found]


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


REFUSED = {  # Else two of them could wait for each other forever, each holding a full GPU.
    "too many": (NcclOptions(max_ctas=64), {}, "132 multiprocessors.*use at most 32"),
    "a small GPU": (
        NcclOptions(min_ctas=8),
        {"FAKE_CUDA_MULTIPROCESSORS": "20"},
        "20 multiprocessors.*use at most 4",
    ),
    "an old library": (
        NcclOptions(ctas="efficiency"),
        {"FAKE_NCCL_VERSION": "22605"},
        r"'efficiency' \(needs 2.27 or newer\)",
    ),
    "communicators": ([NcclOptions(), NcclOptions(communicators=1)], {}, "NcclOptions"),
    "any order": ([NcclOptions(), NcclOptions(any_order=True)], {}, "NcclOptions"),
    "most": ([NcclOptions(max_ctas=8), NcclOptions(max_ctas=4)], {}, "NcclOptions"),
    "a policy": ([NcclOptions(ctas="efficiency"), NcclOptions()], {}, "NcclOptions"),
}


def test_options_are_refused_that_do_not_fit_the_gpu_or_differ_between_ranks(tmp_path):
    with all_rows() as row:
        for name, (options, env, words) in REFUSED.items():
            with row(name):
                kinds = {"an old library": "NotImplementedError"}
                kind = "DivergenceError" if isinstance(options, list) else "ValueError"
                for error, text in run(tmp_path, options, **env):
                    assert error == kinds.get(name, kind), text
                    assert re.search(words, text, re.DOTALL), text
