"""python -m zshard run: torchrun, with cores, OMP_NUM_THREADS and memory set for each rank.

torchrun does everything, with its own options; only what it starts is another
program, which sets the rank's share (`bind.py`) and then becomes the one that was asked for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.api import macros

from zshard.run.bind import has_memory_policy
from zshard.run.shares import BINDINGS, Share, as_list, ranks_for, shares_of
from zshard.run.topology import read_topology

NAME = "python -m zshard run"
HELP = "run a script on several ranks: torchrun, with cores, threads and memory set for each rank"
_DESCRIPTION = f"""
Run a script on several ranks of this host. This is torchrun with its options (below), and each rank
gets its own cores, an OMP_NUM_THREADS to match, and memory on the NUMA node of its cores.
OMP_NUM_THREADS, an affinity (taskset) and a memory policy (numactl) that are set already are kept.
Example: {NAME} -n 2 train.py --lr 1e-3
"""


class Parser(argparse.ArgumentParser):
    """torchrun's parser, with our name and a short usage in errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def main(words: list[str]) -> int:
    """Run what the command line asks for. Returns, or raises what torchrun raises."""
    parser = _parser()
    args = parser.parse_args(words)
    _check(parser, args)
    on_gpus = torch.accelerator.is_available()
    topology = read_topology()
    if args.nproc_per_node == "auto" and not on_gpus:
        args.nproc_per_node = str(ranks_for(topology))
    ranks = _ranks(parser, args.nproc_per_node)
    args.nproc_per_node = str(ranks)
    binding = args.bind or ("none" if on_gpus or args.numa_binding else "core")
    shares, unbound = shares_of(topology, ranks, binding)
    shares, refused = without_refused(shares)
    for note in filter(None, (unbound, refused)):
        _say(note)
    _say(summary(shares, os.environ.get("OMP_NUM_THREADS")))
    _start(args, shares)
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with -n and --bind."""
    ours = argparse.ArgumentParser(add_help=False)
    ours.add_argument(
        "-n",
        dest="nproc_per_node",
        metavar="N",
        default=os.environ.get("PET_NPROC_PER_NODE", "auto"),  # torchrun's way to set its options
        help="ranks on this host, as --nproc-per-node. 'auto' (the default): the number of GPUs; "
        "without GPUs, of NUMA nodes with cores that this process may use",
    )
    ours.add_argument(
        "--bind",
        choices=BINDINGS,
        help="where a rank may run: 'core' (the default on hosts without GPUs): on its own "
        "physical cores; 'socket', 'numa': on those of its socket or NUMA node, shared with other "
        "ranks; 'none' (the default with GPUs): anywhere. All set OMP_NUM_THREADS",
    )
    return Parser(
        NAME,
        usage=f"{NAME} [-n N] [--bind {{{','.join(BINDINGS)}}}] [options of torchrun] "
        "script.py [its arguments]",
        description=_DESCRIPTION,
        parents=[ours, torchrun.get_args_parser()],
        add_help=False,
    )


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything starts."""
    script = args.training_script
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        parser.error(
            f"this process is rank {os.environ.get('RANK')} of a torchrun, and each of its ranks "
            f"would start ranks: use `{NAME}` in place of torchrun, or unset TORCHELASTIC_RUN_ID "
            "to start a job of its own from one rank"
        )
    if args.run_path:
        parser.error("--run-path runs the script where torch is loaded already: leave it out")
    if args.no_python and args.module:
        parser.error("--no-python and --module exclude each other: pass one of them")
    if args.numa_binding and args.bind not in (None, "none"):
        parser.error("--numa-binding and --bind exclude each other: pass one of them")
    if args.no_python and shutil.which(script) is None:
        parser.error(f"no such program: {script!r}")
    plain = not (args.no_python or args.module or "PYTHON_EXEC" in os.environ)
    if plain and not Path(script).exists():  # another interpreter may see other files
        hint = "" if script.endswith(".py") else f"; for a module, pass -m {script}"
        parser.error(f"no such script: {script!r}{hint}")
    alone = args.nnodes == "1:1" and args.rdzv_backend == "static" and not args.rdzv_endpoint
    if alone and args.node_rank == 0 and args.master_port in (None, 29500):
        args.standalone = True


