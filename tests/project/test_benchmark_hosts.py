"""Benchmarks of several hosts and many ranks: namespaces as hosts, and docs/contributing/scale.md's formulas.

Thorough tests: they test tools. How a rank's resources grow with the number of ranks is exact, so two
numbers of ranks show it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from c_sources import INCLUDES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import harness, hosts, scale, scale_rank
from benchmarks.hosts_net import Hosts, HostsUnavailable
from benchmarks.hosts_ops import OPERATIONS, Place

pytestmark = pytest.mark.thorough
UNITS = 4


@pytest.fixture
def three() -> Iterator[Hosts]:
    try:
        made = Hosts(3, gbit=1)
    except HostsUnavailable as error:
        pytest.skip(f"needs root and network namespaces: {error}")
    with made:
        yield made


WHO = "cat /proc/sys/kernel/random/boot_id; hostname; readlink /proc/self/ns/pid /proc/self/ns/net"

KILLED = """
from benchmarks.hosts_net import Hosts
hosts = Hosts(2)
ranks = [host.start(["sleep", "1000"], {}) for host in hosts.all]
print(*(host.call("readlink", "/proc/self/ns/pid").strip() for host in hosts.all), flush=True)
ranks[0].wait()
"""


def spaces_in_use() -> set[str]:
    """The namespaces that living processes are in."""
    done = subprocess.run(["ps", "-eo", "pidns="], capture_output=True, text=True, check=True)
    return {f"pid:[{number}]" for number in done.stdout.split()}


def test_hosts_share_nothing(three: Hosts) -> None:
    answers = [host.call("sh", "-c", WHO).split() for host in three.all]
    for what in zip(*answers, strict=True):
        assert len(set(what)) == 3, what
    assert three.reached_gbit() < 1.05  # under load it may be less


def test_killed_run_leaves_no_process(three: Hosts) -> None:
    command = [sys.executable, "-c", KILLED]
    child = subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    spaces = set(child.stdout.readline().split())
    assert len(spaces) == 2 and spaces <= spaces_in_use()
    child.send_signal(signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 30
    while spaces & spaces_in_use() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not spaces & spaces_in_use(), "a host's processes are still there"


def test_least_bytes_between_hosts() -> None:
    assert hosts.least_bytes("ddp", 400, 2) == 400  # half of it out, the sum of the other half back
    assert hosts.least_bytes("zshard-full_shard-auto", 400, 2) == 600
    assert hosts.least_bytes("zshard-shard_grad_op-c10d", 400, 4) == 600
    assert hosts.least_bytes("zshard-hybrid_shard-auto", 400, 2) == 400
    assert hosts.least_bytes("zshard-full_shard-auto-keep_false", 400, 2) == 600
    assert hosts.least_bytes("zshard-full_shard-auto-keep_true", 400, 2) == 400
    place = Place(hosts=2, ranks=2, rank=0)
    factors = {name: operation.factor(place) for name, operation in OPERATIONS.items()}
    assert factors["all_gather_into_tensor"] == factors["swap"] == 0.5
    assert factors["all_reduce"] == factors["all_to_all_single"] == factors["pairs"] == 1.0


def test_keep_gathered_doubles_the_sides() -> None:
    flags = ["--sides", "ddp", "zshard-full_shard-auto", "--keep-gathered", "true", "false"]
    kept = ["zshard-full_shard-auto-keep_true", "zshard-full_shard-auto-keep_false"]
    assert hosts.arguments(flags).sides == ["ddp", *kept]
    assert hosts.arguments(flags[:3]).sides == ["ddp", "zshard-full_shard-auto"]


@pytest.mark.parametrize("text", ["2", "1x2", "2x0", "2xa", ""])
def test_invalid_layouts_are_refused(text: str) -> None:
    assert hosts.layout("4x1") == (4, 1)
    with pytest.raises(argparse.ArgumentTypeError, match="expected one like 2x1"):
        hosts.layout(text)


@pytest.mark.parametrize("flags", [[], ["--collectives"]], ids=["steps", "collectives"])
def test_hosts_quick(three: Hosts, flags: list[str], tmp_path: Path) -> None:
    three.close()
    out = tmp_path / "hosts.json"
    command = [sys.executable, "-m", "benchmarks.hosts", "--quick", f"--out={out}", "--gbit", "10"]
    models = ["--models", "tiny32", "--sides", "ddp", "zshard-full_shard-auto"]
    done = subprocess.run(
        [*command, *models, *flags], cwd=harness.ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert (result["hosts"], result["ranks_per_host"], result["gbit"]) == (2, 1, 10)
    if flags:
        assert {entry["operation"] for entry in result["operations"]} == set(OPERATIONS)
        assert min(entry["gb_per_s"] for entry in result["operations"]) > 0
    else:
        side = result["sides"]["zshard-full_shard-auto"]
        assert side["loss_difference"] == 0
        of = side["bytes"]
        assert of["peak"][1] > of["held"][1] > 0.5 * of["predicted"][1] > 0
        assert min(side["wire"]["sent"]) > 0.8 * side["least_bytes"]
    assert "| --- |" in done.stdout


# --- scale ----------------------------------------------------------------------------------------


def record(transport: str, ranks: int, hosts: int = 1) -> dict[str, Any]:
    args = scale.arguments([f"--units={UNITS}", "--steps=2"])
    found = scale.measure(args, transport, ranks, hosts)
    assert "failed" not in found, found
    return found


def test_turn_has_the_size_in_c() -> None:
    assertion = f'_Static_assert(sizeof(zs_turn) == {scale_rank.TURN}, "TURN");'
    source = f'#include "comm/turn.h"\n{assertion}\n'
    command = ["cc", "-std=c11", *INCLUDES, "-fsyntax-only", "-x", "c", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_scale_prints_and_saves_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row when it is finished, also that of a world that timed out."""
    monkeypatch.setattr(scale, "run", lambda *_: "not ended in 1 s")
    out = tmp_path / "rows"
    scale.main(
        ["--ranks", "2", "--transports", "shm", "--worlds", "8", "--limit=1", f"--out={out}"]
    )
    assert "| 2 | 1 | shm | 8 | not ended in 1 s |" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("command", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_scale_limits_each_world(command: str) -> None:
    why = scale.run([sys.executable, "-S", "-c", command], {}, 2.0)
    assert why == ("not ended in 2 s" if "sleep" in command else "failed: 3")


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
def test_descriptors_and_mappings_grow_as_documented(
    transport: str, few: tuple[int, int], many: tuple[int, int], files: int, maps: int
) -> None:
    less, more = record(transport, *few), record(transport, *many)
    assert more["files"] - less["files"] == files
    assert more["maps"] - less["maps"] <= maps + 8, "the allocator may take a few"
    assert more["threads"] == less["threads"]
    assert more["collectives"] == less["collectives"]


def test_fake_worlds_grow_as_documented() -> None:
    few, many = record("fake", 8), record("fake", 64)
    assert many["files"] - few["files"] == 64 - 8
    assert abs(many["maps"] - few["maps"]) <= 8 and many["threads"] == few["threads"]
    assert many["collectives"] == few["collectives"] > 4 * UNITS
    assert many["turns"] / 63 == pytest.approx(few["turns"] / 7)
    assert many["transport_bytes"] - few["transport_bytes"] <= 56 * 300 * (UNITS + 2)
    assert abs(many["objects"] - few["objects"]) <= 20
