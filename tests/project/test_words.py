"""Words that CONTRIBUTING.md's table replaces become fewer in comments, docstrings and names.

Each word has a limit: its current count in csrc, cuda, zshard and tests. The limits only fall:
where the count is below its limit, lower the limit; where it is above, use the table's words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
PYTHON_COMMENT = re.compile(r"(?:^|(?<=\s))# [^\n]*")
C_NAME = re.compile(r"\b[a-z_]\w*_\w*\b")

# The pattern, its limit, and the replacement.
WORDS = [
    ("slices?", 29, "shard"),
    ("nobody(?:'?s)?|somebody(?:'?s)?|whoever", 1, "name the subject: no rank, a script"),
    ("(?:goes|go|going|went) on", 9, "continue"),
    ("(?:gives?|gave|given) (?:it )?back", 11, "free, return, drop"),
    ("hears?|heard", 4, "receive, learn"),
    ("tells?|told", 26, "report, publish, show"),
    ("mishaps?|kin|deaf|soil|last words?", 6, "failure, process, failed, mark dirty, message"),
    ("alike", 10, "the same, equal"),
    ("lets? go|letting go", 0, "release, unpin"),
    ("of which|by which", 8, "whose, that; or two sentences"),
    ("(?:is|are|was|has) gone", 1, "was freed, exited, is missing"),
]


def python_words(text: str) -> Iterator[str]:
    """The comments, docstrings and defined names of a Python file."""
    yield from PYTHON_COMMENT.findall(text)
    for node in statements_in(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name.replace("_", " ")
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
            yield ast.get_docstring(node) or ""


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """The node and the statements in it, without their expressions, which are most of the nodes."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
            yield from statements_in(each)


def c_words(text: str) -> Iterator[str]:
    """The comments and the names, each once, of a C file."""
    yield from (re.sub(r"\n\s*\*", " ", comment) for comment in C_COMMENT.findall(text))
    yield from (name.replace("_", " ") for name in set(C_NAME.findall(C_COMMENT.sub(" ", text))))


def count(pattern: str, texts: Iterable[str]) -> int:
    text = " | ".join(" ".join(text.split()) for text in texts)
    return len(re.findall(rf"\b(?:{pattern})\b", text, re.I))


def all_words() -> list[str]:
    found: list[str] = []
    for folder in ("csrc", "cuda", "zshard", "tests"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix == ".py" and path != Path(__file__):
                found += python_words(path.read_text())
            elif path.suffix in (".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"):
                found += c_words(path.read_text())
    return found


def test_words_become_fewer() -> None:
    texts = [" | ".join(all_words())]
    counts = {pattern: count(pattern, texts) for pattern, _, _ in WORDS}
    limits = {pattern: limit for pattern, limit, _ in WORDS}
    assert counts == limits, "lower the limit, or write: " + "; ".join(
        f"{better} (not {pattern})" for pattern, limit, better in WORDS if counts[pattern] > limit
    )
