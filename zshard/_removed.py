"""Names that zshard does not have, and what to use instead, which their error says.

A key is what follows "zshard.": a name, or "<class>.<method>" of a class whose __getattr__ looks.
"""

from __future__ import annotations

REMOVED = {
    "SharedWeights": 'zshard.export(model).save("/dev/shm/<folder>"), and read that folder',
    "Export.share": '.save("/dev/shm/<folder>"), and read that folder in the other processes',
    "keep": "python -m zshard run --keep train.py, which takes torchrun's options, in its place",
    "Plan.beside": "zshard.profile(), whose report has each unit's times",
    "share_comm_ctx": "models over the same ranks, which share a transport without it",
}

ELSEWHERE = {
    "accelerator": "torch.accelerator",
    "checkpointing": "torch.utils.checkpoint",
    "comm": "torch.distributed",
    "get_accelerator": "torch.accelerator",
    "moe": "experts of your own: zshard shards them as any other module",
    "ops": "zshard.AdamW, or the section 'optimizer' of the config",
    "pipe": "another strategy of zshard: it has no pipelines",
    "runtime": "the sections of the config, such as 'scheduler'",
    "utils": "zshard.full_tensor(p).float() for safe_get_full_fp32_param(p)",
}
"""Names that scripts for other libraries look for in zshard, and that torch or zshard has
elsewhere."""


def removal(name: str) -> str | None:
    """Return the error's text for the use of a name; None if neither table has it."""
    if name in ELSEWHERE:
        return f"zshard has no '{name}': use {ELSEWHERE[name]}"
    return f"zshard.{name} was removed in 0.1.0: use {REMOVED[name]}" if name in REMOVED else None
