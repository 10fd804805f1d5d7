"""Shared by all benchmarks: processes, clocks, statistics and the format of results.

All sides share one process group and take turns; a side's ratio is the median of (its time / the
base's time in the same round), so a temporary slowdown of the machine affects both. A sample during
which other programs used more than FOREIGN_LIMIT of the machine is dropped if at least MIN_CLEAN
others remain.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

FOREIGN_LIMIT = 0.05
MIN_CLEAN = 5
JUDGED_FROM = 0.2
"""Seconds. /proc/stat counts ticks of 10 ms, so for shorter samples the foreign share is noise."""

GRACE = 20.0
"""Seconds for torchrun to terminate its ranks after Ctrl-C."""

MIB = 2**20

Numbers = dict[str, Any]
"""One side's costs in one round, the maximum over ranks: seconds, or bytes (`..._bytes`)."""


def under_torchrun() -> bool:
    return "RANK" in os.environ


def run_child(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run `command` in the repository root and return its exit status. On Ctrl-C, SIGTERM or SIGHUP
    the child is terminated, and killed after GRACE. Its own session spares it a second signal,
    which would interrupt torchrun while it terminates its ranks."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    environment = {**os.environ, **(env or {})}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the result of a program's `main`, without a traceback on Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def collect(
    module: str,
    ranks: int,
    task: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    hosts: Sequence[str] = ("--standalone",),
) -> Any:
    """Run `module` on `ranks` ranks of a fresh torchrun; return rank 0's output in --out, None if
    rank 0 is on another host. Raises SystemExit with the command if it fails.

    task: keywords of the function that the module gives to run_task(). hosts: torchrun's flags that
    say which hosts there are.
    """
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "out.json"
        torchrun = ["-m", "torch.distributed.run", *hosts, f"--nproc-per-node={ranks}"]
        command = [sys.executable, *torchrun, "-m", module, "--task", json.dumps(task)]
        command.append(f"--out={out}")
        status = run_child(command, {"OMP_NUM_THREADS": "1", **(env or {})})
        if status != 0:
            raise SystemExit(f"benchmark failed with exit status {status}: {' '.join(command)}")
        return json.loads(out.read_text()) if out.exists() else None


def run_task(
    measure: Callable[..., Any],
    show: Callable[[Any], None] = lambda result: None,
    backend: str = "gloo",
) -> NoReturn:
    """Measure in this rank, with the keywords that collect() was given, and exit. Rank 0 shows the
    result and writes it to --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=json.loads)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    _die_with_parent()
    dist.init_process_group(backend)
    result = measure(**args.task)
    if dist.get_rank() == 0:
        show(result)
        write_json(args.out, result)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's process groups sometimes abort at interpreter exit


def of_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def slowest(mine: Any) -> Any:
    """Return the ranks' maximum of each number in nested dicts. Collective."""

    def merge(ranks: Sequence[Any]) -> Any:
        if not isinstance(ranks[0], dict):
            return max(ranks)
        return {key: merge([rank[key] for rank in ranks]) for key in ranks[0]}

    return merge(of_all_ranks(mine))


def generator() -> torch.Generator:
    """Return this rank's random generator: the same for all sides and runs, different per rank."""
    return torch.Generator().manual_seed(1000 + dist.get_rank())


def _die_with_parent() -> None:
    """Exit with torchrun even if it is killed: a rank has its own session and would survive."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # it exited before the request
        raise SystemExit("torchrun exited")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, the median (for comparisons), and the maximum."""
    if not values:
        raise ValueError("no samples: a spread needs at least one")
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


@dataclass(frozen=True)
class Sample:
    """One side's turn in one round: the seconds of each timed part on the slowest rank, and the
    fraction of the machine's CPU time that other programs used meanwhile (0 if unknown)."""

    times: tuple[float, ...]
    foreign: float


def contended(sample: Sample) -> bool:
    """Return whether other programs used too much of the machine for the sample to count."""
    return sample.foreign > FOREIGN_LIMIT


def clean_rounds(samples: Sequence[Sample]) -> list[int]:
    """Return the rounds that are not contended; all rounds if fewer than MIN_CLEAN are left."""
    clean = [i for i, sample in enumerate(samples) if not contended(sample)]
    return clean if len(clean) >= MIN_CLEAN else list(range(len(samples)))


def same_round_ratios(side: Sequence[Sample], base: Sequence[Sample]) -> list[float]:
    """Return side / base by their first times in rounds that are clean for both (all if none is).

    A round whose base is zero or less (a difference below the noise) is dropped.
    """
    both = set(clean_rounds(side)) & set(clean_rounds(base)) or set(range(len(side)))
    pairs = [(side[i].times[0], base[i].times[0]) for i in sorted(both)]
    return [mine / theirs for mine, theirs in pairs if theirs > 0]


Turn = Callable[[int], tuple[float, ...]]
"""One side's turn: takes the round number and returns the seconds of each timed part."""


