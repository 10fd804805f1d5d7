"""What is read of a host's cores, and each rank's share of them, on hosts that this machine is not.

The kernel's files are written to a folder (fake_hosts.py), so each host is a few lines.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_hosts import host, quota, write

from zshard.doctor.cpus import bf16, describe
from zshard.run.shares import as_list, ranks_for, shares_of
from zshard.run.topology import parse_list, read_topology


def shares(root: Path, ranks: int, cpus: range | set[int], binding: str = "core") -> list[tuple]:
    """(CPUs, threads, memory's nodes) of each rank; that all are bound is checked."""
    found, why = shares_of(read_topology(root, cpus), ranks, binding)
    assert why == ""
    return [(as_list(each.cpus), each.threads, each.nodes) for each in found]


def test_one_socket_with_hyperthreads(tmp_path: Path) -> None:
    topology = read_topology(host(tmp_path, threads=2), range(16))
    assert [core.cpu for core in topology.cores] == list(range(8))
    assert (topology.physical, topology.hyperthreads, topology.usable) == (8, 16, 8)
    assert ranks_for(topology) == 1
    assert shares(tmp_path, 2, range(16)) == [("0-3", 4, []), ("4-7", 4, [])]
    assert shares(tmp_path, 3, range(16)) == [("0-1", 2, []), ("2-3", 2, []), ("5-6", 2, [])]
    words = "1 socket, 1 NUMA node, 8 physical cores, 16 hyperthreads; usable: 8 cores (CPUs 0-7)"
    assert describe(topology) == words


def test_two_sockets(tmp_path: Path) -> None:
    host(tmp_path, sockets=2, threads=2)
    assert ranks_for(read_topology(tmp_path, range(32))) == 2
    assert shares(tmp_path, 2, range(32)) == [("0-7", 8, [0]), ("8-15", 8, [1])]
    assert shares(tmp_path, 4, range(32))[2:] == [("8-11", 4, [1]), ("12-15", 4, [1])]
    assert shares(tmp_path, 1, range(32)) == [("0-15", 16, [0, 1])]
    assert shares(tmp_path, 3, range(32)) == [
        ("0-3", 4, [0]),
        ("4-7", 4, [0]),
        ("8-11", 4, [1]),
    ]  # four cores each: a fifth would lie on the other socket


def test_sub_numa_clusters(tmp_path: Path) -> None:
    host(tmp_path, sockets=2, nodes=2, threads=2)
    assert ranks_for(read_topology(tmp_path, range(32))) == 4
    assert shares(tmp_path, 4, range(32)) == [(f"{4 * i}-{4 * i + 3}", 4, [i]) for i in range(4)]
    assert shares(tmp_path, 2, range(32)) == [("0-7", 8, [0, 1]), ("8-15", 8, [2, 3])]
    assert shares(tmp_path, 4, range(32), "socket") == [
        ("0-7", 4, [0, 1]),
        ("0-7", 4, [0, 1]),
        ("8-15", 4, [2, 3]),
        ("8-15", 4, [2, 3]),
    ]
    numa = shares(tmp_path, 8, range(32), "numa")
    assert numa[:2] == [("0-3", 2, [0])] * 2 and numa[6:] == [("12-15", 2, [3])] * 2


def test_none_sets_threads_alone(tmp_path: Path) -> None:
    host(tmp_path, sockets=2)
    assert shares(tmp_path, 4, range(16), "none") == [("", 4, [])] * 4


def test_offline_cpus_and_second_threads(tmp_path: Path) -> None:
    host(tmp_path, threads=2, offline={0, 3, 11})
    topology = read_topology(tmp_path, set(range(16)) - {0, 3, 11})
    assert [core.cpu for core in topology.cores] == [1, 2, 4, 5, 6, 7, 8]  # 8 is of core 0
    assert (topology.physical, topology.hyperthreads) == (7, 13)


def test_an_affinity_with_holes(tmp_path: Path) -> None:
    """taskset or a container's cpuset: half of a core counts as one, and nodes are uneven."""
    host(tmp_path, sockets=2, threads=2)
    allowed = {1, 2, 17, 5, 22, 23, 8, 9}  # 17 is the second thread of core 1
    topology = read_topology(tmp_path, allowed)
    assert [core.cpu for core in topology.cores] == [1, 2, 5, 22, 23, 8, 9]
    assert shares(tmp_path, 3, allowed) == [("1-2", 2, [0]), ("5,22", 2, [0]), ("8-9", 2, [1])]
    assert shares(tmp_path, 2, {*range(8), 8}) == [("0-3", 4, [0]), ("4-7", 4, [0])]


def test_ranks_cross_a_node_rather_than_leave_many_cores_idle(tmp_path: Path) -> None:
    host(tmp_path, sockets=2, cores=12)
    within = shares(tmp_path, 5, range(24))  # three and two of four cores, 20 of 24 in use
    assert [(cpus, nodes) for cpus, _, nodes in within][:3] == [
        ("0-3", [0]),
        ("4-7", [0]),
        ("8-11", [0]),
    ]
    host(tmp_path, sockets=2, nodes=2, cores=4)
    assert shares(tmp_path, 3, range(8)) == [
        ("0-1", 2, [0]),
        ("2-3", 2, [1]),
        ("4-5", 2, [2]),
    ]
    host(tmp_path, sockets=2, nodes=2, cores=6)
    across = shares(tmp_path, 2, range(12))
    assert across == [("0-5", 6, [0, 1]), ("6-11", 6, [2, 3])]
    uneven = {0, 1, 2, 3, 4, 6}  # three cores on the first node, then two and one
    assert shares(tmp_path, 2, uneven) == [("0-2", 3, [0]), ("3-4,6", 3, [1, 2])]


def test_a_cpuset_may_leave_out_a_nodes_memory(tmp_path: Path) -> None:
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
def test_a_quota(tmp_path: Path, limit: str, usable: int, words: str | None) -> None:
    quota(host(tmp_path), limit, "/kubepods/pod1")
    topology = read_topology(tmp_path, range(8))
    assert topology.usable == usable
    found, why = shares_of(topology, 2, "core")
    assert (why == "") == (words is None) and (words or "") in why
    assert found[0].threads == max(1, usable // 2) and bool(found[0].cpus) == (words is None)


def test_a_quota_of_version_1_and_of_a_parent(tmp_path: Path) -> None:
    host(tmp_path)
    write(tmp_path / "proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/docker/b")
    write(tmp_path / "sys/fs/cgroup/cpu/docker/b/cpu.cfs_quota_us", "-1")
    write(tmp_path / "sys/fs/cgroup/cpu/docker/b/cpu.cfs_period_us", "100000")
    assert read_topology(tmp_path, range(8)).quota is None
    write(tmp_path / "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us", "200000")
    write(tmp_path / "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us", "100000")
    topology = read_topology(tmp_path, range(8))
    assert topology.quota == 2.0
    assert describe(topology).endswith("usable: 2 cores (CPUs 0-7, within a quota of 2 CPUs' time)")


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    found, why = shares_of(read_topology(host(tmp_path), range(8)), 9, "core")
    assert found == [([], 1, [])] * 9
    assert "9 ranks share 8 core(s), so they are not bound" in why


def test_a_container_whose_files_count_its_cpus_from_zero(tmp_path: Path) -> None:
    host(tmp_path, sockets=2)
    write(tmp_path / "sys/devices/system/cpu/online", "0-3")  # lxcfs; the kernel says 8 to 11
    assert shares(tmp_path, 2, range(8, 12)) == [("8-9", 2, [1]), ("10-11", 2, [1])]


def test_files_that_are_missing(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, {0, 1, 5})  # nothing there at all, as in some sandboxes
    assert [core.cpu for core in topology.cores] == [0, 1, 5]
    assert (topology.sockets, topology.nodes, topology.physical) == (1, 1, 3)
    assert ranks_for(topology) == 1 and topology.memory == frozenset()
    host(tmp_path, sockets=2, threads=2)
    shutil.rmtree(tmp_path / "sys/devices/system/node")
    for folder in (tmp_path / "sys/devices/system/cpu").glob("cpu*/topology"):
        (folder / "core_cpus_list").rename(folder / "thread_siblings_list")  # before Linux 5.0
    topology = read_topology(tmp_path, range(32))
    assert (topology.sockets, topology.nodes, len(topology.cores)) == (2, 1, 16)
    assert shares(tmp_path, 2, range(32)) == [("0-7", 8, []), ("8-15", 8, [])]


def test_aarch64(tmp_path: Path) -> None:
    """Sockets that the firmware does not tell, one thread per core."""
    host(tmp_path, nodes=2, cores=64)
    for folder in (tmp_path / "sys/devices/system/cpu").glob("cpu*/topology"):
        write(folder / "physical_package_id", "-1")
    topology = read_topology(tmp_path, range(64))
    assert (topology.sockets, topology.nodes, topology.usable) == (1, 2, 64)
    assert shares(tmp_path, 2, range(64)) == [("0-31", 32, [0]), ("32-63", 32, [1])]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-2,8\n", {0, 1, 2, 8}), ("", set()), ("\n", set()), (None, set()), ("0-x", set())],
)
def test_lists(text: str | None, numbers: set[int]) -> None:
    assert parse_list(text) == numbers


@pytest.mark.parametrize(
    ("cpuinfo", "words"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", "amx_bf16"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16"),
        ("flags\t\t: fpu avx2\n", "none: the CPU has no bfloat16"),
        ("Features\t: fp asimd sve bf16\n", "sve bf16"),
        ("Features\t: fp asimd sve\n", "none (sve): the CPU has no bfloat16"),
        ("", "none: the CPU has no"),
    ],
)
def test_bf16(cpuinfo: str, words: str) -> None:
    assert bf16(cpuinfo).startswith(words)
