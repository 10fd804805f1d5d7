"""No circle among the files of csrc/: of any two, at most one needs the other, directly or not.

The linker knows who needs whom. A file is its object, and an arrow goes to the object that
defines a symbol which this one needs. A header's inline functions count as those of the files that include
it. (Circles of folders: MAY_INCLUDE in test_c_rules.py.)
"""

from __future__ import annotations

from pathlib import Path

from c_sources import DEFINED, Symbols, symbols_by_source

CSRC = Path(__file__).resolve().parents[2] / "csrc"

ASIDE = {"py_guard.c", "py_reads.c", "py_signals.c", "py_slices.c", "py_writes.c"}
"""Of the binding, what the others build on."""

KNOWN = {
    # A module and its types need each other, in CPython's way of making them.
    frozenset(path.name for path in (CSRC / "python").glob("py_*.c")) - ASIDE,
}

Arrows = dict[str, set[str]]


def arrows_in(listed: dict[str, Symbols]) -> Arrows:
    """For each file, the other files that define symbols that it needs."""
    home = {name: file for file, found in listed.items() for kind, name in found if kind in DEFINED}
    return {
        file: {home[name] for kind, name in found if kind == "U" and name in home}
        for file, found in listed.items()
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


def test_files_have_no_cycles():
    assert circles_in(arrows_in(symbols_by_source())) == KNOWN
