"""Hosts as the kernel describes them in /sys and /proc, written to a folder.

    root = host(tmp_path, sockets=2, nodes=2, cores=8, threads=2)
    read_topology(root, affinity=range(32))

Numbering is that of most servers: first one hyperthread of every core, socket after
socket, then the second ones.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


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
    """Write a host with `cores` cores and `nodes` NUMA nodes per socket; `offline`: CPUs."""
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
