"""Types: the stub of the C module against the module itself, and what users' type checkers see.

The one idea: `make lint` runs mypy's stubtest, which needs mypy. What it is for, names and
arguments that drifted apart, is also found by reading the stub's syntax tree, which needs nothing.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import zshard
from zshard import _core

ROOT = Path(__file__).resolve().parent.parent
STUB = ast.parse((ROOT / "zshard" / "_core.pyi").read_text())


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def definitions(body: list[ast.stmt]) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


CLASSES = {
    name: node for name, node in definitions(STUB.body).items() if isinstance(node, ast.ClassDef)
}


def test_stub_names_all_that_the_module_has() -> None:
    assert set(definitions(STUB.body)) == public(dir(_core))


@pytest.mark.parametrize("name", CLASSES)
def test_stub_class_has_the_real_members(name: str) -> None:
    real = getattr(_core, name)
    body = CLASSES[name].body
    written = [n.target.id for n in body if isinstance(n, ast.AnnAssign)]
    assert public([*definitions(body), *written]) == public(list(vars(real)))
    assert [ast.unparse(base) for base in CLASSES[name].bases] == [
        base.__name__ for base in real.__bases__ if base is not object
    ]


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


FUNCTIONS = {
    f"{owner}.{name}".strip("."): node
    for owner, body in [("", STUB.body), *((name, node.body) for name, node in CLASSES.items())]
    for name, node in definitions(body).items()
    if isinstance(node, ast.FunctionDef) and not name.startswith("__") and not is_property(node)
}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_stub_function_takes_what_the_docstring_says(path: str) -> None:
    owner, _, name = path.rpartition(".")
    real = vars(getattr(_core, owner))[name] if owner else getattr(_core, name)
    first = "$self" if owner else "$module"
    if isinstance(real, types.ClassMethodDescriptorType):
        first = "$type"
    arguments = FUNCTIONS[path].args
    both = [*arguments.posonlyargs, *arguments.args]
    defaults = [""] * (len(both) - len(arguments.defaults))
    defaults += [f"={ast.unparse(default)}" for default in arguments.defaults]
    written = [each.arg + default for each, default in zip(both, defaults, strict=True)]
    names = [first, *(written[1:] if owner else written), "/"]
    # C functions take their arguments by position; the signature is the docstring's first line.
    assert real.__text_signature__ == f"({', '.join(names)})"


def test_package_says_that_it_is_typed() -> None:
    package = Path(str(zshard.__file__)).parent
    assert (package / "py.typed").exists() and (package / "_core.pyi").exists()


# --- mypy on users' code -------------------------------------------------------------------------

USER = '''\
"""What a training script says, and mistakes that a type checker should find (see the comments)."""

import torch
from torch import nn

from zshard import FSDP, Adam, AdamW, SGD, ShardingStrategy, shard_info
from zshard.wrap import enable_wrap, wrap

net: nn.Module = FSDP(nn.Linear(2, 2), strategy=ShardingStrategy.NO_SHARD, timeout=5.0)
adam = AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=1)
SGD([{"params": list(net.parameters()), "lr": 0.1}], momentum=0.9)
units: list[FSDP] = FSDP.fsdp_modules(net)
norm: torch.Tensor = units[0].clip_grad_norm_(1.0)
table: str = units[0].summary()
facts = [shard_info(param) for param in net.parameters()]

FSDP(net, timeout="5")  # error: arg-type
FSDP(net, transprot="shm")  # error: call-overload | call-arg
AdamW(net.parameters(), momentum=0.9)  # error: call-arg
Adam(net.parameters(), lr="fast")  # error: arg-type
units[0].clip_grad_norm_()  # error: call-arg
count: int = units[0].summary()  # error: assignment
'''


@pytest.mark.slow
@pytest.mark.timeout(900)  # it reads all of torch, if `make lint` has not left it a cache
@pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is a tool of `make lint`"
)
def test_mypy_knows_the_public_names(tmp_path: Path) -> None:
    script = tmp_path / f"user_{os.getpid()}.py"  # another name: mypy keeps messages, with paths
    script.write_text(USER)
    words = ["-m", "mypy", "--config-file", "pyproject.toml", "--show-error-codes", str(script)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith(f"{script}:") and ": error: " in line:
            found[int(line.split(":")[1])] = line.rpartition("[")[2].rstrip("]")
    expected = {
        number: {code.strip() for code in line.partition("# error: ")[2].split("|")}
        for number, line in enumerate(USER.splitlines(), 1)
        if "# error: " in line
    }
    assert set(found) == set(expected), done.stdout
    assert all(found[number] in codes for number, codes in expected.items()), done.stdout
