"""The package's folders have one order, on three floors: no import runs upwards.

The core has an order: each folder, and each module outside of them, has a place in CORE; its
imports come before it, or from the same folder. An integration or extra imports zshard.api and its
own folder; other imports are listed. Imports within functions and for type checkers count as
well.

The core imports no third party but torch, names no library that an integration is for, and names
upper floors in upper.py alone; an integration has its own module name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import zshard

PACKAGE = Path(zshard.__file__).parent

CORE = [
    *("_version", "_built", "_build_check", "_errors", "_removed", "_core", "_logger", "upper"),
    *("precision", "strategy", "ranks", "offload", "units", "guard", "wrap", "options"),
    *("optim", "grad_scaler", "state", "memory", "model", "_patches", "checkpoint"),
    *("fsdp", "api"),
]
FLOORS = ("integrations", "extras")
# The public names of their modules.
NAMES = ("compat", "lightning", "accelerate", "transformers", "deepspeed", "planner")
ACROSS = {  # imports of an integration or extra from others
    "integrations/compat": "model",  # whose torch_classes has the names of torch's classes
    "integrations/deepspeed": "extras/per_host",
    "integrations/peft": "integrations/transformers",
    "integrations/transformers": "integrations/accelerate",
    "extras/any_world": "extras/data_position",
    "extras/checkpoint_cli": "extras/averages extras/per_host",
    "extras/doctor": "extras/run",
    "extras/recovery": "extras/keeping",
    "extras/run": "extras/keeping",
}

LIBRARIES = re.compile(
    r"\b(accelerate|apex|bitsandbytes|deepspeed|fbgemm_gpu|lightning|numpy|peft|safetensors\.torch|"
    r"transformer_engine|transformers|trl|tqdm|wandb)\b",
    re.IGNORECASE,
)
NAMED_BELOW = {  # files of the core that name a library in code: which, and why
    "checkpoint/progress": ("tqdm", "a bar for long saves and loads, if it is installed"),
    "checkpoint/save_plan": ("peft", "a model with adapters gets no config.json"),
    "checkpoint/script_state": ("numpy", "a script saves NumPy's arrays and random state"),
    "guard/outside": (
        "accelerate transformers lightning safetensors.torch",
        "texts: the adapter to use; safetensors.torch refuses shards, if it is installed",
    ),
    "guard/handlers": ("bitsandbytes", "the name of an operator of torch.library"),
    "optim/hooks": (
        "apex bitsandbytes deepspeed fbgemm_gpu transformer_engine",
        "optimizers with kernels of their own are known by their module",
    ),
    "upper": ("bitsandbytes peft transformers", "the table of integrations"),
}


MOST_LINES = 450  # of a file


def imported_by(tree: ast.AST) -> set[str]:
    """A module's imports from zshard: modules, or names in them, with dots."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("zshard.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            if f"{node.module}.".startswith("zshard."):
                found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def room_of(parts: Sequence[str]) -> str:
    """The folder, or module outside of folders, that a path below zshard lies in:
    "extras/planner"."""
    return "/".join(parts[: 2 if parts[0] in FLOORS else 1])


def wrong_imports(parts: Sequence[str], text: str) -> list[str]:
    """The imports of a module with that path and text that it may not have."""
    room, found = room_of(parts), []
    allowed = {room, *ACROSS.get(room, "").split()}
    for name in sorted(imported_by(ast.parse(text))):
        path = name.split(".")[1:]
        if path[0] not in FLOORS and path[0] not in CORE:
            found.append(name)  # a public name of an upper floor, or what zshard/__init__ passes on
        elif (parts[0] in FLOORS and path[0] != "api") or path[0] in FLOORS:
            found += [name] if room_of(path) not in allowed else []
        elif parts[0] in CORE and CORE.index(path[0]) > CORE.index(parts[0]):
            found.append(name)
    return found


def test_no_import_runs_upwards():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in (*CORE, *FLOORS):
            found["/".join(parts)] = wrong_imports(parts, path.read_text())
    assert {path: names for path, names in found.items() if names} == {}


def test_the_interface_has_what_is_used():
    api = {
        each.asname or each.name
        for node in ast.parse((PACKAGE / "api.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    above = [path.read_text() for floor in FLOORS for path in (PACKAGE / floor).rglob("*.py")]
    used = {
        node.attr
        for text in above
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "api"
    }
    names = {name for text in above for name in imported_by(ast.parse(text))}
    used |= {name.removeprefix("zshard.api.") for name in names if name.startswith("zshard.api.")}
    assert api == used - {"__file__"}


def test_public_names_are_files_of_a_few_lines():
    for name in NAMES:
        text = (PACKAGE / f"{name}.py").read_text()
        assert text.count("\n") <= 5, name
        floors = {each.split(".")[1] for each in imported_by(ast.parse(text))}
        assert floors <= {*FLOORS}, name


def test_strings_name_modules_in_one_place():
    known = {
        "zshard." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
    }
    known -= {f"zshard.{name}" for name in NAMES}
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in known:
                found.add(str(path.relative_to(PACKAGE)))
    assert found == {"upper.py", "model/copy.py"}


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


def test_no_file_is_too_long():
    lines = {str(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_each_folder_states_its_purpose():
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir() and path.name[:2] != "__"):
        words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert words, folder.name
        assert len(list(folder.glob("*.py"))) <= 20, f"{folder.name} is an attic"


def types_in(tree: ast.Module) -> Iterator[str]:
    """The names of a module's classes and type aliases: `Path = tuple[str, ...]`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            yield from (
                name for name in names if name.lstrip("_")[:1].isupper() and not name.isupper()
            )


def of_one_name(things: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names in several places, of (name, place)."""
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


def test_no_two_modules_of_one_name():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem[:2] != "__"]
    files = [path for path in files if path.parent != PACKAGE or path.stem not in NAMES]
    assert of_one_name((path.stem, str(path.relative_to(PACKAGE))) for path in files) == {}
