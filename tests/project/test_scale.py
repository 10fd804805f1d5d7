"""What a rank takes grows with the number of ranks as docs/contributing/scale.md says, and no faster.

Counts are exact, so two numbers of ranks say how each grows. Real ranks are among the
thorough tests; each time, one world that moves nothing is held to the same formulas.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from c_sources import INCLUDES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import scale, scale_rank

UNITS = 4


def record(transport: str, ranks: int, hosts: int = 1) -> dict[str, Any]:
    args = scale.arguments([f"--units={UNITS}", "--steps=2"])
    found = scale.measure(args, transport, ranks, hosts)
    assert "failed" not in found, found
    return found


def test_size_of_a_turn() -> None:
    assertion = f'_Static_assert(sizeof(zs_c10d_turn) == {scale_rank.TURN}, "TURN");'
    source = f'#include "comm/c10d/c10d.h"\n{assertion}\n'
    command = ["cc", "-std=c11", *INCLUDES, "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_world_that_moves_nothing() -> None:
    one = record("fake", 64)
    assert one["files"] == 63, "a process of this host each"
    assert one["threads"] <= 1, (
        "the one that asks the store, which only a newer torch's fake answers"
    )
    assert one["turns"] * 1024 / (63 * scale_rank.TURN) == one["collectives"] / 2 > 2 * UNITS


def test_what_is_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row when it is finished, also that of a world that has not ended in time."""
    monkeypatch.setattr(scale, "run", lambda *_: "not ended in 1 s")
    out = tmp_path / "rows"
    scale.main(
        ["--ranks", "2", "--transports", "shm", "--worlds", "8", "--limit=1", f"--out={out}"]
    )
    assert "| 2 | 1 | shm | 8 | not ended in 1 s |" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("command", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_a_world_has_a_limit(command: str) -> None:
    why = scale.run([sys.executable, "-S", "-c", command], {}, 2.0)
    assert why == ("not ended in 2 s" if "sleep" in command else "failed: 3")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("transport", "few", "many", "files", "maps"),
    [
        # Of each rank a pidfd and a file of buckets; mapped are its control block and buckets.
        ("shm", (2, 1), (6, 1), 2 * 4, 8 * 4),
        ("c10d", (2, 1), (6, 1), 2 * 4, 0),  # a pidfd and a connection
        # Besides, of each rank of the host what shm takes, and a connection of the host's group.
        ("hosts", (4, 2), (8, 2), 2 * 4 + 3 * 2, 8 * 2),
    ],
)
def test_descriptors_and_mappings_of_real_ranks(
    transport: str, few: tuple[int, int], many: tuple[int, int], files: int, maps: int
) -> None:
    less, more = record(transport, *few), record(transport, *many)
    assert more["files"] - less["files"] == files
    assert more["maps"] - less["maps"] <= maps + 8, "the allocator may take a few"
    assert more["threads"] == less["threads"]
    assert more["collectives"] == less["collectives"]


@pytest.mark.thorough
def test_worlds_that_move_nothing() -> None:
    few, many = record("fake", 8), record("fake", 64)
    assert many["files"] - few["files"] == 64 - 8
    assert abs(many["maps"] - few["maps"]) <= 8 and many["threads"] == few["threads"]
    assert many["collectives"] == few["collectives"] > 4 * UNITS
    assert many["turns"] / 63 == pytest.approx(few["turns"] / 7)
    assert many["transport_bytes"] - few["transport_bytes"] <= 56 * 300 * (UNITS + 2)
    assert abs(many["objects"] - few["objects"]) <= 20
