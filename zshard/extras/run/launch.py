"""python -m zshard run: torchrun, with cores, OMP_NUM_THREADS and memory set for each rank.

torchrun does everything, with its own options. It only starts a different program, which binds
itself to the rank's share (`rank.py`) and then becomes the requested one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from zshard.extras.keeping import KeeperError, client
from zshard.extras.run import rank
from zshard.extras.run.cores import BINDINGS, Share, as_list, read_host, shares_of

NAME = "python -m zshard run"
RESTARTS = 3  # --max-restarts with --keep, unless it is given
HELP = "run a script on several ranks: torchrun, with cores, threads and memory set for each rank"


def main(words: list[str], name: str = NAME) -> int:
    """Run the command line's program; `name`: what was called. Raises what torchrun raises."""
    parser = _parser(name)
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
        print(f"{name}: {text}", file=sys.stderr, flush=True)
    if shares[0].cpus:
        bind(args, shares)
    with kept(args, name):
        record(torchrun.run)(args)
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "-n",
        dest="nproc_per_node",
        metavar="N",
        default=os.environ.get("PET_NPROC_PER_NODE", "auto"),  # torchrun's variable
        help="ranks on this host, as --nproc-per-node. 'auto' (the default): the number of GPUs; "
        "without GPUs, of NUMA nodes with cores that this process may use",
    )
    options.add_argument(
        "--bind",
        choices=BINDINGS,
        help="where a rank may run: 'core' (the default on hosts without GPUs): on its own "
        "physical cores; 'numa': on those of its NUMA node, shared with other ranks; 'none' (the "
        "default with GPUs): anywhere. All set OMP_NUM_THREADS, unless it is set",
    )
    options.add_argument(
        "--keep",
        action="store_true",
        help="keep what ranks hold in memory for their restarts, in a process that outlives them "
        f"and ends with this one. Sets --max-restarts to {RESTARTS} unless you pass it",
    )
    parents = [options, torchrun.get_args_parser()]
    usage = f"{name} [-n N] [--bind B] [--keep] [options of torchrun] script.py [its arguments]"
    parser = argparse.ArgumentParser(name, usage, HELP, parents=parents, add_help=False)
    if "PET_MAX_RESTARTS" not in os.environ:  # torchrun's variable
        parser.set_defaults(max_restarts=None)
    return parser


@contextlib.contextmanager
def kept(args: argparse.Namespace, name: str) -> Iterator[None]:
    """Prepare restarts of the ranks. With --keep, give the ranks a keeper, and end it when torchrun
    ends. Raises KeeperError if it cannot be started."""
    if args.max_restarts is None:
        args.max_restarts = RESTARTS if args.keep else 0
    os.environ.pop(client.VARIABLE, None)  # of a kept run that started this one
    if args.max_restarts:
        # Each attempt gets a store of its own: in one that attempts share, a restarted rank may
        # read the addresses of the processes before.
        is_one_host = args.nnodes in ("1", "1:1")
        is_free = not args.rdzv_endpoint and args.master_port is None
        if is_one_host and is_free and args.rdzv_backend == "static":
            args.standalone = True
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if not args.keep:
        yield
        return
    token = os.environ[client.VARIABLE] = client.start()
    pid = client.Keeper(token).pid()
    text = f"process {pid} keeps the run's state for its restarts, and ends with this one"
    print(f"{name}: {text}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        with contextlib.suppress(KeeperError):  # it was ended by hand
            client.Keeper(token).end()


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
