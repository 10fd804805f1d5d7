"""The API reference as Markdown, from the docstrings: a page of the site (site_pages.py).

It has the names of `zshard.__all__`, those of the dialects and the adapters for trainers, and the
methods of FSDP(model).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

import zshard

INTRODUCTION = """# API reference

Made from the docstrings, which `help(zshard.FSDP)` prints as well. "Collective" means: call it on
all ranks.
"""
OTHERS = {  # module -> heading
    "zshard.compat": "Names of torch",
    "zshard.deepspeed": "Names of DeepSpeed",
    "zshard.accelerate": "Accelerate",
    "zshard.transformers": "transformers and TRL",
}
ENTRY = re.compile(r'((?:[a-z_*"]|[A-Z0-9_]+\b)[\w*",. ]*): (.*)')
SECTION = re.compile(r"([A-Z][^.]*):")


def markdown(text: str) -> str:
    """A docstring as Markdown: `name: ...` is an item of a list, a heading is bold."""
    lines, code = [], False
    for raw, following in zip(text.splitlines(), [*text.splitlines()[1:], ""], strict=True):
        line = raw.strip()
        code = code and (not line or raw.startswith("    "))
        if code:
            lines.append(raw)
        elif line.endswith("::"):
            lines += [f"**{line[:-2]}**", ""]
            code = True
        elif SECTION.fullmatch(line) and (not following or following.startswith("    ")):
            lines += ["", f"**{line[:-1]}**", ""]
        elif entry := ENTRY.fullmatch(line):
            is_first = not lines or not lines[-1].startswith(("- ", "  "))
            lines += [""] * is_first + [f"- **{entry.group(1)}**: {entry.group(2)}"]
        else:
            in_entry = raw.startswith(" ") and lines and lines[-1].startswith(("- ", "  "))
            lines.append(f"    {line}" if in_entry else line)
    return "\n".join(lines)


class Plain(str):
    """An annotation that a signature shows without quotes."""

    __repr__ = str.__str__


def signature_of(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""

    def plain(annotation: Any) -> Any:
        return Plain(annotation) if isinstance(annotation, str) else annotation

    parameters = [p.replace(annotation=plain(p.annotation)) for p in signature.parameters.values()]
    returned = plain(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def entry(name: str, value: Any, level: int = 3) -> str:
    """One name: a heading, its arguments as code, and its docstring."""
    what = "class " if inspect.isclass(value) else ""
    arguments = "" if issubclass_of(value, Exception) else signature_of(value)
    arguments = re.sub(r", (?=\w+:|\*)", ",\n    ", arguments) if len(arguments) > 60 else arguments
    code = f"```python\n{what}{name}{arguments}\n```"
    text = markdown(inspect.getdoc(value) or "")
    return f"{'#' * level} {name.rpartition('.')[2]}\n\n{code}\n\n{text}\n"


def issubclass_of(value: Any, kind: type) -> bool:
    return inspect.isclass(value) and issubclass(value, kind)


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods that FSDP adds to a module."""
    for name, value in sorted(inspect.getmembers(cls, callable)):
        if not name.startswith("_") and not hasattr(nn.Module, name) and inspect.getdoc(value):
            yield name, value


def heading_of(value: Any) -> str:
    if issubclass_of(value, Optimizer):
        return "Optimizers"
    if issubclass_of(value, Exception):
        return "Exceptions"
    return "Classes and settings" if inspect.isclass(value) else "Functions"


def page() -> str:
    found: dict[str, list[str]] = {"The model": [entry("zshard.FSDP", zshard.FSDP)]}
    found["The model"] += [
        entry(f"model.{name}", value, 4) for name, value in methods_of(zshard.FSDP)
    ]
    for heading in ("Functions", "Classes and settings", "Optimizers", "Exceptions"):
        found[heading] = []
    for name in zshard.__all__:
        value = getattr(zshard, name)
        if name != "FSDP" and not inspect.ismodule(value):
            found[heading_of(value)].append(entry(f"zshard.{name}", value))
    for module, heading in OTHERS.items():
        loaded = importlib.import_module(module)
        values = {name: getattr(loaded, name) for name in loaded.__all__}
        own = [(n, v) for n, v in values.items() if not inspect.ismodule(v) and inspect.getdoc(v)]
        found[heading] = [entry(f"{module}.{name}", value) for name, value in own]
    sections = [f"## {heading}\n\n" + "\n".join(entries) for heading, entries in found.items()]
    return "\n".join([INTRODUCTION, *sections])
