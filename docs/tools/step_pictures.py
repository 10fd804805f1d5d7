"""Pictures of one training step on four ranks, over each transport: run, counted and drawn.

Ranks train a model of one unit over shm, over hosts (two hosts of two ranks, made of this machine)
and over the fakes of CUDA and NCCL. Each reports the memory of its parameter, and the bytes that it
receives: by the kernel's count of its sockets, or the fake NCCL's log. A picture draws what follows
from how many ranks share memory, and fails if the counts are others.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from svg import FAINT, INK, RANKS, WIDTH, Svg
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

import stand_ins
from nursery import fork_ranks

import zshard
from zshard import _core

SIDE = 1024  # of the weight
WORLD = len(RANKS)
TITLES = {
    "shm": "shm: four ranks of one host",
    "hosts": "hosts: two hosts of two ranks",
    "nccl": "NCCL: four GPUs",
}
PHASES = ("gather", "sum", "step")
TCP_RECEIVED = 128  # where struct tcp_info has the bytes received


# --- on ranks -------------------------------------------------------------------------------------


def received_by_sockets() -> int:
    """The bytes that this process has received over its TCP connections so far."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    facts = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", facts, TCP_RECEIVED)[0]
    return total


def received_by_nccl() -> int:
    """The bytes that the fake NCCL has moved to this rank so far; the rank itself and each peer
    have sent the same number."""
    log = Path(os.environ["FAKE_NCCL_LOG"])
    text = log.read_text() if log.exists() else ""
    moved = re.findall(r"^transfer .* dst=\S+ bytes=(\d+)", text, re.M)
    return sum(map(int, moved)) * (WORLD - 1) // WORLD


def memory_of(tensor: torch.Tensor) -> str:
    """The memory file that has the tensor: one name on all ranks that share it; "": private."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, _, _, _, inode, *name = line.split()
        first, last = (int(each, 16) for each in places.split("-"))
        if first <= tensor.data_ptr() < last:
            return inode if name and name[0].startswith("/memfd:") else ""
    return ""


def step_over(transport: str, folder: str) -> dict[str, Any]:
    """This rank's memory, and the bytes that it receives in each phase of its second step."""
    rank = int(os.environ["RANK"])
    if transport == "hosts":
        os.environ["ZSHARD_HOST"] = f"host {rank // 2}"
    if transport == "nccl":
        os.environ["FAKE_NCCL_LOG"] = f"{folder}/{rank}"
    received = received_by_nccl if transport == "nccl" else received_by_sockets

    dist.init_process_group("gloo")
    model = zshard.FSDP(nn.Linear(SIDE, SIDE, bias=False))
    optimizer = zshard.AdamW(model.parameters())
    found: dict[str, Any] = {"shard": zshard.to_local(model.weight).nbytes}
    assert f"transport {transport}" in model.summary()
    found["at rest in"] = memory_of(model.weight)
    model.register_forward_pre_hook(
        lambda module, _: found.update(
            {"full": module.weight.nbytes, "in": memory_of(module.weight)}
        )
    )
    kept: list[Any] = [torch.randn(2, SIDE)]
    acts = {
        "gather": lambda: kept.append(model(kept[0]).sum()),
        "sum": lambda: kept.pop().backward(),
        "step": optimizer.step,
    }
    for _ in range(2):
        for phase, act in acts.items():
            before, passed = received(), _core.bytes_passed()
            dist.barrier()  # no peer sends before the count
            act()
            found[phase], found["passed"] = received() - before, _core.bytes_passed() - passed
        optimizer.zero_grad()
    dist.barrier()
    return found


