"""Setting up a large model and loading it from a file: time and peak memory per rank.

    python -m benchmarks.load [--sides zshard-meta fsdp1-meta ...] [--rounds 5]

The question is how much memory a rank needs beyond what it keeps. Each side runs alone in a fresh
process group in every round. Its peak is the kernel's high-water mark of resident memory, which
counts shared pages in full, minus what the rank held before. All sides have the same model and
units: a GPT of 355 M parameters. Loads read a safetensors file that is written once and stays in
the page cache. CPU time is reported next to elapsed time; on a loaded machine, compare CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from benchmarks import harness
from benchmarks.harness import MIB, Spread
from benchmarks.memory import MALLOC, PssSampler, high_water, pss, reset_high_water, trim
from benchmarks.models import GPTBlock

SEED = 1234


class Model(nn.Module):
    """A GPT-2: int64 [batch, seq] to fp32 logits. The head shares the embedding's weight."""

    def __init__(self, layers: int, width: int, vocabulary: int, seq: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(GPTBlock(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


SIZES = {"gpt355m": (24, 1024, 50257, 1024), "tiny": (2, 64, 100, 32)}


def build(size: str) -> nn.Module:
    return Model(*SIZES[size])


def on_meta(size: str) -> nn.Module:
    with torch.device("meta"):
        return build(size)


# --------------------------------------------------------------------------------------
# Sides


def zshard_of(module: nn.Module, **options: Any) -> Any:
    import zshard

    return zshard.FSDP(module, auto_wrap_policy={GPTBlock}, transport="shm", **options)


def fsdp1_of(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({GPTBlock}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2_of(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in module.modules():
        if isinstance(child, GPTBlock):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def fsdp2_from_meta(size: str) -> nn.Module:
    """Like torchtitan: shard on meta, allocate, then initialize the local shards."""
    module = fsdp2_of(on_meta(size)).to_empty(device="cpu")
    with torch.no_grad():
        for child in module.modules():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()
    return module


SETUPS: dict[str, Callable[[str], nn.Module]] = {
    "plain": build,
    "zshard-meta": lambda size: zshard_of(on_meta(size)),
    "zshard-real": lambda size: zshard_of(build(size)),
    "fsdp1-meta": lambda size: fsdp1_of(on_meta(size)),
    "fsdp2-meta": fsdp2_from_meta,
    "fsdp2-real": lambda size: fsdp2_of(build(size)),
}
"""Functions that build a sharded model with random values. plain is unsharded: the lower bound."""


def zshard_blank(size: str) -> Any:
    import zshard

    return zshard_of(on_meta(size), param_init_fn=zshard.uninitialized)


def fsdp2_blank(size: str) -> nn.Module:
    return fsdp2_of(on_meta(size)).to_empty(device="cpu")


def zshard_load(model: Any, path: str) -> None:
    import zshard

    zshard.load(path, model)


def zshard_from_rank0(model: Any, path: str) -> None:
    import zshard

    state = read_whole(path) if dist.get_rank() == 0 else None
    zshard.load_state_dict(model, state, from_rank0=True)


def zshard_each(model: Any, path: str) -> None:
    model.load_state_dict(read_whole(path))


def fsdp2_from_rank0(model: nn.Module, path: str) -> None:
    state = read_whole(path) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def fsdp2_each(model: nn.Module, path: str) -> None:
    set_model_state_dict(model, read_whole(path), options=StateDictOptions(full_state_dict=True))


def read_whole(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


Load = Callable[[Any, str], None]
LOADS: dict[str, tuple[Callable[[str], Any], Load]] = {
    "zshard-load": (zshard_blank, zshard_load),
    "zshard-load-from-rank0": (zshard_blank, zshard_from_rank0),
    "zshard-load-each": (zshard_blank, zshard_each),
    "fsdp2-load-from-rank0": (fsdp2_blank, fsdp2_from_rank0),
    "fsdp2-load-each": (fsdp2_blank, fsdp2_each),
}
"""Functions that build a model without values, and load it from a file. each: every rank reads the
full file into memory and keeps its shard; from-rank0: rank 0 reads it and sends the shards."""


# --------------------------------------------------------------------------------------
# A rank's part


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one set-up or load: seconds, and bytes beyond those held before. With args.sampled,
    `peak` excludes mapped files, and the seconds are meaningless."""
    side = args.sides[0]
    make = SETUPS.get(side) or LOADS[side][0]
    with torch.random.fork_rng():
        make("tiny")  # once per process: groups, arenas
    torch.manual_seed(SEED)
    if side in SETUPS:
        model, found = watched(lambda: make(args.size), args.sampled)
    else:
        model = make(args.size)
        touch(model)
        load = LOADS[side][1]
        _, found = watched(lambda: load(model, args.path), args.sampled)
    right = is_plain_model(model, args.size) if side.startswith("zshard") else None
    return {**found, "values_of_the_plain_model": right}


def watched(action: Callable[[], Any], sampled: bool) -> tuple[Any, dict[str, Any]]:
    """Return the result of `action`, its seconds, and its peak and kept bytes."""
    trim()
    dist.barrier()
    reset_high_water()
    before = pss() if sampled else high_water()
    sampler = PssSampler() if sampled else None
    start, busy = time.perf_counter(), time.process_time()
    made = action()
    dist.barrier()
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    if sampler:
        sampler.sample()
    peak = sampler.stop() if sampler else high_water()
    trim()
    reset_high_water()
    kept = pss() if sampled else high_water()
    return made, {"seconds": seconds, "cpu": cpu, "peak": peak - before, "kept": kept - before}


def touch(model: nn.Module) -> None:
    """Touch all pages of the model's parameters."""
    with torch.no_grad():
        for param in model.parameters():
            getattr(param, "_local_tensor", param).fill_(0.5)


def is_plain_model(model: Any, size: str) -> bool:
    """Return whether this rank's shards equal those of the plain model with the same seed."""
    import zshard

    torch.manual_seed(SEED)
    plain = dict(build(size).named_parameters())
    for name, param in model.named_parameters():
        fact = zshard.shard_info(param)
        if fact is None:
            return False
        whole = plain[name].detach().reshape(-1)
        part = whole[fact["begin"] : fact["begin"] + fact["numel"]]
        if not torch.equal(zshard.to_local(param).reshape(-1), part):
            return False
    return True


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure the first requested side in this rank."""
    with harness.process_group() as rank:
        ranks = harness.of_all_ranks(measure(args))
    if rank == 0 and args.out:
        harness.write_json(args.out, ranks)
    sys.stdout.flush()
    os._exit(0)  # torch's process groups sometimes abort at interpreter exit


# --------------------------------------------------------------------------------------
# The comparison


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Measure set-up and loading of a large model, one side per process group."
    parser = harness.parser(purpose, ranks=2, rounds="rounds (default: 5; with --quick: 1)")
    names = [*SETUPS, *LOADS]
    parser.add_argument("--sides", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--size", choices=SIZES, help="default: gpt355m; with --quick: tiny")
    parser.add_argument("--path", help=argparse.SUPPRESS)  # for ranks
    parser.add_argument("--sampled", action="store_true", help=argparse.SUPPRESS)  # likewise
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.size = args.size or ("tiny" if args.quick else "gpt355m")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        path = str(Path(folder) / "model.safetensors")
        write_file(path, args.size)
        rounds = [
            {side: run_alone(side, args, path, number < 0) for side in args.sides}
            for number in range(-1, args.rounds)
        ]
    facts = facts_of(args.size, args.ranks)
    sides = {side: summed_up([each[side] for each in rounds]) for side in args.sides}
    result = {"model": args.size, "ranks": args.ranks, **facts, "sides": sides}
    show(result)
    harness.finish(args, "load", [result])


def write_file(path: str, size: str) -> None:
    """Write the values that a set-up with the same seed draws, so that loads can be verified."""
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    save_file(build(size).state_dict(), path)


def run_alone(side: str, args: argparse.Namespace, path: str, sampled: bool) -> Any:
    flags = ["--sides", side, "--size", args.size, "--path", path]
    if sampled:
        flags.append("--sampled")
    return harness.collect("benchmarks.load", args.ranks, flags, MALLOC)


def facts_of(size: str, ranks: int) -> dict[str, int]:
    """Return the number of elements, and the bytes of a rank's shards and of the largest unit."""
    model = on_meta(size)
    blocks = [m for m in model.modules() if isinstance(m, GPTBlock)]
    inner = [sum(p.numel() for p in block.parameters()) for block in blocks]
    total = sum(p.numel() for p in model.parameters())
    return {
        "parameters": total,
        "share_bytes": 4 * total // ranks,
        "largest_unit_bytes": 4 * max([*inner, total - sum(inner)]),
    }


def summed_up(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return one side's record: maxima over ranks. The first run is the sampled one."""
    (sampled, *timed) = runs
    return {
        "seconds": Spread.of([max(r["seconds"] for r in run) for run in timed]).as_dict(),
        "cpu_seconds": Spread.of([max(r["cpu"] for r in run) for run in timed]).as_dict(),
        "peak_rss_bytes": max(r["peak"] for run in timed for r in run),
        "peak_bytes": max(r["peak"] for r in sampled),
        "kept_rss_bytes": max(r["kept"] for run in timed for r in run),
        "values_of_the_plain_model": sampled[0]["values_of_the_plain_model"],
        "samples_s": [[r["seconds"] for r in run] for run in timed],
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables for set-up and loading."""

    def mib(count: int) -> str:
        return f"{count / MIB:.0f}"

    limits = {
        "set-up": result["share_bytes"] + 3 * result["largest_unit_bytes"] // 2,
        "loading": result["largest_unit_bytes"],
    }
    for title, known in (("set-up", SETUPS), ("loading", LOADS)):
        rows = [
            [
                name,
                Spread(**side["seconds"]).text(2),
                Spread(**side["cpu_seconds"]).text(2),
                mib(side["peak_rss_bytes"]),
                mib(side["peak_bytes"]),
                mib(side["kept_rss_bytes"]),
                harness.verdict(side["peak_rss_bytes"] / MIB, round(limits[title] / MIB))
                if name in ("zshard-meta", "zshard-load")
                else "",
            ]
            for name, side in result["sides"].items()
            if name in known
        ]
        harness.print_table(
            f"{title}: {result['model']}, {result['ranks']} ranks; a rank's shards take "
            f"{mib(result['share_bytes'])} MiB, the largest unit "
            f"{mib(result['largest_unit_bytes'])} MiB",
            [
                "side",
                "s (min/median/max)",
                "CPU s",
                "peak RSS, MiB",
                "peak without files, MiB",
                "kept RSS, MiB",
                "target",
            ],
            rows,
        )


if __name__ == "__main__":
    harness.start(main)