def _ranks(parser: argparse.ArgumentParser, asked: str) -> int:
    """Return how many ranks torchrun starts for this --nproc-per-node."""
    try:
        ranks = int(torchrun.determine_local_world_size(asked))
    except ValueError:
        if asked in ("gpu", "xpu"):
            parser.error(f"-n {asked}: torch sees no such device: pass a number, or -n auto")
        parser.error(f"-n must be a positive number, 'auto', 'gpu' or 'cpu', got {asked!r}")
    if ranks < 1:
        parser.error(f"-n must be at least 1, got {ranks}")
    return ranks


def without_refused(shares: list[Share]) -> tuple[list[Share], str]:
    """Return the shares without a policy for memory where one is set already, or the kernel takes
    none, and in that case what to say."""
    if not any(share.nodes for share in shares):
        return shares, ""
    note = ""
    try:
        if not has_memory_policy():
            return shares, ""
    except OSError as error:
        note = (
            f"the kernel or the container refuses memory policies (get_mempolicy: "
            f"{error.strerror or error}): memory lies on the NUMA node of the core that first "
            "writes it, as it does by default. In Docker, --cap-add SYS_NICE allows policies"
        )
    return [share._replace(nodes=[]) for share in shares], note


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def summary(shares: list[Share], threads: str | None) -> str:
    """Return what the ranks get, in one line. threads: the OMP_NUM_THREADS of the user, if any."""
    ranks = f"{len(shares)} rank{'s' if len(shares) > 1 else ''}"
    how = f"{ranks}, OMP_NUM_THREADS={threads or shares[0].threads}"
    if threads:
        how += " (as the environment sets it)"
    if not shares[0].cpus:
        return f"{how}, not bound to cores"
    places = list(dict.fromkeys(as_list(share.cpus) for share in shares))
    if len(places) > 8:
        places = [*places[:7], "...", places[-1]]
    how += f", on CPUs {' | '.join(places)}"
    nodes = list(dict.fromkeys(as_list(share.nodes) for share in shares if share.nodes))
    return f"{how}, memory on NUMA nodes {' | '.join(nodes)}" if nodes else how


def command(
    args: argparse.Namespace, shares: list[Share], threads: str | None
) -> tuple[str, list[str]]:
    """Return the program that torchrun is to start, and its arguments: an interpreter that binds
    itself and then becomes what torchrun would have started.

    torchrun calls a job by the first argument without a dash, so the script's name stays that, and
    replaces ${local_rank} in each rank's arguments.
    """
    head = [] if args.no_python else [os.getenv("PYTHON_EXEC", sys.executable), "-u"]
    head += ["-m"] if args.module else []
    words = [(share.cpus, 0 if threads else share.threads, share.nodes) for share in shares]
    folder = str(Path(__file__).parent)
    literals = f"{head!r}, {words!r}".replace("$", r"\x24")
    code = (
        f"import sys; sys.path.insert(0, {folder!r}".replace("$", r"\x24")
        + f"); import bind; bind.start({macros.local_rank}, {literals})"
    )
    return sys.executable, ["-PS", f"-c{code}", args.training_script, *args.training_script_args]


def _start(args: argparse.Namespace, shares: list[Share]) -> None:
    """Have torchrun start the ranks, and wait for them."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(shares[0].threads))  # else torchrun sets 1
    if any(share.cpus or share.nodes for share in shares):
        program, words = command(args, shares, threads)
        args.training_script, args.training_script_args = program, words
        args.no_python, args.module = True, False
    record(torchrun.run)(args)
