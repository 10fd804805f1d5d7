"""A small reader of C and C++, for the rules (test_c_rules.py): items, functions, includes.

The one idea: C is read without a parser: comments, literals and preprocessor lines are blanked,
braces counted. What that cannot tell apart, the sources of csrc/ do not contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NOISE = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""", re.DOTALL | re.VERBOSE
)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
ATTRIBUTE = re.compile(r"__attribute__\s*\(\(.*?\)\)|\[\[.*?\]\]", re.DOTALL)
NAMESPACE = re.compile(r"(inline )?namespace\b|extern$")
NAMESPACE_OR_CLASS = re.compile(NAMESPACE.pattern + r"|(class|struct)\b[^()=]*$")
FUNCTION = re.compile(
    r"(?P<name>~?\w+|operator\W+)\s*\((?P<parameters>[^{}]*)\)\s*(?:const|noexcept|override|final|\s)*$"
)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def code_of(text: str) -> str:
    """`text` with comments, literals and preprocessor lines blanked; every line keeps its place."""
    return PREPROCESSOR.sub(_blank, NOISE.sub(_blank, text))


@dataclass(frozen=True)
class Item:
    """One declaration or definition outside functions: its text up to `;` or `{`, and its lines."""

    head: str
    body: str  # "" for a declaration
    first: int
    last: int
    scopes: tuple[str, ...]  # heads of the namespaces, classes and extern "C" blocks around it


def items_of(name: str, text: str) -> Iterator[Item]:
    """The items of file `name` in order. Namespaces, classes and extern "C" blocks are entered."""
    code = code_of(text)
    entered = NAMESPACE if name.endswith((".c", ".h")) else NAMESPACE_OR_CLASS
    scopes: list[str] = []
    start = at = 0
    while at < len(code):
        if code[at] in ";{}":
            raw = code[start:at]
            head = " ".join(ATTRIBUTE.sub(" ", raw).split())
            first = code.count("\n", 0, start + len(raw) - len(raw.lstrip())) + 1
            if code[at] == "}" and scopes:
                scopes.pop()
            elif code[at] == "{" and entered.match(head):
                scopes.append(head)
            elif code[at] == "{":
                body = _block(code, at)
                at += len(body) - 1
                if "(" not in head or "=" in head:  # a type or a table goes on to its `;`
                    at = max(at, code.find(";", at))
                last = code.count("\n", 0, at) + 1
                yield Item(head, body, first, last, tuple(scopes))
            elif head:
                yield Item(head, "", first, code.count("\n", 0, at) + 1, tuple(scopes))
            start = at + 1
        at += 1


def _block(code: str, opening: int) -> str:
    """From the brace at `opening` to the one that closes it."""
    depth = 0
    for match in re.finditer(r"[{}]", code[opening:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return code[opening : opening + match.end()]
    return code[opening:]


@dataclass(frozen=True)
class Function:
    """A function's definition."""

    name: str
    parameters: int
    item: Item


def functions_of(name: str, text: str) -> Iterator[Function]:
    """The functions that a file defines, methods of classes included."""
    for item in items_of(name, text):
        head = re.sub(r"\b(public|private|protected)\s*:(?!:)", "", item.head)
        head = re.split(r"(?<!:):(?!:)", head)[0]  # a constructor's initialisers
        match = FUNCTION.search(head) if item.body and "=" not in head else None
        if match:
            # Prefix macros and attributes may have arguments of their own: the last group counts.
            inner = head[: match.end()].rstrip()
            opening = _opening(inner)
            word = re.search(r"(~?\w+|operator\W+)\s*$", inner[:opening])
            listed = inner[opening + 1 : inner.rfind(")")].strip()
            count = 0 if listed in ("", "void") else _commas(listed) + 1
            yield Function(word[1] if word else match["name"], count, item)


def _opening(head: str) -> int:
    """Where the last parenthesised group of `head` opens."""
    depth = 0
    for at in range(head.rfind(")"), -1, -1):
        depth += {")": 1, "(": -1}.get(head[at], 0)
        if depth == 0:
            return at
    return 0


def _commas(listed: str) -> int:
    depth = count = 0
    for char in listed:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(char, 0)
        count += char == "," and depth == 0
    return count


def includes_of(text: str) -> list[str]:
    """The names in a file's #include lines."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
