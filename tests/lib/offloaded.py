"""A small model on disk, its steps, and the comparison with the same model in memory.

Its memory limit is so low that pages must be evicted and read all the time.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from compare import assert_same
from models import loss_of, make
from torch import nn

from zshard import FSDP, AdamW, Offload

CACHE = 1 << 18  # bytes, of models of some MiB
KINDS = {
    "params and state": {},
    "all": {"grads": True},
    "grads": {"params": False, "optimizer": False, "grads": True},
    "state": {"params": False},
    "half": {"fraction": 0.5},
}


def io_count(name):
    """Return a count of the kernel's: "wchar" (bytes written by system calls), and the like.

    A step that works in buffers writes these to the disk by calls; on a mapping, the kernel writes.
    """
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def to(folder, **what):
    return Offload(directory=folder, cache=CACHE, **what)


class Wide(nn.Module):
    """Blocks of a megabyte each, with a weight that several of them share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.blocks[3].bias = self.blocks[0].bias
        self.head = nn.Linear(512, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def steps(model, optimizer, n=3, clip=True):
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(4, 512, generator=generator)))
        loss.backward()
        if clip:
            model.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def wide(offload, in_backward=False, **options):
    model = FSDP(make(Wide), offload=offload, auto_wrap_policy={nn.Linear}, **options)
    optimizer = AdamW(model.parameters(), 1e-2)
    if in_backward:
        model.optimizer_in_backward(optimizer)
    return model, optimizer


def compare_wide(folder, what, in_backward=False, **options):
    model, optimizer = wide(None, in_backward, **options)
    expected = steps(model, optimizer, clip=not in_backward), model.state_dict()
    model, optimizer = wide(to(folder, **what), in_backward, **options)
    losses = steps(model, optimizer, clip=not in_backward)
    assert model.memory()["offloaded"] > 1 << 20
    assert losses == expected[0]
    assert_same(model.state_dict(), expected[1], "the state")
