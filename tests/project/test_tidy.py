"""What clang-tidy is asked for (.clang-tidy): it finds what the rules for C say.

`make lint` runs it on csrc/, so here are only examples. It looks for .clang-tidy in the folders above a
file: they lie in build/.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("clang_tidy", reason="clang-tidy is a tool of `make lint`")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = """#include "base/status.h"
#include <stdlib.h>
int zs_long(void);
int zs_long(void)
{{
{statements}    return 1;
}}
int zs_wide(int a, int b, int (*c)(int, int), int d, int e, int f{parameter});
int zs_wide(int a, int b, int (*c)(int, int), int d, int e, int f{parameter})
{{
    return c(a, b) + d + e + f;
}}
int zs_leak(void);
int zs_leak(void)
{{
    char *p = malloc(1);
    return p == NULL{free};
}}
{declaration}int zs_bare(void)
{{
    return 1;
}}
zs_status zs_a(void);
"""
CALL, FREE = "    (void)zs_last_status();\n", " ? 1 : (free(p), 0)"


def found_in(count: int, parameter: str, free: str, declaration: str) -> str:
    words = {"parameter": parameter, "free": free, "declaration": declaration}
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        file = Path(folder, "example.c")
        file.write_text(EXAMPLE.format(statements=count * CALL, **words))
        command = [sys.executable, str(ROOT / "tools" / "tidy.py"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert bool(done.returncode) is ("error" in text), text
    return text


def test_clang_tidy_finds_violations() -> None:
    assert "error" not in found_in(56, "", FREE, "int zs_bare(void);\n")  # 60 lines, 6 parameters
    text = found_in(57, ", int g", "", "")
    assert text.count("[readability-function-size") == 2
    assert "clang-analyzer-unix.Malloc" in text
    assert "clang-diagnostic-missing-prototypes" in text
