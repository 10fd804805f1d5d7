"""The site's page of messages has every message of the sources, and docs/errors.md quotes these."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import message_page  # noqa: E402
import messages  # noqa: E402

FAILURE = re.compile(r'\b(?:ZS_FAIL|PyErr_Format|PyErr_SetString)\([^;"]*?"((?:\\.|[^"\\])*)"')


def raised(source: str) -> list[str]:
    """The texts within raise statements of Python."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    inner = {
        id(part)
        for node in nodes
        for text in ast.walk(node)
        if isinstance(text, ast.JoinedStr)
        for part in ast.walk(text)
        if part is not text
    }
    parts = [part for node in nodes for part in ast.walk(node) if id(part) not in inner]
    texts = [messages.spelled(part) for part in parts if isinstance(part, ast.expr)]
    return [text for text in texts if text is not None and messages.is_prose(text)]


def flat(text: str) -> str:
    """Without the additions of a table and its columns, and without spaces and separators."""
    return re.sub(r"[\s`|:;.,\\]", "", text).lower()


@functools.cache
def texts() -> list[str]:
    """The messages of the sources, found by other means than those of message_page.py."""
    found = [t for p in (ROOT / "zshard").rglob("*.py") for t in raised(p.read_text())]
    for path in (ROOT / "csrc").rglob("*.c"):
        found += filter(messages.is_prose, FAILURE.findall(path.read_text()))
    return [message_page.shown(text) for text in found]


def missing(page: str) -> list[str]:
    """The messages of the sources that `page` lacks."""
    found = flat(page)
    return [text for text in texts() if flat(text) not in found]


@functools.cache
def page() -> str:
    return message_page.page()


def test_no_message_is_missing() -> None:
    assert missing(page()) == [] and len(texts()) > 800
    (row,) = [row for row in page().splitlines() if "no gradients to clip" in row]
    assert [text for text in missing(page().replace(row, "")) if "no gradients to clip" in text]


OF_OTHERS = {"returned an invalid gradient", "Missing key(s) in state_dict"}  # torch, ...
OF_OTHERS |= {"Numpy is not available", "this build sees no torch"}  # ... tools/build_backend.py
OF_OTHERS |= {"Recomputed values for the following tensors have different metadata"}  # torch


def test_explained_errors_are_those_of_the_sources() -> None:
    """Of each quotation in a heading of docs/errors.md, the longest part without names and numbers."""
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(headings) >= 20
    quoted = re.findall('"(.*?)"', " ".join(headings))
    parts = [re.split(r" ?\.\.\. ?|[\d.]+", text) for text in quoted]
    found = flat(page())
    longest = {max((part.strip() for part in each), key=len) for each in parts}
    assert {part for part in longest if flat(part) not in found} == OF_OTHERS
