"""The package's folders stand on each other in one order, and no import runs upwards.

The one idea: each folder, and each module beside them, has a place in ORDER; what it imports stands
before it, or in the same folder. Imports within functions and for type checkers count as well.
"""

from __future__ import annotations

import ast
from pathlib import Path

import zshard

PACKAGE = Path(zshard.__file__).parent

ORDER = [
    *(
        "_version",
        "_built_with",
        "_torch_check",
        "_errors",
        "_core",
        "precision",
        "strategy",
        "_ranks",
        "offload",
        "_units",
    ),
    *("_guard", "_wrap", "wrap", "_types", "_optim", "optim", "grad_scaler", "_state_dict"),
    *("_memory", "_model", "_patches", "api", "_compat", "_checkpoint", "_doctor"),
    *("accelerate", "transformers"),
    *("__init__", "__main__"),
]


def imported_by(tree: ast.AST) -> set[str]:
    """The modules of zshard that a module imports, with dots."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("zshard.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            if node.module == "zshard":
                found |= {f"zshard.{name.name}" for name in node.names}
            elif (node.module or "").startswith("zshard."):
                found.add(node.module or "")
    return found


def test_no_import_runs_upwards():
    upwards = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).with_suffix("").parts
        for name in imported_by(ast.parse(path.read_text())):
            target = name.split(".")[1]
            if ORDER.index(target) > ORDER.index(place[0]):
                upwards.append(f"{'/'.join(place)}.py imports {name}")
    assert not upwards


def test_each_folder_says_what_it_is_for():
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir() and path.name[:2] != "__"):
        words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert words, folder.name
        assert len(list(folder.glob("*.py"))) <= 20, f"{folder.name} is an attic"


def test_no_two_types_of_one_name():
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(path.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
