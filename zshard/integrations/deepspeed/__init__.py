"""DeepSpeed's names: `import zshard as deepspeed` trains a script for DeepSpeed with zshard.

    engine, optimizer, loader, scheduler = zshard.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Supported names work as in DeepSpeed; any other name is an AttributeError that points to
docs/deepspeed.md.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zshard.api import removal
from zshard.integrations.deepspeed import zero
from zshard.integrations.deepspeed.build_engine import init_distributed, initialize
from zshard.integrations.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "zero"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed (a flag for the script) and --deepspeed_config (a path) to a parser, and
    return it."""
    group = parser.add_argument_group("DeepSpeed", "the DeepSpeed config, which zshard reads")
    group.add_argument("--deepspeed", action="store_true", help="use zshard.initialize()")
    group.add_argument("--deepspeed_config", default=None, help="path of the config, a JSON file")
    return parser


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        unknown = f"zshard.deepspeed has no attribute '{name}': docs/deepspeed.md lists what it has"
        raise AttributeError(removal(name) or unknown)
