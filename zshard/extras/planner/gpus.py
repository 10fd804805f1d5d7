"""Devices and networks: data sheets, and the few constants that measured runs were fitted with.

Every device has one set of constants, for every model and software it is compared with. Sources:
NVIDIA's and AMD's data sheets, and stas00/ml-engineering for nodes and measured matmuls.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30


class Network(NamedTuple):
    """Links of a cluster.

    link: GB/s of a GPU to the others of its host, in one direction. nic: Gbit/s of a host to all
    others. per_host: GPUs of a host.
    """

    link: float
    nic: float
    per_host: int


class Device(NamedTuple):
    """One GPU, and the link to the others of its host.

    memory: GiB, with the `reserved` that CUDA and NCCL take. tflops: dense, in bf16 or fp16; fp8:
    likewise, 0 if it has none; fp32: likewise (TF32 where there is). bandwidth: of its memory,
    TB/s. link: GB/s in one direction. nic: Gbit/s of a host, where nothing else is known. units:
    multiprocessors.

    matmul, matmul8, attention, move: the part of the data sheet's speed that large products in 16
    bits and in fp8, flash attention and memory-bound kernels reach. launch: seconds that a kernel
    takes at least. host: GB/s to pinned memory of the host, in each direction: about 0.8 of PCIe's
    (16 lanes of version 3, 4 and 5: 15.8, 31.5 and 63 by PCI-SIG's tables); of GB200 and GB300 by
    NVLink-C2C, whose 450 two GPUs share (NVIDIA's data sheet).
    """

    memory: float
    tflops: float
    fp8: float
    fp32: float
    bandwidth: float
    link: float
    nic: float
    units: int
    matmul: float
    matmul8: float
    attention: float
    move: float
    launch: float = 3e-6
    host: float = 50
    reserved: float = 1.5


DEVICES = {
    "v100-16gb": Device(15.8, 125, 0, 15.7, 0.9, 150, 100, 80, 0.62, 0, 0.25, 0.8, host=12),
    "v100-32gb": Device(31.7, 125, 0, 15.7, 0.9, 150, 100, 80, 0.62, 0, 0.25, 0.8, host=12),
    "a100-40gb": Device(39.4, 312, 0, 156, 1.56, 300, 400, 108, 0.7, 0, 0.52, 0.86, host=25),
    "a100-80gb": Device(79.2, 312, 0, 156, 2.04, 300, 400, 108, 0.7, 0, 0.52, 0.86, host=25),
    "h100": Device(79.2, 989, 1979, 494, 3.35, 450, 3200, 132, 0.56, 0.42, 0.32, 0.6),
    "h100-96gb": Device(94.0, 989, 1979, 494, 2.4, 450, 3200, 132, 0.47, 0.33, 0.226, 0.8),
    "h200": Device(139.8, 989, 1979, 494, 4.8, 450, 3200, 132, 0.7, 0.5, 0.34, 0.8),
    "b200": Device(178, 2250, 4500, 1125, 8.0, 900, 3200, 148, 0.3, 0.2, 0.08, 0.8),
    "gb200": Device(184, 2450, 4900, 1225, 8.0, 900, 3200, 148, 0.5, 0.42, 0.3, 0.8, host=180),
    "gb300": Device(276, 2450, 4900, 1225, 8.0, 900, 6400, 148, 0.5, 0.42, 0.3, 0.8, host=180),
    "mi300x": Device(191.5, 1300, 2610, 163, 5.3, 448, 3200, 304, 0.25, 0.15, 0.25, 0.7),
    "l40s": Device(44.5, 362, 733, 91, 0.86, 25, 100, 142, 0.7, 0.5, 0.4, 0.8, host=25),
    "rtx-pro-6000": Device(94.5, 503, 1007, 126, 1.79, 50, 100, 188, 0.7, 0.5, 0.4, 0.8),
    "rtx-4090": Device(23.5, 165, 330, 82, 1.0, 20, 100, 128, 0.85, 0.6, 0.5, 0.85, host=25),
}


def device_of(name: str) -> tuple[str, Device]:
    """Return a device and its name in DEVICES. Raises ValueError for an unknown one."""
    key = str(name).lower().replace("_", "-").replace(" ", "-")
    if key not in DEVICES:
        raise ValueError(f"unknown GPU {name!r}: known are {', '.join(DEVICES)}")
    return key, DEVICES[key]


def cluster_network(
    device: Device, ranks: int, per_host: int | None = None, nic: float | None = None
) -> Network:
    """Return the links of hosts with these GPUs: as given, else 8 GPUs and the usual network."""
    per_host = min(ranks, 8) if per_host is None else per_host
    if per_host < 1 or ranks % per_host:
        raise ValueError(f"gpus={ranks} is not a multiple of per_host={per_host}: change one")
    return Network(device.link, device.nic if nic is None else nic, per_host)
