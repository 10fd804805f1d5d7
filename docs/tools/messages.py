"""List every text that a user may read, so that all of them can be read in one pass.

    python docs/tools/messages.py                  # errors, warnings, help: file:line and the text
    python docs/tools/messages.py csrc/comm        # of these files and folders only
    python docs/tools/messages.py --docstrings     # public docstrings instead

A text is a string literal of two words or more. That also finds texts that are put
together elsewhere and raised later; the few literals that users never see (format names, protocol
lines) stay in the list, as guesses could drop real messages.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "zshard", "examples")
C_SUFFIXES = (".c", ".h", ".cpp", ".hpp", ".cu", ".cuh")
C_TOKEN = re.compile(
    r"""(?P<comment>/\*.*?\*/|//[^\n]*)
      |(?P<directive>^[ \t]*\#[ \t]*include[^\n]*)
      |(?P<char>'(?:\\.|[^'\\\n])+')
      |(?P<string>"(?:\\.|[^"\\\n])*")
      |(?P<format>\bPRI[a-zA-Z0-9]+\b)
      |(?P<space>\s+|\\\n)
      |(?P<other>[^\s"'/\\\#P]+|.)""",
    re.S | re.M | re.X,
)
WORD = re.compile(r"[A-Za-z]{2,}")


class Text(NamedTuple):
    """A text and where it begins."""

    file: str
    line: int
    text: str


def is_prose(text: str) -> bool:
    """Two words or more, with a space between: no name, path, format or option."""
    return " " in text.strip() and len(WORD.findall(text)) >= 2


def texts_of_c(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each run of adjacent string literals; PRId64 and its kin become %d."""
    pieces: list[str] = []
    begin = 0
    for token in C_TOKEN.finditer(source):
        kind, word = token.lastgroup, token.group()
        if kind == "string":
            if not pieces:
                begin = source.count("\n", 0, token.start()) + 1
            pieces.append(word[1:-1])
        elif kind == "format" and pieces:
            pieces.append("d")
        elif kind not in ("space", "comment"):
            if pieces:
                yield begin, "".join(pieces)
            pieces = []
    if pieces:
        yield begin, "".join(pieces)


def docstring_nodes(tree: ast.AST) -> Iterator[tuple[str, ast.Constant]]:
    """(name, node) of the docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield getattr(node, "name", ""), first.value


def spelled(node: ast.expr) -> str | None:
    """The text of a string, with {expression} where a value goes; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return None


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string but docstrings and what lies within an f-string."""
    tree = ast.parse(source)
    skipped = {id(node) for _, node in docstring_nodes(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node) if part is not node)
        if isinstance(node, ast.expr) and id(node) not in skipped:
            text = spelled(node)
            if text is not None:
                yield node.lineno, text


def docstrings_of_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of public names: no leading underscore."""
    for name, node in docstring_nodes(ast.parse(source)):
        if not name.startswith("_") or name == "__init__":
            yield node.lineno, str(node.value)


def files_below(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (each for each in found if each.suffix in (*C_SUFFIXES, ".py"))


def texts_in(name: str, source: str, docstrings: bool) -> Iterator[Text]:
    """The texts of one file's source, in the order of their lines."""
    if name.endswith(".py"):
        found = docstrings_of_python(source) if docstrings else texts_of_python(source)
    else:
        found = iter(()) if docstrings else texts_of_c(source)
    for line, text in sorted(found):
        if is_prose(text):
            yield Text(name, line, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders (default: all)")
    parser.add_argument("--docstrings", action="store_true", help="list public docstrings instead")
    args = parser.parse_args()
    paths = [path.resolve() for path in args.paths] or [ROOT / folder for folder in FOLDERS]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files_below(paths)}
    texts = [text for name in sources for text in texts_in(name, sources[name], args.docstrings)]
    for text in texts:
        print(f"{text.file}:{text.line}: {text.text}")
    print(f"{len(texts)} texts", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
