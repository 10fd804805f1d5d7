"""PEFT: merge adapters of a sharded model, and count full parameters.

Merging multiplies full matrices, and `merge_and_unload()` and `unload()` replace modules, so they
run on a plain copy with full parameters. The sharded model does not change. This file does not
import PEFT; it recognizes the models by a method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zshard.api import EXTENSIONS, Extension, copy_plain, full_tensor
from zshard.integrations.transformers import count_full_in

_COUNT = "get_nb_trainable_parameters"  # PEFT's models have it, and forward missing attributes
_MERGE = ("merge_and_unload", "unload")


class _Adapters(Extension):
    def methods(self, original: type[nn.Module]) -> dict[str, Any]:
        return {name: _of_copy(name) for name in _MERGE} if hasattr(original, _COUNT) else {}

    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        count_full_in(model, _COUNT)


EXTENSIONS.append(_Adapters())


def _of_copy(name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: object, **kwargs: object) -> Any:
        """Call the method on a plain copy with full parameters, and return the copy's plain base
        model.

        Takes memory for the full model on each rank that calls it. Over shm, one rank may call it
        alone; over c10d and on GPUs it is collective. Takes the arguments of PEFT's method.
        """
        copies: dict[int, Any] = {}
        model = copy_plain(self, copies)[0]
        with torch.no_grad():
            for param in self.parameters():
                copies[id(param)].data = full_tensor(param).detach().clone()
                copies[id(param)].requires_grad_(param.requires_grad)
        for extension in EXTENSIONS:
            extension.restore(model)
        return getattr(model, name)(*args, **kwargs)

    method.__name__ = name
    return method
