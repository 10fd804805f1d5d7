"""The picture of a plan: memory of a rank by part, and the recommended step in time."""

from __future__ import annotations

from pathlib import Path

from zshard.extras.planner.gpus import GIB
from zshard.extras.planner.search import Plan, name_of
from zshard.extras.planner.timeline import COMPUTE, WIRE

PARTS = {  # of a rank's memory: label, colour
    "shards": ("parameters: this rank's shards", "#0969da"),
    "kept": ("a full copy that stays", "#54aeff"),
    "grads": ("gradients", "#bf8700"),
    "optimizer": ("optimizer state", "#8250df"),
    "slots": ("gathered parameters", "#1a7f37"),
    "buckets": ("gradients on their way", "#e16f24"),
    "transport": ("the transport's buffers", "#afb8c1"),
    "activations": ("activations", "#d1242f"),
}
COLOURS = {"forward": "#0969da", "backward": "#54aeff", "gather": "#1a7f37", "reduce": "#e16f24"}


def draw(plan: Plan, file: Path) -> None:
    """Draw a plan into a file, whose ending says the format. Raises ImportError without
    matplotlib."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError("--picture needs matplotlib: pip install matplotlib") from error
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1))
    names = [f"{name_of(e.way)} {e.way.checkpointing}".strip() for e in plan.predictions]
    places = range(len(names) - 1, -1, -1)
    left = [0.0] * len(names)
    for part, (label, colour) in PARTS.items():
        sizes = [each.memory[part] / GIB for each in plan.predictions]
        above.barh(places, sizes, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    above.axvline(plan.limit / GIB, color="#1f2328", linestyle="--")
    above.set_yticks(list(places), names)
    above.set_xlabel(f"GiB of a rank at the peak; dashed: what {plan.device} has")
    above.legend(fontsize=7)
    shown = plan.best or plan.predictions[0]
    rows, shown_labels = {COMPUTE: 1, WIRE: 0}, set()
    for span in (span for span in shown.timeline.spans if span.resource in rows):
        name = None if span.what in shown_labels else span.what
        shown_labels.add(span.what)
        style = {"color": COLOURS[span.what], "edgecolor": "white", "linewidth": 0.2}
        begin, width = 1e3 * span.start, 1e3 * span.seconds
        below.barh(rows[span.resource], width, left=begin, label=name, **style)
    below.set_yticks([1, 0], ["kernels", "wire"])
    below.set_xlabel(f"ms of a micro-batch with {shown.way.strategy}")
    below.legend(fontsize=7, ncols=4)
    figure.savefig(file)
