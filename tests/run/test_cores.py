"""A host's cores, and each rank's share of them.

The kernel's files are written to a folder, so each host is a few lines.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from rows import all_rows

from zshard.extras.doctor import bf16, describe
from zshard.extras.run.cores import as_list, parse_list, read_host, shares_of


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def commas(numbers: Collection[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def host(
    root: Path,
    *,
    sockets: int = 1,
    nodes: int = 1,
    cores: int = 8,
    threads: int = 1,
    offline: Collection[int] = (),
) -> Path:
    """Write a host with `cores` cores and `nodes` NUMA nodes per socket; `offline`: CPUs.

    Numbered as on most servers: the first hyperthread of every core, socket after socket, then the
    second ones.
    """
    total = sockets * cores
    cpus = root / "sys/devices/system/cpu"
    members: dict[int, list[int]] = {node: [] for node in range(sockets * nodes)}
    for cpu in range(total * threads):
        core = cpu % total
        members[core * sockets * nodes // total].append(cpu)
        if cpu in offline:
            continue
        siblings = {core + i * total for i in range(threads)} - set(offline)
        write(cpus / f"cpu{cpu}/topology/core_cpus_list", commas(siblings))
        write(cpus / f"cpu{cpu}/topology/physical_package_id", str(core // cores))
    write(cpus / "online", commas(set(range(total * threads)) - set(offline)))
    for node, its in members.items():
        write(root / f"sys/devices/system/node/node{node}/cpulist", commas(set(its) - set(offline)))
    return root


def quota(root: Path, text: str, path: str = "/") -> None:
    """Put this process into a control group (version 2) with this cpu.max."""
    write(root / "proc/self/cgroup", f"0::{path}")
    write(root / "sys/fs/cgroup" / path.strip("/") / "cpu.max", text)


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
    "three": ({"sockets": 2}, 3, [("0-4", 5, [0]), ("5-9", 5, [0, 1]), ("10-14", 5, [1])]),
    "clusters": ({"sockets": 2, "nodes": 2}, 4, EACH),
    "two clusters each": (
        {"sockets": 2, "nodes": 2},
        2,
        [("0-7", 8, [0, 1]), ("8-15", 8, [2, 3])],
    ),
    "across": (
        {"sockets": 2, "nodes": 2, "cores": 6},
        2,
        [("0-5", 6, [0, 1]), ("6-11", 6, [2, 3])],
    ),
}


def test_ranks_get_equal_shares_within_nodes(tmp_path: Path) -> None:
    with all_rows() as row:
        for name, (which, ranks, expected) in SHARES.items():
            with row(name):
                count = which.get("sockets", 1) * which.get("cores", 8) * which.get("threads", 1)
                assert shares(host(tmp_path / name, **which), ranks, range(count)) == expected


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
    assert shares(tmp_path, 3, allowed) == [("1-2", 2, [0]), ("5,22", 2, [0]), ("8,23", 2, [0, 1])]
    host(tmp_path, sockets=2, nodes=2, cores=6)
    uneven = {0, 1, 2, 3, 4, 6}  # three cores on the first node, then two and one
    assert shares(tmp_path, 2, uneven) == [("0-2", 3, [0]), ("3-4,6", 3, [1, 2])]


QUOTAS: dict[str, tuple[int, str]] = {  # how many cores are usable, and why ranks are not bound
    "max 100000": (8, ""),
    "800000 100000": (8, ""),
    "350000 100000": (3, "a quota of 3.5 CPUs' time applies to 8 cores"),
    "50000 100000": (1, "1 core(s)"),
}


def test_quota(tmp_path: Path) -> None:
    with all_rows() as row:
        for limit, (usable, words) in QUOTAS.items():
            quota(host(tmp_path), limit, "/kubepods/pod1")
            with row(limit):
                assert read_host(tmp_path, range(8)).usable == usable
                found, threads, why = shares_of(read_host(tmp_path, range(8)), 2, "core")
                assert (why == "") == (words == "") and words in why
                assert threads == max(1, usable // 2) and bool(found[0].cpus) == (words == "")


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
    assert found.nodes == 1
    host(tmp_path, sockets=2, threads=2)
    shutil.rmtree(tmp_path / "sys/devices/system/node")
    assert shares(tmp_path, 2, range(32)) == [("0-7", 8, []), ("8-15", 8, [])]


def test_lists() -> None:
    lists = {"0-2,8\n": {0, 1, 2, 8}, "": set(), "\n": set(), "0-x": set()}
    assert {text: parse_list(text) for text in lists} == lists


BF16 = {  # the CPU's flags, and the doctor's answer
    "flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n": "amx_bf16",
    "flags\t\t: fpu avx512f avx512_bf16\n": "avx512_bf16",
    "Features\t: fp asimd sve bf16\n": "bf16",
    "flags\t\t: fpu avx2\n": "none: the CPU has no bfloat16",
    "": "none: the CPU has no",
}


def test_bf16() -> None:
    for cpuinfo, words in BF16.items():
        assert bf16(cpuinfo).startswith(words), cpuinfo
