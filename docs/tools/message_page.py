"""The site's page of every message of zshard, with its exception, its remedy and its file.

The list is made from the sources alone, by messages.py, so no message is written twice. Values
inserted at run time are shown as "…". A message names its own remedy after a colon or a semicolon,
as an imperative (CONTRIBUTING.md): this part has its own column.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import messages

ROOT = messages.ROOT
VALUE = re.compile(
    r"%[-+#0-9.*]*(?:ll|[lzhjt])?[diouxXeEfgGcspRUSA]"  # of C
    r"|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"  # of Python
)
CALL = re.compile(r"\b(?:ZS_FAIL|ZS_FAIL_ERRNO|zs_fail_at|PyErr_Format|PyErr_SetString)\(")
PART = ""
DOCSTRING = re.compile(r"\w+\(.*?\) -- ")  # of a function in C
KIND = re.compile(r"\b(?:ZS_ERR|PyExc)_(\w+)")
KINDS = {  # of csrc/base/status.h
    "VALUE": "ValueError",
    "TYPE": "TypeError",
    "STATE": "RuntimeError",
    "UNSUPPORTED": "NotImplementedError",
    "MEMORY": "MemoryError",
    "SYSTEM": "OSError",
    "SHARD": "ShardError",
    "PEER": "PeerError",
    "TIMEOUT": "PeerTimeoutError",
    "DIVERGED": "DivergenceError",
    "CUDA": "CudaError",
    "NCCL": "NcclError",
    "TORCH": "RuntimeError",
}
VERBS = """access add allow assign back build call capture change check choose clone compute
    convert copy create cut delete detach divide do drop enable end free freeze give import
    include initialize install keep leave let list load log lower make mark modify move
    multiply name omit pass prefer pull put raise read rebuild reinstall remove rename replace
    report restart return run save scale see set shard skip start step store take tie train
    turn unset update upgrade use wait wrap write zero"""
REMEDY = re.compile(
    r"(?:[:;.]|, so) ((?:on all ranks,? |on CPUs,? |(?:if|for|to|with) [^,;:]+, |please |"
    r"or |else |first )?(?:do not|" + "|".join(VERBS.split()) + r")\b.*)$",
    re.DOTALL | re.IGNORECASE,
)
INTRODUCTION = """# Every message

Search this page for a part of your message without names and numbers: "…" stands for these.
[errors.md](errors.md) says what each exception means, and explains the common messages. The last
table has warnings, lines that zshard prints, and pieces of which longer messages are made.
Files are those of `csrc` and `zshard`, which this page is made from.
"""
GROUPS = {  # heading -> folders and files, below csrc and zshard, whose messages it has
    "Wrapping and options": "wrap options precision strategy fsdp model units unit",
    "Shards and values": "guard shim",
    "Training": "engine schedule reduce grad_scaler",
    "Optimizers": "optim optimizers update",
    "Ranks and transports": "ranks comm",
    "Memory, files and devices": "memory offload base pager device",
    "State dicts and checkpoints": "state checkpoint weights",
    "Names of torch": "compat _patches",
    "DeepSpeed": "deepspeed",
    "Trainers": "lightning accelerate transformers peft bitsandbytes",
    "Commands and the build": "run keeping doctor",
}

REST, PARTS = "Everything else", "Warnings, printed lines and pieces of messages"


class Message(NamedTuple):
    """kind: the exception, or PART."""

    kind: str
    text: str
    file: str


def shown(text: str) -> str:
    """The text with … where a value goes, on one line."""
    text = VALUE.sub("…", text.replace("%%", "%").replace("\\n", " ").replace('\\"', '"'))
    return " ".join(text.split())


def kinds_of_python(source: str) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, exception) of each call that makes an exception, inner ones last."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if re.fullmatch(r"[A-Z]\w*(?:Error|Warning)", name):
                yield node.lineno, node.end_lineno or node.lineno, name


def kinds_of_c(source: str) -> Iterator[tuple[int, int, str]]:
    """The same; a call ends with its statement."""
    for call in CALL.finditer(source):
        end = source.find(";\n", call.end())
        kind = KIND.search(source, call.end(), end)
        name = "SYSTEM" if "ERRNO" in call.group() else kind.group(1) if kind else PART
        lines = (source.count("\n", 0, at) + 1 for at in (call.start(), end))
        yield *lines, KINDS.get(name, name)


def comments_in(source: str) -> set[int]:
    """The lines of strings that are statements: comments on the name before them."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    return {node.lineno for node in nodes if isinstance(node.value, ast.Constant)}


def messages_of(path: Path) -> Iterator[Message]:
    """The messages of one file, in the order of their lines."""
    source, name = path.read_text(), str(path.relative_to(ROOT))
    is_python = path.suffix == ".py"
    calls = list(kinds_of_python(source) if is_python else kinds_of_c(source))
    comments = comments_in(source) if is_python else set()
    for text in messages.texts_in(name, source, docstrings=False):
        kinds = [kind for first, last, kind in calls if first <= text.line <= last]
        if text.line not in comments and not (DOCSTRING.match(shown(text.text)) and not is_python):
            yield Message(kinds[-1] if kinds else PART, shown(text.text), name)


def all_messages() -> list[Message]:
    """Of csrc and zshard; a message in several files is listed with the first."""
    found: dict[tuple[str, str], Message] = {}
    for folder in ("csrc", "zshard"):
        for path in messages.files_below([ROOT / folder]):
            for message in messages_of(path):
                found.setdefault((message.kind, message.text), message)
    return list(found.values())


def group_of(message: Message) -> str:
    """The heading above the message."""
    parts = Path(message.file).with_suffix("").parts
    folder = parts[2] if parts[1] in ("integrations", "extras") else parts[1]
    found = (name for name, folders in GROUPS.items() if folder in folders.split())
    return next(found, REST) if message.kind != PART else PARTS


def cell(text: str) -> str:
    """As code, which no renderer changes."""
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`" if text else ""


def row(message: Message) -> str:
    remedy = REMEDY.search(message.text)
    what = message.text[: remedy.start()] if remedy else message.text
    file = message.file.partition("/")[2]
    cells = [cell(what), cell(remedy.group(1) if remedy else ""), cell(file)]
    return f"| {' | '.join([cell(message.kind), *cells] if message.kind else cells)} |"


def table(name: str, found: list[Message]) -> str:
    found = sorted(found, key=lambda message: message.text.lower())
    head = "| message | remedy | file |\n|---|---|---|"
    head = head if found and found[0].kind == PART else f"| exception {head}---|"
    return "\n".join([f"## {name}", "", head, *map(row, found), ""])


def page() -> str:
    by_group: dict[str, list[Message]] = {name: [] for name in (*GROUPS, REST, PARTS)}
    for message in all_messages():
        by_group[group_of(message)].append(message)
    return "\n".join([INTRODUCTION, *(table(*each) for each in by_group.items())])
