"""The device on which a model is trained: the CPU or a GPU, as zshard._core names it.

The device is that of the parameters, or `device_id`; everything else is moved there
a unit at a time, so that the unsharded model need not fit on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

CPU = "cpu"


def device_of(module: nn.Module, device_id: int | str | torch.device | None) -> str:
    """Return "cpu" or "cuda:<index>", as zshard._core.Comm takes it.

    device_id: as FSDP's. None: the device of the parameters that are not on the meta device, or
        the CPU if there are none.

    Raises TypeError or ValueError for an invalid device, ValueError if the parameters are on
    another GPU or the device is not torch's current GPU; RuntimeError if torch sees no GPU.
    """
    devices = {param.device for param in module.parameters() if not param.is_meta}
    wanted = _parse(device_id) if device_id is not None else next(iter(devices), torch.device(CPU))
    for device in devices:
        if device.type not in (CPU, wanted.type) or (device.type == "cuda" and device != wanted):
            raise ValueError(
                f"device_id={device_id!r}, but the model's parameters are on {device}: omit "
                "device_id, or move the model to the CPU first"
            )
    if wanted.type == CPU:
        return device_of_cpu()
    if wanted.index != (current := torch.cuda.current_device()):
        raise ValueError(
            f"the model's device is {wanted}, but this process's current one is cuda:{current}: "
            f"call torch.cuda.set_device({wanted.index}) first (of LOCAL_RANK, under torchrun)"
        )
    return f"cuda:{wanted.index}"


def device_of_cpu() -> str:
    """Return the device on which a model on the CPU is trained."""
    return CPU


def _parse(device_id: int | str | torch.device) -> torch.device:
    if isinstance(device_id, bool):
        raise TypeError(f"device_id must be a GPU index or a torch.device, got {device_id!r}")
    try:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device_id={device_id!r} is not a valid device: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device_id={device_id!r} is not supported: pass a CPU or a CUDA GPU")
    if device.type == "cpu":
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device_id={device_id!r}, but torch sees no GPU: run `python -m zshard doctor`"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"device_id={device_id!r} is out of range: torch sees {count} GPU(s); start fewer "
            "ranks on this host, or add GPUs to CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


def is_stand_in(device: str) -> bool:
    """Return whether this is a fake GPU, whose memory is the host's."""
    return device.endswith("/host")


def torch_device(device: str) -> torch.device:
    """Return the torch.device."""
    return torch.device(CPU if is_stand_in(device) else device)


def move(tensors: Iterable[Tensor], device: str) -> None:
    """Move parameters or buffers to `device` in place; those on the meta device stay."""
    there = torch_device(device)
    for tensor in tensors:
        if not tensor.is_meta and tensor.device != there:
            tensor.data = tensor.data.to(there)
