"""Count what should become less: lines by floor and folder, names that upper floors take from the
core, texts of errors, tables that outlive a call.

    python tools/sizes.py [--names]

tests/project/test_ratchets.py holds the counts: they only fall.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("integrations", "extras")
# Modules with the public names of those folders: files of a few lines.
UPPER = dict.fromkeys(
    ("compat", "deepspeed", "lightning", "accelerate", "transformers"), "integrations"
)
UPPER |= {"planner": "extras", "__main__": "extras"}
TEXT = re.compile(r"_*(check|refuse)(_|$)")  # functions that raise
WEAK = ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakIdKeyDictionary")
EMPTY = (*WEAK, "dict", "set", "list", "defaultdict", "OrderedDict", "deque", "Counter")
LEAST_TEXT = 40  # characters of a function's strings that make it one of text
C_GLOBAL = re.compile(
    r"^(?!.*\b(?:const|typedef|extern|return|goto)\b)(?!\}|#|/)"
    r"(?:static )?(?:_Atomic\([^)]*\) )?(?:[A-Za-z_][\w:<>]*[ *]+)*"
    r"(?P<name>\w+)(?:\[[^\]]*\])*(?: = [^()]*|)[;{]$",
    re.M,
)


class Lines(NamedTuple):
    """Lines with code (no blanks, comments, docstrings), and all."""

    code: int
    all: int


def lines_of(text: str) -> Lines:
    """Count a Python file's lines."""
    found: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            found.difference_update(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    return Lines(len(found), len(text.splitlines()))


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def floor_of(module: str) -> str:
    """Return the floor of a module of zshard: "core", "integrations" or "extras"."""
    room = module.split("/")[0]
    return room if room in FLOORS else UPPER.get(room, "core")


def folder_of(module: str) -> str:
    """Return the folder that a module's lines count for; the core's single modules together."""
    parts = module.split("/")
    if parts[0] in FLOORS:
        return "/".join(parts[:2])
    return parts[0] if len(parts) > 1 or parts[0] in UPPER else "(modules)"


# --- names ----------------------------------------------------------------------------------------


def names_taken(texts: Mapping[str, str]) -> set[str]:
    """Return what modules of upper floors take from the core: functions, classes, constants, and
    attributes of modules one by one. `texts`: all modules' sources."""
    found: set[str] = set()
    for module, text in texts.items():
        if floor_of(module) == "core":
            continue
        tree = ast.parse(text)
        modules: dict[str, str] = {}  # names in this file that are modules of the core
        for name, path in _imports(tree):
            if _floor_of_import(path, texts) != "core":
                continue
            if _as_file(path, texts) is not None or path in ("zshard", "zshard._core"):
                modules[name] = path
            else:
                found.add(path.rpartition(".")[2])
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found |= _through(node, modules, texts)
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name in the file, dotted path) of all imports of zshard."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "zshard":
                    yield (each.asname or "zshard", each.name if each.asname else "zshard")
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("zshard."):
            yield from (
                (each.asname or each.name, f"{node.module}.{each.name}") for each in node.names
            )


def _as_file(path: str, texts: Mapping[str, str]) -> str | None:
    """Return the module that a dotted path names, if it names one."""
    inner = "/".join(path.split(".")[1:])
    return next((each for each in (inner, f"{inner}/__init__") if each in texts), None)


def _floor_of_import(path: str, texts: Mapping[str, str]) -> str:
    """Return the floor of a dotted path, resolved through zshard/__init__."""
    parts = path.split(".")[1:]
    if parts and len(parts) == 1 and _as_file(path, texts) is None and "__init__" in texts:
        for name, origin in _imports(ast.parse(texts["__init__"])):
            if name == parts[0] and origin != path:
                return _floor_of_import(origin, texts)
    return floor_of("/".join(parts)) if parts else "core"


def _through(node: ast.Attribute, modules: Mapping[str, str], texts: Mapping[str, str]) -> set[str]:
    """Return the name that an attribute of a module of the core is."""
    path = _dotted(node.value)
    if path is None or path.split(".")[0] not in modules:
        return set()
    head, _, rest = path.partition(".")
    full = ".".join(filter(None, (modules[head], rest, node.attr)))
    inside = full.rpartition(".")[0]
    is_module = _as_file(full, texts) is not None or full == "zshard._core"
    owner = _as_file(inside, texts) is not None or inside in ("zshard", "zshard._core")
    if is_module or not owner or _floor_of_import(full, texts) != "core":
        return set()
    return {node.attr}


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Subscript):  # dict[int, str]
        return _dotted(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := _dotted(node.value)) is not None:
        return f"{inner}.{node.attr}"
    return None


