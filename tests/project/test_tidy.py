"""What clang-tidy is asked for (.clang-tidy): it finds what the rules for C say.

`make lint` runs it on csrc/, so here are only the bad examples. It looks for .clang-tidy in
the folders above a file: they lie in build/.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = '#include "base/status.h"\n#include <stdlib.h>\n'
LONG = "int zs_a(void);\nint zs_a(void)\n{{\n{}    return 1;\n}}\n"
WIDE = "int zs_a(int a, int b, int (*c)(int, int), int d, int e, int f{});"
LEAK = (
    "int zs_a(void);\nint zs_a(void)\n{{\n    char *p = malloc(1);\n    return p == NULL{};\n}}\n"
)


def body(statements: int) -> str:
    return LONG.format("    (void)zs_last_status();\n" * statements)


def takes(more: str) -> str:
    declared = WIDE.format(more)
    return f"{declared}\n{declared[:-1]}\n{{\n    return c(a, b) + d + e + f;\n}}\n"


@pytest.mark.skipif(
    importlib.util.find_spec("clang_tidy") is None, reason="clang-tidy is a tool of `make lint`"
)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (body(56), ""),  # 60 lines
        (body(57), "readability-function-size"),
        (takes(""), ""),
        (takes(", int g"), "readability-function-size"),
        (LEAK.format(" ? 1 : (free(p), 0)"), ""),
        (LEAK.format(""), "clang-analyzer-unix.Malloc"),
        ("int zs_a(void)\n{\n    return 1;\n}\n", "clang-diagnostic-missing-prototypes"),
        ("zs_status zs_a(void);\n", ""),
    ],
)
def test_clang_tidy_finds_violations(text: str, finding: str) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        file = Path(folder, "example.c")
        file.write_text(HEAD + text)
        command = [sys.executable, str(ROOT / "tools" / "tidy.py"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == int(bool(finding)), done.stdout + done.stderr
    assert finding in done.stdout
