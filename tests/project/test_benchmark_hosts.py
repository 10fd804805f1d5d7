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

pytestmark = pytest.mark.thorough
WHO = "cat /proc/sys/kernel/random/boot_id; hostname; readlink /proc/self/ns/pid /proc/self/ns/net"
KILLED = """
from benchmarks.hosts_net import Hosts
hosts = Hosts(2)
ranks = [host.start(["sleep", "1000"], {}) for host in hosts.all]
print(*(host.call("readlink", "/proc/self/ns/pid").strip() for host in hosts.all), flush=True)
ranks[0].wait()
"""


@pytest.fixture
def three() -> Iterator[Hosts]:
    try:
        made = Hosts(3, gbit=1)
    except HostsUnavailable as error:
        pytest.skip(f"needs root and network namespaces: {error}")
    with made:
        yield made


def test_hosts_share_nothing(three: Hosts) -> None:
    answers = [host.call("sh", "-c", WHO).split() for host in three.all]
    for what in zip(*answers, strict=True):
        assert len(set(what)) == 3, what
    assert three.reached_gbit() < 1.05  # under load it may be less


def test_killed_run_leaves_no_process(three: Hosts) -> None:
    def in_use() -> set[str]:
        done = subprocess.run(["ps", "-eo", "pidns="], capture_output=True, text=True, check=True)
        return {f"pid:[{number}]" for number in done.stdout.split()}

    command = [sys.executable, "-c", KILLED]
    child = subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    spaces = set(child.stdout.readline().split())
    assert len(spaces) == 2 and spaces <= in_use()
    child.send_signal(signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 30
    while spaces & in_use() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not spaces & in_use(), "a host's processes are still there"


def test_least_bytes_between_hosts() -> None:
    for side, count, least in (
        ("ddp", 2, 400),  # half of it out, the sum of the other half back
        ("zshard-full_shard-auto-bf16", 2, 600),
        ("zshard-shard_grad_op-c10d", 4, 600),
        ("zshard-hybrid_shard-auto", 2, 400),
        ("zshard-full_shard-auto-keep_true", 2, 400),
    ):
        assert hosts.least_bytes(side, 400, count) == least, side
    for text in ("2", "1x2", "2x0", "2xa", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected one like 2x1"):
            hosts.layout(text)


def test_hosts_quick(three: Hosts, tmp_path: Path) -> None:
    three.close()
    out = tmp_path / "hosts.json"
    command = [sys.executable, "-m", "benchmarks.hosts", "--quick", f"--out={out}", "--gbit", "10"]
    command += ["--models", "tiny32", "--sides", "ddp", "zshard-full_shard-auto"]
    subprocess.run(command, cwd=harness.ROOT, check=True, timeout=250)
    (result,) = json.loads(out.read_text())["results"]
    assert (result["hosts"], result["ranks_per_host"], result["gbit"]) == (2, 1, 10)
    side = result["sides"]["zshard-full_shard-auto"]
    of = side["bytes"]
    assert side["loss_difference"] == 0
    assert of["peak"][1] > of["held"][1] > 0.5 * of["predicted"][1] > 0
    assert min(side["wire"]["sent"]) > 0.8 * side["least_bytes"]
