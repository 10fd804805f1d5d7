"""No circle among the files of csrc/: of any two, at most one needs the other, directly or not.

The one idea: what a file needs is what its code names, so a file here is a .c together with its .h, and
an arrow goes to the file that defines a function or an object that it names. Declarations are no arrows:
a header may list what several files define. (Circles of folders: MAY_INCLUDE in test_c_rules.py.)
"""

from __future__ import annotations

import re
from pathlib import Path

from c_reader import Item, functions_of, items_of

CSRC = Path(__file__).resolve().parents[2] / "csrc"
OBJECT = re.compile(r"\b(zs_\w+)(?:\[[^\]]*\])*\s*(?:=|$)")

ASIDE = {"py_aliases", "py_util", "py_guard", "py_slices", "py_writes"}
"""Of the binding, what the others build on."""

KNOWN = {
    # A module and its types need each other, in CPython's way of making them.
    frozenset(path.stem for path in (CSRC / "python").glob("py_*.c")) - ASIDE,
}

Arrows = dict[str, set[str]]


def texts() -> dict[str, list[tuple[str, str]]]:
    """The name and text of each .c and its .h, by the name that they share."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".c", ".cpp", ".h", ".hpp"):
            found.setdefault(path.stem, []).append((path.name, path.read_text()))
    return found


def objects_in(item: Item) -> list[str]:
    """The object that an item outside functions defines, if the linker sees it."""
    if item.body and "=" not in item.head:
        return []
    if "(" in item.head or re.match(r"(static|extern|typedef|struct|enum|union)\b", item.head):
        return []
    return OBJECT.findall(item.head)


def arrows_in(files: dict[str, list[tuple[str, str]]]) -> Arrows:
    """Which file names what is defined in which other."""
    home: dict[str, str] = {}
    code: dict[str, str] = {}
    for stem, parts in files.items():
        for name, text in parts:
            items = list(items_of(name, text))
            code[stem] = code.get(stem, "") + " ".join(
                item.body + (item.head if "=" in item.head else "") for item in items
            )
            home |= {f.name: stem for f in functions_of(name, text) if f.name.startswith("zs_")}
            if name.endswith((".c", ".cpp")):
                home |= {found: stem for item in items for found in objects_in(item)}
    named = {
        stem: {home.get(word) for word in re.findall(r"\bzs_\w+", code[stem])} for stem in code
    }
    return {
        stem: {other for other in found if other and other != stem} for stem, found in named.items()
    }


def circles_in(arrows: Arrows) -> set[frozenset[str]]:
    """The largest sets of files that all lead to each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = arrows.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    from_each = {stem: reached(stem) for stem in arrows}
    return {
        frozenset(other for other in found if stem in from_each.get(other, ()))
        for stem, found in from_each.items()
        if stem in found
    }


def test_no_file_is_in_a_circle():
    assert circles_in(arrows_in(texts())) == KNOWN


def test_finds_circles():
    a = [("a.c", "const zs_ops zs_a_ops = {.go = zs_b};\nint zs_a(void)\n{\n    return 1;\n}\n")]
    b = [("b.c", "int zs_b(void)\n{\n    return zs_c();\n}\n"), ("b.h", "int zs_a(void);\n")]
    c = [("c.c", "int zs_c(void)\n{\n    return zs_a_ops.go();\n}\n")]
    d = [("d.c", "int zs_d(void)\n{\n    return zs_a() + zs_d();\n}\n")]
    arrows = arrows_in({"a": a, "b": b, "c": c, "d": d})
    assert arrows == {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circles_in(arrows) == {frozenset("abc")}
    assert circles_in({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
