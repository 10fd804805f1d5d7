"""Imports the trainers that are there: once, in the process that forks ranks (accelerated.py). In each
rank that would take seconds."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

USED = {  # the parts in use, as transformers and TRL import them late
    "accelerate": ("Accelerator",),
    "transformers": ("Trainer", "LlamaForCausalLM", "BertForSequenceClassification"),
    "peft": ("LoraConfig",),
    "trl": ("SFTTrainer",),
    "lightning.pytorch": ("Trainer",),
    "lightning.fabric": ("Fabric",),
}

for _package, _names in USED.items():
    with contextlib.suppress(ImportError):
        _module = importlib.import_module(_package)
        _ = [getattr(_module, name) for name in _names]


def call(function: Any, *args: Any) -> Any:
    return function(*args)


def run_script(file: str, *args: str) -> None:
    sys.argv = [file, *args]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")