def interleave(turns: Mapping[str, Turn], rounds: int, warmup: int) -> dict[str, list[Sample]]:
    """Run the sides in turn for `warmup` untimed and `rounds` timed rounds; numbers continue from
    0.

    Collective. A turn starts with a barrier, the order rotates each round, garbage is collected
    between turns only, and times are the maximum over ranks.
    """
    names = list(turns)
    records: list[list[list[float]]] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(warmup + rounds):
        row: dict[str, list[float]] = {}
        for name in rotated(names, number):
            gc.collect()
            dist.barrier()
            before = _clocks()
            times = turns[name](number)
            spent = [now - then for now, then in zip(_clocks(), before, strict=True)]
            row[name] = [*times, *spent]
        if number >= warmup:
            records.append([row[name] for name in names])
    gc.enable()
    gc.unfreeze()
    table = torch.tensor(records, dtype=torch.float64)
    slowest, total = table.clone(), table
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total, dist.ReduceOp.SUM)
    return {
        name: [_sample(slowest[r, s].tolist(), total[r, s].tolist()) for r in range(rounds)]
        for s, name in enumerate(names)
    }


def rotated(names: Sequence[str], number: int) -> list[str]:
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _clocks() -> tuple[float, float, float]:
    """Return the seconds of a clock, of all CPUs' work, and of this process's."""
    return time.perf_counter(), _machine_busy(), time.process_time()


def _machine_busy() -> float:
    """Return the busy seconds of all CPUs since boot, including steal (other guests' time)."""
    try:
        with open("/proc/stat", "rb") as stat:
            fields = [int(field) for field in stat.readline().split()[1:]]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _sample(slowest: list[float], total: list[float]) -> Sample:
    *times, wall, busy, _ = slowest
    share = (busy - total[-1]) / (wall * (os.cpu_count() or 1))
    judged = wall >= JUDGED_FROM and busy > 0
    return Sample(tuple(times), max(0.0, share) if judged else 0.0)


def machine() -> dict[str, Any]:
    """Return the record of the machine, the software and the date."""
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    deepspeed = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        deepspeed["deepspeed"] = importlib.metadata.version("deepspeed")
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": (cpu or [platform.processor()])[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **deepspeed,
        "load_1min": os.getloadavg()[0],
    }


def _commit() -> str:
    """Return the commit, with -dirty if files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(
            command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True
        ).strip()
    return "unknown"


def write_json(path: Path, record: Any) -> None:
    """Write `record` to `path`, creating its directory. Raises ValueError on NaN and infinity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def finish(args: argparse.Namespace, benchmark: str, results: list[Any]) -> None:
    """Write a run to --out or to today's file in results/; a quick run only to --out."""
    if args.quick and args.out is None:
        return
    path = args.out or RESULTS / f"{datetime.date.today()}-{benchmark}.json"
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    frame = {"benchmark": benchmark, "machine": machine(), "settings": settings}
    write_json(path, {**frame, "results": results})
    print(f"wrote {path}")


def options(
    purpose: str,
    argv: Sequence[str] | None,
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
    choices: Mapping[str, Iterable[str]] | None = None,
) -> argparse.Namespace:
    """Parse --quick, --out, and an option for each default in `full`; `quick` has those of --quick
    that differ. Lists take several values, None text."""
    parser = argparse.ArgumentParser(description=purpose)
    what = "smoke test: few rounds, small model, no results"
    parser.add_argument("--quick", action="store_true", help=what)
    parser.add_argument("--out", type=Path, help="JSON file (default: in benchmarks/results)")
    for name, value in full.items():
        several = isinstance(value, list)
        limits = list((choices or {}).get(name, ())) or None
        words = f"of {', '.join(limits)}; " if limits else ""
        words += f"default: {value}" + (f", with --quick: {quick[name]}" if name in quick else "")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="+" if several else None,
            type=str if value in (None, []) else type(value[0] if several else value),
            choices=limits,
            metavar=name.upper(),
            help=words,
        )
    args = parser.parse_args(argv)
    for name, value in {**full, **(quick if args.quick else {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def verdict(value: float | None, limit: float | None) -> str:
    """Return the limit and whether `value` meets it; "" without a limit or a value."""
    if limit is None or value is None:
        return ""
    return f"<= {limit:g}: {'met' if value <= limit else 'MISSED'}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        print("  ".join(cells).rstrip(), flush=True)


def show(title: str, sides: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the facts of each side: numbers as min/median/max, bytes in MiB, and no lists."""
    flat = {name: dict(_flat(record)) for name, record in sides.items()}
    keys = list(dict.fromkeys(key for record in flat.values() for key in record))
    rows = [[name, *(record.get(key, "") for key in keys)] for name, record in flat.items()]
    print_table(f"{title}; min/median/max, bytes in MiB", ["side", *keys], rows)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        name = prefix + key
        if isinstance(value, dict) and set(value) != {"min", "median", "max"}:
            yield from _flat(value, f"{name} ")
        elif isinstance(value, dict):
            yield name, "/".join(map(_text, value.values()))
        elif isinstance(value, str | bool):
            yield name, str(value)
        elif value is not None and not isinstance(value, list):
            number = value / MIB if name.endswith("bytes") else value
            yield name.removesuffix("_bytes"), _text(number)


def _text(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"
