"""Shared by all benchmarks: processes, clocks, statistics and the format of results.

Ratios are taken within a round. All sides share one process group and take turns, in an order that
rotates each round; a side's ratio is the median of (its time / the base's time in the same round),
so a temporary slowdown of the machine affects both. A sample during which other programs used more
than FOREIGN_LIMIT of the machine is dropped if at least MIN_CLEAN others remain.
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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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

# --------------------------------------------------------------------------------------
# Processes


def under_torchrun() -> bool:
    """Return whether this process is a rank."""
    return "RANK" in os.environ


def ranks_wanted() -> int:
    """Return the number of ranks that torchrun started."""
    return int(os.environ["WORLD_SIZE"])


def run_child(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run `command` in the repository root and return its exit status.

    The child has exited when this function returns or raises: on Ctrl-C, SIGTERM or SIGHUP it is
    terminated, waited for, and killed after GRACE. It has its own session, so it receives only one
    signal: a second one would interrupt torchrun while it terminates its ranks.
    """
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
    """Run a program's `main` and exit, without a traceback on Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def collect(
    module: str,
    ranks: int,
    arguments: Sequence[str],
    env: Mapping[str, str] | None = None,
    hosts: Sequence[str] = ("--standalone",),
) -> Any:
    """Run `module` on `ranks` ranks of a fresh torchrun; return what rank 0 wrote to --out, None
    where rank 0 is on another host.

    hosts: torchrun's flags that say which hosts there are. Raises SystemExit with the command if it
    fails.
    """
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "out.json"
        torchrun = ["-m", "torch.distributed.run", *hosts, f"--nproc-per-node={ranks}"]
        command = [sys.executable, *torchrun, "-m", module, *arguments, f"--out={out}"]
        status = run_child(command, {"OMP_NUM_THREADS": "1", **(env or {})})
        if status != 0:
            raise SystemExit(f"benchmark failed with exit status {status}: {' '.join(command)}")
        return json.loads(out.read_text()) if out.exists() else None


@contextlib.contextmanager
def process_group(backend: str = "gloo") -> Iterator[int]:
    """A context with an initialized process group; yields the rank."""
    _die_with_parent()
    dist.init_process_group(backend)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def measure_as_rank(
    args: argparse.Namespace, measure: Callable[[], Any], show: Callable[[Any], None]
) -> None:
    """Measure in this rank; on rank 0, show the result, and write it to --out for collect()."""
    with process_group() as rank:
        result = measure()
    if rank == 0:
        show(result)
        if args.out:
            write_json(args.out, result)


def flags_of(args: argparse.Namespace, *names: str) -> list[str]:
    """Return the command-line flags that set these options as `args` has them."""
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]


def of_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def generator() -> torch.Generator:
    """Return this rank's random generator: the same for all sides and runs, different per rank."""
    return torch.Generator().manual_seed(1000 + dist.get_rank())


def _die_with_parent() -> None:
    """Exit with torchrun even if it is killed: a rank has its own session and would survive."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # it exited before the request
        raise SystemExit("torchrun exited")


# --------------------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum. Compare by the median."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError if `values` is empty."""
        if not values:
            raise ValueError("no samples: a spread needs at least one")
        return cls(min(values), statistics.median(values), max(values))

    def text(self, digits: int) -> str:
        return "/".join(f"{value:.{digits}f}" for value in (self.min, self.median, self.max))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """One side's turn in one round.

    times: seconds of each timed part, on the slowest rank. foreign: the fraction of the machine's
    CPU time that other programs used meanwhile, 0 if unknown.
    """

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


# --------------------------------------------------------------------------------------
# Clocks

Turn = Callable[[int], tuple[float, ...]]
"""One side's turn: takes the round number and returns the seconds of each timed part."""


