"""Hosts made out of one machine: namespaces, joined by a wire of a set rate.

A host is a process, `cat` as number 1 of its namespaces of processes, mounts, names
and network, that reads from a pipe of ours. Nothing of it has a name outside: neither the wire nor
the namespaces can collide with those of another run. When the pipe closes, because the hosts are
closed or because this process died for any reason, `cat` ends, and the kernel ends all of the
host's processes and takes its namespaces and its end of the wire away. There are no leftovers to
look for.

What makes ranks think that they are on another host: another boot id (a file bound over the
kernel's), another host name, another namespace of processes, and no shared network.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
"""The name of each host's end of the wire."""

NETWORK = "10.77.0"
MOST = 64
"""Hosts that know each other's names."""

SPACES = {
    "net": "net",
    "mnt": "mount",
    "uts": "uts",
    "ipc": "ipc",
    "pid_for_children": "pid",
}
"""Files in /proc/PID/ns -> the options of unshare and nsenter."""

BURST_SECONDS = 0.0008
LEAST_BURST = 70_000
"""Bytes: a packet before segmentation has up to 64 KiB, and must fit into the bucket of tokens."""

QUEUE = "5ms"
"""Maximum length of the queue before the wire. Longer packets are dropped, as a switch does."""

CONGESTION = "cubic"
"""Linux's default, set for the wire's route: the machine's own default may be another."""

READY = "ready"

_INIT = f"""
mount --bind "$0/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$0/hosts" /etc/hosts
hostname "$1"
ip link set lo up
echo {READY}
exec cat
"""


def _address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


_NAMES = "127.0.0.1 localhost\n" + "".join(
    f"{_address(i)} host{i}\n::ffff:{_address(i)} host{i}\n" for i in range(MOST)
)


class HostsUnavailable(RuntimeError):
    """This machine does not let this process make hosts; the message says why."""


