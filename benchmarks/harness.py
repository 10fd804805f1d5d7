"""What the benchmarks share: processes, clocks, statistics, and the form of their results.

The one idea: a ratio is taken inside a round. All sides live in one process group and take turns,
in an order that rotates each round; a side's ratio is the median of (its time / the base's time
in the same round), so whatever slows the machine for a while slows both. A sample during which
other programs took more than FOREIGN_LIMIT of the machine is left out, where MIN_CLEAN others
remain.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
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
"""Seconds. /proc/stat counts in ticks of 10 ms: on a shorter sample the foreign share is noise."""

GRACE = 20.0
"""Seconds that torchrun gets to end its ranks after a Ctrl-C."""

MIB = 2**20

# --------------------------------------------------------------------------------------
# Processes


def under_torchrun() -> bool:
    """Whether this process is a rank."""
    return "RANK" in os.environ


def ranks_wanted() -> int:
    """How many ranks torchrun has started."""
    return int(os.environ["WORLD_SIZE"])


def run_child(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run `command` in the repository root and return its exit status.

    However this function is left, the child has ended: on Ctrl-C (SIGTERM and SIGHUP are treated
    alike) it is asked to terminate, waited for, and only then killed. Its session is its own, so
    that it gets one signal: a second one would interrupt torchrun while it ends its ranks.
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
    """Run a program's `main` and exit; a Ctrl-C ends it without a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def collect(
    module: str, ranks: int, arguments: Sequence[str], env: Mapping[str, str] | None = None
) -> Any:
    """Run `module` on `ranks` ranks of a fresh torchrun and return what rank 0 wrote to its --out.

    Raises SystemExit, with the command, if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        out = Path(folder) / "out.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *torchrun, "-m", module, *arguments, f"--out={out}"]
        status = run_child(command, {"OMP_NUM_THREADS": "1", **(env or {})})
        if status != 0:
            raise SystemExit(f"benchmark failed with status {status}: {' '.join(command)}")
        return json.loads(out.read_text())


@contextlib.contextmanager
def process_group(backend: str = "gloo") -> Iterator[int]:
    """This rank's process group for the length of a `with`; gives the rank."""
    _die_with_parent()
    dist.init_process_group(backend)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def of_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has brought. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def generator() -> torch.Generator:
    """The source of this rank's batches: equal for every side and run, different between ranks."""
    return torch.Generator().manual_seed(1000 + dist.get_rank())


def _die_with_parent() -> None:
    """End with torchrun, even if it is killed: a rank has its own session and would live on."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() == 1:  # it died before the request
        raise SystemExit("torchrun is gone")


# --------------------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some values. Compare by the median."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError if there are no values."""
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

    times: seconds of each timed part, of the slowest rank. foreign: the share of the machine's
    processor time that went to other programs meanwhile, 0 where it cannot be known.
    """

    times: tuple[float, ...]
    foreign: float


def contended(sample: Sample) -> bool:
    """Whether other programs took too much of the machine for the sample to count."""
    return sample.foreign > FOREIGN_LIMIT


def clean_rounds(samples: Sequence[Sample]) -> list[int]:
    """The rounds that are not contended; all rounds if those are fewer than MIN_CLEAN."""
    clean = [i for i, sample in enumerate(samples) if not contended(sample)]
    return clean if len(clean) >= MIN_CLEAN else list(range(len(samples)))


def same_round_ratios(side: Sequence[Sample], base: Sequence[Sample]) -> list[float]:
    """side / base, by their first times, for each round that is clean for both (all if none is).

    A base of zero or less (a difference that drowned in noise) leaves its round out.
    """
    both = set(clean_rounds(side)) & set(clean_rounds(base)) or set(range(len(side)))
    pairs = [(side[i].times[0], base[i].times[0]) for i in sorted(both)]
    return [mine / theirs for mine, theirs in pairs if theirs > 0]


# --------------------------------------------------------------------------------------
# Clocks

Turn = Callable[[int], tuple[float, ...]]
"""One side's turn in a round, given the round's number: returns the seconds of each timed part."""


def interleave(turns: Mapping[str, Turn], rounds: int, warmup: int) -> dict[str, list[Sample]]:
    """Let the sides take turns for `warmup` unmeasured and `rounds` measured rounds. Collective.

    A barrier precedes each turn, and the order rotates by one each round, so that no side always
    follows the same one. Times are the maximum over ranks. Rounds are numbered from 0, warmup
    included. Garbage is collected between turns, and only then.
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
    """No automatic collection; what lives already is left out, so that collecting is quick."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def rotated(names: Sequence[str], number: int) -> list[str]:
    """`names` rotated left by `number`."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


class _CpuClock:
    """Processor time since it was made: of the whole machine, and of this process."""

    def __init__(self) -> None:
        self.start = self._now()

    def read(self) -> list[float]:
        """Seconds passed, busy seconds over all processors, and this process's own."""
        return [now - then for now, then in zip(self._now(), self.start, strict=True)]

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), _machine_busy(), time.process_time()


def _machine_busy() -> float:
    """Busy seconds of all processors since boot; steal, which is other guests' time, counts."""
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
    """Where and when: what a reader needs to judge a result."""
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
        "load_1min": os.getloadavg()[0],
    }


def _commit() -> str:
    """The checkout's commit, with -dirty if files differ from it; "unknown" outside of git."""
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
    """Write `record` to `path`, making its folder. ValueError on NaN and infinity: no JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def finish(args: argparse.Namespace, benchmark: str, results: list[Any]) -> None:
    """Write a whole run to --out or today's file in results/; if quick, to --out only."""
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
    print(f"written: {path}")


def parser(purpose: str, ranks: int | list[int] = 0, rounds: str = "") -> argparse.ArgumentParser:
    """An argument parser with what every benchmark takes: --quick and --out. `ranks` is the default
    of --ranks, of one or several; 0: no such argument. `rounds` is what --help says of --rounds."""
    made = argparse.ArgumentParser(description=purpose)
    made.add_argument("--quick", action="store_true", help="a few rounds: does it run? No result")
    made.add_argument("--out", type=Path, help="the JSON file to write (default: results/)")
    if ranks:
        several = "+" if isinstance(ranks, list) else None
        made.add_argument("--ranks", nargs=several, type=int, default=ranks, help="world size")
    if rounds:
        made.add_argument("--rounds", type=int, help=rounds)
    return made


def progress(done: int, of: int) -> None:
    """A counter on a terminal's stderr, written by rank 0 only."""
    if dist.get_rank() == 0 and sys.stderr.isatty():
        end = "\n" if done == of else ""
        print(f"\rround {done}/{of}", end=end, file=sys.stderr, flush=True)


def verdict(value: float | None, limit: float | None) -> str:
    """The limit and whether `value` keeps it; empty where there is no limit or no value."""
    if limit is None or value is None:
        return ""
    return f"<= {limit:g}: {'met' if value <= limit else 'MISSED'}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text in aligned columns; the first column is left-aligned, the others right."""
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
