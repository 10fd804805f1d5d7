"""docs/trainers.md: the code of each section runs on two ranks, with the real packages.

A section is one script. The test provides a model, data and the like under the section's names, and
skips sections whose package is missing.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from accelerated import fork_trainers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
SECTIONS = {
    part.splitlines()[0]: "\n".join(re.findall(r"```python\n(.*?)```", part, re.S))
    for part in PAGE.read_text().split("\n## ")[1:]
}
SECTIONS["Lightning"] += "\n" + SECTIONS.pop("Fabric")  # Fabric's section uses Lightning's imports
LLAMA = "from hf_trainers import *\nmodel, dataset = tiny_llama(), sentences(8)\n"
GIVEN = {  # code before that of a section
    "Accelerate": (
        "import torch\nfrom accelerated import small_model\n"
        "model = small_model()\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 8), torch.ones(8, 3))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=2)\n"
    ),
    "transformers": LLAMA,
    "TRL": f"{LLAMA}texts, tokenizer = texts(8), tokenizer()\n",
    "PEFT": LLAMA,
    "Lightning": "",
}
PACKAGES = {
    "Accelerate": "accelerate",
    "transformers": "accelerate",
    "TRL": "trl",
    "PEFT": "peft",
    "Lightning": "lightning",
}
ENVIRONMENT = {  # Accelerate on CPUs; Lightning under torchrun
    "ACCELERATE_USE_CPU": "true",
    "TORCHELASTIC_RUN_ID": "docs",
    "GROUP_RANK": "0",
}


def run_in(folder: str, code: str) -> None:
    os.chdir(folder)
    exec(compile(code, "docs/trainers.md", "exec"), {"__name__": "__main__"})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("section", GIVEN)
def test_documented_code_runs_on_two_ranks(section: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[section]) is None:
        pytest.skip("needs zshard[trainers]: make test-trainers")
    code = GIVEN[section] + SECTIONS[section]
    fork_trainers(run_in, str(tmp_path), code, env=ENVIRONMENT)
