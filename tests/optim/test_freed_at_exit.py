"""An optimizer that is freed while the interpreter exits, when modules are empty already."""

from __future__ import annotations

import sys

import pytest
import torch

from zshard.optim import state_registry


def test_optimizer_is_freed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.zeros(3, requires_grad=True)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    record = state_registry.ModelRecord("token", ["address"], 0, params)
    record.note(optimizer)
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_value))
    monkeypatch.setattr(state_registry, "_jobs", None)
    del optimizer
    assert ignored == []
