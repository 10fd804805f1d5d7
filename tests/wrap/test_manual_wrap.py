"""Manual wrapping: `with enable_wrap(...): wrap(layer)`, and FSDP(...) from the leaves up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.wrap import enable_wrap, wrap


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.kwargs = module, kwargs


def test_wrap_outside_of_the_context_does_nothing() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer, strategy="no_shard") is layer


def test_wrap_merges_the_contexts_arguments_with_its_own() -> None:
    with enable_wrap(wrapper_cls=Wrapped, strategy="full_shard", timeout=3):
        first = wrap(nn.Linear(2, 2))
        second = wrap(nn.Linear(2, 2), strategy="no_shard")
        with enable_wrap(wrapper_cls=Wrapped, strategy="zero1"):
            third = wrap(nn.Linear(2, 2))
        fourth = wrap(nn.Linear(2, 2))
    assert [m.kwargs for m in (first, second, third, fourth)] == [
        {"strategy": "full_shard", "timeout": 3},
        {"strategy": "no_shard", "timeout": 3},
        {"strategy": "zero1"},
        {"strategy": "full_shard", "timeout": 3},
    ]


def test_context_ends_with_an_exception() -> None:
    with pytest.raises(RuntimeError), enable_wrap(wrapper_cls=Wrapped):
        raise RuntimeError
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)


def test_context_is_per_thread() -> None:
    inside, seen = threading.Event(), []

    def other() -> None:
        inside.wait(10)
        seen.append(type(wrap(nn.Linear(2, 2))))

    thread = threading.Thread(target=other)
    thread.start()
    with enable_wrap(wrapper_cls=Wrapped):
        inside.set()
        thread.join()
        assert isinstance(wrap(nn.Linear(2, 2)), Wrapped)
    assert seen == [nn.Linear]


def wait_for_a_rank_that_does_not_come(transport: str, file: str) -> str:
    """Rank 0's backward waits for rank 1, which does not come: return the message, or "" on rank 1."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for i, layer in enumerate(model):
        model[i] = FSDP(layer, transport=transport, timeout=1.0)
    model = FSDP(model, auto_wrap_policy=None, transport=transport, timeout=1.0)
    loss = model(torch.ones(1, 4)).sum()
    if dist.get_rank() == 1:
        while not Path(file).exists():
            time.sleep(0.05)
        return ""
    try:
        loss.backward()
    except zshard.PeerTimeoutError as error:
        Path(file).touch()
        return str(error)
    return "no error"


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_timeout_names_a_unit_wrapped_before_its_parent(transport: str, tmp_path: Path) -> None:
    file = str(tmp_path / "through")
    first, _ = fork_ranks(wait_for_a_rank_that_does_not_come, 2, transport, file)
    assert "unit '1'" in (first.value or ""), first
