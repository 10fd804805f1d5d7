"""Public names that were removed, and what to use instead: for one version, their error says so.

A key is what follows "zshard.": a name, or "<class>.<method>" of a class whose __getattr__ looks.
"""

from __future__ import annotations

REMOVED = {
    "SharedWeights": 'zshard.export(model).save("/dev/shm/<folder>"), and read that folder',
    "Export.share": '.save("/dev/shm/<folder>"), and read that folder in the other processes',
    "Plan.beside": "zshard.profile(), whose report has each unit's times",
    "share_comm_ctx": "models over the same ranks, which share a transport without it",
}


def removal(name: str) -> str | None:
    """Return the error's text for the use of a name; None if it was not removed."""
    return f"zshard.{name} was removed in 0.1.0: use {REMOVED[name]}" if name in REMOVED else None