# --- habits ---------------------------------------------------------------------------------------


def text_lines(tree: ast.AST) -> int:
    """Count lines of raises, warnings, and of functions that check, refuse or make text."""
    found: set[int] = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Raise)
            or (isinstance(node, ast.Call) and "warn" in str(_dotted(node.func)).rpartition(".")[2])
            or (isinstance(node, ast.FunctionDef) and _makes_text(node))
        )
        if is_text and isinstance(node, ast.stmt | ast.expr):
            found.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(found)


def _makes_text(function: ast.FunctionDef) -> bool:
    if TEXT.match(function.name):
        return True
    if not (isinstance(function.returns, ast.Name) and function.returns.id == "str"):
        return False
    body = function.body[1:] if _is_docstring(function.body[0]) else function.body
    strings = [each for line in body for each in ast.walk(line) if isinstance(each, ast.Constant)]
    return sum(len(each.value) for each in strings if isinstance(each.value, str)) >= LEAST_TEXT


def habits(texts: Iterable[str]) -> Counter[str]:
    """Count weak dictionaries, tables of modules, `global`, attributes set on torch's objects."""
    found: Counter[str] = Counter()
    for tree in map(ast.parse, texts):
        found["text_lines"] += text_lines(tree)
        found["module_tables"] += sum(map(_is_table, tree.body))
        for node in ast.walk(tree):
            called = (
                str(_dotted(node.func)).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            )
            found["weak_dictionaries"] += called in WEAK
            found["globals"] += isinstance(node, ast.Global)
            found["attributes_set"] += called == "setattr" or _sets_attribute(node)
    return found


def _is_table(node: ast.stmt) -> bool:
    """Return whether a statement of a module makes a container that starts empty."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    if not isinstance(value, ast.Call):
        return False
    first = value.args[0] if value.args else None
    return str(_dotted(value.func)).rpartition(".")[2] in EMPTY and not isinstance(
        first, ast.GeneratorExp
    )


def _sets_attribute(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    for each in targets:
        if isinstance(each, ast.Attribute):
            path = str(_dotted(each))
            private = each.attr.startswith("_zshard") and path.split(".")[0] != "self"
            if private or path.split(".")[0] in ("torch", "nn", "dist"):
                return True
    return False


def c_globals(text: str) -> list[str]:
    """Return the names of a C file's variables that outlive a call, but for constants and CPython's
    tables."""
    plain = re.sub(r" *(/\*.*?\*/|//[^\n]*)", "", text, flags=re.S)
    return [
        match["name"]
        for match in C_GLOBAL.finditer(plain)
        if not match[0].startswith(
            ("struct ", "enum ", "union ", "namespace ", "using ", "static Py")
        )
    ]


# --- all ------------------------------------------------------------------------------------------


def sources(root: Path) -> dict[str, str]:
    """Return the sources of zshard by module: "optim/step"."""
    package = root / "zshard"
    paths = sorted(package.rglob("*.py"))
    return {str(path.relative_to(package).with_suffix("")): path.read_text() for path in paths}


def sizes(root: Path = ROOT) -> tuple[dict[str, Lines], dict[str, int]]:
    """Return lines by floor and folder, and the other counts, of a working tree."""
    texts = sources(root)
    lines: dict[str, Lines] = {}
    for module, text in texts.items():
        here, floor = lines_of(text), floor_of(module)
        for place in (floor, f"{floor}: {folder_of(module)}"):
            before = lines.get(place, Lines(0, 0))
            lines[place] = Lines(before.code + here.code, before.all + here.all)
    csrc = [
        path for path in (root / "csrc").rglob("*.*") if path.suffix in (".c", ".h", ".cpp", ".hpp")
    ]
    c_texts = [path.read_text() for path in csrc]
    counts = dict(habits(texts.values()))
    counts["names_from_core"] = len(names_taken(texts))
    counts["c_lines"] = sum(len(text.splitlines()) for text in c_texts)
    counts["c_globals"] = sum(len(c_globals(text)) for text in c_texts)
    return dict(sorted(lines.items())), dict(sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list the names taken from the core")
    if parser.parse_args().names:
        print(*sorted(names_taken(sources(ROOT))), sep="\n")
        return
    lines, counts = sizes()
    for place, each in lines.items():
        print(f"{place:32} {each.code:6} {each.all:6}")
    for name, count in counts.items():
        print(f"{name:32} {count:13}")


if __name__ == "__main__":
    main()
