"""docs/contributing/gpu_rules.md: its quotations stand in cuda.h, where there is one, and its tests exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from c_compile import ROOT
from named import problem_with

PAGE = (ROOT / "docs" / "contributing" / "gpu_rules.md").read_text()
QUOTED = re.compile(r'"([^"]+)"[^"]*?\((\*[\w. ]+\*)(?:, `?([^`)]+?)`?)?\)$')
SOURCES = {"*cuda.h*", "*nccl.h*", "*NCCL guide*", "*CUDA guide*", "*MIG guide*", "*MPS guide*"}
SOURCES |= {"*torch*"}


def quotations() -> list[str]:
    """The page's block quotations, each on one line."""
    blocks = re.findall(r"(?:^> .*\n)+", PAGE, re.MULTILINE)
    return [" ".join(line[2:].strip() for line in block.splitlines()) for block in blocks]


def plain(text: str) -> str:
    """Words alone: without comment stars, doxygen's marks, emphasis and line ends."""
    text = re.sub(r"^\s*\*", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\\p |::|\*|\(\)", "", text)
    return " ".join(text.split())


def header() -> str:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        path = Path(home or "/nowhere") / "include" / "cuda.h"
        if path.is_file():
            return plain(path.read_text(errors="replace"))
    pytest.skip("no cuda.h here to compare with")


def test_quotations_say_where_they_are_from() -> None:
    found = quotations()
    assert len(found) > 20
    for text in found:
        match = QUOTED.match(text)
        assert match and match[2] in SOURCES, text


def test_quotations_of_cuda_h_stand_there() -> None:
    text = header()
    cited = [match for match in map(QUOTED.match, quotations()) if match and match[2] == "*cuda.h*"]
    missing = [match[1] for match in cited if plain(match[1]) not in text]
    assert missing == []
    assert len(cited) > 10


def test_tests_exist_and_each_rule_has_one() -> None:
    rules = PAGE.partition("\n## Contexts")[2]
    assert len(re.findall(r"^\*\*", rules, re.MULTILINE)) == rules.count("- Test: `tests/")
    assert rules.count("- Check: ") == rules.count("- Test: ")
    named = re.findall(r"`(tests/\w+/test_\w+\.py(?:::\w+)?)`", PAGE)
    assert [problem for problem in map(problem_with, named) if problem] == []