def interleave(turns: Mapping[str, Turn], rounds: int, warmup: int) -> dict[str, list[Sample]]:
    """Run the sides in turn for `warmup` untimed and `rounds` timed rounds. Collective.

    Each turn starts with a barrier, and the order rotates by one each round, so no side always
    follows the same one. Times are the maximum over ranks. Rounds are numbered from 0, including
    warmup. Garbage is collected between turns only.
    """
    names = list(turns)
    records: list[list[list[float]]] = []
    with _collected_by_hand():
        for number in range(warmup + rounds):
            row: dict[str, list[float]] = {}
            for name in rotated(names, number):
                gc.collect()
                dist.barrier()
                clock = _CpuClock()
                times = turns[name](number)
                row[name] = [*times, *clock.read()]
            if number >= warmup:
                records.append([row[name] for name in names])
            progress(number + 1, warmup + rounds)
    table = torch.tensor(records, dtype=torch.float64)
    slowest, total = table.clone(), table
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total, dist.ReduceOp.SUM)
    return {
        name: [_sample(slowest[r, s].tolist(), total[r, s].tolist()) for r in range(rounds)]
        for s, name in enumerate(names)
    }


@contextlib.contextmanager
def _collected_by_hand() -> Iterator[None]:
    """A context without automatic garbage collection; existing objects are frozen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return `names` rotated left by `number`."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


class _CpuClock:
    """CPU time since construction, of the whole machine and of this process."""

    def __init__(self) -> None:
        self.start = self._now()

    def read(self) -> list[float]:
        """Return elapsed seconds, busy seconds over all CPUs, and this process's CPU seconds."""
        return [now - then for now, then in zip(self._now(), self.start, strict=True)]

    @staticmethod
    def _now() -> tuple[float, float, float]:
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
    own = total[-1]
    if wall < JUDGED_FROM or busy == 0:
        return Sample(tuple(times), 0.0)
    share = (busy - own) / (wall * (os.cpu_count() or 1))
    return Sample(tuple(times), max(0.0, share))


# --------------------------------------------------------------------------------------
# Results


def machine() -> dict[str, Any]:
    """Return the record of the machine, the software and the date."""
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _proc_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_deepspeed(),
        "load_1min": os.getloadavg()[0],
    }


def _deepspeed() -> dict[str, str]:
    """Return DeepSpeed's version as an entry of machine(); empty if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"deepspeed": importlib.metadata.version("deepspeed")}
    return {}


def _commit() -> str:
    """Return the commit, with -dirty if files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _proc_field(path: str, name: str) -> str:
    with contextlib.suppress(OSError), open(path) as lines:
        for line in lines:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


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
    record = {
        "benchmark": benchmark,
        "machine": machine(),
        "settings": settings,
        "results": results,
    }
    write_json(path, record)
    print(f"wrote {path}")


def parser(purpose: str, ranks: int | list[int] = 0, rounds: str = "") -> argparse.ArgumentParser:
    """Return an argument parser with --quick and --out, which every benchmark has.

    ranks: the default of --ranks, one number or a list; 0 omits the option. rounds: the help text
    of --rounds; "" omits the option.
    """
    made = argparse.ArgumentParser(description=purpose)
    made.add_argument(
        "--quick", action="store_true", help="smoke test: few rounds, small model, no results"
    )
    made.add_argument(
        "--out", type=Path, help="JSON file to write (default: in benchmarks/results)"
    )
    if ranks:
        several = "+" if isinstance(ranks, list) else None
        default = " ".join(map(str, ranks)) if isinstance(ranks, list) else ranks
        what = f"world size (default: {default})"
        made.add_argument("--ranks", nargs=several, type=int, default=ranks, help=what)
    if rounds:
        made.add_argument("--rounds", type=int, help=rounds)
    return made


def progress(done: int, of: int) -> None:
    """Show a progress counter on rank 0's stderr if it is a terminal."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        end = "\n" if done == of else ""
        print(f"\rround {done}/{of}", end=end, file=sys.stderr, flush=True)


def verdict(value: float | None, limit: float | None) -> str:
    """Return the limit and whether `value` meets it; "" without a limit or a value."""
    if limit is None or value is None:
        return ""
    return f"<= {limit:g}: {'met' if value <= limit else 'MISSED'}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    print(f"\n{title}\n{line(header)}\n{line(['-' * width for width in widths])}")
    for row in rows:
        print(line(row))
    sys.stdout.flush()
