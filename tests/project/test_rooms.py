"""The package's folders stand on each other in one order, and no import runs upwards.

Each folder, and each module beside them, has a place in ORDER; what it imports stands
before it, or in the same folder. The modules of `compat/` have a place each: some stand below what
FSDP() is made of, others on it. Imports within functions and for type checkers count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import zshard

PACKAGE = Path(zshard.__file__).parent

ORDER = [
    *("_version", "_built_with", "_torch_check", "_errors", "_missing_modules", "_core"),
    *("compat.__init__", "compat.classes", "precision", "strategy", "run", "ranks", "offload"),
    *("units", "guard", "wrap", "optim", "grad_scaler", "state", "memory", "model"),
    *("compat.fsdp2", "compat.fsdp1", "compat.state_dict_types", "compat.sharded_grad_scaler"),
    *("compat.fsdp1_methods", "compat.ddp", "compat.attributes", "compat.argument_types"),
    *("_predict_memory", "_patches", "fsdp"),
    *("compat.fully_shard", "compat.distributed_data_parallel", "checkpoint", "doctor"),
    *("lightning", "accelerate", "transformers", "peft", "bitsandbytes", "deepspeed"),
    *("__init__", "__main__"),
]


MOST_LINES = 450  # of a file


def imported_by(tree: ast.AST) -> set[str]:
    """What a module imports of zshard: modules, or names in them, with dots."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("zshard.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            if f"{node.module}.".startswith("zshard."):
                found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def place_of(parts: Sequence[str]) -> int:
    """The place of a module: its own, or else that of its folder."""
    own = ".".join(parts[:2])
    return ORDER.index(own if own in ORDER else parts[0])


def upward_imports(parts: Sequence[str], text: str) -> list[str]:
    """The imports of a module with that path and text that run upwards."""
    names = sorted(imported_by(ast.parse(text)))
    return [name for name in names if place_of(name.split(".")[1:]) > place_of(parts)]


def test_no_import_runs_upwards():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found["/".join(parts)] = upward_imports(parts, path.read_text())
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "line", "upwards"),
    [
        ("optim/step", "from zshard.units.units import State", False),
        ("units/units", "from zshard.optim.step import install", True),
        ("units/units", "import zshard.optim.step", True),
        ("precision", "from zshard.compat.classes import MixedPrecision", False),
        ("precision", "from zshard.compat import fsdp1", True),
        ("compat/fsdp1", "from zshard.compat import fsdp2", False),
        ("compat/fsdp2", "from zshard.compat.fsdp1 import precision_of", True),
        ("compat/fsdp1", "if TYPE_CHECKING:\n    from zshard.fsdp import FSDP", True),
    ],
)
def test_upward_imports_are_found(path, line, upwards):
    assert bool(upward_imports(path.split("/"), line)) is upwards


INTEGRATIONS = {"lightning", "accelerate", "transformers", "peft", "bitsandbytes", "deepspeed"}
NOT_THEIRS = {"zshard", "torch", "tqdm", "typing_extensions"}  # tqdm: for progress, if it is there


def third_parties(tree: ast.AST) -> set[str]:
    """The packages that a module imports, besides the standard library."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - NOT_THEIRS


def test_the_core_imports_no_third_party_but_torch():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if name not in INTEGRATIONS:
            found[str(path)] = third_parties(ast.parse(path.read_text()))
    assert {path: names for path, names in found.items() if names} == {}
    assert third_parties(ast.parse("import peft.utils, os\nfrom torch import nn")) == {"peft"}


def too_long(texts: Mapping[str, str]) -> dict[str, int]:
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    return {name: count for name, count in lines.items() if count > MOST_LINES}


def test_no_file_is_too_long():
    texts = {str(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert too_long(texts) == {}
    assert too_long({"right": "\n" * 450, "wrong": "\n" * 451}) == {"wrong": 451}


def test_each_folder_states_its_purpose():
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir() and path.name[:2] != "__"):
        words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert words, folder.name
        assert len(list(folder.glob("*.py"))) <= 20, f"{folder.name} is an attic"


def types_in(tree: ast.Module) -> Iterator[str]:
    """The names of a module's classes, and of what it calls a type: `Path = tuple[str, ...]`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            yield from (
                name for name in names if name.lstrip("_")[:1].isupper() and not name.isupper()
            )


def of_one_name(things: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """What is in several places, of (name, place)."""
    places: dict[str, list[str]] = {}
    for name, place in things:
        places.setdefault(name.lstrip("_"), []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_types_of_one_name():
    texts = {str(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    assert (
        of_one_name((kind, name) for name, tree in trees.items() for kind in types_in(tree)) == {}
    )
    wrong = ast.parse("class _Plan: ...\nPlan = list[int]\nLIMIT = 3")
    assert of_one_name((kind, "wrong") for kind in types_in(wrong)) == {"Plan": ["wrong", "wrong"]}


def test_no_two_modules_of_one_name():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem[:2] != "__"]
    assert of_one_name((path.stem, str(path.relative_to(PACKAGE))) for path in files) == {}
