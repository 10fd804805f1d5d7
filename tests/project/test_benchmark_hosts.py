"""Benchmarks of several hosts, with namespaces as hosts. Thorough tests: they test tools."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import harness, hosts
from benchmarks.hosts_net import Hosts, HostsUnavailable
from benchmarks.hosts_ops import OPERATIONS, Place

pytestmark = pytest.mark.thorough


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
