"""python -m zshard run: torchrun, with cores, OMP_NUM_THREADS and memory set for each rank.

torchrun does everything, with its own options. It only starts a different program, which binds
itself to the rank's share (`rank.py`) and then becomes the requested one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from zshard.run import rank
from zshard.run.cores import BINDINGS, Share, as_list, read_host, shares_of

NAME = "python -m zshard run"
HELP = "run a script on several ranks: torchrun, with cores, threads and memory set for each rank"


def main(words: list[str]) -> int:
    """Run the command line's program. Returns, or raises what torchrun raises."""
    parser = _parser()
    args = parser.parse_args(words)
    if args.numa_binding and args.bind not in (None, "none"):
        parser.error("--numa-binding and --bind exclude each other: pass one of them")
    if args.no_python and args.module:
        parser.error("--no-python and --module exclude each other: pass one of them")
    on_gpus, host = torch.accelerator.is_available(), read_host()
    if args.nproc_per_node == "auto" and not on_gpus:
        args.nproc_per_node = str(min(host.nodes, host.usable))
    try:
        ranks = int(torchrun.determine_local_world_size(args.nproc_per_node))
    except ValueError as error:
        parser.error(f"-n must be a number, 'auto', 'gpu' or 'cpu': {error}")
    if ranks < 1:
        parser.error(f"-n must be at least 1, got {ranks}")
    args.nproc_per_node = str(ranks)
    binding = args.bind or ("none" if on_gpus or args.numa_binding else "core")
    shares, threads, unbound = shares_of(host, ranks, binding)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for text in filter(None, (unbound, summary(shares, os.environ["OMP_NUM_THREADS"]))):
        print(f"{NAME}: {text}", file=sys.stderr, flush=True)
    if shares[0].cpus:
        bind(args, shares)
    record(torchrun.run)(args)
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with -n and --bind."""
    ours = argparse.ArgumentParser(add_help=False)
    ours.add_argument(
        "-n",
        dest="nproc_per_node",
        metavar="N",
        default=os.environ.get("PET_NPROC_PER_NODE", "auto"),  # torchrun's variable
        help="ranks on this host, as --nproc-per-node. 'auto' (the default): the number of GPUs; "
        "without GPUs, of NUMA nodes with cores that this process may use",
    )
    ours.add_argument(
        "--bind",
        choices=BINDINGS,
        help="where a rank may run: 'core' (the default on hosts without GPUs): on its own "
        "physical cores; 'numa': on those of its NUMA node, shared with other ranks; 'none' (the "
        "default with GPUs): anywhere. All set OMP_NUM_THREADS, unless it is set",
    )
    parents = [ours, torchrun.get_args_parser()]
    usage = f"{NAME} [-n N] [--bind B] [options of torchrun] script.py [its arguments]"
    return argparse.ArgumentParser(NAME, usage, HELP, parents=parents, add_help=False)


def summary(shares: list[Share], threads: str) -> str:
    """Return what the ranks get, in one line."""
    how = f"{len(shares)} rank{'s' if len(shares) > 1 else ''}, OMP_NUM_THREADS={threads}"
    if not shares[0].cpus:
        return f"{how}, not bound to cores"
    cpus, nodes = (list(dict.fromkeys(map(as_list, each))) for each in zip(*shares, strict=True))
    how += f", on CPUs {' | '.join(cpus)}"
    return f"{how}, memory on NUMA nodes {' | '.join(nodes)}" if nodes != [""] else how


def bind(args: argparse.Namespace, shares: list[Share]) -> None:
    """Make torchrun start interpreters that bind themselves and then become the program that it
    would have started. torchrun names a job after the first argument without a dash, which is still
    the script."""
    head = [] if args.no_python else [os.getenv("PYTHON_EXEC", sys.executable), "-u"]
    head += ["-m"] if args.module else []
    os.environ[rank.VARIABLE] = json.dumps([head, shares])
    code = f"import runpy; runpy.run_path({str(Path(rank.__file__))!r}, run_name='__main__')"
    words = ["-PS", f"-c{code}", args.training_script, *args.training_script_args]
    args.training_script, args.training_script_args = sys.executable, words
    args.no_python, args.module, args.run_path = True, False, False
