"""What a rank takes grows with the number of ranks as docs/scale.md says, and no faster.

The one idea: counts are exact, so two numbers of ranks say how each grows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import scale

UNITS = 4


def record(transport: str, ranks: int) -> dict[str, Any]:
    return scale.measure(scale.arguments([f"--units={UNITS}", "--steps=2"]), transport, ranks, 1)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_descriptors_and_mappings_of_real_ranks(transport: str) -> None:
    few, many = record(transport, 2), record(transport, 6)
    assert many["files"] - few["files"] <= 2 * 4, "two descriptors for each rank more"
    # Of each rank over shm its control block and its buckets; over c10d nothing. The allocator may take a few.
    assert many["maps"] - few["maps"] <= (8 * 4 if transport == "shm" else 0) + 8
    assert many["threads"] == few["threads"]


def test_a_world_that_moves_nothing() -> None:
    few, many = record("fake", 8), record("fake", 64)
    assert many["files"] - few["files"] == 64 - 8, "a process of this host each"
    assert abs(many["maps"] - few["maps"]) <= 8 and many["threads"] == few["threads"]
    assert many["collectives"] == few["collectives"] > 4 * UNITS
    assert many["turns"] / 63 == pytest.approx(few["turns"] / 7), "the size of TURN"
    assert many["transport_bytes"] - few["transport_bytes"] <= 56 * 300 * (UNITS + 2)
    assert abs(many["objects"] - few["objects"]) <= 20
