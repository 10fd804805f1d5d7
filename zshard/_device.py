"""Where a model is trained: on the CPU or on a GPU, in the words of zshard._core.

The one idea: a model is where its parameters are, or where `device_id` says; what is elsewhere is
moved there a unit at a time, so that a model need not be whole on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

CPU = "cpu"


def device_of(module: nn.Module, device_id: Any) -> str:
    """ "cpu" or "cuda:<number>", as zshard._core.Comm takes it.

    device_id: as FSDP's. None: where the parameters are that are not on the meta device; the CPU if
    there are none. Raises ValueError for what is no such device, differs from where the
    parameters are on another GPU, or is not torch's current GPU; RuntimeError for a GPU that torch
    does not see.
    """
    found = {param.device for param in module.parameters() if not param.is_meta}
    wanted = _parse(device_id) if device_id is not None else next(iter(found), torch.device(CPU))
    for device in found:
        if device.type not in (CPU, wanted.type) or (device.type == "cuda" and device != wanted):
            raise ValueError(
                f"the model's parameters are on {device}, and device_id={device_id!r} says {wanted}"
                "; leave device_id out, or move the model to the CPU"
            )
    if wanted.type == CPU:
        return _stand_in()
    if wanted.index != torch.cuda.current_device():
        raise ValueError(
            f"the model is to be on {wanted}, and this process's current GPU is number "
            f"{torch.cuda.current_device()}: call torch.cuda.set_device({wanted.index}) first "
            '(under torchrun, with int(os.environ["LOCAL_RANK"]))'
        )
    return f"cuda:{wanted.index}"


def _stand_in() -> str:
    """The CPU; for tests with a stand-in for CUDA's driver (ZSHARD_CUDA_ON_HOST=1), a "GPU" whose
    memory is the host's."""
    return "cuda:0/host" if os.environ.get("ZSHARD_CUDA_ON_HOST") == "1" else CPU


def _parse(device_id: Any) -> torch.device:
    if isinstance(device_id, bool):
        raise TypeError(f"device_id is a GPU's number or a torch.device, not {device_id!r}")
    try:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device_id={device_id!r} is no device: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device_id={device_id!r}: zshard trains on CPUs and CUDA GPUs")
    if device.type == "cpu":
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device_id={device_id!r}, and this torch ({torch.__version__}) sees no GPU; "
            "`python -m zshard doctor` says what is missing"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device_id={device_id!r}: there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def is_stand_in(device: str) -> bool:
    """Is it a GPU for tests, whose memory is the host's?"""
    return device.endswith("/host")


def torch_device(device: str) -> torch.device:
    """What torch calls it."""
    return torch.device(CPU if is_stand_in(device) else device)


def move(tensors: Iterable[Tensor], device: str) -> None:
    """Moves parameters or buffers to `device`, in place; those on the meta device stay."""
    there = torch_device(device)
    for tensor in tensors:
        if not tensor.is_meta and tensor.device != there:
            tensor.data = tensor.data.to(there)
