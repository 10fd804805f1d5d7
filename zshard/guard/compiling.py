"""What torch.compile does with a function that is called with shards: it runs it as it is.

A shard's guard runs elementwise operations and refuses all others, one by one. A
compiled function has no such operations, and its trace fails at the guard. So a call with shards is
not compiled; with other tensors the same function is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from zshard._errors import ShardError
from zshard.guard.slices import slices_among

__all__ = ["install"]


def install() -> None:
    """Have the compiler leave shards alone. Idempotent."""
    compile_as_before: Callable[..., Any] = torch.compile
    if hasattr(compile_as_before, "_zshard_original"):
        return

    @functools.wraps(compile_as_before)
    def compile_or_leave(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = compile_as_before(model, *args, **kwargs)
        _leave_frames_with_shards()
        is_function = model is not None and isinstance(compiled, FunctionType)
        return _uncompiled_with_shards(model, compiled) if is_function else compiled

    compile_or_leave._zshard_original = compile_as_before  # type: ignore[attr-defined]
    torch.compile = compile_or_leave
    if "torch._dynamo" in sys.modules:  # functions may have been compiled before
        _leave_frames_with_shards()


def _uncompiled_with_shards(
    function: Callable[..., Any], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def called(*args: Any, **kwargs: Any) -> Any:
        has_shards = slices_among((*args, *kwargs.values()))
        return (function if has_shards else compiled)(*args, **kwargs)

    return called


def _leave_frames_with_shards() -> None:
    """The same for functions that were compiled before, or get shards otherwise: by their names."""
    from torch._C._dynamo import eval_frame
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
    from torch._dynamo import convert_frame
    from torch._dynamo.types import ConvertFrameReturn

    compile_frame: Callable[..., Any] = convert_frame.CatchErrorsWrapper.__call__
    if hasattr(compile_frame, "_zshard_original"):
        return
    as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

    @functools.wraps(compile_frame)
    def compile_or_leave(self: Any, frame: Any, *rest: Any) -> Any:
        parts = slices_among(frame.f_locals.values())
        if not parts:
            return compile_frame(self, frame, *rest)
        count = eval_frame.set_fullgraph_compiled_frame_count(-1)
        if count < 0:
            return ConvertFrameReturn(frame_exec_strategy=as_it_is, apply_to_code=False)
        eval_frame.set_fullgraph_compiled_frame_count(count)
        name = frame.f_code.co_name
        raise ShardError(
            f"{name}(), compiled by torch.compile(fullgraph=True), got a shard of "
            f"'{parts[0].name}', which cannot be compiled: compile {name}() after FSDP(...) and "
            "pass shards as its arguments, or omit fullgraph=True"
        )

    compile_or_leave._zshard_original = compile_frame  # type: ignore[attr-defined]
    convert_frame.CatchErrorsWrapper.__call__ = compile_or_leave  # type: ignore[method-assign,assignment]
