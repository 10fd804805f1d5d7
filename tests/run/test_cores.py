"""A host's cores, each rank's share of them, and the warning if ranks leave some idle.

The kernel's files are written to a folder (fake_hosts.py), so each host is a few lines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from fake_hosts import host, quota, write
from nursery import fork_ranks
from spawn import _python_path

from zshard import FSDP, fully_shard
from zshard.doctor import bf16, describe
from zshard.run import cores
from zshard.run.cores import as_list, parse_list, read_host, shares_of


def shares(root: Path, ranks: int, cpus: Iterable[int], binding: str = "core") -> list[tuple]:
    """Return (CPUs, threads, memory's nodes) of each rank; checks that all are bound."""
    found, threads, why = shares_of(read_host(root, cpus), ranks, binding)
    assert why == ""
    return [(as_list(each.cpus), threads, each.nodes) for each in found]


EACH = [(f"{4 * i}-{4 * i + 3}", 4, [i]) for i in range(4)]
SHARES = {
    "hyperthreads are left out": ({"threads": 2}, 2, [("0-3", 4, []), ("4-7", 4, [])]),
    "a rest is left out": ({}, 3, [("0-1", 2, []), ("2-3", 2, []), ("5-6", 2, [])]),
    "two sockets": ({"sockets": 2}, 2, [("0-7", 8, [0]), ("8-15", 8, [1])]),
    "one rank": ({"sockets": 2}, 1, [("0-15", 16, [0, 1])]),
    # four cores each: a fifth would be on the other socket
    "three": ({"sockets": 2}, 3, [("0-3", 4, [0]), ("4-7", 4, [0]), ("8-11", 4, [1])]),
    "clusters": ({"sockets": 2, "nodes": 2}, 4, EACH),
    "two clusters each": (
        {"sockets": 2, "nodes": 2},
        2,
        [("0-7", 8, [0, 1]), ("8-15", 8, [2, 3])],
    ),
    "idle": (
        {"sockets": 2, "nodes": 2, "cores": 4},
        3,
        [("0-1", 2, [0]), ("2-3", 2, [1]), ("4-5", 2, [2])],
    ),
    "across": (
        {"sockets": 2, "nodes": 2, "cores": 6},
        2,
        [("0-5", 6, [0, 1]), ("6-11", 6, [2, 3])],
    ),
}


@pytest.mark.parametrize("name", SHARES)
def test_ranks_get_equal_shares_within_nodes(tmp_path: Path, name: str) -> None:
    which, ranks, expected = SHARES[name]
    count = which.get("sockets", 1) * which.get("cores", 8) * which.get("threads", 1)
    assert shares(host(tmp_path, **which), ranks, range(count)) == expected


def test_other_bindings(tmp_path: Path) -> None:
    host(tmp_path, sockets=2, nodes=2)
    numa = shares(tmp_path, 8, range(16), "numa")
    assert numa[:2] == [("0-3", 2, [0])] * 2 and numa[6:] == [("12-15", 2, [3])] * 2
    assert shares(tmp_path, 4, range(16), "none") == [("", 4, [])] * 4


def test_doctor_report_of_cores(tmp_path: Path) -> None:
    host(tmp_path, sockets=2, threads=2)
    assert describe(read_host(tmp_path, range(32))) == (
        "usable: 16 cores of 2 NUMA nodes (CPUs 0-15)"
    )
    assert describe(read_host(tmp_path, {3})) == "usable: 1 core of 1 NUMA node (CPUs 3)"


def test_offline_cpus_and_second_threads(tmp_path: Path) -> None:
    host(tmp_path, threads=2, offline={0, 3, 11})
    found = read_host(tmp_path, set(range(16)) - {0, 3, 11})
    assert [core.cpu for core in found.cores] == [1, 2, 4, 5, 6, 7, 8]  # 8 is of core 0


def test_affinity_with_gaps(tmp_path: Path) -> None:
    """taskset or a container's cpuset: half of a core counts as one, and nodes are uneven."""
    host(tmp_path, sockets=2, threads=2)
    allowed = {1, 2, 17, 5, 22, 23, 8, 9}  # 17 is the second thread of core 1
    assert [core.cpu for core in read_host(tmp_path, allowed).cores] == [1, 2, 5, 22, 23, 8, 9]
    assert shares(tmp_path, 3, allowed) == [("1-2", 2, [0]), ("5,22", 2, [0]), ("8-9", 2, [1])]
    assert shares(tmp_path, 2, {*range(8), 8}) == [("0-3", 4, [0]), ("4-7", 4, [0])]
    host(tmp_path, sockets=2, nodes=2, cores=6)
    uneven = {0, 1, 2, 3, 4, 6}  # three cores on the first node, then two and one
    assert shares(tmp_path, 2, uneven) == [("0-2", 3, [0]), ("3-4,6", 3, [1, 2])]


def test_cpuset_without_a_nodes_memory(tmp_path: Path) -> None:
    host(tmp_path, sockets=2, nodes=2)
    write(tmp_path / "proc/self/status", "Mems_allowed_list:\t0,2-3")
    assert [nodes for _, _, nodes in shares(tmp_path, 4, range(16))] == [[0], [], [2], [3]]


@pytest.mark.parametrize(
    ("limit", "usable", "words"),
    [
        ("max 100000", 8, None),
        ("800000 100000", 8, None),
        ("350000 100000", 3, "a quota of 3.5 CPUs' time applies to 8 cores"),
        ("50000 100000", 1, "1 core(s)"),
    ],
)
def test_quota(tmp_path: Path, limit: str, usable: int, words: str | None) -> None:
    quota(host(tmp_path), limit, "/kubepods/pod1")
    assert read_host(tmp_path, range(8)).usable == usable
    found, threads, why = shares_of(read_host(tmp_path, range(8)), 2, "core")
    assert (why == "") == (words is None) and (words or "") in why
    assert threads == max(1, usable // 2) and bool(found[0].cpus) == (words is None)


def test_quota_of_version_1_and_of_a_parent(tmp_path: Path) -> None:
    group = host(tmp_path) / "sys/fs/cgroup/cpu/docker"
    write(tmp_path / "proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/docker/b")
    for folder, limit in ((group / "b", "-1"), (group, "200000")):
        assert read_host(tmp_path, range(8)).quota is None
        write(folder / "cpu.cfs_quota_us", limit)
        write(folder / "cpu.cfs_period_us", "100000")
    words = "usable: 2 cores of 1 NUMA node (CPUs 0-7, within a quota of 2 CPUs' time)"
    assert describe(read_host(tmp_path, range(8))) == words


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    found, threads, why = shares_of(read_host(host(tmp_path), range(8)), 9, "core")
    assert found == [([], [])] * 9 and threads == 1
    assert "9 ranks share 8 core(s), so they are not bound" in why


def test_missing_files(tmp_path: Path) -> None:
    found = read_host(tmp_path, {0, 1, 5})  # no files at all, as in some sandboxes
    assert [core.cpu for core in found.cores] == [0, 1, 5]
    assert found.nodes == 1 and found.memory == set()
    host(tmp_path, sockets=2, threads=2)
    shutil.rmtree(tmp_path / "sys/devices/system/node")
    for folder in (tmp_path / "sys/devices/system/cpu").glob("cpu*/topology"):
        (folder / "core_cpus_list").rename(folder / "thread_siblings_list")  # before Linux 5.0
    assert shares(tmp_path, 2, range(32)) == [("0-7", 8, []), ("8-15", 8, [])]


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-2,8\n", {0, 1, 2, 8}), ("", set()), ("\n", set()), ("0-x", set())]
)
def test_lists(text: str, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


@pytest.mark.parametrize(
    ("cpuinfo", "words"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", "amx_bf16"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16"),
        ("Features\t: fp asimd sve bf16\n", "bf16"),
        ("flags\t\t: fpu avx2\n", "none: the CPU has no bfloat16"),
        ("", "none: the CPU has no"),
    ],
)
def test_bf16(cpuinfo: str, words: str) -> None:
    assert bf16(cpuinfo).startswith(words)


# --- idle cores under torchrun ----------------------------------------------------------------------


def started_by(folder: Path, environ: str | None) -> bool:
    """Return whether the 1 counts as torchrun's own if it was started with that environment."""
    if environ is not None:
        write(folder / "proc/7/environ", environ)
    return cores.is_torchruns_choice(7, folder)


def test_user_setting_is_distinguished_from_torchruns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not started_by(tmp_path, "HOME=/\0")  # no torchrun, as in the tests' ranks
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert started_by(tmp_path, "HOME=/\0MY_OMP_NUM_THREADS=1\0")
    assert not started_by(tmp_path, "HOME=/\0OMP_NUM_THREADS=1\0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not started_by(tmp_path, "HOME=/\0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "proc/7/environ").unlink()
    assert not started_by(tmp_path, None)


def wrap(usable: int) -> list[str]:
    """Return the warnings of three models on a rank of a host with that many cores, with their
    files."""
    os.environ.update(TORCHELASTIC_RUN_ID="none", OMP_NUM_THREADS="1")
    cores.is_torchruns_choice = lambda parent: True
    cores.read_host = lambda: cores.Host([cores.Core(0, cpu) for cpu in range(usable)], set(), None)
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for wrapped in (FSDP, fully_shard, FSDP):
            wrapped(torch.nn.Linear(4, 4))
    return [f"{Path(each.filename).name}: {each.message}" for each in found]


def test_first_rank_of_a_host_warns_of_idle_cores() -> None:
    first, second = fork_ranks(wrap, 2, 9, check=True)
    assert second.value == [] and len(first.value) == 1
    assert first.value[0].startswith(
        "test_cores.py: cores are idle: the 2 ranks of this host may use 9 physical cores, but "
        "compute on 1 thread each"
    )
    assert "`python -m zshard run -n 2`" in first.value[0]
    assert "set OMP_NUM_THREADS=4;" in first.value[0]
    assert [each.value for each in fork_ranks(wrap, 2, 3, check=True)] == [[], []]


def test_torchrun_setting_is_recognized(tmp_path: Path) -> None:
    """A torchrun of the installed torch, without the user's own OMP_NUM_THREADS."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '0':\n"
        "    from zshard.run.cores import is_torchruns_choice\n"
        "    print(is_torchruns_choice(os.getppid()))\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    env = {**os.environ, "PYTHONPATH": _python_path()}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([*words, str(script)], capture_output=True, text=True, env=env)
    assert done.stdout == "True\n", done.stderr