class Host:
    """One host. `pid` is a process outside of its namespace of processes, but in the others."""

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name, self.address = index, name, _address(index)
        options = [f"--{option}" for option in SPACES.values()]
        command = ["unshare", *options, "--fork", "--mount-proc", "--kill-child"]
        with tempfile.TemporaryDirectory(prefix="zshard-host-") as folder:
            Path(folder, "boot_id").write_text(f"{uuid.uuid4()}\n")
            Path(folder, "hosts").write_text(_NAMES)  # or names are asked for over a network
            self._init = subprocess.Popen(
                [*command, "sh", "-ec", _INIT, folder, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for us, who then end it
            )
            assert self._init.stdout and self._init.stderr
            if self._init.stdout.readline().strip() != READY:
                reason = self._init.stderr.read().strip()
                self.close()
                raise HostsUnavailable(f"cannot make a host: {reason}")
        self.pid = self._init.pid

    def entered(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on this host."""
        spaces = [f"--{option}=/proc/{self.pid}/ns/{file}" for file, option in SPACES.items()]
        return ["nsenter", *spaces, f"--wd={os.getcwd()}", "--", *command]

    def call(self, *command: str) -> str:
        """Run a command on this host and return its output. Raises HostsUnavailable."""
        return _call(*self.entered(command))

    def start(
        self, command: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on this host, in its own session."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **env}
        return subprocess.Popen(
            self.entered(command), env=environment, text=True, start_new_session=True, **options
        )

    def within(self, function: Callable[[], Any]) -> Any:
        """Return function(), called in a thread of this process whose sockets and newly opened
        files are on this host."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_enter, self.pid).result()
            return thread.submit(function).result()

    def cut(self) -> None:
        """Pull the plug: no packet leaves or reaches this host any more, without notice."""
        self.call("ip", "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        self.call("ip", "link", "set", INTERFACE, "up")

    def close(self) -> None:
        """End the host and all its processes."""
        for pipe in (self._init.stdin, self._init.stdout, self._init.stderr):
            if pipe:
                pipe.close()
        try:
            self._init.wait(5)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._init.wait()


class Hosts:
    """Hosts on one wire; a context that ends them. Two hosts share a cable, more a switch.

    gbit: the rate of each host's link in each direction, in Gbit/s; 0: as fast as memory.

    Raises HostsUnavailable if this machine or the process's privileges do not allow it.
    """

    def __init__(self, count: int, gbit: float = 0) -> None:
        self.gbit = gbit
        self._made: list[Host] = []
        for tool in ("unshare", "nsenter", "ip", *(["tc"] if gbit else [])):
            if shutil.which(tool) is None:
                raise HostsUnavailable(f"{tool} is not installed")
        try:
            for index in range(count):
                self._made.append(Host(index, f"host{index}"))
            self.all = self._made[:count]
            self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self._made:
            host.close()

    def _join(self) -> None:
        ends = [(host, INTERFACE) for host in self.all]
        if len(self.all) == 2:
            _cable(ends[0], ends[1])
        else:
            switch = Host(len(self.all), "switch")
            self._made.append(switch)
            switch.call("ip", "link", "add", "bridge", "type", "bridge")
            switch.call("ip", "link", "set", "bridge", "up")
            for end in list(ends):
                port = (switch, f"port{end[0].index}")
                _cable(end, port)
                switch.call("ip", "link", "set", port[1], "master", "bridge")
                ends.append(port)
        for host in self.all:
            host.call("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for host, interface in ends:
            host.call("ip", "link", "set", interface, "up")
            if self.gbit:
                host.call("tc", *_limit(interface, self.gbit))
        for host in self.all:
            route = [f"{NETWORK}.0/24", "dev", INTERFACE, "proto", "kernel", "src", host.address]
            host.call("ip", "route", "change", *route, "congctl", CONGESTION)

    def reached_gbit(self) -> float:
        """Return the Gbit/s of payload that one connection from host 0 to host 1 reaches."""
        piece, count = bytes(1 << 20), max(16, round(self.gbit * 40))  # a third of a second
        place = (self.all[1].address, 0)
        server = self.all[1].within(lambda: socket.create_server(place))
        sender = self.all[0].within(lambda: socket.create_connection(server.getsockname()))
        with server, sender, server.accept()[0] as receiver:
            thread = threading.Thread(target=sender.sendall, args=[piece * count])
            thread.start()
            room, left = bytearray(piece), len(piece) * count - receiver.recv_into(bytearray(1))
            begin, sent = time.perf_counter(), left
            while left:
                left -= receiver.recv_into(room)
            thread.join()
        return sent * 8 / 1e9 / (time.perf_counter() - begin)

    def store(self) -> Any:
        """Return a TCPStore of this process that listens on host 0, as torchrun's agent does."""
        from torch.distributed import TCPStore

        address = self.all[0].address
        return self.all[0].within(
            lambda: TCPStore(address, 0, is_master=True, wait_for_workers=False)
        )

    def environment(self, store: Any, ranks_per_host: int) -> dict[str, str]:
        """Return the variables, as torchrun's, that are the same on all ranks."""
        return {
            "WORLD_SIZE": str(len(self.all) * ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_ADDR": self.all[0].address,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }


def run_ranks(
    hosts: Hosts, ranks_per_host: int, command: Sequence[str], env: Mapping[str, str]
) -> None:
    """Run `command` on all ranks to its end. Ends them all and raises SystemExit if one fails: a
    rank dies with the nsenter that started it, and with its host at the latest."""
    store = hosts.store()
    common = {**hosts.environment(store, ranks_per_host), **env}
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(len(hosts.all) * ranks_per_host):
            index, local = divmod(rank, ranks_per_host)
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(local)}
            running.append(hosts.all[index].start(command, own))
        while any(codes := [child.poll() for child in running]) or None in codes:
            for rank, code in enumerate(codes):
                if code:
                    time.sleep(2.0)  # for the others' errors
                    said = f"rank {rank} of {len(running)} ended with exit status {code}"
                    raise SystemExit(f"benchmark failed: {said}: {' '.join(command)}")
            time.sleep(0.05)
    finally:
        for child in running:
            child.kill()
            child.wait()


def _enter(pid: int) -> None:
    """Give this thread, for good, the network and the mounts of process `pid`."""
    clone_fs = 0x200  # a thread that shares its working directory cannot change its mounts
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as net, open(f"/proc/{pid}/ns/mnt") as mounts:
        steps = [(libc.setns, net.fileno(), 0), (libc.unshare, clone_fs)]
        for function, *numbers in [*steps, (libc.setns, mounts.fileno(), 0)]:
            if function(*numbers) != 0:
                raise HostsUnavailable(f"cannot enter a host: {os.strerror(ctypes.get_errno())}")


def _cable(one: tuple[Host, str], other: tuple[Host, str]) -> None:
    """Join two hosts by a pair of interfaces of these names."""
    (host, name), (peer, port) = one, other
    pair = ["type", "veth", "peer", "name", port, "netns", str(peer.pid)]
    _call("ip", "link", "add", name, "netns", str(host.pid), *pair)


def _limit(interface: str, gbit: float) -> list[str]:
    """Return the arguments of tc that limit what leaves by `interface`."""
    burst = max(LEAST_BURST, round(gbit * 1e9 / 8 * BURST_SECONDS))
    rate = f"{round(gbit * 1000)}mbit"
    limits = ["tbf", "rate", rate, "burst", str(burst), "latency", QUEUE]
    return ["qdisc", "add", "dev", interface, "root", *limits]


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise HostsUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def wire_bytes() -> tuple[int, int]:
    """Return the bytes that this host has received and sent over the wire so far.

    They include the packets' headers, about 5 %. From /proc/net/dev, which is of the reader's own
    network (/sys/class/net is of the network in which /sys was mounted).
    """
    text = Path("/proc/net/dev").read_text()
    found = re.search(rf"{INTERFACE}:\s*(\d+)(?:\s+\d+){{7}}\s+(\d+)", text)
    if found is None:
        raise RuntimeError(f"this process is on no host: it has no {INTERFACE} in /proc/net/dev")
    return int(found[1]), int(found[2])
