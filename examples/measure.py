"""What a run is measured by: memory of this process, progress on the screen, a JSON and a PNG.

The one idea: memory is PSS, the proportional set size. A page that N processes share counts 1/N in
each, so that a library which shares memory between ranks is not charged twice for it (RSS would).
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import threading
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

MIB = 1024 * 1024
SAMPLE_SECONDS = 0.05


class PeakMemory:
    """Samples this process's memory in a thread while it is entered; `mib` is the highest seen.

    PSS where Linux tells it; elsewhere the kernel's own high-water mark of RSS since the start.
    """

    def __init__(self) -> None:
        self.mib = 0.0
        self.kind = "RSS" if _pss_bytes() is None else "PSS"
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

    def _sample(self) -> None:
        while True:
            used = _pss_bytes()
            self.mib = max(self.mib, (_peak_rss_bytes() if used is None else used) / MIB)
            if self._stop.wait(SAMPLE_SECONDS):
                return


class Progress:
    """One line of numbers that is rewritten on a terminal, and printed now and then in a log.

    Rank 0 shows; on other ranks every method does nothing. Uses tqdm if it is installed.
    """

    def __init__(self, steps: int, title: str, *, show: bool) -> None:
        self.steps = steps
        self.title = title
        self.show = show
        self.every = max(1, steps // 20)
        self.bar = _terminal_bar(steps, title) if show else None

    def update(self, step: int, numbers: str) -> None:
        """After step `step` (counted from 1)."""
        if self.bar is not None:
            self.bar.set_postfix_str(numbers, refresh=False)
            self.bar.update()
        elif self.show and (step % self.every == 0 or step in (1, self.steps)):
            print(f"{self.title} {step:5d}/{self.steps}  {numbers}", flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.write(text)
        elif self.show:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Meter:
    """Losses and step times of this rank, and the running figures for the progress line."""

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
        """The last ten steps' loss on this rank and speed of all ranks, and the memory's peak."""
        recent = self.losses[-10:]
        speed = self.tokens_per_step * len(recent) / sum(self.seconds[-10:])
        loss = sum(recent) / len(recent)
        return f"loss {loss:.3f}, {speed:,.0f} tokens/s, peak {self.memory.mib:,.0f} MiB"


def surroundings() -> dict[str, Any]:
    """Where and when: date, machine and versions, for the JSON."""
    packages = ("torch", "zshard")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
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
    """Draw the loss of each step and the held-out loss; False if there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # no window: this runs on servers too
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=0.6, alpha=0.45, color="tab:blue", label="each step")
    axes.plot(steps, _smoothed(losses), color="tab:blue", label="smoothed")
    axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out files")
    axes.set(title=title, xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _pss_bytes() -> int | None:
    """PSS of this process, or None where the kernel does not tell."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _terminal_bar(steps: int, title: str) -> Any:
    """A tqdm bar on a terminal; None in a log or without tqdm: lines are printed then."""
    if not sys.stdout.isatty() or 0 in os.get_terminal_size(sys.stdout.fileno()):
        return None  # a terminal that knows no size is some tool's: tqdm would draw nothing there
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    return tqdm(total=steps, desc=title, bar_format=form, dynamic_ncols=True, file=sys.stdout)


def _smoothed(values: list[float]) -> list[float]:
    """Exponential mean, with the start's bias taken out as Adam does."""
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
