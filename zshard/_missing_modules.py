"""DeepSpeed's modules that a script imports from zshard: an ImportError says what to write instead.

Python asks this finder last, for what is not there.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

__all__ = ["install"]

_SHARED = "from zshard.deepspeed import "
INSTEAD = {
    "accelerator": "use torch.accelerator",
    "checkpoint": "use engine.save_checkpoint(), or zshard.save() and zshard.load()",
    "inference": "call engine.module under torch.no_grad()",
    "launcher": "start ranks with torchrun, or `python -m zshard run`",
    "module_inject": "zshard has no tensor parallelism",
    "monitor": "log in your script",
    "profiling": "use torch.profiler, which shows each unit",
    "runtime": (
        "use the engine that initialize() returns; for runtime.lr_schedules, set the section "
        "'scheduler' of the config, which has DeepSpeed's schedules, or use "
        f"torch.optim.lr_scheduler; for runtime.zero, write `{_SHARED}zero`"
    ),
    "sequence": "zshard has no sequence parallelism",
    "utils": (
        "safe_get_full_fp32_param(p) is zshard.full_tensor(p).float(), safe_get_full_grad(p) is "
        "zshard.full_tensor(p.grad), logger is Python's logging, groups are torch.distributed's; "
        "for utils.zero_to_fp32, `python -m zshard ckpt export FOLDER OUT` writes full weights"
    ),
    "zero": f"write `{_SHARED}zero`",
}
"""By the outermost module, which Python imports first."""

NAMES = {
    "comm": "use torch.distributed",
    "ops": "use zshard.AdamW, zshard.Adam or zshard.SGD",
    "checkpointing": "use torch.utils.checkpoint",
    "moe": "zshard has no expert parallelism; experts that all ranks have need nothing of it",
    "pipe": "zshard has no pipeline parallelism",
    "PipelineModule": "zshard has no pipeline parallelism",
    "init_inference": "call engine.module under torch.no_grad()",
    "InferenceEngine": "call engine.module under torch.no_grad()",
    "tp_model_init": "zshard has no tensor parallelism",
    "OnDevice": "use torch.device",
    "get_accelerator": "use torch.accelerator",
    "log_dist": "print on rank 0",
    **{name: INSTEAD[name] for name in ("accelerator", "runtime", "utils")},
    "add_tuning_arguments": "set the section 'scheduler' of the config",
    "DeepSpeedConfig": "engine.config is the config as a dict",
}
"""By the attribute of zshard.deepspeed."""


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError with the remedy for a module of DeepSpeed's."""
        package, _, rest = name.partition(".")
        if package == "zshard" and rest and not rest.startswith("_"):
            remedy = _remedy_of(rest)
            if remedy:  # without `name`: `from zshard import ops` would hide the text
                raise ModuleNotFoundError(f"zshard has no deepspeed.{rest}: {remedy}")


def _remedy_of(module: str) -> str:
    known = {**NAMES, **INSTEAD}
    return str(known.get(module.partition(".")[0], ""))


def install() -> None:
    """Add the finder. Idempotent."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())
