"""Models under fully_shard(), FSDP2's spelling, for the tests of its parity, unshard() and arguments."""

from __future__ import annotations

import contextlib
import os

from models import make
from scenarios import Stack

from zshard import FSDP, fully_shard


@contextlib.contextmanager
def over(transport):
    """fully_shard has no argument for the transport: the environment says it."""
    before = os.environ.get("ZSHARD_TRANSPORT")
    os.environ["ZSHARD_TRANSPORT"] = transport
    try:
        yield
    finally:
        del os.environ["ZSHARD_TRANSPORT"]
        if before is not None:
            os.environ["ZSHARD_TRANSPORT"] = before


def unit_of(module):
    return module._zshard_state.unit


def units_of(model):
    return [unit_of(module) for module in FSDP.fsdp_modules(model)]


def stack(**options):
    model = make(Stack)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