def steps() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(transport, each rank's report)"""
    for transport in TITLES:
        with tempfile.TemporaryDirectory() as folder:
            env = stand_ins.environment("nccl") if transport == "nccl" else {}
            ranks = fork_ranks(step_over, WORLD, transport, folder, env=env, check=True)
            yield transport, [rank.value for rank in ranks]


# --- The pictures ---------------------------------------------------------------------------------

TOP, LANE, STRIP, WIDE = 84, 64, 12, 54
SHARDS, FULL, GRADS, PARTS, SUM, STEP = 92, 208, 326, 484, 606, 692
PLUS = 428, 572  # of a host's gradients, of the parts


def mib(nbytes: float) -> str:
    return f"{round(nbytes / 2**20, 1):g} MiB"


def lane(rank: float) -> float:
    """The middle of a rank's row."""
    return TOP + LANE * rank + LANE / 2


def strips(svg: Svg, x: float, middle: float, colours: Sequence[str]) -> list[float]:
    """Draw shards on top of each other; return the middle of each."""
    top = middle - STRIP * len(colours) / 2
    for i, colour in enumerate(colours):
        svg.box(x, top + STRIP * i, WIDE, STRIP, colour, "#fff")
    svg.box(x, top, WIDE, STRIP * len(colours), "none", INK)
    return [top + STRIP * (i + 0.5) for i in range(len(colours))]


def draw_gather(svg: Svg, together: int, in_place: bool) -> None:
    """Each rank's shard, and full parameters: one for the ranks that share memory."""
    for first in range(0, WORLD, together):
        middle = lane(first + (together - 1) / 2)
        places = strips(svg, FULL, middle, RANKS)
        for rank in range(WORLD):
            inside = first <= rank < first + together
            if in_place:
                svg.arrow(FULL - 2, middle, (74, lane(rank)), "mapped")
            elif first == 0:
                kind = "copied" if inside else "sent"
                svg.arrow(SHARDS + WIDE + 2, lane(rank), (FULL - 2, places[rank]), kind)
    for rank, colour in enumerate(RANKS if not in_place else ()):
        strips(svg, SHARDS, lane(rank), [colour])


def draw_sum(svg: Svg, together: int) -> None:
    """Each rank's gradients, and how the parts of rank 0's shard come together."""
    buckets = [strips(svg, GRADS, lane(rank), RANKS) for rank in range(WORLD)]
    groups = WORLD // together
    for rank, colour in enumerate(RANKS):
        strips(svg, SUM, lane(rank), [colour])
        strips(svg, STEP, lane(rank), [colour])
        svg.arrow(SUM + WIDE + 2, lane(rank), (STEP - 2, lane(rank)))
        parts = strips(svg, PARTS, lane(rank), [colour] * groups) if groups > 1 else []
        if rank == 0:
            arriving = parts or [lane(0)]
    if groups > 1:
        svg.arrow(PARTS + WIDE + 2, lane(0), (PLUS[1] - 8, lane(0)))
        svg.sign(PLUS[1], lane(0), "+")
        svg.arrow(PLUS[1] + 8, lane(0), (SUM - 2, lane(0)))
    for group in range(groups):
        first = group * together
        begin = GRADS + WIDE + 2, buckets[first][0]
        if together > 1:
            begin = PLUS[0], lane(first) + (0 if group else arriving[0] - lane(0))
            for rank in range(first, first + together):
                svg.arrow(GRADS + WIDE + 2, buckets[rank][0], (begin[0] - 9, begin[1]), "read")
            svg.sign(*begin, "+")
            begin = begin[0] + 9, begin[1]
        end = (PARTS if groups > 1 else SUM) - 2, arriving[group]
        svg.arrow(*begin, end, "sent" if group else "copied")


def draw_step(transport: str, ranks: list[dict[str, Any]]) -> Svg:
    """A row for each rank; the arrows are those to rank 0, and to the host of rank 0."""
    mine, shard = ranks[0], ranks[0]["shard"]
    together = max(1, sum(bool(mine["in"]) and each["in"] == mine["in"] for each in ranks))
    groups, in_place = WORLD // together, bool(mine["in"]) and mine["at rest in"] == mine["in"]
    for each in ranks:
        counts = [round(each[phase] / shard, 1) for phase in PHASES]
        assert counts == [groups - 1, groups - 1, 0], f"{transport}: {counts} shards arrive"
    bottom = TOP + LANE * WORLD
    svg = Svg(bottom + 98, f"One training step over {TITLES[transport]}")
    what = f"a weight of {SIDE} x {SIDE}, {mib(mine['full'])}"
    svg.text(WIDTH / 2, 24, f"{TITLES[transport]}; {what}", 14)
    for first in range(0, WORLD, together):
        svg.box(6, TOP + LANE * first + 3, WIDTH - 12, LANE * together - 6, "#f6f8fa")
    for rank, colour in enumerate(RANKS):
        svg.box(14, lane(rank) - 5, 10, 10, colour)
        name = f"{'GPU' if transport == 'nccl' else 'rank'} {rank}"
        svg.text(30, lane(rank) + 4, name, 11, INK, "start")
    names = {FULL: "all shards" if in_place else "full", GRADS: "gradients"}
    names |= {SUM: "sum", STEP: "new shard"}
    names |= {} if in_place else {SHARDS: "shard"}
    names |= {PARTS: "parts"} if groups > 1 else {}
    for x, name in names.items():
        svg.text(x + WIDE / 2, TOP - 6, name, 11, FAINT)
    draw_gather(svg, together, in_place)
    draw_sum(svg, together)
    draw_captions(svg, transport, mine, together, bottom)
    return svg


def draw_captions(
    svg: Svg, transport: str, mine: dict[str, Any], together: int, bottom: float
) -> None:
    """Each rank's reads and received bytes by phase, and the meaning of an arrow."""
    groups, shard = WORLD // together, mine["shard"]
    word = "GPU" if transport == "nccl" else "rank"
    away = " from the other " + ("host" if transport == "hosts" else "GPUs")
    above = {
        "gather": f"maps {mib(mine['full'])}" if groups == 1 else "",
        "sum": f"reads {mib((together - 1) * groups * shard)} of its host's other ranks in place"
        if together > 1
        else "",
        "step": f"reads, writes {mib(mine['passed'])}" if mine["passed"] else "",
    }
    names = zip(PHASES, (182, 470, 682), ("gather", "backward's sum", "step"), strict=True)
    for phase, x, name in names:
        svg.text(x, 50, name)
        arrives = f"receives {mib(mine[phase])}{away if mine[phase] >= shard else ''}"
        for i, line in enumerate(filter(None, (above[phase], arrives))):
            svg.text(x, bottom + 16 + 16 * i, line, 11)
    svg.text(14, bottom + 16, f"each {word}", 11, FAINT, "start")
    legend = {"mapped": "mapped"} if groups == 1 else {"sent": f"sent, {mib(shard)} each"}
    legend |= {"read": f"read in place, {mib(shard)} each"} if together > 1 else {}
    legend |= {"copied": "within memory"}
    for i, (kind, what) in enumerate(legend.items()):
        x = 14 + 190 * i
        svg.arrow(x, bottom + 58, (x + 30, bottom + 58), kind)
        svg.text(x + 38, bottom + 62, what, 11, FAINT, "start")
    what = f"Arrows are those to {word} 0{' and its host' if transport == 'hosts' else ''}; "
    what += "the others get theirs likewise."
    svg.text(14, bottom + 84, what, 11, FAINT, "start")


def drawn() -> Iterator[tuple[str, Svg]]:
    """(file name, picture) of each transport."""
    for transport, ranks in steps():
        yield f"step-{transport}.svg", draw_step(transport, ranks)
