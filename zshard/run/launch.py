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
_DESCRIPTION = f"""
Run a script on several ranks of this host. This is torchrun with its options (below), and each rank
gets its own cores, an OMP_NUM_THREADS to match, and memory on the NUMA node of its cores.
OMP_NUM_THREADS, an affinity (taskset) and a memory policy (numactl) that are set already are kept.
Example: {NAME} -n 2 train.py --lr 1e-3
"""


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
    ranks = _count(parser, args.nproc_per_node)
    args.nproc_per_node = str(ranks)
    binding = args.bind or ("none" if on_gpus or args.numa_binding else "core")
    shares, threads, unbound = shares_of(host, ranks, binding)
    if not rank.may_place_memory():
        shares = [share._replace(nodes=[]) for share in shares]
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
        "default with GPUs): anywhere. All set OMP_NUM_THREADS",
    )
    return argparse.ArgumentParser(
        NAME,
        usage=f"{NAME} [-n N] [--bind {{{','.join(BINDINGS)}}}] [options of torchrun] "
        "script.py [its arguments]",
        description=_DESCRIPTION,
        parents=[ours, torchrun.get_args_parser()],
        add_help=False,
    )


def _count(parser: argparse.ArgumentParser, asked: str) -> int:
    """Return how many ranks torchrun starts for this --nproc-per-node."""
    try:
        ranks = int(torchrun.determine_local_world_size(asked))
    except ValueError as error:
        parser.error(f"-n must be a number, 'auto', 'gpu' or 'cpu', got {asked!r}: {error}")
    if ranks < 1:
        parser.error(f"-n must be at least 1, got {ranks}")
    return ranks


def summary(shares: list[Share], threads: str) -> str:
    """Return what the ranks get, in one line."""
    how = f"{len(shares)} rank{'s' if len(shares) > 1 else ''}, OMP_NUM_THREADS={threads}"
    if not shares[0].cpus:
        return f"{how}, not bound to cores"
    places = list(dict.fromkeys(as_list(share.cpus) for share in shares))
    how += f", on CPUs {' | '.join(places)}"
    nodes = list(dict.fromkeys(as_list(share.nodes) for share in shares if share.nodes))
    return f"{how}, memory on NUMA nodes {' | '.join(nodes)}" if nodes else how


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
