"""Several hosts, made out of this machine: how far is each library from what the wire allows?

    python -m benchmarks.hosts [--layouts 2x1 2x2 4x1] [--gbit 10 1] [--models gpt10m stack100]
    python -m benchmarks.hosts --collectives       # gloo alone: which way of moving bytes fills it?

Needs root (network namespaces); hosts_net.py makes the hosts, and nothing of them remains. A
layout is hosts x ranks of each. Sides take turns in one process group, as in step_time.py; peak
memory is measured with one side at a time. All hosts share this machine's cores: where a step is
bound by computing, its time says nothing about hosts with cores of their own, so compare with DDP's
of the same row, and bytes with the least that must travel.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, hosts_ops, hosts_report, hosts_steps, memory
from benchmarks.hosts_net import Hosts, HostsUnavailable, run_ranks
from benchmarks.models import WORKLOADS
from benchmarks.sides import KEEPS, SIDES, WIRES

MODELS = ["gpt10m", "gpt85m", "bert", "stack100"]
ALL_SIDES = ["ddp", "fsdp2", "zshard-full_shard-auto", "zshard-hybrid_shard-auto"]
ALL_SIDES += ["zshard-shard_grad_op-auto"]
LAYOUTS = ["2x1", "2x2", "4x1"]
GBIT = [10.0, 1.0]
SIZES = [0.0625, 1.0, 16.0, 64.0]
GROUPS = [1, 2, 4]


def layout(text: str) -> tuple[int, int]:
    """Return (hosts, ranks of each) of a text like 2x1."""
    hosts, _, ranks = text.partition("x")
    try:
        found = int(hosts), int(ranks)
    except ValueError:
        found = (0, 0)
    if found[0] < 2 or found[1] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a layout: expected one like 2x1")
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Measure training on several hosts made out of this machine (needs root)."
    rounds = "timed steps per side, or calls per operation (default: 5; with --quick: 2)"
    parser = harness.parser(purpose, rounds=rounds)
    parser.add_argument(
        "--collectives", action="store_true", help="measure gloo's operations instead of training"
    )
    default = "2x1 2x2 4x1; with --collectives: 2x1 2x2; with --quick: 2x1"
    what = f"hosts x ranks of each (default: {default})"
    parser.add_argument("--layouts", nargs="+", type=layout, metavar="HxR", help=what)
    rates = "Gbit/s of each host's link, 0 for no limit (default: 10 1)"
    parser.add_argument("--gbit", nargs="+", type=float, default=GBIT, help=rates)
    models = f"of {', '.join(WORKLOADS)} (default: {' '.join(MODELS)}; with --quick: gpt10m)"
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, metavar="MODEL", help=models)
    sides = f"of {', '.join(SIDES)} (default: {' '.join(ALL_SIDES)})"
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=ALL_SIDES, metavar="SIDE", help=sides
    )
    keep = "measure zshard-full_shard-auto with each of these settings of keep_gathered instead"
    parser.add_argument("--keep-gathered", nargs="+", choices=KEEPS, default=[], help=keep)
    wires = f"of {', '.join(WIRES)}: zshard's sides also with numbers in fewer bytes"
    parser.add_argument("--wire", nargs="+", choices=WIRES, default=[], help=wires)
    warmup = "untimed steps per side (default: 1)"
    parser.add_argument("--warmup", type=int, default=1, help=warmup)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--mib", nargs="+", type=float, help="collectives: sizes in MiB")
    args = parser.parse_args(argv)
    layouts = ["2x1"] if args.quick else LAYOUTS[:2] if args.collectives else LAYOUTS
    args.layouts = args.layouts or [layout(text) for text in layouts]
    args.sides = [each for side in args.sides for each in keeping(side, args.keep_gathered)]
    args.models = args.models or (["gpt10m"] if args.quick else MODELS)
    args.mib = args.mib or (SIZES[:2] if args.quick else SIZES)
    args.rounds = args.rounds or (2 if args.quick else 5)
    coded = [f"{side}-{wire}" for side in args.sides for wire in args.wire]
    args.sides = args.sides + [side for side in coded if side in SIDES]
    return args


def keeping(side: str, settings: Sequence[str]) -> list[str]:
    """Return a side with each setting of keep_gathered, where that makes a difference."""
    kept = [f"{side}-keep_{setting}" for setting in settings]
    return kept if kept and kept[0] in SIDES else [side]


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    results: list[dict[str, Any]] = []
    measure = measure_operations if args.collectives else measure_steps
    for count, ranks in args.layouts:
        for gbit in args.gbit:
            try:
                with Hosts(count, gbit) as hosts:
                    frame = wire(hosts, ranks)
                    for result in measure(args, hosts, ranks):
                        results.append({**frame, **result})
                        print(hosts_report.markdown(results[-1]), flush=True)
            except HostsUnavailable as error:
                raise SystemExit(f"cannot make hosts out of this machine: {error}") from None
    args.layouts = [f"{count}x{ranks}" for count, ranks in args.layouts]
    harness.finish(args, "hosts-collectives" if args.collectives else "hosts", results)


def wire(hosts: Hosts, ranks: int) -> dict[str, Any]:
    """Measure the wire; return what all results of these hosts have in common."""
    reached = hosts.reached_gbit()
    count = len(hosts.all)
    limit = f"{hosts.gbit:g} Gbit/s" if hosts.gbit else "no limit"
    print(f"\n{count} hosts x {ranks} ranks, {limit}: one connection reaches {reached:.2f} Gbit/s")
    return {
        "hosts": count,
        "ranks_per_host": ranks,
        "gbit": hosts.gbit,
        "reached_gbit": round(reached, 3),
    }


def measure_steps(args: argparse.Namespace, hosts: Hosts, ranks: int) -> Any:
    """Yield one record per model."""
    for model in args.models:
        flags = ["--model", model, f"--rounds={args.rounds}", f"--warmup={args.warmup}"]
        flags += [f"--ranks-per-host={ranks}", "--sides"]
        sides = collect(hosts, ranks, hosts_steps.MODULE, [*flags, *args.sides])
        parameters = WORKLOADS[model].parameters()
        for name, side in sides.items():
            side["least_bytes"] = least_bytes(name, 4 * parameters, len(hosts.all))
            side["bytes"] = {}
            if not args.no_memory:
                alone = [*flags, name, "--memory"]
                side["bytes"] = collect(hosts, ranks, hosts_steps.MODULE, alone, memory.MALLOC)
        yield {"model": model, "parameters": parameters, "sides": sides}


PASSES = {"fsdp1": 3, "fsdp2": 3, "zshard-full_shard": 3}
"""Side -> how often its model's bytes go between hosts: a gather, for forward and again for
backward, and a reduction count one each, an all-reduce two. All others: two."""


def least_bytes(side: str, model_bytes: int, hosts: int) -> int:
    """Return the bytes that a host must receive, and send, in a step of this side's strategy.

    Each host fetches what others have once and passes it on to its ranks, and adds up its ranks'
    gradients before it sends them. (A unit that forward uses last need not be gathered again, which
    is not counted here, nor are the units that keep_gathered="auto" keeps.)
    """
    for wire in WIRES:
        side = side.removesuffix(f"-{wire}")  # the least of float32, as a yardstick
    name, _, keep = side.partition("-keep_")
    usual = PASSES.get(name.removesuffix("-auto").removesuffix("-c10d"), 2)
    passes = 2 if keep == "true" else usual
    return passes * model_bytes * (hosts - 1) // hosts


def measure_operations(args: argparse.Namespace, hosts: Hosts, ranks: int) -> Any:
    """Yield one record."""
    flags = [f"--rounds={args.rounds}", f"--ranks-per-host={ranks}"]
    flags += ["--mib", *map(str, args.mib), "--groups", *map(str, GROUPS)]
    yield {"operations": collect(hosts, ranks, hosts_ops.MODULE, flags)}


def collect(
    hosts: Hosts,
    ranks: int,
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run `module` on all ranks of the hosts; return what rank 0 wrote to --out."""
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, *arguments, f"--out={out}"]
        run_ranks(hosts, ranks, command, env or {})
        return json.loads(out.read_text())


if __name__ == "__main__":
    harness.start(main)
