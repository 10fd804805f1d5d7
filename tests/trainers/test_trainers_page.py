"""docs/lightning.md and docs/accelerate.md: the code of each section runs on two ranks, with the real packages.

A section is one script. The test provides a model, data and the like under the section's names, and
skips sections whose package is missing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from accelerated import fork_trainers

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = {
    part.splitlines()[0]: "\n".join(re.findall(r"```python\n(.*?)```", part, re.S))
    for page in ("lightning.md", "accelerate.md")
    for part in (DOCS / page).read_text().split("\n## ")[1:]
}
SECTIONS["Lightning"] += "\n" + SECTIONS.pop("Fabric")  # Fabric's section uses Lightning's imports
LLAMA = "from hf_trainers import *\nmodel, dataset = tiny_llama(), sentences(8)\n"
ACCELERATE = """
import torch
from accelerated import small_model
model = small_model()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.ones(8, 8), torch.ones(8, 3))
loader = torch.utils.data.DataLoader(data, batch_size=2)
"""
BEFORE = {  # the package, and code before that of a section
    "Accelerate": ("accelerate", ACCELERATE),
    "transformers": ("accelerate", LLAMA),
    "TRL": ("trl", f"{LLAMA}texts, tokenizer = texts(8), tokenizer()\n"),
    "PEFT": ("peft", LLAMA),
    "Lightning": ("lightning", ""),
}
# Accelerate on CPUs; Lightning under torchrun.
TORCHRUN = {"TORCHELASTIC_RUN_ID": "docs", "GROUP_RANK": "0"}
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", **TORCHRUN}


def run_in(folder: str, code: str) -> None:
    os.chdir(folder)
    exec(compile(code, "docs", "exec"), {"__name__": "__main__"})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("section", BEFORE)
def test_documented_code_runs_on_two_ranks(section: str, tmp_path: Path) -> None:
    package, before = BEFORE[section]
    pytest.importorskip(package, reason="needs zshard[trainers]: make test-trainers")
    fork_trainers(run_in, str(tmp_path), before + SECTIONS[section], env=ENVIRONMENT)
