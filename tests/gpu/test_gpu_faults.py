"""Failures on GPUs: calls of CUDA's driver and of NCCL that fail, ranks that diverge.

Each is an exception on every rank, soon. The log of a good run says which calls there are and how
often; then each is made to fail on one rank of two, the first, a middle and the last time. That rank's
exception names the call, and the other rank raises too. Only calls that free or query something may
fail silently, and then the numbers are unchanged.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import gpu_log
import pytest
import torch
from gpus import FAKE, on_device, on_fakes, run_fresh
from torch import nn

import zshard
from zshard import FSDP

STEPS = 3
SECONDS = 20.0  # for an exception to come, on a machine that is busy
QUIET = {"cuMemFree", "cuMemFreeHost", "cuEventDestroy", "cuLibraryUnload", "cuStreamIsCapturing"}
QUIET |= {"CommAbort", "CommDestroy", "CommFinalize"}
# The monitor's question, and what its thread does before: it then thinks that the work has ended. Of
# the script's own thread the second sets a context as well, and a failure there is noticed.
QUIET |= {"cuEventQuery", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"}
POLLED = {"cuCtxGetCurrent", "CommGetAsyncError", "cuEventQuery"}  # as often as there is time
NOT_CALLS = {"step", "end", "torch", "transfer", "config", "cuLaunchHostFunc", "GetLastError"}
# The word in an exception in place of the call's name.
WORDS = {"cuLaunchKernel": "zs_", "cuLibraryGetKernel": "zs_", "CommGetAsyncError": "nccl"}
WORDS |= {"cuInit": "cannot initialize", "cuDeviceGetCount": "cannot initialize"}


def work():
    """Losses of a few steps with units, clipping and AdamW."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2)]
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    model = FSDP(nn.Sequential(*layers), auto_wrap_policy=policy, **OPTIONS)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + int(os.environ["RANK"]))
        loss = model(torch.randn(4, 24)).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    gpu_log.mark("end")  # what follows gives memory back
    return losses


def run_without_failures(folder):
    """The losses, and how often each call was made."""
    with gpu_log.written(folder) as log:
        losses = work()
    names = [name for name, _ in gpu_log.read(log)]
    return losses, Counter(each for each in names[: names.index("end")] if each not in NOT_CALLS)


def run_with_failure(fault):
    """The end of a run on this rank, if rank 0 has the fault: its losses, or an exception's name
    and text; the seconds."""
    if os.environ["RANK"] == "0":
        os.environ.update(fault)
    start = time.monotonic()
    try:
        return "", work(), time.monotonic() - start
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


KINDS = ("PeerError", "CudaError", "NcclError", "MemoryError", "DivergenceError")
# A rank without memory for a gather raises before it queues it, and meets the others at the end of its
# forward, so that all may catch it and continue. A host that waits for its GPU meanwhile waits for the timeout.
KINDS += ("PeerTimeoutError",)
OPTIONS = {"transport": "c10d", "timeout": SECONDS / 2}


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    """Losses of both ranks, and rank 0's calls, of a run where nothing fails."""
    ranks = on_fakes(run_without_failures, 2, str(tmp_path_factory.mktemp("well")))
    return [losses for losses, _ in ranks], ranks[0][1]


def words_for(call):
    """The word for it in an exception. Not computed on import: ranks have to look for a driver
    later."""
    if call == "cuLibraryLoadData" and not zshard._core.machine()["targets"]:
        return "built without CUDA kernels"
    return WORDS.get(call, call)


def problem_with(well, call, which):
    """The fault if the `which`-th `call` fails on rank 0; "" if there is none."""
    losses, _ = well
    kind = "CUDA" if call.startswith("cu") else "NCCL"
    fault = {f"FAKE_{kind}_FAIL": f"{call}:{which}"}
    results = run_fresh("stand-in", 2, "nccl", run_with_failure, fault, check=False)
    case = f"{call}, number {which}"
    failed = [result.stderr for result in results if result.returncode != 0]
    if failed and all("the parameters are out of step" in words for words in failed):
        return ""  # it was in rank 0's last step, which rank 1 has made: the last to end says so
    if failed:
        return f"{case}: {results}"
    (kind, words, seconds), other = results[0].value, results[1].value
    well_enough = ["", losses[1]]  # the other rank may need nothing any more
    if kind == "":
        quiet = call in QUIET | POLLED and words == losses[0] and [*other[:2]] == well_enough
        return "" if quiet else f"{case}: nobody noticed; {results}"
    if kind not in ("CudaError", "NcclError", "MemoryError") or (
        call not in words and words_for(call) not in words
    ):
        return f"{case}: {kind}: {words}"
    if [*other[:2]] != well_enough and other[0] not in KINDS:
        return f"{case}, on the other rank: {other}"
    return "" if max(seconds, other[2]) < SECONDS else f"{case}: {seconds} s, {other[2]} s"


def places(count):
    """The first, a middle and the last of so many."""
    return sorted({1, (count + 1) // 2, count})


# Of each kind of call one, in the middle of a run: launches, copies, events, waits; NCCL's.
SOME = ["cuLaunchKernel", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuMemAlloc"]
SOME += ["AllGather", "Send", "GroupEnd", "CommInitRankConfig", "CommGetAsyncError"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", SOME)
def test_failing_call_raises_on_all_ranks(well, call):
    among = places(well[1][call])
    assert problem_with(well, call, among[0 if call in POLLED else len(among) // 2]) == ""


def test_a_bucket_without_memory_raises_on_all_ranks(well):
    """The tenth allocation is a bucket's, when a backward begins to fill it."""
    assert problem_with(well, "cuMemAlloc", 10) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(8))
def test_every_failing_call_raises_on_all_ranks(well, part):
    cases = [(call, n) for call in sorted(well[1]) for n in places(well[1][call])]
    problems = [problem_with(well, *case) for case in cases[part::8]]
    assert [problem for problem in problems if problem] == []


# --- ranks that diverge -----------------------------------------------------------------------------

BYTES = r"\(\d+ bytes per rank\)"


class Reordered(nn.Module):
    """Rank 1 may run its layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, turned):
        if turned and os.environ["RANK"] == "1":
            return self.third(self.first(self.second(x)))
        return self.third(self.second(self.first(x)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("step", [0, 2])
@on_device(0, "nccl", fresh=True, kinds=FAKE)
def test_divergence_names_the_first_transfer(step, world):
    """Over c10d, and NCCL in any order, this is no error (test_gpu_uneven.py)."""
    policy = zshard.wrap.ModuleWrapPolicy({nn.Linear})
    model = FSDP(Reordered(), auto_wrap_policy=policy, timeout=30, transport="c10d")
    number = "1" if step == 0 else r"\d+"
    words = rf"ranks diverged: transfer {number} is parameters of unit 'first' {BYTES} on rank 0, "
    words += rf"but parameters of unit 'second' {BYTES} on rank 1; run the same modules"
    with pytest.raises(zshard.DivergenceError, match=words):
        for i in range(step + 1):
            loss = model(torch.ones(2, 8), i == step).square().mean()
            loss.backward()
            model.zero_grad()
    assert i == step
