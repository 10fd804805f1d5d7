"""Measurements of a run: memory of this process, progress on the screen, a JSON file and plots.

Memory is PSS, the proportional set size. A page shared by N processes counts 1/N in
each, so a library that shares memory between ranks is not charged twice for it, as by RSS.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import threading
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

MIB = 1024 * 1024
SAMPLE_SECONDS = 0.05
LOG_LINES = 5  # of a run's progress, where they are not rewritten
WARMUP_STEPS = 10  # of a run, not counted in its speed


class PeakMemory:
    """Sample this process's memory in a thread inside `with`; `mib` is the peak so far.

    PSS on Linux; elsewhere the kernel's high-water mark of RSS since the process started.
    files: count what is mapped from files too, such as the libraries' code.
    """

    def __init__(self, *, files: bool = True) -> None:
        self.mib = 0.0
        self.kind = "RSS" if _pss_bytes() is None else "PSS"
        self._parts = (b"Pss:",) if files else (b"Pss_Anon:", b"Pss_Shmem:")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> float:
        """The memory at this moment, in MiB."""
        used = _pss_bytes(self._parts)
        return (_peak_rss_bytes() if used is None else used) / MIB

    def _sample(self) -> None:
        while True:
            self.mib = max(self.mib, self.now())
            if self._stop.wait(SAMPLE_SECONDS):
                return


class Progress:
    """The progress of a run: one line, rewritten in place on a terminal; a few lines in a log.

    Rank 0 prints; on other ranks every method does nothing. The terminal needs tqdm.
    """

    def __init__(self, steps: int, title: str, *, show: bool) -> None:
        self.steps = steps
        self.title = title
        self.show = show
        self.every = max(1, steps // LOG_LINES)
        self.bar = _terminal_bar(steps, title) if show else None

    def update(self, step: int, numbers: str) -> None:
        """Show `numbers` after step `step` (counted from 1)."""
        if self.bar is not None:
            self.bar.set_postfix_str(numbers, refresh=False)
            self.bar.update()
        elif self.show and (step % self.every == 0 or step == self.steps):
            print(f"{self.title:<7}{step:5d}/{self.steps}  {numbers}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Meter:
    """Losses and step times of this rank, and the current figures for the progress line."""

    def __init__(self, tokens_per_step: int, memory: PeakMemory) -> None:
        self.tokens_per_step = tokens_per_step
        self.memory = memory
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._began = 0.0

    def start_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self, loss: float) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(loss)

    def line(self) -> str:
        """This rank's mean loss and the speed of all ranks over ten steps, and peak memory."""
        recent = self.losses[-10:]
        speed = self.tokens_per_step * len(recent) / sum(self.seconds[-10:])
        loss = sum(recent) / len(recent)
        return f"loss {loss:.2f}, {speed:,.0f} tokens/s, {self.memory.mib:,.0f} MiB"

    def speed(self) -> dict[str, Any]:
        """The speed of the steps so far without the first ones, which allocate and warm caches."""
        warmup = min(WARMUP_STEPS, len(self.seconds) // 4)
        measured = sorted(self.seconds[warmup:])
        median = measured[len(measured) // 2]
        return {
            "tokens_per_second": self.tokens_per_step / median,
            "step_seconds": {"min": measured[0], "median": median, "max": measured[-1]},
            "measured_steps": len(measured),
        }


def surroundings() -> dict[str, Any]:
    """Date, machine and versions, for the JSON file."""
    packages = ("torch", "zshard")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()}
        | {name: version for name in packages if (version := _version(name))},
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS"),
    }


def save_json(path: Path, numbers: dict[str, Any]) -> None:
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def save_curve(path: Path, title: str, losses: list[float], held_out: list[list[float]]) -> bool:
    """Plot the loss of each step and the held-out loss; False if matplotlib is not installed."""
    pyplot = pyplot_for_files()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=0.6, alpha=0.45, color="tab:blue", label="each step")
    axes.plot(steps, smoothed(losses), color="tab:blue", label="smoothed")
    axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out files")
    _finish_loss(axes, title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def save_comparison(path: Path, runs: dict[str, dict[str, Any]]) -> bool:
    """Plot what each library's run.json holds: losses, and peak memory per rank at "compared".

    False if matplotlib is not installed.
    """
    pyplot = pyplot_for_files()
    if pyplot is None:
        return False
    figure, (curves, bars) = pyplot.subplots(
        1, 2, figsize=(11, 4.5), dpi=120, width_ratios=(2.2, 1)
    )
    styles = ("-", "--", ":", "-.")  # equal curves lie on top of each other: all stay visible
    for index, (library, run) in enumerate(runs.items()):
        color, steps = f"C{index}", range(1, len(run["loss"]) + 1)
        style = styles[index % len(styles)]
        curves.plot(steps, smoothed(run["loss"]), style, color=color, label=f"{library}, training")
        held_out = list(zip(*run["held_out"], strict=True))
        size, marker = 11 - 2.5 * index, "osD^"[index % 4]
        label = f"{library}, held-out"
        curves.plot(*held_out, marker, ms=size, fillstyle="none", color=color, label=label)
        peak = max(run["compared"]["peak_memory_mib"])
        bars.bar(library, peak, color=color)
        bars.text(library, peak, f"{peak:,.0f}", ha="center", va="bottom")
    _finish_loss(curves, "loss (training: smoothed)")
    kind = next(iter(runs.values()))["memory_kind"]
    bars.set(title=f"peak memory per rank ({kind})", ylabel="MiB")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def pyplot_for_files() -> Any:
    """matplotlib's pyplot, drawing to files only; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish_loss(axes: Any, title: str) -> None:
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()


def _pss_bytes(parts: tuple[bytes, ...] = (b"Pss:",)) -> int | None:
    """These parts of this process's PSS; None if the kernel does not report it."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as rollup:
            found = [int(line.split()[1]) for line in rollup if line.startswith(parts)]
    except OSError:
        return None
    return 1024 * sum(found) if found else None


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _terminal_bar(steps: int, title: str) -> Any:
    """A tqdm bar on a terminal; None in a log or without tqdm, where lines are printed instead."""
    if not sys.stdout.isatty() or 0 in os.get_terminal_size(sys.stdout.fileno()):
        return None  # a terminal without a size is a tool's pty: tqdm would draw nothing
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    return tqdm(total=steps, desc=title, bar_format=form, dynamic_ncols=True, file=sys.stdout)


def smoothed(values: list[float]) -> list[float]:
    """Exponential moving average with Adam's bias correction."""
    smooth, mean, keep = [], 0.0, 0.9
    for step, value in enumerate(values, 1):
        mean = keep * mean + (1 - keep) * value
        smooth.append(mean / (1 - keep**step))
    return smooth


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
