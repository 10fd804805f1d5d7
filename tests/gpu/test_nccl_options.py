"""zshard.NcclOptions: what it may be, what reaches NCCL, and that it changes no bit.

The one idea: the stand-in for libnccl logs what a communicator was made with and what it carried;
what it would refuse, and what ranks cannot agree on, are errors before anything is made.
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


def test_what_is_no_option_is_refused():
    for wrong in (
        {"ctas": "none"},
        {"ctas": 1},
        {"min_ctas": 0},
        {"max_ctas": 65},
        {"max_ctas": True},
        {"min_ctas": 1.5},
        {"min_ctas": 9, "max_ctas": 8},
        {"windows": 1},
        {"communicators": 0},
        {"communicators": 3},
        {"communicators": True},
    ):
        (name, *_) = wrong
        with pytest.raises(ValueError, match=name):
            NcclOptions(**wrong)


def test_it_is_for_gpus(monkeypatch):
    monkeypatch.delenv("ZSHARD_CUDA_ON_HOST", raising=False)
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="requires a model on a GPU"):
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


def test_gathers_and_reductions_have_communicators_of_their_own(tmp_path):
    for losses, lines in run(tmp_path, "c10d"):
        gathers, swaps = carried(lines, "AllGather"), carried(lines, "Send")
        assert len(gathers[0]) == len(swaps[0]) == 1 and not gathers[0] & swaps[0]
        assert not gathers[1] & swaps[1], "streams"
        assert configs(lines) == [(UNSET, UNSET, 32)] * 2  # a third of 132, as a power of two
        assert len(losses) == 2


def test_one_communicator_has_the_same_bits(tmp_path):
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
        (NcclOptions(ctas="zero", max_ctas=8), (2, UNSET, 8)),
        (NcclOptions(min_ctas=4), (UNSET, 4, 32)),
        (NcclOptions(min_ctas=4, max_ctas=4), (UNSET, 4, 4)),
    ],
)
def test_what_reaches_the_library(tmp_path, options, expected):
    for _, lines in run(tmp_path, options):
        assert configs(lines) == [expected] * 2


def test_kernels_of_three_streams_have_to_find_room(tmp_path):
    """Else two of them could wait for each other for ever, each with all that its GPU has."""
    for kind, words in run(tmp_path, NcclOptions(max_ctas=64)):
        assert kind == "ValueError" and "132 multiprocessors" in words and "use at most 32" in words
    for kind, words in run(tmp_path, NcclOptions(min_ctas=8), FAKE_CUDA_MULTIPROCESSORS="20"):
        assert kind == "ValueError" and "20 multiprocessors" in words and "use at most 4" in words


@pytest.mark.parametrize(
    ("ctas", "version", "since"), [("efficiency", "22605", "2.27"), ("zero", "22707", "2.28")]
)
def test_a_library_that_is_too_old(tmp_path, ctas, version, since):
    for kind, words in run(tmp_path, NcclOptions(ctas=ctas), FAKE_NCCL_VERSION=version):
        assert kind == "NotImplementedError" and repr(ctas) in words and since in words


def test_ranks_that_want_different_things(tmp_path):
    pairs = [
        [NcclOptions(), NcclOptions(communicators=1)],
        [NcclOptions(max_ctas=8), NcclOptions(max_ctas=4)],
        [NcclOptions(ctas="efficiency"), NcclOptions()],
        [NcclOptions(windows=True), NcclOptions()],
    ]
    for pair in pairs:
        for kind, words in run(tmp_path, pair):
            assert kind == "DivergenceError" and "NcclOptions" in words


# --- windows --------------------------------------------------------------------------------------


def windows(lines):
    """By communicator, the memory that is registered there."""
    found = {}
    for name, fields in lines:
        if name == "window":
            first = int(fields["at"], 16)
            found.setdefault(fields["comm"], []).append((first, first + int(fields["bytes"])))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("communicators", [1, 2])
def test_all_that_moves_lies_in_windows(tmp_path, strategy, communicators):
    plain = run(tmp_path, NcclOptions(), ZS_TEST_STRATEGY=strategy)
    options = NcclOptions(windows=True, communicators=communicators)
    for (losses, lines), (others, _) in zip(
        run(tmp_path, options, ZS_TEST_STRATEGY=strategy), plain, strict=True
    ):
        assert losses == others
        registered, moved = windows(lines), 0
        for name, fields in lines:
            if name != "transfer" or fields["call"] == "Broadcast":
                continue
            moved += 1
            first = int(fields.get("src") or fields["dst"], 16)
            last = first + int(fields["bytes"])
            here = registered[fields["comm"]]
            assert any(low <= first and last <= high for low, high in here), fields
        assert moved > 0
        assert gpu_log.races(lines) == []


def test_a_library_without_windows(tmp_path):
    old = stand_ins.nccl_library(old=True)
    for kind, words in run(tmp_path, NcclOptions(windows=True), ZSHARD_NCCL_LIB=str(old)):
        assert (
            kind == "NotImplementedError"
            and "does not support windows" in words
            and "2.27" in words
        )


def make_twice(folder, env, late):
    """How many windows there were after each of three models; a rank that is `late` keeps the first
    model while the second one is made."""
    rank = int(os.environ["RANK"])
    os.environ.update(env)
    log = Path(gpu_log.start(folder, rank))
    counts, kept = [], []
    for turn in range(3):
        torch.manual_seed(5)
        model = FSDP(nn.Linear(16, 16), transport=NcclOptions(windows=True))
        model(torch.randn(4, 16)).sum().backward()
        counts.append(sum(map(len, windows(gpu_log.read(log)).values())))
        kept = [model] if late and rank == 1 and turn == 0 else []
        del model
    return counts, len(kept)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_free_on_all_ranks_is_used_again(tmp_path, late):
    env = {**stand_ins.environment("nccl"), **H200}
    results = fork_ranks(make_twice, 2, str(tmp_path), env, late, check=True)
    counts = {tuple(result.value[0]) for result in results}
    assert len(counts) == 1, "ranks differ"
    (first, second, third) = counts.pop()
    assert third == second, "no more than two models' at a time"
    if not late:
        assert second - first <= 2  # the small blocks' windows are not free before there is another
