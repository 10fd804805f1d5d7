"""The package's folders stand on each other in one order, on three floors: no import runs upwards.

Each folder, and each module beside them, has a place in ORDER; what it imports stands before it, or
in the same folder. Some modules of `compat/` stand below FSDP, which has their methods, and others
on it. Imports within functions and for type checkers count as well.

The floors: the core imports no third party but torch, and names no library that an integration is
for; the dialects are those of torch's wrappers; an integration has a module of its own name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import zshard

PACKAGE = Path(zshard.__file__).parent

CORE = [
    *("_version", "_built", "_build_check", "_errors", "_removed", "_core"),
    *("precision", "strategy", "keeping", "run", "ranks", "trace", "offload"),
    *(
        "data_position",
        "units",
        "any_world",
        "guard",
        "wrap",
        "options",
        "optim",
        "grad_scaler",
        "state",
    ),
    *("memory", "model"),
    *("_patches", "averages", "checkpoint", "weights", "recovery", "doctor"),
]
DIALECTS = ["compat", "fsdp", "compat.fsdp2", "compat.ddp", "compat.__init__"]
INTEGRATIONS = ["lightning", "accelerate", "transformers", "peft", "bitsandbytes", "deepspeed"]
ORDER = [*CORE, *DIALECTS, *INTEGRATIONS, "planner", "__init__", "__main__"]

LIBRARIES = re.compile(
    r"\b(accelerate|apex|bitsandbytes|deepspeed|fbgemm_gpu|lightning|numpy|peft|safetensors\.torch|"
    r"transformer_engine|transformers|trl|tqdm|wandb)\b",
    re.IGNORECASE,
)
NAMED_BELOW = {  # files of the core that name a library in code: which, and why
    "any_world": ("numpy", "NumPy's generator is seeded, if a script has imported it"),
    "checkpoint/torch_file": ("numpy", "names of its scalars in pickles"),
    "checkpoint/opening": ("deepspeed safetensors.torch", "texts: how to convert such a file"),
    "checkpoint/save_plan": ("peft", "a model with adapters gets no config.json"),
    "checkpoint/script_state": ("numpy", "a script saves NumPy's arrays and random state"),
    "guard/outside": (
        "accelerate transformers lightning safetensors.torch",
        "texts: the adapter to use; safetensors.torch refuses shards, if it is installed",
    ),
    "guard/handlers": ("bitsandbytes", "the name of an operator of torch.library"),
    "guard/words": ("numpy", "the name of a method of tensors"),
    "optim/hooks": (
        "apex bitsandbytes deepspeed fbgemm_gpu transformer_engine",
        "optimizers with kernels of their own are known by their module",
    ),
    "optim/matrices": ("transformers", "its Conv1D is a Linear for Muon, if it is imported"),
}


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
        ("precision", "from zshard.compat import fsdp1", True),
        ("compat/fsdp1", "from zshard.compat import attributes", False),
        ("compat/fsdp1", "from zshard.compat.fsdp2 import fully_shard", True),
        ("compat/fsdp1", "if TYPE_CHECKING:\n    from zshard.fsdp import FSDP", True),
    ],
)
def test_upward_imports_are_found(path, line, upwards):
    assert bool(upward_imports(path.split("/"), line)) is upwards


def libraries_named(text: str) -> set[str]:
    """The libraries that the code of a module imports or has in its strings, but not those in
    docstrings and comments; and any other third party that it imports."""
    tree = ast.parse(text)
    texts = {id(each): each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            texts.pop(id(node.value), None)
    strings = [each for each in texts.values() if isinstance(each, str)]
    found = {name.lower() for each in strings for name in LIBRARIES.findall(each)}
    known = {"torch", "zshard", "typing_extensions", *sys.stdlib_module_names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names} - known
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module).partition(".")[0]} - known
    return found


def test_the_core_names_no_other_library():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in CORE:
            found["/".join(parts)] = libraries_named(path.read_text())
    allowed = {name: {*libraries.split()} for name, (libraries, _) in NAMED_BELOW.items()}
    assert {name: names for name, names in found.items() if names} == allowed


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import transformers.trainer", {"transformers"}),
        ("def f():\n    from numpy import array", {"numpy"}),
        ("import pandas", {"pandas"}),
        ("import_module('deepspeed.ops')", {"deepspeed"}),
        ("f'use PEFT for {x}'", {"peft"}),
        ("'As DeepSpeed does.'\nimport os, torch  # peft", set()),
        ("def f():\n    'As Lightning does.'\n    return accelerated", set()),
    ],
)
def test_a_library_that_is_named_is_found(text, names):
    assert libraries_named(text) == names


def test_the_floors_stand_on_each_other():
    for line in ("from zshard.compat import classes", "import zshard.fsdp, zshard.transformers"):
        assert upward_imports(["wrap", "tree"], line), line
    assert upward_imports(["compat", "fsdp2"], "from zshard.transformers import shard")


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
