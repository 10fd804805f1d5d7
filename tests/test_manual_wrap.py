"""Manual wrapping: `with enable_wrap(...): wrap(layer)`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import nn

from zshard.wrap import enable_wrap, wrap


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.kwargs = module, kwargs


def test_wrap_outside_of_the_context_does_nothing() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer, strategy="no_shard") is layer


def test_wrap_takes_the_contexts_arguments_and_its_own() -> None:
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


def test_the_context_ends_with_an_exception() -> None:
    with pytest.raises(RuntimeError), enable_wrap(wrapper_cls=Wrapped):
        raise RuntimeError
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)


def test_the_context_is_its_threads_own() -> None:
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
